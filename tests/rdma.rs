//! RDMA devices that move with their links (exclusive mode): in, back, and whatever may go wrong in between. In the virtual machine of
//! `e2e/vm` (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/rdma.rs"]
mod rig;

#[path = "rdma/cut_short.rs"]
mod cut_short;
#[path = "rdma/killed.rs"]
mod killed;

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::{claim, pod_ref, sandbox};
use dranic::attach::Engine;
use dranic::attach::engine::{Observation, Observed, Released, Seen};
use dranic::attach::{PrepareReason, Step};
use dranic::ledger::{Phase, Share};
use dranic::netdev::{HostState, link};
use dranic::netlink::RouteSocket;
use dranic::rdma::{NetnsMode, RdmaSocket};
use dranic_testbed::fabric::PodNetns;
use pci::{Guest, Nic, run, soon, wait_for};
use rig::{device, lent, names, published};

/// The machine, and its NICs 0 to N-1 with RDMA devices rx0, rx1, … over them, all up.
fn machine<const N: usize>() -> Option<(Guest, [Nic; N], [HostState; N])> {
    let guest = rig::guest(NetnsMode::Exclusive)?;
    let mut number = 0;
    let nics = [(); N].map(|()| {
        let (nic, n) = (guest.fresh(number), number);
        run(&format!("ip link set nic{n} up"));
        run(&format!("ip address add 10.60.{n}.1/24 dev nic{n}"));
        run(&format!("rdma link add rx{n} type rxe netdev nic{n}"));
        number += 1;
        nic
    });
    let before = nics.each_ref().map(|nic| guest.state(nic));
    Some((guest, nics, before))
}

fn inside(pod: &PodNetns, line: &str) {
    pod.netns().unwrap().run(|| run(line)).unwrap();
}

fn release(engine: &Engine, pod: &str) -> Vec<Released> {
    engine.release(&pod_ref(pod).uid, &sandbox(pod))
}

/// The first device of the only claim.
fn share(engine: &Engine) -> Share {
    engine.records()[0].devices[0].share()
}

#[test]
fn it_moves_with_its_link_and_back() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let on_host = device(&guest.host, "rx0");
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], r#"{"interface": {"name": "pod7"}}"#);
    assert_eq!((names(&guest.host), device(&pod.netns().unwrap(), "rx0").index), (vec![], on_host.index));
    let mut socket = RdmaSocket::open_in(&pod.netns().unwrap()).unwrap().unwrap();
    let port = socket.ports(on_host.index, soon()).unwrap().remove(0);
    assert_eq!(port.link.map(|(_, name)| name).as_deref(), Some("pod7"));
    let record = engine.records().remove(0);
    let lent = &record.devices[0];
    let rdma = lent.rdma.as_ref().unwrap();
    assert_eq!((rdma.name.as_str(), rdma.index, rdma.port, rdma.mode), ("rx0", on_host.index, 1, NetnsMode::Exclusive));
    assert_eq!((rdma.node_guid, rdma.wait_for_port), (on_host.node_guid, true));
    let kinds: Vec<_> = lent.plan.steps.iter().map(Step::kind).collect();
    assert_eq!(kinds[..2], ["move", "rdma"], "{kinds:?}");
    assert!(lent.times.iter().any(|time| time.step == "rdma" && time.micros > 0), "{:?}", lent.times);
    assert!(matches!(engine.look(&one.claim.uid).unwrap().seen.values().next(), Some(Seen::Here(..))));
    // Once more, and nothing is moved.
    assert_eq!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().devices, 0);

    assert_eq!(release(&engine, "a"), [Released::Moved(share(&engine))]);
    assert_eq!(names(&pod.netns().unwrap()), Vec::<String>::new());
    assert_eq!(device(&guest.host, "rx0").index, on_host.index);
    assert!(!guest.link(&nic).is_up());
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn two_pods_have_one_each() {
    let Some((guest, nics, before)) = machine::<2>() else { return };
    let engine = rig::engine(&guest);
    let (first, one) = lent(&guest, &engine, "a", &["rx0"], "");
    let (second, two) = lent(&guest, &engine, "b", &["rx1"], "");
    let see = |pod: &PodNetns| names(&pod.netns().unwrap());
    assert_eq!((see(&first), see(&second), names(&guest.host)), (vec!["rx0".to_owned()], vec!["rx1".to_owned()], vec![]));
    engine.unprepare(&one.claim).unwrap();
    assert_eq!((names(&guest.host), see(&second)), (vec!["rx0".to_owned()], vec!["rx1".to_owned()]));
    engine.unprepare(&two.claim).unwrap();
    assert_eq!(names(&guest.host), ["rx0", "rx1"]);
    nics.iter().zip(&before).for_each(|(nic, before)| guest.assert_same(before, nic));
}

