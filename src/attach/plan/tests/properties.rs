//! What is true of every plan, whatever it is made from.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::netdev::address::FOREVER;

fn ip() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0_u8..4, 0_u8..8).prop_map(|(net, host)| IpAddr::from([10, 0, net, host])),
        (0_u16..4, 0_u16..8).prop_map(|(net, host)| IpAddr::from([0xfd00, 0, 0, net, 0, 0, 0, host])),
        (0_u16..4).prop_map(|host| IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, host])),
    ]
}

fn net() -> impl Strategy<Value = IpNet> {
    (ip(), 0_u8..=128).prop_map(|(ip, len)| IpNet::new(ip, if ip.is_ipv4() { len % 33 } else { len }).unwrap())
}

fn any_address() -> impl Strategy<Value = Address> {
    (net(), any::<bool>(), 0_u32..0x800, proptest::option::of(ip())).prop_map(|(net, finite, flags, peer)| {
        let peer = peer.filter(|p| p.is_ipv4() == net.addr().is_ipv4());
        let valid_lifetime = if finite { 60 } else { FOREVER };
        Address { flags, peer, valid_lifetime, ..Address::permanent(net.addr(), net.prefix_len()) }
    })
}

fn any_route() -> impl Strategy<Value = Route> {
    let table = prop_oneof![Just(254_u32), Just(100), Just(255)];
    (net(), proptest::option::of(ip()), proptest::option::of(ip()), table, 0_u8..3, any::<bool>(), "[0-9a-f]{0,12}").prop_map(
        |(net, gateway, source, table, protocol, onlink, other)| {
            let family = |ip: &IpAddr| ip.is_ipv4() == net.addr().is_ipv4();
            let gateway = gateway.filter(family);
            let scope = if gateway.is_some() { 0 } else { SCOPE_LINK };
            Route { gateway, source: source.filter(family), table, protocol, onlink, other, scope, ..Route::to(net.trunc()) }
        },
    )
}

fn any_host() -> impl Strategy<Value = HostState> {
    let rule = (0_u32..3, proptest::option::of(net()), any::<bool>(), 0_u8..4).prop_map(|(table, source, ipv6, action)| Rule {
        source,
        ipv6,
        action,
        ..rule([100, 254, 7][table as usize])
    });
    (
        proptest::collection::vec(any_address(), 0..5),
        proptest::collection::vec(any_route(), 0..12),
        proptest::collection::vec(rule, 0..6),
        proptest::collection::vec(ip(), 0..4),
    )
        .prop_map(|(addresses, routes, rules, ips)| {
            let neighbours = ips.iter().map(|ip| neighbour(&ip.to_string())).collect();
            HostState { addresses, routes, rules, neighbours, ..host() }
        })
}

fn any_config() -> impl Strategy<Value = NetworkConfig> {
    let route = (net(), proptest::option::of(ip()), proptest::option::of(ip()), proptest::option::of(99_u32..101)).prop_map(
        |(net, gateway, source, table)| config::RouteConfig {
            destination: Some(net),
            gateway,
            source,
            scope: gateway.is_none().then_some(SCOPE_LINK),
            table,
            ..config::RouteConfig::default()
        },
    );
    let vrf = proptest::option::of(Just(config::VrfConfig { name: "blue".into(), table: Some(1500) }));
    (
        proptest::option::of(proptest::collection::vec(net(), 0..4)),
        proptest::option::of(proptest::collection::vec(route, 0..4)),
        vrf,
    )
        .prop_map(|(addresses, routes, vrf)| NetworkConfig {
            interface: Some(InterfaceConfig { addresses, vrf, ..InterfaceConfig::default() }),
            routes,
            ..NetworkConfig::default()
        })
}

/// What must be true of every plan, whatever it is made from.
fn check_invariants(plan: &Plan) {
    let rank = |step: &Step| match step {
        // Prepare does both.
        Step::Vf { .. } => -2,
        Step::DetachPrograms { .. } => -1,
        Step::Move { .. } | Step::Rdma { .. } | Step::Create { .. } => 0,
        Step::Vrf { .. } | Step::Link { .. } | Step::AltName { .. } | Step::Sysctl { .. } | Step::Ethtool { .. } => 1,
        Step::Address { address } if !addresses::needs_link_up(address) => 2,
        Step::Up => 3,
        Step::Address { .. } => 4,
        Step::Neighbour { .. } => 5,
        Step::Route { route, .. } if route.gateway.is_none() => 6,
        Step::Route { .. } => 7,
        Step::Rule { .. } => 8,
    };
    let ranks: Vec<_> = plan.steps.iter().map(rank).collect();
    assert!(ranks.is_sorted(), "{ranks:?}");
    assert_eq!(ranks.iter().filter(|r| **r == 0).count(), 1);
    assert_eq!(ranks.iter().filter(|r| **r == 3).count(), 1);

    if plan.steps.iter().any(|s| matches!(s, Step::Vrf { .. })) {
        assert!(routes(plan).iter().all(|r| r.table == 1500) && rules(plan).is_empty(), "{plan:?}");
    }
    let ips: HashSet<IpAddr> = addresses(plan).iter().map(|a| a.ip).collect();
    let routes = routes(plan);
    let mut keys = HashSet::new();
    for route in &routes {
        assert!(keys.insert((route.destination, route.table, route.metric)), "twice: {route:?}");
        assert!(route.source.is_none_or(|s| ips.contains(&s)), "{route:?}");
        let Some(gateway) = route.gateway.filter(|_| !route.onlink) else { continue };
        let link_local = matches!(gateway, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let connected = addresses(plan)
            .iter()
            .any(|a| IpNet::new(a.peer.unwrap_or(a.ip), a.prefix_len).is_ok_and(|net| net.contains(&gateway)));
        let by_route = routes
            .iter()
            .any(|r| r.gateway.is_none() && (r.table == route.table || r.table == 254) && r.destination.contains(&gateway));
        assert!(link_local || connected || by_route, "{route:?} in {plan:#?}");
    }
    if ips.iter().any(IpAddr::is_ipv6) || routes.iter().any(|r| r.destination.addr().is_ipv6()) {
        assert!(matches!(plan.steps[1], Step::Sysctl { .. }));
    }
}

proptest! {
    #[test]
    fn every_plan_keeps_its_promises(config in any_config(), host in any_host()) {
        // Families are checked by validation; a plan for what it refuses is made from nothing.
        if config.validate().is_empty() && let Ok(plan) = plan(&config, &host) {
            check_invariants(&plan);
        }
        check_invariants(&plan(&NetworkConfig::default(), &host).unwrap());
    }

    #[test]
    fn no_hex_makes_the_attribute_search_hang_or_panic(hex in "([0-9a-f]{0,80}|.{0,20})", kind in any::<u16>()) {
        let mut host = host();
        host.routes = vec![Route { other: hex, tos: (kind % 256) as u8, ..route("10.60.0.0/16", None) }];
        let _ = plan(&NetworkConfig::default(), &host);
    }
}
