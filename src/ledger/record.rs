//! What is recorded of a claim.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::attach::Plan;
use crate::config::RdmaLimits;
use crate::dhcp::Lease;
use crate::inventory::{Attributes, HardwareId};
use crate::names::{ClaimUid, DeviceName, PodUid, RdmaDeviceName, SandboxId};
use crate::netdev::{Child, HostState};
use crate::netns::NetnsId;
use crate::rdma::char_devices::Wanted;
use crate::rdma::{self, CharDeviceKind, Gid, Guid, NetnsMode, Protocol};

/// A device of a claim, or its share of one: several shares of a device may be in one claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Share {
    /// Device name.
    pub device: DeviceName,
    /// The scheduler's id of the share; none where a device is allocated as a whole.
    pub id: Option<String>,
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.id {
            None => write!(f, "{}", self.device),
            Some(id) => write!(f, "{} (share {id})", self.device),
        }
    }
}

/// Which claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    /// Namespace of the ResourceClaim.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: ClaimUid,
}

impl std::fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.name, self.uid)
    }
}

/// Which pod the claim is reserved for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    /// Its name, from the claim's `reservedFor`.
    pub name: String,
    /// Its UID.
    pub uid: PodUid,
}

/// How far a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// Planned, host state recorded, link down; still on the host.
    Prepared,
    /// On its way into a sandbox: it may be on either side.
    Attaching,
    /// In the sandbox, configured.
    Attached,
    /// On its way back: it may be on either side.
    Releasing,
}

/// The sandbox a device is in, or on its way into or out of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The runtime's id.
    pub sandbox: SandboxId,
    /// Path of the network namespace, as the runtime gave it.
    pub netns_path: PathBuf,
    /// Its identity then: a path may lead to another namespace later.
    pub netns: NetnsId,
    /// Index of the link in the pod.
    pub index: u32,
}

/// How long a step took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// [`crate::attach::Step::kind`], or `capture`, `lease`, `down`, `restore`.
    pub step: String,
    /// Microseconds.
    pub micros: u64,
}

/// The address that a device has by DHCP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DhcpRecord {
    /// The lease, the last one if it is lost; none before it was got, and after it was given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
    /// Why the address must not be used any more; none while it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

/// The RDMA device that the pod gets with, or as, a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaRecord {
    /// Its name on the host when it was lent.
    pub name: RdmaDeviceName,
    /// The kernel's index of it: the same in every namespace, until its driver registers it anew.
    pub index: u32,
    /// What it is, whatever its index and name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_guid: Option<Guid>,
    /// The port that belongs to the link; from 1.
    pub port: u32,
    /// What is spoken on it.
    pub protocol: Protocol,
    /// The node's mode when it was prepared. `Exclusive`: it moves.
    pub mode: NetnsMode,
    /// What containers that use the claim get.
    pub char_devices: Vec<CharDeviceKind>,
    /// RDMA devices whose management files (umad, issm) belong to the same port, and go with it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub companions: Vec<RdmaDeviceName>,
    /// Limits of each container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<RdmaLimits>,
    /// Containers are held back until it is usable.
    pub wait_for_port: bool,
    /// What it can be used by in the pod; none before it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usable: Option<RdmaUsable>,
    /// Why it can't be used (yet), for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl RdmaRecord {
    /// Names of the companions, for [`Self::files`].
    #[must_use]
    pub fn companion_names(&self) -> Vec<&str> {
        self.companions.iter().map(RdmaDeviceName::as_str).collect()
    }

    /// The character devices that containers get, of the RDMA device that is called `device` now.
    #[must_use]
    pub fn files<'a>(&'a self, device: &'a str, companions: &'a [&'a str]) -> Wanted<'a> {
        Wanted { device, port: self.port, kinds: &self.char_devices, companions }
    }

    /// The device among `devices`, wherever it is and whatever its name: by index, or by its GUID after its driver was bound anew.
    #[must_use]
    pub fn find<'a>(&self, devices: &'a [rdma::Device]) -> Option<&'a rdma::Device> {
        let is_it = |device: &&rdma::Device| self.node_guid.is_none() || self.node_guid == device.node_guid;
        let by_index = devices.iter().find(|device| device.index == self.index).filter(is_it);
        let by_guid = || devices.iter().find(|device| self.node_guid.is_some() && device.node_guid == self.node_guid);
        by_index.or_else(by_guid)
    }
}

