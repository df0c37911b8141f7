//! Scans of made-up machines, shaped like real ones.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::rdma::RdmaSeen;
use super::sysfs::Sysfs;
use super::{Attribute, Device, HardwareId, Lent, Scan, ScanOptions, scan};
use crate::netdev::host_state::Snapshot;
use crate::netdev::{Address, Link, LinkAddress, Route};

mod rdma;

/// A sysfs tree in a temporary folder, and the links that netlink would show.
struct Machine {
    dir: tempfile::TempDir,
    snapshot: Snapshot,
    seen: RdmaSeen,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for class in ["class/net", "class/infiniband", "bus"] {
            fs::create_dir_all(dir.path().join(class)).unwrap();
        }
        Self { dir, snapshot: Snapshot::default(), seen: RdmaSeen::default() }
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A relative link as in sysfs.
    fn link(&self, from: &str, to: &str) {
        let up = "../".repeat(Path::new(from).components().count() - 1);
        fs::create_dir_all(self.dir.path().join(from).parent().unwrap()).unwrap();
        fs::create_dir_all(self.dir.path().join(to)).unwrap();
        symlink(format!("{up}{to}"), self.dir.path().join(from)).unwrap();
    }

    /// A device at `devices/<path>` on `bus`, with files.
    fn device(&self, path: &str, bus: &str, files: &[(&str, &str)]) {
        self.link(&format!("devices/{path}/subsystem"), &format!("bus/{bus}"));
        for (name, text) in files {
            self.write(&format!("devices/{path}/{name}"), &format!("{text}\n"));
        }
    }

    /// A link of the device at `devices/<path>`, or a virtual one.
    fn netdev(&mut self, path: Option<&str>, dev_port: u32, mut link: Link) {
        link.index = u32::try_from(self.snapshot.links.len()).unwrap() + 2;
        link.arphrd = link.arphrd.max(1);
        let at = format!("devices/{}/net/{}", path.unwrap_or("virtual"), link.name);
        self.write(&format!("{at}/ifindex"), &format!("{}\n", link.index));
        self.write(&format!("{at}/dev_port"), &format!("{dev_port}\n"));
        if let Some(path) = path {
            self.link(&format!("{at}/device"), &format!("devices/{path}"));
        }
        self.link(&format!("class/net/{}", link.name), &at);
        self.snapshot.links.push(link);
    }

    fn rdma(&self, path: &str, name: &str) {
        let at = format!("devices/{path}/infiniband/{name}");
        self.link(&format!("{at}/device"), &format!("devices/{path}"));
        self.link(&format!("class/infiniband/{name}"), &at);
    }

    fn default_route(&mut self, name: &str) {
        let index = self.index(name);
        self.snapshot.routes.push((vec![index], Route::to("0.0.0.0/0".parse().unwrap())));
    }

    fn index(&self, name: &str) -> u32 {
        self.snapshot.links.iter().find(|link| link.name == name).unwrap().index
    }

    fn edit(&mut self, name: &str) -> &mut Link {
        self.snapshot.links.iter_mut().find(|link| link.name == name).unwrap()
    }

    fn remove(&mut self, name: &str) {
        self.snapshot.links.retain(|link| link.name != name);
    }

    fn scan(&self, lent: &[Lent], previous: Option<&Scan>) -> Scan {
        scan::build(Ok((&self.snapshot, &self.seen)), &Sysfs::new(self.dir.path()), ScanOptions::default(), lent, previous)
    }
}

fn mac(last: u8) -> LinkAddress {
    LinkAddress::new(vec![2, 0, 0, 0, 0, last])
}

fn nic(name: &str, last: u8) -> Link {
    Link { name: name.to_owned(), address: Some(mac(last)), mtu: 9000, oper_state: "up".to_owned(), ..Link::default() }
}

fn kind(kind: &str, name: &str, last: u8) -> Link {
    Link { kind: Some(kind.to_owned()), ..nic(name, last) }
}

fn names(scan: &Scan) -> Vec<&str> {
    scan.devices.iter().map(|d| d.name.as_str()).collect()
}

fn device<'a>(scan: &'a Scan, name: &str) -> &'a Device {
    scan.devices.iter().find(|d| d.name.as_str() == name).unwrap()
}

