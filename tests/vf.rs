//! Virtual functions of real NICs: as devices, and what their physical function sets for them, read by `ip`. In the virtual machine of
//! `e2e/vm` (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::{claim, pod_ref, sandbox};
use dranic::attach::engine::Engine;
use dranic::inventory::Attribute;
use dranic::netdev::link;
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use dranic_testbed::fabric::new_netns;
use pci::{Guest, Nic, run, soon, wait_for, write};

/// NIC 0 called nic0, up, with this many virtual functions.
fn with_vfs(guest: &Guest, count: u32) -> (Nic, Vec<Nic>) {
    // The other end of the wire, without which there is no carrier and no rate can be set.
    let (pf, _peer) = (guest.fresh(0), guest.fresh(1));
    run("ip link set nic0 up");
    run("ip link set nic1 up");
    write(pf.sysfs().join("sriov_numvfs"), &count.to_string());
    let function = |n: u32| {
        let path = wait_for("virtual function", || std::fs::read_link(pf.sysfs().join(format!("virtfn{n}"))).ok());
        Nic { function: path.file_name().unwrap().to_string_lossy().into_owned() }
    };
    let vfs: Vec<Nic> = (0..count).map(function).collect();
    for (n, vf) in vfs.iter().enumerate() {
        let link = guest.link(vf);
        run(&format!("ip link set {} name vf{n}", link.name));
    }
    wait_for("carrier", || Some(guest.link(&pf)).filter(|link| link.oper_state == "up"));
    (pf, vfs)
}

/// What `ip` says of a virtual function of nic0.
fn said_of(vf: u32) -> String {
    let out = Command::new("ip").args(["link", "show", "nic0"]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let mark = format!("vf {vf} ");
    text.lines().map(str::trim).find(|line| line.starts_with(&mark)).unwrap_or_else(|| panic!("{text}")).to_owned()
}

fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

fn refusal(guest: &Guest, engine: &Engine, nic: &Nic, parameters: &str) -> String {
    let error = engine.prepare(&claim("refused", &[guest.name(nic)], parameters), &pod_ref("refused")).unwrap_err().to_string();
    assert!(engine.records().is_empty());
    error
}

#[test]
fn virtual_functions_are_devices_that_name_their_parent() {
    let Some(guest) = Guest::new() else { return };
    let (pf, vfs) = with_vfs(&guest, 7);
    let parent = guest.device(&pf);
    assert_eq!((&parent.attributes["sriov"], &parent.attributes["sriovVfs"]), (&Attribute::Bool(true), &Attribute::Int(7)));
    assert!(!parent.attributes.contains_key("physicalFunction"));
    for (vf, n) in vfs.iter().zip(0..) {
        let attributes = guest.device(vf).attributes;
        assert_eq!(attributes["physicalFunction"], Attribute::String(parent.name.as_str().to_owned()));
        assert_eq!((&attributes["vfIndex"], &attributes["isSriovVf"]), (&Attribute::Int(n), &Attribute::Bool(true)));
    }
}

#[test]
fn settings_are_in_the_kernel_while_the_claim_is_prepared_and_given_back() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 3);
    run("ip link set vf1 alias second mtu 1400");
    run("ip link set vf1 up");
    run("ip address add 10.8.0.1/24 dev vf1");
    run("ip link set nic0 vf 1 vlan 7 qos 2");
    let (before, others) = (guest.state(&vfs[1]), (said_of(0), said_of(2)));
    let said = said_of(1);
    assert_says(&said, &["vlan 7", "qos 2", "spoof checking on", "trust off"]);
    let engine = guest.engine();
    let text = r#"{"vf": {"vlan": 100, "mac": "02:00:00:00:0b:01", "spoofCheck": false, "maxTxRate": 100}}"#;
    let one = claim("a", &[guest.name(&vfs[1])], text);
    let record = engine.prepare(&one, &pod_ref("a")).unwrap();
    let set = ["vlan 100", "qos 2", "02:00:00:00:0b:01", "spoof checking off", "max_tx_rate 100Mbps"];
    assert_says(&said_of(1), &set);
    let step = record.devices[0].plan.steps[0].describe();
    assert_says(&step, &["virtual function 1 of", "vlan 100 qos 2", "mac 02:00:00:00:0b:01", "rate 0 to 100"]);
    // Once more, as the kubelet does.
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_says(&said_of(1), &set);
    let mut inside = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    let there = link::by_name(&mut inside, "vf1", soon()).unwrap().unwrap();
    assert_eq!(there.address.unwrap().to_string(), "02:00:00:00:0b:01", "the function's driver took it");
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert_says(&said_of(1), &set);
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(said_of(1), said);
    assert_eq!((said_of(0), said_of(2)), others);
    guest.assert_same(&before, &vfs[1]);
}

