//! `rdma`: the RDMA device that belongs to the NIC.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rdma::{CharDeviceKind, NetnsMode};

/// `rdma`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RdmaConfig {
    /// Whether the pod gets the RDMA device; by default it does, where the NIC has one. `true`: only a NIC that has one will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// The mode that the node must be in; by default either will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns_mode: Option<RdmaNetnsMode>,
    /// Character devices for containers besides `uverbs` and `rdma_cm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2))]
    pub char_devices: Option<Vec<RdmaCharDevice>>,
    /// Limits of each container that uses the claim (`rdma.max`, cgroup v2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<RdmaLimits>,
    /// Whether containers are held back until the port is active and the addresses have their GIDs; `true` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_port: Option<bool>,
}

/// `rdma.netnsMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RdmaNetnsMode {
    /// Every network namespace sees every RDMA device.
    Shared,
    /// An RDMA device is in one network namespace.
    Exclusive,
}

impl From<RdmaNetnsMode> for NetnsMode {
    fn from(mode: RdmaNetnsMode) -> Self {
        match mode {
            RdmaNetnsMode::Shared => Self::Shared,
            RdmaNetnsMode::Exclusive => Self::Exclusive,
        }
    }
}

/// `rdma.charDevices[]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RdmaCharDevice {
    /// Management datagrams.
    Umad,
    /// For a subnet manager.
    Issm,
}

impl From<RdmaCharDevice> for CharDeviceKind {
    fn from(kind: RdmaCharDevice) -> Self {
        match kind {
            RdmaCharDevice::Umad => Self::Umad,
            RdmaCharDevice::Issm => Self::Issm,
        }
    }
}

/// `rdma.limits`: the resources of the `rdma` cgroup controller (`Documentation/admin-guide/cgroup-v2.rst`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RdmaLimits {
    /// `hca_handle`: how often the device may be open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2_147_483_647))]
    pub hca_handles: Option<u32>,
    /// `hca_object`: how many queue pairs, memory regions and the like there may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2_147_483_647))]
    pub hca_objects: Option<u32>,
}
