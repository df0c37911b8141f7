//! RDMA devices in sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{ENTRIES_MAX, PciFunction, Sysfs, file_name, link_name, text};
use crate::rdma::Guid;

/// What sysfs knows of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaFacts {
    /// `mlx5_0`.
    pub name: String,
    /// Path of the device it belongs to, below the root.
    pub device_path: Option<PathBuf>,
    /// Bus and name of that device.
    pub device: Option<(String, String)>,
    /// The PCI function that is this device, or that carries it.
    pub pci: Option<PciFunction>,
    /// NUMA node of the device; none where there is no affinity.
    pub numa_node: Option<u32>,
    /// Name of the link it runs over, for one without hardware (rxe).
    pub over: Option<String>,
    /// `node_guid`; none where it is zero.
    pub node_guid: Option<Guid>,
    /// `node_type`: `enum rdma_node_type`, `rdma/ib_verbs.h`.
    pub node_type: Option<u8>,
    /// Whether it has a character device for verbs.
    pub has_verbs: bool,
    /// By number, from 1.
    pub ports: BTreeMap<u32, RdmaPortFacts>,
}

/// What sysfs knows of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaPortFacts {
    /// `Ethernet`, `InfiniBand`, `Unknown`.
    pub link_layer: Option<String>,
    /// It carries traffic.
    pub is_active: bool,
    /// Gbit/s, rounded down. That of a port which is not active is what its driver made up.
    pub rate: Option<u32>,
    /// The lower half of the first GID: on InfiniBand the port's GUID.
    pub guid: Option<Guid>,
}

impl Sysfs {
    /// Whether the kernel has RDMA (its module `ib_core`) at all.
    #[must_use]
    pub fn has_rdma(&self) -> bool {
        self.root.join("class/infiniband").is_dir()
    }

    /// All RDMA devices that the tree's namespace sees, `mlx5_2` before `mlx5_10`.
    #[must_use]
    pub fn rdma_devices(&self) -> Vec<RdmaFacts> {
        let with_verbs = self.with_verbs();
        let mut devices: Vec<_> =
            entries(&self.root.join("class/infiniband")).map(|path| self.rdma_device(&path, &with_verbs)).collect();
        devices.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
        devices
    }

    fn rdma_device(&self, class: &Path, with_verbs: &BTreeSet<String>) -> RdmaFacts {
        let name = file_name(class).unwrap_or_default();
        let device_path = self.resolve(&class.join("device"));
        let bus = |path: &PathBuf| link_name(&self.root.join(path).join("subsystem")).zip(file_name(path));
        let device = device_path.as_ref().and_then(bus);
        RdmaFacts {
            pci: device_path.as_ref().zip(device.as_ref()).and_then(|(path, (bus, _))| self.pci_of(path, bus)),
            numa_node: device_path.as_ref().and_then(|path| self.numa_node(path)),
            device_path,
            device,
            over: text(&class.join("parent")),
            node_guid: text(&class.join("node_guid")).and_then(|text| guid(&text)),
            node_type: text(&class.join("node_type")).and_then(|text| numbered(&text)),
            has_verbs: with_verbs.contains(&name),
            ports: entries(&class.join("ports")).filter_map(|path| port(&path)).collect(),
            name,
        }
    }

    /// Names of the RDMA devices with a character device for verbs.
    fn with_verbs(&self) -> BTreeSet<String> {
        entries(&self.root.join("class/infiniband_verbs")).filter_map(|path| text(&path.join("ibdev"))).collect()
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().take(ENTRIES_MAX).map(|entry| entry.path())
}

fn port(path: &Path) -> Option<(u32, RdmaPortFacts)> {
    let number = file_name(path)?.parse().ok().filter(|number| *number > 0)?;
    let at = |name: &str| text(&path.join(name));
    let facts = RdmaPortFacts {
        link_layer: at("link_layer"),
        is_active: at("state").and_then(|text| numbered(&text)) == Some(PORT_ACTIVE),
        rate: at("rate").and_then(|text| gigabits(&text)),
        guid: at("gids/0").and_then(|gid| guid(gid.split_at_checked(GID_TEXT / 2)?.1.strip_prefix(':')?)),
    };
    Some((number, facts))
}

/// `IB_PORT_ACTIVE` of `enum ib_port_state`, `rdma/ib_verbs.h`.
const PORT_ACTIVE: u8 = 4;
/// Length of a GID as sysfs writes it: eight groups of four digits.
const GID_TEXT: usize = 39;

fn guid(text: &str) -> Option<Guid> {
    text.parse().ok().filter(|guid: &Guid| guid.0 != 0)
}

/// The number of `4: ACTIVE`.
fn numbered(text: &str) -> Option<u8> {
    text.split_once(':')?.0.trim().parse().ok()
}

/// The whole number of `100 Gb/sec (4X EDR)`, or of `2.5 Gb/sec (1X SDR)`.
fn gigabits(text: &str) -> Option<u32> {
    let (number, unit) = text.split_once(' ')?;
    number.split('.').next().filter(|_| unit.starts_with("Gb/sec"))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_files_are_read() {
        assert_eq!(
            (numbered("4: ACTIVE"), numbered("1: CA"), numbered("ACTIVE"), numbered("x: y")),
            (Some(4), Some(1), None, None)
        );
        for (text, rate) in [
            ("100 Gb/sec (4X EDR)", Some(100)),
            ("2.5 Gb/sec (1X SDR)", Some(2)),
            ("9", None),
            ("9 Mb/sec", None),
            ("-1 Gb/sec", None),
        ] {
            assert_eq!(gigabits(text), rate, "{text}");
        }
    }
}
