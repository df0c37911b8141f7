//! eBPF programs of the host on the real kernel: off the link while a pod has it, back afterwards.

#[path = "common/bpf.rs"]
mod bpf;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bpf::{Bpffs, SCHED_CLS, XDP, load};
use common::{World, claim, deadline, pod_ref, sandbox};
use dranic::attach::engine::Observed;
use dranic::attach::{Engine, Step};
use dranic::dra::resolve::ResolvedClaim;
use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Attribute, ScanOptions, watch};
use dranic::netdev::bpf::{Filter, Programs, read, sys};
use dranic::netdev::host_state::compare;
use dranic::netdev::{HostState, link, qdisc};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;

const OFF: &str = r#"{"interface": {"disableEbpfPrograms": true}}"#;
/// `XDP_FLAGS_SKB_MODE`, `linux/if_link.h`.
const GENERIC: u32 = 1 << 1;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A node with NICs, and a bpffs.
struct Rig {
    world: World,
    bpffs: Bpffs,
    told: Arc<Mutex<Vec<Observed>>>,
}

impl Rig {
    fn new(nics: u32) -> Option<Self> {
        let world = World::new(nics)?;
        if !Command::new("tc").arg("-V").output().is_ok_and(|out| out.status.success()) {
            println!("skipped: no tc program (iproute2)");
            return None;
        }
        Some(Self { world, bpffs: Bpffs::mount(), told: Arc::default() })
    }

    fn engine(&self) -> Engine {
        let told = self.told.clone();
        let engine = self.world.engine().with_bpffs(self.bpffs.path(), "dranic.dev");
        let engine = engine.with_observer(Arc::new(move |seen| told.lock().unwrap().push(seen.what)));
        engine.recover();
        engine
    }

    /// What could not be given back, by what was told.
    fn not_restored(&self) -> Vec<(String, String)> {
        let told = self.told.lock().unwrap();
        told.iter().flat_map(|what| if let Observed::Restored(_, failed) = what { failed.clone() } else { Vec::new() }).collect()
    }

    fn on_host<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.world.node.netns().run(work).unwrap()
    }

    fn index(&self, name: &str) -> u32 {
        self.world.links().into_iter().find(|link| link.name == name).unwrap().index
    }

    fn tcx(&self, nic: &str, place: u32, program: &OwnedFd) {
        let index = self.index(nic);
        self.on_host(|| sys::attach(program, index, place)).unwrap();
    }

    fn by_link(&self, nic: &str, place: u32, program: &OwnedFd) -> OwnedFd {
        let index = self.index(nic);
        let flags = if place == sys::XDP { GENERIC } else { 0 };
        self.on_host(|| sys::create_link(program, index, place, flags)).unwrap()
    }

    /// A line of `tc` or `ip`.
    fn run(&self, line: &str) {
        self.on_host(|| run(line));
    }

    /// A filter that runs the program, by the `tc` program.
    fn filter(&self, nic: &str, rest: &str, program: &OwnedFd) {
        let file = self.bpffs.pin(program, "for-tc");
        self.run(&format!("tc filter add dev {nic} {rest} object-pinned {}", file.display()));
        std::fs::remove_file(file).unwrap();
    }

    /// An attached program, generic XDP, by the `ip` program.
    fn xdp(&self, nic: &str, program: &OwnedFd) {
        let file = self.bpffs.pin(program, "for-ip");
        self.run(&format!("ip link set dev {nic} xdpgeneric pinned {}", file.display()));
        std::fs::remove_file(file).unwrap();
    }

    fn seen(&self, nic: &str) -> Vec<String> {
        seen(self.world.node.netns(), nic)
    }

    fn off(&self) -> ResolvedClaim {
        claim("a", &self.world.device_names(), OFF)
    }

    fn assert_given_back(&self, before: &BTreeMap<String, HostState>) {
        assert_eq!(self.not_restored(), []);
        self.world.assert_unchanged(before);
        assert!(self.kept().is_empty(), "{:?}", self.kept());
    }

    /// What the engine has in the bpffs.
    fn kept(&self) -> Vec<String> {
        self.bpffs.files().into_iter().filter(|file| file.starts_with("dranic/")).collect()
    }
}

fn run(line: &str) {
    let mut words = line.split(' ');
    let out = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
}

fn programs(netns: &Netns, nic: &str) -> Programs {
    let look = || {
        let mut socket = RouteSocket::open().unwrap();
        let link = link::by_name(&mut socket, nic, deadline()).unwrap().unwrap();
        let qdiscs = qdisc::list(&mut socket, deadline()).unwrap();
        let qdiscs: Vec<_> = qdiscs.into_iter().filter(|(index, _)| *index == link.index).map(|(_, qdisc)| qdisc).collect();
        read(&link, &qdiscs, deadline())
    };
    netns.run(look).unwrap()
}

