use std::collections::BTreeMap;
use std::slice;

use super::*;
use crate::attach::Plan;
use crate::config::Restore;
use crate::inventory::{HardwareId, RdmaPart};
use crate::ledger::{Attachment, ClaimRef, PodRef};
use crate::names::{ClaimUid, PodLinkName, PodUid, RdmaDeviceName};
use crate::netdev::{HostState, LinkAddress};
use crate::netns::NetnsId;
use crate::rdma::{Guid, Protocol};

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
    let pod = pod.map(|links| (sandbox(), Place { links, rdma: Ok(Arc::default()) }));
    Links { host: Place { links: Ok(Arc::new(host.to_vec())), rdma: Ok(Arc::default()) }, pods: pod.into_iter().collect() }
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
    let no_host = Place { links: Err("no socket".to_owned()), rdma: Ok(Arc::default()) };
    let no_host = Links { host: no_host, pods: BTreeMap::new() };
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

/// An RDMA device with an index and ports, as netlink shows it.
fn rdma_device(index: u32, guid: u64, ports: &[(u32, PortState)]) -> RdmaState {
    let device =
        crate::rdma::Device { index, name: "mlx5_0".to_owned(), node_guid: Some(Guid(guid)), ..crate::rdma::Device::default() };
    RdmaState { device, ports: ports.iter().copied().collect() }
}

/// A record of a device with the second port of an RDMA device.
fn with_rdma(phase: Phase, mode: NetnsMode) -> ClaimRecord {
    let mut record = record(phase);
    record.devices[0].rdma = Some(RdmaRecord {
        name: RdmaDeviceName::new("mlx5_0").unwrap(),
        index: 5,
        node_guid: Some(Guid(0x50)),
        port: 2,
        protocol: Protocol::Roce,
        mode,
        char_devices: Vec::new(),
        companions: Vec::new(),
        limits: None,
        wait_for_port: true,
        usable: None,
        problem: None,
    });
    record
}

/// What is seen with an RDMA device on the host or in the pod, where the link is well.
fn with_seen(on_host: &[RdmaState], in_pod: &[RdmaState]) -> Links {
    let well = link(POD_INDEX, "eth1", UP, "up");
    let mut links = links(&[link(7, "nic0", 0, "down")], Some(Ok(Arc::new(vec![well]))));
    links.host.rdma = Ok(Arc::new(on_host.to_vec()));
    links.pods.get_mut(&sandbox()).unwrap().rdma = Ok(Arc::new(in_pod.to_vec()));
    links
}

#[test]
fn the_port_counts_where_the_rdma_device_is_and_the_link_is_well() {
    let device = |state| rdma_device(5, 0x50, &[(1, PortState::Down), (2, state)]);
    let (active, down) = (device(PortState::Active), device(PortState::Down));
    for (mode, seen) in [
        (NetnsMode::Shared, (|state: &RdmaState| with_seen(slice::from_ref(state), &[])) as fn(&RdmaState) -> Links),
        (NetnsMode::Exclusive, |state| with_seen(&[], slice::from_ref(state))),
    ] {
        let of = |state: &RdmaState| judged(&with_rdma(Phase::Attached, mode), &seen(state));
        assert_says(of(&active), State::Healthy, &[]);
        assert_says(of(&down), State::Unhealthy, &["RDMA port not active", "port 2 of mlx5_0 is DOWN"]);
        assert_says(of(&rdma_device(5, 0x50, &[(1, PortState::Active)])), State::Unhealthy, &["no port 2"]);
        // Registered anew by its driver.
        assert_says(of(&rdma_device(9, 0x50, &[(2, PortState::Active)])), State::Healthy, &[]);
        // Another one has the index by now.
        assert_says(of(&rdma_device(5, 0x99, &[(2, PortState::Active)])), State::Unhealthy, &["RDMA device gone", "mlx5_0"]);
    }
    // In the other place it is not in the pod's.
    let record = with_rdma(Phase::Attached, NetnsMode::Exclusive);
    assert_says(
        judged(&record, &with_seen(slice::from_ref(&active), &[])),
        State::Unhealthy,
        &["RDMA device gone", "in the pod"],
    );
    // The link is what is to be mended first.
    let mut seen = with_seen(&[], slice::from_ref(&down));
    seen.pods.get_mut(&sandbox()).unwrap().links = Ok(Arc::new(vec![link(POD_INDEX, "eth1", 0, "down")]));
    assert_says(judged(&record, &seen), State::Unhealthy, &["link down"]);
    seen = with_seen(&[], &[active]);
    seen.pods.get_mut(&sandbox()).unwrap().rdma = Err("no answer".to_owned());
    assert_says(judged(&record, &seen), State::Unknown, &["no answer"]);
    // Not claimed.
    assert_says(judged(&self::record(Phase::Attached), &with_seen(&[down], &[])), State::Healthy, &[]);
}

