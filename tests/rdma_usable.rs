//! That an RDMA device in a pod can be used is found out and recorded: its port, the GIDs of the pod's addresses, and that it opens. With
//! software RDMA over real NICs, in the virtual machine of `e2e/vm` (`make e2e-vm`), in shared mode and in exclusive mode.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{claim, pod_ref, sandbox};
use dranic::agent::usable::{self, Settings, Told};
use dranic::agent::verbs::Verbs;
use dranic::attach::Engine;
use dranic::ledger::{Durability, RdmaRecord};
use dranic::names::RdmaDeviceName;
use dranic::netns::Netns;
use dranic::rdma::{CharDeviceKind, Device, NetnsMode, Protocol, RdmaSocket};
use dranic_testbed::fabric::PodNetns;
use pci::{Guest, run, soon, wait_for};
use tokio_util::sync::CancellationToken;

const ADDRESSES: &str = r#"{"interface": {"addresses": ["10.9.0.5/24", "fd00:9::5/64"]}}"#;

/// NIC 0 with the RDMA device rxe0, in the pod `a`, and what looks after it.
struct World {
    engine: Arc<Engine>,
    pod: PodNetns,
    told: Arc<Mutex<Vec<Told>>>,
    stop: CancellationToken,
    runtime: Option<tokio::runtime::Runtime>,
    guest: Guest,
}

fn rdma_socket() -> RdmaSocket {
    RdmaSocket::open().unwrap().expect("the guest has RDMA")
}

fn rxe() -> Device {
    let devices = rdma_socket().devices(soon()).unwrap();
    devices.into_iter().find(|device| device.name == "rxe0").expect("rxe0")
}

impl World {
    fn new() -> Option<Self> {
        let guest = Guest::new()?;
        let (nic, _peer) = (guest.fresh(0), guest.fresh(1));
        run("ip link set nic1 up");
        run("rdma link add rxe0 type rxe netdev nic0");
        let engine = Arc::new(guest.engine());
        let record = engine.prepare(&claim("a", &[guest.name(&nic)], ADDRESSES), &pod_ref("a")).unwrap();
        if record.devices[0].rdma.is_none() {
            if rdma_socket().netns_mode(soon()).unwrap() == NetnsMode::Exclusive {
                println!("skipped: prepare does not know the RDMA device, so nothing moves it");
                return None;
            }
            add_rdma(&engine);
        }
        let pod = guest.pod("a");
        engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
        let why = engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap_err();
        assert!(why.contains("not looked at yet"), "{why}");
        Some(Self { engine, pod, told: Arc::default(), stop: CancellationToken::new(), runtime: None, guest })
    }

    /// Looks after RDMA devices from now on, as the agent does.
    fn look(&mut self, timeout: Duration, program: Option<PathBuf>) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let settings = Arc::new(Settings { timeout, verbs: Verbs::new(program) });
        let told = self.told.clone();
        let tell = Arc::new(move |what| told.lock().unwrap().push(what));
        runtime.spawn(usable::keep(self.engine.clone(), settings, tell, self.stop.clone()));
        self.runtime = Some(runtime);
    }

    fn record(&self) -> RdmaRecord {
        self.engine.records()[0].devices[0].rdma.clone().unwrap()
    }

    fn netns(&self) -> Netns {
        self.pod.netns().unwrap()
    }

    /// Runs a line of shell in the pod's network namespace, and gives what it says.
    fn inside(&self, line: &str) -> String {
        let out = self.netns().run(|| Command::new("sh").args(["-c", line]).output().unwrap()).unwrap();
        assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }

    /// A file of the port, as the pod would see it.
    fn said(&self, file: &str) -> String {
        self.inside(&format!("unshare -m sh -c 'mount -t sysfs sysfs /sys && cat /sys/class/infiniband/rxe0/ports/1/{file}'"))
    }

    fn is_usable(&self) -> bool {
        let record = self.record();
        record.usable.is_some() && record.problem.is_none()
    }

    fn late(&self) -> Vec<String> {
        let told = self.told.lock().unwrap();
        let late = told.iter().filter_map(|told| if let Told::Late(_, why) = told { Some(why.clone()) } else { None });
        late.collect()
    }

    fn end(self) {
        let _ = self.engine.release(&pod_ref("a").uid, &sandbox("a"));
        let rdma = self.record();
        assert_eq!((rdma.usable, rdma.problem), (None, None), "another sandbox begins from none");
        self.engine.unprepare(&claim("a", &[], "").claim).unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(10));
        }
    }
}

/// As prepare does where the inventory has the RDMA device.
fn add_rdma(engine: &Engine) {
    let rxe = rxe();
    let record = RdmaRecord {
        name: RdmaDeviceName::new("rxe0").unwrap(),
        index: rxe.index,
        node_guid: rxe.node_guid,
        port: 1,
        protocol: Protocol::Roce,
        mode: rdma_socket().netns_mode(soon()).unwrap(),
        char_devices: vec![CharDeviceKind::Uverbs, CharDeviceKind::RdmaCm],
        companions: Vec::new(),
        limits: None,
        wait_for_port: true,
        usable: None,
        problem: None,
    };
    let uid = claim("a", &[], "").claim.uid;
    engine.ledger().update(&uid, Durability::Process, |claim| claim.devices[0].rdma = Some(record)).unwrap();
}

