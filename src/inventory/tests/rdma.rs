//! RDMA devices of made-up machines: which link, function and port they belong to, and which are devices of their own.

use super::*;
use crate::inventory::{Ipoib, RdmaPart};
use crate::rdma::{self, Guid, NetnsMode, Port, PortState, Protocol};

/// What an RDMA device's files and netlink say of it.
struct Hca {
    path: &'static str,
    name: &'static str,
    guid: u64,
    protocol: Protocol,
    /// By number, from 1: the index of the port's link.
    links: Vec<Option<u32>>,
    has_verbs: bool,
    parent: Option<&'static str>,
    node_type: u8,
}

impl Hca {
    fn new(path: &'static str, name: &'static str, guid: u64, protocol: Protocol, links: &[Option<u32>]) -> Self {
        Self { path, name, guid, protocol, links: links.to_vec(), has_verbs: true, parent: None, node_type: 1 }
    }

    fn layer(&self) -> &'static str {
        match self.protocol {
            Protocol::InfiniBand => "InfiniBand",
            Protocol::Other => "Unknown",
            _ => "Ethernet",
        }
    }
}

/// Of InfiniBand: that of its RDMA device and the number.
fn port_guid(hca: u64, port: u64) -> Guid {
    Guid(hca + port)
}

impl Machine {
    /// In sysfs and for netlink; a path of "" stands for no hardware.
    fn hca(&mut self, hca: &Hca) {
        let at = if hca.path.is_empty() {
            let at = format!("devices/virtual/infiniband/{}", hca.name);
            self.link(&format!("class/infiniband/{}", hca.name), &at);
            at
        } else {
            self.rdma(hca.path, hca.name);
            format!("devices/{}/infiniband/{}", hca.path, hca.name)
        };
        self.write(&format!("{at}/node_guid"), &format!("{}\n", Guid(hca.guid)));
        self.write(&format!("{at}/node_type"), &format!("{}: CA\n", hca.node_type));
        for (place, _) in hca.links.iter().enumerate() {
            let port = format!("{at}/ports/{}", place + 1);
            self.write(&format!("{port}/link_layer"), &format!("{}\n", hca.layer()));
            self.write(&format!("{port}/state"), "4: ACTIVE\n");
            self.write(&format!("{port}/rate"), "100 Gb/sec (4X EDR)\n");
            let guid = port_guid(hca.guid, place as u64 + 1);
            self.write(&format!("{port}/gids/0"), &format!("fe80:0000:0000:0000:{guid}\n"));
        }
        let index = u32::try_from(self.seen.devices.len()).unwrap();
        if hca.has_verbs {
            self.write(&format!("class/infiniband_verbs/uverbs{index}/ibdev"), &format!("{}\n", hca.name));
        }
        let device = rdma::Device {
            index,
            name: hca.name.to_owned(),
            ports: u32::try_from(hca.links.len()).unwrap(),
            node_guid: Some(Guid(hca.guid)),
            node_type: hca.node_type,
            protocol: hca.protocol,
            firmware: None,
            parent: hca.parent.map(str::to_owned),
        };
        let port = |(place, link): (usize, &Option<u32>)| Port {
            device: index,
            port: u32::try_from(place).unwrap() + 1,
            state: PortState::Active,
            link: link.map(|index| (index, "link".to_owned())),
            subnet_prefix: None,
            lid: None,
        };
        self.seen.devices.push((device, hca.links.iter().enumerate().map(port).collect()));
        self.seen.mode = Some(NetnsMode::Shared);
    }

    /// What [`Machine::hca`] made is in another namespace now.
    fn hca_leaves(&mut self, name: &str) {
        self.seen.devices.retain(|(device, _)| device.name != name);
        fs::remove_file(self.dir.path().join("class/infiniband").join(name)).unwrap();
    }

    /// The port's link is in another namespace now.
    fn link_leaves(&mut self, link: &str) {
        let index = self.index(link);
        for port in self.seen.devices.iter_mut().flat_map(|(_, ports)| ports) {
            port.link = port.link.take().filter(|(of, _)| *of != index);
        }
        self.remove(link);
    }

    /// A PCI function with a NIC, and the index of that.
    fn function(&mut self, path: &str, link: Option<Link>) -> Option<u32> {
        self.device(path, "pci", &[("numa_node", "1")]);
        let name = link.as_ref()?.name.clone();
        self.netdev(Some(path), 0, link?);
        Some(self.index(&name))
    }

