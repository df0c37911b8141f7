//! The link's own settings in the pod, read back from the kernel, and what the host has of them afterwards.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[path = "settings/vrf.rs"]
mod vrf;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::{World, claim, config, deadline, pod_ref, sandbox};
use dranic::attach::{AttachError, Engine};
use dranic::config::NetworkConfig;
use dranic::dra::resolve::ResolvedClaim;
use dranic::netdev::address::{IFA_F_NODAD, IFA_F_TENTATIVE};
use dranic::netdev::link::{IFF_ALLMULTI, IFF_PROMISC};
use dranic::netdev::{HostState, Link, LinkSettings, PacketSizes, host_state, link, sysctl};
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric::PodNetns;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// One NIC in a pod with these parameters, which must be valid.
struct Lent {
    world: World,
    engine: Engine,
    pod: PodNetns,
    claim: ResolvedClaim,
    before: BTreeMap<String, HostState>,
}

impl Lent {
    /// None without root.
    fn new(parameters: &str, at_home: impl FnOnce(&World)) -> Option<Self> {
        let lent = Self::prepared(parameters, at_home)?;
        lent.attach().unwrap();
        Some(lent)
    }

    fn prepared(parameters: &str, at_home: impl FnOnce(&World)) -> Option<Self> {
        let world = World::new(1)?;
        at_home(&world);
        let (before, engine) = (world.host_states(), world.engine());
        let parsed = config(parameters);
        assert_eq!((parsed.validate(), parsed.not_supported_yet()), (vec![], vec![]), "{parameters}");
        let claim = claim("a", &world.device_names(), parameters);
        engine.prepare(&claim, &pod_ref("a")).unwrap();
        let pod = world.pod("a");
        Some(Self { world, engine, pod, claim, before })
    }

    fn attach(&self) -> Result<(), AttachError> {
        self.engine.attach(&pod_ref("a").uid, &sandbox("a"), self.pod.path(), soon()).map(drop)
    }

    fn link(&self, name: &str) -> Link {
        self.world.pod_links(&self.pod).into_iter().find(|l| l.name == name).unwrap()
    }

    fn sysctl(&self, key: &str) -> String {
        self.pod.netns().unwrap().run(|| sysctl::read("rail0", key)).unwrap().unwrap()
    }

    fn sysctls(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.sysctl(key)).collect()
    }

    /// The host has everything as before, and nothing is left in the pod.
    fn ends_as_it_began(self) {
        self.engine.unprepare(&self.claim.claim).unwrap();
        self.world.assert_unchanged(&self.before);
        let left: Vec<String> = self.world.pod_links(&self.pod).into_iter().map(|l| l.name).collect();
        assert_eq!(left, ["lo"]);
    }
}

/// Changes nic0 on the host.
fn set(world: &World, settings: &LinkSettings) {
    let mut host = world.node.socket().unwrap();
    let index = link::by_name(&mut host, "nic0", deadline()).unwrap().unwrap().index;
    host.request(link::set_request(index, settings), deadline()).unwrap();
}

fn add_alt_name(socket: &mut RouteSocket, link_name: &str, name: &str) {
    let index = link::by_name(socket, link_name, deadline()).unwrap().unwrap().index;
    socket.request(link::alt_name_request(index, name, true), deadline()).unwrap();
}

#[test]
fn properties_are_set_and_given_back() {
    let parameters = r#"{"interface": {"name": "rail0", "gsoMaxSize": 200000, "groMaxSize": 190000, "gsoIPv4MaxSize": 100000,
        "groIPv4MaxSize": 90000, "txQueueLen": 77, "alias": "rail 0, ä", "altNames": ["gpu-nic-0", "another"], "promisc": true,
        "allmulti": true, "group": 12}}"#;
    let Some(lent) = Lent::new(parameters, |_| ()) else { return };
    let link = lent.link("rail0");
    let sizes = PacketSizes { gso: Some(200_000), gro: Some(190_000), gso_ipv4: Some(100_000), gro_ipv4: Some(90_000) };
    assert_eq!((link.sizes, link.tx_queue_len, link.group), (sizes, Some(77), 12));
    assert_eq!(link.alias.as_deref(), Some("rail 0, ä"));
    assert_eq!(link.alt_names, ["gpu-nic-0", "another"]);
    assert_eq!(link.flags & (IFF_PROMISC | IFF_ALLMULTI), IFF_PROMISC | IFF_ALLMULTI);
    lent.ends_as_it_began();
}

