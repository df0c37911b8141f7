//! RDMA devices that come, are renamed, move and go: the inventory knows by events, and soon. In the virtual machine of `e2e/vm`
//! (`make e2e-vm`), in exclusive mode for the move.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Inventory, InventoryConfig, Scan, ScanOptions};
use dranic::rdma::{NetnsMode, RdmaMonitor, RdmaSocket};
use pci::{Guest, run, soon};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Until a change must be known. On a usual machine that is a second (100 ms of quiet after an event, and a look); the guest's processor
/// is emulated. The full look would come after an hour.
const SOON: Duration = Duration::from_secs(15);

struct World {
    guest: Guest,
    inventory: Inventory,
    scans: watch::Receiver<Arc<Scan>>,
    stop: CancellationToken,
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.cancel();
        for name in ["erxe0", "erxe1"] {
            let _ = Command::new("rdma").args(["link", "delete", name]).output();
        }
        let _ = Command::new("ip").args(["link", "del", "everb0"]).output();
    }
}

impl World {
    async fn new() -> Option<Self> {
        let guest = Guest::new()?;
        run("ip link add everb0 address 02:00:00:00:79:01 type veth peer name everb1");
        let config = InventoryConfig {
            netns: guest.host.try_clone().unwrap(),
            sysfs: Sysfs::new("/sys"),
            options: ScanOptions { offer_veth: true, ..ScanOptions::default() },
            // Events alone are to tell.
            rescan: Duration::from_secs(3600),
        };
        let stop = CancellationToken::new();
        let inventory = Inventory::start(config, Arc::new(Vec::new), stop.clone()).await.unwrap();
        Some(Self { guest, scans: inventory.subscribe(), inventory, stop })
    }

    /// The name of the RDMA device over the link, as soon as it is `wanted`.
    async fn becomes(&mut self, what: &str, wanted: Option<&str>) {
        let start = Instant::now();
        let is_it = |scan: &Arc<Scan>| {
            let device = scan.devices.iter().find(|d| d.link.as_ref().is_some_and(|link| link.name == "everb0"));
            device.is_some_and(|d| d.rdma.as_ref().map(|rdma| rdma.name.as_str()) == wanted)
        };
        let found = tokio::time::timeout(SOON, self.scans.wait_for(is_it)).await.is_ok();
        assert!(found, "{what}: not within {SOON:?}; now: {:#?}", self.inventory.current().devices);
        println!("{what}: known after {} ms", start.elapsed().as_millis());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happens_to_rdma_devices_is_known_by_events() {
    let Some(mut world) = World::new().await else { return };
    world.becomes("none", None).await;
    let mut outside = RdmaMonitor::open(&world.guest.host, true).unwrap();
    run("rdma link add erxe0 type rxe netdev everb0");
    let start = Instant::now();
    tokio::time::timeout(SOON, outside.changed()).await.expect("an event").unwrap();
    println!("an event: heard after {} ms", start.elapsed().as_millis());
    world.becomes("added", Some("erxe0")).await;
    run("rdma dev set erxe0 name erxe1");
    world.becomes("renamed", Some("erxe1")).await;
    let mut socket = RdmaSocket::open().unwrap().unwrap();
    if socket.netns_mode(soon()).unwrap() == NetnsMode::Exclusive {
        let pod = world.guest.pod("events").netns().unwrap();
        let index = socket.devices(soon()).unwrap().into_iter().find(|d| d.name == "erxe1").unwrap().index;
        // Whoever listens in the namespace hears of it, too.
        let mut inside = RdmaMonitor::open(&pod, true).unwrap();
        socket.move_to(&world.guest.host, index, pod.as_fd(), soon()).unwrap();
        world.becomes("moved away", None).await;
        tokio::time::timeout(SOON, inside.changed()).await.expect("heard in the pod").unwrap();
        let mut there = RdmaSocket::open_in(&pod).unwrap().unwrap();
        there.move_to(&pod, index, world.guest.host.as_fd(), soon()).unwrap();
        world.becomes("moved back", Some("erxe1")).await;
    }
    run("rdma link delete erxe1");
    world.becomes("deleted", None).await;
}