    fn scan_ignoring_ipoib(&self) -> Scan {
        let options = ScanOptions { ipoib: Ipoib::Ignore, ..ScanOptions::default() };
        scan::build(Ok((&self.snapshot, &self.seen)), &Sysfs::new(self.dir.path()), options, &[], None)
    }
}

const PF: &str = "pci0000:80/0000:8a:00.0";
const VF: &str = "pci0000:80/0000:8a:00.2";

fn ipoib(name: &str, guid: Guid) -> Link {
    let mut address = vec![0, 0, 1, 7, 0xfe, 0x80, 0, 0, 0, 0, 0, 0];
    address.extend(guid.0.to_be_bytes());
    Link { arphrd: 32, address: Some(LinkAddress::new(address)), ..kind("ipoib", name, 0) }
}

fn part<'a>(scan: &'a Scan, name: &str) -> Option<(&'a str, u32)> {
    device(scan, name).rdma.as_ref().map(|rdma| (rdma.name.as_str(), rdma.port))
}

fn lend_alone(device: &Device) -> Lent {
    Lent {
        name: device.name.clone(),
        hardware: device.hardware.clone(),
        attributes: device.attributes.clone(),
        index: 0,
        host_name: String::new(),
        is_rdma_only: true,
    }
}

#[test]
fn a_roce_nic_and_its_virtual_function_have_their_rdma_devices() {
    let mut machine = Machine::new();
    let (pf, vf) = (machine.function(PF, Some(nic("eth0", 1))), machine.function(VF, Some(nic("eth1", 2))));
    machine.hca(&Hca::new(PF, "mlx5_0", 0x10, Protocol::Roce, &[pf]));
    machine.hca(&Hca::new(VF, "mlx5_1", 0x20, Protocol::Roce, &[vf]));
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-8a-00-0", "pci-0000-8a-00-2"]);
    let expected = RdmaPart {
        name: "mlx5_1".to_owned().try_into().unwrap(),
        port: 1,
        protocol: Protocol::Roce,
        node_guid: Some(Guid(0x20)),
        companions: vec![],
    };
    assert_eq!(device(&scan, "pci-0000-8a-00-2").rdma, Some(expected));
    let attributes = &device(&scan, "pci-0000-8a-00-2").attributes;
    for (name, value) in [
        ("rdma", Attribute::Bool(true)),
        ("rdmaDevice", text("mlx5_1")),
        ("rdmaPort", Attribute::Int(1)),
        ("rdmaProtocol", text("RoCE")),
        ("rdmaLinkLayer", text("Ethernet")),
        ("rdmaNodeGuid", text("0000:0000:0000:0020")),
        ("rdmaRate", Attribute::Int(100)),
        ("rdmaNetnsMode", text("shared")),
    ] {
        assert_eq!(attributes.get(name), Some(&value), "{name}");
    }
    // Of Ethernet it follows the address.
    assert!(!attributes.contains_key("rdmaPortGuid"));
    // A port that is down has no rate.
    machine.write(&format!("devices/{VF}/infiniband/mlx5_1/ports/1/state"), "1: DOWN\n");
    assert!(!device(&machine.scan(&[], None), "pci-0000-8a-00-2").attributes.contains_key("rdmaRate"));
}

/// dranet#342: a virtual function whose link is in a pod must not look like an RDMA device without link.
#[test]
fn a_roce_device_whose_link_is_away_is_withheld_or_that_of_what_is_lent() {
    let mut machine = Machine::new();
    let vf = machine.function(VF, Some(nic("eth1", 2)));
    machine.hca(&Hca::new(VF, "mlx5_1", 0x20, Protocol::Roce, &[vf]));
    let before = machine.scan(&[], None);
    let lent = [lend(&before.devices[0])];
    machine.link_leaves("eth1");
    let scan = machine.scan(&lent, Some(&before));
    assert_eq!(names(&scan), ["pci-0000-8a-00-2"]);
    assert_eq!(scan.withheld, []);
    assert_eq!(device(&scan, "pci-0000-8a-00-2").attributes, lent[0].attributes);
    assert_eq!(part(&scan, "pci-0000-8a-00-2"), Some(("mlx5_1", 1)), "shared mode: the host sees it");
    let scan = machine.scan(&[], Some(&before));
    assert_eq!(scan.devices, []);
    assert!(reason(&scan, "mlx5_1").contains("RoCE") && reason(&scan, "mlx5_1").contains("not on the host"));
    let name = crate::names::DeviceName::new("pci-0000-8a-00-2").unwrap();
    assert_eq!(scan.withheld(&name).unwrap().link, "mlx5_1", "an allocated claim is told why");
    machine.hca_leaves("mlx5_1");
    assert_eq!(device(&machine.scan(&lent, None), "pci-0000-8a-00-2").rdma, None, "exclusive mode: it moved");
}