fn reason<'a>(scan: &'a Scan, link: &str) -> &'a str {
    &scan.withheld.iter().find(|w| w.link == link).unwrap_or_else(|| panic!("{link} is not withheld")).reason
}

fn lend(device: &Device) -> Lent {
    let link = device.link.as_ref().unwrap();
    Lent {
        name: device.name.clone(),
        hardware: device.hardware.clone(),
        attributes: device.attributes.clone(),
        index: link.index,
        host_name: link.name.clone(),
        is_rdma_only: false,
    }
}

fn text(value: &str) -> Attribute {
    Attribute::String(value.to_owned())
}

/// Virtual functions behind Hyper-V's bus, each in a domain of its own, with a synthetic NIC as uplink.
#[test]
fn a_machine_with_virtual_functions_in_own_domains() {
    let mut machine = Machine::new();
    let bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00";
    let uplink = format!("{bus}/000d3a00-0000-0000-0000-000d3a000001");
    machine.device(&uplink, "vmbus", &[]);
    machine.netdev(Some(&uplink), 0, nic("eth0", 1));
    for n in 1..=8 {
        let path = format!("{bus}/0000010{n}-0000-0000-3130-444532304235/pci010{n}:00/010{n}:00:00.0");
        let node = if n < 5 { "0" } else { "1" };
        let files = [("vendor", "0x15b3"), ("device", "0x101e"), ("subsystem_device", "0x0101"), ("numa_node", node)];
        machine.device(&path, "pci", &files);
        machine.netdev(Some(&path), 0, Link { arphrd: 32, ..kind("ipoib", &format!("ib{}", n - 1), n) });
        machine.rdma(&path, &format!("mlx5_{}", n - 1));
    }
    machine.default_route("eth0");
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), (1..=8).map(|n| format!("pci-010{n}-00-00-0")).collect::<Vec<_>>());
    assert!(reason(&scan, "eth0").contains("IPv4 default route (table main)"), "{}", reason(&scan, "eth0"));
    assert_eq!(scan.problems, [""; 0]);
    let attributes = &device(&scan, "pci-0105-00-00-0").attributes;
    for (name, value) in [
        ("ifName", text("ib4")),
        ("rdma", Attribute::Bool(true)),
        ("rdmaDevice", text("mlx5_4")),
        ("encapsulation", text("infiniband")),
        ("type", text("ipoib")),
        ("pciAddress", text("0105:00:00.0")),
        ("pciVendor", text("0x15b3")),
        ("pciDevice", text("0x101e")),
        ("pciSubsystem", text("0x0101")),
        ("numaNode", Attribute::Int(1)),
        ("resource.kubernetes.io/numaNode", Attribute::Int(1)),
        ("virtual", Attribute::Bool(false)),
        ("mac", text("02:00:00:00:00:05")),
    ] {
        assert_eq!(attributes.get(name), Some(&value), "{name}");
    }
    // As Kubernetes' helper has it: not below the top of the tree, so none.
    assert!(!attributes.contains_key("resource.kubernetes.io/pcieRoot"));
}

/// A tree of places tells attributes only: the link stays the device it was.
#[test]
fn a_link_that_a_test_gives_a_place() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("macvlan", "nic0", 1));
    machine.netdev(None, 0, kind("macvlan", "nic1", 2));
    let before = machine.scan(&[], None);
    let mut places = Machine::new();
    let path = "pci0000:10/0000:10:01.0/0000:11:00.0";
    places.device(path, "pci", &[("numa_node", "1"), ("vendor", "0x15b3")]);
    places.netdev(Some(path), 0, nic("nic0", 1));
    // An index that is another link's by now.
    places.snapshot.links.push(nic("", 0));
    places.netdev(Some(path), 0, nic("nic1", 2));
    let sysfs = |places: &Path| Sysfs::new(machine.dir.path()).with_places(Some(places.to_owned()));
    let scan = |sysfs| scan::build(Ok((&machine.snapshot, &machine.seen)), &sysfs, ScanOptions::default(), &[], None);
    let placed = scan(sysfs(places.dir.path()));
    assert_eq!(names(&placed), names(&before));
    assert_eq!(placed.devices[0].hardware, before.devices[0].hardware);
    let attributes = &placed.devices[0].attributes;
    assert_eq!(attributes.get("resource.kubernetes.io/pcieRoot"), Some(&text("pci0000:10")));
    assert_eq!(attributes.get("resource.kubernetes.io/numaNode"), Some(&Attribute::Int(1)));
    assert_eq!(placed.devices[1], before.devices[1]);
    assert_eq!(scan(sysfs(&places.dir.path().join("absent"))), before);
}

