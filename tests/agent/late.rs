//! Sandboxes that were made without the agent.

use std::time::Duration;

use dranic::ledger::Phase;

use crate::node::{self, LIMIT, PLUGIN, names, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_made_while_the_agent_was_down_is_attached_and_its_containers_wait_for_that() {
    let Some((mut cluster, before)) = node::start(8).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..8), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    cluster.kill_agent().unwrap();
    until(LIMIT, "the runtime has dropped the plugin", || cluster.runtime.plugins().is_empty()).await;
    assert_eq!(cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error, None, "nobody is asked");
    node::assert_empty(&pod);
    cluster.start_agent().unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    // The first request that the runtime relays: it waits, and is let through with everything there.
    cluster.start_container(&pod, "main", &[]).await.unwrap();
    node::assert_inside(&pod, &names(0..8));
    cluster.wait_ready(LIMIT).await.unwrap();
    node::assert_phase(&cluster, 8, Phase::Attached);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn synchronize_alone_attaches_a_missed_sandbox() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    cluster.kill_agent().unwrap();
    cluster.runtime.add_pod(pod.sandbox.clone(), vec![pod.container("main")]);
    cluster.start_agent().unwrap();
    until(LIMIT, "the NICs are in the pod", || pod.links_up().unwrap().len() == 2).await;
    cluster.wait_ready(LIMIT).await.unwrap();
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_of_a_missed_sandbox_attaches_there_and_then() {
    let Some((cluster, before)) = node::start(4).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..4), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    // The runtime never asked, as with a claim that was prepared behind its sandbox.
    cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
    cluster.start_container(&pod, "main", &[]).await.unwrap_or_else(|e| panic!("{e}\n{}", cluster.log()));
    node::assert_inside(&pod, &names(0..4));
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_claim_prepared_later_joins_the_running_sandbox() {
    let Some((cluster, before)) = node::start(3).await else { return };
    let pod = cluster.pod("a").unwrap();
    let first = [cluster.claim("first", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&first).await.unwrap();
    node::run(&cluster, &pod).await;
    let second = [cluster.claim("second", &pod, &names(2..3), &[]).unwrap()];
    cluster.prepare(&second).await.unwrap();
    cluster.start_container(&pod, "next", &[]).await.unwrap();
    node::assert_inside(&pod, &names(0..3));
    node::end(&cluster, &pod, &[first, second].concat()).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_are_not_ours_pass_quickly_also_on_the_hosts_network() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let mut pod = cluster.pod("other").unwrap();
    for host_network in [false, true] {
        if host_network {
            pod.sandbox.netns_path = None;
        }
        let run = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
        let create = cluster.runtime.create_container(&pod.sandbox.id, &pod.container("main")).await;
        let stop = cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await;
        for relay in [run, create, stop] {
            assert_eq!(relay.error, None);
            assert_eq!(relay.asked, [PLUGIN]);
            // Microseconds on a quiet machine; this one is not.
            assert!(relay.elapsed < Duration::from_millis(250), "{:?}", relay.elapsed);
        }
    }
    node::assert_as_before(&cluster, &before);
}
