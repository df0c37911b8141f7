//! The kernel takes every step of a plan, in the plan's order: in a scratch network namespace that vanishes with its shell. The
//! steps are carried out by the `ip` program, so that only the plan is tested here.

use std::process::Command;

use dranic::attach::plan::{Step, plan};
use dranic::config;
use dranic::netdev::{Address, HostState, Neighbour, NextHop, Route, Rule};

/// Why the kernel tests can't run here; none when they can.
fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".into());
    }
    let absent = |program: &&&str| Command::new(**program).arg("--version").output().is_err();
    ["unshare", "ip"].iter().find(absent).map(|program| format!("no program {program}"))
}

/// Plans `config` for `host` and runs it on a veth in a namespace where IPv6 is off for new links. Returns the output of `show`.
fn run(config: &str, host: &HostState, show: &str) -> String {
    let config = config::parse(config).expect("parse");
    assert_eq!(config.validate(), []);
    let plan = plan(&config, host).expect("plan");
    let mut script = format!(
        "set -e\necho 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6\n\
         ip link add {} type veth peer name far\nip link set far up\n",
        host.name
    );
    for step in &plan.steps {
        script += &format!("{}\n", command(step, &host.name, plan.pod_link.as_str()));
    }
    let script = format!("{script}\n{show}\n").replace("LINK", plan.pod_link.as_str());
    let output = Command::new("unshare").args(["-n", "sh", "-xc", &script]).output().expect("unshare");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}\n{:#?}", plan.left_out);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn command(step: &Step, host_name: &str, link: &str) -> String {
    match step {
        Step::Vf { .. } | Step::DetachPrograms { .. } => "true".into(),
        Step::Move { name, mtu, address } => {
            let mtu = mtu.map(|m| format!(" mtu {m}")).unwrap_or_default();
            let address = address.as_ref().map(|a| format!(" address {a}")).unwrap_or_default();
            if host_name == name.as_str() && mtu.is_empty() && address.is_empty() {
                return "true".into();
            }
            format!("ip link set {host_name} name {name}{mtu}{address}")
        }
        Step::Vrf { name, table } => format!("ip link add {name} up type vrf table {table}\nip link set {link} master {name}"),
        Step::Link { .. } => unreachable!("not in these plans"),
        Step::AltName { name } => format!("ip link property add dev {link} altname {name}"),
        Step::Sysctl { key, value, .. } => {
            let (directory, leaf) = key.rsplit_once('/').expect("a sysctl's key has a slash");
            format!("echo {value} > /proc/sys/net/{directory}/{link}/{leaf}")
        }
        Step::Ethtool { change } => unreachable!("no host state here has {change}"),
        Step::Rdma { device, .. } => unreachable!("no plan here has {device}"),
        Step::Create { child, .. } => unreachable!("no configuration here asks for {child:?}"),
        Step::Up => format!("ip link set {link} up"),
        Step::Address { address } => add_address(address),
        Step::Neighbour { neighbour: n } => {
            format!("ip neigh add {} lladdr {} dev {link} nud permanent", n.ip, n.address.as_ref().expect("no proxy entry"))
        }
        Step::Route { route, .. } => add_route(route),
        Step::Rule { rule } => add_rule(rule),
    }
}

fn add_address(a: &Address) -> String {
    let own = if a.peer.is_some() { a.ip.to_string() } else { format!("{}/{}", a.ip, a.prefix_len) };
    let peer = a.peer.map(|p| format!(" peer {p}/{}", a.prefix_len)).unwrap_or_default();
    let dad = if a.flags & 2 != 0 { " nodad" } else { "" };
    let prefix = if a.flags & 0x200 != 0 { " noprefixroute" } else { "" };
    let end =
        if a.valid_lifetime == u32::MAX { String::new() } else { format!(" valid_lft {0} preferred_lft {0}", a.valid_lifetime) };
    format!("ip addr add {own}{peer} dev LINK{dad}{prefix}{end}")
}

fn add_route(r: &Route) -> String {
    let via = r.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
    let onlink = if r.onlink { " onlink" } else { "" };
    let source = r.source.map(|s| format!(" src {s}")).unwrap_or_default();
    let metric = r.metric.map(|m| format!(" metric {m}")).unwrap_or_default();
    let scope = if r.scope == 253 { " scope link" } else { "" };
    let hop = |h: &NextHop| format!(" nexthop via {} dev LINK weight {}", h.gateway.expect("a gateway"), h.weight);
    let hops: String = r.next_hops.iter().map(hop).collect();
    let by = if hops.is_empty() { " dev LINK" } else { "" };
    format!("ip route add {}{via}{by}{onlink}{scope}{source}{metric} table {} proto {}{hops}", r.destination, r.table, r.protocol)
}

