//! Routes and rules with everything that can be said of them, what comes along from the host, and how much is given back: read back
//! from the kernel.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::netdev::{Neighbour, Route, Rule, link, neighbour, route, rule};
use dranic_testbed::fabric::PodNetns;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

const ROUTING: &str = r#"{
    "interface": {"name": "rail0", "addresses": ["10.20.0.5/24", "fd00:20::5/64"]},
    "routes": [
        {"destination": "10.0.0.0/8", "gateway": "10.20.0.1", "metric": 50, "mtu": 1400, "advmss": 1300},
        {"destination": "10.0.0.0/8", "gateway": "10.20.0.2", "metric": 60},
        {"destination": "10.88.0.0/16", "gateway": "192.0.2.1", "onlink": true},
        {"destination": "10.66.0.0/16", "type": "blackhole", "metric": 9, "table": 120},
        {"destination": "10.67.0.0/16", "type": "unreachable", "table": 120},
        {"destination": "10.68.0.0/16", "type": "throw", "table": 120},
        {"destination": "fd66::/64", "type": "prohibit", "table": 120},
        {"destination": "fd77::/64", "gateway": "fd00:20::1", "metric": 7, "mtu": 1300}
    ],
    "rules": [
        {"priority": 100, "fwmark": 16, "fwmask": 255, "table": 120},
        {"priority": 101, "fwmark": 17, "table": 120},
        {"priority": 102, "iif": "rail0", "source": "fd00:20::/64", "table": 120},
        {"priority": 103, "oif": "rail0", "invert": true, "source": "10.20.0.0/24", "table": 120},
        {"priority": 104, "suppressPrefixLength": 0}
    ]
}"#;

#[test]
fn routes_and_rules_are_in_the_kernel_with_all_they_say_and_none_stays() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let pod = world.pod("a");
    let untouched = world.pod_snapshot(&pod);
    let names = world.device_names();
    let first = claim("a", &names[..1], ROUTING);
    // The other one brings some of the same.
    let second = claim(
        "b",
        &names[1..],
        r#"{"interface": {"name": "rail1", "addresses": ["10.21.0.5/24"]},
            "routes": [{"destination": "10.67.0.0/16", "type": "unreachable", "table": 120}]}"#,
    );
    engine.prepare(&first, &pod_ref("a")).unwrap();
    engine.prepare(&second, &pod_ref("a")).unwrap();
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();

    let seen = world.pod_snapshot(&pod);
    let routes: Vec<String> = seen.routes.iter().map(|(_, route)| route.to_string()).collect();
    for wanted in [
        "10.0.0.0/8 via 10.20.0.1 metric 50 proto 4 scope 0 rtax2 1400 rtax8 1300",
        "10.0.0.0/8 via 10.20.0.2 metric 60 proto 4 scope 0",
        "10.88.0.0/16 via 192.0.2.1 proto 4 scope 0 onlink",
        "10.66.0.0/16 metric 9 table 120 proto 4 scope 0 type 6",
        "10.67.0.0/16 table 120 proto 4 scope 0 type 7",
        "10.68.0.0/16 table 120 proto 4 scope 0 type 9",
    ] {
        assert!(routes.iter().any(|route| route == wanted), "{wanted}: {routes:#?}");
    }
    let v6 = |text: &str| seen.routes.iter().map(|(_, r)| r).find(|r| r.destination.to_string() == text).unwrap();
    assert_eq!((v6("fd66::/64").kind, v6("fd66::/64").table), (8, 120));
    assert_eq!((v6("fd77::/64").metric, v6("fd77::/64").metrics.contains(&(2, 1300))), (Some(7), true));

    let with = |priority: u32| seen.rules.iter().find(|r| r.priority == Some(priority)).unwrap_or_else(|| panic!("{priority}"));
    assert_eq!(with(100).other, rule::selectors(Some((16, 255)), None));
    assert_eq!(with(101).other, rule::selectors(Some((17, u32::MAX)), None));
    assert_eq!((with(102).input_link.as_deref(), with(102).ipv6), (Some("rail0"), true));
    assert_eq!((with(103).output_link.as_deref(), with(103).invert), (Some("rail0"), true));
    assert_eq!(with(104).other, rule::selectors(None, Some(0)));

    // Only the device that brought them goes: what the other one brought too stays until that goes.
    engine.unprepare(&first.claim).unwrap();
    let ours = |list: &[(Vec<u32>, Route)]| -> Vec<String> {
        list.iter().filter(|(_, r)| r.table == 120).map(|(_, r)| r.destination.to_string()).collect()
    };
    assert_eq!(ours(&world.pod_snapshot(&pod).routes), ["10.67.0.0/16"]);
    engine.unprepare(&second.claim).unwrap();
    let after = world.pod_snapshot(&pod);
    let sorted = |rules: &[Rule]| rules.iter().map(ToString::to_string).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(sorted(&after.rules), sorted(&untouched.rules));
    assert_eq!(ours(&after.routes), [""; 0]);
    world.assert_unchanged(&before);
}

