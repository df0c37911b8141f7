//! `vf`: what the physical function sets for a virtual one.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::VlanProtocol;
use crate::netdev::LinkAddress;
use crate::rdma::Guid;

/// `vf` (`IFLA_VF_*`, `linux/if_link.h`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct VfConfig {
    /// VLAN that its frames get; 0 to 4094, 0 none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 4094))]
    pub vlan: Option<u16>,
    /// Priority in that tag, 0 to 7.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 7))]
    pub qos: Option<u8>,
    /// Protocol of that tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proto: Option<VlanProtocol>,
    /// Link-layer address; `interface.hardwareAddr` sets the one in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::LINK_ADDRESS))]
    pub mac: Option<LinkAddress>,
    /// Frames with another source address are dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoof_check: Option<bool>,
    /// The function may change its address and be promiscuous.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// Mbit/s; 0 none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_tx_rate: Option<u32>,
    /// Mbit/s; 0 no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tx_rate: Option<u32>,
    /// Whether its link is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_state: Option<LinkState>,
    /// GUID of the function as an InfiniBand node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::GUID))]
    pub node_guid: Option<Guid>,
    /// GUID of its InfiniBand port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::GUID))]
    pub port_guid: Option<Guid>,
}

/// `IFLA_VF_LINK_STATE_*`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    /// As the physical function's.
    #[default]
    Auto,
    /// Always up.
    Enable,
    /// Always down.
    Disable,
}
