use super::*;

#[test]
fn rules_come_along_with_all_selectors_under_the_new_name() {
    let mut host = host();
    host.routes = vec![Route { table: 100, ..route("10.60.0.0/16", Some("10.50.0.254")) }];
    let to = |table: u32, change: &dyn Fn(&mut Rule)| {
        let mut one = rule(table);
        change(&mut one);
        one
    };
    host.rules = vec![
        to(100, &|r| (r.other, r.invert) = ("aa".into(), true)),
        to(100, &|r| (r.input_link, r.output_link) = (Some("enp1s0".into()), Some("lo".into()))),
        to(254, &|r| r.input_link = Some("enp1s0".into())),
        to(0, &|r| (r.action, r.output_link) = (6, Some("enp1s0".into()))),
        to(100, &|r| r.source = Some("10.50.0.1/32".parse().unwrap())),
        to(100, &|r| r.source = Some("172.16.0.0/12".parse().unwrap())),
        to(100, &|r| r.ipv6 = true),
        to(100, &|r| r.input_link = Some("eth9".into())),
        to(101, &|_| ()),
        to(0, &|r| r.action = 2),
        to(100, &|r| (r.priority, r.protocol) = (Some(7), 3)),
        to(1000, &|r| r.protocol = 2),
    ];
    let json = r#"{"interface": {"name": "rail0"}, "rules": [
        {"priority": 7, "table": 100}, {"source": "fd50::1/64", "table": 9}, {"destination": "0.0.0.0/0"}]}"#;
    let plan = planned(json, &host);
    let got = rules(&plan);
    assert_eq!((got[0].priority, got[0].ipv6, got[0].table, got[0].protocol), (Some(7), false, 100, 4));
    assert_eq!((got[1].priority, got[1].ipv6, got[1].source), (None, true, Some("fd50::/64".parse().unwrap())));
    assert_eq!((got[2].destination, got[2].table), (None, 254));
    let mut want = host.rules[..6].to_vec();
    want[1].input_link = Some("rail0".into());
    want[2].input_link = Some("rail0".into());
    want[3].output_link = Some("rail0".into());
    assert_eq!(got[3..], want);
    assert_left_out(
        &plan,
        &[
            "to table 100: no route of table 100 comes along",
            "to table 100: it is for link eth9",
            "to table 101: no route of table 101",
            "it leads to another rule",
        ],
    );
}

#[test]
fn neighbours_come_along_where_they_can_be_reached() {
    let mut host = host();
    host.routes = vec![Route { table: 100, ..route("10.61.0.1/32", None) }];
    host.neighbours = vec![
        neighbour("10.50.0.9"),
        neighbour("10.61.0.1"),
        neighbour("fe80::9"),
        neighbour("10.50.0.8"),
        neighbour("10.62.0.1"),
        Neighbour { flags: 8, address: None, ..neighbour("10.50.0.7") },
        neighbour("10.50.0.1"),
    ];
    let json = r#"{"neighbors": [{"destination": "10.50.0.8", "hardwareAddr": "02:00:00:00:00:08"}]}"#;
    let plan = planned(json, &host);
    let ips: Vec<_> = neighbours(&plan).iter().map(|n| n.ip.to_string()).collect();
    assert_eq!(ips, ["10.50.0.8", "10.50.0.9", "10.61.0.1", "fe80::9"]);
    assert_eq!(neighbours(&plan)[0].address, Some("02:00:00:00:00:08".parse().unwrap()));
    assert_left_out(&plan, &["neighbour 10.62.0.1: it is not in", "10.50.0.7: it is a proxy", "10.50.0.1: it is the pod's own"]);
}