#[test]
fn two_in_one_pod_come_and_go_together() {
    let Some((guest, nics, before)) = machine::<2>() else { return };
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0", "rx1"], "");
    assert_eq!((names(&pod.netns().unwrap()), names(&guest.host)), (vec!["rx0".to_owned(), "rx1".to_owned()], vec![]));
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(names(&guest.host), ["rx0", "rx1"]);
    nics.iter().zip(&before).for_each(|(nic, before)| guest.assert_same(before, nic));
}

#[test]
fn what_the_pod_called_it_is_forgotten() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], "");
    inside(&pod, "rdma dev set rx0 name mine");
    assert!(matches!(engine.look(&one.claim.uid).unwrap().seen.values().next(), Some(Seen::Here(..))));
    let _ = release(&engine, "a");
    assert_eq!(names(&guest.host), ["rx0"]);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn a_name_that_is_taken_is_given_when_it_is_free() {
    let Some((guest, nics, before)) = machine::<2>() else { return };
    let failed: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
    let heard = failed.clone();
    let engine = rig::observed(
        &guest,
        Arc::new(move |seen: Observation| {
            if let Observed::Restored(_, what) = seen.what {
                heard.lock().unwrap().extend(what);
            }
        }),
    );
    for (name, freed) in [("a", true), ("b", false)] {
        let (pod, one) = lent(&guest, &engine, name, &["rx0"], "");
        inside(&pod, "rdma dev set rx0 name mine");
        run("rdma dev set rx1 name rx0");
        let _ = release(&engine, name);
        assert_eq!(names(&guest.host), ["dranic0", "rx0"]);
        if freed {
            run("rdma dev set rx0 name rx1");
        }
        engine.unprepare(&one.claim).unwrap();
        let told = std::mem::take(&mut *failed.lock().unwrap());
        if freed {
            assert_eq!((names(&guest.host), told), (vec!["rx0".to_owned(), "rx1".to_owned()], vec![]));
        } else {
            assert!(told.iter().any(|(what, why)| what == "RDMA device" && why.contains("dranic0")), "{told:?}");
        }
        guest.assert_same(&before[0], &nics[0]);
    }
}

#[test]
fn what_the_kernel_returned_is_called_as_it_was() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], r#"{"interface": {"name": "pod7"}}"#);
    inside(&pod, "rdma dev set rx0 name mine");
    drop((engine, pod));
    wait_for("the kernel returns both", || (names(&guest.host) == ["mine"]).then(|| guest.find(&nic)).flatten());
    let engine = rig::engine(&guest);
    engine.recover();
    assert_eq!((names(&guest.host), guest.link(&nic).name.as_str()), (vec!["rx0".to_owned()], "nic0"));
    assert_eq!(engine.records()[0].devices[0].phase, Phase::Prepared);
    // It can be lent again.
    let pod = guest.pod("again");
    engine.attach(&pod_ref("a").uid, &sandbox("again"), pod.path(), soon()).unwrap();
    assert_eq!(names(&pod.netns().unwrap()), ["rx0"]);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn one_that_was_registered_anew_is_known_by_its_guid() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], "");
    let old = device(&pod.netns().unwrap(), "rx0");
    // As a driver that is loaded again: another index, another name, in the first namespace.
    inside(&pod, "rdma link delete rx0");
    inside(&pod, "rdma link add rxnew type rxe netdev nic0");
    let place = if names(&guest.host).is_empty() { "in the pod" } else { "on the host" };
    println!("a new one is {place}");
    if place == "on the host" {
        assert!(matches!(engine.look(&one.claim.uid).unwrap().seen.values().next(), Some(Seen::NoRdma)));
    }
    let _ = release(&engine, "a");
    let new = device(&guest.host, "rx0");
    assert!(new.index != old.index && new.node_guid == old.node_guid);
    assert_eq!(engine.records()[0].devices[0].rdma.as_ref().unwrap().index, new.index);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn one_that_is_gone_keeps_nothing() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], "");
    inside(&pod, "rdma link delete rx0");
    assert!(matches!(engine.look(&one.claim.uid).unwrap().seen.values().next(), Some(Seen::NoRdma)));
    assert_eq!(release(&engine, "a"), [Released::Moved(share(&engine))]);
    engine.unprepare(&one.claim).unwrap();
    assert!(engine.records().is_empty());
    guest.assert_same(&before, &nic);
}

/// Loads the kernel's own rxe in place of the one that was taught to move.
fn stock_rxe() -> bool {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let folder = Path::new("/lib/modules").join(kernel.trim()).join("kernel/drivers/infiniband/sw/rxe");
    let found = std::fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path()).next();
    let Some(file) = found else { return false };
    run("modprobe -r rdma_rxe");
    run("modprobe -a ib_uverbs udp_tunnel ip6_udp_tunnel");
    Command::new("insmod").arg(file).output().unwrap().status.success()
}

