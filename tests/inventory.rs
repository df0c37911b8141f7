//! The inventory of real namespaces. Their sysfs is empty: what netlink tells of virtual links is enough.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Attribute, Device, Inventory, InventoryConfig, Lent, Scan, ScanOptions};
use dranic::netdev::{Link, Route, route};
use dranic::netlink::{Request, RouteSocket};
use dranic::netns::Netns;
use dranic_testbed::fabric::links::{self, Veth, find, soon};
use dranic_testbed::fabric::{new_netns, root};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// `NLM_F_CREATE | NLM_F_EXCL`, `linux/netlink.h`.
const NEW: u16 = 0x600;

/// A host: a namespace, a socket in it, and its inventory with what is lent.
struct Host {
    netns: Netns,
    socket: RouteSocket,
    lent: Arc<Mutex<Vec<Lent>>>,
    sysfs: tempfile::TempDir,
    stop: CancellationToken,
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Host {
    fn new() -> Self {
        let netns = new_netns().unwrap();
        Self {
            socket: RouteSocket::open_in(&netns).unwrap(),
            netns,
            lent: Arc::default(),
            sysfs: tempfile::tempdir().unwrap(),
            stop: CancellationToken::new(),
        }
    }

    async fn start(&self, offer_veth: bool) -> Inventory {
        let config = InventoryConfig {
            netns: self.netns.try_clone().unwrap(),
            sysfs: Sysfs::new(self.sysfs.path()),
            options: ScanOptions { offer_veth, ..ScanOptions::default() },
            rescan: Duration::from_secs(3600),
        };
        let lent = Arc::clone(&self.lent);
        Inventory::start(config, Arc::new(move || lent.lock().unwrap().clone()), self.stop.clone()).await.unwrap()
    }

    fn change(&mut self, link: LinkMessage, flags: u16) {
        self.socket.request(Request { message: RouteNetlinkMessage::NewLink(link), flags }, soon()).unwrap();
    }

    /// A link of `kind` on top of another.
    fn child(&mut self, kind: InfoKind, name: &str, lower: &str) {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        message.attributes.push(LinkAttribute::Link(self.find(lower).index));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]));
        self.change(message, NEW);
    }

    fn rename(&mut self, from: &str, to: &str) {
        let mut message = LinkMessage::default();
        message.header.index = self.find(from).index;
        message.attributes.push(LinkAttribute::IfName(to.to_owned()));
        self.change(message, 0);
    }

    fn find(&mut self, name: &str) -> Link {
        find(&mut self.socket, name).unwrap()
    }

    fn ifb(&mut self, name: &str) {
        links::create(&mut self.socket, "ifb", name).unwrap();
    }

    fn add_default_route(&mut self, link: &str, gateway: &str, table: u32) {
        let index = self.find(link).index;
        let gateway: IpAddr = gateway.parse().unwrap();
        let all = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
        let route = Route { gateway: Some(gateway), table, ..Route::to(all.parse().unwrap()) };
        self.socket.request(route::add_request(index, &route, false), soon()).unwrap();
    }
}

fn offered(scan: &Scan) -> BTreeSet<&str> {
    scan.devices.iter().filter_map(|d| d.link.as_ref()).map(|link| link.name.as_str()).collect()
}

fn reason<'a>(scan: &'a Scan, link: &str) -> &'a str {
    &scan.withheld.iter().find(|w| w.link == link).unwrap_or_else(|| panic!("{link} is offered")).reason
}

