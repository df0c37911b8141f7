//! What is said of a device, from records and what the kernel has.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use super::content::*;
use crate::attach::engine::{Look, Seen};
use crate::ledger::ClaimRecord;
use crate::netdev::{Address, Link, LinkAddress, address};

const DRIVER: &str = "dra.net";

/// A claim with `count` devices in the phase `phase`, with `more` in each.
fn record(count: usize, phase: &str, more: &Value) -> ClaimRecord {
    let device = |n: usize| {
        let mut device = json!({
            "request": "nic", "pool": "node-a", "device": format!("pci-{n}"), "hardware": {"pci": {"address": "0000:8a:00.0"}},
            "attributes": {}, "host": {
                "index": 7, "name": format!("eth{n}"), "mtu": 9000, "flags": 4099,
                "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
            },
            "plan": {"podLink": format!("rail{n}"), "steps": [], "leftOut": []},
            "phase": phase, "sinceUnixMs": 1_700_000_000_123_u64,
            "times": [{"step": "capture", "micros": 120}, {"step": "down", "micros": 3}]
        });
        for (key, value) in more.as_object().unwrap() {
            device[key] = value.clone();
        }
        device
    };
    serde_json::from_value(json!({
        "claim": {"namespace": "default", "name": "c", "uid": "claim-1"}, "pod": {"name": "p", "uid": "pod-1"},
        "generation": 3, "bootId": "boot-1", "devices": (0..count).map(device).collect::<Vec<_>>()
    }))
    .unwrap()
}

fn look(record: ClaimRecord) -> Look {
    Look { record: Arc::new(record), this_boot: true, seen: BTreeMap::new() }
}

fn seen(mut look: Look, seen: Seen) -> Look {
    look.seen = look.record.devices.iter().map(|d| (d.share(), seen.clone())).collect();
    look
}

fn here(addresses: Vec<Address>) -> Seen {
    let mac = LinkAddress::new(vec![2, 0, 0, 0, 0, 5]);
    Seen::Here(Box::new(Link { name: "rail0".to_owned(), address: Some(mac), ..Link::default() }), addresses)
}

fn ip(text: &str) -> Address {
    let (ip, prefix) = text.split_once('/').unwrap();
    Address::permanent(ip.parse().unwrap(), prefix.parse().unwrap())
}

fn only(look: &Look) -> DeviceState {
    let states = device_states(look);
    assert_eq!(states.len(), 1);
    states[0].clone()
}

fn reason(look: &Look) -> (Reason, String) {
    let state = only(look);
    (state.reason, state.message)
}

#[test]
fn each_phase_has_its_reason() {
    let nothing = json!({});
    assert_eq!(reason(&look(record(1, "prepared", &nothing))).0, Reason::Prepared);
    assert_eq!(reason(&look(record(1, "attaching", &nothing))).0, Reason::Attaching);
    let failed = json!({"lastError": "the name eth0 is taken"});
    assert_eq!(reason(&look(record(1, "prepared", &failed))), (Reason::AttachFailed, "the name eth0 is taken".to_owned()));
    let moved = json!({"times": [{"step": "move", "micros": 15_000}]});
    assert_eq!(reason(&look(record(1, "prepared", &moved))).0, Reason::Released);
    let (stuck, text) = reason(&look(record(1, "releasing", &json!({"lastError": "busy"}))));
    assert!(stuck == Reason::Releasing && text.contains("busy"), "{text}");
    let attached = look(record(1, "attached", &nothing));
    assert_eq!(reason(&seen(attached.clone(), here(Vec::new()))).0, Reason::Attached);
    assert_eq!(reason(&seen(attached.clone(), Seen::Missing)).0, Reason::DeviceGone);
    assert_eq!(reason(&seen(attached.clone(), Seen::NoNamespace)).0, Reason::SandboxGone);
    // That we could not look says nothing of the device.
    assert_eq!(reason(&seen(attached.clone(), Seen::Unknown("EMFILE".to_owned()))).0, Reason::Attached);
    let lost = seen(look(record(1, "attached", &json!({"dhcp": {"lost": "it is over"}}))), here(Vec::new()));
    let (without, text) = reason(&lost);
    assert!(without == Reason::LeaseLost && !without.is_ready() && text.contains("it is over"), "{text}");
    assert_eq!(reason(&Look { this_boot: false, ..attached }).0, Reason::Rebooted);
    for reason in [Reason::Prepared, Reason::AttachFailed, Reason::Released, Reason::DeviceGone, Reason::Rebooted] {
        assert!(!reason.is_ready());
    }
}

