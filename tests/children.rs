//! Links on top of a device that stays on the host: macvlan, ipvlan, vlan, by the engine against the real kernel.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use common::{World, claim, config, deadline, pod_ref, sandbox};
use dranic::attach::{Engine, PrepareReason, Released};
use dranic::dra::resolve::ResolvedClaim;
use dranic::ledger::{Durability, Phase};
use dranic::names::DeviceName;
use dranic::netdev::{Child, Link, child, link};
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric::{self, PodNetns};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Shares of the node's first NIC, each with the parameters.
fn shares(world: &World, name: &str, count: usize, parameters: &str) -> ResolvedClaim {
    let parameters: Vec<String> = (0..count).map(|_| parameters.to_owned()).collect();
    shares_with(world, name, &parameters)
}

fn shares_with(world: &World, name: &str, parameters: &[String]) -> ResolvedClaim {
    let nic = world.device_names().remove(0);
    let mut claim = claim(name, &vec![nic; parameters.len()], "");
    for (number, (device, parameters)) in claim.devices.iter_mut().zip(parameters).enumerate() {
        device.device = DeviceName::new(format!("share-{}", device.device)).unwrap();
        device.share_id = Some(format!("{name}-{number}"));
        device.config = config(parameters);
    }
    claim
}

/// Whether the kernel can make links of this kind; else a line that says why not.
fn has(world: &World, kind: &str) -> bool {
    let mut socket = world.node.socket().unwrap();
    let parent = link::by_name(&mut socket, "nic0", deadline()).unwrap().unwrap().index;
    let child = of(kind);
    let netns = world.node.netns();
    let target = std::os::fd::AsFd::as_fd(netns);
    let create = child::Create { child, parent, target, index: 9000, name: "probe".into(), mtu: None, address: None };
    match socket.request(child::create_request(&create), deadline()) {
        Ok(()) => {
            socket.request(child::delete_request(9000), deadline()).unwrap();
            true
        }
        Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => {
            println!("skipped: this kernel has no {kind}");
            false
        }
        Err(error) => panic!("{kind}: {error}"),
    }
}

