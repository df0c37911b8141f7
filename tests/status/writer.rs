//! What reaches the API server, whatever it does.

use std::time::Duration;

use dranic::attach::engine::Seen;
use serde_json::json;

use crate::rig::{Rig, attached, until};

#[tokio::test(flavor = "multi_thread")]
async fn one_apply_has_all_devices_and_leaves_other_drivers_alone() {
    let rig = Rig::start().await;
    let claim = rig.claim("c", 8);
    let mut object = rig.server.object("resourceclaims", "default", "c").unwrap();
    let theirs = json!({"driver": "gpu.example", "pool": "node-1", "device": "gpu-0", "data": {"theirs": true}});
    object["status"]["devices"] = json!([theirs]);
    rig.server.put("resourceclaims", object);
    rig.set(&claim, 8, "attached", &json!({}));
    rig.until_said("c", 8, "Attached").await;
    assert_eq!(rig.patches(), 1);
    let devices = rig.server.claim_devices("default", "c");
    assert_eq!(devices.len(), 9);
    assert!(devices.contains(&theirs), "{devices:?}");
    let ours = devices.iter().find(|d| d["device"] == "pci-3").unwrap();
    assert_eq!(ours["networkData"], json!({"interfaceName": "rail3", "ips": ["10.0.0.5/24"]}));
    let patch = rig.server.requests().into_iter().find(|r| r.method == "PATCH").unwrap();
    assert!(patch.query.contains("fieldManager=dra.net") && patch.query.contains("force=true"), "{}", patch.query);
    // Nothing is left of ours when the claim is unprepared.
    rig.forget(&claim);
    until("cleared", || rig.said("c").is_empty().then_some(())).await;
    assert_eq!(rig.server.claim_devices("default", "c"), [theirs]);
    let managers = rig.server.object("resourceclaims", "default", "c").unwrap()["metadata"]["managedFields"].clone();
    assert_eq!(managers, json!([]));
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_tried_until_it_is_written_and_only_the_newest_is_written() {
    let rig = Rig::start().await;
    let claim = rig.claim("c", 2);
    rig.server.faults().next_of("GET", 1, 503, None);
    rig.server.faults().next_of("PATCH", 1, 429, Some(1));
    rig.server.faults().next_of("PATCH", 1, 500, None);
    rig.server.faults().next_of("PATCH", 1, 409, None);
    rig.set(&claim, 2, "attached", &json!({}));
    until("a failure", || (rig.patches() >= 1).then_some(())).await;
    // What is true meanwhile is what is written, a failure too.
    rig.set(&claim, 2, "prepared", &json!({"lastError": "no carrier"}));
    rig.until_said("c", 2, "AttachFailed").await;
    assert!(rig.patches() >= 4, "the faults were not met");
    let message = rig.server.claim_devices("default", "c")[0]["conditions"][0]["message"].clone();
    assert_eq!(message, "no carrier");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_claim_is_not_touched() {
    let rig = Rig::start().await;
    let (known, unknown) = (rig.claim("known", 1), rig.claim("unknown", 1));
    rig.set(&known, 1, "prepared", &json!({}));
    rig.until_said("known", 1, "Prepared").await;
    for name in ["known", "unknown"] {
        assert!(rig.server.delete("resourceclaims", "default", name));
        rig.claim(name, 1);
    }
    rig.set(&known, 1, "attached", &json!({}));
    rig.set(&unknown, 1, "attached", &json!({}));
    rig.quiet().await;
    assert_eq!(rig.said("known"), []);
    assert_eq!(rig.said("unknown"), []);
    // The apply carried the UID, and the server refused it: that was the end of it.
    assert_eq!(rig.patches(), 2);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_is_gone_or_not_allocated_any_more_is_dropped() {
    let rig = Rig::start().await;
    let (gone, freed) = (rig.claim("gone", 1), rig.claim("freed", 1));
    for claim in [&gone, &freed] {
        rig.set(claim, 1, "prepared", &json!({}));
        rig.until_said(&claim.name, 1, "Prepared").await;
    }
    rig.server.delete("resourceclaims", "default", "gone");
    let mut object = rig.server.object("resourceclaims", "default", "freed").unwrap();
    object["status"] = json!({});
    rig.server.put("resourceclaims", object);
    for claim in [&gone, &freed] {
        rig.set(claim, 1, "attached", &json!({}));
    }
    let requests = rig.quiet().await;
    assert_eq!(rig.said("freed"), []);
    // An unprepare of a claim of which nothing is said writes nothing.
    rig.forget(&freed);
    rig.quiet().await;
    assert_eq!(rig.server.requests().len(), requests + 1, "one more look, no write");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_permission_it_is_said_once_and_tried_slowly() {
    let rig = Rig::start_with(|config| config.refused = Duration::from_secs(2)).await;
    rig.server.faults().forbid("PATCH /status");
    let claims = [rig.claim("a", 1), rig.claim("b", 1), rig.claim("c", 1)];
    for claim in &claims {
        rig.set(claim, 1, "attached", &json!({}));
    }
    until("refusals", || (rig.patches() == 3).then_some(())).await;
    let event = until("an event", || rig.server.list("events").into_iter().next()).await;
    assert_eq!(event["reason"], "StatusForbidden");
    let text = event["message"].as_str().unwrap();
    assert!(text.contains(r#"resources ["resourceclaims/status"], verbs ["patch"]"#), "{text}");
    // A change in the meantime does not make it faster.
    rig.set(&claims[0], 1, "attached", &json!({"lastError": "x"}));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(rig.patches(), 3);
    rig.server.faults().allow("PATCH /status");
    // Since 1.36 there is one more permission.
    rig.server.refuse_device_status(true);
    until("refusals of the other kind", || (rig.patches() >= 6).then_some(())).await;
    let named = |e: &serde_json::Value| e["message"].as_str().is_some_and(|m| m.contains("associated-node:patch"));
    until("an event", || rig.server.list("events").iter().any(named).then_some(())).await;
    assert_eq!(rig.server.list("events").len(), 2, "one for each rule");
    rig.server.refuse_device_status(false);
    for claim in &claims {
        rig.until_said(&claim.name, 1, "Attached").await;
    }
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_agent_says_everything_again_and_the_times_stay() {
    let mut rig = Rig::start().await;
    let claim = rig.claim("c", 2);
    rig.set(&claim, 2, "attached", &json!({}));
    rig.until_said("c", 2, "Attached").await;
    let before = rig.server.object("resourceclaims", "default", "c").unwrap();
    rig = rig.restart().await;
    // The ledger has another time by now, as after a new look.
    rig.set(&claim, 2, "attached", &json!({"sinceUnixMs": 1_700_000_999_000_u64}));
    let requests = rig.quiet().await;
    assert!(requests > 0 && rig.patches() == 2, "it was not written again");
    assert_eq!(rig.server.object("resourceclaims", "default", "c").unwrap(), before, "nothing changed, so nothing was stored");
    // Somebody wiped it while the agent was away.
    let mut object = before.clone();
    object["status"].as_object_mut().unwrap().remove("devices");
    rig.server.put("resourceclaims", object);
    rig = rig.restart().await;
    rig.set(&claim, 2, "attached", &json!({}));
    rig.until_said("c", 2, "Attached").await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attached_devices_are_looked_at_again() {
    let rig = Rig::start_with(|config| config.look_again = Duration::from_millis(50)).await;
    let claim = rig.claim("c", 1);
    rig.set(&claim, 1, "attached", &json!({}));
    rig.until_said("c", 1, "Attached").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(rig.patches(), 1, "what is the same is not written again");
    rig.set_seen(&claim, |record| attached(record, "10.9.9.9/16"));
    until("the new address", || {
        (rig.server.claim_devices("default", "c")[0]["networkData"]["ips"] == json!(["10.9.9.9/16"])).then_some(())
    })
    .await;
    rig.set_seen(&claim, |record| record.devices.iter().map(|d| (d.share(), Seen::Missing)).collect());
    rig.until_said("c", 1, "DeviceGone").await;
    let device = &rig.server.claim_devices("default", "c")[0];
    assert!(device["networkData"].is_null() && device["conditions"][0]["status"] == "False", "{device}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_written_yet_is_written_at_the_end() {
    let rig = Rig::start_with(|config| config.settle = Duration::from_secs(3600)).await;
    let claims: Vec<_> = (0..20).map(|n| rig.claim(&format!("c{n}"), 1)).collect();
    for claim in &claims {
        rig.set(claim, 1, "attached", &json!({}));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(rig.patches(), 0);
    let server = rig.end().await;
    for claim in &claims {
        assert_eq!(server.claim_devices("default", &claim.name).len(), 1, "{claim}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_texts_are_cut_to_what_the_server_takes() {
    let rig = Rig::start().await;
    let claim = rig.claim("c", 32);
    let left_out: Vec<String> = (0..300).map(|n| format!("route {n}: <{}>", "&".repeat(300))).collect();
    let more = json!({"lastError": "é".repeat(1 << 20), "plan": {"podLink": "rail0", "steps": [], "leftOut": left_out}});
    rig.set(&claim, 32, "prepared", &more);
    rig.until_said("c", 32, "AttachFailed").await;
    rig.end().await;
}