fn add_rule(r: &Rule) -> String {
    let family = if r.ipv6 { "-6" } else { "-4" };
    let priority = r.priority.map(|p| format!(" priority {p}")).unwrap_or_default();
    let source = r.source.map(|s| format!(" from {s}")).unwrap_or_default();
    let destination = r.destination.map(|d| format!(" to {d}")).unwrap_or_default();
    let input = r.input_link.as_ref().map(|l| format!(" iif {l}")).unwrap_or_default();
    format!("ip {family} rule add{source}{destination}{input}{priority} table {}", r.table)
}

fn host(name: &str) -> HostState {
    let json = format!(
        r#"{{"index": 7, "name": "{name}", "mtu": 1500, "min_mtu": 68, "max_mtu": 65535, "address": "02:00:00:00:00:01", "flags": 1,
            "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {{}}}}"#
    );
    serde_json::from_str(&json).expect("a host state")
}

fn address(text: &str) -> Address {
    let net: ipnet::IpNet = text.parse().expect("an address");
    Address::permanent(net.addr(), net.prefix_len())
}

fn route(destination: &str, gateway: Option<&str>) -> Route {
    let gateway = gateway.map(|g| g.parse().expect("a gateway"));
    let scope = if gateway.is_none() { 253 } else { 0 };
    Route { gateway, scope, ..Route::to(destination.parse().expect("a destination")) }
}

fn neighbour(ip: &str) -> Neighbour {
    let address = "02:00:00:00:00:99".parse().expect("a MAC");
    Neighbour { ip: ip.parse().expect("an address"), address: Some(address), flags: 0, protocol: 0 }
}

#[test]
fn a_full_configuration_is_carried_out() {
    if let Some(reason) = missing() {
        return println!("skipped: {reason}");
    }
    let config = r#"{
        "interface": {"name": "rail0", "addresses": ["10.20.0.5/32", "10.30.0.0/31", "fd00:20::5/64", "fd01::5/48"], "mtu": 1400,
            "hardwareAddr": "02:00:00:00:00:05"},
        "routes": [
            {"destination": "10.0.0.0/8", "gateway": "10.20.0.1", "source": "10.20.0.5", "table": 120},
            {"destination": "10.20.0.1/32", "scope": 253, "table": 120},
            {"destination": "10.20.0.1/32", "scope": 253},
            {"destination": "10.30.0.0/31", "scope": 253, "source": "10.30.0.0"},
            {"destination": "10.40.0.0/16", "gateway": "10.20.0.5"},
            {"destination": "0.0.0.0/0", "gateway": "10.20.0.1", "table": 121},
            {"destination": "fd01:0:0:20::/64", "gateway": "fd01::1"},
            {"destination": "fd02::/64", "gateway": "fd01:0:0:20::1"},
            {"destination": "fd03::/64", "gateway": "fe80::1"},
            {"destination": "fd00:20::/64", "scope": 253}],
        "rules": [{"priority": 1000, "source": "10.20.0.5/32", "destination": "10.0.0.0/8", "table": 120}, {"table": 121},
            {"priority": 0, "source": "fd00:20::/64", "table": 120}],
        "neighbors": [{"destination": "10.20.0.1", "hardwareAddr": "02:00:00:00:00:01"},
            {"destination": "fd00:20::1", "hardwareAddr": "02:00:00:00:00:01"}]}"#;
    let show = "ip link show LINK; ip addr show LINK; ip route show table all dev LINK; ip rule; ip -6 rule; ip neigh show dev LINK; \
                ip -6 neigh show dev LINK";
    let shown = run(config, &host("enp1s0"), show);
    let expected = [
        "mtu 1400",
        "link/ether 02:00:00:00:00:05",
        "inet 10.20.0.5/32",
        "inet6 fd00:20::5/64 scope global nodad",
        "10.0.0.0/8 via 10.20.0.1 table 120",
        "default via 10.20.0.1 table 121",
        "fd02::/64 via fd01:0:0:20::1",
        "fd03::/64 via fe80::1",
        "1000:\tfrom 10.20.0.5 to 10.0.0.0/8 lookup 120",
        "0:\tfrom fd00:20::/64 lookup 120",
        "10.20.0.1 lladdr 02:00:00:00:00:01 PERMANENT",
        "fd00:20::1 lladdr 02:00:00:00:00:01 PERMANENT",
    ];
    for text in expected {
        assert!(shown.contains(text), "{text} is not in:\n{shown}");
    }
    assert!(!shown.contains("scope global tentative"), "{shown}");
}

