//! What sysfs says of links and PCI functions. The root is given, so that tests can bring a tree of their own.
//!
//! Every file is read up to 4 KiB, and one that can't be read is as one that is not there. Links that lead out of the tree are
//! not followed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Longest text read from one file, bytes: a page, more than sysfs ever gives.
const FILE_MAX: u64 = 4096;
/// Most entries of one folder that are looked at.
const ENTRIES_MAX: usize = 4096;

/// A sysfs tree.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
    /// Root of the tree that says where links are, in tests.
    places: Option<PathBuf>,
}

/// A PCI function.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PciFunction {
    /// `0000:8a:00.0`.
    pub address: String,
    /// `pci0000:80`, when the device path begins with it. (A root below another device, such as a virtual function that Hyper-V
    /// passes through, is none: Kubernetes' own helper gives none there either, and drivers must agree on this attribute.)
    pub root: Option<String>,
    /// Vendor id as `0x15b3`.
    pub vendor: Option<String>,
    /// Device id.
    pub device: Option<String>,
    /// Subsystem device id.
    pub subsystem: Option<String>,
    /// Name of the bound driver.
    pub driver: Option<String>,
    /// Address of the physical function, for a virtual function.
    pub physical_function: Option<String>,
    /// Its number among those of the physical function, for a virtual function.
    pub vf_index: Option<u32>,
    /// `sriov_totalvfs`: virtual functions it could have.
    pub sriov_total: u32,
    /// `sriov_numvfs`: virtual functions it has.
    pub sriov_vfs: u32,
}

/// Which virtual function, of which physical one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualFunction {
    /// PCI address of the physical function.
    pub pf: String,
    /// Number among its virtual functions, from 0.
    pub index: u32,
}

/// What sysfs knows of a link.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkFacts {
    /// Below `/sys/devices/virtual`: there is no device behind it.
    pub is_virtual: bool,
    /// Bus and name of the device that it directly belongs to: (`pci`, `0000:8a:00.0`), (`virtio`, `virtio2`), …
    pub device: Option<(String, String)>,
    /// Path of that device below the root.
    pub device_path: Option<PathBuf>,
    /// The PCI function that is this device, or that carries it (virtio, auxiliary).
    pub pci: Option<PciFunction>,
    /// NUMA node of the device; none where there is no affinity.
    pub numa_node: Option<u32>,
    /// Port of the device, from 0.
    pub dev_port: u32,
}

impl LinkFacts {
    /// Of a link that sysfs does not have.
    pub(super) const NONE: Self =
        Self { is_virtual: false, device: None, device_path: None, pci: None, numa_node: None, dev_port: 0 };
}

/// What sysfs knows of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaFacts {
    /// `mlx5_0`.
    pub name: String,
    /// Path of the device it belongs to, below the root.
    pub device_path: Option<PathBuf>,
    /// Name of the link it runs over, for one without hardware (rxe).
    pub over: Option<String>,
}