/// Two functions a card under one root, SR-IOV capable, one of them with virtual functions.
#[test]
fn a_machine_with_physical_functions() {
    let mut machine = Machine::new();
    for (domain, function, vfs) in [("0000", 0, "0"), ("0000", 1, "2"), ("0012", 0, "0")] {
        let path = format!("pci{domain}:00/{domain}:00:00.0/{domain}:03:00.{function}");
        // The functions 2 and 4 are the first two virtual ones of function 1.
        let files =
            [("numa_node", "-1"), ("sriov_totalvfs", "16"), ("sriov_numvfs", vfs), ("sriov_offset", "1"), ("sriov_stride", "2")];
        machine.device(&path, "pci", &files);
        machine.netdev(Some(&path), 0, nic(&format!("rdma{domain}{function}"), function));
        machine.rdma(&path, &format!("mlx5_{domain}{function}"));
    }
    let function = "pci0000:00/0000:00:00.0/0000:03:00.4";
    machine.device(function, "pci", &[]);
    let pf = "devices/pci0000:00/0000:00:00.0/0000:03:00.1";
    machine.link(&format!("devices/{function}/physfn"), pf);
    machine.link(&format!("{pf}/virtfn1"), &format!("devices/{function}"));
    machine.netdev(Some(function), 0, nic("vf0", 9));
    let index = machine.index("vf0");
    for ip in ["10.1.0.9", "fe80::9", "2001:db8::9", "127.0.0.9"] {
        machine.snapshot.addresses.push((index, Address::permanent(ip.parse().unwrap(), 24)));
    }
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-03-00-0", "pci-0000-03-00-1", "pci-0000-03-00-4", "pci-0012-03-00-0"]);
    let pf = &device(&scan, "pci-0000-03-00-1").attributes;
    assert_eq!((&pf["sriov"], &pf["sriovVfs"]), (&Attribute::Bool(true), &Attribute::Int(2)));
    assert_eq!(pf["resource.kubernetes.io/pcieRoot"], text("pci0000:00"));
    assert!(!pf.contains_key("physicalFunction") && !pf.contains_key("vfIndex"));
    assert!(!pf.contains_key("isSriovVf") && !pf.contains_key("numaNode") && !pf.contains_key("ipv4"));
    let vf = &device(&scan, "pci-0000-03-00-4").attributes;
    assert_eq!((&vf["isSriovVf"], &vf["sriov"]), (&Attribute::Bool(true), &Attribute::Bool(false)));
    assert_eq!((&vf["physicalFunction"], &vf["vfIndex"]), (&text("pci-0000-03-00-1"), &Attribute::Int(1)));
    assert_eq!((&vf["ipv4"], &vf["ipv6"]), (&text("10.1.0.9/24"), &text("2001:db8::9/24")));
    assert_eq!(vf["rdma"], Attribute::Bool(false));
}

