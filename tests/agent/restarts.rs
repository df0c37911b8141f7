//! Restarts of everything but the agent.

use dranic::ledger::Phase;
use dranic_testbed::cluster::NODE;
use dranic_testbed::kubelet::KubeletDouble;

use crate::node::{self, DRIVER, LIMIT, PLUGIN, names, until};

#[tokio::test(flavor = "multi_thread")]
async fn kubelet_api_server_and_runtime_restart_while_a_pod_runs() {
    let Some((mut cluster, before)) = node::start(3).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let published = node::published(&cluster);

    // The kubelet deletes every slice of its node when it starts, and forgets its plugins.
    cluster.kubelet = KubeletDouble::start(&cluster.path("kubelet")).unwrap();
    assert!(cluster.api.delete_all_slices() > 0);
    cluster.kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
    cluster.api.wait_slices(LIMIT, |slices| !slices.is_empty()).await.unwrap();
    assert_eq!(node::published(&cluster), published);

    // The API server drops all watches, and forgets old resource versions; then the slices are deleted behind our back.
    cluster.api.drop_watches();
    cluster.api.expire_watches();
    cluster.api.delete_all_slices();
    cluster.api.wait_slices(LIMIT, |slices| !slices.is_empty()).await.unwrap();
    assert_eq!(node::published(&cluster), published);
    assert!(cluster.api.slices().iter().all(|s| s["spec"]["nodeName"] == NODE));

    // The runtime restarts and tells nobody of the older pods' end.
    cluster.runtime.restart().await.unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    node::assert_phase(&cluster, 2, Phase::Attached);
    node::assert_inside(&pod, &names(0..2));
    cluster.runtime.create_container(&pod.sandbox.id, &pod.container("after")).await.result().unwrap();
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_is_killed_and_comes_back_finds_us_again() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    for _ in 0..2 {
        cluster.runtime.stop(false).await;
        until(LIMIT, "the agent has noticed", || !cluster.status().unwrap().nri_connected).await;
        cluster.runtime.up().unwrap();
        cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    }
    cluster.wait_ready(LIMIT).await.unwrap();
    node::run(&cluster, &pod).await;
    node::assert_inside(&pod, &names(0..2));
    // The sandbox ends while the runtime is down, and is not listed afterwards.
    cluster.runtime.stop(false).await;
    cluster.runtime =
        dranic_testbed::runtime::RuntimeDouble::start(dranic_testbed::runtime::RuntimeOptions::new(cluster.path("nri.sock")))
            .unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    until(LIMIT, "it is released", || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared)).await;
    node::assert_empty(&pod);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_that_somebody_deletes_come_back() {
    let Some((cluster, _)) = node::start(1).await else { return };
    let registration = cluster.path("kubelet/plugins_registry/dranic.dev-reg.sock");
    std::fs::remove_file(&registration).unwrap();
    until(LIMIT, "the registration socket is there again", || registration.exists()).await;
    cluster.kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
}
