//! RDMA devices that all namespaces see (shared mode): links move, RDMA devices stay. In the virtual machine of `e2e/vm`
//! (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/rdma.rs"]
mod rig;

use common::{claim, pod_ref, sandbox};
use dranic::attach::Step;
use dranic::attach::engine::{Released, Seen};
use dranic::ledger::Phase;
use dranic::rdma::{CharDeviceKind, NetnsMode};
use pci::{run, soon};
use rig::{device, lent, names, published};

#[test]
fn the_link_moves_and_the_rdma_device_stays() {
    let Some(guest) = rig::guest(NetnsMode::Shared) else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    run("rdma link add rx0 type rxe netdev nic0");
    let (before, index) = (guest.state(&nic), device(&guest.host, "rx0").index);
    let engine = rig::engine(&guest);
    let error = engine.prepare(&claim("w", &[published("rx0")], r#"{"rdma": {"netnsMode": "exclusive"}}"#), &pod_ref("w"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("rdma.netnsMode: exclusive is asked for") && error.contains("netns_mode=0"), "{error}");

    let (pod, one) = lent(&guest, &engine, "a", &["rx0"], r#"{"rdma": {"enabled": true, "charDevices": ["umad"]}}"#);
    assert!(guest.find(&nic).is_none());
    assert_eq!((names(&guest.host), names(&pod.netns().unwrap())), (vec!["rx0".to_owned()], vec!["rx0".to_owned()]));
    let record = engine.records().remove(0);
    let rdma = record.devices[0].rdma.as_ref().unwrap();
    assert_eq!((rdma.mode, rdma.index), (NetnsMode::Shared, index));
    assert_eq!(rdma.char_devices, [CharDeviceKind::Uverbs, CharDeviceKind::Umad, CharDeviceKind::RdmaCm]);
    assert!(record.devices[0].plan.steps.iter().any(|step| matches!(step, Step::Rdma { mode: NetnsMode::Shared, .. })));
    assert!(record.devices[0].times.iter().all(|time| time.step != "rdma"), "nothing of RDMA moved");
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(device(&guest.host, "rx0").index, index);
    guest.assert_same(&before, &nic);
    run("rdma link delete rx0");
}

#[test]
fn one_without_a_link_is_only_recorded() {
    let Some(guest) = rig::guest(NetnsMode::Shared) else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    run("rdma link add ib0 type rxe netdev nic0");
    let before = guest.state(&nic);
    let engine = rig::engine(&guest);
    let (pod, one) = lent(&guest, &engine, "a", &["ib0"], "");
    let record = engine.records().remove(0);
    assert_eq!((record.devices[0].phase, record.devices[0].has_link()), (Phase::Attached, false));
    assert_eq!(engine.look(&one.claim.uid).unwrap().seen.values().collect::<Vec<_>>(), [&Seen::Bare]);
    assert_eq!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().devices, 0);
    assert!(guest.link(&nic).is_up());
    drop(engine);
    let engine = rig::engine(&guest);
    engine.recover();
    assert_eq!((engine.pinned(), engine.records()[0].devices[0].phase), (1, Phase::Attached));
    let share = record.devices[0].share();
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")), [Released::Stayed(share)]);
    // A namespace that ends by itself has nothing of it.
    let again = guest.pod("again");
    engine.attach(&pod_ref("a").uid, &sandbox("again"), again.path(), soon()).unwrap();
    drop((engine, again));
    let engine = rig::engine(&guest);
    engine.recover();
    assert_eq!(engine.records()[0].devices[0].phase, Phase::Prepared);
    engine.unprepare(&one.claim).unwrap();
    assert!(engine.records().is_empty());
    guest.assert_same(&before, &nic);
    run("rdma link delete ib0");
}

#[test]
fn a_link_on_top_of_the_device_leaves_it_where_it_is() {
    let Some(guest) = rig::guest(NetnsMode::Shared) else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    run("rdma link add rx0 type rxe netdev nic0");
    let before = guest.state(&nic);
    let engine = rig::engine(&guest);
    let (_pod, one) = lent(&guest, &engine, "a", &["rx0"], r#"{"interface": {"type": "macvlan"}}"#);
    let record = engine.records().remove(0);
    assert!(record.devices[0].rdma.is_some() && record.devices[0].child().is_some());
    assert!(matches!(engine.release(&pod_ref("a").uid, &sandbox("a"))[..], [Released::Deleted(_)]));
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
    run("rdma link delete rx0");
}
