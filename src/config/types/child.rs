//! `interface.macvlan`, `ipvlan`, `vlan` and `ipoib`: links that are made in the pod on top of a device that stays on the host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::netdev::child::{IpoibMode, IpvlanFlag, IpvlanMode, MacvlanMode, VlanProtocol};

/// `interface.macvlan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct MacvlanConfig {
    /// `bridge` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<MacvlanMode>,
}

/// `interface.ipvlan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct IpvlanConfig {
    /// `l2` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<IpvlanMode>,
    /// `bridge` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flag: Option<IpvlanFlag>,
}

/// `interface.vlan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct VlanConfig {
    /// Required; 1 to 4094.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4094))]
    pub id: Option<u16>,
    /// `802.1Q` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<VlanProtocol>,
}

/// `interface.ipoib`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct IpoibConfig {
    /// Required: the `P_Key` of the partition, 1 to 65535 and not 32768 (0x8000). The highest bit asks for full membership.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub pkey: Option<u16>,
    /// `datagram` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<IpoibMode>,
}