/// With an RDMA device and this much more of it.
fn with_rdma(more: &Value) -> Value {
    let mut rdma = json!({
        "name": "mlx5_0", "index": 3, "nodeGuid": "0c42:a103:0065:5f96", "port": 1, "protocol": "RoCE", "mode": "exclusive",
        "charDevices": ["uverbs", "rdmaCm"], "waitForPort": true
    });
    for (key, value) in more.as_object().unwrap() {
        rdma[key] = value.clone();
    }
    json!({"rdma": rdma})
}

#[test]
fn an_rdma_device_that_can_not_be_used_makes_its_device_not_ready_where_containers_wait_for_it() {
    let state = |phase: &str, more: Value| only(&seen(look(record(1, phase, &with_rdma(&more))), here(vec![ip("10.0.0.5/24")])));
    let new = state("attached", json!({}));
    assert!(new.reason == Reason::RdmaNotUsable && new.message.contains("not looked at yet"), "{}", new.message);
    let down = state("attached", json!({"problem": "port 1 of mlx5_0 is DOWN"}));
    assert!(
        down.reason == Reason::RdmaNotUsable && !down.reason.is_ready() && down.message.contains("is DOWN"),
        "{}",
        down.message
    );
    assert!(down.network.is_some(), "it has its addresses");
    assert_eq!((&down.data["rdma"]["problem"], &down.data["rdma"]["gids"]), (&json!("port 1 of mlx5_0 is DOWN"), &Value::Null));
    let patient = state("attached", json!({"problem": "port 1 of mlx5_0 is DOWN", "waitForPort": false}));
    assert!(patient.reason == Reason::Attached && patient.message.contains("is DOWN"), "{}", patient.message);
    let gone = state("attached", json!({"problem": "x", "usable": {"gids": [], "opened": false, "atUnixMs": 0}}));
    assert_eq!(gone.reason, Reason::RdmaNotUsable, "it was usable, and is not any more");
    assert_eq!(state("prepared", json!({})).reason, Reason::Prepared);
}

#[test]
fn data_tells_the_index_of_the_gid_for_each_address_and_stays_small() {
    let gid = |index: u32, gid: &str, kind: &str| json!({"index": index, "gid": gid, "type": kind, "link": "rail0"});
    let mut gids = vec![gid(3, "::ffff:10.0.0.5", "RoCE v2"), gid(0, "fe80::5", "IB/RoCE v1")];
    let usable =
        |gids: &[Value]| with_rdma(&json!({"usable": {"gids": gids, "opened": true, "atUnixMs": 1_700_000_000_123_u64}}));
    let state = only(&seen(look(record(1, "attached", &usable(&gids))), here(Vec::new())));
    assert_eq!(state.reason, Reason::Attached);
    let wanted = json!({
        "device": "mlx5_0", "port": 1, "protocol": "RoCE", "mode": "exclusive", "nodeGuid": "0c42:a103:0065:5f96",
        "usableSince": "2023-11-14T22:13:20.123Z", "opened": true,
        "gids": [
            {"index": 3, "gid": "::ffff:10.0.0.5", "type": "RoCE v2", "address": "10.0.0.5", "link": "rail0"},
            {"index": 0, "gid": "fe80::5", "type": "IB/RoCE v1", "address": null, "link": "rail0"},
        ],
    });
    assert_eq!(state.data["rdma"], wanted);
    gids.extend((4..256).map(|n| gid(n, "fd00:1111:2222:3333:4444:5555:6666:7777", "RoCE v2")));
    let many = only(&look(record(1, "attached", &usable(&gids)))).data;
    assert!(many.to_string().len() < DATA_MAX, "{}", many.to_string().len());
    let kept = many["rdma"]["gids"].as_array().unwrap();
    assert_eq!((kept[0]["index"].as_u64(), kept.len() as u64 + many["rdma"]["gidsMore"].as_u64().unwrap()), (Some(3), 254));
}

#[test]
fn network_data_is_what_the_kernel_has() {
    let mut local = ip("fe80::5/64");
    local.scope = address::SCOPE_LINK;
    let mut taken = ip("fd00::9/64");
    taken.flags |= address::IFA_F_DADFAILED;
    let addresses = vec![local, taken, ip("10.0.0.5/24"), ip("10.0.0.5/24"), ip("fd00:0:0::5/64"), ip("::ffff:192.0.2.1/120")];
    let state = only(&seen(look(record(1, "attached", &json!({}))), here(addresses)));
    let network = state.network.unwrap();
    assert_eq!(network.interface_name.as_deref(), Some("rail0"));
    assert_eq!(network.hardware_address.as_deref(), Some("02:00:00:00:00:05"));
    let ips = network.ips.unwrap();
    assert_eq!(ips, ["10.0.0.5/24", "fd00::5/64", "192.0.2.1/24", "fe80::5/64"]);
    assert!(state.message.contains("fd00::9"), "{}", state.message);
    // A device that is not in the pod has none.
    assert_eq!(only(&look(record(1, "prepared", &json!({})))).network, None);
}

