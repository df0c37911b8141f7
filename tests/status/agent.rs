//! The whole agent on a scratch node.

use std::time::Duration;

use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::{self, NicSpec, links};
use dranic_testbed::kubelet::Claim;
use serde_json::{Value, json};

use crate::rig::{SOON, until};

const DRIVER: &str = "dranic.dev";

/// A cluster with `count` NICs called nic0, nic1, … None (and a line that says so) without root.
async fn start(count: u32) -> Option<Cluster> {
    start_with(count, &[]).await
}

async fn start_with(count: u32, arguments: &[&str]) -> Option<Cluster> {
    if !fabric::root() {
        println!("skipped: needs root for network namespaces");
        return None;
    }
    let nic = |n: u32| NicSpec {
        name: format!("nic{n}"),
        rail: n,
        up: true,
        addresses: vec![format!("10.0.{n}.1/24").parse().unwrap()],
        ..NicSpec::default()
    };
    let mut options = Options::new(env!("CARGO_BIN_EXE_dranic"), (0..count).map(nic).collect());
    options.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Some(Cluster::start(options).await.unwrap())
}

fn nics(count: u32) -> Vec<String> {
    (0..count).map(|n| format!("nic{n}")).collect()
}

fn devices(cluster: &Cluster, claim: &Claim) -> Vec<Value> {
    cluster.api.claim_devices("default", &claim.name)
}

