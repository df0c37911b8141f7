//! `interface.macvlan`, `ipvlan` and `vlan`: links that are made in the pod on top of a device that stays on the host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `interface.macvlan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct MacvlanConfig {
    /// `bridge` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<MacvlanMode>,
}

/// `MACVLAN_MODE_*`, `linux/if_link.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MacvlanMode {
    /// Links on one device reach each other.
    #[default]
    Bridge,
    /// They do not.
    Private,
    /// They do by the switch outside.
    Vepa,
    /// The only link on the device, with its link-layer address.
    Passthru,
    /// Only frames from allowed addresses come in.
    Source,
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

/// `IPVLAN_MODE_*`, `linux/if_link.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IpvlanMode {
    /// Switched.
    #[default]
    L2,
    /// Routed; no broadcast, no neighbour discovery.
    L3,
    /// As `l3`, by the host's packet filter.
    L3s,
}

/// `IPVLAN_F_*`, `linux/if_link.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IpvlanFlag {
    /// Links on one device reach each other.
    #[default]
    Bridge,
    /// They do not.
    Private,
    /// They do by the switch outside.
    Vepa,
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

/// Tag protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VlanProtocol {
    /// 0x8100.
    #[serde(rename = "802.1Q")]
    #[default]
    Dot1q,
    /// 0x88a8.
    #[serde(rename = "802.1ad")]
    Dot1ad,
}
