//! Why a claim can't be prepared.

use super::KernelError;
use crate::attach::plan::PlanError;
use crate::ledger::ClaimRef;
use crate::names::{DeviceName, PodLinkName, RdmaDeviceName};

/// A claim can't be prepared. Nothing was changed, or it was put back.
#[derive(Debug, thiserror::Error)]
#[error("claim {claim}: {reason}")]
pub struct PrepareError {
    /// Which claim.
    pub claim: Box<ClaimRef>,
    /// Why.
    #[source]
    pub reason: Box<PrepareReason>,
}

/// Why a claim can't be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareReason {
    /// The device is not (or no longer) on this node.
    #[error("device {device} is not on this node: {why}")]
    NoDevice {
        /// Which device.
        device: DeviceName,
        /// Gone, or withheld and why.
        why: String,
    },
    /// It is not offered by now: the host needs it, or it can't be moved.
    #[error("device {device} ({name}) is not lent: {why}; see: dranic devices")]
    Needed {
        /// Which device.
        device: DeviceName,
        /// Its name on the host.
        name: String,
        /// Why, in words.
        why: String,
    },
    /// Another claim has it.
    #[error("device {device} is still held by claim {owner}; the kubelet will ask again until that one is unprepared")]
    Held {
        /// Which device.
        device: DeviceName,
        /// The claim that has it.
        owner: String,
    },
    /// Another claim has what does not go together with what is wanted.
    #[error("device {device} can't have {wanted} while claim {owner} has {other}: {why}; the kubelet will ask again")]
    Shared {
        /// Which device.
        device: DeviceName,
        /// What is wanted.
        wanted: String,
        /// The claim that is in the way.
        owner: String,
        /// What that one has.
        other: String,
        /// Why not both.
        why: String,
    },
    /// What is made on top of a link that is down does not work.
    #[error("device {device}: its link {name} is down on the host, and nothing is made on top of such a one; set it up there")]
    Down {
        /// Which device.
        device: DeviceName,
        /// Its name on the host.
        name: String,
    },
    /// A sandbox of another pod has the claim's devices.
    #[error("pod {pod} still has the devices of this claim; the kubelet will ask again until its sandbox is stopped")]
    OtherPod {
        /// Name of that pod.
        pod: String,
    },
    /// What was recorded of the claim before could not be ended.
    #[error("its former use could not be ended: {why}")]
    NotEnded {
        /// Why.
        why: String,
    },
    /// Something else is under way for the pod, for long.
    #[error("something else is still under way for the pod; the kubelet will ask again")]
    Busy,
    /// There is no plan for it.
    #[error("request {request}, device {device}: {source}")]
    Plan {
        /// Which request.
        request: String,
        /// Which device.
        device: DeviceName,
        /// Why.
        source: PlanError,
    },
    /// It got no address by DHCP.
    #[error(
        "device {device} ({name}): {why}; every device of the claim was put back. Is there a DHCP server on its network? Name \
         interface.addresses instead, or give the server more time with --dhcp-timeout"
    )]
    NoLease {
        /// Which device.
        device: DeviceName,
        /// Its name on the host.
        name: String,
        /// Why.
        why: String,
    },
    /// As a virtual function it can't be what is asked for.
    #[error("request {request}, device {device}: {why}")]
    Vf {
        /// Which request.
        request: String,
        /// Which device.
        device: DeviceName,
        /// Why, with the path of the field.
        why: String,
    },
    /// Its RDMA device can't be what is asked for.
    #[error("request {request}, device {device}: {why}")]
    Rdma {
        /// Which request.
        request: String,
        /// Which device.
        device: DeviceName,
        /// Why, with the path of the field.
        why: String,
    },
    /// Its RDMA device has another port, whose link another claim has, and can't be in two pods.
    #[error(
        "device {device}: its RDMA device {rdma} goes with claim {owner}, which has another link of it, and can be in one pod only; the \
         kubelet will ask again. Set rdma.enabled to false to have the link alone"
    )]
    RdmaHeld {
        /// Which device.
        device: DeviceName,
        /// Name of the RDMA device on the host.
        rdma: RdmaDeviceName,
        /// The claim that has it.
        owner: String,
    },
    /// Two devices of the pod would have one name.
    #[error("devices {device} and {other} would both be called {name} in the pod; set interface.name for one of them")]
    NameTwice {
        /// The second device.
        device: DeviceName,
        /// The first device.
        other: DeviceName,
        /// The name.
        name: PodLinkName,
    },
    /// The kernel or the ledger refused.
    #[error("{step}: {source}; nothing was changed")]
    Kernel {
        /// What was tried.
        step: String,
        /// Why it failed.
        source: KernelError,
    },
}

impl PrepareReason {
    /// Whether another pod has what is wanted, and may give it back by itself.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::Shared { .. } | Self::RdmaHeld { .. } | Self::OtherPod { .. })
    }
}
