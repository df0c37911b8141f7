use proptest::prelude::*;

use super::*;

mod rdma;

/// Every field that goes together with `rules` and `addresses`.
const FULL: &str = r#"{
  "profile": "rail-a",
  "interface": {
    "name": "rail0", "addresses": ["10.20.0.5/24", "fd00:20::5/64"], "mtu": 9000,
    "hardwareAddr": "02:00:00:00:00:05",
    "gsoMaxSize": 131072, "groMaxSize": 131072, "gsoIPv4MaxSize": 131072, "groIPv4MaxSize": 131072,
    "disableEbpfPrograms": true, "forwarding": false, "arpIgnore": 1, "arpAnnounce": 2
  },
  "routes": [
    {"destination": "10.20.0.1/32", "scope": 253, "table": 120},
    {"destination": "10.0.0.0/8", "gateway": "10.20.0.1", "source": "10.20.0.5", "table": 120}
  ],
  "rules": [{"priority": 1000, "source": "10.20.0.5/32", "destination": "10.0.0.0/8", "table": 120}],
  "neighbors": [{"destination": "10.20.0.1", "hardwareAddr": "02:00:00:00:00:01"}],
  "ethtool": {"features": {"tso": true, "rx-gro-hw": false}, "privateFlags": {"rx_striding_rq": true}}
}"#;

fn faults(json: &str) -> Vec<String> {
    parse(json).unwrap_or_else(|e| panic!("{json}: {e}")).validate().iter().map(ToString::to_string).collect()
}

#[test]
fn the_full_example_is_valid_and_nothing_is_lost() {
    let config = parse(FULL).unwrap();
    assert_eq!(config.validate(), []);
    let written: Value = serde_json::from_str(FULL).unwrap();
    assert_eq!(serde_json::to_value(&config).unwrap(), written, "a field was lost on the way");
}

#[test]
fn the_documentation_has_every_field_and_its_examples_are_valid() {
    let text = include_str!("../../docs/configuration.md");
    let examples: Vec<&str> = text.split("```json").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(examples.len(), 2);
    for example in &examples {
        assert_eq!(faults(example), [""; 0]);
    }
    // The first example names all fields of the peer's; so do the tables.
    let mut fields = Vec::new();
    let mut open = vec![serde_json::from_str::<Value>(FULL).unwrap()];
    while let Some(value) = open.pop() {
        let inner = |key: &str| !["features", "privateFlags"].contains(&key);
        fields.extend(value.as_object().into_iter().flatten().map(|(key, _)| key.clone()));
        open.extend(value.as_object().into_iter().flatten().filter(|(key, _)| inner(key)).map(|(_, v)| v.clone()));
        open.extend(value.as_array().into_iter().flatten().cloned());
    }
    for field in fields {
        assert!(examples[0].contains(&format!("\"{field}\"")), "{field} is not in the example");
        let in_table =
            text.lines().any(|line| line.starts_with('|') && line.contains(&field)) || text.contains(&format!("### `{field}"));
        assert!(in_table, "{field} is in no table");
    }
}

#[test]
fn the_vrf_and_dhcp_variants_are_valid() {
    let mut vrf: Value = serde_json::from_str(FULL).unwrap();
    vrf.as_object_mut().unwrap().remove("rules");
    vrf["interface"]["vrf"] = serde_json::json!({"name": "blue", "table": 1500});
    assert_eq!(faults(&vrf.to_string()), [""; 0]);
    let mut dhcp: Value = serde_json::from_str(FULL).unwrap();
    dhcp["interface"].as_object_mut().unwrap().remove("addresses");
    dhcp["interface"]["dhcp"] = true.into();
    assert_eq!(faults(&dhcp.to_string()), [""; 0]);
}

