//! Claims that can't be prepared.

use std::time::Duration;

use dranic_testbed::apiserver::{ClaimConfig, claim_json};
use dranic_testbed::cluster::{Cluster, NODE, Pod};
use dranic_testbed::kubelet::Claim;
use serde_json::{Value, json};

use crate::node::{self, DRIVER, LIMIT, assert_says, names, refusal, until};

fn claim(name: &str, uid: &str) -> Claim {
    Claim { namespace: "default".into(), uid: uid.into(), name: name.into() }
}

/// An allocated claim for nic0, changed by `change` behind the scheduler's back.
fn changed(cluster: &Cluster, pod: &Pod, name: &str, change: impl FnOnce(&mut Value)) -> Claim {
    let claim = cluster.claim(name, pod, &names(0..1), &[]).unwrap();
    let mut object = cluster.api.object("resourceclaims", "default", name).unwrap();
    change(&mut object);
    cluster.api.put("resourceclaims", object);
    claim
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_claim() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let error = refusal(&cluster, &claim("nobody", "uid-nobody")).await;
    assert_says(&error, &["claim default/nobody", "get resourceclaims", "not found"]);
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_was_replaced() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    let first = cluster.claim("c", &pod, &names(0..1), &[]).unwrap();
    cluster.api.delete("resourceclaims", "default", "c");
    let second = cluster.claim("c", &pod, &names(0..1), &[]).unwrap();
    assert_ne!(first.uid, second.uid);
    let error = refusal(&cluster, &first).await;
    assert_says(&error, &["claim default/c", &first.uid, "was replaced", &second.uid, "kubelet will ask again"]);
    node::assert_nothing_done(&cluster, &before).await;
    cluster.prepare(std::slice::from_ref(&second)).await.unwrap();
    // The old one's unprepare touches nothing of the new one.
    cluster.unprepare(&[first]).await.unwrap();
    assert_eq!(cluster.status().unwrap().claims.len(), 1);
    cluster.unprepare(&[second]).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_not_allocated() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let uid = cluster.api.create_claim(claim_json("default", "c", "nic", &["r0"], &[]));
    let error = refusal(&cluster, &claim("c", &uid)).await;
    assert_says(&error, &["claim default/c", "not allocated yet", "kubelet will ask again"]);
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_reservation() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    for reserved in [json!([]), Value::Null] {
        let claim = changed(&cluster, &pod, "c", |object| object["status"]["reservedFor"] = reserved);
        let error = refusal(&cluster, &claim).await;
        assert_says(&error, &["claim default/c", "not reserved for a pod yet", "kubelet will try again"]);
    }
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_several_pods_share() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    let pods = |count: usize| -> Value {
        (0..count).map(|n| json!({"resource": "pods", "name": format!("pod-{n}"), "uid": format!("uid-{n}")})).collect()
    };
    for (reserved, words) in [
        (pods(2), ["pods/pod-0", "pods/pod-1"]),
        (pods(256), ["pods/pod-0", "252 more"]),
        (json!([{"apiGroup": "batch", "resource": "jobs", "name": "train", "uid": "u"}]), ["jobs/train", "one pod only"]),
    ] {
        let claim = changed(&cluster, &pod, "shared", |object| object["status"]["reservedFor"] = reserved);
        let error = refusal(&cluster, &claim).await;
        assert_says(&error, &["claim default/shared", words[0], words[1], "one pod only", "ResourceClaimTemplate"]);
    }
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn results_of_other_drivers_are_ignored() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let foreign = json!({"request": "gpu", "driver": "gpu.example.com", "pool": NODE, "device": "Not A Label!"});
    let config = json!({"source": "FromClaim", "requests": [], "opaque": {"driver": "gpu.example.com", "parameters": {"x": 1}}});
    // Nothing of ours.
    let others = changed(&cluster, &pod, "others", |object| {
        object["status"]["allocation"]["devices"] = json!({"results": [foreign], "config": [config]});
    });
    let answer = cluster.kubelet.prepare(DRIVER, std::slice::from_ref(&others)).await.unwrap();
    assert_eq!(answer[&others.uid], Ok(vec![]));
    node::assert_as_before(&cluster, &before);
    // One of ours among others.
    let mixed = changed(&cluster, &pod, "mixed", |object| {
        let devices = &mut object["status"]["allocation"]["devices"];
        devices["results"].as_array_mut().unwrap().insert(0, foreign.clone());
        devices["config"] = json!([config]);
    });
    let answer = cluster.kubelet.prepare(DRIVER, std::slice::from_ref(&mixed)).await.unwrap();
    let devices = answer[&mixed.uid].as_ref().unwrap();
    assert_eq!(devices.iter().map(|d| d.device_name.clone()).collect::<Vec<_>>(), [cluster.device("nic0").unwrap()]);
    assert!(cluster.host_states().unwrap()["nic1"].flags & 1 != 0, "nic1 is nobody's and stays up");
    let claims = [others, mixed];
    node::run(&cluster, &pod).await;
    node::assert_inside(&pod, &names(0..1));
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_gone_before_prepare() {
    let Some((cluster, mut before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claim = cluster.claim("c", &pod, &names(0..2), &[]).unwrap();
    let device = cluster.device("nic1").unwrap();
    node::unplug(&cluster, "nic1");
    before.remove("nic1");
    // At once, and when the inventory has seen it.
    let error = refusal(&cluster, &claim).await;
    assert_says(&error, &["claim default/c", &device, "not on this node"]);
    assert!(error.contains("kubelet will ask again") || error.contains("dranic devices"), "{error}");
    until(LIMIT, "it is not published any more", || !node::published(&cluster).contains_key(&device)).await;
    assert_says(&refusal(&cluster, &claim).await, &["claim default/c", &device, "unplugged", "dranic devices"]);
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_never_was_and_names_that_are_none() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    for (device, words) in [
        ("pci-0000-ff-00-0", ["pci-0000-ff-00-0", "not on this node"]),
        ("../../etc/passwd", ["device", "../../etc/passwd"]),
        ("", ["device", "\"\""]),
    ] {
        let claim = changed(&cluster, &pod, "c", |object| {
            object["status"]["allocation"]["devices"]["results"][0]["device"] = device.into();
        });
        assert_says(&refusal(&cluster, &claim).await, &["claim default/c", words[0], words[1]]);
    }
    let twice = changed(&cluster, &pod, "twice", |object| {
        let results = object["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap();
        results.push(results[0].clone());
    });
    assert_says(&refusal(&cluster, &twice).await, &["claim default/twice", "allocated twice", "delete the claim"]);
    let huge = changed(&cluster, &pod, "huge", |object| {
        let results = object["status"]["allocation"]["devices"]["results"].as_array_mut().unwrap();
        *results = (0..5000).map(|_| results[0].clone()).collect();
    });
    assert_says(&refusal(&cluster, &huge).await, &["claim default/huge", "5000 allocation results", "32"]);
    node::assert_nothing_done(&cluster, &before).await;
}

/// As after a pod was deleted by force: the API allocates its device anew while its containers still end.
#[tokio::test(flavor = "multi_thread")]
async fn a_device_of_a_pod_that_is_ending_is_waited_for() {
    let Some(mut options) = node::options(1) else { return };
    options.arguments = ["--wait-for-device", "10"].map(str::to_owned).to_vec();
    let (cluster, _) = node::start_with(options).await;
    let (a, b) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let first = [cluster.claim("first", &a, &names(0..1), &[]).unwrap()];
    let second = [cluster.claim("second", &b, &names(0..1), &[]).unwrap()];
    cluster.prepare(&first).await.unwrap();
    let begin = std::time::Instant::now();
    let ends = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        cluster.unprepare(&first).await
    };
    let (prepared, ended) = tokio::join!(cluster.prepare(&second), ends);
    prepared.unwrap();
    ended.unwrap();
    let took = begin.elapsed();
    assert!((Duration::from_millis(1500)..Duration::from_secs(4)).contains(&took), "{took:?}");
    cluster.unprepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_another_claim_has() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let (a, b) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let first = [cluster.claim("first", &a, &names(0..1), &[]).unwrap()];
    let second = cluster.claim("second", &b, &names(0..2), &[]).unwrap();
    cluster.prepare(&first).await.unwrap();
    let error = refusal(&cluster, &second).await;
    assert_says(
        &error,
        &["claim default/second", "still held by claim default/first", "of pod a", "until that one is unprepared"],
    );
    assert!(cluster.host_states().unwrap()["nic1"].flags & 1 != 0, "nic1 was not touched");
    cluster.unprepare(&first).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
    // Now it works.
    cluster.prepare(std::slice::from_ref(&second)).await.unwrap();
    cluster.unprepare(&[second]).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_claim_of_a_batch_does_not_take_the_others_down() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let good = cluster.claim("good", &pod, &names(0..1), &[]).unwrap();
    let config = ClaimConfig::from_claim(DRIVER, r#"{"interface": {"mtu": 1}}"#);
    let bad = cluster.claim("bad", &pod, &names(1..2), &[config]).unwrap();
    let claims = [good.clone(), bad.clone(), claim("nobody", "uid-nobody")];
    let answers = cluster.kubelet.prepare(DRIVER, &claims).await.unwrap();
    assert!(answers[&good.uid].is_ok(), "{answers:?}");
    assert_says(answers[&bad.uid].as_ref().unwrap_err(), &["claim default/bad", "interface.mtu"]);
    assert_says(answers["uid-nobody"].as_ref().unwrap_err(), &["claim default/nobody", "not found"]);
    // The kubelet unprepares all of a pod whose prepare failed.
    cluster.unprepare(&claims).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
}
