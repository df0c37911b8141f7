//! A scratch node with an engine over it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dranic::attach::engine::DeviceSource;
use dranic::attach::{Engine, Step};
use dranic::config::NetworkConfig;
use dranic::dra::resolve::{ResolvedClaim, ResolvedDevice};
use dranic::inventory::{Device, HardwareId, Scan};
use dranic::ledger::{Attachment, ClaimRef, Durability, Ledger, Phase, PodRef};
use dranic::names::{ClaimUid, DeviceName, PodUid, SandboxId};
use dranic::netdev::host_state::{self, Snapshot};
use dranic::netdev::{HostState, Link, Route, link, moves};
use dranic::netlink::{Request, RouteSocket};
use dranic::netns::Netns;
use dranic_testbed::fabric::{self, Fabric, NicSpec, Node, PodDir, PodNetns};

pub(crate) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

pub(crate) struct World {
    pub(crate) node: Node,
    pods: PodDir,
    state: PathBuf,
    pub(crate) fabric: Fabric,
    _dir: tempfile::TempDir,
}

/// Looks at the node's links as the inventory does, without its uplink rules.
struct Links(Netns);

impl DeviceSource for Links {
    fn current(&self) -> Arc<Scan> {
        let mut socket = RouteSocket::open_in(&self.0).unwrap();
        let links = link::list(&mut socket, deadline()).unwrap();
        let devices = links.into_iter().filter(|l| l.name.starts_with("nic")).map(device).collect();
        Arc::new(Scan { devices, ..Scan::default() })
    }

    fn rescan(&self) -> Arc<Scan> {
        self.current()
    }
}

fn device(link: Link) -> Device {
    let hardware = match link.parent_device.as_ref().filter(|parent| parent.bus == "pci") {
        Some(parent) => HardwareId::Pci { address: parent.name.clone(), port: String::new() },
        None => HardwareId::Virtual { kind: "veth".to_owned(), address: link.address.clone(), twin: None },
    };
    Device {
        name: hardware.device_name(),
        hardware,
        link: Some(link),
        attributes: BTreeMap::new(),
        rdma: None,
        is_rdma_only: false,
    }
}

impl World {
    /// A node with `nics` NICs called nic0, nic1, …, up, MTU 9000, with an address each. None (and a line that says so) without
    /// root.
    pub(crate) fn new(nics: u32) -> Option<Self> {
        if !fabric::root() {
            println!("skipped: needs root for network namespaces");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let (fabric, node) = (Fabric::new().unwrap(), Node::new().unwrap());
        for n in 0..nics {
            let spec = NicSpec {
                name: format!("nic{n}"),
                rail: n,
                mtu: Some(9000),
                up: true,
                addresses: vec![format!("10.0.{n}.1/24").parse().unwrap(), format!("fd00:{n}::1/64").parse().unwrap()],
                ..NicSpec::default()
            };
            fabric.add_nic(&node, &spec).unwrap();
        }
        let pods = PodDir::new(&dir.path().join("pods")).unwrap();
        let world = Self { node, pods, state: dir.path().join("state"), fabric, _dir: dir };
        world.settle();
        Some(world)
    }

    /// Waits until no address is tentative.
    pub(crate) fn settle(&self) {
        let begin = Instant::now();
        loop {
            let seen = self.snapshot();
            if !seen.addresses.iter().any(|(_, a)| a.flags & dranic::netdev::address::IFA_F_TENTATIVE != 0) {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(10), "addresses stay tentative");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine_of("boot-1")
    }

    /// An engine as it would be in that boot of the machine.
    pub(crate) fn engine_of(&self, boot_id: &str) -> Engine {
        let (ledger, bad) = Ledger::open(&self.state).unwrap();
        assert_eq!(bad, vec![]);
        let host = self.node.netns().try_clone().unwrap();
        let source = Arc::new(Links(self.node.netns().try_clone().unwrap()));
        Engine::new(Arc::new(ledger), host, boot_id.to_owned(), source)
    }

    /// Makes every write of this claim's record fail, as a full disk does, until [`World::disk_has_room`].
    pub(crate) fn disk_is_full(&self, claim: &ResolvedClaim) {
        std::fs::create_dir(self.temporary(claim)).unwrap();
    }

    pub(crate) fn disk_has_room(&self, claim: &ResolvedClaim) {
        std::fs::remove_dir(self.temporary(claim)).unwrap();
    }

    fn temporary(&self, claim: &ResolvedClaim) -> PathBuf {
        self.state.join(format!(".tmp-{}", claim.claim.uid))
    }

    /// Moves a link from one namespace to another by hand.
    pub(crate) fn carry(&self, from: &Netns, to: &Netns, name: &str, as_name: &str, new_index: u32) {
        let mut socket = RouteSocket::open_in(from).unwrap();
        let index = fabric::links::find(&mut socket, name).unwrap().index;
        let m = moves::Move { index, target: to.as_fd(), new_index, name: as_name.to_owned(), mtu: None, address: None };
        socket.request(moves::request(&m), deadline()).unwrap();
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot::take(&mut self.node.socket().unwrap(), deadline()).unwrap()
    }

    pub(crate) fn links(&self) -> Vec<Link> {
        link::list(&mut self.node.socket().unwrap(), deadline()).unwrap()
    }

    pub(crate) fn device_names(&self) -> Vec<DeviceName> {
        self.links().into_iter().filter(|l| l.name.starts_with("nic")).map(|l| device(l).name).collect()
    }

    pub(crate) fn host_state_of(&self, index: u32) -> HostState {
        let seen = self.snapshot();
        self.node.netns().run(|| seen.host_state(index)).unwrap().unwrap()
    }

    pub(crate) fn host_states(&self) -> BTreeMap<String, HostState> {
        self.settle();
        let seen = self.snapshot();
        let nics = seen.links.iter().filter(|l| l.name.starts_with("nic"));
        nics.map(|l| (l.name.clone(), self.node.netns().run(|| seen.host_state(l.index)).unwrap().unwrap())).collect()
    }

    pub(crate) fn assert_unchanged(&self, before: &BTreeMap<String, HostState>) {
        let after = self.host_states();
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        for (name, state) in before {
            assert_eq!(host_state::compare(state, &after[name]), vec![], "{name}");
        }
    }

    pub(crate) fn pod(&self, name: &str) -> PodNetns {
        self.pods.pod(name).unwrap()
    }

    pub(crate) fn pod_snapshot(&self, pod: &PodNetns) -> Snapshot {
        Snapshot::take(&mut RouteSocket::open_in(&pod.netns().unwrap()).unwrap(), deadline()).unwrap()
    }

    pub(crate) fn pod_links(&self, pod: &PodNetns) -> Vec<Link> {
        self.pod_snapshot(pod).links
    }

    pub(crate) fn pod_addresses(&self, pod: &PodNetns) -> Vec<String> {
        self.pod_snapshot(pod).addresses.iter().map(|(_, a)| format!("{}/{}", a.ip, a.prefix_len)).collect()
    }

    /// A file that leads to the node's own namespace, as a careless runtime might give it.
    pub(crate) fn node_netns_file(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.node.netns().as_fd().as_raw_fd()))
    }

