//! The parameters as types. Absent is always told apart from zero, false and empty.

mod child;
mod ethtool;
mod host;
mod rdma;
mod routing;
mod vf;

use std::collections::BTreeMap;

use ipnet::IpNet;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use child::{
    IpoibConfig, IpoibMode, IpvlanConfig, IpvlanFlag, IpvlanMode, MacvlanConfig, MacvlanMode, VlanConfig, VlanProtocol,
};
pub use ethtool::{ChannelsConfig, CoalesceConfig, EthtoolConfig, PauseConfig, RingsConfig};
pub use host::{AddrGenMode, Copies, HostStateConfig, Ipv6Config, Restore, Take};
pub use rdma::{RdmaCharDevice, RdmaConfig, RdmaLimits, RdmaNetnsMode};
pub use routing::{NeighborConfig, RouteConfig, RouteKind, RuleConfig};
pub use vf::{LinkState, VfConfig};

use crate::names::PodLinkName;
use crate::netdev::LinkAddress;

/// The parameters of one device, as written in `opaque.parameters`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NetworkConfig {
    /// Name of a provider profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub profile: Option<String>,
    /// The link itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<InterfaceConfig>,
    /// Routes by this link, added in an order that works whatever the order here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub routes: Option<Vec<RouteConfig>>,
    /// Policy rules in the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub rules: Option<Vec<RuleConfig>>,
    /// Permanent neighbour entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub neighbors: Option<Vec<NeighborConfig>>,
    /// Ethtool settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ethtool: Option<EthtoolConfig>,
    /// What the physical function sets for this virtual function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<VfConfig>,
    /// The RDMA device that belongs to the NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaConfig>,
    /// What comes along from the host; everything by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_state: Option<HostStateConfig>,
    /// How much is given back after the pod; everything by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<Restore>,
}

/// `interface`: the link itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InterfaceConfig {
    /// Name in the pod; the host's where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", length(min = 1, max = 15))]
    pub name: Option<PodLinkName>,
    /// Addresses in CIDR form, with the host part (`10.0.0.5/24`); the host's where absent.
    #[serde(default, deserialize_with = "super::text::interfaces", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Vec<String>>", length(max = 64), inner(regex(pattern = crate::config::text::PREFIX)))]
    pub addresses: Option<Vec<IpNet>>,
    /// Addresses by DHCPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dhcp: Option<bool>,
    /// Bytes, 68 or more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 68, max = 2_147_483_647))]
    pub mtu: Option<u32>,
    /// Link-layer address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", regex(pattern = crate::config::text::LINK_ADDRESS))]
    pub hardware_addr: Option<LinkAddress>,
    /// `IFLA_GSO_MAX_SIZE`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub gso_max_size: Option<u32>,
    /// `IFLA_GRO_MAX_SIZE`, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub gro_max_size: Option<u32>,
    /// `IFLA_GSO_IPV4_MAX_SIZE`, bytes.
    #[serde(default, rename = "gsoIPv4MaxSize", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub gso_ipv4_max_size: Option<u32>,
    /// `IFLA_GRO_IPV4_MAX_SIZE`, bytes.
    #[serde(default, rename = "groIPv4MaxSize", skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_147_483_647))]
    pub gro_ipv4_max_size: Option<u32>,
    /// Detach the host's eBPF programs from the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable_ebpf_programs: Option<bool>,
    /// IP forwarding on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forwarding: Option<bool>,
    /// `arp_ignore`: 0, 1, 2, 3 or 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 8))]
    pub arp_ignore: Option<u32>,
    /// `arp_announce`: 0, 1 or 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2))]
    pub arp_announce: Option<u32>,
    /// The VRF to enslave the link to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vrf: Option<VrfConfig>,
    /// Whether the device itself goes into the pod, or a link that is made on top of it there.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<InterfaceKind>,
    /// Of `type: macvlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub macvlan: Option<MacvlanConfig>,
    /// Of `type: ipvlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipvlan: Option<IpvlanConfig>,
    /// Of `type: vlan`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VlanConfig>,
    /// Of `type: ipoib`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipoib: Option<IpoibConfig>,
    /// `IFLA_TXQLEN`, packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_queue_len: Option<u32>,
    /// `IFLA_IFALIAS`, at most 255 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Alternative names in the pod, besides those that come along from the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alt_names: Option<Vec<String>>,
    /// `IFF_PROMISC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promisc: Option<bool>,
    /// `IFF_ALLMULTI`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allmulti: Option<bool>,
    /// `IFLA_GROUP`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// IPv6 on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Config>,
    /// Per-link sysctls of a list of allowed ones: key as in `ipv4/conf/rp_filter`, and value.
    #[serde(default, deserialize_with = "super::text::values", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<BTreeMap<String, crate::config::text::Value>>")]
    pub sysctls: Option<BTreeMap<String, String>>,
}

/// `interface.type`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterfaceKind {
    /// The device itself.
    #[default]
    Passthrough,
    /// A macvlan link on top of it.
    Macvlan,
    /// An ipvlan link on top of it.
    Ipvlan,
    /// A VLAN of it.
    Vlan,
    /// A partition of it, of IPoIB.
    Ipoib,
}

/// `interface.vrf`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct VrfConfig {
    /// Name of the VRF link.
    #[schemars(length(min = 1, max = 15))]
    pub name: String,
    /// Its table, 1 or more, not 253 to 255.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub table: Option<u32>,
}