impl Sysfs {
    /// The tree below `root` (`/sys`).
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), places: None }
    }

    /// Where links are (PCI function and root, NUMA node) is said by the tree below `places`, of those that it has. Only attributes
    /// come from it: what a device is stays what netlink shows, since in a pod there is nothing else to know it by.
    #[must_use]
    pub fn with_places(self, places: Option<PathBuf>) -> Self {
        Self { places, ..self }
    }

    /// Where the link is, if the tree of places has it.
    pub(super) fn place(&self, name: &str, index: u32) -> Option<LinkFacts> {
        Self::new(self.places.as_ref()?).link(name, index).ok().flatten()
    }

    /// Path of the root.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What is known of the link called `name` with `index`; none when it is not there.
    ///
    /// # Errors
    /// When another link has that name by now: look at the links again.
    pub fn link(&self, name: &str, index: u32) -> Result<Option<LinkFacts>, String> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Ok(None);
        }
        let class = self.root.join("class/net").join(name);
        let Some(path) = self.resolve(&class) else { return Ok(None) };
        let Some(there) = number(&class.join("ifindex")) else { return Ok(None) };
        if there != index {
            return Err(format!("link {name} has index {index} for netlink and {there} in sysfs"));
        }
        let mut facts = LinkFacts { is_virtual: path.starts_with("devices/virtual"), ..LinkFacts::default() };
        if let Some(device_path) = self.resolve(&class.join("device")) {
            let device = self.root.join(&device_path);
            facts.device = link_name(&device.join("subsystem")).zip(file_name(&device_path));
            facts.pci = self.pci_of(&device_path, facts.device.as_ref().map_or("", |(bus, _)| bus));
            facts.numa_node = self.numa_node(&device_path);
            facts.dev_port = number(&class.join("dev_port")).unwrap_or(0);
            facts.device_path = Some(device_path);
        }
        Ok(Some(facts))
    }

    /// Speed of the link, bits per second; none where the driver does not know it, or has no carrier.
    #[must_use]
    pub fn speed(&self, name: &str) -> Option<u64> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return None;
        }
        // Mbit/s (`Documentation/ABI/testing/sysfs-class-net`); -1 where it is unknown.
        let megabits: i64 = text(&self.root.join("class/net").join(name).join("speed"))?.parse().ok()?;
        u64::try_from(megabits).ok().filter(|speed| *speed > 0)?.checked_mul(1_000_000)
    }

    /// All RDMA devices, `mlx5_2` before `mlx5_10`.
    #[must_use]
    pub fn rdma_devices(&self) -> Vec<RdmaFacts> {
        let class = self.root.join("class/infiniband");
        let entries = std::fs::read_dir(&class).into_iter().flatten().flatten().take(ENTRIES_MAX);
        let mut devices: Vec<_> = entries
            .map(|entry| RdmaFacts {
                name: entry.file_name().to_string_lossy().into_owned(),
                device_path: self.resolve(&entry.path().join("device")),
                over: text(&entry.path().join("parent")),
            })
            .collect();
        devices.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        devices
    }

    /// The ports of each RDMA device, with their states as the kernel spells them: `ACTIVE`, `DOWN`, `INIT`, `ARMED`, ….
    /// (`ports/N/state` is `4: ACTIVE`; states in `enum ib_port_state`, `rdma/ib_verbs.h`.)
    #[must_use]
    pub fn rdma_ports(&self) -> BTreeMap<String, BTreeMap<u32, String>> {
        let class = self.root.join("class/infiniband");
        let ports = |name: &str| {
            let folder = class.join(name).join("ports");
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten().take(ENTRIES_MAX);
            entries.filter_map(|entry| {
                let state = text(&entry.path().join("state"))?;
                let state = state.split_once(':').map_or(state.as_str(), |(_, word)| word.trim());
                Some((entry.file_name().to_str()?.parse().ok()?, state.to_owned()))
            })
        };
        let devices = self.rdma_devices();
        devices.iter().map(|device| (device.name.clone(), ports(&device.name).collect())).collect()
    }

    /// The PCI function nearest to the device at `path`. A device on a bus of its own that merely hangs behind a PCI function (a
    /// USB adapter behind its controller) is not that function.
    fn pci_of(&self, path: &Path, bus: &str) -> Option<PciFunction> {
        if !["pci", "virtio", "auxiliary"].contains(&bus) {
            return None;
        }
        let path = path.ancestors().find(|p| file_name(p).is_some_and(|name| is_pci_address(&name)))?;
        let function = self.root.join(path);
        Some(PciFunction {
            address: file_name(path)?,
            root: pci_root(path),
            vendor: text(&function.join("vendor")),
            device: text(&function.join("device")),
            subsystem: text(&function.join("subsystem_device")),
            driver: link_name(&function.join("driver")),
            physical_function: link_name(&function.join("physfn")),
            vf_index: vf_index(&function),
            sriov_total: number(&function.join("sriov_totalvfs")).unwrap_or(0),
            sriov_vfs: number(&function.join("sriov_numvfs")).unwrap_or(0),
        })
    }

    /// What virtual function the PCI function `address` is; none when it is none.
    #[must_use]
    pub fn virtual_function(&self, address: &str) -> Option<VirtualFunction> {
        let function = self.root.join("bus/pci/devices").join(Some(address).filter(|address| is_pci_address(address))?);
        Some(VirtualFunction { pf: link_name(&function.join("physfn"))?, index: vf_index(&function)? })
    }

    /// Whether the device called `name` on `bus` has a link or an RDMA device, in whichever network namespace: sysfs hides these, but not
    /// the folder that they are in. It may belong to a device directly below (virtio, auxiliary).
    #[must_use]
    pub fn has_interface(&self, bus: &str, name: &str) -> bool {
        let is_part = |text: &str| !text.is_empty() && !text.starts_with('.') && !text.contains(['/', '\0']);
        if !is_part(bus) || !is_part(name) {
            return false;
        }
        let device = self.root.join("bus").join(bus).join("devices").join(name);
        let has = |folder: &Path| ["net", "infiniband"].iter().any(|class| folder.join(class).is_dir());
        let below = std::fs::read_dir(&device).into_iter().flatten().flatten().take(ENTRIES_MAX);
        // Not by symbolic links: they lead to other devices.
        has(&device) || below.filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir())).any(|entry| has(&entry.path()))
    }

    /// The node of the device or of the nearest one above that names one.
    fn numa_node(&self, path: &Path) -> Option<u32> {
        let texts = path.ancestors().filter_map(|p| text(&self.root.join(p).join("numa_node")));
        // -1 is "none"; what is above can't know better.
        texts.take(1).find_map(|t| t.parse().ok())
    }

    /// Where `path` leads, below the root; none when it is not there or leads elsewhere.
    fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let root = std::fs::canonicalize(&self.root).ok()?;
        Some(std::fs::canonicalize(path).ok()?.strip_prefix(root).ok()?.to_owned())
    }
}

