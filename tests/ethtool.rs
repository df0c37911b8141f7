//! `ethtool` settings against the real kernel: changed in a pod, read back there, given back on the host.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::attach::AttachError;
use dranic::ledger::Durability;
use dranic::netdev::Ethtool;
use dranic::netdev::ethtool::{Change, EthtoolSocket, Feature, Group, differences};
use dranic::netns::Netns;
use dranic_testbed::fabric::PodNetns;

/// Every feature that a veth lets change and that the short name stands for.
const TSO: [&str; 3] = ["tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation"];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn set(group: Group, set: &[(&str, u32)]) -> Change {
    Change { group, set: set.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect() }
}

/// What the kernel says of the link called `name` in `netns`.
fn read(netns: &Netns, index: u32) -> Ethtool {
    EthtoolSocket::open_in(netns, soon()).unwrap().unwrap().read(index, soon()).unwrap()
}

fn in_pod(world: &World, pod: &PodNetns, name: &str) -> Ethtool {
    let index = world.pod_links(pod).iter().find(|l| l.name == name).unwrap().index;
    read(&pod.netns().unwrap(), index)
}

fn on_host(world: &World, name: &str) -> Ethtool {
    let index = world.links().iter().find(|l| l.name == name).unwrap().index;
    read(world.node.netns(), index)
}

fn feature(settings: &Ethtool, name: &str) -> Feature {
    settings.features.as_ref().unwrap().changeable[name]
}

/// Lends every NIC to a pod, lets `look` see it there, and expects the host to be as before.
fn lend(world: &World, parameters: &str, look: impl FnOnce(&PodNetns)) {
    let before = world.host_states();
    let engine = world.engine();
    let claim = claim("a", &world.device_names(), parameters);
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    look(&pod);
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&claim.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn features_by_both_kinds_of_names_are_changed_in_the_pod_and_given_back() {
    let Some(world) = World::new(2) else { return };
    let parameters = r#"{"ethtool": {"features": {"tcp-segmentation-offload": false, "gro": true, "lro": false, "rx-gro-list": true,
        "tx-udp-segmentation": false}}}"#;
    lend(&world, parameters, |pod| {
        for nic in ["nic0", "nic1"] {
            let inside = in_pod(&world, pod, nic);
            for name in TSO {
                assert_eq!(feature(&inside, name), Feature::Off, "{name}");
            }
            assert_eq!(feature(&inside, "rx-gro"), Feature::On);
            assert_eq!(feature(&inside, "rx-gro-list"), Feature::On);
            assert_eq!(feature(&inside, "tx-udp-segmentation"), Feature::Off);
            // What nobody spoke of.
            assert_eq!(feature(&inside, "tx-generic-segmentation"), Feature::On);
        }
    });
}

/// Without checksums the kernel drops everything that needs them: that is not in the record of what is wanted, and comes back with them.
#[test]
fn features_that_another_one_forces_off_come_back_with_it() {
    let Some(world) = World::new(1) else { return };
    lend(&world, r#"{"ethtool": {"features": {"tx": false}}}"#, |pod| {
        let inside = in_pod(&world, pod, "nic0");
        assert_eq!(feature(&inside, "tx-checksum-ip-generic"), Feature::Off);
        assert_eq!(feature(&inside, "tx-tcp-segmentation"), Feature::OffWantedOn);
    });
}

#[test]
fn what_the_pod_itself_changed_is_given_back() {
    let Some(world) = World::new(1) else { return };
    let channels = on_host(&world, "nic0").numbers[&Group::Channels].clone();
    lend(&world, "", |pod| {
        let netns = pod.netns().unwrap();
        let index = world.pod_links(pod).iter().find(|l| l.name == "nic0").unwrap().index;
        let mut socket = EthtoolSocket::open_in(&netns, soon()).unwrap().unwrap();
        let features = set(Group::Features, &[("rx-gro", 1), ("tx-scatter-gather", 0), ("highdma", 0)]);
        assert_eq!(socket.change(index, &features, soon()).unwrap(), []);
        if channels.max["rx"] > 1 {
            assert_eq!(socket.change(index, &set(Group::Channels, &[("rx", channels.max["rx"])]), soon()).unwrap(), []);
        }
        assert_eq!(feature(&in_pod(&world, pod, "nic0"), "tx-tcp-segmentation"), Feature::OffWantedOn);
    });
}

