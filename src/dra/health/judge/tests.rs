use std::collections::BTreeMap;

use super::*;
use crate::attach::Plan;
use crate::config::Restore;
use crate::inventory::HardwareId;
use crate::ledger::{Attachment, ClaimRef, PodRef};
use crate::names::{ClaimUid, PodLinkName, PodUid};
use crate::netdev::{HostState, LinkAddress};
use crate::netns::NetnsId;

const UP: u32 = 1 | IFF_LOWER_UP;
const POD_INDEX: u32 = 70;

fn mac(last: u8) -> LinkAddress {
    LinkAddress::new(vec![2, 0, 0, 0, 0, last])
}

fn link(index: u32, name: &str, flags: u32, oper_state: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        kind: Some("veth".to_owned()),
        flags,
        oper_state: oper_state.to_owned(),
        address: Some(mac(1)),
        ..Link::default()
    }
}

fn hardware() -> HardwareId {
    HardwareId::Virtual { kind: "veth".to_owned(), address: Some(mac(1)), twin: None }
}

fn sandbox() -> SandboxId {
    SandboxId::new("sandbox-a").unwrap()
}

fn host() -> HostState {
    let text = r#"{"index":7,"name":"nic0","mtu":1500,"address":"02:00:00:00:00:01","flags":1,"addresses":[],"routes":[],
        "rules":[],"neighbours":[],"sysctls":{}}"#;
    serde_json::from_str(text).unwrap()
}

fn record(phase: Phase) -> ClaimRecord {
    let attachment = Attachment {
        sandbox: sandbox(),
        netns_path: "/var/run/netns/a".into(),
        netns: NetnsId { dev: 4, ino: 4_026_531_840 },
        index: POD_INDEX,
    };
    let device = DeviceRecord {
        share_id: None,
        request: "r".to_owned(),
        pool: "node-1".to_owned(),
        device: hardware().device_name(),
        hardware: hardware(),
        attributes: BTreeMap::new(),
        host: host(),
        plan: Plan {
            pod_link: PodLinkName::new("eth1").unwrap(),
            steps: Vec::new(),
            left_out: Vec::new(),
            restore: Restore::Full,
        },
        phase,
        attachment: (phase != Phase::Prepared).then_some(attachment),
        times: Vec::new(),
        dhcp: None,
        rdma: None,
        last_error: None,
        since_unix_ms: 0,
    };
    ClaimRecord {
        claim: ClaimRef { namespace: "default".to_owned(), name: "c".to_owned(), uid: ClaimUid::new("c1").unwrap() },
        pod: PodRef { name: "p".to_owned(), uid: PodUid::new("p1").unwrap() },
        pod_claim_name: None,
        generation: 1,
        boot_id: "boot".to_owned(),
        missed: None,
        devices: vec![device],
    }
}

fn links(host: &[Link], pod: Option<Seen>) -> Links {
    Links {
        host: Ok(Arc::new(host.to_vec())),
        pods: pod.into_iter().map(|seen| (sandbox(), seen)).collect(),
        ports: RdmaPorts::new(),
    }
}

/// State and message of the record's only device.
fn judged(record: &ClaimRecord, links: &Links) -> (State, String) {
    let health = health(record, links);
    assert_eq!((health.len(), health[0].pool.as_str()), (1, "node-1"));
    assert_eq!(health[0].device, record.devices[0].device);
    (health[0].state, health[0].message.clone())
}

fn inside(link: Link) -> (State, String) {
    judged(&record(Phase::Attached), &links(&[], Some(Ok(Arc::new(vec![link])))))
}