#[test]
fn two_ports_of_one_function_are_two_devices_whichever_is_lent() {
    let mut machine = Machine::new();
    let path = "pci0000:40/0000:41:00.0";
    machine.device(path, "pci", &[]);
    machine.rdma(path, "mlx4_0");
    machine.netdev(Some(path), 0, nic("eth2", 1));
    machine.netdev(Some(path), 1, nic("eth3", 2));
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-41-00-0", "pci-0000-41-00-0-1"]);
    assert_eq!(device(&scan, "pci-0000-41-00-0-1").link.as_ref().unwrap().name, "eth3");
    for (port, link, other) in [("pci-0000-41-00-0", "eth2", "eth3"), ("pci-0000-41-00-0-1", "eth3", "eth2")] {
        let lent = [lend(device(&scan, port))];
        let gone = machine.snapshot.links.clone();
        machine.remove(link);
        // Also after a restart.
        for previous in [Some(&scan), None] {
            let now = machine.scan(&lent, previous);
            assert_eq!(names(&now), names(&scan));
            assert_eq!(device(&now, port).link, None);
            assert_eq!(device(&now, port).attributes, lent[0].attributes);
            assert!(now.devices.iter().any(|d| d.link.as_ref().is_some_and(|l| l.name == other)));
        }
        machine.snapshot.links = gone;
        // Back under another name and index.
        machine.netdev(Some(path), u32::from(port.ends_with("-0-1")), nic("dev9", 1));
        machine.remove(link);
        let now = machine.scan(&lent, None);
        assert_eq!(device(&now, port).link.as_ref().unwrap().name, "dev9");
        machine.remove("dev9");
        fs::remove_file(machine.dir.path().join("class/net/dev9")).unwrap();
        fs::remove_dir_all(machine.dir.path().join("devices").join(path).join("net/dev9")).unwrap();
        machine.snapshot.links = scan.devices.iter().map(|d| d.link.clone().unwrap()).collect();
    }
}

#[test]
fn a_nic_in_switchdev_mode_keeps_its_name_and_its_representors_are_not_offered() {
    let mut machine = Machine::new();
    let path = "pci0000:80/0000:8a:00.1";
    machine.device(path, "pci", &[]);
    machine.rdma(path, "mlx5_1");
    let named = |name: &str, port: &str, last| Link { phys_port_name: Some(port.to_owned()), ..nic(name, last) };
    machine.netdev(Some(path), 0, named("eth1", "p1", 1));
    machine.netdev(Some(path), 0, named("eth1_0", "pf1vf0", 2));
    machine.netdev(Some(path), 0, named("eth1_1", "c1pf1sf7", 3));
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["pci-0000-8a-00-1"]);
    for link in ["eth1_0", "eth1_1"] {
        assert!(reason(&scan, link).contains("representor"));
    }
}

#[test]
fn a_subfunction_a_virtio_nic_and_a_usb_adapter() {
    let mut machine = Machine::new();
    machine.device("pci0000:00/0000:00:03.0", "pci", &[]);
    machine.device("pci0000:00/0000:00:03.0/virtio2", "virtio", &[]);
    machine.netdev(Some("pci0000:00/0000:00:03.0/virtio2"), 0, nic("eth0", 1));
    machine.device("pci0000:00/0000:08:00.0", "pci", &[]);
    machine.device("pci0000:00/0000:08:00.0/mlx5_core.sf.2", "auxiliary", &[]);
    machine.netdev(Some("pci0000:00/0000:08:00.0"), 0, nic("eth1", 2));
    machine.netdev(Some("pci0000:00/0000:08:00.0/mlx5_core.sf.2"), 0, nic("sf2", 3));
    machine.rdma("pci0000:00/0000:08:00.0", "mlx5_0");
    machine.rdma("pci0000:00/0000:08:00.0/mlx5_core.sf.2", "mlx5_2");
    machine.device("pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0", "usb", &[]);
    machine.netdev(Some("pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0"), 0, nic("usb0", 4));
    let scan = machine.scan(&[], None);
    let of = |link: &str| scan.devices.iter().find(|d| d.link.as_ref().unwrap().name == link).unwrap();
    assert_eq!(of("eth0").name.as_str(), "pci-0000-00-03-0");
    assert_eq!(of("eth1").name.as_str(), "pci-0000-08-00-0");
    assert_eq!(of("eth1").attributes["rdmaDevice"], text("mlx5_0"));
    assert_eq!(of("sf2").attributes["rdmaDevice"], text("mlx5_2"));
    assert!(of("sf2").name.as_str().starts_with("pci-0000-08-00-0-mlx5-core-sf-x"), "{}", of("sf2").name);
    assert_eq!(of("usb0").hardware, HardwareId::Bus { bus: "usb".into(), device: "1-2:1.0".into(), port: String::new() });
    assert!(!of("usb0").attributes.contains_key("pciAddress"));
}