/// The NIC gets a route in a table of its own with a rule for it, one in main, and a permanent neighbour.
fn furnish(world: &World) {
    let mut socket = world.node.socket().unwrap();
    let index = link::by_name(&mut socket, "nic0", soon()).unwrap().unwrap().index;
    let via = |net: &str, table| Route { table, gateway: Some("10.0.0.2".parse().unwrap()), ..Route::to(net.parse().unwrap()) };
    let neighbour =
        Neighbour { ip: "10.0.0.2".parse().unwrap(), address: Some("02:00:00:00:00:77".parse().unwrap()), flags: 0, protocol: 0 };
    for request in [
        route::add_request(index, &via("10.70.0.0/16", 77), false),
        route::add_request(index, &via("10.71.0.0/16", 254), false),
        rule::add_request(&Rule { source: Some("10.70.0.0/16".parse().unwrap()), ..Rule::to_table(false, 77) }),
        neighbour::add_request(index, &neighbour),
    ] {
        socket.request(request, soon()).unwrap();
    }
}

/// How many global addresses, routes that are not the kernel's, permanent neighbours, and rules to table 77 the pod has by `nic0`.
fn counts(world: &World, pod: &PodNetns) -> (usize, usize, usize, usize) {
    let index = world.pod_links(pod).into_iter().find(|l| l.name == "nic0").unwrap().index;
    let seen = world.pod_snapshot(pod);
    (
        seen.addresses.iter().filter(|(i, a)| *i == index && a.scope == 0).count(),
        seen.routes.iter().filter(|(links, r)| links.contains(&index) && r.protocol != 2).count(),
        seen.neighbours.iter().filter(|(i, _)| *i == index).count(),
        seen.rules.iter().filter(|r| r.table == 77).count(),
    )
}

#[test]
fn the_hosts_addresses_routes_rules_and_neighbours_stay_where_they_shall() {
    let Some(world) = World::new(1) else { return };
    furnish(&world);
    let before = world.host_states();
    let engine = world.engine();
    let ignore = |what: &str| format!(r#"{{"hostState": {{"{what}": "ignore"}}}}"#);
    let all = r#"{"hostState": {"addresses": "ignore", "routes": "ignore", "rules": "ignore", "neighbors": "ignore"}}"#;
    for (name, text, wanted) in [
        ("copy", String::new(), (2, 2, 1, 1)),
        // A rule needs a route of its table.
        ("routes", ignore("routes"), (2, 0, 1, 0)),
        ("rules", ignore("rules"), (2, 2, 1, 0)),
        ("neighbors", ignore("neighbors"), (2, 2, 0, 1)),
        // Nothing is reached without an address.
        ("addresses", ignore("addresses"), (0, 0, 0, 0)),
        ("all", all.to_owned(), (0, 0, 0, 0)),
    ] {
        let claim = claim(name, &world.device_names(), &text);
        let pod = world.pod(name);
        engine.prepare(&claim, &pod_ref(name)).unwrap();
        engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
        assert_eq!(counts(&world, &pod), wanted, "{name}");
        engine.unprepare(&claim.claim).unwrap();
        // Given back all the same.
        world.assert_unchanged(&before);
    }
}

#[test]
fn a_minimal_restore_gives_back_the_link_and_leaves_the_rest_to_others() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states().remove("nic0").unwrap();
    let engine = world.engine();
    let pod = world.pod("a");
    let text = r#"{"restore": "minimal", "interface": {"name": "rail0", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05"}}"#;
    let all = claim("a", &world.device_names(), text);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    engine.unprepare(&all.claim).unwrap();
    let mut socket = world.node.socket().unwrap();
    let back = link::by_name(&mut socket, "nic0", soon()).unwrap().expect("it has its name again");
    let after = world.host_state_of(back.index);
    assert_eq!(
        (after.mtu, &after.address, after.flags, &after.alt_names),
        (before.mtu, &before.address, before.flags, &before.alt_names)
    );
    assert!(!before.addresses.is_empty() && after.addresses.is_empty(), "{:?}", after.addresses);
}
