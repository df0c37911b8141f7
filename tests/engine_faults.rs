//! The engine when things come in another order, twice, not at all, or fail in the middle.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::attach::engine::{Engine, lent};
use dranic::attach::{AttachError, PrepareReason};
use dranic::dra::resolve::ResolvedClaim;
use dranic::ledger::Phase;
use dranic::netdev::{Link, link};
use dranic_testbed::fabric::{self, PodNetns};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn nics(links: &[Link]) -> usize {
    links.iter().filter(|l| l.name.starts_with("nic")).count()
}

/// A world whose NICs are all prepared in one claim for pod a.
fn prepared(count: u32) -> Option<(World, Engine, ResolvedClaim)> {
    let world = World::new(count)?;
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    Some((world, engine, all))
}

fn attach(engine: &Engine, pod: &PodNetns, name: &str) -> Result<usize, AttachError> {
    engine.attach(&pod_ref("a").uid, &sandbox(name), pod.path(), soon()).map(|times| times.moves.len())
}

fn phases(engine: &Engine) -> Vec<Phase> {
    engine.records().iter().flat_map(|r| r.devices.iter().map(|d| d.phase)).collect()
}

#[test]
fn a_full_disk_at_the_end_of_an_attach_takes_everything_back() {
    let Some(world) = World::new(10) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let names = world.device_names();
    let (one, two) = (claim("one", &names[..5], ""), claim("two", &names[5..], ""));
    for claim in [&one, &two] {
        engine.prepare(claim, &pod_ref("a")).unwrap();
    }
    let pod = world.pod("a");
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| attach(&engine, &pod, "a"));
        let begin = Instant::now();
        while nics(&world.links()) == 10 {
            assert!(begin.elapsed() < Duration::from_secs(10), "the attach never began");
        }
        // The intent is written; success can't be, of the second claim.
        world.disk_is_full(&two);
        let error = attaching.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("writing the ledger"), "{error}");
    });
    assert_eq!((nics(&world.pod_links(&pod)), nics(&world.links())), (0, 10));
    assert!(engine.check_attached(&pod_ref("a").uid, &sandbox("a")).is_err());

    // Before anything is moved it is noticed, too.
    let error = attach(&engine, &pod, "a").unwrap_err();
    assert!(error.to_string().contains("writing the ledger"), "{error}");
    assert_eq!(nics(&world.links()), 10);
    world.disk_has_room(&two);
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 10);
    engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap();

    // Nor does a full disk keep the NICs in the pod.
    world.disk_is_full(&two);
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 10);
    assert_eq!(nics(&world.links()), 10);
    world.disk_has_room(&two);
    // The ledger has the second claim in the old sandbox, the kernel on the host: a new sandbox gets all.
    let second = world.pod("second");
    assert_eq!(attach(&engine, &second, "second").unwrap(), 10);
    engine.unprepare(&one.claim).unwrap();
    engine.unprepare(&two.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn what_the_ledger_has_in_the_pod_and_the_kernel_on_the_host_is_attached_again() {
    let Some((world, engine, all)) = prepared(2) else { return };
    let pod = world.pod("a");
    attach(&engine, &pod, "a").unwrap();
    let uid = pod_ref("a").uid;
    let index_of = |name: &str| world.pod_links(&pod).iter().find(|l| l.name == name).map(|l| l.index);
    let (inside, stays) = (pod.netns().unwrap(), index_of("nic1"));
    world.carry(&inside, world.node.netns(), "nic0", "elsewhere", 70);
    // The gate looks at the kernel, and heals.
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 1, "the other one is not touched");
    assert!(index_of("nic0").is_some() && index_of("nic1") == stays);
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 0);

    world.carry(&inside, world.node.netns(), "nic0", "elsewhere", 71);
    drop(engine);
    let engine = world.engine();
    engine.recover();
    assert_eq!(phases(&engine).iter().filter(|p| **p == Phase::Attached).count(), 1);
    assert!(engine.check_attached(&uid, &sandbox("a")).is_err());
    let found = engine.reconcile(&[(uid.clone(), sandbox("a"), Some(pod.path().to_owned()))]);
    assert_eq!(found.attach.len(), 1);
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 1);
    engine.unprepare(&all.claim).unwrap();
    assert_eq!(engine.pinned(), 0);
}

