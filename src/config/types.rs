//! The parameters as types. Absent is always told apart from zero, false and empty.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::names::PodLinkName;
use crate::netdev::LinkAddress;

/// The parameters of one device, as written in `opaque.parameters`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Name of a provider profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The link itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<InterfaceConfig>,
    /// Routes by this link, added in an order that works whatever the order here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Vec<RouteConfig>>,
    /// Policy rules in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Vec<RuleConfig>>,
    /// Permanent neighbour entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbors: Option<Vec<NeighborConfig>>,
    /// Ethtool settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ethtool: Option<EthtoolConfig>,
}

/// `interface`: the link itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InterfaceConfig {
    /// Name in the pod; the host's where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PodLinkName>,
    /// Addresses in CIDR form, with the host part (`10.0.0.5/24`); the host's where absent.
    #[serde(default, deserialize_with = "super::text::interfaces", skip_serializing_if = "Option::is_none")]
    pub addresses: Option<Vec<IpNet>>,
    /// Addresses by DHCPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhcp: Option<bool>,
    /// Bytes, 68 or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Link-layer address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware_addr: Option<LinkAddress>,
    /// `IFLA_GSO_MAX_SIZE`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gso_max_size: Option<u32>,
    /// `IFLA_GRO_MAX_SIZE`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gro_max_size: Option<u32>,
    /// `IFLA_GSO_IPV4_MAX_SIZE`, bytes.
    #[serde(default, rename = "gsoIPv4MaxSize", skip_serializing_if = "Option::is_none")]
    pub gso_ipv4_max_size: Option<u32>,
    /// `IFLA_GRO_IPV4_MAX_SIZE`, bytes.
    #[serde(default, rename = "groIPv4MaxSize", skip_serializing_if = "Option::is_none")]
    pub gro_ipv4_max_size: Option<u32>,
    /// Detach the host's eBPF programs from the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable_ebpf_programs: Option<bool>,
    /// IP forwarding on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forwarding: Option<bool>,
    /// `arp_ignore`: 0, 1, 2, 3 or 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arp_ignore: Option<u32>,
    /// `arp_announce`: 0, 1 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arp_announce: Option<u32>,
    /// The VRF to enslave the link to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vrf: Option<VrfConfig>,
}

/// `interface.vrf`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct VrfConfig {
    /// Name of the VRF link.
    pub name: String,
    /// Its table, 1 or more, not 253 to 255.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
}

/// One of `routes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RouteConfig {
    /// Required.
    #[serde(default, deserialize_with = "super::text::prefix", skip_serializing_if = "Option::is_none")]
    pub destination: Option<IpNet>,
    /// Required unless `scope` is 253 (link).
    #[serde(default, deserialize_with = "super::text::ip", skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    #[serde(default, deserialize_with = "super::text::ip", skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// 0 (universe) or 253 (link).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
    /// 0 or absent: main.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
}

/// One of `rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RuleConfig {
    /// 0 to 32767; absent lets the kernel choose one before the main table's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Packets from here.
    #[serde(default, deserialize_with = "super::text::prefix", skip_serializing_if = "Option::is_none")]
    pub source: Option<IpNet>,
    /// Packets to here.
    #[serde(default, deserialize_with = "super::text::prefix", skip_serializing_if = "Option::is_none")]
    pub destination: Option<IpNet>,
    /// The table to look in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
}

/// One of `neighbors`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NeighborConfig {
    /// Required.
    #[serde(default, deserialize_with = "super::text::ip", skip_serializing_if = "Option::is_none")]
    pub destination: Option<IpAddr>,
    /// Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware_addr: Option<LinkAddress>,
}

/// `ethtool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct EthtoolConfig {
    /// Feature name → on or off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<BTreeMap<String, bool>>,
    /// Private flag name → on or off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_flags: Option<BTreeMap<String, bool>>,
}