#[test]
fn a_prepared_rdma_device_only_has_to_be_there() {
    let down = rdma_device(5, 0x50, &[(2, PortState::Down)]);
    for mode in [NetnsMode::Shared, NetnsMode::Exclusive] {
        assert_says(judged(&with_rdma(Phase::Prepared, mode), &with_seen(slice::from_ref(&down), &[])), State::Healthy, &[]);
        let gone = judged(&with_rdma(Phase::Prepared, mode), &with_seen(&[], &[]));
        assert_says(gone, State::Unhealthy, &["RDMA device gone", "on the host"]);
        assert_says(judged(&with_rdma(Phase::Releasing, mode), &with_seen(&[], &[])), State::Unknown, &["on its way"]);
    }
}

#[test]
fn a_device_without_link_is_judged_by_its_port() {
    let mut record = with_rdma(Phase::Attached, NetnsMode::Exclusive);
    record.devices[0].host.index = 0;
    let seen = |state| {
        let mut seen = with_seen(&[], &[rdma_device(5, 0x50, &[(2, state)])]);
        seen.pods.get_mut(&sandbox()).unwrap().links = Ok(Arc::default());
        seen
    };
    assert_says(judged(&record, &seen(PortState::Active)), State::Healthy, &[]);
    assert_says(judged(&record, &seen(PortState::Init)), State::Unhealthy, &["port 2 of mlx5_0 is INIT"]);
    let mut nowhere = seen(PortState::Active);
    nowhere.pods.clear();
    assert_says(judged(&record, &nowhere), State::Unknown, &["not open"]);
}

#[test]
fn free_devices_are_judged_by_their_port_too() {
    let hardware = HardwareId::Pci { address: "0000:8a:00.0".to_owned(), port: String::new() };
    let rdma = RdmaPart {
        name: RdmaDeviceName::new("mlx5_0").unwrap(),
        port: 1,
        protocol: Protocol::InfiniBand,
        node_guid: None,
        companions: vec![],
    };
    let device = |link: Option<Link>, rdma: Option<RdmaPart>| Device {
        name: hardware.device_name(),
        hardware: hardware.clone(),
        is_rdma_only: link.is_none(),
        link,
        attributes: BTreeMap::new(),
        rdma,
    };
    let up = || Some(link(8, "nic1", UP, "up"));
    for (device, state, expected) in [
        (device(up(), Some(rdma.clone())), PortState::Active, State::Healthy),
        (device(up(), Some(rdma.clone())), PortState::Down, State::Unhealthy),
        (device(up(), None), PortState::Down, State::Healthy),
        (device(None, Some(rdma.clone())), PortState::Active, State::Healthy),
        (device(None, Some(rdma.clone())), PortState::Init, State::Unhealthy),
        // In exclusive mode it is in a pod, or was until a moment ago.
        (device(None, None), PortState::Active, State::Unknown),
    ] {
        let scan = Scan { devices: vec![device], ..Scan::default() };
        let seen = with_seen(&[rdma_device(5, 0x50, &[(1, state)])], &[]);
        assert_eq!(all("node-1", &scan, [], &seen)[0].state, expected, "{scan:?} {state}");
    }
}
