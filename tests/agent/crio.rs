//! The agent under CRI-O's order of calls. CRI-O is not among the runtimes that tests run for real: no package has it. What is
//! replayed here is what its source (1.36, NRI 0.11) does otherwise than containerd:
//!
//! - pod events come as `StateChange`, without an exchange of NRI's versions;
//! - StopPodSandbox comes last, when containers have ended and the namespace's file is unmounted and removed. Nothing but the
//!   agent's own handle keeps the namespace then, and with it NICs without hardware;
//! - an error from Stop would fail the kubelet's request, which is repeated then, and Stop with it;
//! - pods from before a restart are remembered, and their Stop is told;
//! - stopped sandboxes are in Synchronize, with a path that leads nowhere, until they are removed;
//! - a pod on the host's network has a path as well, which leads to the node's own namespace (`tests/bad_input/pods.rs` has that).
//!
//! Not replayed: pods without a pause process and CRI-O's own time in each request. Not possible here: a NIC that the kernel itself
//! returns when a namespace ends goes to the machine's first namespace, not to that of a scratch node; a test moves it instead.

use std::os::fd::AsFd;
use std::path::Path;

use dranic::ledger::Phase;
use dranic::netdev::{Link, link, moves};
use dranic::netlink::RouteSocket;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::links;
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::{RuntimeOptions, SandboxSpec, What};

use crate::node::{self, Before, DRIVER, LIMIT, PLUGIN, names, until};

/// A node whose runtime behaves as CRI-O, with `count` NICs.
async fn start(count: u32) -> Option<(Cluster, Before)> {
    let options = node::options(count)?;
    Some(node::start_with(Options { runtime: |socket| RuntimeOptions::crio(socket), ..options }).await)
}

/// A pod with a claim for all NICs of a node, running.
async fn running(cluster: &Cluster, count: u32) -> (Pod, [Claim; 1]) {
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..count), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(cluster, &pod).await;
    node::assert_inside(&pod, &names(0..count));
    (pod, claims)
}

/// Ends the namespace as CRI-O does before it tells anybody: no process is in it any more, and its file goes.
fn end_namespace(pod: Pod) -> SandboxSpec {
    drop(pod.netns);
    assert!(!Path::new(pod.sandbox.netns_path.as_ref().unwrap()).exists());
    pod.sandbox
}

/// StopPodSandbox in CRI-O's order. An error would be the kubelet's, and it would not get any further with the pod.
async fn stop(cluster: &Cluster, pod: Pod) -> SandboxSpec {
    let sandbox = end_namespace(pod);
    let told = cluster.runtime.stop_pod_sandbox(&sandbox.id).await;
    assert_eq!((told.error, told.asked), (None, vec![PLUGIN.to_owned()]), "{}", cluster.log());
    sandbox
}

/// The rest of a pod's end.
async fn end(cluster: &Cluster, sandbox: &SandboxSpec, claims: &[Claim]) {
    cluster.unprepare(claims).await.unwrap();
    cluster.runtime.remove_pod_sandbox(&sandbox.id).await.result().unwrap();
}

/// The cables that still have a NIC at their other end, wherever that is.
fn cables(cluster: &Cluster) -> usize {
    let mut fabric = RouteSocket::open_in(cluster.fabric.netns()).unwrap();
    link::list(&mut fabric, links::soon()).unwrap().iter().filter(|l| l.name.starts_with("port")).count()
}

fn on_host(cluster: &Cluster) -> Vec<Link> {
    let all = link::list(&mut cluster.node.socket().unwrap(), links::soon()).unwrap();
    all.into_iter().filter(|l| l.name.starts_with("nic")).collect()
}

/// What the kernel does with hardware when a namespace ends: it is on the host, down, under the name it had in the pod.
fn kernel_returns(cluster: &Cluster, pod: &Pod, name: &str) {
    let mut inside = RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    let index = links::find(&mut inside, name).unwrap().index;
    let host = cluster.node.netns();
    let back = moves::Move { index, target: host.as_fd(), new_index: 900, name: name.to_owned(), mtu: None, address: None };
    inside.request(moves::request(&back), links::soon()).unwrap();
}