#[test]
fn ports_of_one_device_belong_to_the_links_of_their_number() {
    let mut machine = Machine::new();
    machine.device(PF, "pci", &[]);
    machine.netdev(Some(PF), 0, nic("eth2", 1));
    machine.netdev(Some(PF), 1, nic("eth3", 2));
    let indices = [Some(machine.index("eth2")), Some(machine.index("eth3"))];
    // Old kernels say nothing of links; where the kernel says something, it is the truth.
    for links in [[None, None], indices, [indices[1], indices[0]]] {
        let mut machine = Machine::new();
        machine.device(PF, "pci", &[]);
        machine.netdev(Some(PF), 0, nic("eth2", 1));
        machine.netdev(Some(PF), 1, nic("eth3", 2));
        machine.hca(&Hca::new(PF, "mlx4_0", 0x40, Protocol::Roce, &links));
        let scan = machine.scan(&[], None);
        let (first, second) = if links[0] == indices[1] { (2, 1) } else { (1, 2) };
        assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx4_0", first)));
        assert_eq!(part(&scan, "pci-0000-8a-00-0-1"), Some(("mlx4_0", second)));
        // The other one's port stays its own.
        let lent = [lend(device(&scan, "pci-0000-8a-00-0"))];
        machine.link_leaves("eth2");
        let scan = machine.scan(&lent, Some(&scan));
        assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx4_0", first)));
        assert_eq!(part(&scan, "pci-0000-8a-00-0-1"), Some(("mlx4_0", second)));
    }
}

#[test]
fn one_function_with_an_infiniband_and_an_ethernet_port() {
    let mut machine = Machine::new();
    machine.device(PF, "pci", &[]);
    machine.netdev(Some(PF), 0, ipoib("ib0", port_guid(0x40, 1)));
    machine.netdev(Some(PF), 1, nic("eth3", 2));
    let ethernet = machine.index("eth3");
    machine.hca(&Hca::new(PF, "mlx4_0", 0x40, Protocol::InfiniBand, &[None, Some(ethernet)]));
    machine.write(&format!("devices/{PF}/infiniband/mlx4_0/ports/2/link_layer"), "Ethernet\n");
    let scan = machine.scan(&[], None);
    assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx4_0", 1)));
    assert_eq!(part(&scan, "pci-0000-8a-00-0-1"), Some(("mlx4_0", 2)));
}

#[test]
fn an_ipoib_link_is_of_the_port_whose_guid_it_has() {
    let mut machine = Machine::new();
    machine.device(PF, "pci", &[]);
    // The numbers of the links do not tell.
    machine.netdev(Some(PF), 0, ipoib("ib0", port_guid(0x40, 2)));
    machine.netdev(Some(PF), 1, ipoib("ib1", port_guid(0x40, 1)));
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::InfiniBand, &[None, None]));
    let scan = machine.scan(&[], None);
    assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx5_0", 2)));
    assert_eq!(part(&scan, "pci-0000-8a-00-0-1"), Some(("mlx5_0", 1)));
    let attributes = &device(&scan, "pci-0000-8a-00-0").attributes;
    assert_eq!(attributes["rdmaPortGuid"], text("0000:0000:0000:0042"));
    assert_eq!(attributes["rdmaProtocol"], text("InfiniBand"));
}

#[test]
fn ipoib_links_are_devices_or_left_alone() {
    let mut machine = Machine::new();
    machine.function(PF, Some(ipoib("ib0", port_guid(0x40, 1))));
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::InfiniBand, &[None]));
    let parent = machine.index("ib0");
    machine.netdev(Some(PF), 0, Link { parent: Some(parent), ..ipoib("ib0.8001", port_guid(0x40, 1)) });
    let scan = machine.scan(&[], None);
    assert_eq!(scan.devices.len(), 2);
    assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx5_0", 1)));
    assert!(!device(&scan, "pci-0000-8a-00-0").is_rdma_only);
    let child = scan.devices.iter().find(|d| d.link.as_ref().is_some_and(|l| l.name == "ib0.8001")).unwrap();
    assert_eq!((&child.rdma, &child.attributes["rdma"]), (&None, &Attribute::Bool(false)), "it is the lower link's");

    let scan = machine.scan_ignoring_ipoib();
    assert_eq!(names(&scan), ["pci-0000-8a-00-0"]);
    let alone = device(&scan, "pci-0000-8a-00-0");
    assert!(alone.is_rdma_only && alone.link.is_none());
    assert!(reason(&scan, "ib0").contains("--ipoib=ignore") && reason(&scan, "ib0.8001").contains("--ipoib=ignore"));
    // What the host needs stays with it, and so does what is below.
    machine.default_route("ib0");
    let scan = machine.scan_ignoring_ipoib();
    assert_eq!(scan.devices, []);
    assert!(reason(&scan, "ib0").contains("default route"));
}