    pub(crate) fn unplug(&self, name: &str) {
        let mut socket = self.node.socket().unwrap();
        let found = link::by_name(&mut socket, name, deadline()).unwrap().unwrap();
        fabric::links::delete(&mut socket, found.index).unwrap();
    }

    /// Makes another link that is called `name`.
    pub(crate) fn occupy(&self, name: &str) {
        fabric::links::create(&mut self.node.socket().unwrap(), "bridge", name).unwrap();
    }

    /// Adds a route to the plan of a prepared device that the kernel will refuse.
    pub(crate) fn break_plan(&self, engine: &Engine, host_name: &str) {
        for record in engine.records() {
            engine
                .ledger()
                .update(&record.claim.uid, Durability::Process, |record| {
                    for device in record.devices.iter_mut().filter(|d| d.host.name == host_name) {
                        let mut route = Route::to("192.0.2.0/24".parse().unwrap());
                        route.gateway = Some("198.51.100.1".parse().unwrap());
                        device.plan.steps.push(Step::Route { route, configured: true });
                    }
                })
                .unwrap();
        }
    }

    /// Leaves things as a crash in the middle of an attach would: all intents recorded, the first `count` links moved.
    pub(crate) fn half_attached(&self, engine: &Engine, pod: &PodNetns, id: &SandboxId, count: usize) {
        let netns = pod.netns().unwrap();
        let mut host = self.node.socket().unwrap();
        for record in engine.records() {
            engine
                .ledger()
                .update(&record.claim.uid, Durability::Process, |record| {
                    for (n, device) in record.devices.iter_mut().enumerate() {
                        let index = 100 + u32::try_from(n).unwrap();
                        device.phase = Phase::Attaching;
                        device.attachment =
                            Some(Attachment { sandbox: id.clone(), netns_path: pod.path().to_owned(), netns: netns.id(), index });
                        if n < count {
                            let m = moves::Move {
                                index: device.host.index,
                                target: netns.as_fd(),
                                new_index: index,
                                name: device.plan.pod_link.as_str().to_owned(),
                                mtu: None,
                                address: None,
                            };
                            let request: Request = moves::request(&m);
                            host.request(request, deadline()).unwrap();
                        }
                    }
                })
                .unwrap();
        }
    }
}

pub(crate) fn config(text: &str) -> NetworkConfig {
    if text.is_empty() { NetworkConfig::default() } else { dranic::config::parse(text).unwrap() }
}

pub(crate) fn claim(name: &str, devices: &[DeviceName], parameters: &str) -> ResolvedClaim {
    let uid = ClaimUid::new(format!("uid-{name}")).unwrap();
    ResolvedClaim {
        claim: ClaimRef { namespace: "default".to_owned(), name: name.to_owned(), uid },
        pod: None,
        pod_claim_name: None,
        devices: devices
            .iter()
            .map(|device| ResolvedDevice {
                request: "nic".to_owned(),
                pool: "node".to_owned(),
                device: device.clone(),
                config: config(parameters),
                share_id: None,
                admin_access: false,
            })
            .collect(),
    }
}

pub(crate) fn pod_ref(name: &str) -> PodRef {
    PodRef { name: name.to_owned(), uid: PodUid::new(format!("pod-{name}")).unwrap() }
}

pub(crate) fn sandbox(name: &str) -> SandboxId {
    SandboxId::new(format!("sandbox-{name}")).unwrap()
}