fn device(scan: &Scan, link: &str) -> Device {
    scan.devices.iter().find(|d| d.link.as_ref().is_some_and(|l| l.name == link)).unwrap().clone()
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

/// Waits up to a second for a scan that has what is wanted, and returns how long that took.
async fn becomes(scans: &mut watch::Receiver<Arc<Scan>>, wanted: impl FnMut(&Arc<Scan>) -> bool) -> Duration {
    let start = Instant::now();
    let found = tokio::time::timeout(Duration::from_secs(1), scans.wait_for(wanted)).await.is_ok();
    assert!(found, "not within a second; now: {:#?}", scans.borrow());
    start.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uplinks_and_what_hangs_on_them_are_withheld_as_soon_as_they_are() {
    if !root() {
        return;
    }
    let mut host = Host::new();
    // A veth goes with the namespace of its other end, so that is kept.
    let far = new_netns().unwrap();
    for (name, peer) in [("up0", "far0"), ("nic0", "far1"), ("nic2", "far2")] {
        Veth { name, peer, peer_netns: Some(&far), ..Veth::default() }.create(&mut host.socket).unwrap();
    }
    host.child(InfoKind::MacVlan, "mac0", "up0");
    host.child(InfoKind::MacVlan, "mac1", "nic0");
    links::create(&mut host.socket, "bridge", "br0").unwrap();
    host.ifb("free0");
    let inventory = host.start(true).await;
    assert_eq!(offered(&inventory.current()), BTreeSet::from(["up0", "nic0", "nic2", "mac0", "mac1", "free0"]));
    assert!(reason(&inventory.current(), "br0").contains("bridge"));
    assert!(reason(&inventory.current(), "lo").contains("loopback"));

    let mut scans = inventory.subscribe();
    let index = host.find("up0").index;
    links::add_address(&mut host.socket, index, "192.0.2.2/24".parse().unwrap()).unwrap();
    links::up(&mut host.socket, "up0").unwrap();
    host.add_default_route("up0", "192.0.2.1", 254);
    let took = becomes(&mut scans, |scan| !offered(scan).contains("up0")).await;
    println!("a default route was seen after {took:?}");
    let scan = inventory.current();
    assert_eq!(offered(&scan), BTreeSet::from(["nic0", "nic2", "mac1", "free0"]));
    assert!(reason(&scan, "up0").contains("IPv4 default route (table main)"), "{}", reason(&scan, "up0"));
    assert!(reason(&scan, "mac0").contains("on top of up0"), "{}", reason(&scan, "mac0"));

    // Another family, another table, by way of a bridge.
    let (bridge, port) = (host.find("br0").index, host.find("nic2").index);
    links::set_master(&mut host.socket, port, bridge).unwrap();
    links::add_address(&mut host.socket, bridge, "2001:db8::2/64".parse().unwrap()).unwrap();
    links::up(&mut host.socket, "br0").unwrap();
    host.add_default_route("br0", "2001:db8::1", 1000);
    becomes(&mut scans, |scan| offered(scan) == BTreeSet::from(["nic0", "mac1", "free0"])).await;
    let scan = inventory.current();
    assert!(reason(&scan, "br0").contains("IPv6 default route (table 1000)"), "{}", reason(&scan, "br0"));
    assert!(reason(&scan, "nic2").contains("port of br0"), "{}", reason(&scan, "nic2"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_come_go_and_are_renamed_within_a_second() {
    if !root() {
        return;
    }
    let mut host = Host::new();
    host.ifb("nic0");
    let inventory = host.start(false).await;
    let mut scans = inventory.subscribe();
    let before = device(&inventory.current(), "nic0");

    host.rename("nic0", "Eth_0.10@b");
    becomes(&mut scans, |scan| offered(scan).contains("Eth_0.10@b")).await;
    let renamed = device(&inventory.current(), "Eth_0.10@b");
    assert_eq!((&renamed.name, &renamed.hardware), (&before.name, &before.hardware));
    assert_eq!(renamed.attributes["ifName"], Attribute::String("Eth_0.10@b".to_owned()));

    let index = host.find("Eth_0.10@b").index;
    links::add_address(&mut host.socket, index, "198.51.100.7/24".parse().unwrap()).unwrap();
    becomes(&mut scans, |scan| scan.devices[0].attributes.contains_key("ipv4")).await;

    // A flood: one look or two, not thirty.
    let mut looks = 0;
    for n in 0..30 {
        host.ifb(&format!("new{n}"));
        looks += u32::from(scans.has_changed().unwrap());
        scans.mark_unchanged();
    }
    becomes(&mut scans, |scan| offered(scan).len() == 31).await;
    assert!(looks <= 3, "{looks} looks while links came");
    links::delete(&mut host.socket, index).unwrap();
    becomes(&mut scans, |scan| offered(scan).len() == 30).await;

    // When nothing happens, nothing is told, and after the stop nothing is.
    tokio::time::sleep(Duration::from_millis(300)).await;
    scans.mark_unchanged();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!scans.has_changed().unwrap());
    host.stop.cancel();
    host.ifb("late");
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert!(!offered(&inventory.current()).contains("late"));
    assert!(offered(&*inventory.rescan_now().await).contains("late"), "on demand it is still found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lent_device_stays_as_it_was_while_a_pod_has_it_and_after_it_is_back() {
    if !root() {
        return;
    }
    let mut host = Host::new();
    host.ifb("nic0");
    host.ifb("nic1");
    let inventory = host.start(false).await;
    let mut scans = inventory.subscribe();
    let before = device(&inventory.current(), "nic0");

    // Prepared: recorded, still here.
    host.lent.lock().unwrap().push(lend(&before));
    links::up(&mut host.socket, "nic0").unwrap();
    let scan = inventory.rescan_now().await;
    let now = device(&scan, "nic0");
    assert_eq!((&now.name, &now.attributes), (&before.name, &before.attributes));
    assert!(now.link.unwrap().is_up(), "the link itself is as it is");

    // Gone.
    let pod = new_netns().unwrap();
    let mut message = LinkMessage::default();
    message.header.index = host.find("nic0").index;
    message.attributes.push(LinkAttribute::NetNsFd(pod.as_fd().as_raw_fd()));
    message.attributes.push(LinkAttribute::IfName("eth0".to_owned()));
    host.change(message, 0);
    becomes(&mut scans, |scan| scan.device(&before.name).is_some_and(|d| d.link.is_none())).await;
    let scan = inventory.current();
    assert_eq!(scan.device(&before.name).unwrap().attributes, before.attributes);
    assert_eq!(scan.devices.len(), 2);
    // A restarted agent has the same names.
    let restarted = host.start(false).await;
    assert_eq!(*restarted.current(), *scan);

    // Back, and given back.
    let mut in_pod = RouteSocket::open_in(&pod).unwrap();
    let mut message = LinkMessage::default();
    message.header.index = find(&mut in_pod, "eth0").unwrap().index;
    message.attributes.push(LinkAttribute::NetNsFd(host.netns.as_fd().as_raw_fd()));
    message.attributes.push(LinkAttribute::IfName("nic0".to_owned()));
    in_pod.request(Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }, soon()).unwrap();
    becomes(&mut scans, |scan| scan.device(&before.name).is_some_and(|d| d.link.is_some())).await;
    host.lent.lock().unwrap().clear();
    inventory.rescan();
    becomes(&mut scans, |scan| scan.device(&before.name).is_some_and(|d| d.attributes["state"] == before.attributes["state"]))
        .await;
    assert_eq!(inventory.current().devices.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_pods_are_not_offered() {
    if !root() {
        return;
    }
    let mut host = Host::new();
    let pod = new_netns().unwrap();
    Veth { name: "lxc1", peer: "eth0", peer_netns: Some(&pod), ..Veth::default() }.create(&mut host.socket).unwrap();
    links::create(&mut host.socket, "vxlan", "flannel.1").unwrap_or_else(|error| {
        // A vxlan needs parameters of its own on some kernels; a bridge shows the same.
        println!("no vxlan without parameters: {error:#}");
        links::create(&mut host.socket, "bridge", "flannel.1").unwrap();
    });
    let scan = host.start(false).await.current();
    assert_eq!(scan.devices, []);
    assert!(reason(&scan, "lxc1").contains("pod"), "{}", reason(&scan, "lxc1"));
    assert!(!reason(&scan, "flannel.1").is_empty());
}
