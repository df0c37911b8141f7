mod dhcp;
mod properties;
mod rules_and_neighbours;
mod settings;

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use super::*;
use crate::config;
use crate::netdev::address::{IFA_F_NODAD, IFA_F_PERMANENT, IFA_F_TENTATIVE, SCOPE_LINK};
use crate::netdev::bpf::Programs;
use crate::netdev::{Ethtool, Neighbour, NextHop, PacketSizes, Rule};
use ipnet::IpNet;

/// A NIC of the host with one IPv4 and one IPv6 address.
pub(super) fn host() -> HostState {
    HostState {
        index: 7,
        name: "enp1s0".into(),
        alt_names: vec![],
        alias: None,
        mtu: 9000,
        min_mtu: Some(68),
        max_mtu: Some(9978),
        address: Some("02:00:00:00:00:01".parse().unwrap()),
        flags: 1,
        tx_queue_len: None,
        group: 0,
        sizes: PacketSizes { gso: Some(65536), gro: Some(65536), gso_ipv4: Some(65536), gro_ipv4: Some(65536) },
        tso_max_size: Some(524_280),
        master: None,
        addresses: vec![address("10.50.0.1/24"), address("fd50::1/64")],
        routes: vec![],
        rules: vec![],
        neighbours: vec![],
        sysctls: BTreeMap::new(),
        qdiscs: vec![],
        ethtool: Ethtool::default(),
        programs: Programs::default(),
    }
}

fn address(text: &str) -> Address {
    let net: IpNet = text.parse().unwrap();
    Address::permanent(net.addr(), net.prefix_len())
}

fn route(destination: &str, gateway: Option<&str>) -> Route {
    let gateway: Option<IpAddr> = gateway.map(|g| g.parse().unwrap());
    let scope = if gateway.is_none() { SCOPE_LINK } else { 0 };
    Route { gateway, scope, ..Route::to(destination.parse().unwrap()) }
}

fn rule(table: u32) -> Rule {
    Rule {
        ipv6: false,
        priority: Some(100),
        source: None,
        destination: None,
        table,
        action: 1,
        tos: 0,
        invert: false,
        protocol: 4,
        input_link: None,
        output_link: None,
        other: String::new(),
    }
}

fn neighbour(ip: &str) -> Neighbour {
    Neighbour { ip: ip.parse().unwrap(), address: Some("02:00:00:00:00:99".parse().unwrap()), flags: 0, protocol: 0 }
}

fn config(json: &str) -> NetworkConfig {
    let config = config::parse(json).unwrap();
    assert_eq!(config.validate(), [], "{json}");
    config
}

fn planned(json: &str, host: &HostState) -> Plan {
    plan(&config(json), host).unwrap_or_else(|e| panic!("{json}: {e}"))
}

fn routes(plan: &Plan) -> Vec<Route> {
    plan.steps.iter().filter_map(|s| if let Step::Route { route, .. } = s { Some(route.clone()) } else { None }).collect()
}

fn rules(plan: &Plan) -> Vec<Rule> {
    plan.steps.iter().filter_map(|s| if let Step::Rule { rule } = s { Some(rule.clone()) } else { None }).collect()
}

fn addresses(plan: &Plan) -> Vec<Address> {
    plan.steps.iter().filter_map(|s| if let Step::Address { address } = s { Some(address.clone()) } else { None }).collect()
}

fn neighbours(plan: &Plan) -> Vec<Neighbour> {
    plan.steps.iter().filter_map(|s| if let Step::Neighbour { neighbour } = s { Some(neighbour.clone()) } else { None }).collect()
}

/// Destination and gateway of each planned route, for short comparisons.
fn short(plan: &Plan) -> Vec<String> {
    routes(plan).iter().map(|r| format!("{}{}", r.destination, r.gateway.map(|g| format!(" {g}")).unwrap_or_default())).collect()
}

