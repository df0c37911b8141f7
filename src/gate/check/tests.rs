//! Each thing that can be wrong, one at a time.

use serde_json::{Value, json};

use super::*;
use crate::netdev::link::IFF_UP;

const BOOT: &str = "boot-1";
const HERE: NetnsId = NetnsId { dev: 4, ino: 100 };

/// A device that is attached in [`HERE`] as `rail<n>`, up, with an address; with `more` in it.
fn device(n: u32, more: &Value) -> Value {
    let mut device = json!({
        "request": "nic", "pool": "node-a", "device": format!("veth-{n}"),
        "hardware": {"virtual": {"kind": "veth", "address": mac(n), "twin": null}}, "attributes": {},
        "host": {
            "index": n, "name": format!("eth{n}"), "mtu": 9000, "flags": 4099, "address": mac(n),
            "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
        },
        "plan": {"podLink": format!("rail{n}"), "steps": [
            {"step": "move", "name": format!("rail{n}"), "mtu": null, "address": null}, {"step": "up"},
            {"step": "address", "address": Address::permanent(ip(n), 24)}
        ]},
        "phase": "attached", "sinceUnixMs": 1, "lastError": null,
        "attachment": {"sandbox": "sand", "netnsPath": "/x", "netns": HERE, "index": n}
    });
    for (key, value) in more.as_object().unwrap() {
        device[key] = value.clone();
    }
    device
}

fn mac(n: u32) -> String {
    format!("02:00:00:00:00:{n:02x}")
}

fn ip(n: u32) -> std::net::IpAddr {
    format!("10.0.{n}.1").parse().unwrap()
}

fn record(uid: &str, devices: Vec<Value>) -> ClaimRecord {
    serde_json::from_value(json!({
        "claim": {"namespace": "ml", "name": uid, "uid": uid}, "pod": {"name": "trainer", "uid": "pod-1"},
        "generation": 3, "bootId": BOOT, "devices": devices
    }))
    .unwrap()
}

/// Links, and addresses by the index of their link.
type Inside = (Vec<Link>, Vec<(u32, Address)>);

/// The links and addresses of `count` devices that are as they should be.
fn inside(count: u32) -> Inside {
    let link = |n: u32| Link {
        index: n,
        name: format!("rail{n}"),
        kind: Some("veth".to_owned()),
        address: Some(mac(n).parse().unwrap()),
        flags: IFF_UP,
        ..Link::default()
    };
    ((1..=count).map(link).collect(), (1..=count).map(|n| (n, Address::permanent(ip(n), 24))).collect())
}

fn verdict(records: &[ClaimRecord], (links, addresses): &Inside) -> Verdict {
    check(records, &Seen { netns: HERE, boot_id: BOOT, links, addresses, rdma: &[] })
}

#[test]
fn everything_in_place_is_complete_and_so_is_nothing() {
    let none = json!({});
    let records = [record("a", vec![device(1, &none), device(2, &none)]), record("b", vec![device(3, &none)])];
    assert_eq!(verdict(&records, &inside(3)), Verdict::Complete);
    assert_eq!(verdict(&[], &inside(0)), Verdict::Complete);
}

#[test]
fn a_device_that_is_not_here_is_lacking_whatever_its_link() {
    let elsewhere = json!({"sandbox": "old", "netnsPath": "/y", "netns": {"dev": 4, "ino": 101}, "index": 2});
    for (more, words) in [
        (json!({"phase": "prepared", "attachment": null}), "not in the pod yet"),
        (json!({"phase": "attaching"}), "on its way into"),
        (json!({"phase": "releasing"}), "on its way back"),
        (json!({"attachment": elsewhere}), "another sandbox of the pod, old"),
        (json!({"attachment": null}), "not in the pod yet"),
    ] {
        let mut more = more;
        more["lastError"] = json!("it burns");
        let records = [record("a", vec![device(1, &json!({}))]), record("b", vec![device(2, &more)])];
        let Verdict::Lacking(lack) = verdict(&records, &inside(2)) else { panic!("{more}") };
        assert_eq!((lack.claim.as_str(), lack.device.as_str(), lack.more), ("ml/b", "veth-2", 0));
        assert!(lack.what.contains(words), "{}", lack.what);
        assert_eq!(lack.last_error.as_deref(), Some("it burns"));
    }
}

#[test]
fn a_link_that_went_away_or_is_another_one_is_lacking() {
    let records = [record("a", vec![device(1, &json!({})), device(2, &json!({}))])];
    let Verdict::Lacking(lack) = verdict(&records, &inside(0)) else { panic!() };
    assert_eq!((lack.device.as_str(), lack.more), ("veth-1", 1));
    let mut another = inside(2);
    another.0[1].address = Some(mac(9).parse().unwrap());
    let Verdict::Lacking(lack) = verdict(&records, &another) else { panic!() };
    assert!(lack.device == "veth-2" && lack.what.contains("rail2"), "{lack:?}");
}