#[test]
fn devices_without_link_are_called_by_their_function_and_stay_so() {
    let mut machine = Machine::new();
    machine.device(PF, "pci", &[("vendor", "0x15b3"), ("numa_node", "1")]);
    machine.device(VF, "pci", &[("vendor", "0x1d0f"), ("device", "0xefa1")]);
    machine.hca(&Hca::new(PF, "mlx5_9", 0x40, Protocol::InfiniBand, &[None]));
    machine.hca(&Hca::new(PF, "mlx5_1", 0x50, Protocol::InfiniBand, &[None]));
    machine.hca(&Hca { node_type: 7, ..Hca::new(VF, "efa_0", 0, Protocol::Other, &[None]) });
    let scan = machine.scan(&[], None);
    let second = "pci-0000-8a-00-0-0000000000000050";
    assert_eq!(names(&scan), ["pci-0000-8a-00-0", second, "pci-0000-8a-00-2"]);
    assert!(scan.devices.iter().all(|d| d.is_rdma_only && d.link.is_none()));
    assert_eq!(part(&scan, "pci-0000-8a-00-0"), Some(("mlx5_9", 1)));
    let attributes = &device(&scan, "pci-0000-8a-00-0").attributes;
    assert_eq!((&attributes["pciVendor"], &attributes["numaNode"]), (&text("0x15b3"), &Attribute::Int(1)));
    assert_eq!(attributes["resource.kubernetes.io/pcieRoot"], text("pci0000:80"));
    assert!(!attributes.contains_key("ifName"));
    // The first of them is in a pod, by either mode.
    let lent = [lend_alone(device(&scan, "pci-0000-8a-00-0"))];
    let now = machine.scan(&lent, None);
    assert_eq!(names(&now), names(&scan));
    assert_eq!(part(&now, "pci-0000-8a-00-0"), Some(("mlx5_9", 1)));
    assert!(device(&now, "pci-0000-8a-00-0").is_rdma_only);
    machine.hca_leaves("mlx5_9");
    let now = machine.scan(&lent, None);
    assert_eq!(names(&now), names(&scan));
    assert_eq!((part(&now, "pci-0000-8a-00-0"), part(&now, second)), (None, Some(("mlx5_1", 1))));
    // The first one is gone for good: the other one keeps its name.
    assert_eq!(names(&machine.scan(&[], Some(&scan))), [second, "pci-0000-8a-00-2"]);
}

#[test]
fn an_ipoib_link_that_comes_to_a_lent_device_is_not_another_one() {
    let mut machine = Machine::new();
    machine.function(PF, None);
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::InfiniBand, &[None]));
    let scan = machine.scan(&[], None);
    let lent = [lend_alone(&scan.devices[0])];
    machine.netdev(Some(PF), 0, ipoib("ib0", port_guid(0x40, 1)));
    let scan = machine.scan(&lent, Some(&scan));
    assert_eq!(names(&scan), ["pci-0000-8a-00-0"]);
    assert!(scan.devices[0].is_rdma_only && scan.devices[0].link.is_none());
    assert!(reason(&scan, "ib0").contains("mlx5_0 is lent"), "{}", reason(&scan, "ib0"));
}

/// dranet#228: eRDMA's function has another class, and the link is another function's.
#[test]
fn a_device_on_a_function_of_its_own_is_of_the_link_that_netlink_says() {
    let mut machine = Machine::new();
    let link = machine.function("pci0000:00/0000:00:05.0", Some(nic("eth1", 1)));
    machine.device(PF, "pci", &[("class", "0x00ff00")]);
    machine.hca(&Hca { node_type: 4, ..Hca::new(PF, "erdma_0", 0x60, Protocol::Iwarp, &[link]) });
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-00-05-0"]);
    assert_eq!(part(&scan, "pci-0000-00-05-0"), Some(("erdma_0", 1)));
    assert_eq!(device(&scan, "pci-0000-00-05-0").attributes["rdmaProtocol"], text("iWARP"));
    // Lent, with its link away.
    let lent = [lend(&scan.devices[0])];
    machine.link_leaves("eth1");
    let scan = machine.scan(&lent, None);
    assert_eq!((scan.withheld.len(), part(&scan, "pci-0000-00-05-0")), (0, Some(("erdma_0", 1))));
}