#[track_caller]
fn assert_left_out(plan: &Plan, lines: &[&str]) {
    assert_eq!(plan.left_out.len(), lines.len(), "{:#?}", plan.left_out);
    for line in lines {
        assert!(plan.left_out.iter().any(|l| l.contains(line)), "{line}: {:#?}", plan.left_out);
    }
}

#[test]
fn without_configuration_the_pod_gets_what_the_host_has() {
    let mut host = host();
    host.addresses[0].label = Some("enp1s0:x".into());
    host.routes = vec![route("10.60.0.0/16", Some("10.50.0.254"))];
    host.neighbours = vec![neighbour("10.50.0.254")];
    let plan = planned("{}", &host);
    let kinds: Vec<_> = plan.steps.iter().map(Step::kind).collect();
    assert_eq!(kinds, ["move", "sysctl", "address", "address", "up", "neighbour", "route"]);
    assert_eq!(plan.steps[0], Step::Move { name: PodLinkName::new("enp1s0").unwrap(), mtu: None, address: None });
    assert_eq!(plan.steps[1], Step::Sysctl { key: "ipv6/conf/disable_ipv6".into(), value: "0".into(), may_lack: false });
    assert_eq!(addresses(&plan)[0], address("10.50.0.1/24"), "without the label of the host's name");
    assert_eq!(addresses(&plan)[1].flags, IFA_F_PERMANENT | IFA_F_NODAD);
    assert_eq!(routes(&plan), host.routes);
    assert_eq!(neighbours(&plan), host.neighbours);
    assert_left_out(&plan, &[]);
}