#[test]
fn what_belongs_to_the_host_or_can_not_be_moved_is_withheld_with_a_reason() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, Link { flags: 8, ..nic("lo", 0) });
    for (n, (kind_name, name)) in [
        ("bridge", "docker0"),
        ("bridge", "cni0"),
        ("bond", "bond0"),
        ("dummy", "kube-ipvs0"),
        ("veth", "veth1"),
        ("veth", "lxc1"),
        ("vxlan", "flannel.1"),
        ("ipip", "tunl0"),
        ("gre", "gre7"),
        ("openvswitch", "ovs-system"),
        ("netkit", "nk0"),
        ("dummy", "dummy1"),
        ("macvlan", "mac1"),
    ]
    .into_iter()
    .enumerate()
    {
        machine.netdev(None, 0, kind(kind_name, name, u8::try_from(n).unwrap() + 1));
    }
    machine.edit("lxc1").link_netnsid = Some(3);
    let scan = machine.scan(&[], None);
    assert_eq!(names(&scan), ["net-dummy-02000000000c", "net-macvlan-02000000000d"]);
    assert_eq!(scan.withheld.len(), 12);
    for (link, words) in [
        ("lo", "loopback"),
        ("docker0", "Docker"),
        ("bond0", "kind bond"),
        ("lxc1", "pod"),
        ("veth1", "--offer-veth"),
        ("tunl0", "fallback"),
        ("gre7", "tunnel"),
    ] {
        assert!(reason(&scan, link).contains(words), "{link}: {}", reason(&scan, link));
    }

    let sysfs = Sysfs::new(machine.dir.path());
    let all = |options| scan::build(Ok((&machine.snapshot, &machine.seen)), &sysfs, options, &[], None);
    let with_veth = all(ScanOptions { offer_veth: true, ..ScanOptions::default() });
    assert_eq!(with_veth.devices.len(), 4);
    let careful = all(ScanOptions { need_default_route: true, ..ScanOptions::default() });
    assert_eq!(careful.devices, []);
    assert!(reason(&careful, "dummy1").contains("no default route"));
}

#[test]
fn a_name_taken_by_another_link_and_hardware_unknown_to_sysfs_are_not_offered() {
    let mut machine = Machine::new();
    machine.device("pci0000:00/0000:00:03.0", "pci", &[]);
    machine.netdev(Some("pci0000:00/0000:00:03.0"), 0, nic("eth0", 1));
    machine.edit("eth0").index = 77;
    machine.snapshot.links.push(Link { index: 78, ..nic("eth9", 2) });
    machine.snapshot.links.push(Link { index: 79, ..nic("../../x", 2) });
    let scan = machine.scan(&[], None);
    assert_eq!(scan.devices, []);
    assert_eq!(scan.problems.len(), 1);
    assert!(reason(&scan, "eth0").contains("index 77"));
    assert!(reason(&scan, "eth9").contains("sysfs"));
}

#[test]
fn virtual_links_keep_their_names_through_renames_and_twins() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("dummy", "d1", 1));
    machine.netdev(None, 0, kind("dummy", "d2", 1));
    machine.netdev(None, 0, Link { address: None, ..kind("tun", "t1", 0) });
    let scan = machine.scan(&[], None);
    let twin = format!("net-dummy-020000000001-i{}", machine.index("d2"));
    assert_eq!(names(&scan), ["net-dummy-020000000001", twin.as_str(), "net-tun-i4"]);

    // The older one goes: the younger one does not take its name while it lives.
    machine.remove("d1");
    "renamed".clone_into(&mut machine.edit("d2").name);
    let now = machine.scan(&[], Some(&scan));
    assert_eq!(names(&now), [twin.as_str(), "net-tun-i4"]);
    assert_eq!(device(&now, &twin).attributes["ifName"], text("renamed"));
    // Another address is another device.
    machine.edit("renamed").address = Some(mac(7));
    assert_eq!(names(&machine.scan(&[], Some(&now))), ["net-dummy-020000000007", "net-tun-i4"]);
}