#[test]
fn what_is_absent_stays_as_the_host_has_it_and_false_and_empty_do_not() {
    let odd = LinkSettings {
        mtu: None,
        sizes: PacketSizes { gso: Some(150_000), gro: Some(140_000), gso_ipv4: Some(65_000), gro_ipv4: Some(64_000) },
        tx_queue_len: Some(500),
        alias: Some("of the host".to_owned()),
        group: Some(3),
        promisc: Some(true),
        allmulti: Some(true),
    };
    let at_home = |world: &World| {
        set(world, &odd);
        add_alt_name(&mut world.node.socket().unwrap(), "nic0", "enx-host");
    };
    let Some(lent) = Lent::new(r#"{"interface": {"name": "rail0"}}"#, at_home) else { return };
    let link = lent.link("rail0");
    assert_eq!((link.sizes, link.tx_queue_len, link.group), (odd.sizes, Some(500), 3));
    assert_eq!((link.alias.as_deref(), link.alt_names), (Some("of the host"), vec!["enx-host".to_owned()]));
    assert_eq!(link.flags & (IFF_PROMISC | IFF_ALLMULTI), IFF_PROMISC | IFF_ALLMULTI);
    lent.ends_as_it_began();

    let parameters = r#"{"interface": {"name": "rail0", "txQueueLen": 0, "alias": "", "promisc": false, "allmulti": false, "group": 0,
        "altNames": ["enx-host", "more"], "gsoMaxSize": 65000}}"#;
    let lent = Lent::new(parameters, at_home).unwrap();
    let link = lent.link("rail0");
    assert_eq!((link.tx_queue_len, link.group, link.flags & (IFF_PROMISC | IFF_ALLMULTI)), (Some(0), 0, 0));
    assert_eq!((link.alias.unwrap_or_default(), link.alt_names), (String::new(), vec!["enx-host".to_owned(), "more".to_owned()]));
    // The kernel sets the IPv4 one as well; it comes back all the same.
    assert_eq!((link.sizes.gso, link.sizes.gso_ipv4), (Some(65_000), Some(65_000)));
    lent.ends_as_it_began();
}

#[test]
fn a_size_beyond_the_devices_is_refused_in_prepare_and_the_kernel_agrees() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let max = before["nic0"].tso_max_size.unwrap();
    for (field, wanted) in
        [("gsoMaxSize", max + 1), ("gsoIPv4MaxSize", max + 1), ("groMaxSize", 524_281), ("groIPv4MaxSize", 524_281)]
    {
        let all = claim("a", &world.device_names(), &format!(r#"{{"interface": {{"{field}": {wanted}}}}}"#));
        let error = engine.prepare(&all, &pod_ref("a")).unwrap_err().to_string();
        assert!(error.contains(&format!("interface.{field} {wanted} is more than what the device takes")), "{error}");
    }
    let request = |sizes| link::set_request(before["nic0"].index, &LinkSettings { sizes, ..LinkSettings::default() });
    let mut host = world.node.socket().unwrap();
    for n in [0, 1] {
        let size = |base: u32| Some(base + n);
        for sizes in [
            PacketSizes { gso: size(max), ..PacketSizes::default() },
            PacketSizes { gso_ipv4: size(max), ..PacketSizes::default() },
            PacketSizes { gro: size(524_280), ..PacketSizes::default() },
            PacketSizes { gro_ipv4: size(524_280), ..PacketSizes::default() },
        ] {
            let result = host.request(request(sizes), deadline());
            assert_eq!(result.is_ok(), n == 0, "{sizes:?}: {result:?}");
        }
    }
}

#[test]
fn sysctls_are_written_and_given_back() {
    let parameters = r#"{"interface": {"name": "rail0", "arpIgnore": 1, "arpAnnounce": 2, "forwarding": true,
        "ipv6": {"acceptRA": 2, "addrGenMode": "none"},
        "sysctls": {"ipv4/conf/rp_filter": 2, "ipv4/neigh/gc_stale_time": "61", "ipv6/neigh/retrans_time_ms": 1500,
            "ipv6/conf/hop_limit": "63", "ipv6/conf/stable_secret": "fd00::5"}}}"#;
    let own = |world: &World| {
        let write = || {
            sysctl::write("nic0", "ipv4/conf/arp_ignore", "8").and_then(|()| sysctl::write("nic0", "ipv6/conf/hop_limit", "9"))
        };
        world.node.netns().run(write).unwrap().unwrap();
    };
    let Some(lent) = Lent::new(parameters, own) else { return };
    let keys = [
        ("ipv4/conf/arp_ignore", "1"),
        ("ipv4/conf/arp_announce", "2"),
        ("ipv4/conf/forwarding", "1"),
        ("ipv6/conf/forwarding", "1"),
        ("ipv6/conf/accept_ra", "2"),
        ("ipv6/conf/addr_gen_mode", "1"),
        ("ipv4/conf/rp_filter", "2"),
        ("ipv4/neigh/gc_stale_time", "61"),
        ("ipv6/neigh/retrans_time_ms", "1500"),
        ("ipv6/conf/hop_limit", "63"),
        ("ipv6/conf/stable_secret", "fd00:0000:0000:0000:0000:0000:0000:0005"),
    ];
    assert_eq!(lent.sysctls(&keys.map(|(key, _)| key)), keys.map(|(_, value)| value));
    let link_local = lent.world.pod_addresses(&lent.pod).into_iter().find(|a| a.starts_with("fe80"));
    assert_eq!(link_local, None, "addrGenMode was written before the link went up");
    lent.ends_as_it_began();
}