#[test]
fn no_failed_attach_keeps_a_namespace() {
    let Some((world, engine, all)) = prepared(2) else { return };
    let pod = world.pod("a");
    let fails = |engine: &Engine, path: &std::path::Path, deadline| {
        engine.attach(&pod_ref("a").uid, &sandbox("a"), path, deadline).unwrap_err();
        assert_eq!(engine.pinned(), 0);
    };
    fails(&engine, &world.node_netns_file(), soon());
    fails(&engine, std::path::Path::new("/nowhere"), soon());
    fails(&engine, pod.path(), Instant::now());
    fabric::links::create(&mut dranic::netlink::RouteSocket::open_in(&pod.netns().unwrap()).unwrap(), "bridge", "nic1").unwrap();
    fails(&engine, pod.path(), soon());
    // Nor does one that comes after unprepare: there is nothing to do.
    engine.unprepare(&all.claim).unwrap();
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 0);
    assert_eq!(engine.pinned(), 0);
}

#[test]
fn what_was_prepared_before_a_reboot_holds_nothing_and_lets_nothing_through() {
    let Some((world, engine, all)) = prepared(1) else { return };
    drop(engine);
    let engine = world.engine_of("boot-2");
    engine.recover();
    assert!(lent(engine.ledger(), "boot-2").is_empty());
    let pod = world.pod("a");
    let error = attach(&engine, &pod, "a").unwrap_err();
    assert!(matches!(error, AttachError::EarlierBoot { .. }), "{error}");
    assert!(engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap_err().contains("rebooted"));
    assert!(engine.release(&pod_ref("a").uid, &sandbox("a")).is_empty());
    // Its device is free for others: the claim may never be unprepared here.
    let other = claim("b", &world.device_names(), "");
    engine.prepare(&other, &pod_ref("b")).unwrap();
    let error = engine.prepare(&all, &pod_ref("a")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::Held { .. }), "{error}");
    engine.unprepare(&other.claim).unwrap();
    engine.prepare(&all, &pod_ref("a")).unwrap();
    // The old sandbox has ended, whatever is prepared since.
    assert!(matches!(attach(&engine, &pod, "a"), Err(AttachError::Ended)));
    let attached = engine.attach(&pod_ref("a").uid, &sandbox("next"), pod.path(), soon()).unwrap();
    assert_eq!(attached.moves.len(), 1);
    engine.unprepare(&all.claim).unwrap();
}

#[test]
fn a_claim_goes_from_one_pod_to_the_next_only_when_the_first_has_no_sandbox() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    attach(&engine, &pod, "a").unwrap();
    let error = engine.prepare(&all, &pod_ref("b")).unwrap_err();
    assert!(matches!(*error.reason, PrepareReason::OtherPod { .. }), "{error}");
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    // Its unprepare never came.
    let record = engine.prepare(&all, &pod_ref("b")).unwrap();
    assert_eq!(record.pod.uid, pod_ref("b").uid);
    assert!(engine.has_pod(pod_ref("b").uid.as_str()) && !engine.has_pod(pod_ref("a").uid.as_str()));
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_prepare_that_was_killed_before_the_links_went_down_is_finished_by_the_next() {
    let Some((world, engine, all)) = prepared(2) else { return };
    // As it was when the record was written.
    for found in world.links().iter().filter(|l| l.name.starts_with("nic")) {
        link::set_up(&mut world.node.socket().unwrap(), found.index, true, soon()).unwrap();
    }
    engine.prepare(&all, &pod_ref("a")).unwrap();
    assert!(world.links().iter().filter(|l| l.name.starts_with("nic")).all(|l| !l.is_up()));
    // In the pod they are let alone.
    let pod = world.pod("a");
    attach(&engine, &pod, "a").unwrap();
    engine.prepare(&all, &pod_ref("a")).unwrap();
    assert!(world.pod_links(&pod).iter().filter(|l| l.name.starts_with("nic")).all(Link::is_up));
    engine.unprepare(&all.claim).unwrap();
}

#[test]
fn the_end_of_the_old_sandbox_does_not_stop_the_attach_into_the_new_one() {
    let Some((world, engine, all)) = prepared(8) else { return };
    let (old, new) = (world.pod("old"), world.pod("new"));
    attach(&engine, &old, "old").unwrap();
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| attach(&engine, &new, "new"));
        let begin = Instant::now();
        while nics(&world.pod_links(&new)) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "the attach never began");
        }
        // Stop and Remove of the old one come late.
        let _ = engine.release(&pod_ref("a").uid, &sandbox("old"));
        assert_eq!(attaching.join().unwrap().unwrap(), 8);
    });
    engine.check_attached(&pod_ref("a").uid, &sandbox("new")).unwrap();
    assert_eq!(engine.pinned(), 1, "the old namespace was let go");
    engine.unprepare(&all.claim).unwrap();
    assert_eq!(engine.pinned(), 0);
}