fn of(kind: &str) -> Child {
    let vlan = if kind == "vlan" { r#","vlan":{"id":4000}"# } else { "" };
    let config = config(&format!(r#"{{"interface":{{"type":"{kind}"{vlan}}}}}"#));
    match config.interface.unwrap().kind.unwrap() {
        dranic::config::InterfaceKind::Macvlan => Child::Macvlan { mode: Default::default() },
        dranic::config::InterfaceKind::Ipvlan => Child::Ipvlan { mode: Default::default(), flag: Default::default() },
        _ => Child::Vlan { id: 4000, protocol: Default::default() },
    }
}

fn named(links: &[Link], name: &str) -> Link {
    links.iter().find(|link| link.name == name).unwrap_or_else(|| panic!("no {name} in {links:?}")).clone()
}

/// What the kernel says of the link in the pod.
fn read(pod: &PodNetns, index: u32) -> Option<Child> {
    child::read(&mut RouteSocket::open_in(&pod.netns().unwrap()).unwrap(), index, deadline()).unwrap()
}

fn parent_of(world: &World) -> Link {
    named(&world.links(), "nic0")
}

fn attach(engine: &Engine, name: &str, pod: &PodNetns) {
    engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
}

/// One share in one pod, from prepare to unprepare: the kernel has what was asked for, and the parent is as it was all the time.
fn goes_in_and_out(world: &World, parameters: &str, wanted: Child) {
    let before = world.host_states();
    let engine = world.engine();
    let claim = shares(world, "a", 1, parameters);
    engine.prepare(&claim, &pod_ref("a")).unwrap_or_else(|e| panic!("{parameters}: {e}"));
    world.assert_unchanged(&before);
    let pod = world.pod("a");
    attach(&engine, "a", &pod);
    let inside = named(&world.pod_links(&pod), "net1");
    assert_eq!(read(&pod, inside.index), Some(wanted), "{parameters}");
    assert!(inside.is_up() && inside.mtu == 1400, "{inside:?}");
    assert_eq!(inside.parent, Some(parent_of(world).index));
    assert_ne!(inside.index, parent_of(world).index);
    assert!(world.pod_addresses(&pod).contains(&"10.0.0.77/24".to_owned()));
    engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap();
    // Once more changes nothing.
    assert!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().moves.is_empty());

    let released = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(matches!(released[..], [Released::Deleted(_)]), "{released:?}");
    assert!(world.pod_links(&pod).iter().all(|link| link.name != "net1"));
    engine.unprepare(&claim.claim).unwrap();
    world.assert_unchanged(&before);
    assert!(engine.records().is_empty() && engine.pinned() == 0);
}

fn parameters(kind: &str, block: &str) -> String {
    format!(r#"{{"interface":{{"type":"{kind}","name":"net1","mtu":1400,"addresses":["10.0.0.77/24"],"{kind}":{block}}}}}"#)
}

#[test]
fn macvlan_in_every_mode() {
    let Some(world) = World::new(1) else { return };
    if !has(&world, "macvlan") {
        return;
    }
    for mode in ["bridge", "private", "vepa", "passthru", "source"] {
        let wanted = Child::Macvlan { mode: serde_json::from_value(mode.into()).unwrap() };
        goes_in_and_out(&world, &parameters("macvlan", &format!(r#"{{"mode":"{mode}"}}"#)), wanted);
    }
}

#[test]
fn ipvlan_in_every_mode_and_flag() {
    let Some(world) = World::new(1) else { return };
    if !has(&world, "ipvlan") {
        return;
    }
    for (mode, flag) in [("l2", "bridge"), ("l3", "private"), ("l3s", "vepa"), ("l2", "private")] {
        let block = format!(r#"{{"mode":"{mode}","flag":"{flag}"}}"#);
        let value = |text: &str| serde_json::Value::from(text);
        let wanted = Child::Ipvlan {
            mode: serde_json::from_value(value(mode)).unwrap(),
            flag: serde_json::from_value(value(flag)).unwrap(),
        };
        goes_in_and_out(&world, &parameters("ipvlan", &block), wanted);
    }
}

#[test]
fn vlan_of_both_protocols() {
    let Some(world) = World::new(1) else { return };
    if !has(&world, "vlan") {
        return;
    }
    for (id, protocol) in [(1, "802.1Q"), (4094, "802.1ad")] {
        let wanted = Child::Vlan { id, protocol: serde_json::from_value(protocol.into()).unwrap() };
        goes_in_and_out(&world, &parameters("vlan", &format!(r#"{{"id":{id},"protocol":"{protocol}"}}"#)), wanted);
    }
}

#[test]
fn one_nic_serves_many_pods_and_many_times_one_pod() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let macvlan = r#"{"interface":{"type":"macvlan"}}"#;
    let (one, two) = (shares(&world, "one", 3, macvlan), shares(&world, "two", 2, macvlan));
    let recorded = engine.prepare(&one, &pod_ref("one")).unwrap();
    engine.prepare(&two, &pod_ref("two")).unwrap();
    assert_eq!(engine.prepare(&one, &pod_ref("one")).unwrap().generation, recorded.generation, "once more is the same");
    let (pod_one, pod_two) = (world.pod("one"), world.pod("two"));
    attach(&engine, "one", &pod_one);
    attach(&engine, "two", &pod_two);

    let mut addresses = BTreeSet::new();
    for (pod, names) in [(&pod_one, &["nic0", "nic0-1", "nic0-2"][..]), (&pod_two, &["nic0", "nic0-1"][..])] {
        let links = world.pod_links(pod);
        for name in names {
            let link = named(&links, name);
            assert!(link.is_up() && link.mtu == 9000, "{link:?}");
            addresses.insert(link.address.unwrap().to_string());
        }
        // Nothing of the host's goes along: the parent keeps it.
        assert!(!world.pod_addresses(pod).contains(&"10.0.0.1/24".to_owned()));
    }
    assert_eq!(addresses.len(), 5, "each has an address of its own");
    world.assert_unchanged(&before);
    // The inventory knows the NIC once, by its own name.
    let lent = dranic::attach::engine::lent(engine.ledger(), "boot-1");
    assert_eq!(lent.into_iter().map(|lent| lent.name).collect::<Vec<_>>(), world.device_names());

    assert_eq!(engine.release(&pod_ref("one").uid, &sandbox("one")).len(), 3);
    assert!(world.pod_links(&pod_one).iter().all(|l| !l.name.starts_with("nic")));
    assert_eq!(world.pod_links(&pod_two).iter().filter(|l| l.name.starts_with("nic")).count(), 2, "the other pod keeps its own");
    engine.unprepare(&two.claim).unwrap();
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn the_whole_nic_and_shares_of_it_exclude_each_other() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let whole = claim("whole", &world.device_names(), "");
    let share = shares(&world, "share", 1, r#"{"interface":{"type":"macvlan"}}"#);

    engine.prepare(&share, &pod_ref("a")).unwrap();
    let error = engine.prepare(&whole, &pod_ref("b")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::Held { .. }) && error.reason.is_held(), "{error}");
    assert!(error.to_string().contains("default/share"), "{error}");
    // Nor after a start of the agent.
    drop(engine);
    let again = world.engine();
    again.recover();
    assert!(again.prepare(&whole, &pod_ref("b")).is_err());
    again.unprepare(&share.claim).unwrap();
    again.prepare(&whole, &pod_ref("b")).unwrap();
    let error = again.prepare(&share, &pod_ref("a")).unwrap_err();
    assert!(error.reason.is_held() && error.to_string().contains("default/whole"), "{error}");
    again.unprepare(&whole.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn what_does_not_go_together_on_one_nic_waits() {
    let Some(world) = World::new(1) else { return };
    let engine = world.engine();
    let of = |name: &str, interface: &str| shares(&world, name, 1, &format!(r#"{{"interface":{{{interface}}}}}"#));
    engine.prepare(&of("first", r#""type":"macvlan""#), &pod_ref("a")).unwrap();
    for (name, interface, words) in [
        ("passthru", r#""type":"macvlan","macvlan":{"mode":"passthru"}"#, "only one of its device"),
        ("ipvlan", r#""type":"ipvlan""#, "either macvlan or ipvlan"),
    ] {
        let error = engine.prepare(&of(name, interface), &pod_ref("b")).unwrap_err();
        assert!(error.reason.is_held(), "{error}");
        assert!(error.to_string().contains(words) && error.to_string().contains("default/first"), "{error}");
    }
    engine.unprepare(&of("first", "").claim).unwrap();
    // None of the refused ones holds anything.
    engine.prepare(&of("whole", r#""type":"macvlan","macvlan":{"mode":"passthru"}"#), &pod_ref("b")).unwrap();
    engine.unprepare(&of("whole", "").claim).unwrap();
}

#[test]
fn what_can_not_be_made_is_refused_in_prepare() {
    let Some(world) = World::new(1) else { return };
    let engine = world.engine();
    for (parameters, words) in
        [(r#"{"interface":{"type":"macvlan","mtu":9001}}"#, "68 to 9000 bytes"), ("", "share of the device")]
    {
        let error = engine.prepare(&shares(&world, "a", 1, parameters), &pod_ref("a")).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let index = parent_of(&world).index;
    link::set_up(&mut world.node.socket().unwrap(), index, false, deadline()).unwrap();
    let macvlan = shares(&world, "a", 1, r#"{"interface":{"type":"macvlan"}}"#);
    let error = engine.prepare(&macvlan, &pod_ref("a")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::Down { .. }), "{error}");
    link::set_up(&mut world.node.socket().unwrap(), index, true, deadline()).unwrap();
    engine.prepare(&macvlan, &pod_ref("a")).unwrap();
    engine.unprepare(&macvlan.claim).unwrap();
}

#[test]
fn a_name_that_is_taken_makes_nothing() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let texts: Vec<String> = ["free", "taken"].map(|n| format!(r#"{{"interface":{{"type":"macvlan","name":"{n}"}}}}"#)).into();
    let claim = shares_with(&world, "a", &texts);
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    fabric::links::create(&mut RouteSocket::open_in(&pod.netns().unwrap()).unwrap(), "bridge", "taken").unwrap();
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(error.to_string().contains("taken"), "{error}");
    assert!(world.pod_links(&pod).iter().all(|l| l.name != "free"), "all or nothing");
    engine.unprepare(&claim.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_step_that_fails_takes_moved_and_made_links_back() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let share = shares(&world, "share", 2, r#"{"interface":{"type":"macvlan"}}"#);
    let whole = claim("whole", &world.device_names()[1..], "");
    engine.prepare(&share, &pod_ref("a")).unwrap();
    engine.prepare(&whole, &pod_ref("a")).unwrap();
    world.break_plan(&engine, "nic0");
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")), "{:?}", world.pod_links(&pod));
    assert!(engine.records().iter().flat_map(|r| &r.devices).all(|d| d.phase == Phase::Prepared && d.attachment.is_none()));
    engine.unprepare(&share.claim).unwrap();
    engine.unprepare(&whole.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_namespace_that_ended_took_its_links_along_and_nothing_is_lost() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let claim = shares(&world, "a", 2, r#"{"interface":{"type":"macvlan"}}"#);
    {
        let engine = world.engine();
        engine.prepare(&claim, &pod_ref("a")).unwrap();
        let pod = world.pod("a");
        attach(&engine, "a", &pod);
    }
    // Without the agent nobody holds the namespace.
    let engine = world.engine();
    engine.recover();
    let released = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(released.iter().all(|r| matches!(r, Released::Deleted(_))), "{released:?}");
    assert!(engine.records()[0].devices.iter().all(|d| d.attachment.is_none() && d.phase == Phase::Prepared));
    // The next sandbox gets them again, with the same addresses; the kernel may need a moment to end those of before.
    let pod = world.pod("b");
    while let Err(error) = engine.attach(&pod_ref("a").uid, &sandbox("b"), pod.path(), soon()) {
        assert!(error.to_string().contains("link-layer address"), "{error}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(world.pod_links(&pod).iter().filter(|l| l.name.starts_with("nic")).count(), 2);
    engine.unprepare(&claim.claim).unwrap();
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")));
    world.assert_unchanged(&before);
}

#[test]
fn an_agent_that_comes_back_finds_what_it_made_and_what_the_pod_renamed() {
    let Some(world) = World::new(1) else { return };
    let claim = shares(&world, "a", 2, r#"{"interface":{"type":"macvlan"}}"#);
    let pod = world.pod("a");
    {
        let engine = world.engine();
        engine.prepare(&claim, &pod_ref("a")).unwrap();
        attach(&engine, "a", &pod);
    }
    rename(&pod, "nic0-1", "mine");
    let engine = world.engine();
    engine.recover();
    assert!(engine.records()[0].devices.iter().all(|d| d.phase == Phase::Attached));
    assert!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().moves.is_empty());
    let look = engine.look(&claim.claim.uid).unwrap();
    assert_eq!(look.seen.len(), 2);
    assert!(look.seen.values().all(|s| matches!(s, dranic::attach::engine::Seen::Here(..))), "{look:?}");
    engine.unprepare(&claim.claim).unwrap();
    assert!(world.pod_links(&pod).iter().all(|l| l.name != "mine" && l.name != "nic0"));
}

#[test]
fn one_that_was_killed_in_the_middle_makes_the_rest_anew_and_leaves_what_is_not_its_own() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let claim = shares(&world, "a", 3, r#"{"interface":{"type":"macvlan"}}"#);
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    let netns = pod.netns().unwrap();
    // All intents recorded, the first link made; the index of the second was taken by somebody's own link on the same NIC.
    let mut host = world.node.socket().unwrap();
    let (parent, target) = (parent_of(&world).index, std::os::fd::AsFd::as_fd(&netns));
    let macvlan = Child::Macvlan { mode: Default::default() };
    for (index, name) in [(100, "nic0"), (101, "foreign")] {
        let create = child::Create { child: macvlan, parent, target, index, name: name.into(), mtu: None, address: None };
        host.request(child::create_request(&create), deadline()).unwrap();
    }
    let update = |record: &mut dranic::ledger::ClaimRecord| {
        for (index, device) in (100..).zip(&mut record.devices) {
            device.phase = Phase::Attaching;
            device.attachment = Some(dranic::ledger::Attachment {
                sandbox: sandbox("a"),
                netns_path: pod.path().to_owned(),
                netns: netns.id(),
                index,
            });
        }
    };
    engine.ledger().update(&claim.claim.uid, Durability::Process, update).unwrap();

    drop(engine);
    let again = world.engine();
    again.recover();
    attach(&again, "a", &pod);
    let links = world.pod_links(&pod);
    for name in ["nic0", "nic0-1", "nic0-2", "foreign"] {
        named(&links, name);
    }
    again.unprepare(&claim.claim).unwrap();
    let left: Vec<String> = world.pod_links(&pod).into_iter().map(|l| l.name).collect();
    assert!(left.contains(&"foreign".to_owned()) && !left.iter().any(|n| n.starts_with("nic")), "{left:?}");
    world.assert_unchanged(&before);
}

#[test]
fn the_guard_sees_made_links_as_it_sees_moved_ones() {
    let Some(world) = World::new(1) else { return };
    let engine = world.engine();
    let claim = shares(&world, "a", 2, r#"{"interface":{"type":"macvlan"}}"#);
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    let verdict = || {
        let (records, seen) = (vec![(*engine.records()[0]).clone()], world.pod_snapshot(&pod));
        let netns = pod.netns().unwrap().id();
        let seen =
            dranic::gate::check::Seen { netns, boot_id: "boot-1", links: &seen.links, addresses: &seen.addresses, rdma: &[] };
        dranic::gate::check::check(&records, &seen)
    };
    use dranic::gate::check::Verdict;
    assert!(matches!(verdict(), Verdict::Lacking(lack) if lack.more == 1 && lack.device.contains("share a-0")));
    attach(&engine, "a", &pod);
    assert_eq!(verdict(), Verdict::Complete);
    rename(&pod, "nic0-1", "mine");
    assert!(matches!(verdict(), Verdict::Altered(lack) if lack.what.contains("mine")));
    let mut socket = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    let index = named(&world.pod_links(&pod), "mine").index;
    socket.request(child::delete_request(index), deadline()).unwrap();
    assert!(matches!(verdict(), Verdict::Lacking(lack) if lack.device.contains("share a-1")));
    engine.unprepare(&claim.claim).unwrap();
}

fn rename(pod: &PodNetns, from: &str, to: &str) {
    let output = std::process::Command::new("nsenter")
        .arg(format!("--net={}", pod.path().display()))
        .args(["ip", "link", "set", from, "name", to])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
}