#[test]
fn where_one_can_not_move_everything_is_taken_back() {
    let Some(guest) = rig::guest(NetnsMode::Exclusive) else { return };
    if !stock_rxe() {
        println!("skipped: the kernel's own module rdma_rxe can't be loaded");
        return;
    }
    let nic = guest.fresh(0);
    guest.fresh(1);
    for line in ["ip link set nic0 up", "ip link set nic1 up", "rdma link add rx0 type siw netdev nic0"] {
        run(line);
    }
    run("rdma link add ib1 type rxe netdev nic1");
    let before = guest.state(&nic);
    let engine = rig::engine(&guest);
    let one = claim("a", &[published("rx0"), published("ib1")], "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err().to_string();
    assert!(
        error.contains("moving RDMA device ib1 into the pod failed") && error.contains("its driver can't move it"),
        "{error}"
    );
    assert_eq!((names(&guest.host), names(&pod.netns().unwrap())), (vec!["ib1".to_owned(), "rx0".to_owned()], vec![]));
    assert!(engine.records()[0].devices.iter().all(|device| device.phase == Phase::Prepared && device.attachment.is_none()));
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
    for line in ["rdma link delete ib1", "rdma link delete rx0", "rmmod rdma_rxe", "modprobe rdma_rxe"] {
        run(line);
    }
}

#[test]
fn one_without_a_link_moves_alone() {
    let Some(guest) = rig::guest(NetnsMode::Exclusive) else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    run("rdma link add ib0 type rxe netdev nic0");
    let before = guest.state(&nic);
    let engine = rig::engine(&guest);
    let wrong = claim("w", &[published("ib0")], r#"{"interface": {"mtu": 4000}}"#);
    let error = engine.prepare(&wrong, &pod_ref("w")).unwrap_err().to_string();
    assert!(error.contains("interface: the device is an RDMA device without a link"), "{error}");

    let (pod, one) = lent(&guest, &engine, "a", &["ib0"], r#"{"rdma": {"waitForPort": false}}"#);
    assert_eq!((names(&pod.netns().unwrap()), names(&guest.host)), (vec!["ib0".to_owned()], vec![]));
    assert!(guest.link(&nic).is_up(), "the link is none of its business");
    assert_eq!(engine.look(&one.claim.uid).unwrap().seen.values().collect::<Vec<_>>(), [&Seen::Bare]);
    assert_eq!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().devices, 0);
    assert!(engine.check_attached(&pod_ref("a").uid, &sandbox("a")).is_ok());
    // The agent is started anew.
    drop(engine);
    let engine = rig::engine(&guest);
    engine.recover();
    assert_eq!((engine.pinned(), engine.records()[0].devices[0].phase), (1, Phase::Attached));
    let device = engine.records()[0].devices[0].share();
    assert_eq!(release(&engine, "a"), [Released::Moved(device.clone())]);
    assert_eq!(names(&guest.host), ["ib0"]);
    // Into another sandbox, whose namespace ends by itself.
    let again = guest.pod("again");
    engine.attach(&pod_ref("a").uid, &sandbox("again"), again.path(), soon()).unwrap();
    inside(&again, "rdma dev set ib0 name mine");
    drop((engine, again));
    wait_for("the kernel returns it", || (names(&guest.host) == ["mine"]).then_some(()));
    let engine = rig::engine(&guest);
    assert_eq!(engine.repair_returned(), [device.device]);
    assert_eq!(names(&guest.host), ["ib0"]);
    engine.unprepare(&one.claim).unwrap();
    assert!(engine.records().is_empty());
    guest.assert_same(&before, &nic);
    run("rdma link delete ib0");
}

#[test]
fn what_does_not_fit_is_refused_in_prepare() {
    let Some((guest, [nic], [before])) = machine() else { return };
    let engine = rig::engine(&guest);
    let other = guest.fresh(1);
    let refused = |device, text: &str| engine.prepare(&claim("a", &[device], text), &pod_ref("a")).unwrap_err();
    for (text, why) in [
        (r#"{"rdma": {"netnsMode": "shared"}}"#, "rdma.netnsMode: shared is asked for"),
        (r#"{"interface": {"type": "macvlan"}}"#, "rdma.enabled: the node's RDMA mode is exclusive"),
    ] {
        let error = refused(published("rx0"), text);
        assert!(matches!(*error.reason, PrepareReason::Rdma { .. }) && error.to_string().contains(why), "{error}");
    }
    let error = refused(guest.name(&other), r#"{"rdma": {"enabled": true}}"#).to_string();
    assert!(error.contains("rdma.enabled: the device has no RDMA device"), "{error}");
    assert!(engine.records().is_empty());
    guest.assert_same(&before, &nic);

    // Without it the link goes alone, and a link on top of it can be had.
    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], r#"{"rdma": {"enabled": false}, "interface": {"type": "macvlan"}}"#);
    assert_eq!((names(&guest.host), names(&pod.netns().unwrap())), (vec!["rx0".to_owned()], vec![]));
    engine.unprepare(&one.claim).unwrap();
    let (pod, one) = lent(&guest, &engine, "b", &["rx0"], r#"{"rdma": {"enabled": false}}"#);
    let mut socket = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    assert!(link::by_name(&mut socket, "nic0", soon()).unwrap().is_some());
    assert_eq!(names(&guest.host), ["rx0"]);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}