/// What was seen of an RDMA device in the pod when it was ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RdmaUsable {
    /// Its GIDs, those of the link's addresses first.
    pub gids: Vec<Gid>,
    /// Whether it was opened by verbs; else only the kernel's tables were read.
    pub opened: bool,
    /// Milliseconds since 1970.
    pub at_unix_ms: u64,
}

/// One device of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceRecord {
    /// The claim's request that it serves, as in the allocation result (`request` or `request/subrequest`).
    pub request: String,
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: DeviceName,
    /// Which share of it, where a device can be allocated several times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// What it is, wherever it is.
    pub hardware: HardwareId,
    /// As published when it was lent.
    pub attributes: Attributes,
    /// What it was on the host.
    pub host: HostState,
    /// What shall happen to it.
    pub plan: Plan,
    /// Its lease, where its address comes by DHCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhcp: Option<DhcpRecord>,
    /// Its RDMA device, where the pod gets one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaRecord>,
    /// How far it is.
    pub phase: Phase,
    /// Where it is, unless `Prepared`.
    #[serde(default)]
    pub attachment: Option<Attachment>,
    /// Times of the last steps.
    #[serde(default)]
    pub times: Vec<StepTime>,
    /// What failed last, for people.
    #[serde(default)]
    pub last_error: Option<String>,
    /// When the phase was entered: milliseconds since 1970.
    pub since_unix_ms: u64,
}

impl DeviceRecord {
    /// The lease, the last one if it is lost.
    #[must_use]
    pub fn lease(&self) -> Option<&Lease> {
        self.dhcp.as_ref()?.lease.as_ref()
    }

    /// Whether it has to get a lease before it can be used.
    #[must_use]
    pub fn lacks_lease(&self) -> bool {
        self.dhcp.is_some() && self.lease().is_none()
    }

    /// Whether it is a link, or has one. Otherwise it is an RDMA device alone, and `host` and `plan.pod_link` say nothing of a link.
    #[must_use]
    pub fn has_link(&self) -> bool {
        self.host.index != 0
    }

    /// The RDMA device, where it moves into the pod.
    #[must_use]
    pub fn moving_rdma(&self) -> Option<&RdmaRecord> {
        self.rdma.as_ref().filter(|rdma| rdma.mode == NetnsMode::Exclusive)
    }

    /// The pod's sandbox is another one from now on, or none: what was seen of the RDMA device there does not count.
    pub fn forget_usable(&mut self) {
        if let Some(rdma) = &mut self.rdma {
            (rdma.usable, rdma.problem) = (None, None);
        }
    }

    /// What tells it from all others of this node.
    #[must_use]
    pub fn share(&self) -> Share {
        Share { device: self.device.clone(), id: self.share_id.clone() }
    }

    /// What is made on top of the device; none where the device itself goes into the pod.
    #[must_use]
    pub fn child(&self) -> Option<&Child> {
        self.plan.child()
    }
}

/// A sandbox whose containers run without the devices of the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Missed {
    /// The runtime's id.
    pub sandbox: SandboxId,
    /// Which containers, why, and what is done about it; for people.
    pub why: String,
}

/// Everything we know of a prepared claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimRecord {
    /// Which claim.
    pub claim: ClaimRef,
    /// Which pod.
    pub pod: PodRef,
    /// What the pod calls the claim, where it was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
    /// Grows with each write.
    pub generation: u64,
    /// Boot id of the machine when it was prepared (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Containers of the pod were started without its devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missed: Option<Missed>,
    /// Its devices of ours, in the order of the allocation result.
    pub devices: Vec<DeviceRecord>,
}
