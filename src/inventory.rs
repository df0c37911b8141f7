//! Links and PCI functions as DRA devices with attributes.

mod attributes;
pub mod hardware;
pub(crate) mod policy;
pub mod rdma;
pub mod scan;
pub mod sysfs;
pub mod watch;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::names::{DeviceName, RdmaDeviceName};
use crate::netdev::Link;
use crate::rdma::{Guid, Protocol};

pub use hardware::HardwareId;
pub use watch::{Inventory, InventoryConfig, InventoryError};

/// Value of a device attribute. Strings have at most 64 bytes (`DeviceAttributeMaxValueLength`, `k8s.io/api/resource/v1`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Attribute {
    /// `bool`.
    Bool(bool),
    /// `int`.
    Int(i64),
    /// `string`.
    String(String),
}

/// Qualified name → value. Names without a domain belong to the driver's own.
pub type Attributes = BTreeMap<String, Attribute>;

/// A device that this node offers, or has lent to a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Name in the ResourceSlice.
    pub name: DeviceName,
    /// What it is, whatever it is called at the moment.
    pub hardware: HardwareId,
    /// The link on the host; none while a pod has it.
    pub link: Option<Link>,
    /// Attributes without a domain are in the driver's own.
    pub attributes: Attributes,
    /// Its RDMA device, while the host sees it.
    pub rdma: Option<RdmaPart>,
    /// It is an RDMA device without a link, on the host or lent: InfiniBand without IPoIB, EFA.
    pub is_rdma_only: bool,
}

/// The RDMA device that belongs to a device, as the host sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaPart {
    /// Its name now.
    pub name: RdmaDeviceName,
    /// The port that belongs to the link; from 1.
    pub port: u32,
    /// What is spoken on it.
    pub protocol: Protocol,
    /// Of the RDMA device.
    pub node_guid: Option<Guid>,
    /// Other RDMA devices of the same function whose management files belong to the same port: a planar one has a device for subnet
    /// management beside the one for traffic.
    pub companions: Vec<RdmaDeviceName>,
}

/// A link, or an RDMA device over none, that is there, but not offered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Withheld {
    /// Its name on the host; of an RDMA device that is over no link, that one's.
    pub link: String,
    /// What it would be called as a device, where its hardware can be told: for claims that were allocated before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceName>,
    /// Why, for people.
    pub reason: String,
}

/// A device that is lent to a pod: it stays published as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lent {
    /// Name in the ResourceSlice.
    pub name: DeviceName,
    /// What it is.
    pub hardware: HardwareId,
    /// As published when it was lent.
    pub attributes: Attributes,
    /// Its index on the host when it was lent.
    pub index: u32,
    /// Its name on the host when it was lent.
    pub host_name: String,
    /// It is an RDMA device without a link.
    pub is_rdma_only: bool,
}

/// What the operator wants to be offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScanOptions {
    /// Offer veth links too. Off: on a node they are the host's ends of pods. On: for tests and machines without other NICs.
    pub offer_veth: bool,
    /// Offer nothing while the host has no default route: at boot the uplink can't be told from the others before it has one. Off:
    /// for nodes that never have one.
    pub need_default_route: bool,
    /// What becomes of IPoIB links.
    pub ipoib: Ipoib,
}

/// What becomes of the links that the kernel makes over InfiniBand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ipoib {
    /// The link is the device, and its RDMA device comes with it.
    #[default]
    Attach,
    /// They are left alone: the RDMA device is a device without a link.
    Ignore,
}

/// What one scan found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Sorted by name; names are unique.
    pub devices: Vec<Device>,
    /// Sorted by name.
    pub withheld: Vec<Withheld>,
    /// What could not be looked up (and so kept devices back), for the log.
    pub problems: Vec<String>,
}

impl Scan {
    /// The device called `name`, or whose shares are.
    #[must_use]
    pub fn device(&self, name: &DeviceName) -> Option<&Device> {
        self.devices.iter().find(|d| is_called(&d.name, name))
    }

    /// The link that would be the device called `name`, if it is not offered.
    #[must_use]
    pub fn withheld(&self, name: &DeviceName) -> Option<&Withheld> {
        self.withheld.iter().find(|w| w.device.as_ref().is_some_and(|device| is_called(device, name)))
    }
}

fn is_called(device: &DeviceName, name: &DeviceName) -> bool {
    device == name || (hardware::is_share_name(name) && hardware::share_name(device) == *name)
}

#[cfg(test)]
mod tests;