#[test]
fn false_and_zero_are_written_where_the_namespace_says_otherwise() {
    let Some(lent) = Lent::prepared(r#"{"interface": {"name": "rail0", "forwarding": false, "arpIgnore": 0}}"#, |_| ()) else {
        return;
    };
    let on = || {
        for key in ["ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding", "ipv4/conf/default/arp_ignore"] {
            std::fs::write(format!("/proc/sys/net/{key}"), "1").unwrap();
        }
    };
    lent.pod.netns().unwrap().run(on).unwrap();
    lent.attach().unwrap();
    assert_eq!(lent.sysctls(&["ipv4/conf/forwarding", "ipv6/conf/forwarding", "ipv4/conf/arp_ignore"]), ["0", "0", "0"]);
    assert_eq!(lent.sysctl("ipv4/conf/arp_announce"), "0", "nobody asked for another");
    lent.ends_as_it_began();
}

#[test]
fn ipv6_can_be_turned_off_and_on() {
    let parameters = r#"{"interface": {"name": "rail0", "forwarding": true, "ipv6": {"enabled": false}}}"#;
    let Some(lent) = Lent::new(parameters, |_| ()) else { return };
    assert_eq!(lent.sysctl("ipv6/conf/disable_ipv6"), "1");
    let index = lent.link("rail0").index;
    let all = lent.world.pod_snapshot(&lent.pod).addresses;
    assert!(!all.iter().any(|(of, a)| *of == index && a.ip.is_ipv6()), "{all:?}");
    assert!(lent.world.pod_addresses(&lent.pod).contains(&"10.0.0.1/24".to_owned()));
    let record = &lent.engine.records()[0];
    assert!(
        record.devices[0].plan.left_out.iter().any(|l| l.contains("turns IPv6 off")),
        "{:?}",
        record.devices[0].plan.left_out
    );
    lent.ends_as_it_began();

    let parameters = r#"{"interface": {"name": "rail0", "addresses": ["10.0.0.5/24"], "ipv6": {"enabled": true}}}"#;
    let lent = Lent::prepared(parameters, |_| ()).unwrap();
    let off = || std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
    lent.pod.netns().unwrap().run(off).unwrap();
    lent.attach().unwrap();
    assert_eq!(lent.sysctl("ipv6/conf/disable_ipv6"), "0");
    lent.ends_as_it_began();

    // So small an MTU leaves no IPv6 on the link, and nothing to turn off.
    let parameters = r#"{"interface": {"name": "rail0", "mtu": 1000, "forwarding": false, "ipv6": {"enabled": false}}}"#;
    let lent = Lent::new(parameters, |_| ()).unwrap();
    assert_eq!(lent.sysctl("ipv4/conf/forwarding"), "0");
    lent.ends_as_it_began();
}

