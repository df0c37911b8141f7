//! IPoIB links of RDMA devices that look like InfiniBand ones: moved with their RDMA devices, which makes them anew, and partitions on top
//! of them. In the virtual machine of `e2e/vm` (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/rdma.rs"]
mod rig;

#[path = "ipoib/moving.rs"]
mod moving;
#[path = "ipoib/staying.rs"]
mod staying;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use common::{claim, pod_ref, sandbox};
use dranic::attach::Engine;
use dranic::attach::engine::DeviceSource;
use dranic::dra::resolve::ResolvedClaim;
use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{HardwareId, RdmaPart, Scan, ScanOptions, watch};
use dranic::names::{DeviceName, RdmaDeviceName};
use dranic::netdev::host_state::{self, Snapshot};
use dranic::netdev::{HostState, Link, link};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use dranic::rdma::{NetnsMode, RdmaSocket};
use dranic_testbed::fabric::PodNetns;
use pci::{Guest, run, soon, wait_for, write};

/// Devices that are made while it is set look like InfiniBand ones (`e2e/vm/movable_rxe.py`).
const SHAPE: &str = "/sys/module/rdma_rxe/parameters/ib";

/// InfiniBand ports `ibd0`, `ibd1`, … on the functions of NICs 0, 1, …, with IPoIB links `ib0`, `ib1`, …. The NICs are out of the way, as
/// the wire below an InfiniBand port is.
struct Ports {
    guest: Guest,
    functions: Vec<String>,
    wires: Vec<PodNetns>,
}

impl Ports {
    fn new(mode: NetnsMode, count: u8) -> Option<Self> {
        let guest = rig::guest(mode)?;
        run("modprobe -a rdma_rxe ib_ipoib");
        let mut ports = Self { guest, functions: Vec::new(), wires: Vec::new() };
        for n in 0..count {
            ports.add(n);
        }
        Some(ports)
    }

    fn add(&mut self, n: u8) {
        let wanted = format!("52:54:00:aa:00:{n:02x}");
        // The kernel returns it some time after the end of the last test's namespace.
        let is_it = |link: &Link| link.perm_address.as_ref().is_some_and(|address| address.to_string() == wanted);
        wait_for("NIC", || self.guest.links().into_iter().find(is_it));
        let nic = self.guest.fresh(n);
        run(&format!("ip link set nic{n} up"));
        write(SHAPE, "1");
        run(&format!("rdma link add ibd{n} type rxe netdev nic{n}"));
        write(SHAPE, "0");
        let wire = self.guest.pod(&format!("wire{n}"));
        self.guest.carry(&self.guest.host, &wire.netns().unwrap(), &format!("nic{n}"));
        self.functions.push(nic.function);
        self.wires.push(wire);
        assert_eq!(self.link(usize::from(n)).name, format!("ib{n}"));
    }

    /// The IPoIB link of port `n` on the host.
    fn link(&self, n: usize) -> Link {
        wait_for("IPoIB link", || self.find(n))
    }

    fn find(&self, n: usize) -> Option<Link> {
        let is_it = |link: &Link| link.parent_device.as_ref().is_some_and(|parent| parent.name == self.functions[n]);
        self.guest.links().into_iter().find(is_it)
    }

    fn state(&self, n: usize) -> HostState {
        let seen = Snapshot::take(&mut RouteSocket::open_in(&self.guest.host).unwrap(), soon()).unwrap();
        let index = self.link(n).index;
        self.guest.host.run(|| seen.host_state(index)).unwrap().unwrap()
    }

    fn assert_same(&self, before: &HostState, n: usize) {
        let end = soon();
        loop {
            let after = self.state(n);
            // Another queue pair, and another index.
            let differences = host_state::compare(before, &after);
            if differences.is_empty() {
                return;
            }
            assert!(std::time::Instant::now() < end, "{differences:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn engine(&self) -> Engine {
        self.guest.engine_with(Arc::new(Fabric))
    }

    fn device(&self, n: usize) -> DeviceName {
        HardwareId::Pci { address: self.functions[n].clone(), port: String::new() }.device_name()
    }

    fn claim(&self, name: &str, ports: &[usize], parameters: &str) -> ResolvedClaim {
        claim(name, &ports.iter().map(|n| self.device(*n)).collect::<Vec<_>>(), parameters)
    }

    /// A pod that has these ports.
    fn lent(&self, engine: &Engine, name: &str, ports: &[usize], parameters: &str) -> (PodNetns, ResolvedClaim) {
        let one = self.claim(name, ports, parameters);
        engine.prepare(&one, &pod_ref(name)).unwrap();
        let pod = self.guest.pod(name);
        engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
        (pod, one)
    }
}

impl Drop for Ports {
    /// Also of a test that failed: else the next one has no port.
    fn drop(&mut self) {
        for n in 0..self.functions.len() {
            let gone = || Command::new("rdma").args(["link", "delete", &format!("ibd{n}")]).output().unwrap().status.success();
            let end = soon();
            while !gone() && std::time::Instant::now() < end {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// The host as the agent sees it: RDMA devices belong to the link of the same function.
struct Fabric;

impl DeviceSource for Fabric {
    fn current(&self) -> Arc<Scan> {
        let mut scan = watch::once(&Sysfs::new("/sys"), ScanOptions::default()).unwrap();
        scan.devices.iter_mut().for_each(|device| device.rdma = None);
        for found in RdmaSocket::open().unwrap().unwrap().devices(soon()).unwrap() {
            let Ok(path) = std::fs::canonicalize(format!("/sys/class/infiniband/{}/device", found.name)) else { continue };
            let function = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_it = |hardware: &HardwareId| matches!(hardware, HardwareId::Pci { address, .. } if *address == function);
            for device in scan.devices.iter_mut().filter(|device| is_it(&device.hardware)) {
                device.rdma = Some(RdmaPart {
                    name: RdmaDeviceName::new(found.name.clone()).unwrap(),
                    port: 1,
                    protocol: found.protocol,
                    node_guid: found.node_guid,
                    companions: Vec::new(),
                });
            }
        }
        Arc::new(scan)
    }

    fn rescan(&self) -> Arc<Scan> {
        self.current()
    }
}

fn links(netns: &Netns) -> Vec<Link> {
    link::list(&mut RouteSocket::open_in(netns).unwrap(), soon()).unwrap()
}

fn by_name(netns: &Netns, name: &str) -> Link {
    links(netns).into_iter().find(|link| link.name == name).unwrap_or_else(|| panic!("no link {name}: {:#?}", links(netns)))
}
