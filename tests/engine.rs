//! The engine against the real kernel: a scratch node with NICs on a fabric, pods as namespaces, no agent and no doubles.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{World, claim, config, pod_ref, sandbox};
use dranic::attach::{AttachError, PrepareReason};
use dranic::ledger::Phase;
use dranic::netdev::{Route, host_state, link, route, sysctl};
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

#[test]
fn eight_nics_go_in_and_come_back_as_they_were() {
    let Some(world) = World::new(8) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let claim = claim("a", &world.device_names(), "");
    let record = engine.prepare(&claim, &pod_ref("a")).unwrap();
    assert_eq!(record.devices.len(), 8);
    assert!(world.links().iter().filter(|l| l.name.starts_with("nic")).all(|l| !l.is_up()), "prepare takes links down");

    let pod = world.pod("a");
    let times = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_eq!(times.moves.len(), 8);
    engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap();
    let inside = world.pod_links(&pod);
    for nic in 0..8 {
        let link = inside.iter().find(|l| l.name == format!("nic{nic}")).unwrap();
        assert!(link.is_up() && link.mtu == 9000, "{link:?}");
    }
    assert!(world.pod_addresses(&pod).contains(&"10.0.3.1/24".to_owned()));
    assert!(!world.links().iter().any(|l| l.name.starts_with("nic")));

    // The same sandbox again changes nothing.
    assert!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().moves.is_empty());

    let released = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert_eq!(released.len(), 8);
    engine.unprepare(&claim.claim).unwrap();
    engine.unprepare(&claim.claim).unwrap();
    world.assert_unchanged(&before);
    assert!(engine.records().is_empty());
}