#[test]
fn a_host_state_is_carried_into_the_pod() {
    if let Some(reason) = missing() {
        return println!("skipped: {reason}");
    }
    let mut host = host("enp1s0");
    let hop = |gateway: &str| NextHop {
        index: 7,
        gateway: Some(gateway.parse().expect("ip")),
        weight: 2,
        onlink: false,
        other: String::new(),
    };
    let mut by_hand = address("10.51.0.1/24");
    by_hand.flags |= 0x200;
    let ends = Address { valid_lifetime: 600, preferred_lifetime: 600, flags: 0, ..address("fd51::1/64") };
    let mut peer = address("10.52.0.1/32");
    peer.peer = Some("10.52.0.2".parse().expect("ip"));
    host.addresses = vec![address("10.50.0.1/24"), by_hand, address("fd50::1/64"), ends, peer];
    host.routes = vec![
        Route {
            table: 100,
            metric: Some(50),
            source: Some("10.50.0.1".parse().expect("ip")),
            ..route("10.60.0.0/16", Some("10.50.0.9"))
        },
        Route { table: 100, ..route("0.0.0.0/0", Some("10.61.0.1")) },
        Route { onlink: true, ..route("10.62.0.0/16", Some("172.16.0.1")) },
        Route { next_hops: vec![hop("10.50.0.8"), hop("10.50.0.9")], scope: 0, ..route("10.63.0.0/16", None) },
        route("10.64.0.0/16", Some("10.52.0.2")),
        Route { metric: Some(101), protocol: 2, ..route("10.51.0.0/24", None) },
        Route { table: 100, ..route("10.61.0.0/24", None) },
        route("fd60::/64", Some("fd51::9")),
        // What follows would be refused in the pod, and must have been left out.
        route("10.65.0.0/16", Some("10.99.0.1")),
        Route { source: Some("10.99.0.5".parse().expect("ip")), ..route("10.66.0.0/16", None) },
        Route { table: 101, ..route("10.67.0.0/16", Some("10.61.0.1")) },
        route("fd61::/64", Some("fd50::1")),
        route("10.60.0.0/16", Some("10.98.0.1")),
    ];
    let rule = |json: &str| serde_json::from_str::<Rule>(json).expect("a rule");
    host.rules = vec![
        rule(r#"{"ipv6": false, "priority": 500, "source": "10.50.0.1/32", "table": 100, "action": 1}"#),
        rule(r#"{"ipv6": false, "priority": 501, "table": 100, "action": 1, "input_link": "enp1s0"}"#),
    ];
    host.neighbours = vec![neighbour("10.50.0.9"), neighbour("fe80::9"), neighbour("172.16.0.1"), neighbour("10.99.0.1")];
    let show = "ip addr show LINK; ip route show table all; ip -6 route show; ip rule; ip neigh; ip -6 neigh";
    let shown = run(r#"{"interface": {"name": "rail0"}}"#, &host, show);
    let expected = [
        "10.60.0.0/16 via 10.50.0.9 dev rail0 table 100 proto static src 10.50.0.1 metric 50",
        "default via 10.61.0.1 dev rail0 table 100",
        "10.62.0.0/16 via 172.16.0.1 dev rail0 proto static onlink",
        "10.63.0.0/16 proto static",
        "10.51.0.0/24 dev rail0 proto kernel scope link metric 101",
        "fd51::/64 dev rail0 proto kernel metric 256 expires",
        "fd60::/64 via fd51::9 dev rail0",
        "501:\tfrom all iif rail0 lookup 100",
        "172.16.0.1 dev rail0 lladdr 02:00:00:00:00:99 PERMANENT",
    ];
    for text in expected {
        assert!(shown.contains(text), "{text} is not in:\n{shown}");
    }
    assert!(!shown.contains("10.99.0.") && !shown.contains("10.98.0."), "{shown}");
}

/// A host NIC 10.50.0.1/24 in a pod as 10.99.0.5/24: where the kernel refuses a copied route, the pod never starts.
#[test]
fn another_address_than_the_hosts_works() {
    if let Some(reason) = missing() {
        return println!("skipped: {reason}");
    }
    let mut host = host("enp1s0");
    host.addresses = vec![address("10.50.0.1/24")];
    let source = Some("10.50.0.1".parse().expect("ip"));
    host.routes = vec![
        Route { source, protocol: 2, ..route("10.50.0.0/24", None) },
        Route { source, table: 100, ..route("10.50.0.0/24", None) },
        route("10.60.0.0/16", Some("10.50.0.254")),
    ];
    let shown = run(r#"{"interface": {"addresses": ["10.99.0.5/24"]}}"#, &host, "ip route show table all dev LINK");
    assert!(shown.contains("10.99.0.0/24"), "{shown}");
    assert!(!shown.contains("10.50.0."), "{shown}");
}