#[test]
fn everything_stays_within_the_limits_of_the_api() {
    let many: Vec<Address> = (0..200).map(|n| ip(&format!("10.1.{n}.1/16"))).collect();
    let left_out: Vec<String> = (0..500).map(|n| format!("route {n} <&>\u{1}\"ä{}", "x".repeat(5000))).collect();
    let more = json!({
        "plan": {"podLink": "rail0", "steps": [], "leftOut": left_out},
        "times": (0..500).map(|n| json!({"step": format!("{n}{}", "s".repeat(300)), "micros": n})).collect::<Vec<_>>(),
    });
    let state = only(&seen(look(record(1, "attached", &more)), here(many)));
    assert_eq!(state.network.unwrap().ips.unwrap().len(), IPS_MAX);
    // As a Go server writes it.
    let text = state.data.to_string().replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
    assert!(text.len() <= 10 << 10, "{} bytes", text.len());
    assert!(state.data["leftOutMore"].as_u64().unwrap() > 0 || state.data["leftOut"].is_null());
    let error = json!({"lastError": "ü".repeat(100_000)});
    let message = only(&look(record(1, "prepared", &error))).message;
    assert!(message.len() <= MESSAGE_MAX && message.ends_with('…'), "{}", message.len());
}

#[test]
fn a_few_reasons_fit_whole() {
    let more = json!({"plan": {"podLink": "rail0", "steps": [], "leftOut": ["route a", "rule b"]}});
    let data = only(&look(record(1, "prepared", &more))).data;
    assert_eq!(data["leftOut"], json!(["route a", "rule b"]));
    assert_eq!(data["leftOutMore"], Value::Null);
    assert_eq!(data["stepMicroseconds"], json!({"capture": 120, "down": 3}));
    assert_eq!((data["hostLink"].as_str(), data["request"].as_str()), (Some("eth0"), Some("nic")));
}

#[test]
fn the_time_changes_only_with_ready() {
    let now = Timestamp::from_second(1_700_000_100).unwrap();
    let prepared = device_states(&look(record(1, "prepared", &json!({}))));
    let first = transitions(&prepared, &Transitions::new(), now);
    let key = &prepared[0].key;
    assert_eq!(first[key], (false, Timestamp::from_second(1_700_000_000).unwrap()), "when it was recorded, in whole seconds");
    let failed = device_states(&look(record(1, "prepared", &json!({"lastError": "x", "sinceUnixMs": 1_700_000_050_000_u64}))));
    assert_eq!(transitions(&failed, &first, now), first);
    let attached = device_states(&look(record(1, "attached", &json!({"sinceUnixMs": 1_700_000_060_000_u64}))));
    let second = transitions(&attached, &first, now);
    assert_eq!(second[key], (true, Timestamp::from_second(1_700_000_060).unwrap()));
    // A time in the future (the clock was set back) or an unknown one is now.
    let odd = device_states(&look(record(1, "attached", &json!({"sinceUnixMs": u64::MAX}))));
    assert_eq!(transitions(&odd, &first, now)[key], (true, now));
    let gone = device_states(&seen(look(record(1, "attached", &json!({}))), Seen::Missing));
    assert_eq!(transitions(&gone, &second, now + 5.seconds())[key], (false, now + 5.seconds()));
}

#[test]
fn the_body_has_every_device_and_what_is_read_back_is_what_was_said() {
    let look = look(record(8, "prepared", &json!({"shareId": "b5a1f0d6-0000-4000-8000-000000000001"})));
    let states = device_states(&look);
    let times = transitions(&states, &Transitions::new(), Timestamp::now());
    let body = apply_body(DRIVER, &look.record.claim, &states, &times);
    assert_eq!(body["metadata"]["uid"], "claim-1");
    let devices = body["status"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 8);
    assert!(devices.iter().all(|d| d["shareID"] == "b5a1f0d6-0000-4000-8000-000000000001" && d["driver"] == DRIVER));
    let condition = &devices[0]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"], &condition["reason"]),
        (&json!("Ready"), &json!("False"), &json!("Prepared"))
    );
    assert_eq!(condition["lastTransitionTime"], "2023-11-14T22:13:20Z");
    let claim: ResourceClaim =
        serde_json::from_value(json!({"metadata": {}, "spec": {}, "status": {"devices": devices}})).unwrap();
    assert_eq!(said(&claim, DRIVER), times);
    assert!(says_anything(&claim, DRIVER) && !says_anything(&claim, "other") && !is_allocated(&claim, DRIVER));
    assert_eq!(said(&claim, "other"), Transitions::new());
}

#[test]
fn nothing_to_say_is_an_empty_list() {
    let claim = record(0, "prepared", &json!({})).claim;
    assert_eq!(apply_body(DRIVER, &claim, &[], &Transitions::new())["status"], json!({"devices": []}));
}