#[test]
fn null_is_the_same_as_absent() {
    for json in ["null", "{}", r#"{"interface": null, "routes": null, "rules": null, "neighbors": null, "ethtool": null}"#] {
        assert_eq!(parse(json).unwrap(), NetworkConfig::default(), "{json}");
    }
    assert_eq!(parse(r#"{"interface": {"mtu": null, "vrf": null}}"#).unwrap().interface, Some(InterfaceConfig::default()));
}

#[test]
fn absent_zero_false_and_empty_are_told_apart() {
    let interface = |json: &str| parse(json).unwrap().interface.unwrap();
    assert_eq!(interface(r#"{"interface": {"dhcp": false}}"#).dhcp, Some(false));
    assert_eq!(interface(r#"{"interface": {"arpIgnore": 0}}"#).arp_ignore, Some(0));
    assert_eq!(interface(r#"{"interface": {"addresses": []}}"#).addresses, Some(vec![]));
    let rule = |json: &str| parse(json).unwrap().rules.unwrap()[0].priority;
    assert_eq!(rule(r#"{"rules": [{"priority": 0, "table": 7}]}"#), Some(0));
    assert_eq!(rule(r#"{"rules": [{"table": 7}]}"#), None);
}

#[test]
fn a_fault_of_form_has_its_path_and_says_what_to_do() {
    let cases = [
        ("", "(root)", "is not JSON"),
        ("{", "(root)", "is not JSON"),
        ("{} {}", "(root)", "is not JSON"),
        ("7", "(root)", "expected struct NetworkConfig"),
        ("[]", "(root)", "must be an object"),
        (r#"{"interface": ["rail0"]}"#, "interface", "must be an object"),
        (r#"{"routes": [{}, ["10.0.0.0/8", "10.0.0.1"]]}"#, "routes[1]", "must be an object"),
        (r#"{"neighbors": [[]]}"#, "neighbors[0]", "must be an object"),
        (r#"{"ethtool": [{}]}"#, "ethtool", "must be an object"),
        (r#"{"interface": {"vrf": ["blue"]}}"#, "interface.vrf", "must be an object"),
        (r#"{"interface": {"hardwareaddr": "02:00:00:00:00:05"}}"#, "interface.hardwareaddr", "did you mean hardwareAddr?"),
        (r#"{"interface": {"hardwareAddress": "x"}}"#, "interface.hardwareAddress", "did you mean hardwareAddr?"),
        (r#"{"interface": {"gro_ipv4_max_size": 1}}"#, "interface.gro_ipv4_max_size", "did you mean groIPv4MaxSize?"),
        (r#"{"interface": {"adresses": []}}"#, "interface.adresses", "did you mean addresses?"),
        (r#"{"neighbours": []}"#, "neighbours", "did you mean neighbors?"),
        (r#"{"neighbors": [{"ipAddress": "10.0.0.1"}]}"#, "neighbors[0].ipAddress", "did you mean destination?"),
        (r#"{"routes": [{"weight": 5}]}"#, "routes[0].weight", "the fields here are destination, gateway, source, scope, table"),
        (r#"{"interface": {"vrf": {"id": 5}}}"#, "interface.vrf.id", "the fields here are name, table"),
        (r#"{"apiVersion": "v1"}"#, "apiVersion", "no apiVersion and kind"),
        (r#"{"x`, expected `interface`": 1}"#, "x`, expected `interface`", "the fields here are profile, interface"),
        (r#"{"interface": {"addresses": ["10.0.0.5/24", "10.0.0.5"]}}"#, "interface.addresses[1]", "10.0.0.5/24"),
        (r#"{"interface": {"addresses": ["10.0.0.5/33"]}}"#, "interface.addresses[0]", "\"10.0.0.5/33\""),
        (r#"{"interface": {"addresses": "10.0.0.5/24"}}"#, "interface.addresses", "expected a sequence"),
        (r#"{"routes": [{"destination": "default"}]}"#, "routes[0].destination", "0.0.0.0/0"),
        (r#"{"routes": [{"gateway": "fe80::1%eth0"}]}"#, "routes[0].gateway", "(write 10.0.0.1 or fd00::1)"),
        (r#"{"interface": {"hardwareAddr": "02:00"}}"#, "interface.hardwareAddr", "02:00:00:00:00:05"),
        (r#"{"interface": {"name": "a/b"}}"#, "interface.name", "must not contain '/'"),
        (r#"{"interface": {"mtu": -1}}"#, "interface.mtu", "expected u32"),
        (r#"{"interface": {"mtu": "9000"}}"#, "interface.mtu", "expected u32"),
        (r#"{"interface": {"mtu": 9000.0}}"#, "interface.mtu", "expected u32"),
        (r#"{"routes": [{"scope": 256}]}"#, "routes[0].scope", "expected u8"),
        (r#"{"interface": {"vrf": {"table": 5}}}"#, "interface.vrf", "missing field `name`"),
        (r#"{"ethtool": {"features": {"tso": null}}}"#, "ethtool.features.tso", "expected a boolean"),
    ];
    for (json, path, words) in cases {
        let fault = parse(json).expect_err(json);
        assert_eq!(fault.path, path, "{json}: {fault}");
        assert!(fault.message.contains(words), "{json}: {fault}");
    }
}

#[test]
fn keys_that_stand_twice_are_found_wherever_they_are() {
    let twice = r#"{"a": {"b": 1, "b": {"c": 1, "c": 2}}, "l": [0, {"x": 1, "y": [{"z": 1, "z": 1}], "x": 2}], "a": 3}"#;
    assert_eq!(duplicate_keys(twice), ["a.b", "l[1].y[0].z", "l[1].x", "a"]);
    assert_eq!(duplicate_keys(r#"{"a": 1, "b": [{"a": 1}, {"a": 1}], "A": 2}"#), [""; 0]);
    assert_eq!(duplicate_keys(r#"{"a": 1, "\u0061": 1}"#), ["a"], "written in another way");
    for broken in ["", "{\"a\": 1, \"a\": 2", "{\"a\": 1, \"a\": 2} x", "nonsense"] {
        assert_eq!(duplicate_keys(broken), [""; 0], "{broken}");
    }
    let fault = parse(r#"{"ethtool": {"features": {"tso": true, "tso": false}}}"#).unwrap_err();
    assert_eq!(fault.path, "ethtool.features.tso");
}

#[test]
fn huge_and_deep_input_is_refused_shortly() {
    let long = format!(r#"{{"profile": "{}"}}"#, "x".repeat(PARAMETERS_MAX));
    assert!(parse(&long).unwrap_err().message.contains("at most 65536"));
    let deep = format!(r#"{{"profile": {}1{}}}"#, "[".repeat(NESTING_MAX), "]".repeat(NESTING_MAX));
    assert!(parse(&deep).unwrap_err().message.contains("nested"), "{}", parse(&deep).unwrap_err());
    let bottomless = "[".repeat(PARAMETERS_MAX);
    assert!(parse(&bottomless).is_err());
    let key = "k".repeat(30_000);
    for json in [format!(r#"{{"{key}": 1, "{key}": 1}}"#), format!(r#"{{"{key}": 1}}"#), format!(r#"{{"interface": "{key}"}}"#)] {
        assert!(parse(&json).unwrap_err().to_string().len() < 2000);
    }
}

#[test]
fn a_fault_of_meaning_has_its_path_and_says_what_to_do() {
    let cases = [
        (r#"{"profile": ""}"#, "profile: must have 1 to 253 bytes"),
        (r#"{"interface": {"name": "lo"}}"#, "interface.name: \"lo\" is reserved"),
        (r#"{"interface": {"name": "all"}}"#, "interface.name: \"all\" is reserved"),
        (r#"{"interface": {"name": "rail%d"}}"#, "interface.name: must not contain '%'"),
        (r#"{"interface": {"addresses": ["10.0.0.5/24"], "dhcp": true}}"#, "interface.dhcp: can't be true when"),
        (r#"{"interface": {"type": "ipvlan", "dhcp": true}}"#, "interface.dhcp: works with interface.type passthrough only"),
        (r#"{"interface": {"addresses": ["10.0.0.0/24"]}}"#, "for example 10.0.0.1/24"),
        (r#"{"interface": {"addresses": ["10.0.0.255/24"]}}"#, "10.0.0.255 is the broadcast address"),
        (r#"{"interface": {"addresses": ["10.0.0.5/0"]}}"#, "interface.addresses[0]: a prefix length of 0"),
        (r#"{"interface": {"addresses": ["0.0.0.0/32"]}}"#, "is the unspecified address"),
        (r#"{"interface": {"addresses": ["127.0.0.1/8"]}}"#, "is a loopback address"),
        (r#"{"interface": {"addresses": ["224.0.0.5/32"]}}"#, "is a multicast address"),
        (r#"{"interface": {"addresses": ["255.255.255.255/32"]}}"#, "is the broadcast address"),
        (r#"{"interface": {"addresses": ["fd00::/64"]}}"#, "for example fd00::1/64"),
        (r#"{"interface": {"addresses": ["ff02::1/128"]}}"#, "is a multicast address"),
        (r#"{"interface": {"addresses": ["::ffff:10.0.0.1/128"]}}"#, "write it as IPv4"),
        (
            r#"{"interface": {"addresses": ["10.0.0.5/24", "10.0.0.5/32"]}}"#,
            "interface.addresses[1]: 10.0.0.5 is in the list twice",
        ),
        (r#"{"interface": {"mtu": 0}}"#, "interface.mtu: is 0; must be 68 to"),
        (r#"{"interface": {"mtu": 67}}"#, "interface.mtu: is 67; must be 68 to"),
        (r#"{"interface": {"mtu": 4294967295}}"#, "interface.mtu: is 4294967295; must be 68 to"),
        (r#"{"interface": {"mtu": 1279, "addresses": ["fd00::5/64"]}}"#, "interface.mtu: is 1279; an IPv6 address needs"),
        (r#"{"interface": {"hardwareAddr": "01:00:00:00:00:05"}}"#, "interface.hardwareAddr: is a multicast address"),
        (r#"{"interface": {"hardwareAddr": "00:00:00:00:00:00"}}"#, "interface.hardwareAddr: is all zero"),
        (r#"{"interface": {"hardwareAddr": "02:00:00:00:00:00:00"}}"#, "interface.hardwareAddr: has 7 bytes"),
        (r#"{"interface": {"gsoMaxSize": 0}}"#, "interface.gsoMaxSize: must be 1 to"),
        (r#"{"interface": {"groIPv4MaxSize": 0}}"#, "interface.groIPv4MaxSize: must be 1 to"),
        (r#"{"interface": {"arpIgnore": 4}}"#, "interface.arpIgnore: must be 0, 1, 2, 3 or 8"),
        (r#"{"interface": {"arpAnnounce": 3}}"#, "interface.arpAnnounce: must be 0, 1 or 2"),
        (r#"{"interface": {"vrf": {"name": ""}}}"#, "interface.vrf.name: must have 1 to 15 bytes"),
        (r#"{"interface": {"vrf": {"name": "sixteen-bytes-xx"}}}"#, "interface.vrf.name: must have 1 to 15 bytes"),
        (r#"{"interface": {"name": "x", "vrf": {"name": "x"}}}"#, "interface.vrf.name: is the same as interface.name"),
        (r#"{"interface": {"vrf": {"name": "lo"}}}"#, "interface.vrf.name: \"lo\" is reserved"),
        (r#"{"interface": {"vrf": {"name": "blue", "table": 0}}}"#, "interface.vrf.table: must be 1 or more"),
        (r#"{"interface": {"vrf": {"name": "blue", "table": 254}}}"#, "interface.vrf.table: must be 1 or more"),
        (r#"{"interface": {"vrf": {"name": "blue"}}, "rules": [{"table": 5}]}"#, "rules: can't be used with interface.vrf"),
        (r#"{"routes": [{"gateway": "10.0.0.1"}]}"#, "routes[0].destination: is required"),
        (r#"{"routes": [{"destination": "10.0.0.0/8"}]}"#, "routes[0].gateway: is required unless"),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 0}]}"#, "routes[0].gateway: is required unless"),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "10.0.0.1", "scope": 253}]}"#,
            "routes[0].gateway: a route of scope 253",
        ),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 254}]}"#, "routes[0].scope: is 254; must be 0"),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "fd00::1"}]}"#,
            "routes[0].gateway: fd00::1 is of another family",
        ),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "10.0.0.1", "source": "fd00::1"}]}"#,
            "routes[0].source: fd00::1 is of another",
        ),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "0.0.0.0"}]}"#, "routes[0].gateway: 0.0.0.0 is the unspecified"),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 253, "table": 255}]}"#, "routes[0].table: 255 (local)"),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "gateway": "10.0.0.1"},
                {"destination": "10.1.1.1/8", "gateway": "10.0.0.2", "table": 254}]}"#,
            "routes[1]: 10.0.0.0/8 is in the same table with the same metric twice",
        ),
        (
            r#"{"routes": [{"destination": "fd00::/8", "gateway": "fd00::1"},
                {"destination": "fd00::/8", "gateway": "fd00::1", "metric": 1024}]}"#,
            "routes[1]: fd00::/8 is in the same table with the same metric twice",
        ),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "type": "blackhole", "mtu": 1400}]}"#, "routes[0].mtu: packets by a route"),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "type": "throw", "gateway": "10.0.0.1"}]}"#,
            "routes[0].gateway: packets by a route",
        ),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 253, "onlink": true}]}"#,
            "routes[0].onlink: says that the gateway",
        ),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 253, "mtu": 65521}]}"#,
            "routes[0].mtu: is 65521; must be 68 to 65520",
        ),
        (r#"{"routes": [{"destination": "fd00::/8", "scope": 253, "mtu": 1279}]}"#, "routes[0].mtu: is 1279; must be 1280 to"),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 253, "advmss": 0}]}"#,
            "routes[0].advmss: is 0; must be 1 to 65495",
        ),
        (r#"{"rules": [{"priority": 32768, "table": 5}]}"#, "rules[0].priority: is 32768; must be 0 to 32767"),
        (
            r#"{"rules": [{"source": "10.0.0.0/8", "destination": "fd00::/8", "table": 5}]}"#,
            "rules[0].destination: fd00::/8 is of another",
        ),
        (r#"{"rules": [{"table": 5}, {"table": 5}]}"#, "rules[1]: is in the list twice"),
        (r#"{"rules": [{"fwmask": 5}]}"#, "rules[0].fwmask: is the mask of fwmark, which is not there"),
        (r#"{"rules": [{"fwmark": 256, "fwmask": 255}]}"#, "rules[0].fwmark: 0x100 has bits that fwmask 0xff does not"),
        (r#"{"rules": [{"iif": "a/b"}]}"#, "rules[0].iif: "),
        (r#"{"rules": [{"suppressPrefixLength": 33}]}"#, "rules[0].suppressPrefixLength: is 33; must be 0 to 32"),
        (r#"{"neighbors": [{"hardwareAddr": "02:00:00:00:00:01"}]}"#, "neighbors[0].destination: is required"),
        (r#"{"neighbors": [{"destination": "10.0.0.1"}]}"#, "neighbors[0].hardwareAddr: is required"),
        (
            r#"{"neighbors": [{"destination": "10.0.0.1", "hardwareAddr": "02:00:00:00:00:01"},
                {"destination": "10.0.0.1", "hardwareAddr": "02:00:00:00:00:02"}]}"#,
            "neighbors[1].destination: 10.0.0.1 is in the list twice",
        ),
        (r#"{"ethtool": {"features": {"": true}}}"#, "ethtool.features.: a name has 1 to 31 bytes"),
        (
            r#"{"ethtool": {"privateFlags": {"a-name-of-more-than-31-characters-": true}}}"#,
            "ethtool.privateFlags.a-name-of-more-than",
        ),
        (r#"{"ethtool": {"rings": {"rx": 0, "tx": 512}}}"#, "ethtool.rings.rx: is 0; a ring has 1 descriptor or more"),
        (
            r#"{"ethtool": {"channels": {"rx": 0, "tx": 1, "combined": 0}}}"#,
            "ethtool.channels: without combined channels both rx and tx",
        ),
    ];
    for (json, words) in cases {
        let found = faults(json);
        assert_eq!(found.len(), 1, "{json}: {found:?}");
        assert!(found[0].contains(words), "{json}: {found:?}");
    }
}

#[test]
fn unusual_but_right_values_are_taken() {
    let cases = [
        r#"{"interface": {"addresses": []}}"#,
        r#"{"interface": {"addresses": [], "dhcp": true}}"#,
        r#"{"interface": {"addresses": ["10.0.0.5/24"], "dhcp": false}}"#,
        r#"{"interface": {"addresses": ["10.0.0.0/31", "10.0.0.1/31", "10.1.0.0/32", "fd00::/127", "fd01::/128"]}}"#,
        r#"{"interface": {"addresses": ["fe80::5/64", "169.254.1.1/16", "fd00::ffff:ffff:ffff:ffff/64"]}}"#,
        r#"{"interface": {"mtu": 68}}"#,
        r#"{"routes": [{"destination": "10.0.0.0/8", "type": "blackhole", "metric": 5}, {"destination": "10.0.0.0/8", "scope": 253}]}"#,
        r#"{"rules": [{"table": 5}, {"table": 5, "fwmark": 1}, {"table": 5, "iif": "lo"}, {"source": "::/0", "suppressPrefixLength": 128}]}"#,
        r#"{"hostState": {"routes": "ignore"}, "restore": "minimal"}"#,
        r#"{"interface": {"hardwareAddr": "80-00-02-08-fe-80-00-00-00-00-00-00-00-02-c9-03-00-01-02-03"}}"#,
        r#"{"interface": {"name": "netz-ä"}}"#,
        r#"{"interface": {"vrf": {"name": "blue"}}, "rules": []}"#,
        r#"{"routes": [{"destination": "0.0.0.0/0", "gateway": "10.0.0.1", "table": 4294967295}]}"#,
        r#"{"routes": [{"destination": "10.1.2.3/8", "scope": 253}, {"destination": "10.1.2.3/8", "scope": 253, "table": 9}]}"#,
        r#"{"rules": [{"priority": 0, "table": 9}, {"source": "10.0.0.5/24", "table": 9}, {}]}"#,
        r#"{"neighbors": [{"destination": "10.0.0.1", "hardwareAddr": "03:bf:0a:00:00:01"}]}"#,
    ];
    for json in cases {
        assert_eq!(faults(json), [""; 0], "{json}");
    }
}

#[test]
fn long_lists_are_refused() {
    let addresses: Vec<String> = (0..65).map(|i| format!("10.0.{i}.1/24")).collect();
    let routes = vec![serde_json::json!({}); 257];
    let all = serde_json::json!({"interface": {"addresses": addresses}, "routes": routes, "rules": routes, "neighbors": routes});
    let found = faults(&all.to_string());
    assert_eq!(found.len(), 4, "{found:?}");
    assert!(found.iter().all(|f| f.contains("elements; at most")), "{found:?}");
}

#[test]
fn every_fault_is_reported_at_once() {
    let found = faults(r#"{"interface": {"mtu": 1, "arpIgnore": 9}, "routes": [{}], "neighbors": [{}]}"#);
    assert_eq!(found.len(), 6, "{found:?}");
}

#[test]
fn merging_is_field_by_field_and_the_later_wins() {
    let base = parse(
        r#"{"profile": "a", "interface": {"name": "x", "mtu": 9000, "dhcp": true, "vrf": {"name": "blue", "table": 7}},
            "routes": [{"destination": "10.0.0.0/8", "scope": 253}],
            "ethtool": {"features": {"tso": true, "gro": true}}}"#,
    )
    .unwrap();
    let over = parse(
        r#"{"interface": {"mtu": 1500, "dhcp": false, "vrf": {"name": "red"}}, "routes": [], "rules": [{"table": 7}],
            "ethtool": {"features": {"gro": false}, "privateFlags": {"f": true}}}"#,
    )
    .unwrap();
    let merged = parse(
        r#"{"profile": "a", "interface": {"name": "x", "mtu": 1500, "dhcp": false, "vrf": {"name": "red", "table": 7}},
            "routes": [], "rules": [{"table": 7}],
            "ethtool": {"features": {"tso": true, "gro": false}, "privateFlags": {"f": true}}}"#,
    )
    .unwrap();
    assert_eq!(base.clone().merged_with(over), merged);
    assert_eq!(base.clone().merged_with(NetworkConfig::default()), base);
    assert_eq!(NetworkConfig::default().merged_with(base.clone()), base);
}

#[test]
fn what_is_not_carried_out_is_named_field_by_field() {
    let paths = |json: &str| -> Vec<String> { parse(json).unwrap().not_supported_yet().into_iter().map(|f| f.path).collect() };
    assert_eq!(paths(FULL), ["profile"]);
    let rest = r#"{"interface": {"dhcp": true, "forwarding": true, "vrf": {"name": "blue"}}}"#;
    assert_eq!(paths(rest), [""; 0]);
    let nothing = r#"{"interface": {"name": "a", "addresses": [], "mtu": 1500, "hardwareAddr": "02:00:00:00:00:05", "dhcp": false,
        "disableEbpfPrograms": false, "forwarding": false}, "routes": [], "rules": [], "neighbors": [],
        "ethtool": {"features": {}}}"#;
    assert_eq!(paths(nothing), [""; 0]);
}

fn json() -> impl Strategy<Value = Value> {
    let names = "(interface|name|addresses|mtu|routes|rules|neighbors|destination|gateway|table|scope|ethtool|features|vrf|x)";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_u32..300).prop_map(Value::from),
        "([0-9a-f.:/]{0,24}|10.0.0.[0-9]{1,3}/[0-9]{1,2}|.{0,8})".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::btree_map(names, inner, 0..6).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused(text in ".{0,200}") {
        if let Ok(config) = parse(&text) {
            let _ = (config.validate(), config.not_supported_yet());
        }
        let _ = duplicate_keys(&text);
    }

    #[test]
    fn any_json_is_parsed_or_refused_and_what_is_parsed_comes_back(value in json()) {
        if let Ok(config) = parse(&value.to_string()) {
            let _ = (config.validate(), config.not_supported_yet());
            let text = serde_json::to_string(&config).unwrap();
            prop_assert_eq!(&parse(&text).unwrap(), &config);
            prop_assert_eq!(config.clone().merged_with(config.clone()), config);
        }
    }

    #[test]
    fn json_without_repeated_keys_has_no_duplicates(value in json()) {
        prop_assert_eq!(duplicate_keys(&value.to_string()), Vec::<String>::new());
    }
}

#[test]
fn a_type_and_its_block_agree() {
    for good in [
        r#"{"interface":{"type":"passthrough"}}"#,
        r#"{"interface":{"type":"macvlan","hardwareAddr":"02:00:00:00:00:05"}}"#,
        r#"{"interface":{"type":"macvlan","macvlan":{"mode":"passthru"}}}"#,
        r#"{"interface":{"type":"ipvlan","ipvlan":{"mode":"l3s","flag":"private"}}}"#,
        r#"{"interface":{"type":"ipoib","ipoib":{"pkey":1,"mode":"connected"}}}"#,
        r#"{"interface":{"type":"vlan","vlan":{"id":4094,"protocol":"802.1ad"},"hardwareAddr":"02:00:00:00:00:05"}}"#,
    ] {
        assert_eq!(faults(good), [""; 0], "{good}");
        assert_eq!(parse(good).unwrap().not_supported_yet(), [], "{good}");
    }
    for (bad, path, words) in [
        (r#"{"interface":{"macvlan":{}}}"#, "interface.macvlan", "type macvlan only"),
        (r#"{"interface":{"type":"macvlan","vlan":{"id":5}}}"#, "interface.vlan", "type vlan only"),
        (r#"{"interface":{"type":"ipvlan"},"ethtool":{"features":{"tso":true}}}"#, "ethtool", "passthrough"),
        (r#"{"interface":{"type":"ipvlan"},"vf":{"trust":true}}"#, "vf", "passthrough"),
        (r#"{"interface":{"type":"ipvlan","disableEbpfPrograms":true}}"#, "interface.disableEbpfPrograms", "stays on the host"),
        (r#"{"interface":{"type":"vlan"}}"#, "interface.vlan.id", "required"),
        (r#"{"interface":{"type":"vlan","vlan":{"protocol":"802.1Q"}}}"#, "interface.vlan.id", "required"),
        (r#"{"interface":{"type":"vlan","vlan":{"id":0}}}"#, "interface.vlan.id", "is 0; must be 1 to 4094"),
        (r#"{"interface":{"type":"vlan","vlan":{"id":4095}}}"#, "interface.vlan.id", "is 4095"),
        (r#"{"interface":{"type":"vlan","vlan":{"id":5},"ipoib":{"pkey":1}}}"#, "interface.ipoib", "type ipoib only"),
        (r#"{"interface":{"type":"ipoib"}}"#, "interface.ipoib.pkey", "required"),
        (r#"{"interface":{"type":"ipoib","ipoib":{"pkey":32768}}}"#, "interface.ipoib.pkey", "is 0x8000, which is no partition"),
        (r#"{"interface":{"type":"ipoib","ipoib":{"pkey":0}}}"#, "interface.ipoib.pkey", "is 0x0000"),
        (
            r#"{"interface":{"type":"ipoib","ipoib":{"pkey":5},"hardwareAddr":"02:00:00:00:00:05"}}"#,
            "interface.hardwareAddr",
            "ipoib",
        ),
        (r#"{"interface":{"type":"ipvlan","hardwareAddr":"02:00:00:00:00:05"}}"#, "interface.hardwareAddr", "ipvlan"),
        (
            r#"{"interface":{"type":"macvlan","macvlan":{"mode":"passthru"},"hardwareAddr":"02:00:00:00:00:05"}}"#,
            "interface.hardwareAddr",
            "passthru",
        ),
    ] {
        let found = faults(bad);
        assert!(found.len() == 1 && found[0].starts_with(path) && found[0].contains(words), "{bad}: {found:?}");
    }
    assert!(parse(r#"{"interface":{"type":"bridge"}}"#).unwrap_err().to_string().contains("interface.type"));
}

#[test]
fn rules_over_virtual_functions() {
    let good = r#"{"vf": {"vlan": 4094, "qos": 7, "proto": "802.1ad", "mac": "02:00:00:00:00:07", "spoofCheck": false, "trust": true,
        "minTxRate": 10, "maxTxRate": 0, "linkState": "auto", "nodeGuid": "0c42:a103:0065:5f96",
        "portGuid": "0c:42:a1:03:00:65:5f:97"}}"#;
    assert_eq!(faults(good), [""; 0]);
    assert!(parse(good).unwrap().not_supported_yet().is_empty());
    assert_eq!(faults(r#"{"vf": {"vlan": 0, "qos": 0}}"#), [""; 0]);
    for (json, path) in [
        (r#"{"vlan": 4095}"#, "vf.vlan"),
        (r#"{"vlan": 1, "qos": 8}"#, "vf.qos"),
        (r#"{"vlan": 0, "qos": 1}"#, "vf.qos"),
        (r#"{"vlan": 0, "proto": "802.1Q"}"#, "vf.proto"),
        (r#"{"mac": "01:00:00:00:00:07"}"#, "vf.mac"),
        (r#"{"minTxRate": 20, "maxTxRate": 10}"#, "vf.minTxRate"),
        (r#"{"nodeGuid": "0000:0000:0000:0000"}"#, "vf.nodeGuid"),
        (r#"{"portGuid": "ffffffffffffffff"}"#, "vf.portGuid"),
    ] {
        let found = faults(&format!(r#"{{"vf": {json}}}"#));
        assert!(found.len() == 1 && found[0].starts_with(path), "{json}: {found:?}");
    }
    assert!(parse(r#"{"vf": {"linkState": "up"}}"#).is_err());
    let error = parse(r#"{"vf": {"portGuid": "0c42"}}"#).unwrap_err().to_string();
    assert!(error.contains("vf.portGuid") && error.contains("16 hex digits"), "{error}");
}