/// Waits until every device of the claim has this reason; gives the entries.
async fn until_said(cluster: &Cluster, claim: &Claim, reason: &str) -> Vec<Value> {
    let log = || format!("{reason}; {:?}\n{}", devices(cluster, claim), cluster.log());
    let begin = std::time::Instant::now();
    loop {
        let said = devices(cluster, claim);
        if !said.is_empty() && said.iter().all(|d| d["conditions"][0]["reason"] == reason) {
            return said;
        }
        assert!(begin.elapsed() < SOON, "{}", log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn event(cluster: &Cluster, kind: &str, reason: &str) -> Value {
    until(&format!("event {reason} on a {kind}"), || {
        let events = cluster.api.list("events");
        events.into_iter().find(|e| e["involvedObject"]["kind"] == kind && e["reason"] == reason)
    })
    .await
}

async fn run(cluster: &Cluster, pod: &Pod) -> bool {
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_follows_the_devices() {
    let Some(cluster) = start(2).await else { return };
    let pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(2), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    let said = until_said(&cluster, &claim, "Prepared").await;
    assert_eq!(said.len(), 2);
    assert!(said.iter().all(|d| d["conditions"][0]["status"] == "False" && d["networkData"].is_null()), "{said:?}");

    assert!(run(&cluster, &pod).await, "{}", cluster.log());
    let said = until_said(&cluster, &claim, "Attached").await;
    let inside = pod.look().unwrap();
    for entry in &said {
        let name = entry["networkData"]["interfaceName"].as_str().unwrap();
        let link = inside.links.iter().find(|l| l.name == name).unwrap();
        assert_eq!(entry["networkData"]["hardwareAddress"], link.address.as_ref().unwrap().to_string());
        let ips = entry["networkData"]["ips"].as_array().unwrap();
        let global: Vec<String> = inside
            .addresses
            .iter()
            .filter(|(i, a)| *i == link.index && a.scope == 0)
            .map(|(_, a)| format!("{}/{}", a.ip, a.prefix_len))
            .collect();
        assert!(!global.is_empty() && global.iter().all(|ip| ips.contains(&json!(ip))), "{ips:?} {global:?}");
        assert_eq!((&entry["driver"], &entry["conditions"][0]["status"]), (&json!(DRIVER), &json!("True")));
        let steps = entry["data"]["stepMicroseconds"].as_object().unwrap();
        assert!(["capture", "down", "move", "configure"].iter().all(|step| steps[*step].is_u64()), "{steps:?}");
        assert_eq!(entry["data"]["hostLink"], name);
    }

    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    let said = until_said(&cluster, &claim, "Released").await;
    assert!(said.iter().all(|d| d["networkData"].is_null()), "{said:?}");
    cluster.unprepare(std::slice::from_ref(&claim)).await.unwrap();
    until("cleared", || devices(&cluster, &claim).is_empty().then_some(())).await;
    assert_eq!(cluster.api.list("events"), Vec::<Value>::new(), "nothing a user must know");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_is_said_even_when_the_server_was_busy_then_and_the_next_try_corrects_it() {
    let Some(cluster) = start(1).await else { return };
    let pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    until_said(&cluster, &claim, "Prepared").await;
    links::create(&mut dranic::netlink::RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap(), "bridge", "nic0").unwrap();
    cluster.api.faults().next_of("PATCH", 3, 503, None);
    assert!(!run(&cluster, &pod).await, "the name is taken in the pod");
    let said = until_said(&cluster, &claim, "AttachFailed").await;
    assert_eq!(said[0]["conditions"][0]["status"], "False");
    assert!(said[0]["conditions"][0]["message"].as_str().unwrap().contains("nic0"), "{said:?}");
    let on_pod = event(&cluster, "Pod", "AttachFailed").await;
    assert_eq!((&on_pod["involvedObject"]["name"], &on_pod["involvedObject"]["uid"]), (&json!(pod.name), &json!(pod.uid)));
    let again = cluster.sandbox("p", &pod.uid, 1).unwrap();
    assert!(run(&cluster, &again).await, "{}", cluster.log());
    until_said(&cluster, &claim, "Attached").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_agent_writes_what_the_old_one_could_not_and_sees_what_went_away() {
    let Some(mut cluster) = start(2).await else { return };
    let pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(2), &[]).unwrap();
    cluster.api.faults().next_of("PATCH", 1000, 503, None);
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    assert!(run(&cluster, &pod).await, "{}", cluster.log());
    assert_eq!(devices(&cluster, &claim), Vec::<Value>::new());
    cluster.kill_agent().unwrap();
    cluster.api.faults().clear();
    cluster.start_agent().unwrap();
    until_said(&cluster, &claim, "Attached").await;
    cluster.kill_agent().unwrap();
    let mut inside = dranic::netlink::RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    let lost = links::find(&mut inside, "nic1").unwrap();
    links::delete(&mut inside, lost.index).unwrap();
    cluster.start_agent().unwrap();
    until("DeviceGone", || {
        let said = devices(&cluster, &claim);
        said.iter().any(|d| d["conditions"][0]["reason"] == "DeviceGone").then_some(())
    })
    .await;
    let said = devices(&cluster, &claim);
    assert_eq!(said.len(), 2);
    assert!(said.iter().any(|d| d["conditions"][0]["status"] == "True"), "the other one is still there: {said:?}");
    event(&cluster, "Pod", "DeviceGone").await;
    event(&cluster, "ResourceClaim", "DeviceGone").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_prepare_is_one_event_on_the_claim() {
    let Some(cluster) = start(1).await else { return };
    let (pod, other) = (cluster.pod("p").unwrap(), cluster.pod("other").unwrap());
    let first = cluster.claim("first", &pod, &nics(1), &[]).unwrap();
    let second = cluster.claim("second", &other, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&first)).await.unwrap();
    for _ in 0..3 {
        cluster.prepare(std::slice::from_ref(&second)).await.unwrap_err();
    }
    let event = event(&cluster, "ResourceClaim", "ClaimPrepareFailed").await;
    assert_eq!((&event["involvedObject"]["name"], &event["involvedObject"]["uid"]), (&json!("second"), &json!(second.uid)));
    assert!(event["message"].as_str().unwrap().contains("still held by claim"), "{event}");
    until("a count of 3", || {
        let events = cluster.api.list("events");
        (events.len() == 1 && events[0]["count"] == 3).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_in_the_hosts_network_is_told_so() {
    let Some(cluster) = start(1).await else { return };
    let mut pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    pod.sandbox.netns_path = None;
    assert!(!run(&cluster, &pod).await);
    let event = event(&cluster, "Pod", "HostNetworkPod").await;
    assert!(event["message"].as_str().unwrap().contains("hostNetwork"), "{event}");
    until_said(&cluster, &claim, "AttachFailed").await;
}

/// A pod whose claim is prepared, and whose container runs, by a runtime that no agent was connected to. The API server forbids one kind of
/// request, if it is named.
async fn missed(policy: &str, forbidden: &str) -> Option<(Cluster, Pod, Claim)> {
    let mut cluster = start_with(1, &["--on-missed-sandbox", policy]).await?;
    let uid = cluster.api.add_pod("default", "p", "node-1");
    let pod = cluster.sandbox("p", &uid, 0).unwrap();
    let claim = cluster.claim("c", &pod, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    cluster.kill_agent().unwrap();
    cluster.runtime.add_pod(pod.sandbox.clone(), vec![pod.container("main")]);
    if !forbidden.is_empty() {
        cluster.api.faults().forbid(forbidden);
    }
    cluster.start_agent().unwrap();
    Some((cluster, pod, claim))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missed_sandbox_is_attached_late_and_said_so() {
    let Some((cluster, pod, claim)) = missed("attach", "").await else { return };
    let said = until_said(&cluster, &claim, "AttachedLate").await;
    assert_eq!(said[0]["conditions"][0]["status"], "True", "{said:?}");
    assert_eq!(said[0]["networkData"]["interfaceName"], "nic0", "{said:?}");
    assert!(said[0]["conditions"][0]["message"].as_str().unwrap().contains("containers main"), "{said:?}");
    let told = event(&cluster, "Pod", "SandboxMissed").await;
    assert!(told["message"].as_str().unwrap().contains("attached now"), "{told}");
    event(&cluster, "Pod", "AttachedLate").await;
    // In the pod's next sandbox all is well.
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    let next = cluster.sandbox("p", &pod.uid, 1).unwrap();
    assert!(run(&cluster, &next).await, "{}", cluster.log());
    until_said(&cluster, &claim, "Attached").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missed_sandbox_is_only_told_of_where_that_is_wanted() {
    let Some((cluster, pod, claim)) = missed("event", "").await else { return };
    let said = until_said(&cluster, &claim, "SandboxMissed").await;
    assert_eq!(said[0]["conditions"][0]["status"], "False", "{said:?}");
    let told = event(&cluster, "Pod", "SandboxMissed").await;
    assert!(told["message"].as_str().unwrap().contains("stay on the host"), "{told}");
    assert!(pod.links_up().unwrap().is_empty());
    assert!(cluster.api.object("pods", "default", "p").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_a_missed_sandbox_is_evicted_where_that_is_wanted() {
    let Some((cluster, pod, claim)) = missed("evict", "").await else { return };
    until("the eviction", || cluster.api.object("pods", "default", "p").is_none().then_some(())).await;
    until_said(&cluster, &claim, "SandboxMissed").await;
    event(&cluster, "Pod", "SandboxMissed").await;
    assert!(pod.links_up().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_may_not_be_evicted_is_told_of() {
    let Some((cluster, _pod, _claim)) = missed("evict", "POST /eviction").await else { return };
    let told = event(&cluster, "Pod", "NotEvicted").await;
    let text = told["message"].as_str().unwrap();
    assert!(text.contains("pods/eviction") && text.contains("verbs [\"create\"]"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_could_not_be_restored_on_the_host_is_an_event() {
    let Some(cluster) = start(1).await else { return };
    let pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    assert!(run(&cluster, &pod).await, "{}", cluster.log());
    links::create(&mut cluster.node.socket().unwrap(), "bridge", "nic0").unwrap();
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    cluster.unprepare(std::slice::from_ref(&claim)).await.unwrap();
    let event = event(&cluster, "ResourceClaim", "HostStateNotRestored").await;
    assert!(event["message"].as_str().unwrap().contains("nic0"), "{event}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_hangs_holds_up_neither_pods_nor_the_end() {
    let Some(mut cluster) = start(1).await else { return };
    let pod = cluster.pod("p").unwrap();
    let claim = cluster.claim("c", &pod, &nics(1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    cluster.api.faults().set_latency(Duration::from_secs(3600));
    let begin = std::time::Instant::now();
    assert!(run(&cluster, &pod).await, "{}", cluster.log());
    assert!(begin.elapsed() < Duration::from_secs(2));
    let (status, took) = cluster.agent.take().unwrap().terminate().unwrap();
    assert!(status.success() && took < Duration::from_secs(10), "{status} after {took:?}");
}
