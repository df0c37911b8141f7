//! What the inventory makes of a real kernel's RDMA devices: over a PCI NIC, its virtual function, a link without hardware. In the
//! virtual machine of `e2e/vm` (`make e2e-vm`), in either mode.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::process::Command;
use std::time::Instant;

use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Attribute, Device, Lent, Scan, ScanOptions, watch};
use dranic::netlink::RouteSocket;
use dranic::rdma::{Protocol, RdmaSocket};
use pci::{Guest, Nic, run, soon, wait_for, write};

fn scan() -> Scan {
    watch::once(&Sysfs::new("/sys"), ScanOptions { offer_veth: true, ..ScanOptions::default() }).unwrap()
}

fn of_function<'a>(scan: &'a Scan, function: &str) -> &'a Device {
    let is_it = |d: &&Device| d.attributes.get("pciAddress") == Some(&text(function));
    scan.devices.iter().find(is_it).unwrap_or_else(|| panic!("{function} is not offered: {:?}", scan.withheld))
}

fn text(value: &str) -> Attribute {
    Attribute::String(value.to_owned())
}

fn part(device: &Device) -> Option<(&str, u32, Protocol)> {
    device.rdma.as_ref().map(|rdma| (rdma.name.as_str(), rdma.port, rdma.protocol))
}

/// RDMA devices that go with the test.
struct Soft;

impl Soft {
    fn add(&self, name: &str, kind: &str, link: &str) {
        run(&format!("rdma link add {name} type {kind} netdev {link}"));
    }
}

impl Drop for Soft {
    fn drop(&mut self) {
        for name in ["irxe0", "irxe1", "irxe2", "isiw0"] {
            let _ = Command::new("rdma").args(["link", "delete", name]).output();
        }
        let _ = Command::new("ip").args(["link", "del", "iveth0"]).output();
    }
}

#[test]
fn rdma_devices_belong_to_their_links_whatever_these_are() {
    let Some(guest) = Guest::new() else { return };
    let soft = Soft;
    let nic = guest.fresh(0);
    write(nic.sysfs().join("sriov_numvfs"), "1");
    let vf = Nic { function: vf_of(&nic) };
    let vf_link = guest.link(&vf).name;
    run("ip link set nic0 up");
    run(&format!("ip link set {vf_link} up"));
    run("ip link add iveth0 address 02:00:00:00:78:01 type veth peer name iveth1");
    soft.add("irxe0", "rxe", "nic0");
    soft.add("irxe1", "rxe", &vf_link);
    soft.add("isiw0", "siw", "iveth0");

    let scan = scan();
    let pf = of_function(&scan, &nic.function);
    assert_eq!(part(pf), Some(("irxe0", 1, Protocol::Roce)));
    assert_eq!(part(of_function(&scan, &vf.function)), Some(("irxe1", 1, Protocol::Roce)));
    let over = |name: &str| scan.devices.iter().find(|d| d.link.as_ref().is_some_and(|l| l.name == name)).unwrap();
    assert_eq!(part(over("iveth0")), Some(("isiw0", 1, Protocol::Iwarp)));
    assert_eq!(part(over("iveth1")), None);

    let mut socket = RdmaSocket::open().unwrap().unwrap();
    let mode = socket.netns_mode(soon()).unwrap();
    let device = socket.devices(soon()).unwrap().into_iter().find(|d| d.name == "irxe0").unwrap();
    for (name, value) in [
        ("rdma", Attribute::Bool(true)),
        ("rdmaDevice", text("irxe0")),
        ("rdmaPort", Attribute::Int(1)),
        ("rdmaProtocol", text("RoCE")),
        ("rdmaLinkLayer", text("Ethernet")),
        ("rdmaNodeGuid", text(&device.node_guid.unwrap().to_string())),
        ("rdmaNetnsMode", text(&mode.to_string())),
    ] {
        assert_eq!(pf.attributes.get(name), Some(&value), "{name}");
    }
    // The kernel counts what its own clients have, and no program has it open.
    let used = socket.resources(device.index, soon()).unwrap().unwrap();
    assert!(!used.is_used(), "{used}");
    assert_eq!(socket.resources(9999, soon()).unwrap(), None);
    write(nic.sysfs().join("sriov_numvfs"), "0");
}

fn vf_of(nic: &Nic) -> String {
    let link = std::fs::read_link(nic.sysfs().join("virtfn0")).unwrap();
    link.file_name().unwrap().to_str().unwrap().to_owned()
}

/// The link of a RoCE device is in a pod: that is no RDMA device without a link.
#[test]
fn a_roce_device_whose_link_is_away_is_not_taken_for_one_without() {
    let Some(guest) = Guest::new() else { return };
    let soft = Soft;
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    soft.add("irxe2", "rxe", "nic0");
    let before = scan();
    let device = of_function(&before, &nic.function).clone();
    let link = device.link.clone().unwrap();
    let pod = guest.pod("inventory");
    guest.carry(&guest.host, &pod.netns().unwrap(), "nic0");
    let start = Instant::now();
    let away = wait_for("the link to be away", || Some(scan()).filter(|_| guest.find(&nic).is_none()));
    assert!(away.devices.iter().all(|d| d.name != device.name && !d.is_rdma_only), "{:?}", away.devices);
    println!("RoCE without its link: {:?} after {:?}", away.withheld.iter().find(|w| w.link == "irxe2"), start.elapsed());
    let withheld = away.withheld.iter().find(|w| w.link == "irxe2").expect("it is said why");
    assert!(withheld.reason.contains("RoCE"), "{}", withheld.reason);
    assert_eq!(withheld.device, Some(device.name.clone()));
    // Lent, it is there and as it was.
    let lent = Lent {
        name: device.name.clone(),
        hardware: device.hardware.clone(),
        attributes: device.attributes.clone(),
        index: link.index,
        host_name: link.name.clone(),
        is_rdma_only: false,
    };
    let config = dranic::inventory::InventoryConfig {
        netns: guest.host.try_clone().unwrap(),
        sysfs: Sysfs::new("/sys"),
        options: ScanOptions::default(),
        rescan: std::time::Duration::from_secs(3600),
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let _context = runtime.enter();
    let lent_scan = runtime.block_on(async {
        dranic::inventory::Inventory::start(config, std::sync::Arc::new(move || vec![lent.clone()]), stop.clone()).await.unwrap()
    });
    let now = lent_scan.current();
    let there = now.devices.iter().find(|d| d.name == device.name).unwrap();
    assert_eq!((part(there), &there.attributes, &there.link), (part(&device), &device.attributes, &None));
    assert!(now.withheld.iter().all(|w| w.link != "irxe2"), "{:?}", now.withheld);
    stop.cancel();
    guest.carry(&pod.netns().unwrap(), &guest.host, "nic0");
    let mut socket = RouteSocket::open_in(&guest.host).unwrap();
    assert!(dranic::netdev::link::by_name(&mut socket, "nic0", soon()).unwrap().is_some());
}
