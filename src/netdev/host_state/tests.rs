use super::super::address::{FOREVER, IFA_F_DADFAILED};
use super::super::bpf::{Attached, Holder, Place, Program, Xdp};
use super::super::ethtool::{Group, Numbers};
use super::super::{Link, NextHop};
use super::*;

fn route(destination: &str) -> Route {
    Route::to(destination.parse().unwrap())
}

fn ip(text: &str) -> std::net::IpAddr {
    text.parse().unwrap()
}

fn state() -> HostState {
    let mut finite = Address::permanent(ip("10.0.1.1"), 24);
    (finite.valid_lifetime, finite.preferred_lifetime) = (600, 300);
    let mut multipath = route("10.2.0.0/16");
    multipath.next_hops = vec![NextHop::by(7, Some(ip("10.0.0.8"))), NextHop::by(8, None)];
    let mut ends = route("2001:db8::/32");
    // RTA_PREF medium, RTA_EXPIRES 9.
    ends.other = "05001400000000000800170009000000".into();
    HostState {
        index: 7,
        name: "rail0".into(),
        alt_names: vec!["enp1s0".into(), "other".into()],
        alias: Some("first".into()),
        mtu: 9000,
        min_mtu: Some(68),
        max_mtu: Some(9000),
        address: Some("02:00:00:00:00:01".parse().unwrap()),
        flags: IFF_UP | IFF_MULTICAST,
        tx_queue_len: Some(1000),
        group: 0,
        sizes: PacketSizes { gso: Some(65536), gro: Some(65536), gso_ipv4: Some(65536), gro_ipv4: Some(65536) },
        tso_max_size: Some(524_280),
        master: None,
        addresses: vec![Address::permanent(ip("10.0.0.1"), 24), finite, Address::permanent(ip("10.0.0.2"), 24)],
        routes: vec![route("10.1.0.0/16"), route("10.1.0.0/16"), multipath, ends],
        rules: vec![Rule::to_table(false, 100), Rule::to_table(true, 100)],
        neighbours: vec![Neighbour::permanent(ip("10.0.0.9"), "02:00:00:00:00:09".parse().unwrap())],
        sysctls: [("ipv4/conf/rp_filter".to_owned(), "2".to_owned())].into(),
        qdiscs: vec![Qdisc { parent: u32::MAX, handle: 0x8001_0000, kind: "pfifo".into(), options: String::new() }],
        ethtool: Ethtool::default(),
        programs: programs(),
    }
}

fn programs() -> Programs {
    let program = |id: u32| Program { id, name: format!("p{id}"), tag: String::new() };
    let attached = |place, id| Attached { place, program: program(id), holder: Holder::Direct };
    let filter = r#"{"parent": 4294967282, "priority": 1, "protocol": 3, "handle": 1, "program": {"id": 4}}"#;
    Programs {
        attached: vec![attached(Place::TcxIngress, 1), attached(Place::TcxIngress, 2), attached(Place::XdpNative, 3)],
        filters: vec![serde_json::from_str(filter).unwrap()],
        others: vec!["filter u32 ingress pref 1".into()],
        unread: None,
    }
}

/// Another link in the same file is the same to everybody.
#[test]
fn a_link_that_was_made_anew_is_no_difference() {
    let by = |id, pin: &str| {
        let mut state = state();
        state.programs.attached[0].holder = Holder::Link { id, pins: vec![pin.into()] };
        state
    };
    assert_eq!(compare(&by(5, "/sys/fs/bpf/a"), &by(6, "/sys/fs/bpf/a")), []);
    assert_eq!(compare(&by(5, "/sys/fs/bpf/a"), &by(5, "/sys/fs/bpf/b")).len(), 1);
    assert_eq!(compare(&by(5, "/sys/fs/bpf/a"), &state()).len(), 1);
}

/// One change of a host state.
type Change = fn(&mut HostState);

#[test]
fn another_index_is_also_that_of_its_next_hops() {
    let mut moved = state();
    moved.set_index(70);
    assert_eq!(moved.index, 70);
    assert_eq!(moved.routes[2].next_hops.iter().map(|hop| hop.index).collect::<Vec<_>>(), [70, 8]);
    assert_eq!(compare(&state(), &moved), vec![]);
}