/// Names of the programs that are on a link, with their place.
fn seen(netns: &Netns, nic: &str) -> Vec<String> {
    let found = programs(netns, nic);
    assert_eq!(found.unread, None);
    let attached = found.attached.iter().map(|a| format!("{} {}", a.place, a.program.name));
    let program = |f: &Filter| f.program.as_ref().map(|program| program.name.clone()).unwrap_or_default();
    attached.chain(found.filters.iter().map(|f| format!("filter {} {}", f.name, program(f)))).collect()
}

/// What [`furnish`] puts on nic0.
const ALL: [&str; 8] = [
    "tcx ingress first",
    "tcx ingress second",
    "tcx ingress third",
    "tcx egress out",
    "xdp generic early",
    "filter for-tc:[*fsobj] in",
    "filter for-tc:[*fsobj] in2",
    "filter for-tc:[*fsobj] out2",
];

/// Everything at once on nic0. Nobody but the kernel (and a file, for the links) keeps it.
fn furnish(rig: &Rig) {
    for name in ["first", "second"] {
        rig.tcx("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, name, -1));
    }
    for (place, name) in [(sys::TCX_INGRESS, "third"), (sys::TCX_EGRESS, "out")] {
        rig.bpffs.pin(&rig.by_link("nic0", place, &load(SCHED_CLS, name, -1)), name);
    }
    rig.xdp("nic0", &load(XDP, "early", 2));
    rig.run("tc qdisc add dev nic0 clsact");
    rig.filter("nic0", "ingress prio 10 protocol ip handle 0x7 bpf direct-action", &load(SCHED_CLS, "in", 0));
    rig.filter("nic0", "ingress prio 20 bpf classid 1:2", &load(SCHED_CLS, "in2", 0));
    rig.filter("nic0", "egress prio 10 chain 5 bpf direct-action", &load(SCHED_CLS, "out2", 0));
    assert_eq!(rig.seen("nic0"), ALL);
}

#[test]
fn everything_comes_off_and_back() {
    let Some(rig) = Rig::new(2) else { return };
    furnish(&rig);
    let before = rig.world.host_states();
    let engine = rig.engine();
    let claim = rig.off();
    let record = engine.prepare(&claim, &pod_ref("a")).unwrap();
    let nic0 = record.devices.iter().find(|device| device.host.name == "nic0").unwrap();
    let Step::DetachPrograms { programs } = &nic0.plan.steps[0] else { panic!("{:?}", nic0.plan.steps) };
    assert_eq!(programs.len(), 8, "{programs:#?}");
    // The filters go with the move, not before.
    assert_eq!(rig.seen("nic0"), &ALL[5..]);
    assert_eq!(rig.kept().len(), 8);
    engine.prepare(&claim, &pod_ref("a")).unwrap();

    let pod = rig.world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_eq!(seen(&pod.netns().unwrap(), "nic0"), [""; 0]);
    // Another agent takes over.
    drop(engine);
    let engine = rig.engine();
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 2);
    assert_eq!(rig.seen("nic0"), [""; 0]);
    engine.unprepare(&claim.claim).unwrap();
    rig.assert_given_back(&before);
    assert_eq!(rig.seen("nic0"), ALL);
    // The new links work for whoever finds them by their files.
    let link = sys::open_pin(&rig.bpffs.path().join("third")).unwrap();
    assert_eq!(sys::link_info(&link).unwrap().index, rig.index("nic0"));
    sys::detach_link(&link).unwrap();
    assert!(!rig.seen("nic0").contains(&ALL[2].to_owned()));
}

#[test]
fn without_the_wish_only_what_the_move_takes_is_put_back() {
    let Some(rig) = Rig::new(1) else { return };
    furnish(&rig);
    let before = rig.world.host_states();
    let engine = rig.engine();
    let claim = claim("a", &rig.world.device_names(), "");
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    assert_eq!(rig.kept().len(), 3, "those of the filters");
    let pod = rig.world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    // What the kernel does: TCX and XDP survive a move, links too; disciplines and their filters do not.
    assert_eq!(seen(&pod.netns().unwrap(), "nic0"), &ALL[..5]);
    drop(engine);
    let engine = rig.engine();
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&claim.claim).unwrap();
    rig.assert_given_back(&before);
    assert_eq!(rig.seen("nic0"), ALL);
}