#[test]
fn software_devices_belong_to_their_link_and_are_left_out_without() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("dummy", "d1", 1));
    machine.netdev(None, 0, kind("dummy", "d2", 2));
    let first = machine.index("d1");
    machine.hca(&Hca::new("", "rxe0", 0x70, Protocol::Roce, &[Some(first)]));
    machine.hca(&Hca { node_type: 4, ..Hca::new("", "siw0", 0x80, Protocol::Iwarp, &[None]) });
    // As kernels before 5.1 have it.
    machine.hca(&Hca::new("", "rxe1", 0x90, Protocol::Roce, &[None]));
    machine.write("devices/virtual/infiniband/rxe1/parent", "d2\n");
    let scan = machine.scan(&[], None);
    let devices: Vec<_> = scan.devices.iter().map(|d| d.rdma.as_ref().map(|r| r.name.to_string())).collect();
    assert_eq!(devices, [Some("rxe0".to_owned()), Some("rxe1".to_owned())]);
    assert_eq!(scan.withheld.len(), 1);
    assert!(reason(&scan, "siw0").contains("iWARP"), "{}", reason(&scan, "siw0"));
}

#[test]
fn halves_for_management_are_companions_and_no_devices() {
    let mut machine = Machine::new();
    machine.function(PF, None);
    machine.function(VF, None);
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::InfiniBand, &[None]));
    machine.hca(&Hca { has_verbs: false, ..Hca::new(PF, "smi1", 0x30, Protocol::Other, &[None]) });
    machine.hca(&Hca { parent: Some("mlx5_0"), ..Hca::new(VF, "smi2", 0x20, Protocol::InfiniBand, &[None]) });
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-8a-00-0"]);
    let rdma = device(&scan, "pci-0000-8a-00-0").rdma.as_ref().unwrap();
    assert_eq!(rdma.name.as_str(), "mlx5_0");
    assert_eq!(rdma.companions.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["smi1", "smi2"]);
    assert_eq!(scan.withheld, []);
}

#[test]
fn a_bond_of_two_functions_keeps_its_rdma_device() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("bond", "bond0", 9));
    let bond = machine.index("bond0");
    let active = machine.function(PF, Some(Link { master: Some(bond), ..nic("eth0", 1) }));
    machine.function(VF, Some(Link { master: Some(bond), ..nic("eth1", 2) }));
    for link in [Some(bond), active, None] {
        machine.hca(&Hca::new(PF, "mlx5_bond_0", 0x40, Protocol::Roce, &[link]));
        let scan = machine.scan(&[], None);
        assert!(scan.devices.iter().all(|d| d.rdma.is_none() && !d.is_rdma_only), "{link:?}");
        assert_eq!(names(&scan), ["pci-0000-8a-00-0", "pci-0000-8a-00-2"]);
        machine.seen.devices.clear();
        machine.hca_leaves("mlx5_bond_0");
        fs::remove_dir_all(machine.dir.path().join("devices").join(PF).join("infiniband")).unwrap();
    }
    // Without such an RDMA device each has its own.
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::Roce, &[active]));
    assert_eq!(part(&machine.scan(&[], None), "pci-0000-8a-00-0"), Some(("mlx5_0", 1)));
}

#[test]
fn netlink_that_fails_leaves_what_sysfs_says_and_a_problem() {
    let mut machine = Machine::new();
    machine.function(PF, Some(nic("eth0", 1)));
    machine.function(VF, None);
    machine.hca(&Hca::new(PF, "mlx5_0", 0x40, Protocol::Roce, &[None]));
    machine.hca(&Hca::new(VF, "mlx5_1", 0x50, Protocol::Roce, &[None]));
    machine.seen = RdmaSeen { problem: Some("netlink is ill".to_owned()), ..RdmaSeen::default() };
    let scan = machine.scan(&[], None);
    assert_eq!((names(&scan), scan.problems.clone()), (vec!["pci-0000-8a-00-0"], vec!["netlink is ill".to_owned()]));
    let attributes = &device(&scan, "pci-0000-8a-00-0").attributes;
    assert_eq!((&attributes["rdmaProtocol"], attributes.get("rdmaNetnsMode")), (&text("RoCE"), None));
    assert!(reason(&scan, "mlx5_1").contains("RoCE"));
}