#[test]
fn duplicate_address_detection_is_done_on_request_only() {
    let flags = |dad: bool| {
        let parameters = format!(
            r#"{{"interface": {{"name": "rail0", "addresses": ["fd00:77::5/64", "10.0.0.5/24"], "ipv6": {{"dad": {dad}}}}}}}"#
        );
        let lent = Lent::new(&parameters, |_| ())?;
        let seen = lent.world.pod_snapshot(&lent.pod).addresses;
        let flags = seen.iter().find(|(_, a)| a.ip.to_string() == "fd00:77::5").unwrap().1.flags;
        lent.ends_as_it_began();
        Some(flags & (IFA_F_NODAD | IFA_F_TENTATIVE))
    };
    let Some(with) = flags(true) else { return };
    assert_eq!((with, flags(false)), (IFA_F_TENTATIVE, Some(IFA_F_NODAD)));
}

#[test]
fn an_altname_that_is_taken_in_the_pod_is_refused_before_anything_moves() {
    let parameters = r#"{"interface": {"name": "rail0", "altNames": ["fine", "eth0"]}}"#;
    let Some(lent) = Lent::prepared(parameters, |_| ()) else { return };
    lent.pod.add_eth0(lent.world.node.netns(), "vethpeer").unwrap();
    let error = lent.attach().unwrap_err();
    assert!(
        matches!(error, AttachError::Refused { .. }) && error.to_string().contains("\"eth0\" of interface.altNames is taken"),
        "{error}"
    );
    assert!(lent.world.links().iter().any(|l| l.name == "nic0"));
    lent.engine.unprepare(&lent.claim.claim).unwrap();
    lent.world.assert_unchanged(&lent.before);
}

#[test]
fn altnames_of_two_nics_clash_as_well() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), r#"{"interface": {"altNames": ["same"]}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(error.to_string().contains("\"same\" of interface.altNames is taken"), "{error}");
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_roll_back_takes_the_altnames_away_and_so_does_a_link_that_came_back_by_itself() {
    let parameters = r#"{"interface": {"name": "rail0", "altNames": ["gpu-nic-0"], "gsoMaxSize": 30000, "txQueueLen": 5}}"#;
    let Some(lent) = Lent::prepared(parameters, |_| ()) else { return };
    lent.world.break_plan(&lent.engine, "nic0");
    let error = lent.attach().unwrap_err();
    assert!(error.to_string().contains("adding route"), "{error}");
    let back = lent.world.links().into_iter().find(|l| l.name == "nic0").unwrap();
    assert_eq!(back.alt_names, [""; 0]);
    lent.ends_as_it_began();

    let lent = Lent::new(parameters, |_| ()).unwrap();
    let (pod, host) = (lent.pod.netns().unwrap(), lent.world.node.netns());
    lent.world.carry(&pod, host, "rail0", "rail0", lent.before["nic0"].index);
    assert_eq!(lent.engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 1);
    // Into a new sandbox with the altname that it has already.
    let again = lent.world.pod("b");
    lent.engine.attach(&pod_ref("a").uid, &sandbox("b"), again.path(), soon()).unwrap();
    assert_eq!(lent.world.pod_links(&again).iter().find(|l| l.name == "rail0").unwrap().alt_names, ["gpu-nic-0"]);
    lent.world.carry(&again.netns().unwrap(), host, "rail0", "rail0", lent.before["nic0"].index);
    lent.ends_as_it_began();
}

#[test]
fn an_old_record_without_sizes_gives_back_the_rest() {
    let Some(world) = World::new(1) else { return };
    let state = &world.host_states()["nic0"];
    let mut json = serde_json::to_value(state).unwrap();
    json.as_object_mut().unwrap().retain(|key, _| key != "sizes" && key != "tso_max_size");
    let old: HostState = serde_json::from_value(json).unwrap();
    set(&world, &LinkSettings { tx_queue_len: Some(5), ..LinkSettings::default() });
    let mut host = world.node.socket().unwrap();
    let report = world.node.netns().run(|| host_state::restore(&mut host, old.index, &old, deadline())).unwrap();
    assert_eq!(report.failed, vec![]);
    let after = &world.host_states()["nic0"];
    assert_eq!((host_state::compare(state, after), host_state::compare(&old, after)), (vec![], vec![]));
}