/// Without a bpffs the programs last as long as the agent.
#[test]
fn programs_that_nobody_kept_are_told() {
    let Some(rig) = Rig::new(1) else { return };
    rig.tcx("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, "first", -1));
    rig.xdp("nic0", &load(XDP, "early", 2));
    let before = rig.world.host_states();
    let start = |rig: &Rig| {
        let told = rig.told.clone();
        let engine = rig.world.engine().with_observer(Arc::new(move |seen| told.lock().unwrap().push(seen.what)));
        engine.recover();
        engine
    };
    let claim = rig.off();
    let engine = start(&rig);
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    engine.unprepare(&claim.claim).unwrap();
    rig.assert_given_back(&before);

    engine.prepare(&claim, &pod_ref("a")).unwrap();
    drop(engine);
    start(&rig).unprepare(&claim.claim).unwrap();
    let failed = rig.not_restored();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed[0].0.starts_with("tcx ingress first") && failed[0].1.contains("bpffs"), "{failed:?}");
    assert!(failed[1].0.starts_with("xdp generic early"), "{failed:?}");
    let what: Vec<String> = compare(&before["nic0"], &rig.world.host_states()["nic0"]).into_iter().map(|d| d.what).collect();
    assert_eq!(what, ["tcx ingress", "xdp generic"]);
}

#[test]
fn links_of_processes_and_filters_of_other_kinds_are_told() {
    let Some(rig) = Rig::new(1) else { return };
    let held = rig.by_link("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, "held", -1));
    let xdp = rig.by_link("nic0", sys::XDP, &load(XDP, "early", 2));
    rig.run("tc qdisc add dev nic0 ingress");
    rig.run("tc filter add dev nic0 ingress prio 30 protocol ip u32 match ip dst 192.0.2.1/32 flowid 1:1");
    let before = rig.world.host_states();
    let engine = rig.engine();
    let claim = rig.off();
    let pod = rig.world.pod("a");
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    assert_eq!(rig.seen("nic0"), [""; 0]);
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&claim.claim).unwrap();
    let failed = rig.not_restored();
    let what: Vec<&str> = failed.iter().map(|(what, _)| what.split(" (").next().unwrap()).collect();
    assert_eq!(what, ["filter u32 ingress pref 30", "tcx ingress held", "xdp generic early"], "{failed:?}");
    assert!(failed[1].1.contains("owner has to attach it again"), "{failed:?}");
    // That is all that differs; the discipline is back.
    assert_eq!(compare(&before["nic0"], &rig.world.host_states()["nic0"]).len(), 3);
    assert!([held, xdp].iter().all(|link| sys::link_info(link).unwrap().index == 0));
}

#[test]
fn what_owners_did_with_their_files_meanwhile_is_respected() {
    let Some(rig) = Rig::new(1) else { return };
    for (name, place) in [("gone", sys::TCX_INGRESS), ("new", sys::TCX_EGRESS)] {
        rig.bpffs.pin(&rig.by_link("nic0", place, &load(SCHED_CLS, name, -1)), name);
    }
    rig.bpffs.pin(&rig.by_link("nic0", sys::XDP, &load(XDP, "early", 2)), "early");
    let engine = rig.engine();
    let claim = rig.off();
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    std::fs::remove_file(rig.bpffs.path().join("gone")).unwrap();
    std::fs::remove_file(rig.bpffs.path().join("new")).unwrap();
    rig.bpffs.pin(&rig.by_link("nic0", sys::TCX_EGRESS, &load(SCHED_CLS, "newer", -1)), "new");
    engine.unprepare(&claim.claim).unwrap();
    assert_eq!(rig.not_restored(), []);
    assert_eq!(rig.seen("nic0"), ["tcx egress newer", "xdp generic early"]);
    assert_eq!(rig.bpffs.files().iter().filter(|f| !f.ends_with(".debug")).collect::<Vec<_>>(), ["early", "new"]);
}

