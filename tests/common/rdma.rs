//! RDMA devices of the virtual machine (`e2e/vm`) with an engine over them. Needs `common/pci.rs` as `pci`, `common/engine.rs` as `common`.

use std::process::Command;
use std::sync::Arc;

use dranic::attach::Engine;
use dranic::attach::engine::{DeviceSource, Observer};
use dranic::dra::resolve::ResolvedClaim;
use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Device, RdmaPart, Scan, ScanOptions, watch};
use dranic::names::{DeviceName, RdmaDeviceName};
use dranic::netns::Netns;
use dranic::rdma::{self, NetnsMode, RdmaSocket};
use dranic_testbed::fabric::PodNetns;

use super::common::{claim, pod_ref, sandbox};
use super::pci::{Guest, run, soon};

/// The guest, if its RDMA devices are in `mode`. Else none, and a line that says so.
pub(crate) fn guest(mode: NetnsMode) -> Option<Guest> {
    let guest = Guest::new()?;
    let is = RdmaSocket::open().unwrap().map(|mut socket| socket.netns_mode(soon()).unwrap());
    if is != Some(mode) {
        println!("skipped: needs a guest whose RDMA devices are {mode}");
        return None;
    }
    // What an earlier test left.
    names(&guest.host).iter().for_each(|name| run(&format!("rdma link delete {name}")));
    Some(guest)
}

/// The host as the agent sees it. An RDMA device whose name begins with `ib` is one without a link, and stands in for its link.
pub(crate) struct Host;

impl DeviceSource for Host {
    fn current(&self) -> Arc<Scan> {
        let options = ScanOptions { offer_veth: true, ..ScanOptions::default() };
        let mut scan = watch::once(&Sysfs::new("/sys"), options).unwrap();
        let Some(mut socket) = RdmaSocket::open().unwrap() else { return Arc::new(scan) };
        scan.devices.iter_mut().for_each(|device| device.rdma = None);
        for found in socket.devices(soon()).unwrap() {
            for port in socket.ports(found.index, soon()).unwrap() {
                let Some((index, _)) = port.link else { continue };
                let has_link = |device: &&mut Device| device.link.as_ref().is_some_and(|link| link.index == index);
                let Some(device) = scan.devices.iter_mut().find(has_link) else { continue };
                device.rdma = Some(RdmaPart {
                    name: RdmaDeviceName::new(found.name.clone()).unwrap(),
                    port: port.port,
                    protocol: found.protocol,
                    node_guid: found.node_guid,
                    companions: Vec::new(),
                });
                device.is_rdma_only = found.name.starts_with("ib");
                if device.is_rdma_only {
                    device.link = None;
                }
            }
        }
        Arc::new(scan)
    }

    fn rescan(&self) -> Arc<Scan> {
        self.current()
    }
}

pub(crate) fn engine(guest: &Guest) -> Engine {
    guest.engine_with(Arc::new(Host))
}

/// An engine that tells `observer`.
pub(crate) fn observed(guest: &Guest, observer: Observer) -> Engine {
    guest.engine_with(Arc::new(Host)).with_observer(observer)
}

/// What `netns` sees, by name.
pub(crate) fn seen(netns: &Netns) -> Vec<rdma::Device> {
    RdmaSocket::open_in(netns).unwrap().unwrap().devices(soon()).unwrap()
}

pub(crate) fn names(netns: &Netns) -> Vec<String> {
    let mut names: Vec<String> = seen(netns).into_iter().map(|device| device.name).collect();
    names.sort();
    names
}

/// The device that `netns` sees as `name`.
pub(crate) fn device(netns: &Netns, name: &str) -> rdma::Device {
    seen(netns).into_iter().find(|device| device.name == name).unwrap_or_else(|| panic!("no RDMA device {name}"))
}

/// The published name of the device whose RDMA device is called so.
pub(crate) fn published(rdma: &str) -> DeviceName {
    let scan = Host.current();
    let is_it = |device: &&Device| device.rdma.as_ref().is_some_and(|part| part.name.as_str() == rdma);
    scan.devices.iter().find(is_it).unwrap_or_else(|| panic!("{rdma} is not offered: {scan:#?}")).name.clone()
}

/// A pod that has these RDMA devices and their links.
pub(crate) fn lent(guest: &Guest, engine: &Engine, pod: &str, rdma: &[&str], parameters: &str) -> (PodNetns, ResolvedClaim) {
    let devices: Vec<DeviceName> = rdma.iter().map(|name| published(name)).collect();
    let one = claim(pod, &devices, parameters);
    engine.prepare(&one, &pod_ref(pod)).unwrap();
    let netns = guest.pod(pod);
    engine.attach(&pod_ref(pod).uid, &sandbox(pod), netns.path(), soon()).unwrap();
    (netns, one)
}

/// A veth pair, up, one end of it (`rail0`, with an address) with an RDMA device over it (`rv0`); deleted when dropped.
pub(crate) struct Veth;

impl Veth {
    pub(crate) fn new() -> Self {
        let _ = Command::new("ip").args(["link", "del", "rail0peer"]).output();
        for line in [
            "ip link add rail0 address 02:00:00:00:77:01 type veth peer name rail0peer",
            "ip link set rail0 up",
            "ip link set rail0peer up",
            "ip address add 10.70.0.1/24 dev rail0",
            "rdma link add rv0 type rxe netdev rail0",
        ] {
            run(line);
        }
        Self
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", "rail0peer"]).output();
    }
}
