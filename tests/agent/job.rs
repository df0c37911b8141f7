//! The main path: pods get their NICs, use them, and give them back.

use std::time::Duration;

use dranic::ledger::Phase;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::{NicSpec, links, new_netns, ping};
use dranic_testbed::runtime::{RuntimeOptions, What};

use crate::node::{self, LIMIT, PROGRAM, names, until};

/// nic0 and nic1 of pod a and nic2 and nic3 of pod b, on two rails.
fn two_by_two() -> Vec<NicSpec> {
    let nic = |n: u32, address: &str| NicSpec {
        name: format!("nic{n}"),
        rail: n % 2,
        mtu: Some(9000),
        up: true,
        addresses: vec![address.parse().unwrap()],
        ..NicSpec::default()
    };
    vec![nic(0, "10.1.0.1/24"), nic(1, "10.1.1.1/24"), nic(2, "172.16.0.2/24"), nic(3, "172.16.1.2/24")]
}

/// The class sets MTU and an address, the claim another address and names: field by field the claim's wins, the class's MTU stays.
fn configs(driver: &str) -> Vec<ClaimConfig> {
    let class = r#"{"interface": {"mtu": 4000, "addresses": ["192.0.2.9/24"]}}"#;
    let of = |n: u32| {
        let text = format!(r#"{{"interface": {{"name": "rail{n}", "addresses": ["10.1.{n}.2/24"]}}}}"#);
        ClaimConfig { requests: vec![format!("r{n}")], ..ClaimConfig::from_claim(driver, &text) }
    };
    // Another driver's parameters, which would be wrong for ours.
    vec![ClaimConfig::from_class(driver, class), of(0), of(1), ClaimConfig::from_claim("gpu.example.com", r#"{"mode": "x"}"#)]
}

fn ping_both_ways(a: &Pod, b: &Pod) {
    let (from, to) = (a.netns.netns().unwrap(), b.netns.netns().unwrap());
    for n in 0..2 {
        let (source, target) = (format!("10.1.{n}.1").parse().unwrap(), format!("10.1.{n}.2").parse().unwrap());
        ping(&from, source, target, Duration::from_secs(5)).unwrap();
        ping(&to, target, source, Duration::from_secs(5)).unwrap();
    }
}

async fn main_job(options: Options) -> Option<Cluster> {
    node::options(0)?;
    let driver = options.driver.clone();
    let (cluster, before) = node::start_with(options).await;
    let (a, b) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [
        cluster.claim("claim-a", &a, &names(0..2), &[]).unwrap(),
        cluster.claim("claim-b", &b, &names(2..4), &configs(&driver)).unwrap(),
    ];
    cluster.prepare(&claims).await.unwrap();
    node::assert_phase(&cluster, 4, Phase::Prepared);
    for pod in [&a, &b] {
        node::run(&cluster, pod).await;
    }
    node::assert_phase(&cluster, 4, Phase::Attached);
    let inside = b.look().unwrap();
    for n in 0..2 {
        let link = inside.links.iter().find(|l| l.name == format!("rail{n}")).unwrap();
        assert_eq!(link.mtu, 4000, "the class's MTU");
        let addresses: Vec<String> =
            inside.addresses.iter().filter(|(i, a)| *i == link.index && a.ip.is_ipv4()).map(|(_, a)| a.ip.to_string()).collect();
        assert_eq!(addresses, [format!("10.1.{n}.2")], "the claim's address");
    }
    ping_both_ways(&a, &b);
    node::end(&cluster, &a, &claims[..1]).await;
    node::end(&cluster, &b, &claims[1..]).await;
    node::assert_as_before(&cluster, &before);
    Some(cluster)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pods_get_their_nics_and_give_them_back() {
    main_job(Options::new(PROGRAM, two_by_two())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_drivers_name_may_be_dra_net() {
    main_job(Options { driver: "dra.net".to_owned(), ..Options::new(PROGRAM, two_by_two()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_of_before_nri_0_12_sends_events() {
    let runtime = |socket| RuntimeOptions::old(socket);
    let Some(cluster) = main_job(Options { runtime, ..Options::new(PROGRAM, two_by_two()) }).await else { return };
    let log = cluster.runtime.log().all();
    let by_event =
        |e: &&dranic_testbed::runtime::Event| matches!(&e.what, What::Request { method, .. } if method == "StateChange");
    assert!(log.iter().filter(by_event).count() >= 6, "{log:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prepare_again_gives_the_same_answer_and_changes_nothing() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claim = cluster.claim("c", &pod, &names(0..2), &[]).unwrap();
    let claims = std::slice::from_ref(&claim);
    let first = cluster.kubelet.prepare(node::DRIVER, claims).await.unwrap();
    let devices = first[&claim.uid].as_ref().unwrap();
    assert_eq!(devices.iter().map(|d| d.request_names.clone()).collect::<Vec<_>>(), [["r0"], ["r1"]]);
    assert_eq!(devices[0].device_name, cluster.device("nic0").unwrap());
    assert_eq!(devices[0].pool_name, dranic_testbed::cluster::NODE);
    let status = cluster.status().unwrap();
    for _ in 0..3 {
        assert_eq!(cluster.kubelet.prepare(node::DRIVER, claims).await.unwrap(), first);
    }
    assert_eq!(cluster.status().unwrap().claims, status.claims);
    node::run(&cluster, &pod).await;
    // The kubelet lost its checkpoint: it asks for a claim whose pod runs.
    assert_eq!(cluster.kubelet.prepare(node::DRIVER, claims).await.unwrap(), first);
    node::assert_inside(&pod, &names(0..2));
    node::end(&cluster, &pod, claims).await;
    // Unprepare again, and of a claim nobody knows.
    cluster.unprepare(claims).await.unwrap();
    let unknown = dranic_testbed::kubelet::Claim { namespace: "default".into(), uid: "nobody".into(), name: "nobody".into() };
    cluster.unprepare(&[unknown]).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_stay_published_unchanged_while_they_are_lent() {
    let Some((cluster, before)) = node::start(3).await else { return };
    let published = node::published(&cluster);
    assert_eq!(published.len(), 3);
    cluster.api.clear_requests();
    let pod = cluster.pod("a").unwrap();
    let config =
        ClaimConfig { requests: vec!["r0".into()], ..ClaimConfig::from_claim(node::DRIVER, r#"{"interface": {"mtu": 1400}}"#) };
    let claim = cluster.claim("c", &pod, &names(0..2), &[config]).unwrap();
    let claims = std::slice::from_ref(&claim);
    cluster.prepare(claims).await.unwrap();
    node::run(&cluster, &pod).await;
    // Longer than the inventory and the publisher gather changes.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(node::published(&cluster), published);
    node::end(&cluster, &pod, claims).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(node::published(&cluster), published);
    assert_eq!(cluster.api.slice_writes(), vec![], "slices were written though nothing changed");
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nic_that_comes_or_goes_is_in_the_slices_within_3_s() {
    let Some((cluster, _)) = node::start(2).await else { return };
    let other_end = new_netns().unwrap();
    let veth = links::Veth { name: "nic9", peer: "peer9", peer_netns: Some(&other_end), ..links::Veth::default() };
    veth.create(&mut cluster.node.socket().unwrap()).unwrap();
    until(Duration::from_secs(3), "nic9 is published", || cluster.device("nic9").is_ok()).await;
    let gone = cluster.device("nic1").unwrap();
    node::unplug(&cluster, "nic1");
    until(Duration::from_secs(3), "nic1 is not published", || !node::published(&cluster).contains_key(&gone)).await;
    assert_eq!(node::published(&cluster).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_sandbox_is_made_anew_gets_its_nics_again() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claim = cluster.claim("c", &pod, &names(0..2), &[]).unwrap();
    let claims = std::slice::from_ref(&claim);
    cluster.prepare(claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let again = cluster.sandbox("a", &pod.uid, 1).unwrap();
    // The kubelet stops the old one first.
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    node::run(&cluster, &again).await;
    node::assert_inside(&again, &names(0..2));
    node::assert_empty(&pod);
    // A late Remove of the old one touches nothing.
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    node::assert_inside(&again, &names(0..2));
    node::end(&cluster, &again, claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn unprepare_without_stop_gives_everything_back() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claim = cluster.claim("c", &pod, &names(0..2), &[]).unwrap();
    let claims = std::slice::from_ref(&claim);
    cluster.prepare(claims).await.unwrap();
    node::run(&cluster, &pod).await;
    tokio::time::timeout(LIMIT, cluster.unprepare(claims)).await.unwrap().unwrap();
    node::assert_empty(&pod);
    node::assert_as_before(&cluster, &before);
}