/// The number of a link's network link is one in its own namespace.
#[test]
fn a_link_with_our_index_in_another_namespace_is_left_alone() {
    let Some(rig) = Rig::new(2) else { return };
    let pod = rig.world.pod("other");
    let index = rig.index("nic0");
    rig.world.carry(rig.world.node.netns(), &pod.netns().unwrap(), "nic1", "eth1", index);
    let (ours, theirs) = (load(XDP, "ours", 2), load(XDP, "theirs", 2));
    let there =
        |program: &OwnedFd| pod.netns().unwrap().run(|| sys::create_link(program, index, sys::XDP, GENERIC)).unwrap().unwrap();
    let other = there(&theirs);
    rig.bpffs.pin(&other, "theirs");
    let tcx = load(SCHED_CLS, "both", -1);
    pod.netns().unwrap().run(|| sys::attach(&tcx, index, sys::TCX_INGRESS)).unwrap().unwrap();
    rig.tcx("nic0", sys::TCX_INGRESS, &tcx);
    rig.bpffs.pin(&rig.by_link("nic0", sys::XDP, &ours), "ours");
    let before = rig.world.host_states();
    let engine = rig.engine();
    let claim = rig.off();
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    assert_eq!(rig.seen("nic0"), [""; 0]);
    assert_eq!(seen(&pod.netns().unwrap(), "eth1"), ["tcx ingress both", "xdp generic theirs"]);
    engine.unprepare(&claim.claim).unwrap();
    rig.assert_given_back(&before);

    // The same program in both: nothing tells which link is whose.
    sys::detach_link(&other).unwrap();
    let _other = there(&ours);
    let error = engine.prepare(&claim, &pod_ref("a")).unwrap_err().to_string();
    assert!(
        error.contains("interface.disableEbpfPrograms: xdp generic ours") && error.contains("which is ours can't be told"),
        "{error}"
    );
    assert_eq!(seen(&pod.netns().unwrap(), "eth1"), ["tcx ingress both", "xdp generic ours"]);
    assert_eq!(rig.seen("nic0"), ["tcx ingress both", "xdp generic ours"]);
}

#[test]
fn what_the_pod_attached_does_not_come_along() {
    let Some(rig) = Rig::new(2) else { return };
    rig.tcx("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, "hosts", -1));
    let before = rig.world.host_states();
    let engine = rig.engine();
    for (name, parameters, stays) in [("a", "", &["tcx ingress hosts"][..]), ("b", OFF, &[])] {
        let claim = claim(name, &rig.world.device_names(), parameters);
        engine.prepare(&claim, &pod_ref(name)).unwrap();
        let pod = rig.world.pod(name);
        engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
        let netns = pod.netns().unwrap();
        let mut inside = RouteSocket::open_in(&netns).unwrap();
        let index = link::by_name(&mut inside, "nic0", deadline()).unwrap().unwrap().index;
        let attach = || {
            sys::attach(&load(SCHED_CLS, "pods", -1), index, sys::TCX_EGRESS).unwrap();
            sys::create_link(&load(XDP, "link", 2), index, sys::XDP, GENERIC).unwrap()
        };
        let link = netns.run(attach).unwrap();
        let _ = engine.release(&pod_ref(name).uid, &sandbox(name));
        assert_eq!(rig.seen("nic0"), stays);
        assert_eq!(sys::link_info(&link).unwrap().index, 0);
        engine.unprepare(&claim.claim).unwrap();
        rig.assert_given_back(&before);
    }
}

#[test]
fn who_attaches_programs_again_at_once_is_told_so() {
    let Some(rig) = Rig::new(1) else { return };
    rig.tcx("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, "first", -1));
    let before = rig.world.host_states();
    let engine = rig.engine();
    let claim = rig.off();
    engine.prepare(&claim, &pod_ref("a")).unwrap();
    rig.tcx("nic0", sys::TCX_EGRESS, &load(SCHED_CLS, "eager", -1));
    let error = engine.prepare(&claim, &pod_ref("a")).unwrap_err().to_string();
    assert!(error.contains("tcx egress eager") && error.contains("can't keep it off"), "{error}");
    engine.unprepare(&claim.claim).unwrap();
    assert_eq!(rig.not_restored(), []);
    assert_eq!(rig.seen("nic0"), ["tcx ingress first", "tcx egress eager"]);
    assert_eq!(compare(&before["nic0"], &rig.world.host_states()["nic0"]).len(), 1);
}

#[test]
fn devices_tell_what_is_on_them() {
    let Some(rig) = Rig::new(2) else { return };
    furnish(&rig);
    let options = ScanOptions { offer_veth: true, ..ScanOptions::default() };
    let scan = rig.on_host(|| watch::once(&Sysfs::new("/sys"), options)).unwrap();
    let of = |nic: &str| scan.devices.iter().find(|d| d.link.as_ref().is_some_and(|l| l.name == nic)).unwrap().attributes.clone();
    let text = |text: &str| Some(Attribute::String(text.to_owned()));
    assert_eq!(of("nic0").get("ebpf"), Some(&Attribute::Bool(true)));
    assert_eq!(of("nic0").get("tcFilterNames").cloned(), text("for-tc:[*fsobj]"));
    assert_eq!(of("nic0").get("tcxProgramNames").cloned(), text("first,out,second,third"));
    assert_eq!(of("nic1").get("ebpf"), Some(&Attribute::Bool(false)));
    assert!(!of("nic1").contains_key("tcFilterNames") && !of("nic1").contains_key("tcxProgramNames"));
}