#[test]
fn what_somebody_else_set_meanwhile_stays() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 1);
    let engine = guest.engine();
    let one = claim("a", &[guest.name(&vfs[0])], r#"{"vf": {"vlan": 100, "trust": true}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    run("ip link set nic0 vf 0 vlan 200");
    engine.unprepare(&one.claim).unwrap();
    assert_says(&said_of(0), &["vlan 200", "trust off"]);
}

#[test]
fn what_can_not_be_is_refused_by_name_and_nothing_stays_of_it() {
    let Some(guest) = Guest::new() else { return };
    let (pf, vfs) = with_vfs(&guest, 2);
    let engine = guest.engine();
    let (before, said) = (guest.state(&vfs[0]), said_of(0));
    let refused = |nic: &Nic, text: &str| refusal(&guest, &engine, nic, text);
    assert_says(&refused(&pf, r#"{"vf": {"vlan": 5}}"#), &["vf: the device is no virtual function"]);
    let error = refused(&vfs[0], r#"{"vf": {"nodeGuid": "0c42:a103:0065:5f96"}}"#);
    assert_says(&error, &["vf.nodeGuid: nic0 is no InfiniBand link"]);
    // The driver has no such operation; the tag before it was set and is taken back.
    let error = refused(&vfs[0], r#"{"vf": {"vlan": 5, "linkState": "disable"}}"#);
    assert_says(&error, &["vf.linkState: the driver of nic0 does not support this setting"]);
    assert_eq!(said_of(0), said);
    let error = refused(&vfs[0], r#"{"vf": {"trust": true, "minTxRate": 5}}"#);
    assert_says(&error, &["vf.rate: nic0 refused rate 5 to 0 Mbit/s"]);
    assert_eq!(said_of(0), said);
    guest.assert_same(&before, &vfs[0]);

    let error = refused(&vfs[0], r#"{"interface": {"mtu": 1501}}"#);
    assert_says(&error, &["interface.mtu", "1501", "its physical function nic0 has 1500"]);
    run("ip link set vf0 mtu 1600");
    assert_says(&refused(&vfs[0], ""), &["interface.mtu", "1600", "nic0 has 1500"]);
    run("ip link set vf0 mtu 1500");

    // Its physical function is in a pod.
    let away: Netns = new_netns().unwrap();
    guest.carry(&guest.host, &away, "nic0");
    let error = refused(&vfs[0], r#"{"vf": {"vlan": 5}}"#);
    assert_says(&error, &["vf: the physical function", "has no link on the host"]);
    guest.carry(&away, &guest.host, "nic0");
}

#[test]
fn a_physical_function_that_is_away_keeps_no_claim_and_is_told() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 1);
    let told = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = told.clone();
    let engine = guest.engine().with_observer(std::sync::Arc::new(move |observation| {
        if let dranic::attach::engine::Observed::Restored(_, faults) = observation.what {
            sink.lock().unwrap().extend(faults);
        }
    }));
    let one = claim("a", &[guest.name(&vfs[0])], r#"{"vf": {"vlan": 100}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let away: Netns = new_netns().unwrap();
    guest.carry(&guest.host, &away, "nic0");
    engine.unprepare(&one.claim).unwrap();
    let told = told.lock().unwrap();
    assert!(told.len() == 1 && told[0].0 == "vf" && told[0].1.contains("has no link on the host"), "{told:?}");
    guest.carry(&away, &guest.host, "nic0");
    run("ip link set nic0 vf 0 vlan 0");
}

#[test]
fn claims_of_many_functions_of_one_nic_at_once() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 7);
    let said: Vec<String> = (0..7).map(said_of).collect();
    let engine = guest.engine();
    let names: Vec<_> = vfs.iter().map(|vf| guest.name(vf)).collect();
    let claims: Vec<_> = (0..7)
        .map(|n| {
            let text = format!(r#"{{"vf": {{"vlan": {}, "trust": true}}}}"#, 100 + n);
            claim(&format!("c{n}"), &names[n..=n], &text)
        })
        .collect();
    std::thread::scope(|scope| {
        for one in &claims {
            let engine = &engine;
            scope.spawn(move || engine.prepare(one, &pod_ref(one.claim.name.as_str())).unwrap());
        }
    });
    for n in 0..7 {
        assert_says(&said_of(n), &[&format!("vlan {}", 100 + n), "trust on"]);
    }
    std::thread::scope(|scope| {
        for one in &claims {
            let engine = &engine;
            scope.spawn(move || engine.unprepare(&one.claim).unwrap());
        }
    });
    assert_eq!((0..7).map(said_of).collect::<Vec<_>>(), said);
}

#[test]
fn a_function_that_the_kernel_returned_is_repaired() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 1);
    run("ip link set vf0 up");
    run("ip address add 10.8.0.1/24 dev vf0");
    let (before, said) = (guest.state(&vfs[0]), said_of(0));
    let engine = guest.engine();
    let text = r#"{"interface": {"name": "pod7", "mtu": 1300}, "vf": {"vlan": 9}}"#;
    let one = claim("a", &[guest.name(&vfs[0])], text);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    drop((engine, pod));
    assert_eq!(guest.link(&vfs[0]).name, "pod7");
    let engine = guest.engine();
    engine.recover();
    let link = guest.link(&vfs[0]);
    assert_eq!((link.name.as_str(), link.mtu), ("vf0", 1500));
    assert_says(&said_of(0), &["vlan 9"]);
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(said_of(0), said);
    guest.assert_same(&before, &vfs[0]);
}

#[test]
fn functions_that_are_gone_are_told() {
    let Some(guest) = Guest::new() else { return };
    let (pf, vfs) = with_vfs(&guest, 1);
    let engine = guest.engine();
    let one = claim("a", &[guest.name(&vfs[0])], r#"{"vf": {"vlan": 9}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    write(pf.sysfs().join("sriov_numvfs"), "0");
    wait_for("it is gone", || (!Path::new("/sys/bus/pci/devices").join(&vfs[0].function).exists()).then_some(()));
    let begin = std::time::Instant::now();
    engine.unprepare(&one.claim).unwrap();
    assert!(engine.records().is_empty() && begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_address_goes_to_the_functions_driver_also_when_its_link_is_down() {
    let Some(guest) = Guest::new() else { return };
    let (_pf, vfs) = with_vfs(&guest, 1);
    let before = guest.state(&vfs[0]);
    let engine = guest.engine();
    let text = r#"{"vf": {"mac": "02:00:00:00:0b:02"}, "interface": {"hardwareAddr": "02:00:00:00:0b:02"}}"#;
    let one = claim("a", &[guest.name(&vfs[0])], text);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    assert_eq!(guest.link(&vfs[0]).address.unwrap().to_string(), "02:00:00:00:0b:02");
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &vfs[0]);
}
