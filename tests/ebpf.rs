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
use dranic::netdev::bpf::{Programs, read, sys};
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
    attached.chain(found.filters.iter().map(|f| format!("filter {}", f.name))).collect()
}

const ALL: [&str; 8] = [
    "tcx ingress first",
    "tcx ingress second",
    "tcx ingress third",
    "tcx egress out",
    "xdp generic early",
    "filter in:[*fsobj]",
    "filter in:[*fsobj]",
    "filter out:[*fsobj]",
];

/// Everything at once on nic0. Nobody but the kernel (and a file, for the link) keeps it.
fn furnish(rig: &Rig) {
    for (name, verdict) in [("first", -1), ("second", -1)] {
        rig.tcx("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, name, verdict));
    }
    let link = rig.by_link("nic0", sys::TCX_INGRESS, &load(SCHED_CLS, "third", -1));
    rig.bpffs.pin(&link, "third_link");
    let link = rig.by_link("nic0", sys::TCX_EGRESS, &load(SCHED_CLS, "out", -1));
    rig.bpffs.pin(&link, "out_link");
    rig.xdp("nic0", &load(XDP, "early", 2));
    rig.run("tc qdisc add dev nic0 clsact");
    rig.filter("nic0", "ingress prio 10 protocol ip handle 0x7 bpf direct-action", &load(SCHED_CLS, "in", 0));
    rig.filter("nic0", "ingress prio 20 bpf classid 1:2", &load(SCHED_CLS, "in2", 0));
    rig.filter("nic0", "egress prio 10 chain 5 bpf direct-action", &load(SCHED_CLS, "out2", 0));
}

#[test]
fn everything_comes_off_and_back() {
    let Some(rig) = Rig::new(2) else { return };
    furnish(&rig);
    println!("{:#?}", rig.seen("nic0"));
    let before = rig.world.host_states();
    println!("{:#?}", before["nic0"].programs);
    println!("{:#?}", before["nic0"].qdiscs);
    let engine = rig.engine();
    let claim = rig.off();
    let record = engine.prepare(&claim, &pod_ref("a")).unwrap();
    println!("{:?}", rig.bpffs.files());
    println!("{:#?}", record.devices[0].plan.steps[0]);
    let pod = rig.world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert_eq!(seen(&pod.netns().unwrap(), "nic0"), [""; 0]);
    drop(engine);
    let engine = rig.engine();
    engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&claim.claim).unwrap();
    println!("{:#?}", rig.seen("nic0"));
    rig.assert_given_back(&before);
}
