use super::*;

fn kinds(plan: &Plan) -> Vec<&'static str> {
    plan.steps.iter().map(Step::kind).collect()
}

fn sysctls(plan: &Plan) -> Vec<String> {
    let text = |s: &Step| match s {
        Step::Sysctl { key, value, may_lack } => Some(format!("{key}={value}{}", if *may_lack { "?" } else { "" })),
        _ => None,
    };
    plan.steps.iter().filter_map(text).collect()
}

#[test]
fn settings_come_before_addresses_and_in_an_order_that_works() {
    let json = r#"{"interface": {"name": "rail0", "vrf": {"name": "blue"}, "altNames": ["a", "b"], "txQueueLen": 5, "arpIgnore": 1,
        "forwarding": true, "ipv6": {"addrGenMode": "stable-privacy", "acceptRA": 0},
        "sysctls": {"ipv6/conf/stable_secret": "fd00::5", "ipv4/neigh/locktime": 7}}}"#;
    let plan = planned(json, &host());
    let mut want = vec!["move"];
    want.extend(["sysctl"; 8]);
    want.extend(["vrf", "link", "altname", "altname", "address", "address", "up"]);
    assert_eq!(kinds(&plan), want);
    assert_eq!(
        sysctls(&plan),
        [
            "ipv6/conf/disable_ipv6=0",
            "ipv6/conf/stable_secret=fd00::5",
            "ipv4/conf/forwarding=1",
            "ipv6/conf/forwarding=1?",
            "ipv4/conf/arp_ignore=1",
            "ipv4/neigh/locktime=7",
            "ipv6/conf/accept_ra=0",
            "ipv6/conf/addr_gen_mode=2",
        ]
    );
    let undo: Vec<Undo> = plan.steps[9..13].iter().map(Step::undo).collect();
    let alt_name = |name: &str| Undo::RemoveAltName { name: name.into() };
    assert_eq!(undo, [Undo::LeaveVrf { name: PodLinkName::new("blue").unwrap() }, Undo::WithMove, alt_name("a"), alt_name("b")]);
    let words: Vec<String> = plan.steps[9..12].iter().map(Step::describe).collect();
    assert_eq!(words, ["enslaving it to VRF blue of table 1541", "setting txQueueLen 5", "adding altname a"]);
}

#[test]
fn nothing_asked_for_is_no_step() {
    let json = r#"{"interface": {"addresses": [], "altNames": [], "sysctls": {}, "ipv6": {}}}"#;
    assert_eq!(kinds(&planned(json, &host())), ["move", "up"]);
    let plan = planned(r#"{"interface": {"addresses": [], "ipv6": {"enabled": true}}}"#, &host());
    assert_eq!(sysctls(&plan), ["ipv6/conf/disable_ipv6=0"]);
}

#[test]
fn what_the_device_or_the_kernel_cannot_do_is_refused() {
    let mut host = host();
    host.sizes.gro_ipv4 = None;
    for (json, words) in [
        (
            r#"{"interface": {"gsoMaxSize": 524281}}"#,
            "interface.gsoMaxSize 524281 is more than what the device takes (524280 bytes)",
        ),
        (r#"{"interface": {"groMaxSize": 524281}}"#, "interface.groMaxSize 524281 is more"),
        (r#"{"interface": {"groIPv4MaxSize": 5}}"#, "interface.groIPv4MaxSize: the node's kernel does not know this property"),
        (r#"{"interface": {"altNames": ["enp1s0"]}}"#, "interface.altNames: \"enp1s0\" is the link's own name"),
        (r#"{"interface": {"vrf": {"name": "enp1s0"}}}"#, "interface.vrf.name: \"enp1s0\" is the link's own name"),
        (
            r#"{"interface": {"addresses": ["fd00::5/64"], "ipv6": {"dad": true}}, "routes": [{"destination": "fd01::/64",
                "gateway": "fd00::1", "source": "fd00::5"}]}"#,
            "routes[0]: its source fd00::5 is not in use until duplicate address detection",
        ),
        (r#"{"interface": {"mtu": 1000, "addresses": [], "ipv6": {"enabled": true}}}"#, "needs an MTU of at least 1280"),
    ] {
        let error = plan(&config(json), &host).unwrap_err().to_string();
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn without_ipv6_nothing_of_it_comes_along() {
    let mut host = host();
    host.routes = vec![route("fd60::/16", Some("fd50::fe")), route("10.60.0.0/16", Some("10.50.0.254"))];
    host.neighbours = vec![neighbour("fd50::fe")];
    let plan = planned(r#"{"interface": {"ipv6": {"enabled": false}}}"#, &host);
    assert_eq!(sysctls(&plan), ["ipv6/conf/disable_ipv6=1?"]);
    assert_eq!((addresses(&plan), short(&plan)), (vec![address("10.50.0.1/24")], vec!["10.60.0.0/16 10.50.0.254".to_owned()]));
    assert_left_out(&plan, &["turns IPv6 off", "route fd60::/16", "neighbour fd50::fe"]);
}

#[test]
fn in_a_vrf_everything_is_in_its_table() {
    let mut host = host();
    let in_table = |table, route: Route| Route { table, ..route };
    host.routes = vec![
        in_table(100, route("10.60.0.0/16", Some("10.50.0.253"))),
        in_table(100, route("0.0.0.0/0", Some("10.50.0.254"))),
        route("10.60.0.0/16", Some("10.50.0.254")),
        in_table(100, route("10.61.0.0/16", Some("10.50.0.254"))),
    ];
    host.rules = vec![rule(100)];
    let json = r#"{"interface": {"vrf": {"name": "blue", "table": 1500}}, "routes": [
        {"destination": "0.0.0.0/0", "gateway": "10.50.0.254", "table": 77}, {"destination": "10.50.0.0/24", "scope": 253}]}"#;
    let plan = planned(json, &host);
    assert_eq!(short(&plan), ["0.0.0.0/0 10.50.0.254", "10.60.0.0/16 10.50.0.254", "10.61.0.0/16 10.50.0.254"]);
    assert!(routes(&plan).iter().all(|r| r.table == 1500) && rules(&plan).is_empty());
    let configured = |s: &Step| matches!(s, Step::Route { configured: true, .. });
    assert_eq!(plan.steps.iter().filter(|s| configured(s)).count(), 1);
    assert_left_out(&plan, &["the VRF has a rule of its own", "route 0.0.0.0/0 via 10.50.0.254 in table 100", "10.60.0.0/16"]);

    let twice = r#"{"interface": {"vrf": {"name": "blue"}}, "routes": [
        {"destination": "10.9.0.0/16", "scope": 253, "table": 7}, {"destination": "10.9.0.0/16", "scope": 253, "table": 8}]}"#;
    let error = super::plan(&config(twice), &host).unwrap_err().to_string();
    assert!(error.contains("routes[1]: another route has the same destination"), "{error}");
}
