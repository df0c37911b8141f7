//! Stable hardware ids, and device names made from them. Pure.

use serde::{Deserialize, Serialize};

use crate::names::DeviceName;
use crate::netdev::{Link, LinkAddress};

/// What a device is, whatever it is called and wherever it is at the moment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HardwareId {
    /// A port of a PCI function.
    #[serde(rename_all = "camelCase")]
    Pci {
        /// `0000:8a:00.0`.
        address: String,
        /// Tells several links of one function apart (`dev_port` or `phys_port_name`); empty for the first or only one.
        #[serde(default)]
        port: String,
    },
    /// A device of another bus (`vmbus`, …).
    #[serde(rename_all = "camelCase")]
    Bus {
        /// Bus name.
        bus: String,
        /// Device name on that bus.
        device: String,
        /// As in `Pci`.
        #[serde(default)]
        port: String,
    },
    /// A link without hardware: its kind and the link-layer address it was found with.
    #[serde(rename_all = "camelCase")]
    Virtual {
        /// `veth`, `dummy`, …
        kind: String,
        /// None for a link without one (tun).
        address: Option<LinkAddress>,
        /// The index, where several links share kind and address, for all but the oldest; and where there is no address.
        twin: Option<u32>,
    },
}

impl HardwareId {
    /// The device's name: total (every id has one), injective (two ids never share one), a DNS label, never made from a link's
    /// name. PCI functions are called as the peer calls them: `pci-0000-8a-00-0`.
    #[must_use]
    pub fn device_name(&self) -> DeviceName {
        todo!()
    }

    /// Whether `link`, with PCI address `pci` behind it, may be this device, judging by what does not change while a pod has it
    /// (PCI address and port; permanent address). For virtual links the caller must know the index as well.
    #[must_use]
    pub fn may_be(&self, link: &Link, pci: Option<&str>) -> bool {
        let _ = (link, pci);
        todo!()
    }
}