#[test]
fn each_change_is_one_difference() {
    let changes: [(&str, Change); 37] = [
        ("gsoMaxSize", |s| s.sizes.gso = Some(1)),
        ("groMaxSize", |s| s.sizes.gro = Some(1)),
        ("gsoIPv4MaxSize", |s| s.sizes.gso_ipv4 = Some(1)),
        ("groIPv4MaxSize", |s| s.sizes.gro_ipv4 = Some(1)),
        ("name", |s| s.name = "rail1".into()),
        ("altname other", |s| drop(s.alt_names.pop())),
        ("altname new", |s| s.alt_names.push("new".into())),
        ("alias", |s| s.alias = None),
        ("mtu", |s| s.mtu = 1400),
        ("link-layer address", |s| s.address = Some("02:00:00:00:00:02".parse().unwrap())),
        ("up", |s| s.flags &= !IFF_UP),
        ("noarp", |s| s.flags |= IFF_NOARP),
        ("txqueuelen", |s| s.tx_queue_len = Some(1)),
        ("group", |s| s.group = 1),
        ("master", |s| s.master = Some("br0".into())),
        ("address 10.0.0.1/24", |s| drop(s.addresses.remove(0))),
        ("address 10.0.0.1/24", |s| s.addresses[0].label = Some("rail0:1".into())),
        ("address 10.0.0.1/24", |s| s.addresses[0].flags |= IFA_F_DADFAILED),
        ("address 10.0.0.1/24", |s| s.addresses[0].valid_lifetime = 5),
        ("address 10.0.1.1/24", |s| s.addresses[1].valid_lifetime = 601),
        ("address 10.0.1.1/24", |s| s.addresses[1].preferred_lifetime = FOREVER),
        ("address order", |s| s.addresses.swap(0, 2)),
        ("route 10.1.0.0/16 table 254", |s| drop(s.routes.remove(0))),
        ("route 10.1.0.0/16 table 254", |s| s.routes[0].metrics.push((2, 1400))),
        ("route 10.2.0.0/16 table 254", |s| s.routes[2].next_hops[0].weight = 2),
        ("route 2001:db8::/32 table 254", |s| s.routes[3].other = "0500140000000000".into()),
        ("route 2001:db8::/32 table 254", |s| s.routes[3].other = "05001400010000000800170009000000".into()),
        ("rule", |s| drop(s.rules.pop())),
        ("neighbour 10.0.0.9", |s| s.neighbours[0].flags = 0x80),
        ("sysctl ipv4/conf/rp_filter", |s| s.sysctls.clear()),
        ("qdisc ffffffff", |s| s.qdiscs[0].kind = "fq".into()),
        ("filter", |s| drop(s.programs.filters.pop())),
        ("filter", |s| s.programs.filters[0].priority = 9),
        ("filter", |s| s.programs.others.clear()),
        ("tcx ingress", |s| drop(s.programs.attached.remove(0))),
        ("xdp", |s| drop(s.programs.attached.pop())),
        ("program order", |s| s.programs.attached.swap(0, 1)),
    ];
    assert_eq!(compare(&state(), &state()), []);
    for (what, change) in changes {
        let mut changed = state();
        change(&mut changed);
        for (before, after) in [(state(), changed.clone()), (changed, state())] {
            // A life time that got shorter is only time that passed.
            let shorter = what == "address 10.0.1.1/24" && before.addresses[1].valid_lifetime == 601;
            let found: Vec<String> = compare(&before, &after).into_iter().map(|d| d.what).collect();
            assert_eq!(found, if shorter { vec![] } else { vec![what.to_owned()] });
        }
    }
}

