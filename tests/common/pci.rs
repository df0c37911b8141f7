//! The virtual machine's PCI NICs (`e2e/vm`) with an engine over them. The host is the guest's own namespace, where the kernel returns
//! hardware to.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dranic::attach::Engine;
use dranic::attach::engine::DeviceSource;
use dranic::inventory::sysfs::Sysfs;
use dranic::inventory::{Device, Scan, ScanOptions, watch};
use dranic::ledger::Ledger;
use dranic::names::DeviceName;
use dranic::netdev::address::IFA_F_TENTATIVE;
use dranic::netdev::host_state::{self, Snapshot};
use dranic::netdev::{HostState, Link, link, moves};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use dranic_testbed::fabric::{PodDir, PodNetns};

/// Slow: the guest's processor is emulated.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Polls until `look` gives something.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = soon();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs one line of a program.
pub(crate) fn run(line: &str) {
    let mut words = line.split_whitespace();
    let out = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
}

pub(crate) fn write(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Looks at the guest as the agent does.
struct Whole;

impl DeviceSource for Whole {
    fn current(&self) -> Arc<Scan> {
        Arc::new(watch::once(&Sysfs::new("/sys"), ScanOptions::default()).unwrap())
    }

    fn rescan(&self) -> Arc<Scan> {
        self.current()
    }
}

pub(crate) struct Guest {
    pub(crate) host: Netns,
    pods: PodDir,
    state: PathBuf,
    _dir: tempfile::TempDir,
}

impl Guest {
    /// The machine, if it is the one whose NICs tests may do with as they like. Else none, and a line that says so.
    pub(crate) fn new() -> Option<Self> {
        // What run.sh of e2e/vm gives to its kernel.
        if !fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains("vm.control=")) {
            println!("skipped: needs PCI NICs that a test may use (make e2e-vm)");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let pods = PodDir::new(&dir.path().join("pods")).unwrap();
        Some(Self { host: Netns::current().unwrap(), pods, state: dir.path().join("state"), _dir: dir })
    }

    pub(crate) fn engine(&self) -> Engine {
        self.engine_with(Arc::new(Whole))
    }

    /// With another look at the machine.
    pub(crate) fn engine_with(&self, source: Arc<dyn DeviceSource>) -> Engine {
        let (ledger, bad) = Ledger::open(&self.state).unwrap();
        assert_eq!(bad, vec![]);
        Engine::new(Arc::new(ledger), self.host.try_clone().unwrap(), "boot-1".to_owned(), source)
    }

    /// Where engines keep their ledger.
    pub(crate) fn state_dir(&self) -> &Path {
        &self.state
    }

    pub(crate) fn pod(&self, name: &str) -> PodNetns {
        self.pods.pod(name).unwrap()
    }

    /// The PCI function of NIC number `n`: e2e/vm/topology.py gives each NIC its address.
    pub(crate) fn function(&self, n: u8) -> String {
        let wanted = format!("52:54:00:aa:00:{n:02x}");
        let is_it = |l: &Link| l.perm_address.as_ref().is_some_and(|a| a.to_string() == wanted);
        // The kernel may still be bringing it back from a namespace of the test before.
        wait_for(&format!("NIC {wanted}"), || self.links().into_iter().find(is_it)).parent_device.unwrap().name
    }

    /// NIC number `n` as a driver that was just loaded leaves it, but called `nic<n>`.
    pub(crate) fn fresh(&self, n: u8) -> Nic {
        let nic = Nic { function: self.function(n) };
        nic.unplug();
        nic.plug();
        let link = self.link(&nic);
        run(&format!("ip link set {} name nic{n}", link.name));
        nic
    }

    /// Where the NIC is on the host, by what it is.
    pub(crate) fn link(&self, nic: &Nic) -> Link {
        wait_for(&nic.function, || self.find(nic))
    }

    pub(crate) fn find(&self, nic: &Nic) -> Option<Link> {
        self.links().into_iter().find(|l| l.parent_device.as_ref().is_some_and(|p| p.name == nic.function))
    }

    pub(crate) fn links(&self) -> Vec<Link> {
        link::list(&mut RouteSocket::open_in(&self.host).unwrap(), soon()).unwrap()
    }

    pub(crate) fn device(&self, nic: &Nic) -> Device {
        let scan = Whole.current();
        let is_it =
            |d: &&Device| d.link.as_ref().is_some_and(|l| l.parent_device.as_ref().is_some_and(|p| p.name == nic.function));
        scan.devices.iter().find(is_it).unwrap_or_else(|| panic!("{} is not offered: {:?}", nic.function, scan.withheld)).clone()
    }

    pub(crate) fn name(&self, nic: &Nic) -> DeviceName {
        self.device(nic).name
    }

    /// Moves a link by hand; it keeps its name.
    pub(crate) fn carry(&self, from: &Netns, to: &Netns, name: &str) {
        let mut socket = RouteSocket::open_in(from).unwrap();
        let index = link::by_name(&mut socket, name, soon()).unwrap().unwrap().index;
        let m = moves::Move { index, target: to.as_fd(), new_index: index, name: name.to_owned(), mtu: None, address: None };
        socket.request(moves::request(&m), soon()).unwrap();
    }

    /// What the NIC is on the host, once nothing is on its way any more.
    pub(crate) fn state(&self, nic: &Nic) -> HostState {
        wait_for("carrier and addresses", || {
            let seen = Snapshot::take(&mut RouteSocket::open_in(&self.host).unwrap(), soon()).unwrap();
            let link = seen.links.iter().find(|l| l.parent_device.as_ref().is_some_and(|p| p.name == nic.function))?;
            let tentative = seen.addresses.iter().any(|(i, a)| *i == link.index && a.flags & IFA_F_TENTATIVE != 0);
            let settled = !tentative && (!link.is_up() || link.oper_state == "up");
            settled.then(|| self.host.run(|| seen.host_state(link.index)).unwrap().unwrap())
        })
    }

    pub(crate) fn assert_same(&self, before: &HostState, nic: &Nic) {
        // Routes and link-local addresses follow the carrier by some moments.
        let end = soon();
        loop {
            let differences = host_state::compare(before, &self.state(nic));
            if differences.is_empty() {
                return;
            }
            assert!(Instant::now() < end, "{differences:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Guest {
    /// What a test leaves beside the NICs, also one that failed: the next one shall not fail for that.
    fn drop(&mut self) {
        for line in [
            "ip rule del priority 1000",
            "ip link del br7",
            "ip link del bond7",
            "ip link del red7",
            "ip link del nic0 type bridge",
        ] {
            let _ = Command::new("sh").args(["-c", &format!("{line} 2>/dev/null")]).status();
        }
    }
}

/// A NIC of the machine, by its PCI function.
#[derive(Debug, Clone)]
pub(crate) struct Nic {
    pub(crate) function: String,
}

impl Nic {
    pub(crate) fn sysfs(&self) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(&self.function)
    }

    /// As a NIC that is pulled out.
    pub(crate) fn unplug(&self) {
        write(self.sysfs().join("driver/unbind"), &self.function);
    }

    pub(crate) fn plug(&self) {
        write("/sys/bus/pci/drivers_probe", &self.function);
    }
}