#[test]
fn another_link_with_the_old_index_is_never_taken_for_the_device() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let own = world.links().iter().find(|l| l.name == "nic0").unwrap().clone();
    let device = world.device_names()[0].clone();
    let one = claim("a", &[device], "");
    let record = engine.prepare(&one, &pod_ref("a")).unwrap();
    assert_eq!(record.devices[0].host.name, "nic0");
    // Plugged in again: another name, another index; and its old index is nic1's now.
    let (aside, host) = (world.pod("aside").netns().unwrap(), world.node.netns());
    world.carry(host, &aside, "nic0", "nic0", 80);
    world.carry(&aside, host, "nic0", "odd", 81);
    world.carry(host, &aside, "nic1", "nic1", own.index);
    world.carry(&aside, host, "nic1", "nic1", own.index);
    let pod = world.pod("a");
    assert_eq!(attach(&engine, &pod, "a").unwrap(), 1);
    assert_eq!(world.pod_links(&pod).iter().find(|l| l.name == "nic0").unwrap().address, own.address);
    // Away from there while nobody looked, as the kernel returns hardware: under the pod's name or none.
    world.carry(&pod.netns().unwrap(), host, "nic0", "dev82", 82);
    engine.unprepare(&one.claim).unwrap();
    let after = world.host_states();
    assert_eq!(dranic::netdev::host_state::compare(&before["nic0"], &after["nic0"]), vec![]);
    assert_eq!((after["nic0"].index, after["nic1"].index), (82, own.index));
}

#[test]
fn an_altname_that_was_taken_meanwhile_does_not_keep_the_nic_in_the_pod() {
    let Some(world) = World::new(1) else { return };
    let mut host = world.node.socket().unwrap();
    let index = world.links().iter().find(|l| l.name == "nic0").unwrap().index;
    fabric::links::add_alt_name(&mut host, index, "the-altname").unwrap();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    attach(&engine, &pod, "a").unwrap();
    world.occupy("other");
    let other = fabric::links::find(&mut host, "other").unwrap().index;
    fabric::links::add_alt_name(&mut host, other, "the-altname").unwrap();
    engine.unprepare(&all.claim).unwrap();
    let back = world.links().into_iter().find(|l| l.name == "nic0").expect("it came back");
    assert!(back.is_up() && back.alt_names.is_empty());
}

#[test]
fn devices_are_not_taken_from_one_listed_sandbox_for_another() {
    let Some((world, engine, all)) = prepared(2) else { return };
    let (old, new) = (world.pod("old"), world.pod("new"));
    let uid = pod_ref("a").uid;
    let listed =
        [(uid.clone(), sandbox("old"), Some(old.path().to_owned())), (uid.clone(), sandbox("new"), Some(new.path().to_owned()))];
    // Neither has them: whichever gets a container will.
    assert!(engine.reconcile(&listed).attach.is_empty());
    assert_eq!(engine.reconcile(&listed[1..]).attach.len(), 1);
    attach(&engine, &new, "new").unwrap();
    let found = engine.reconcile(&listed);
    assert!(found.attach.is_empty() && found.release.is_empty(), "{found:?}");
    engine.unprepare(&all.claim).unwrap();
}

#[test]
fn a_namespace_that_can_not_be_seen_after_a_restart_changes_no_record() {
    let Some((world, engine, all)) = prepared(2) else { return };
    let pod = world.pod("a");
    attach(&engine, &pod, "a").unwrap();
    drop(engine);
    // The file is gone, the namespace is not: somebody in it still runs.
    let alive = pod.netns().unwrap();
    drop(pod);
    let engine = world.engine();
    engine.recover();
    assert_eq!(phases(&engine), vec![Phase::Attached; 2]);
    assert_eq!(engine.pinned(), 0);
    drop(alive);
    // Now it is, and virtual links end with it; the claim can go all the same.
    engine.unprepare(&all.claim).unwrap();
    assert!(engine.records().is_empty());
}
