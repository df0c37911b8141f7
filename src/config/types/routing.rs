//! `routes`, `rules` and `neighbors`.

use std::net::IpAddr;

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::netdev::LinkAddress;

/// One of `routes`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RouteConfig {
    /// Required.
    #[serde(default, deserialize_with = "crate::config::text::prefix", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::PREFIX))]
    pub destination: Option<IpNet>,
    /// Required unless `scope` is 253 (link).
    #[serde(default, deserialize_with = "crate::config::text::ip", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::IP))]
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    #[serde(default, deserialize_with = "crate::config::text::ip", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::IP))]
    pub source: Option<IpAddr>,
    /// 0 (universe) or 253 (link).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<u8>,
    /// 0 or absent: main.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// `RTA_PRIORITY`: of several routes to one destination the one with the least counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<u32>,
    /// `RTN_*`; unicast when absent.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<RouteKind>,
    /// The gateway is taken to be on the link, whatever the addresses say (`RTNH_F_ONLINK`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub onlink: Option<bool>,
    /// `RTAX_MTU`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 68, max = 65520))]
    pub mtu: Option<u32>,
    /// `RTAX_ADVMSS`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65495))]
    pub advmss: Option<u32>,
}

/// `routes[].type`: what becomes of packets (`RTN_*`, `linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RouteKind {
    /// They go by the link.
    #[default]
    Unicast,
    /// They are dropped.
    Blackhole,
    /// They are refused with "host unreachable".
    Unreachable,
    /// They are refused with "administratively prohibited".
    Prohibit,
    /// The look in this table ends.
    Throw,
}

/// One of `rules`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RuleConfig {
    /// 0 to 32767; absent lets the kernel choose one before the main table's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 32767))]
    pub priority: Option<u32>,
    /// Packets from here.
    #[serde(default, deserialize_with = "crate::config::text::prefix", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::PREFIX))]
    pub source: Option<IpNet>,
    /// Packets to here.
    #[serde(default, deserialize_with = "crate::config::text::prefix", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::PREFIX))]
    pub destination: Option<IpNet>,
    /// The table to look in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<u32>,
    /// Packets with this firewall mark (`FRA_FWMARK`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fwmark: Option<u32>,
    /// Which bits of the mark count (`FRA_FWMASK`); all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fwmask: Option<u32>,
    /// Packets that came in by this link, by its name in the pod; `lo` for the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iif: Option<String>,
    /// Packets of sockets that are bound to this link, by its name in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oif: Option<String>,
    /// Routes with a prefix of this length or shorter do not count (`FRA_SUPPRESS_PREFIXLEN`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suppress_prefix_length: Option<u32>,
    /// Packets that are not as selected (`FIB_RULE_INVERT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invert: Option<bool>,
}

/// One of `neighbors`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NeighborConfig {
    /// Required.
    #[serde(default, deserialize_with = "crate::config::text::ip", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::IP))]
    pub destination: Option<IpAddr>,
    /// Required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::LINK_ADDRESS))]
    pub hardware_addr: Option<LinkAddress>,
}