fn program() -> Option<PathBuf> {
    let program = option_env!("CARGO_BIN_EXE_dranic-verbs").map(PathBuf::from);
    if program.is_none() {
        println!("skipped: built without the feature verbs");
    }
    program
}

#[test]
fn the_gids_of_the_pods_addresses_are_recorded_and_what_happens_to_the_port_is_followed() {
    let Some(mut world) = World::new() else { return };
    world.look(Duration::from_secs(600), None);
    wait_for("usable", || world.is_usable().then_some(()));
    world.engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap();
    // The IPv6 address may still be tentative at first.
    let both = |world: &World| {
        let gids = world.record().usable?.gids;
        let first: Vec<String> = gids.iter().take(2).map(|gid| gid.address().to_string()).collect();
        (first.contains(&"10.9.0.5".to_owned()) && first.contains(&"fd00:9::5".to_owned())).then_some(gids)
    };
    let gids = wait_for("both addresses first", || both(&world));
    assert!(gids[0].index < gids[1].index, "in the order of the table");
    for gid in gids.iter().take(2) {
        let (index, kind, link) = (gid.index, gid.kind.as_str(), gid.link.as_deref());
        assert_eq!((kind, link), ("RoCE v2", Some("nic0")));
        assert_eq!(world.said(&format!("gids/{index}")).parse(), Ok(gid.gid), "as the pod sees it");
        assert_eq!(world.said(&format!("gid_attrs/types/{index}")), "RoCE v2");
    }
    let first = world.record().usable.unwrap();
    assert!(!first.opened, "there is no program for it");
    world.inside("ip link set nic0 down");
    let problem = wait_for("down is seen", || world.record().problem);
    assert!(problem.contains("port 1 of rxe0 is DOWN") && problem.contains("is nic0 up in the pod"), "{problem}");
    world.engine.check_attached(&pod_ref("a").uid, &sandbox("a")).expect("a container that starts again is not held back");
    world.inside("ip link set nic0 up");
    wait_for("usable again", || world.is_usable().then_some(()));
    world.inside("ip address add 10.9.0.6/24 dev nic0");
    wait_for("another address", || {
        let gids = world.record().usable?.gids;
        gids.iter().take(2).any(|gid| gid.address().to_string() == "10.9.0.6").then_some(())
    });
    world.end();
}

#[test]
fn a_port_that_is_down_is_told_and_one_that_comes_later_is_usable() {
    let Some(mut world) = World::new() else { return };
    world.inside("ip link set nic0 down");
    world.look(Duration::from_secs(2), None);
    let why = wait_for("it is told", || world.late().pop());
    assert!(why.contains("port 1 of rxe0 is DOWN"), "{why}");
    let gate = world.engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap_err();
    assert!(gate.contains("RDMA device can't be used yet: port 1 of rxe0 is DOWN"), "{gate}");
    assert_eq!((world.record().usable, world.engine.rdma_not_usable()), (None, 1));
    world.inside("ip link set nic0 up");
    wait_for("usable", || world.is_usable().then_some(()));
    world.engine.check_attached(&pod_ref("a").uid, &sandbox("a")).unwrap();
    assert_eq!((world.late().len(), world.engine.rdma_not_usable()), (1, 0));
    world.end();
}

#[test]
fn it_is_opened_by_verbs_in_the_pod_and_not_where_it_is_not() {
    let Some(program) = program() else { return };
    let Some(mut world) = World::new() else { return };
    world.look(Duration::from_secs(600), Some(program.clone()));
    wait_for("usable", || world.is_usable().then_some(()));
    assert!(world.record().usable.unwrap().opened);
    let text = world.inside(&format!("{} --device rxe0 --port 1", program.display()));
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["opened"]["state"], &answer["opened"]["linkLayer"]), (&4.into(), &2.into()), "{text}");
    let recorded = world.record().usable.unwrap().gids.len();
    assert_eq!(answer["opened"]["gids"].as_array().map(Vec::len), Some(recorded), "{text}");
    let (verbs, rxe0) = (Verbs::new(Some(program)), RdmaDeviceName::new("rxe0").unwrap());
    let outside = verbs.open(&world.guest.host, &rxe0, 1);
    match world.record().mode {
        NetnsMode::Shared => assert_eq!(outside, Ok(true)),
        NetnsMode::Exclusive => {
            let why = outside.unwrap_err();
            assert!(why.contains("looking for the device") && why.contains("is it in this network namespace"), "{why}");
        }
    }
    let why = verbs.open(&world.netns(), &rxe0, 9).unwrap_err();
    assert!(why.contains("querying the port"), "{why}");
    world.end();
}

#[test]
fn an_rdma_device_that_is_gone_is_named() {
    let Some(mut world) = World::new() else { return };
    world.look(Duration::from_secs(600), None);
    wait_for("usable", || world.is_usable().then_some(()));
    world.inside("rdma link delete rxe0");
    // Nothing of the link changes by that.
    world.inside("ip address add 10.9.0.7/24 dev nic0");
    let problem = wait_for("its absence is seen", || world.record().problem);
    assert_eq!(problem, "RDMA device rxe0 is not in the pod");
}