#[test]
fn a_lent_virtual_link_is_known_by_two_of_index_name_and_address() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("dummy", "d1", 1));
    machine.netdev(None, 0, kind("dummy", "other", 1));
    let scan = machine.scan(&[], None);
    let lent = [lend(device(&scan, "net-dummy-020000000001"))];
    let on_host = |machine: &Machine| {
        let now = machine.scan(&lent, None);
        device(&now, "net-dummy-020000000001").link.as_ref().map(|link| link.name.clone())
    };
    assert_eq!(on_host(&machine).as_deref(), Some("d1"));
    machine.edit("d1").address = Some(mac(9));
    assert_eq!(on_host(&machine).as_deref(), Some("d1"), "the pod's address is still on it");
    machine.edit("d1").index = 50;
    assert_eq!(on_host(&machine), None, "another link that took the name");
    machine.edit("d1").address = Some(mac(1));
    assert_eq!(on_host(&machine).as_deref(), Some("d1"), "back with another index");
    machine.remove("d1");
    assert_eq!(on_host(&machine), None, "its twin is not it");
}

#[test]
fn when_the_host_can_not_be_read_everything_stays() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("dummy", "d1", 1));
    machine.netdev(None, 0, kind("dummy", "d2", 2));
    let before = machine.scan(&[], None);
    let mut lent = lend(&before.devices[0]);
    lent.attributes.insert("alias".to_owned(), text("lent"));
    let sysfs = Sysfs::new(machine.dir.path());
    let failed =
        |previous| scan::build(Err("netlink is ill".to_owned()), &sysfs, ScanOptions::default(), &[lent.clone()], previous);
    let now = failed(Some(&before));
    assert_eq!(names(&now), names(&before));
    assert_eq!(now.problems, ["netlink is ill"]);
    assert_eq!(now.devices[0].attributes["alias"], text("lent"));
    assert_eq!(names(&failed(None)), ["net-dummy-020000000001"], "after a restart only what is lent is known");
}

#[test]
fn a_default_route_without_a_link_keeps_all_back() {
    let mut machine = Machine::new();
    machine.netdev(None, 0, kind("dummy", "d1", 1));
    machine.snapshot.routes.push((Vec::new(), Route::to("::/0".parse().unwrap())));
    let scan = machine.scan(&[], None);
    assert_eq!(scan.devices, []);
    assert!(reason(&scan, "d1").contains("does not say"));
}

#[test]
fn hostile_sysfs_is_read_within_bounds() {
    let mut machine = Machine::new();
    let path = "pci0000:00/0000:00:03.0";
    machine.device(path, "pci", &[("vendor", &"x".repeat(100_000)), ("device", ""), ("sriov_totalvfs", "many")]);
    fs::write(machine.dir.path().join("devices").join(path).join("subsystem_device"), [0xff, 0xfe, b'\n']).unwrap();
    machine.netdev(Some(path), 0, nic("eth0", 1));
    // A link out of the tree is not followed.
    let at = machine.dir.path().join("devices").join(path).join("net/eth0/device");
    let scan = machine.scan(&[], None);
    let attributes = &device(&scan, "pci-0000-00-03-0").attributes;
    assert_eq!(attributes["pciVendor"], text(&"x".repeat(64)));
    assert_eq!(attributes["pciSubsystem"], text("\u{fffd}\u{fffd}"));
    assert!(!attributes.contains_key("pciDevice"));
    fs::remove_file(&at).unwrap();
    symlink("/proc", &at).unwrap();
    let scan = machine.scan(&[], None);
    assert_eq!(scan.devices, []);
    assert!(reason(&scan, "eth0").contains("can't be told"));
}

#[test]
fn pkeys_of_a_port_are_read_in_the_order_of_its_table() {
    let machine = Machine::new();
    machine.rdma("pci0000:00/0000:08:00.0", "mlx5_0");
    for (index, pkey) in
        [("0", "0xffff\n"), ("10", "0x0002\n"), ("2", "0x8001\n"), ("3", "0x0000\n"), ("4", "0x8000\n"), ("5", "x\n")]
    {
        machine.write(&format!("devices/pci0000:00/0000:08:00.0/infiniband/mlx5_0/ports/1/pkeys/{index}"), pkey);
    }
    let pkeys = |port| Sysfs::new(machine.dir.path()).pkeys(&crate::names::RdmaDeviceName::new("mlx5_0").unwrap(), port);
    assert_eq!(pkeys(1), [0xffff, 0x8001, 0x0002]);
    assert_eq!(pkeys(2), [] as [u16; 0]);
}