async fn all_prepared(cluster: &Cluster) {
    let prepared = || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared);
    until(LIMIT, "all devices are released", prepared).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nics_without_hardware_outlive_the_namespaces_file() {
    for dedicated_rpcs in [false, true] {
        let Some(options) = node::options(4) else { return };
        let runtime: fn(_) -> _ = match dedicated_rpcs {
            false => |socket| RuntimeOptions::crio(socket),
            // 1.37, with NRI 0.12.
            true => {
                |socket| RuntimeOptions { dedicated_rpcs: true, nri_version: "v0.12.0".into(), ..RuntimeOptions::crio(socket) }
            }
        };
        let (cluster, before) = node::start_with(Options { runtime, ..options }).await;
        let (pod, claims) = running(&cluster, 4).await;
        assert!(on_host(&cluster).is_empty());
        let sandbox = stop(&cluster, pod).await;
        all_prepared(&cluster).await;
        assert_eq!((on_host(&cluster).len(), cables(&cluster)), (4, 4));
        end(&cluster, &sandbox, &claims).await;
        node::assert_as_before(&cluster, &before);
        let by_event = |what: &What| matches!(what, What::Request { method, .. } if method == "StateChange");
        let events = cluster.runtime.log().all().iter().filter(|e| by_event(&e.what)).count();
        assert_eq!(events, if dedicated_rpcs { 0 } else { 3 }, "Run, Stop, Remove");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_was_killed_holds_the_namespaces_of_running_pods_again() {
    let Some((mut cluster, before)) = start(2).await else { return };
    let (pod, claims) = running(&cluster, 2).await;
    for _ in 0..2 {
        cluster.kill_agent().unwrap();
        cluster.start_agent().unwrap();
        cluster.wait_ready(LIMIT).await.unwrap();
    }
    let sandbox = stop(&cluster, pod).await;
    end(&cluster, &sandbox, &claims).await;
    node::assert_as_before(&cluster, &before);
}

/// Nobody holds the namespace: what has no hardware is gone, what has is on the host. Then the agent is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_ends_while_the_agent_is_away_keeps_nothing_and_blocks_nobody() {
    let Some((mut cluster, before)) = start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let config = ClaimConfig {
        requests: vec!["r0".into()],
        ..ClaimConfig::from_claim(DRIVER, r#"{"interface": {"name": "rail0", "mtu": 1400}}"#)
    };
    let claims = [cluster.claim("c", &pod, &names(0..2), &[config]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    cluster.kill_agent().unwrap();
    kernel_returns(&cluster, &pod, "rail0");
    let sandbox = end_namespace(pod);
    assert_eq!(cluster.runtime.stop_pod_sandbox(&sandbox.id).await.asked, Vec::<String>::new());
    until(LIMIT, "the kernel has ended the namespace", || cables(&cluster) == 1).await;

    // The sandbox is listed still, with its path.
    cluster.start_agent().unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    until(LIMIT, "the kubelet has the driver", || cluster.status().is_ok_and(|s| s.kubelet == "registered")).await;
    // Stop failed elsewhere in CRI-O, so that it is told after all, again and again.
    for _ in 0..3 {
        assert_eq!(cluster.runtime.relay_stop(&sandbox).await.result(), Ok(()), "{}", cluster.log());
    }
    tokio::time::timeout(LIMIT, cluster.unprepare(&claims)).await.unwrap().unwrap();
    assert_eq!(cluster.runtime.relay_stop(&sandbox).await.result(), Ok(()));
    end(&cluster, &sandbox, &claims).await;
    let one: Before = before.into_iter().filter(|(name, _)| name == "nic0").collect();
    node::assert_as_before(&cluster, &one);
    let offered = || cluster.device("nic0").is_ok() && cluster.device("nic1").is_err();
    until(LIMIT, "what is back is offered, and what is gone is not", offered).await;
    assert!(!cluster.log().contains("could not be attached"), "{}", cluster.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_comes_again_and_after_unprepare_and_is_answered_well() {
    let Some((cluster, before)) = start(2).await else { return };
    let (pod, claims) = running(&cluster, 2).await;
    let sandbox = stop(&cluster, pod).await;
    for _ in 0..3 {
        assert_eq!(cluster.runtime.relay_stop(&sandbox).await.result(), Ok(()));
    }
    cluster.unprepare(&claims).await.unwrap();
    assert_eq!(cluster.runtime.relay_stop(&sandbox).await.result(), Ok(()));
    end(&cluster, &sandbox, &claims).await;
    node::assert_as_before(&cluster, &before);

    // A forced deletion: unprepare comes first, while the pod still runs.
    let (pod, claims) = {
        let pod = cluster.pod("b").unwrap();
        let claims = [cluster.claim("d", &pod, &names(0..2), &[]).unwrap()];
        cluster.prepare(&claims).await.unwrap();
        node::run(&cluster, &pod).await;
        (pod, claims)
    };
    cluster.unprepare(&claims).await.unwrap();
    let sandbox = stop(&cluster, pod).await;
    cluster.runtime.remove_pod_sandbox(&sandbox.id).await.result().unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_sandbox_gets_the_nics_of_one_whose_namespace_is_gone() {
    let Some((cluster, before)) = start(4).await else { return };
    let (pod, claims) = running(&cluster, 4).await;
    let uid = pod.uid.clone();
    let old = stop(&cluster, pod).await;
    let again = cluster.sandbox("a", &uid, 1).unwrap();
    // At once: the NICs may still be on their way back.
    node::run(&cluster, &again).await;
    node::assert_inside(&again, &names(0..4));
    cluster.runtime.remove_pod_sandbox(&old.id).await.result().unwrap();
    assert_eq!(cluster.runtime.relay_stop(&old).await.result(), Ok(()));
    node::assert_inside(&again, &names(0..4));
    let sandbox = stop(&cluster, again).await;
    end(&cluster, &sandbox, &claims).await;
    node::assert_as_before(&cluster, &before);
}

/// Run fails: Stop and Remove come before the namespace goes, unlike later.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_failed_leaves_everything_for_the_next() {
    let Some((cluster, before)) = start(3).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..3), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    links::create(&mut RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap(), "bridge", "nic2").unwrap();
    let failed = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    node::assert_says(&failed.error.unwrap(), &["nic2"]);
    let uid = pod.uid.clone();
    end_namespace(pod);
    assert_eq!((on_host(&cluster).len(), cables(&cluster)), (3, 3));
    let again = cluster.sandbox("a", &uid, 1).unwrap();
    node::run(&cluster, &again).await;
    node::assert_inside(&again, &names(0..3));
    let sandbox = stop(&cluster, again).await;
    end(&cluster, &sandbox, &claims).await;
    node::assert_as_before(&cluster, &before);
}

/// CRI-O restarts. What it stopped while we were not connected is released by what it lists; what it stops later it tells.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_before_a_restart_are_told_or_missed_in_the_list() {
    let Some((mut cluster, before)) = start(2).await else { return };
    let (a, b) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c1", &a, &names(0..1), &[]).unwrap(), cluster.claim("c2", &b, &names(1..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &a).await;
    node::run(&cluster, &b).await;
    cluster.runtime.stop(false).await;
    let sandbox = end_namespace(a);
    cluster.runtime.remove_pod_sandbox(&sandbox.id).await.result().unwrap();
    cluster.runtime.up().unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    until(LIMIT, "the NIC of the sandbox that is not listed is back", || on_host(&cluster).len() == 1).await;
    node::assert_inside(&b, &names(1..2));
    let sandbox = stop(&cluster, b).await;
    all_prepared(&cluster).await;
    assert_eq!(on_host(&cluster).len(), 2, "before the kubelet asks for anything");
    end(&cluster, &sandbox, &claims).await;
    node::assert_as_before(&cluster, &before);
}