#[test]
fn the_link_gets_what_is_configured() {
    let json =
        r#"{"interface": {"name": "rail0", "mtu": 1400, "hardwareAddr": "02:00:00:00:00:05", "addresses": ["10.1.0.5/24"]}}"#;
    let plan = planned(json, &host());
    assert_eq!(plan.pod_link.as_str(), "rail0");
    let address = Some("02:00:00:00:00:05".parse().unwrap());
    assert_eq!(plan.steps[0], Step::Move { name: plan.pod_link.clone(), mtu: Some(1400), address });
    assert_eq!(addresses(&plan), [super::tests::address("10.1.0.5/24")]);
    assert!(!plan.steps.iter().any(|s| matches!(s, Step::Sysctl { .. })), "no IPv6 is wanted");

    let same = planned(r#"{"interface": {"mtu": 9000, "hardwareAddr": "02:00:00:00:00:01"}}"#, &host());
    assert!(matches!(same.steps[0], Step::Move { mtu: None, address: None, .. }), "{:?}", same.steps[0]);
    assert_eq!(addresses(&planned(r#"{"interface": {"addresses": []}}"#, &host())), []);
}

#[test]
fn what_the_device_cannot_be_is_refused() {
    let cases = [
        (r#"{"interface": {"mtu": 9979}}"#, "interface.mtu 9979 is outside of what the device takes (68 to 9978 bytes)"),
        (r#"{"interface": {"hardwareAddr": "02:00:00:00:00:00:00:05"}}"#, "has 8 bytes, the device's addresses have 6"),
        (r#"{"interface": {"mtu": 1279}}"#, "needs an MTU of at least 1280 bytes, and the link would have 1279"),
    ];
    for (json, words) in cases {
        let error = plan(&config(json), &host()).unwrap_err().to_string();
        assert!(error.contains(words), "{json}: {error}");
    }
    let mut small = host();
    small.min_mtu = Some(1500);
    assert!(matches!(plan(&config(r#"{"interface": {"mtu": 1400}}"#), &small), Err(PlanError::Mtu { min: 1500, .. })));
    for none in [None, Some(0)] {
        small.max_mtu = none;
        planned(r#"{"interface": {"mtu": 65535}}"#, &small);
    }
    assert!(plan(&config(r#"{"interface": {"mtu": 1279, "addresses": ["10.0.0.5/24"]}}"#), &host()).is_ok());
    let mut odd = host();
    odd.name = "a:b".into();
    assert!(plan(&config("{}"), &odd).unwrap_err().to_string().contains("set interface.name"));
    planned(r#"{"interface": {"name": "ab"}}"#, &odd);
}

#[test]
fn addresses_that_belong_to_the_host_stay() {
    let mut host = host();
    let with = |text: &str, change: &dyn Fn(&mut Address)| {
        let mut one = address(text);
        change(&mut one);
        one
    };
    host.addresses = vec![
        with("10.50.0.1/24", &|a| (a.valid_lifetime, a.preferred_lifetime, a.flags) = (3600, 1800, 0)),
        with("10.50.0.2/24", &|a| a.flags |= 0x01),
        with("169.254.0.9/16", &|a| a.scope = SCOPE_LINK),
        with("10.50.9.1/32", &|a| a.peer = Some("10.50.9.2".parse().unwrap())),
        with("fe80::1/64", &|a| a.scope = SCOPE_LINK),
        with("fd50::1/64", &|a| a.flags |= 0x200 | IFA_F_TENTATIVE),
        with("fd50::2/64", &|a| a.flags = 0x01),
        with("fd50::3/64", &|a| a.flags = 0x100),
        with("fd50::4/64", &|a| a.proto = Some(2)),
        with("fd50::5/64", &|a| a.flags |= 0x08),
        with("fd50::6/128", &|a| (a.valid_lifetime, a.flags) = (60, 0)),
    ];
    let plan = planned("{}", &host);
    let got = addresses(&plan);
    let ips: Vec<_> = got.iter().map(|a| a.ip.to_string()).collect();
    assert_eq!(ips, ["10.50.0.1", "10.50.0.2", "10.50.9.1", "fd50::1", "fd50::6"]);
    assert_eq!((got[0].valid_lifetime, got[0].preferred_lifetime, got[0].flags), (3600, 1800, 0));
    assert_eq!(got[1].flags, IFA_F_PERMANENT, "that it was a secondary one is the kernel's business");
    assert_eq!(got[2].peer, Some("10.50.9.2".parse().unwrap()));
    assert_eq!(got[3].flags, IFA_F_PERMANENT | IFA_F_NODAD | 0x200);
    assert_eq!(got[4].flags, IFA_F_NODAD);
    let up = plan.steps.iter().position(|s| *s == Step::Up).unwrap();
    assert!(matches!(&plan.steps[up + 1], Step::Address { address } if *address == got[4]), "{:?}", plan.steps);
    assert_left_out(
        &plan,
        &[
            "renewal of address 10.50.0.1/24: it ends after 3600 s",
            "address 169.254.0.9/16: its scope is not global",
            "address fd50::2/64: it is a temporary",
            "address fd50::3/64: the kernel made it from a router advertisement",
            "address fd50::4/64: the kernel made it from a router advertisement",
            "address fd50::5/64: somebody else",
            "renewal of address fd50::6/128: it ends after 60 s",
        ],
    );
}

/// The peer never starts this pod: it copies the host's connected route, whose source the pod does not have.
#[test]
fn another_address_than_the_hosts_leaves_what_depends_on_it() {
    let mut host = host();
    let connected = Route { source: Some("10.50.0.1".parse().unwrap()), protocol: 2, ..route("10.50.0.0/24", None) };
    let by_source = Route { source: Some("10.50.0.1".parse().unwrap()), table: 100, ..route("10.70.0.0/16", None) };
    let by_gateway = Route { table: 100, ..route("10.60.0.0/16", Some("10.50.0.254")) };
    host.routes = vec![connected, by_source, by_gateway];
    host.rules = vec![Rule { source: Some("10.50.0.1/32".parse().unwrap()), ..rule(100) }];
    host.neighbours = vec![neighbour("10.50.0.254"), neighbour("fe80::2")];
    let plan = planned(r#"{"interface": {"addresses": ["10.99.0.5/24"]}}"#, &host);
    let kinds: Vec<_> = plan.steps.iter().map(Step::kind).collect();
    assert_eq!(kinds, ["move", "address", "up"]);
    assert_left_out(
        &plan,
        &[
            "route 10.70.0.0/16 on link in table 100: its source 10.50.0.1 is not among the pod's addresses",
            "route 10.60.0.0/16 via 10.50.0.254 in table 100: its gateway 10.50.0.254 is neither",
            "rule 100 from 10.50.0.1/32 to table 100: no route of table 100 comes along",
            "neighbour 10.50.0.254: it is not in a subnet",
            "neighbour fe80::2: the pod has no IPv6",
        ],
    );
    // With a route of the claim's own in the table, the rule still never matches.
    let json = r#"{"interface": {"addresses": ["10.99.0.5/24"]}, "routes": [{"destination": "10.98.0.0/24", "scope": 253, "table": 100}]}"#;
    let plan = planned(json, &host);
    assert!(rules(&plan).is_empty());
    assert!(plan.left_out.iter().any(|l| l.contains("its source is the host's address 10.50.0.1")), "{:?}", plan.left_out);
}

#[test]
fn copied_routes_keep_everything() {
    let mut host = host();
    let hop = |gateway: &str, weight| NextHop {
        index: 7,
        gateway: Some(gateway.parse().unwrap()),
        weight,
        onlink: false,
        other: String::new(),
    };
    host.routes = vec![
        Route {
            metric: Some(50),
            metrics: vec![(2, 1400)],
            tos: 8,
            protocol: 12,
            table: 100,
            ..route("10.61.0.0/16", Some("10.50.0.9"))
        },
        Route { onlink: true, ..route("10.62.0.0/16", Some("172.16.0.1")) },
        Route { next_hops: vec![hop("10.50.0.8", 1), hop("10.50.0.9", 5)], ..route("10.63.0.0/16", None) },
        Route { table: 100, ..route("0.0.0.0/0", Some("10.50.0.9")) },
        route("fd60::/64", Some("fe80::9")),
    ];
    host.neighbours = vec![neighbour("172.16.0.1")];
    let plan = planned("{}", &host);
    let got: HashSet<Route> = routes(&plan).into_iter().collect();
    assert_eq!(got, host.routes.iter().cloned().collect());
    assert_eq!(neighbours(&plan).len(), 1, "of an on-link gateway");
    assert_eq!(short(&plan).last().unwrap(), "0.0.0.0/0 10.50.0.9", "{:?}", short(&plan));
    assert_left_out(&plan, &[]);
    let multipath = plan.steps.iter().find(|s| matches!(s, Step::Route { route, .. } if !route.next_hops.is_empty())).unwrap();
    let Step::Route { route, .. } = multipath.clone().by_link(3) else { unreachable!() };
    assert!(route.next_hops.iter().all(|hop| hop.index == 3));
}

#[test]
fn routes_that_make_no_sense_in_the_pod_stay() {
    let mut host = host();
    let hop =
        |index| NextHop { index, gateway: Some("10.50.0.9".parse().unwrap()), weight: 1, onlink: false, other: String::new() };
    let nexthop_id: String = [8_u16.to_ne_bytes(), 30_u16.to_ne_bytes()].concat().iter().map(|b| format!("{b:02x}")).collect();
    host.routes = vec![
        Route { kind: 6, ..route("10.61.0.0/16", None) },
        Route { protocol: 9, ..route("fd61::/64", Some("fe80::1")) },
        route("0.0.0.0/0", Some("10.50.0.9")),
        Route { next_hops: vec![hop(7), hop(8)], ..route("10.62.0.0/16", None) },
        Route { other: format!("{nexthop_id}05000000"), ..route("10.63.0.0/16", Some("10.50.0.9")) },
        route("10.50.0.0/24", None),
        route("10.64.0.0/16", Some("10.50.0.9")),
        route("10.64.0.0/16", Some("10.50.0.8")),
        Route { table: 120, ..route("10.65.0.0/16", Some("10.66.0.1")) },
        Route { table: 121, ..route("10.66.0.0/16", None) },
        // Nobody misses these.
        Route { protocol: 2, ..route("10.50.0.0/24", None) },
        Route { protocol: 2, table: 255, ..route("10.50.0.255/32", None) },
        Route { protocol: 2, ..route("fe80::/64", None) },
        route("ff00::/8", None),
    ];
    let plan = planned("{}", &host);
    assert_eq!(short(&plan), ["10.66.0.0/16", "10.64.0.0/16 10.50.0.9"]);
    assert_left_out(
        &plan,
        &[
            "route 10.61.0.0/16 on link: it is not a unicast route",
            "route fd61::/64 via fe80::1: the kernel made it from a router advertisement",
            "route 0.0.0.0/0 via 10.50.0.9: the default route of the pod is the cluster network's",
            "route 10.62.0.0/16 by 2 next hops on link: it has next hops by other links",
            "route 10.63.0.0/16 via 10.50.0.9: it uses a nexthop object",
            "route 10.50.0.0/24 on link: the kernel makes a route to this destination itself",
            "route 10.64.0.0/16 via 10.50.0.8: a configured or an earlier route has the same",
            "route 10.65.0.0/16 via 10.66.0.1 in table 120: its gateway 10.66.0.1 is neither",
        ],
    );
}

/// NetworkManager adds addresses without a connected route, and then the route by itself.
#[test]
fn a_connected_route_that_was_made_by_hand_comes_along_with_its_address() {
    let mut host = host();
    host.addresses[0].flags |= 0x200;
    let by_hand = Route { protocol: 2, metric: Some(101), ..route("10.50.0.0/24", None) };
    host.routes = vec![route("10.60.0.0/16", Some("10.50.0.254")), by_hand.clone()];
    let plan = planned("{}", &host);
    assert_eq!(routes(&plan), [by_hand, route("10.60.0.0/16", Some("10.50.0.254"))]);
    assert_left_out(&plan, &[]);
}

#[test]
fn configured_routes_come_in_an_order_that_works_and_win() {
    let mut host = host();
    host.routes = vec![
        Route { table: 120, ..route("10.0.0.0/8", Some("10.50.0.254")) },
        Route { table: 120, metric: Some(9), ..route("10.0.0.0/8", Some("10.50.0.254")) },
    ];
    let json = r#"{"interface": {"addresses": ["10.20.0.5/32", "10.50.0.7/24", "fd01::5/48"]}, "routes": [
        {"destination": "10.0.0.0/8", "gateway": "10.20.0.1", "source": "10.20.0.5", "table": 120},
        {"destination": "10.20.0.1/32", "scope": 253, "table": 120},
        {"destination": "10.50.0.0/24", "scope": 253},
        {"destination": "fd01:0:0:20::/64", "gateway": "fd01::1"},
        {"destination": "fd02::/64", "gateway": "fd01:0:0:20::1"}]}"#;
    let plan = planned(json, &host);
    assert_eq!(
        short(&plan),
        [
            "10.20.0.1/32",
            "fd02::/64 fd01:0:0:20::1",
            "10.0.0.0/8 10.20.0.1",
            "fd01:0:0:20::/64 fd01::1",
            "10.0.0.0/8 10.50.0.254",
        ]
        .map(String::from),
    );
    assert!(routes(&plan).iter().all(|r| r.destination.addr().is_ipv6() || r.table == 120));
    assert_left_out(&plan, &["route 10.0.0.0/8 via 10.50.0.254 in table 120: a configured or an earlier route"]);
}

#[test]
fn a_configured_route_that_the_kernel_would_refuse_is_refused_now() {
    let cases = [
        (r#"{"destination": "10.0.0.0/8", "gateway": "10.51.0.1"}"#, "gateway 10.51.0.1 is neither"),
        (r#"{"destination": "10.0.0.0/8", "gateway": "10.50.0.9", "source": "10.50.0.2"}"#, "source 10.50.0.2 is not among"),
        (r#"{"destination": "fd00::/8", "gateway": "fd50::1"}"#, "gateway fd50::1 is the pod's own address"),
        (r#"{"destination": "10.50.0.0/24", "gateway": "10.50.0.9"}"#, "the kernel makes a route to this destination itself"),
    ];
    for (route, words) in cases {
        let json = format!(r#"{{"routes": [{{"destination": "10.61.0.0/16", "scope": 253, "table": 9}}, {route}]}}"#);
        let error = plan(&config(&json), &host()).unwrap_err().to_string();
        assert!(error.starts_with("routes[1]: ") && error.contains(words), "{json}: {error}");
    }
    // Another table's route of link scope does not help; the same table's, main's and a copied one do.
    let via = |table: u32, helper: &str| {
        let json =
            format!(r#"{{"routes": [{{"destination": "10.0.0.0/8", "gateway": "10.61.0.1", "table": {table}}} {helper}]}}"#);
        plan(&config(&json), &host()).is_ok()
    };
    let helper = |table: u32| format!(r#", {{"destination": "10.61.0.1/32", "scope": 253, "table": {table}}}"#);
    assert!(!via(120, "") && !via(120, &helper(121)));
    assert!(via(120, &helper(120)) && via(120, &helper(0)));
    let mut copied = host();
    copied.routes = vec![route("10.61.0.0/24", None)];
    planned(r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "10.61.0.1", "table": 5}]}"#, &copied);
    planned(r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "10.50.0.1"}]}"#, &host());
    let link_local =
        planned(r#"{"interface": {"addresses": []}, "routes": [{"destination": "fd00::/8", "gateway": "fe80::1"}]}"#, &host());
    assert!(link_local.steps.iter().any(|s| matches!(s, Step::Sysctl { .. })), "IPv6 has to work");
}

#[test]
fn a_huge_host_state_gives_a_bounded_plan() {
    let mut host = host();
    host.routes =
        (0..70_000_u32).map(|i| route(&format!("{}/32", std::net::Ipv4Addr::from(i << 8)), Some("10.50.0.9"))).collect();
    host.neighbours = (0..70_000_u32).map(|i| neighbour(&std::net::Ipv4Addr::from(0x0b00_0000 + i).to_string())).collect();
    let plan = planned("{}", &host);
    assert_eq!(routes(&plan).len(), 1024);
    assert_eq!(plan.left_out.len(), 101);
    assert!(plan.left_out[0].contains("68976 more routes"), "{}", plan.left_out[0]);
}

#[test]
fn a_plan_survives_being_written_down() {
    let mut host = host();
    host.routes = vec![Route { table: 100, ..route("10.60.0.0/16", Some("10.50.0.254")) }];
    host.rules = vec![rule(100)];
    host.neighbours = vec![neighbour("10.50.0.9")];
    let plan = planned(r#"{"interface": {"mtu": 1400, "hardwareAddr": "02:00:00:00:00:05"}}"#, &host);
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
}

#[test]
fn programs_come_off_only_where_that_is_asked_for() {
    let on = |programs| HostState { programs, ..host() };
    let record = r#"{"attached": [{"place": "xdpNative", "program": {"id": 3, "name": "x"}, "holder": "direct"}]}"#;
    let programs: Programs = serde_json::from_str(record).unwrap();
    let off = config::parse(r#"{"interface": {"disableEbpfPrograms": true}}"#).unwrap();
    let step = Step::DetachPrograms { programs: vec!["xdp x (program 3)".into()] };
    let made = plan(&off, &on(programs.clone())).unwrap();
    assert_eq!((&made.steps[0], made.steps[0].undo()), (&step, Undo::AttachPrograms));
    assert!(made.steps[0].describe().contains("xdp x (program 3)"));
    let has_step = |plan: Plan| plan.steps.iter().any(|step| step.kind() == "detachPrograms");
    assert!(!has_step(plan(&NetworkConfig::default(), &on(programs)).unwrap()));
    assert!(!has_step(plan(&off, &host()).unwrap()), "there is nothing to take off");
    let unread = Programs { unread: Some("no right".into()), ..Programs::default() };
    assert_eq!(plan(&off, &on(unread.clone())), Err(PlanError::Programs { why: "no right".into() }));
    assert!(plan(&NetworkConfig::default(), &on(unread)).is_ok());
}