/// The configuration of a claim is refused for this, in these words.
#[track_caller]
fn assert_refused(parameters: &str, words: &str) {
    let faults: Vec<String> = config(parameters).validate().iter().map(ToString::to_string).collect();
    assert!(faults.len() == 1 && faults[0].contains(words), "{parameters}: {faults:?}");
}

#[test]
fn contradictions_are_refused() {
    let cases = [
        (r#"{"interface": {"ipv6": {"enabled": false}, "addresses": ["fd00::5/64"]}}"#, "interface.addresses[0]: needs IPv6"),
        (
            r#"{"interface": {"sysctls": {"ipv6/conf/disable_ipv6": 1}, "addresses": ["fd00::5/64"]}}"#,
            "interface.addresses[0]: needs",
        ),
        (
            r#"{"interface": {"ipv6": {"enabled": false}}, "routes": [{"destination": "fd00::/8", "scope": 253}]}"#,
            "routes[0]: needs IPv6",
        ),
        (
            r#"{"interface": {"ipv6": {"enabled": false}}, "neighbors": [{"destination": "fd00::9", "hardwareAddr": "02:00:00:00:00:09"}]}"#,
            "neighbors[0]: needs IPv6",
        ),
        (r#"{"interface": {"ipv6": {"acceptRA": 3}}}"#, "interface.ipv6.acceptRA: must be 0, 1 or 2"),
        (
            r#"{"interface": {"arpIgnore": 1, "sysctls": {"ipv4/conf/arp_ignore": 2}}}"#,
            "interface.sysctls.ipv4/conf/arp_ignore: is 2, and interface.arpIgnore makes it 1",
        ),
        (r#"{"interface": {"forwarding": true, "sysctls": {"ipv6/conf/forwarding": 0}}}"#, "interface.forwarding makes it 1"),
        (
            r#"{"interface": {"ipv6": {"enabled": true}, "sysctls": {"ipv6/conf/disable_ipv6": "1"}}}"#,
            "interface.ipv6.enabled makes it 0",
        ),
        (r#"{"interface": {"sysctls": {"kernel/panic": 1}}}"#, "interface.sysctls.kernel/panic: \"kernel\" is not a folder"),
        (r#"{"interface": {"sysctls": {"ipv4/conf/rp_filter": 5}}}"#, "must be a number from 0 to 2"),
        (r#"{"interface": {"txQueueLen": 100001}}"#, "interface.txQueueLen: is 100001; must be 0 to 100000"),
        (r#"{"interface": {"group": 2147483648}}"#, "interface.group: is 2147483648; must be 0 to"),
        (r#"{"interface": {"alias": "a\u0000b"}}"#, "interface.alias: must not contain control characters"),
        (r#"{"interface": {"altNames": ["a b"]}}"#, "interface.altNames[0]: must not contain '/'"),
        (r#"{"interface": {"altNames": ["x", "x"]}}"#, "interface.altNames[1]: x is in the list twice"),
        (r#"{"interface": {"name": "x", "altNames": ["x"]}}"#, "interface.altNames[0]: x is interface.name already"),
        (r#"{"interface": {"altNames": ["lo"]}}"#, "interface.altNames[0]: \"lo\" is reserved"),
        (
            r#"{"interface": {"vrf": {"name": "blue"}, "altNames": ["blue"]}}"#,
            "interface.altNames[0]: blue is the name of the VRF",
        ),
    ];
    for (parameters, words) in cases {
        assert_refused(parameters, words);
    }
    let long = format!(r#"{{"interface": {{"alias": "{}"}}}}"#, "x".repeat(256));
    assert_refused(&long, "interface.alias: has 256 bytes");
    assert_refused(&long.replace("alias\": ", "altNames\": [").replace("\"}", "\"]}"), "must have 1 to 127 bytes");
    let fine = r#"{"interface": {"arpIgnore": 1, "forwarding": false, "ipv6": {"enabled": false},
        "sysctls": {"ipv4/conf/arp_ignore": 1, "ipv6/conf/forwarding": 0, "ipv6/conf/disable_ipv6": 1}}}"#;
    assert_eq!(NetworkConfig::validate(&config(fine)), []);
}
