//! The agent as it is run renews the leases of pods, also those that another agent got.

use std::net::Ipv4Addr;
use std::time::Duration;

use dranic_testbed::cluster::Cluster;
use dranic_testbed::kubelet::ClaimConfig;

use crate::node::{self, DRIVER, LIMIT, names, until};
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
