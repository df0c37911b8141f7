//! What a lease brings, and what goes before it.

use super::*;
use crate::netdev::address::{FOREVER, IFA_F_PERMANENT};

/// A lease of 10.9.0.5/24 for 200 s, with these fields changed.
fn lease(change: serde_json::Value) -> Lease {
    let mut lease = serde_json::json!({
        "address": "10.9.0.5", "prefixLen": 24, "server": "10.9.0.1", "via": "02:00:00:00:00:01", "leaseSeconds": 200,
        "renewSeconds": 100, "rebindSeconds": 174, "obtainedBootMs": 1000, "obtainedUnixMs": 1
    });
    for (key, value) in change.as_object().unwrap() {
        lease[key] = value.clone();
    }
    serde_json::from_value(lease).unwrap()
}

fn leased(json: &str, lease: &Lease) -> Plan {
    plan_with(&config(json), &host(), Some(lease)).unwrap_or_else(|e| panic!("{json}: {e}"))
}

fn addresses(plan: &Plan) -> Vec<Address> {
    plan.steps.iter().filter_map(|s| if let Step::Address { address } = s { Some(address.clone()) } else { None }).collect()
}

fn mtu(plan: &Plan) -> Option<u32> {
    plan.steps.iter().find_map(|s| if let Step::Move { mtu, .. } = s { *mtu } else { None })
}

fn shown(plan: &Plan) -> Vec<String> {
    let via = |r: &Route| r.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
    let more = |r: &Route| if r.onlink { " onlink" } else { "" };
    routes(plan).iter().map(|r| format!("{}{}{} {}", r.destination, via(r), more(r), r.metric.unwrap_or(0))).collect()
}

const DHCP: &str = r#"{"interface": {"dhcp": true}}"#;

#[test]
fn the_lease_stands_in_place_of_the_hosts_addresses_and_ends() {
    let [address] = &addresses(&leased(DHCP, &lease(serde_json::json!({}))))[..] else { panic!() };
    assert_eq!((address.to_string(), address.flags), ("10.9.0.5/24 valid 200s preferred 200s flags 0x0".to_owned(), 0));
    let forever = leased(DHCP, &lease(serde_json::json!({"leaseSeconds": u32::MAX})));
    let [address] = &addresses(&forever)[..] else { panic!() };
    assert_eq!((address.valid_lifetime, address.flags), (FOREVER, IFA_F_PERMANENT));
    // Before there is a lease.
    assert_eq!(addresses(&planned(DHCP, &host())), []);
    assert_eq!(addresses(&leased(r#"{"interface": {"dhcp": true, "addresses": []}}"#, &lease(serde_json::json!({})))).len(), 1);
}

#[test]
fn an_address_is_added_for_what_is_left_of_its_lease() {
    let lease = lease(serde_json::json!({}));
    let [planned] = &addresses(&leased(DHCP, &lease))[..] else { panic!() };
    let now = crate::dhcp::Moment { boot_ms: 51_000, unix_ms: 0 };
    assert_eq!(super::super::dhcp::address_now(planned, Some(&lease), now).valid_lifetime, 150);
    let other = address("10.0.0.5/24");
    assert_eq!(super::super::dhcp::address_now(&other, Some(&lease), now), other);
    assert_eq!(super::super::dhcp::address_now(planned, None, now), *planned);
}

#[test]
fn its_routes_have_a_metric_behind_those_of_the_pod_and_the_claims_go_first() {
    let lease = lease(serde_json::json!({"routes": [
        {"destination": "10.20.0.0/16", "gateway": "10.9.0.7"}, {"destination": "10.9.1.1/32"},
        {"destination": "10.30.0.0/16", "gateway": "10.9.1.1"}, {"destination": "0.0.0.0/0", "gateway": "172.16.0.1"}
    ]}));
    let all = [
        "10.9.1.1/32 1024",
        "10.20.0.0/16 via 10.9.0.7 1024",
        "10.30.0.0/16 via 10.9.1.1 1024",
        "0.0.0.0/0 via 172.16.0.1 onlink 1024",
    ];
    let sorted = |mut list: Vec<String>| {
        list.sort();
        list
    };
    assert_eq!(sorted(shown(&leased(DHCP, &lease))), sorted(all.map(str::to_owned).to_vec()));
    assert!(leased(DHCP, &lease).steps.iter().all(|s| !matches!(s, Step::Route { configured: true, .. })));
    let own = r#"{"interface": {"dhcp": true}, "routes": [{"destination": "10.20.0.0/16", "gateway": "10.9.0.9"}]}"#;
    let plan = leased(own, &lease);
    assert!(shown(&plan).contains(&"10.20.0.0/16 via 10.9.0.9 0".to_owned()), "{:?}", shown(&plan));
    assert!(!shown(&plan).contains(&"10.20.0.0/16 via 10.9.0.7 1024".to_owned()));
    assert!(
        plan.left_out.iter().any(|l| l.contains("10.20.0.0/16 via 10.9.0.7 of the DHCP server: the claim has one")),
        "{plan:?}"
    );
    // In a table of its own the claim's does not stand in the way.
    let own = r#"{"interface": {"dhcp": true}, "routes": [{"destination": "10.20.0.0/16", "gateway": "10.9.0.9", "table": 7}]}"#;
    assert!(shown(&leased(own, &lease)).contains(&"10.20.0.0/16 via 10.9.0.7 1024".to_owned()));
}

#[test]
fn its_mtu_counts_if_none_is_configured_and_the_device_can_have_it() {
    let lent = |mtu: u16| lease(serde_json::json!({"mtu": mtu}));
    assert_eq!(mtu(&leased(DHCP, &lent(1400))), Some(1400));
    assert_eq!(mtu(&leased(DHCP, &lent(9000))), None, "the host's");
    assert_eq!(mtu(&leased(r#"{"interface": {"dhcp": true, "mtu": 1500}}"#, &lent(1400))), Some(1500));
    let plan = leased(DHCP, &lent(60_000));
    assert_eq!(mtu(&plan), None);
    assert!(plan.left_out.iter().any(|l| l == "MTU 60000 of the DHCP server: the device can't have it"), "{:?}", plan.left_out);
}