/// What one sandbox of the pod did does not count for the next one, where the claim says otherwise.
#[test]
fn a_new_sandbox_gets_what_is_configured_whatever_the_old_one_did() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    // As it is on the host already.
    let all = claim("a", &world.device_names(), r#"{"ethtool": {"features": {"gro": false, "tso": true}}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let first = world.pod("first");
    engine.attach(&pod_ref("a").uid, &sandbox("first"), first.path(), soon()).unwrap();
    let index = world.pod_links(&first).iter().find(|l| l.name == "nic0").unwrap().index;
    let mut socket = EthtoolSocket::open_in(&first.netns().unwrap(), soon()).unwrap().unwrap();
    let other = set(Group::Features, &[("rx-gro", 1), ("tx-tcp-segmentation", 0)]);
    assert_eq!(socket.change(index, &other, soon()).unwrap(), []);
    let second = world.pod("second");
    engine.attach(&pod_ref("a").uid, &sandbox("second"), second.path(), soon()).unwrap();
    let inside = in_pod(&world, &second, "nic0");
    assert_eq!((feature(&inside, "rx-gro"), feature(&inside, "tx-tcp-segmentation")), (Feature::Off, Feature::On));
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

#[test]
fn channels_are_changed_in_the_pod_and_given_back() {
    let Some(world) = World::new(1) else { return };
    let channels = on_host(&world, "nic0").numbers[&Group::Channels].clone();
    let max = channels.max["rx"];
    if max < 2 {
        return println!("skipped: a veth of this machine has only one channel");
    }
    let parameters = format!(r#"{{"ethtool": {{"channels": {{"rx": {max}, "tx": 2}}}}}}"#);
    lend(&world, &parameters, |pod| {
        let inside = in_pod(&world, pod, "nic0").numbers[&Group::Channels].clone();
        assert_eq!(inside.now, [("rx".to_owned(), max), ("tx".to_owned(), 2)].into());
    });
    assert_eq!(on_host(&world, "nic0").numbers[&Group::Channels], channels);
}

#[test]
fn what_the_device_can_not_be_is_refused_in_prepare_with_its_path() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let cases = [
        (
            r#"{"features": {"lro": true}}"#,
            "ethtool.features.lro: stands for rx-lro, which this device does not have or can't change",
        ),
        (r#"{"features": {"rx-gro-hw": true}}"#, "ethtool.features.rx-gro-hw: rx-gro-hw is off and fixed"),
        (
            r#"{"features": {"tos": true}}"#,
            "ethtool.features.tos: is no feature that the node's kernel knows; this device can change ",
        ),
        (r#"{"privateFlags": {"legacy-rx": true}}"#, "ethtool.privateFlags.legacy-rx: the device's driver has no such settings"),
        (r#"{"rings": {"rx": 512}}"#, "ethtool.rings.rx: the device's driver has no such settings"),
        (r#"{"coalesce": {"rxUsecs": 5}}"#, "ethtool.coalesce.rxUsecs: the device's driver has no such settings"),
        (r#"{"pause": {"rx": true}}"#, "ethtool.pause.rx: the device's driver has no such settings"),
        (r#"{"channels": {"combined": 1}}"#, "ethtool.channels.combined: the device has no such setting; it has rx, tx"),
        (r#"{"channels": {"rx": 5000}}"#, "ethtool.channels.rx: 5000 is more than the device can have; its maximum is "),
        (r#"{"channels": {"rx": 0}}"#, "ethtool.channels: neither rx nor combined channels would be left"),
    ];
    for (ethtool, text) in cases {
        let all = claim("a", &world.device_names(), &format!(r#"{{"ethtool": {ethtool}}}"#));
        let error = engine.prepare(&all, &pod_ref("a")).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    world.assert_unchanged(&before);
}

/// The kernel takes a wish for segmentation and does not grant it without checksums.
#[test]
fn a_feature_that_the_kernel_does_not_grant_fails_the_attach_by_name() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let all = claim("a", &world.device_names(), r#"{"ethtool": {"features": {"tx": false}}}"#);
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let uid = engine.records()[0].claim.uid.clone();
    let impossible = set(Group::Features, &[("tx-tcp-segmentation", 1), ("tx-checksum-ip-generic", 0)]);
    let swap = |record: &mut dranic::ledger::ClaimRecord| {
        for step in &mut record.devices[0].plan.steps {
            if let dranic::attach::Step::Ethtool { change } = step {
                *change = impossible.clone();
            }
        }
    };
    engine.ledger().update(&uid, Durability::Process, swap).unwrap();
    let pod = world.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err();
    assert!(matches!(error, AttachError::Step { .. }), "{error}");
    let text = "setting ethtool features tx-checksum-ip-generic off, tx-tcp-segmentation on failed: the kernel took the request and left \
                ethtool features tx-tcp-segmentation off";
    assert!(error.to_string().contains(text), "{error}");
    engine.unprepare(&all.claim).unwrap();
    world.assert_unchanged(&before);
}

/// The `ethtool` program and we read the same.
#[test]
fn the_program_sees_the_same_features() {
    let Some(world) = World::new(1) else { return };
    let output = world.node.netns().run(|| Command::new("ethtool").args(["-k", "nic0"]).output()).unwrap();
    let Ok(output) = output else { return println!("skipped: there is no ethtool program") };
    let text = String::from_utf8(output.stdout).unwrap();
    let features = on_host(&world, "nic0").features.unwrap();
    let mut seen = 0;
    for (name, value) in text.lines().filter_map(|line| line.trim().split_once(": ")) {
        let is_on = value.starts_with("on");
        if let Some(feature) = features.changeable.get(name) {
            assert!(!value.contains("fixed"), "{name}: {value}");
            assert_eq!(feature.active(), is_on, "{name}: {value}");
            seen += 1;
        } else if let Some(fixed) = features.fixed.get(name) {
            assert!(value.contains("fixed") && *fixed == is_on, "{name}: {value}");
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen} of the program's names are ours:\n{text}");
}

/// A NIC with a driver of its own: rings, coalescing and flow control are there only on real hardware. `DRANIC_TEST_NIC` names one;
/// else the first one of the driver `igb` is taken. It must be nobody's: it is restarted.
#[test]
fn a_real_nic_is_changed_in_the_pod_and_given_back() {
    let Some(name) = real_nic() else {
        return println!("skipped: no NIC of the driver igb, and DRANIC_TEST_NIC names none");
    };
    let Some(world) = World::new(0) else { return };
    let home = Netns::current().unwrap();
    world.carry(&home, world.node.netns(), &name, "nic0", 1001);
    let host = on_host(&world, "nic0");
    println!("{name}: {host:#?}");
    let wanted = other_settings(&host);
    let parameters = serde_json::json!({ "ethtool": wanted }).to_string();
    println!("{parameters}");
    assert!(wanted.as_object().unwrap().len() >= 4, "{parameters}");
    lend(&world, &parameters, |pod| {
        let inside = in_pod(&world, pod, "nic0");
        for (group, settings) in wanted.as_object().unwrap() {
            for (name, value) in settings.as_object().unwrap() {
                let value = value.as_bool().map_or_else(|| value.as_u64().unwrap(), u64::from);
                assert_eq!(u64::from(now(&inside, group, name)), value, "{group} {name}");
            }
        }
    });
    assert_eq!(differences(&host, &on_host(&world, "nic0")), []);
    world.carry(world.node.netns(), &home, "nic0", &name, 1001);
}

/// Another value for something of each group that the device has.
fn other_settings(host: &Ethtool) -> serde_json::Value {
    let mut all = serde_json::json!({"features": {"rx-gro": !feature(host, "rx-gro").active()}});
    for (group, numbers) in &host.numbers {
        let half = |name: &&str| numbers.now.get(*name).map(|now| ((*name).to_owned(), (now / 2).max(1).into()));
        let settings: serde_json::Map<String, serde_json::Value> = match group {
            Group::Rings => ["rx", "tx"].iter().filter_map(half).collect(),
            Group::Channels => ["combined"].iter().filter_map(half).collect(),
            Group::Coalesce if numbers.now.contains_key("rxUsecs") => [("rxUsecs".to_owned(), 20.into())].into_iter().collect(),
            Group::Pause => {
                [("autoneg", false), ("rx", true), ("tx", false)].map(|(n, on)| (n.to_owned(), on.into())).into_iter().collect()
            }
            Group::PrivateFlags => numbers.now.iter().take(1).map(|(name, on)| (name.clone(), (*on == 0).into())).collect(),
            _ => continue,
        };
        all[group.name()] = settings.into();
    }
    all
}

/// A value by its path below `ethtool`.
fn now(settings: &Ethtool, group: &str, name: &str) -> u32 {
    if group == "features" {
        return feature(settings, name).active().into();
    }
    settings.numbers.iter().find(|(known, _)| known.name() == group).unwrap().1.now[name]
}

fn real_nic() -> Option<String> {
    if let Ok(name) = std::env::var("DRANIC_TEST_NIC") {
        return Some(name);
    }
    let links = std::fs::read_dir("/sys/class/net").ok()?.flatten();
    let is_igb =
        |path: std::path::PathBuf| std::fs::read_link(path.join("device/driver")).is_ok_and(|driver| driver.ends_with("igb"));
    let mut names: Vec<String> =
        links.filter(|link| is_igb(link.path())).filter_map(|l| l.file_name().into_string().ok()).collect();
    names.sort();
    names.into_iter().next()
}