#[test]
fn prepare_is_idempotent_and_unprepare_without_a_sandbox_gives_back() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let claim = claim("a", &world.device_names(), "");
    let first = engine.prepare(&claim, &pod_ref("a")).unwrap();
    for _ in 0..50 {
        let again = engine.prepare(&claim, &pod_ref("a")).unwrap();
        assert_eq!(first.generation, again.generation);
    }
    engine.unprepare(&claim.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn two_claims_of_a_pod_share_its_sandbox() {
    let Some(world) = World::new(4) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let names = world.device_names();
    let (one, two) = (claim("one", &names[..2], ""), claim("two", &names[2..], ""));
    engine.prepare(&one, &pod_ref("a")).unwrap();
    engine.prepare(&two, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_eq!(world.pod_links(&pod).iter().filter(|l| l.name.starts_with("nic")).count(), 4);
    // The first claim goes; the second one stays attached.
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(world.pod_links(&pod).iter().filter(|l| l.name.starts_with("nic")).count(), 2);
    assert!(engine.records()[0].devices.iter().all(|d| d.phase == Phase::Attached));
    engine.unprepare(&two.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn another_claim_is_refused_with_the_owners_name() {
    let Some(world) = World::new(1) else { return };
    let engine = world.engine();
    engine.prepare(&claim("first", &world.device_names(), ""), &pod_ref("a")).unwrap();
    let error = engine.prepare(&claim("second", &world.device_names(), ""), &pod_ref("b")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::Held { .. }), "{error}");
    assert!(error.to_string().contains("default/first"), "{error}");
    engine.unprepare(&claim("first", &[], "").claim).unwrap();
    engine.prepare(&claim("second", &world.device_names(), ""), &pod_ref("b")).unwrap();
    engine.unprepare(&claim("second", &[], "").claim).unwrap();
}

#[test]
fn a_device_that_is_gone_is_named_in_prepare() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let mut names = world.device_names();
    names.push(dranic::names::DeviceName::new("pci-0000-ff-00-0").unwrap());
    let error = engine.prepare(&claim("a", &names, ""), &pod_ref("a")).unwrap_err();
    assert!(error.to_string().contains("pci-0000-ff-00-0 is not on this node"), "{error}");
    world.assert_unchanged(&before);
    assert!(engine.records().is_empty());
    // Nothing stays reserved.
    engine.prepare(&claim("b", &world.device_names(), ""), &pod_ref("b")).unwrap();
    engine.unprepare(&claim("b", &[], "").claim).unwrap();
}

#[test]
fn a_device_unplugged_after_prepare_fails_the_sandbox_and_the_others_come_back() {
    let Some(world) = World::new(4) else { return };
    let engine = world.engine();
    let before = world.host_states();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    world.unplug("nic2");
    let pod = world.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(matches!(error, AttachError::Gone { .. }), "{error}");
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")), "all or nothing");
    assert!(engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap_err().contains("is gone"));
    engine.unprepare(&all.claim).unwrap();
    let after = world.host_states();
    for (name, state) in before.iter().filter(|(name, _)| name.as_str() != "nic2") {
        assert_eq!(host_state::compare(state, &after[name]), vec![], "{name}");
    }
}

#[test]
fn a_name_taken_in_the_pod_fails_before_anything_moves() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let names = world.device_names();
    let all = claim("a", &names[..1], r#"{"interface": {"name": "eth0"}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    pod.add_eth0(world.node.netns(), "vethpeer").unwrap();
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(error.to_string().contains("\"eth0\" is taken"), "{error}");
    assert_eq!(world.pod_links(&pod).iter().filter(|l| l.name == "eth0").count(), 1);
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn an_mtu_the_device_refuses_is_found_in_prepare() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), r#"{"interface": {"mtu": 200000}}"#);
    let error = engine.prepare(&all, &pod_ref("a")).unwrap_err();
    assert!(error.to_string().contains("interface.mtu 200000 is outside"), "{error}");
    world.assert_unchanged(&before);
}

#[test]
fn a_step_that_the_kernel_refuses_takes_everything_back() {
    let Some(world) = World::new(3) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    // A plan that the kernel refuses, as if it had changed its mind since prepare: an address of another host is fine, a route by
    // an unreachable gateway is not.
    world.break_plan(&engine, "nic1");
    let pod = world.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(matches!(error, AttachError::Step { .. }), "{error}");
    assert!(error.to_string().contains("adding route"), "{error}");
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")));
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_route_that_the_pod_network_has_is_refused_and_the_same_of_two_devices_is_not() {
    let Some(world) = World::new(3) else { return };
    // Comes along from the host, where the pod does not get it: nobody asked for it.
    let copied = Route::to("198.18.0.0/15".parse().unwrap());
    let mut host = world.node.socket().unwrap();
    let nic0 = fabric::links::find(&mut host, "nic0").unwrap().index;
    host.request(route::add_request(nic0, &copied, false), soon()).unwrap();
    let before = world.host_states();
    let engine = world.engine();
    let pod = world.pod("a");
    let mut inside = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    pod.add_eth0(world.node.netns(), "vethpeer").unwrap();
    let eth0 = fabric::links::find(&mut inside, "eth0").unwrap().index;
    fabric::links::add_address(&mut inside, eth0, "10.244.0.5/24".parse().unwrap()).unwrap();
    fabric::links::add_address(&mut inside, eth0, "fd00:244::5/64".parse().unwrap()).unwrap();
    for destination in ["0.0.0.0/0", "::/0", "198.18.0.0/15"] {
        let route = Route::to(destination.parse().unwrap());
        inside.request(route::add_request(eth0, &route, false), soon()).unwrap();
    }

    let names = world.device_names();
    for (name, destination) in [("four", "0.0.0.0/0"), ("six", "::/0")] {
        let routes = format!(r#"{{"routes": [{{"destination": "{destination}", "scope": 253}}]}}"#);
        let refused = claim(name, &names[..1], &routes);
        engine.prepare(&refused, &pod_ref("a")).unwrap();
        let error = engine.attach(&pod_ref("a").uid, &sandbox(name), pod.path(), soon()).unwrap_err().to_string();
        assert!(error.contains(&format!("adding route {destination}")) && error.contains("by eth0"), "{error}");
        assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")), "all back, though the namespace lives on");
        assert_eq!(engine.pinned(), 0, "no handle keeps a namespace in which there is nothing of ours");
        engine.unprepare(&refused.claim).unwrap();
    }
    let shared = claim("both", &names, r#"{"routes": [{"destination": "192.0.2.0/24", "scope": 253}]}"#);
    engine.prepare(&shared, &pod_ref("a")).unwrap();
    engine.attach(&pod_ref("a").uid, &sandbox("both"), pod.path(), soon()).unwrap();
    let routes = world.pod_snapshot(&pod).routes;
    assert!(routes.iter().any(|(links, r)| r.destination == copied.destination && *links == [eth0]), "{routes:?}");
    engine.unprepare(&shared.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_host_that_begins_to_forward_meanwhile_gets_its_nics_back_forwarding() {
    let Some(world) = World::new(3) else { return };
    let own = || (0..3).map(|n| sysctl::read(&format!("nic{n}"), "ipv4/conf/forwarding").unwrap()).collect::<Vec<_>>();
    let forwarding = || world.node.netns().run(own).unwrap();
    // nic2 has a will of its own.
    world.node.netns().run(|| sysctl::write("nic2", "ipv4/conf/forwarding", "1")).unwrap().unwrap();
    assert_eq!(forwarding(), ["0", "0", "1"]);
    let engine = world.engine();
    let links = world.device_names();
    let (moved, not_moved) = (claim("moved", &[links[0].clone(), links[2].clone()], ""), claim("not-moved", &links[1..2], ""));
    engine.prepare(&moved, &pod_ref("a")).unwrap();
    engine.prepare(&not_moved, &pod_ref("b")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    world.node.netns().run(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap().unwrap();
    engine.unprepare(&moved.claim).unwrap();
    engine.unprepare(&not_moved.claim).unwrap();
    assert_eq!(forwarding(), ["1", "1", "1"]);
    // And one that stays behind the host.
    world.node.netns().run(|| sysctl::write("nic2", "ipv4/conf/forwarding", "0")).unwrap().unwrap();
    engine.prepare(&moved, &pod_ref("a")).unwrap();
    engine.attach(&pod_ref("a").uid, &sandbox("a2"), pod.path(), soon()).unwrap();
    engine.unprepare(&moved.claim).unwrap();
    assert_eq!(forwarding(), ["1", "1", "0"]);
}

#[test]
fn a_deadline_in_the_past_moves_nothing_and_a_later_try_works() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), Instant::now()).unwrap_err();
    assert!(matches!(error, AttachError::Stopped { .. }), "{error}");
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")));
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_stop_during_the_attach_cancels_it_and_nothing_moves_afterwards() {
    let Some(world) = World::new(12) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    std::thread::scope(|scope| {
        let attach = scope.spawn(|| engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()));
        // In the middle: at least one NIC has left.
        let begin = Instant::now();
        while world.links().iter().filter(|l| l.name.starts_with("nic")).count() == 12 {
            assert!(begin.elapsed() < Duration::from_secs(10), "the attach never began");
            std::thread::yield_now();
        }
        let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
        let error = attach.join().unwrap().unwrap_err();
        assert!(matches!(error, AttachError::Stopped { .. }), "{error}");
    });
    assert!(world.pod_links(&pod).iter().all(|l| !l.name.starts_with("nic")));
    assert_eq!(world.links().iter().filter(|l| l.name.starts_with("nic")).count(), 12);
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn the_hosts_own_namespace_is_refused() {
    let Some(world) = World::new(1) else { return };
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let host = world.node_netns_file();
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), &host, soon()).unwrap_err();
    assert!(matches!(error, AttachError::HostNetwork), "{error}");
    engine.unprepare(&all.claim).unwrap();
}

#[test]
fn a_new_sandbox_of_the_pod_gets_the_devices_of_the_old_one() {
    let Some(world) = World::new(3) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), r#"{"interface": {"mtu": 1400}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let (first, second) = (world.pod("first"), world.pod("second"));
    engine.attach(&pod_ref("a").uid, &sandbox("first"), first.path(), soon()).unwrap();
    // No Stop for the first one came.
    engine.attach(&pod_ref("a").uid, &sandbox("second"), second.path(), soon()).unwrap();
    assert!(world.pod_links(&first).iter().all(|l| !l.name.starts_with("nic")));
    let inside = world.pod_links(&second);
    assert_eq!(inside.iter().filter(|l| l.name.starts_with("nic") && l.mtu == 1400 && l.is_up()).count(), 3);
    // A late Stop of the first one touches nothing.
    assert!(engine.release(&pod_ref("a").uid, &sandbox("first")).is_empty());
    engine.check_attached(&pod_ref("a").uid, &sandbox("second")).unwrap();
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn another_address_than_the_hosts_starts_and_the_hosts_routes_stay_behind() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), r#"{"interface": {"addresses": ["10.99.0.5/24"]}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert!(world.pod_addresses(&pod).contains(&"10.99.0.5/24".to_owned()));
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn configuration_is_in_the_kernel_afterwards() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let text = r#"{
        "interface": {"name": "rail0", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05", "addresses": ["10.20.0.5/24", "fd00:20::5/64"]},
        "routes": [{"destination": "10.0.0.0/8", "gateway": "10.20.0.1", "table": 120}, {"destination": "10.77.0.0/16", "gateway": "10.20.0.1"}],
        "rules": [{"priority": 1000, "source": "10.20.0.5/32", "table": 120}],
        "neighbors": [{"destination": "10.20.0.1", "hardwareAddr": "02:00:00:00:00:01"}]
    }"#;
    assert!(config(text).interface.is_some());
    let all = claim("a", &world.device_names(), text);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    let link = world.pod_links(&pod).into_iter().find(|l| l.name == "rail0").unwrap();
    assert_eq!((link.mtu, link.address.unwrap().to_string().as_str()), (1400, "02:00:00:00:aa:05"));
    let addresses = world.pod_addresses(&pod);
    assert!(addresses.contains(&"10.20.0.5/24".to_owned()) && addresses.contains(&"fd00:20::5/64".to_owned()), "{addresses:?}");
    let seen = world.pod_snapshot(&pod);
    assert!(seen.routes.iter().any(|(_, r)| r.destination.to_string() == "10.0.0.0/8" && r.table == 120));
    assert!(seen.routes.iter().any(|(_, r)| r.destination.to_string() == "10.77.0.0/16" && r.table == 254));
    assert!(seen.rules.iter().any(|r| r.priority == Some(1000) && r.table == 120));
    assert!(seen.neighbours.iter().any(|(_, n)| n.ip.to_string() == "10.20.0.1"));
    // Released, and the namespace is still there: no rule stays in it.
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(!world.pod_snapshot(&pod).rules.iter().any(|r| r.table == 120));
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_name_taken_on_the_host_meanwhile_leaves_the_nic_under_another_and_the_rest_restored() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    world.occupy("nic0");
    engine.unprepare(&all.claim).unwrap();
    let mut socket = world.node.socket().unwrap();
    let back = link::by_name(&mut socket, "dranic0", soon()).unwrap().expect("it is there, under another name");
    assert!(back.is_up());
    let state = world.host_state_of(back.index);
    assert_eq!(state.addresses, before["nic0"].addresses);
}

#[test]
fn no_file_descriptor_stays_open() {
    let Some(world) = World::new(2) else { return };
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    let cycle = |n: usize| {
        engine.prepare(&all, &pod_ref("a")).unwrap();
        let pod = world.pod(&format!("p{n}"));
        let id = sandbox(&format!("p{n}"));
        engine.attach(&pod_ref("a").uid, &id, pod.path(), soon()).unwrap();
        let _ = engine.release(&pod_ref("a").uid, &id);
        engine.unprepare(&all.claim).unwrap();
    };
    cycle(0);
    assert_eq!(engine.pinned(), 0);
    for n in 1..8 {
        cycle(n);
    }
    assert_eq!(engine.pinned(), 0, "each namespace was let go");
}

#[test]
fn after_a_crash_in_the_middle_the_next_engine_finishes_or_takes_back() {
    let Some(world) = World::new(6) else { return };
    let before = world.host_states();
    let all = claim("a", &world.device_names(), "");
    let pod = world.pod("a");
    {
        let engine = world.engine();
        engine.prepare(&all, &pod_ref("a")).unwrap();
        // As a crash leaves it: intent recorded, half of the links moved, nothing configured.
        world.half_attached(&engine, &pod, &sandbox("a"), 3);
    }
    let engine = world.engine();
    engine.recover();
    let found = engine.reconcile(&[(pod_ref("a").uid, sandbox("a"), Some(pod.path().to_owned()))]);
    assert_eq!(found.attach.len(), 1);
    assert!(found.release.is_empty());
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_eq!(world.pod_links(&pod).iter().filter(|l| l.name.starts_with("nic") && l.is_up()).count(), 6);
    drop(engine);

    // Again a new engine; this time the runtime has forgotten the sandbox, whose namespace is still there.
    let engine = world.engine();
    engine.recover();
    let found = engine.reconcile(&[]);
    assert_eq!(found.release, vec![(pod_ref("a").uid, sandbox("a"))]);
    for (uid, id) in found.release {
        let _ = engine.release(&uid, &id);
    }
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}
