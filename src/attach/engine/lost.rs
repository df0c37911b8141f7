//! Devices in a namespace that can't be opened any more: the runtime has unlinked its path, the agent was not there to hold it open, and
//! something in it keeps it alive. The kernel returns its hardware only when that ends.

use std::path::Path;
use std::sync::Arc;

use super::{Engine, KernelError, Observed, locate, look_deadline};
use crate::inventory::HardwareId;
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, Share};
use crate::names::ClaimUid;
use crate::netdev::link;
use crate::netns::Netns;
use crate::netns::holder;

/// Where processes are.
const PROC: &str = "/proc";

/// A device that is neither on the host nor in a namespace that can be opened, although its hardware is there.
#[derive(Debug, Clone)]
pub struct Lost {
    /// Its claim.
    pub record: Arc<ClaimRecord>,
    /// Which device.
    pub device: Share,
}

impl Engine {
    /// As [`Engine::open_pod`]; and where that finds nothing, by a process that is in the namespace. Looks at all processes.
    pub(super) fn seek_pod(&self, attachment: &Attachment) -> Option<Arc<Netns>> {
        if let Some(netns) = self.open_pod(attachment) {
            return Some(netns);
        }
        let holder = holder::find(Path::new(PROC), attachment.netns)?;
        let netns = Netns::open(&holder.path).ok().filter(|netns| netns.id() == attachment.netns)?;
        tracing::warn!(sandbox = %attachment.sandbox, %holder, "its namespace has no path any more; found by a process in it");
        Some(Arc::new(netns))
    }

    /// Where the runtime has done away with the namespace, but something still runs in it: tells what.
    pub(super) fn tell_holder(&self, claim: &ClaimUid, attachment: &Attachment) {
        let leads = Netns::open(&attachment.netns_path).is_ok_and(|netns| netns.id() == attachment.netns);
        let Some(holder) = (!leads).then(|| holder::find(Path::new(PROC), attachment.netns)).flatten() else { return };
        let text = format!(
            "{holder} keeps the network namespace of the ended sandbox {} alive; the devices of the claim were in it, and are taken out",
            attachment.sandbox
        );
        self.observe_claim(claim, &Observed::Held(text));
    }

    /// Whether the device's hardware still has a link, wherever it is: then it comes back some time.
    pub(super) fn has_interface(&self, device: &DeviceRecord) -> bool {
        let (bus, name) = match &device.hardware {
            HardwareId::Pci { address, .. } => ("pci", address),
            HardwareId::Bus { bus, device, .. } => (bus.as_str(), device),
            HardwareId::Virtual { .. } => return false,
        };
        self.sysfs.has_interface(bus, name)
    }

    /// Devices that are out of sight. Namespaces that are found by a process in them are held open from now on, and theirs are not
    /// among them.
    ///
    /// # Errors
    /// When the host's links can't be listed.
    pub fn lost(&self) -> Result<Vec<Lost>, KernelError> {
        let mut lost = Vec::new();
        for record in self.current(self.ledger.all()) {
            for device in &record.devices {
                let Some(attachment) = device.attachment.as_ref().filter(|a| self.open_pod(a).is_none()) else { continue };
                if let Some(netns) = self.seek_pod(attachment) {
                    self.pin(&attachment.sandbox, &netns);
                } else if self.has_interface(device) {
                    lost.push(Lost { record: record.clone(), device: device.share() });
                }
            }
        }
        if lost.is_empty() {
            return Ok(lost);
        }
        let links = link::list(&mut self.host_socket()?, look_deadline())?;
        let is_home = |lost: &Lost| {
            let mut devices = lost.record.devices.iter().filter(|device| device.share() == lost.device);
            devices.any(|device| locate::find(device, device.host.index, &links).is_some())
        };
        lost.retain(|lost| !is_home(lost));
        Ok(lost)
    }
}