#[track_caller]
fn assert_says((state, text): (State, String), wanted: State, words: &[&str]) {
    assert_eq!(state, wanted, "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(text.is_empty(), wanted == State::Healthy, "{text}");
}

#[test]
fn in_a_pod_the_link_there_is_what_counts() {
    assert_says(inside(link(POD_INDEX, "eth1", UP, "up")), State::Healthy, &[]);
    assert_says(inside(link(POD_INDEX, "eth1", UP, "unknown")), State::Healthy, &[]);
    assert_says(inside(link(POD_INDEX, "eth1", 1, "unknown")), State::Unhealthy, &["link down", "eth1", "no carrier"]);
    assert_says(inside(link(POD_INDEX, "eth1", 1, "down")), State::Unhealthy, &["link down", "eth1", "no carrier", "in the pod"]);
    assert_says(inside(link(POD_INDEX, "eth1", 0, "down")), State::Unhealthy, &["link down", "administratively"]);
    for state in ["lowerlayerdown", "dormant", "notpresent", "testing"] {
        assert_says(inside(link(POD_INDEX, "eth1", UP, state)), State::Unhealthy, &["link down", state]);
    }
}

#[test]
fn a_link_that_is_not_in_the_pod_is_gone() {
    let here = links(&[], Some(Ok(Arc::default())));
    assert_says(judged(&record(Phase::Attached), &here), State::Unhealthy, &["device gone", "eth1"]);
    // What is there under another index and address is another one.
    let mut other = link(3, "eth1", UP, "up");
    other.address = Some(mac(9));
    assert_says(inside(other), State::Unhealthy, &["device gone"]);
}

#[test]
fn a_pod_may_rename_its_link_and_change_its_address() {
    let mut changed = link(POD_INDEX, "fabric0", UP, "up");
    changed.address = Some(mac(9));
    assert_says(inside(changed), State::Healthy, &[]);
}

#[test]
fn what_can_not_be_looked_at_is_unknown() {
    assert_says(judged(&record(Phase::Attached), &links(&[], None)), State::Unknown, &["not open"]);
    let unread = links(&[], Some(Err("the kernel did not answer".to_owned())));
    assert_says(judged(&record(Phase::Attached), &unread), State::Unknown, &["the kernel did not answer"]);
    let no_host = Links { host: Err("no socket".to_owned()), pods: BTreeMap::new(), ports: RdmaPorts::new() };
    assert_says(judged(&record(Phase::Prepared), &no_host), State::Unknown, &["no socket"]);
}

#[test]
fn a_prepared_device_is_down_because_of_us_and_only_has_to_be_there() {
    let down = [link(7, "nic0", 0, "down")];
    assert_says(judged(&record(Phase::Prepared), &links(&down, None)), State::Healthy, &[]);
    assert_says(judged(&record(Phase::Prepared), &links(&[], None)), State::Unhealthy, &["device gone", "nic0"]);
    for phase in [Phase::Attaching, Phase::Releasing] {
        assert_says(judged(&record(phase), &links(&down, None)), State::Healthy, &[]);
        assert_says(judged(&record(phase), &links(&[], None)), State::Unknown, &["on its way"]);
    }
}

#[test]
fn free_devices_are_judged_by_their_link_and_lent_ones_by_the_record() {
    let device = |n: u8, link: Option<Link>| {
        let hardware = HardwareId::Virtual { kind: "veth".to_owned(), address: Some(mac(n)), twin: None };
        Device { name: hardware.device_name(), hardware, link, attributes: BTreeMap::new(), rdma: None, is_rdma_only: false }
    };
    let scan = Scan {
        devices: vec![
            device(1, None),
            device(2, Some(link(8, "nic1", UP, "up"))),
            device(3, Some(link(9, "nic2", 1, "down"))),
            device(4, Some(link(10, "nic3", 0, "down"))),
        ],
        ..Scan::default()
    };
    let pods = links(&[], Some(Ok(Arc::new(vec![link(POD_INDEX, "eth1", UP, "up")]))));
    let record = record(Phase::Attached);
    let states = |records: &[&ClaimRecord]| -> Vec<State> {
        all("node-1", &scan, records.iter().copied(), &pods).iter().map(|d| d.state).collect()
    };
    assert_eq!(states(&[&record]), [State::Healthy, State::Healthy, State::Unhealthy, State::Unknown]);
    // Given back since the scan.
    assert_eq!(states(&[]), [State::Unknown, State::Healthy, State::Unhealthy, State::Unknown]);
}

#[test]
fn a_long_message_is_cut_between_characters() {
    let long = links(&[], Some(Err("ü".repeat(3000))));
    let (_, text) = judged(&record(Phase::Attached), &long);
    assert!(text.len() <= MESSAGE_MAX && text.len() > MESSAGE_MAX - 2, "{}", text.len());
    assert!(text.ends_with('ü'));
}

/// A record of a device with an RDMA device.
fn with_rdma(phase: Phase) -> ClaimRecord {
    let mut record = record(phase);
    record.devices[0].attributes.insert("rdmaDevice".to_owned(), Attribute::String("mlx5_0".to_owned()));
    record
}

#[test]
fn rdma_ports_count_where_the_link_is_well() {
    let seen = |ports: &[(u32, &str)], pod: Link| {
        let mut links = links(&[link(7, "nic0", 0, "down")], Some(Ok(Arc::new(vec![pod]))));
        links.ports.insert("mlx5_0".to_owned(), ports.iter().map(|(number, state)| (*number, (*state).to_owned())).collect());
        links
    };
    let well = || link(POD_INDEX, "eth1", UP, "up");
    let of = |phase, links: &Links| judged(&with_rdma(phase), links);

    assert_says(of(Phase::Attached, &seen(&[(1, "ACTIVE")], well())), State::Healthy, &[]);
    let down = of(Phase::Attached, &seen(&[(1, "DOWN")], well()));
    assert_says(down, State::Unhealthy, &["RDMA port not active", "port 1 of mlx5_0 is DOWN"]);
    assert_says(of(Phase::Attached, &seen(&[(1, "INIT"), (2, "ACTIVE")], well())), State::Healthy, &[]);
    let both = of(Phase::Attached, &seen(&[(1, "INIT"), (2, "DOWN")], well()));
    assert_says(both, State::Unhealthy, &["port 1 of mlx5_0 is INIT", "port 2 of mlx5_0 is DOWN"]);
    // The link is what is to be mended first.
    let link_down = of(Phase::Attached, &seen(&[(1, "DOWN")], link(POD_INDEX, "eth1", 0, "down")));
    assert_says(link_down, State::Unhealthy, &["link down"]);
    // Taken down by us.
    assert_says(of(Phase::Prepared, &seen(&[(1, "DOWN")], well())), State::Healthy, &[]);
    // Moved into the pod, or another device's.
    assert_says(of(Phase::Attached, &links(&[], Some(Ok(Arc::new(vec![well()]))))), State::Healthy, &[]);
    assert_says(judged(&record(Phase::Attached), &seen(&[(1, "DOWN")], well())), State::Healthy, &[]);
}