/// `DDDD:BB:DD.F`, as the kernel writes it. A domain has four or more digits.
#[must_use]
pub fn is_pci_address(text: &str) -> bool {
    let hex = |part: &str| !part.is_empty() && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let Some((rest, function)) = text.rsplit_once('.') else { return false };
    let parts: Vec<_> = rest.splitn(4, ':').collect();
    let [domain, bus, device] = parts[..] else { return false };
    (4..=8).contains(&domain.len())
        && (bus.len(), device.len()) == (2, 2)
        && [domain, bus, device].into_iter().all(hex)
        && matches!(function.as_bytes(), [b'0'..=b'7'])
}

/// Number of a virtual function. Routing ids (bus, device, function) of a physical function's virtual ones begin `sriov_offset` behind
/// its own and are `sriov_stride` apart (PCI Express base specification, 9.3.3.9); `virtfnN` confirms it.
fn vf_index(function: &Path) -> Option<u32> {
    let pf = function.join("physfn");
    let own = std::fs::canonicalize(function).ok().and_then(|path| file_name(&path))?;
    let (offset, stride) = (number(&pf.join("sriov_offset"))?, number(&pf.join("sriov_stride"))?);
    let behind = routing_id(&own)?.checked_sub(routing_id(&link_name(&pf)?)?)?.checked_sub(offset)?;
    // One that has a single function may have a stride of 0.
    let index = behind.checked_div(stride).unwrap_or(0);
    (link_name(&pf.join(format!("virtfn{index}"))).as_ref() == Some(&own)).then_some(index)
}

/// Bus, device and function of an address as one number.
fn routing_id(address: &str) -> Option<u32> {
    let (rest, function) = Some(address).filter(|address| is_pci_address(address))?.rsplit_once('.')?;
    let mut parts = rest.rsplit(':').map(|part| u32::from_str_radix(part, 16));
    let (device, bus) = (parts.next()?.ok()?, parts.next()?.ok()?);
    Some(bus << 8 | device << 3 | function.parse::<u32>().ok()?)
}

fn pci_root(path: &Path) -> Option<String> {
    let root = path.strip_prefix("devices").ok()?.iter().next()?.to_str()?;
    let (domain, bus) = root.strip_prefix("pci")?.split_once(':')?;
    is_pci_address(&format!("{domain}:{bus}:00.0")).then(|| root.to_owned())
}

fn file_name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// Last part of where a symbolic link points.
fn link_name(path: &Path) -> Option<String> {
    file_name(&std::fs::read_link(path).ok()?)
}

/// The file's text without white space around it; none when there is no other.
fn text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(FILE_MAX).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn number(path: &Path) -> Option<u32> {
    text(path)?.parse().ok()
}