#[test]
fn what_the_pod_changed_itself_is_told_apart() {
    let records = [record("a", vec![device(1, &json!({}))])];
    let altered = |change: fn(&mut Inside)| {
        let mut seen = inside(1);
        change(&mut seen);
        match verdict(&records, &seen) {
            Verdict::Altered(lack) => lack.what,
            other => panic!("{other:?}"),
        }
    };
    assert!(altered(|(links, _)| "eth9".clone_into(&mut links[0].name)).contains("called eth9, not rail1"));
    assert!(altered(|(links, _)| links[0].flags = 0).contains("is down"));
    assert!(altered(|(_, addresses)| addresses.clear()).contains("no address 10.0.1.1/24"));
    assert!(altered(|(_, addresses)| addresses[0].0 = 7).contains("no address 10.0.1.1/24"));
    assert!(altered(|(_, addresses)| addresses[0].1.prefix_len = 25).contains("no address 10.0.1.1/24"));
}

#[test]
fn records_of_before_a_reboot_and_claims_of_others_are_refused() {
    let mut old = record("a", vec![device(1, &json!({}))]);
    "boot-0".clone_into(&mut old.boot_id);
    let Verdict::Refused(why) = verdict(&[old], &inside(1)) else { panic!() };
    assert!(why.contains("ml/a") && why.contains("rebooted"), "{why}");

    let (uid, pod, other) = (ClaimUid::new("a").unwrap(), PodUid::new("pod-1").unwrap(), PodUid::new("pod-2").unwrap());
    let record = record("a", Vec::new());
    assert_eq!(admit(&uid, Some(&record), &pod), Ok(()));
    let why = admit(&uid, Some(&record), &other).unwrap_err();
    assert!(why.contains("ml/a") && why.contains("in pod ml/trainer") && why.contains("ResourceClaimTemplate"), "{why}");
    let why = admit(&uid, None, &pod).unwrap_err();
    assert!(why.contains("UID a") && why.contains("not prepared"), "{why}");
}

const RDMA: u32 = 3;

/// As [`device`] 1, with an RDMA device; with `more` in that.
fn with_rdma(mode: &str, more: &Value) -> Value {
    let mut rdma = json!({
        "name": "mlx5_0", "index": RDMA, "nodeGuid": "0c42:a103:0065:5f96", "port": 1, "protocol": "RoCE", "mode": mode,
        "charDevices": ["uverbs"], "waitForPort": true, "usable": {"gids": [], "opened": false, "atUnixMs": 1}
    });
    for (key, value) in more.as_object().unwrap() {
        rdma[key] = value.clone();
    }
    device(1, &json!({"rdma": rdma}))
}

fn seen(index: u32, guid: &str) -> Vec<rdma::Device> {
    vec![rdma::Device { index, name: "rdma9".to_owned(), node_guid: guid.parse().ok(), ..rdma::Device::default() }]
}

fn rdma_verdict(device: Value, links: u32, rdma: &[rdma::Device]) -> Verdict {
    let (links, addresses) = inside(links);
    let seen = Seen { netns: HERE, boot_id: BOOT, links: &links, addresses: &addresses, rdma };
    check(&[record("a", vec![device])], &seen)
}

#[test]
fn a_moved_rdma_device_must_be_in_the_pod_by_index_or_guid() {
    const GUID: &str = "0c42:a103:0065:5f96";
    let exclusive = || with_rdma("exclusive", &json!({}));
    assert_eq!(rdma_verdict(exclusive(), 1, &seen(RDMA, GUID)), Verdict::Complete);
    assert_eq!(rdma_verdict(exclusive(), 1, &seen(77, GUID)), Verdict::Complete, "its driver was bound anew");
    for others in [vec![], seen(RDMA, "0c42:a103:0065:5f97"), seen(77, "0c42:a103:0065:5f97"), seen(RDMA, "")] {
        let Verdict::Lacking(lack) = rdma_verdict(exclusive(), 1, &others) else { panic!("{others:?}") };
        assert!(lack.what.contains("RDMA device mlx5_0 is not in the pod"), "{}", lack.what);
    }
    let without_guid = with_rdma("exclusive", &json!({"nodeGuid": null}));
    assert_eq!(rdma_verdict(without_guid, 1, &seen(RDMA, "")), Verdict::Complete);
    assert_eq!(rdma_verdict(with_rdma("shared", &json!({})), 1, &[]), Verdict::Complete, "in shared mode nothing moves");
}

#[test]
fn what_is_not_usable_yet_is_waited_for_where_that_is_wanted() {
    let unusable = |wait: bool| {
        let more = json!({"usable": null, "problem": "10.0.1.1 has no GID", "waitForPort": wait});
        rdma_verdict(with_rdma("shared", &more), 1, &[])
    };
    let Verdict::Lacking(lack) = unusable(true) else { panic!() };
    assert!(lack.what.contains("can't be used yet: 10.0.1.1 has no GID"), "{}", lack.what);
    assert_eq!(unusable(false), Verdict::Complete);
}

#[test]
fn a_device_without_a_link_has_none_to_be_looked_for() {
    let mut linkless = with_rdma("shared", &json!({}));
    linkless["host"]["index"] = json!(0);
    assert_eq!(rdma_verdict(linkless.clone(), 0, &[]), Verdict::Complete);
    linkless["rdma"]["usable"] = json!(null);
    assert!(matches!(rdma_verdict(linkless.clone(), 0, &[]), Verdict::Lacking(_)));
    linkless["phase"] = json!("prepared");
    assert!(matches!(rdma_verdict(linkless, 0, &[]), Verdict::Lacking(_)));
}
