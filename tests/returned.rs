//! NICs that come back to the host by themselves, as the kernel returns hardware when its namespace ends. Here links are carried back by
//! hand, down and under the pod's name; `tests/pci.rs` has the kernel do it.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::agent::returned;
use dranic::attach::Engine;
use dranic::ledger::Phase;
use dranic::netdev::Link;
use dranic::netns::Netns;
use tokio_util::sync::CancellationToken;

const CHANGED: &str = r#"{"interface": {"name": "eth7", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05"}}"#;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn named(links: &[Link], name: &str) -> Option<Link> {
    links.iter().find(|l| l.name == name).cloned()
}

/// Attaches NIC number `nic` to a pod of that number; the agent that did so is gone, and so is the namespace's file, but not yet the
/// namespace.
fn lend(world: &World, nic: usize, parameters: &str) -> (Netns, dranic::dra::resolve::ResolvedClaim) {
    let engine = world.engine();
    let name = format!("p{nic}");
    let found = world.device_names();
    let device = if found.len() > 1 { found[nic].clone() } else { found[0].clone() };
    let one = claim(&name, &[device], parameters);
    engine.prepare(&one, &pod_ref(&name)).unwrap();
    let pod = world.pod(&name);
    engine.attach(&pod_ref(&name).uid, &sandbox(&name), pod.path(), soon()).unwrap();
    (pod.netns().unwrap(), one)
}

/// As the kernel does it.
fn come_back(world: &World, from: Netns, name: &str, as_name: &str, index: u32) {
    world.carry(&from, world.node.netns(), name, as_name, index);
}

fn phases(engine: &Engine) -> Vec<Phase> {
    engine.records().iter().flat_map(|r| r.devices.iter().map(|d| d.phase)).collect()
}

#[test]
fn it_is_repaired_within_a_second_of_its_event() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let (alive, one) = lend(&world, 0, CHANGED);
    let engine = Arc::new(world.engine());
    engine.recover();
    assert_eq!(phases(&engine), [Phase::Attached], "it is somewhere, who knows where");
    assert!(engine.may_have_returned());
    assert!(engine.repair_returned().is_empty(), "it is not on the host");

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let stop = CancellationToken::new();
    runtime.spawn(returned::keep(engine.clone(), world.node.netns().try_clone().unwrap(), |_| (), stop.clone()));
    // It listens: the first look is over.
    std::thread::sleep(Duration::from_millis(300));
    let event = Instant::now();
    come_back(&world, alive, "eth7", "eth7", 90);
    let repaired = loop {
        if let Some(link) = named(&world.links(), "nic0").filter(|l| l.address == before["nic0"].address) {
            break link;
        }
        assert!(event.elapsed() < Duration::from_secs(1), "not repaired in time");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!((repaired.mtu, repaired.index, repaired.is_up()), (9000, 90, false), "as prepare left it");
    let end = soon();
    while phases(&engine) != [Phase::Prepared] {
        assert!(Instant::now() < end, "the ledger knows");
        std::thread::sleep(Duration::from_millis(5));
    }
    stop.cancel();
    assert!(!engine.may_have_returned());
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn it_is_repaired_by_the_agent_that_starts() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let (alive, one) = lend(&world, 0, CHANGED);
    come_back(&world, alive, "eth7", "eth7", 90);
    let engine = world.engine();
    engine.recover();
    assert_eq!(phases(&engine), [Phase::Prepared]);
    let link = named(&world.links(), "nic0").expect("under its name");
    assert_eq!((link.mtu, &link.address, link.is_up()), (9000, &before["nic0"].address, false));
    // A new sandbox of the pod gets it.
    let pod = world.pod("next");
    assert_eq!(engine.attach(&pod_ref("p0").uid, &sandbox("next"), pod.path(), soon()).unwrap().moves.len(), 1);
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn it_is_repaired_by_the_release_that_finds_it() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let one = claim("a", &world.device_names(), CHANGED);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    come_back(&world, pod.netns().unwrap(), "eth7", "dev3", 90);
    // The namespace is there, and whoever carried the NIC away may have meant it: nobody but a release takes part.
    assert!(!engine.may_have_returned());
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(named(&world.links(), "nic0").is_some_and(|l| l.mtu == 9000 && !l.is_up()));
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn two_that_come_back_under_each_others_names_get_their_own() {
    let Some(world) = World::new(2) else { return };
    let before = world.host_states();
    let (first, one) = lend(&world, 0, r#"{"interface": {"name": "nic1"}}"#);
    let (second, two) = lend(&world, 1, r#"{"interface": {"name": "nic0"}}"#);
    come_back(&world, first, "nic1", "nic1", 90);
    come_back(&world, second, "nic0", "nic0", 91);
    let engine = world.engine();
    engine.recover();
    let links = world.links();
    assert_eq!((named(&links, "nic0").unwrap().index, named(&links, "nic1").unwrap().index), (90, 91));
    assert!(named(&links, "dranic0").is_none());
    engine.unprepare(&one.claim).unwrap();
    engine.unprepare(&two.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn a_name_that_somebody_took_is_not_taken_from_him_and_given_back_when_he_is_gone() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let (alive, one) = lend(&world, 0, CHANGED);
    world.occupy("nic0");
    come_back(&world, alive, "eth7", "eth7", 90);
    let engine = world.engine();
    engine.recover();
    let links = world.links();
    assert!(named(&links, "nic0").is_some_and(|l| l.kind.as_deref() == Some("bridge")));
    let own = named(&links, "eth7").expect("it keeps the pod's name");
    assert_eq!((own.mtu, &own.address), (9000, &before["nic0"].address), "but is what it was otherwise");
    world.unplug("nic0");
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
}