#[test]
fn time_and_the_kernels_numbers_are_no_difference() {
    let changes: [Change; 5] = [
        |s| (s.addresses[1].valid_lifetime, s.addresses[1].preferred_lifetime) = (300, 0),
        |s| s.addresses[0].flags |= IFA_F_TENTATIVE,
        |s| (s.min_mtu, s.max_mtu) = (None, None),
        // RTA_EXPIRES 8.
        |s| s.routes[3].other = "05001400000000000800170008000000".into(),
        |s| {
            s.index = 70;
            s.routes[2].next_hops[0].index = 70;
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut later = state();
        change(&mut later);
        assert_eq!(compare(&state(), &later), [], "change {i}");
    }
}

#[test]
fn the_queue_pair_of_an_infiniband_address_is_the_kernels() {
    let address = |qp: u8, guid: u8| {
        let mut bytes = vec![qp; 4];
        bytes.extend([guid; 16]);
        Some(LinkAddress::new(bytes))
    };
    let with = |address| HostState { address, ..state() };
    assert_eq!(compare(&with(address(1, 9)), &with(address(2, 9))), []);
    assert_eq!(compare(&with(address(1, 9)), &with(address(1, 8))).len(), 1);
}

#[test]
fn what_was_and_what_is() {
    let mut after = state();
    after.addresses.remove(0);
    let found = compare(&state(), &after);
    assert_eq!((found[0].before.as_str(), found[0].after.as_str()), ("10.0.0.1/24 flags 0x80", ""));
}

#[test]
fn the_ledgers_form_is_read_back() {
    let text = serde_json::to_string(&state()).unwrap();
    assert_eq!(serde_json::from_str::<HostState>(&text).unwrap(), state());
}

#[test]
fn a_damaged_record_is_refused_item_by_item() {
    let mut damaged = state();
    damaged.alt_names.push("x".repeat(70_000));
    damaged.alias = Some("x".repeat(256));
    damaged.addresses[1].label = Some("x".repeat(70_000));
    damaged.routes[0].other = "0".into();
    damaged.routes[1].metrics = vec![(1, 1); 10_000];
    damaged.routes[2].next_hops = vec![NextHop::by(1, None); 5_000];
    damaged.qdiscs[0].kind = "x".repeat(70_000);
    let mut report = RestoreReport::default();
    let sound = sound::sound(&damaged, &mut report);
    let what: Vec<&str> = report.failed.iter().map(|(what, _)| what.get(..11).unwrap_or(what)).collect();
    assert_eq!(
        what,
        ["altname xxx", "alias", "address 10.", "route 10.1.", "route 10.1.", "route 10.2.", "qdisc 80010000".get(..11).unwrap()]
    );
    assert_eq!((sound.alt_names.len(), sound.addresses.len(), sound.routes.len(), sound.qdiscs.len()), (2, 2, 1, 0));
    let mut report = RestoreReport::default();
    assert_eq!(sound::sound(&state(), &mut report), state());
    assert!(report.failed.is_empty());
}

fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.into(),
        alt_names: vec![],
        alias: Some(String::new()),
        kind: None,
        arphrd: 1,
        flags: u32::MAX,
        mtu: 1500,
        min_mtu: None,
        max_mtu: None,
        address: None,
        perm_address: None,
        oper_state: "up".into(),
        master: Some(2),
        parent: None,
        link_netnsid: None,
        parent_device: None,
        tx_queue_len: None,
        group: 0,
        sizes: PacketSizes::default(),
        tso_max_size: None,
        vrf_table: None,
        phys_port_name: None,
        xdp: Xdp::default(),
    }
}

#[test]
fn rules_of_its_tables_and_its_name() {
    let by_name = |mut rule: Rule, name: &str| {
        rule.input_link = Some(name.into());
        rule
    };
    let in_table = |table| Route { table, ..route("10.0.0.0/8") };
    let blackhole = Rule { action: 6, ..Rule::to_table(false, 100) };
    let rules = vec![
        Rule::to_table(false, 100),
        Rule::to_table(false, 200),
        Rule::to_table(false, 254),
        blackhole,
        by_name(Rule::to_table(false, 300), "no-such-0"),
        by_name(Rule::to_table(false, 300), "no-such-1"),
    ];
    let snapshot = Snapshot {
        links: vec![link(1, "no-such-0"), link(2, "no-such-master")],
        routes: vec![(vec![1], in_table(100)), (vec![2], in_table(200)), (vec![1, 2], in_table(254))],
        rules: rules.clone(),
        ..Snapshot::default()
    };
    let found = snapshot.host_state(1).unwrap();
    assert_eq!(found.rules, [rules[0].clone(), rules[4].clone()]);
    assert_eq!(found.routes.len(), 2);
    assert_eq!((found.master.as_deref(), found.alias), (Some("no-such-master"), None));
    assert_eq!(found.flags, recorded_flags(u32::MAX));
    assert!(snapshot.host_state(3).is_none());
}

#[test]
fn ethtool_settings_are_compared_and_an_earlier_record_has_none() {
    let with = |rx: u32| {
        let rings = Numbers { now: [("rx".to_owned(), rx)].into(), ..Numbers::default() };
        HostState { ethtool: Ethtool { features: None, numbers: [(Group::Rings, rings)].into() }, ..state() }
    };
    let found = compare(&with(512), &with(256));
    let wanted = Difference { what: "ethtool rings rx".into(), before: "512".into(), after: "256".into() };
    assert_eq!(found, [wanted]);
    assert_eq!(compare(&state(), &with(256)), []);
    let written = serde_json::to_value(with(512)).unwrap();
    assert_eq!(written["ethtool"], serde_json::json!({"numbers": {"rings": {"now": {"rx": 512}}}}));
    assert_eq!(serde_json::from_value::<HostState>(written).unwrap(), with(512));
    assert!(serde_json::to_value(state()).unwrap().get("ethtool").is_none());
}
