//! The agent as it is run renews the leases of pods, also those that another agent got.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options};
use dranic_testbed::fabric::NicSpec;
use dranic_testbed::kubelet::Claim;

use crate::node::{self, DRIVER, LIMIT, PLUGIN, PROGRAM, names, until};
use crate::server::{DISCOVER, Does, Double, Heard, RELEASE, REQUEST};

const LENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 50);

/// For a minute, and to be renewed after two seconds.
fn lend() -> Does {
    let seconds = |n: u32| n.to_be_bytes().to_vec();
    Does::Lend(LENT, 60, vec![(58, seconds(2)), (59, seconds(58))])
}

/// Everything that is heard until something is that `wanted` takes.
async fn heard(server: &Double, what: &str, wanted: impl Fn(&Heard) -> bool) -> Vec<Heard> {
    let mut all = Vec::new();
    until(LIMIT, what, || {
        all.extend(server.take());
        all.iter().any(&wanted)
    })
    .await;
    all
}

fn is_renewal(heard: &Heard) -> bool {
    heard.kind == REQUEST && heard.own == LENT && heard.from == LENT
}

async fn until_said(cluster: &Cluster, reason: &str) {
    until(LIMIT, reason, || cluster.api.claim_devices("default", "c").iter().any(|d| d["conditions"][0]["reason"] == reason))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_renewed_over_a_restart_and_a_lost_one_is_told() {
    let Some((mut cluster, before)) = node::start(1).await else { return };
    let server = Double::start(&cluster.fabric, lend());
    let pod = cluster.pod("a").unwrap();
    let dhcp = ClaimConfig::from_claim(DRIVER, r#"{"interface": {"dhcp": true}}"#);
    let claims = [cluster.claim("c", &pod, &names(0..1), &[dhcp]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    heard(&server, "a renewal from the pod", is_renewal).await;
    until(LIMIT, "it is counted", || {
        let metrics = node::get(&cluster, "/metrics").unwrap().1;
        metrics.contains("dranic_dhcp_leases 1") && !metrics.contains("dranic_dhcp_renewals_total{outcome=\"ok\"} 0")
    })
    .await;

    cluster.kill_agent().unwrap();
    server.take();
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    let all = heard(&server, "a renewal by the next agent", is_renewal).await;
    assert!(all.iter().all(|heard| heard.kind != DISCOVER), "{all:?}");

    server.now_does(Does::Refuse);
    until_said(&cluster, "LeaseLost").await;
    assert!(!pod.look().unwrap().addresses.iter().any(|(_, a)| a.ip == LENT), "{}", cluster.log());
    until(LIMIT, "events on pod and claim", || {
        let events = cluster.api.list("events");
        events.iter().filter(|event| event["reason"] == "LeaseLost").count() == 2
    })
    .await;
    server.now_does(lend());
    until_said(&cluster, "Attached").await;
    assert!(pod.look().unwrap().addresses.iter().any(|(_, a)| a.ip == LENT), "{}", cluster.log());

    server.take();
    node::end(&cluster, &pod, &claims).await;
    heard(&server, "it is given back", |heard| heard.kind == RELEASE && heard.own == LENT).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    node::assert_as_before(&cluster, &before);
}

/// A program that is killed at `point` in its first life.
fn killed_once(dir: &Path, point: &str) -> PathBuf {
    let (script, once) = (dir.join("dranic"), dir.join("once"));
    std::fs::write(&once, "").unwrap();
    let arm = format!("if [ -f '{0}' ]; then rm '{0}'; export DRANIC_TEST_KILL_AT='{point}:1'; fi", once.display());
    std::fs::write(&script, format!("#!/bin/sh\n{arm}\nexec '{PROGRAM}' \"$@\"\n")).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    script
}

/// As the kubelet does: again and again, and somebody starts the agent anew when it has ended.
async fn insist(cluster: &mut Cluster, claims: &[Claim], is_prepare: bool) {
    for _ in 0..20 {
        revive(cluster).await;
        let done = if is_prepare { cluster.prepare(claims).await } else { cluster.unprepare(claims).await };
        if done.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("is_prepare: {is_prepare}\n{}", cluster.log());
}

async fn revive(cluster: &mut Cluster) -> bool {
    let has_ended = cluster.agent.as_mut().unwrap().has_ended();
    if has_ended {
        cluster.start_agent().unwrap();
        cluster.wait_ready(LIMIT).await.unwrap();
        cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    }
    has_ended
}

/// A life with a NIC that is down on the host.
async fn live(point: &str) {
    let dir = tempfile::tempdir().unwrap();
    let nics = node::nics(1).into_iter().map(|nic| NicSpec { up: false, ..nic }).collect();
    let mut cluster = Cluster::new(Options::new(killed_once(dir.path(), point), nics)).unwrap();
    let before = cluster.host_states().unwrap();
    let server = Double::start(&cluster.fabric, lend());
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    let pod = cluster.pod("a").unwrap();
    let dhcp = ClaimConfig::from_claim(DRIVER, r#"{"interface": {"dhcp": true}}"#);
    let claims = [cluster.claim("c", &pod, &names(0..1), &[dhcp]).unwrap()];
    insist(&mut cluster, &claims, true).await;
    node::run(&cluster, &pod).await;
    if point.starts_with("renew") {
        until(LIMIT, "it is killed while it renews", || cluster.agent.as_mut().unwrap().has_ended()).await;
        assert!(revive(&mut cluster).await);
        server.take();
    }
    heard(&server, point, is_renewal).await;
    assert!(pod.look().unwrap().addresses.iter().any(|(_, a)| a.ip == LENT), "{point}: {}", cluster.log());
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    insist(&mut cluster, &claims, false).await;
    revive(&mut cluster).await;
    heard(&server, point, |heard| heard.kind == RELEASE && heard.own == LENT).await;
    assert!(!dir.path().join("once").exists(), "{point}");
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_killed_at_any_step_of_a_lease_loses_nothing() {
    if !dranic_testbed::fabric::root() {
        return;
    }
    if !cfg!(debug_assertions) {
        println!("skipped: a release build has no points to be killed at");
        return;
    }
    let points = [
        "prepare: recorded",
        "prepare: asking",
        "prepare: leased",
        "renew: answered",
        "renew: in the pod",
        "unprepare: leases given back",
    ];
    futures_util::future::join_all(points.map(live)).await;
}
