//! Links that are made on top of another one: macvlan, ipvlan, vlan, ipoib.
//!
//! One `RTM_NEWLINK` makes such a link in the pod's namespace at once: `IFLA_LINK` is the lower link's index in the namespace of the
//! socket, `IFLA_NET_NS_FD` is where the new one goes. So it costs the kernel tenths of a millisecond, where a move costs 15 to 20.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LinkAddress;
use super::link;
use crate::netlink::decode::{attributes, find, read_u16, read_u32, text};
use crate::netlink::{NetlinkError, Request, RouteSocket};

// Attributes of `IFLA_INFO_DATA`, linux/if_link.h.
const IFLA_MACVLAN_MODE: u16 = 1;
const IFLA_IPVLAN_MODE: u16 = 1;
const IFLA_IPVLAN_FLAGS: u16 = 2;
const IFLA_VLAN_ID: u16 = 1;
const IFLA_VLAN_PROTOCOL: u16 = 5;
const IFLA_IPOIB_PKEY: u16 = 1;
const IFLA_IPOIB_MODE: u16 = 2;
const IFLA_IPOIB_UMCAST: u16 = 3;
/// Bit of a `P_Key`: full member of the partition. The kernel sets it for every link (`ipoib_ndo_init`).
pub const FULL_MEMBER: u16 = 0x8000;
/// `IFLA_LINKINFO`, `IFLA_INFO_KIND` and `IFLA_INFO_DATA` in it, linux/if_link.h.
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// `sizeof(struct ifinfomsg)`, `linux/rtnetlink.h`.
const HEADER: usize = 16;

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

/// Tag protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VlanProtocol {
    /// 0x8100.
    #[serde(rename = "802.1Q")]
    #[default]
    Dot1q,
    /// 0x88a8.
    #[serde(rename = "802.1ad")]
    Dot1ad,
}

/// `IPOIB_MODE_*`, `linux/if_link.h`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum IpoibMode {
    /// Unreliable datagrams.
    #[default]
    Datagram,
    /// Reliable connections, with packets up to 65520 bytes.
    Connected,
}

impl IpoibMode {
    const ALL: [Self; 2] = [Self::Datagram, Self::Connected];

    const fn number(self) -> u16 {
        match self {
            Self::Datagram => 0,
            Self::Connected => 1,
        }
    }
}

impl MacvlanMode {
    const ALL: [Self; 5] = [Self::Bridge, Self::Private, Self::Vepa, Self::Passthru, Self::Source];

    const fn number(self) -> u32 {
        match self {
            Self::Private => 1,
            Self::Vepa => 2,
            Self::Bridge => 4,
            Self::Passthru => 8,
            Self::Source => 16,
        }
    }
}

impl IpvlanMode {
    const ALL: [Self; 3] = [Self::L2, Self::L3, Self::L3s];

    const fn number(self) -> u16 {
        match self {
            Self::L2 => 0,
            Self::L3 => 1,
            Self::L3s => 2,
        }
    }
}

impl IpvlanFlag {
    const ALL: [Self; 3] = [Self::Bridge, Self::Private, Self::Vepa];

    const fn number(self) -> u16 {
        match self {
            Self::Bridge => 0,
            Self::Private => 1,
            Self::Vepa => 2,
        }
    }
}

impl VlanProtocol {
    const ALL: [Self; 2] = [Self::Dot1q, Self::Dot1ad];

    const fn number(self) -> u16 {
        match self {
            Self::Dot1q => 0x8100,
            Self::Dot1ad => 0x88a8,
        }
    }
}

/// What a link on top of another one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Child {
    /// A link-layer address of its own on the device.
    Macvlan {
        /// Who reaches whom.
        mode: MacvlanMode,
    },
    /// IP addresses of its own, with the device's link-layer address.
    Ipvlan {
        /// Switched or routed; one for all links on a device.
        mode: IpvlanMode,
        /// Who reaches whom; one for all links on a device.
        flag: IpvlanFlag,
    },
    /// The frames with a tag.
    Vlan {
        /// 1 to 4094.
        id: u16,
        /// Of the tag.
        protocol: VlanProtocol,
    },
    /// A partition of an IPoIB link. There can be several of one.
    Ipoib {
        /// `P_Key`, as configured: the kernel's link has it with [`FULL_MEMBER`].
        pkey: u16,
        /// How packets go.
        mode: IpoibMode,
    },
}

impl std::fmt::Display for Child {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Macvlan { mode } => write!(f, "macvlan (mode {})", word(mode)),
            Self::Ipvlan { mode, flag } => write!(f, "ipvlan (mode {}, flag {})", word(mode), word(flag)),
            Self::Vlan { id, protocol } => write!(f, "vlan {id} ({})", word(protocol)),
            Self::Ipoib { pkey, mode } => write!(f, "ipoib (pkey {pkey:#06x}, mode {})", word(mode)),
        }
    }
}

/// A mode as it stands in the configuration.
fn word(mode: &impl Serialize) -> String {
    serde_json::to_value(mode).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

impl Child {
    /// `IFLA_INFO_KIND`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Macvlan { .. } => "macvlan",
            Self::Ipvlan { .. } => "ipvlan",
            Self::Vlan { .. } => "vlan",
            Self::Ipoib { .. } => "ipoib",
        }
    }

    /// Whether it is the only link that its device can have.
    #[must_use]
    pub const fn is_alone(&self) -> bool {
        matches!(self, Self::Macvlan { mode: MacvlanMode::Passthru })
    }

    /// Why the kernel can't have both on one device; none when it can.
    #[must_use]
    pub fn conflict(&self, other: &Self) -> Option<&'static str> {
        match (self, other) {
            _ if self.is_alone() || other.is_alone() => Some("a macvlan link with mode passthru is the only one of its device"),
            (Self::Macvlan { .. }, Self::Ipvlan { .. }) | (Self::Ipvlan { .. }, Self::Macvlan { .. }) => {
                Some("a device has either macvlan or ipvlan links")
            }
            // `ipvlan_set_port_mode` changes all of them.
            (Self::Ipvlan { .. }, Self::Ipvlan { .. }) if self != other => {
                Some("all ipvlan links of a device have the same mode and flag")
            }
            (Self::Vlan { .. }, Self::Vlan { .. }) if self == other => Some("a device has each VLAN once"),
            _ => None,
        }
    }

    fn data(&self) -> Vec<DefaultNla> {
        match self {
            Self::Macvlan { mode } => vec![DefaultNla::new(IFLA_MACVLAN_MODE, mode.number().to_ne_bytes().to_vec())],
            Self::Ipvlan { mode, flag } => vec![
                DefaultNla::new(IFLA_IPVLAN_MODE, mode.number().to_ne_bytes().to_vec()),
                DefaultNla::new(IFLA_IPVLAN_FLAGS, flag.number().to_ne_bytes().to_vec()),
            ],
            Self::Vlan { id, protocol } => vec![
                DefaultNla::new(IFLA_VLAN_ID, id.to_ne_bytes().to_vec()),
                DefaultNla::new(IFLA_VLAN_PROTOCOL, protocol.number().to_be_bytes().to_vec()),
            ],
            Self::Ipoib { pkey, mode } => vec![
                DefaultNla::new(IFLA_IPOIB_PKEY, (pkey | FULL_MEMBER).to_ne_bytes().to_vec()),
                DefaultNla::new(IFLA_IPOIB_MODE, mode.number().to_ne_bytes().to_vec()),
                DefaultNla::new(IFLA_IPOIB_UMCAST, 0_u16.to_ne_bytes().to_vec()),
            ],
        }
    }
}

/// A link to be made.
#[derive(Debug, Clone)]
pub struct Create<'a> {
    /// What it is.
    pub child: Child,
    /// Index of the link below it, in the socket's namespace.
    pub parent: u32,
    /// The namespace it goes to.
    pub target: BorrowedFd<'a>,
    /// Index it shall have there, so that it can be found after any answer.
    pub index: u32,
    /// Name it shall have there.
    pub name: String,
    /// Bytes; none: as the link below it.
    pub mtu: Option<u32>,
    /// Its link-layer address; none: the kernel's choice, or that of the link below it.
    pub address: Option<LinkAddress>,
}

/// The one message that makes a link.
#[must_use]
pub fn create_request(create: &Create<'_>) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = create.index;
    message.attributes.push(LinkAttribute::Link(create.parent));
    message.attributes.push(LinkAttribute::NetNsFd(create.target.as_raw_fd()));
    message.attributes.push(LinkAttribute::IfName(create.name.clone()));
    message.attributes.extend(create.mtu.map(LinkAttribute::Mtu));
    message.attributes.extend(create.address.as_ref().map(|address| LinkAttribute::Address(address.bytes().to_vec())));
    let data = create.child.data().iter().flat_map(super::raw::bytes).collect();
    let info = vec![LinkInfo::Kind(InfoKind::Other(create.child.kind().to_owned())), LinkInfo::Data(InfoData::Other(data))];
    message.attributes.push(LinkAttribute::LinkInfo(info));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: NLM_F_CREATE | NLM_F_EXCL }
}

/// The request that deletes the link with `index` in the socket's namespace.
#[must_use]
pub fn delete_request(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Request { message: RouteNetlinkMessage::DelLink(message), flags: 0 }
}

/// What the link with `index` is; none when it is of another kind, or in a mode that is not ours.
///
/// # Errors
/// As [`RouteSocket::get`].
pub fn read(socket: &mut RouteSocket, index: u32, deadline: Instant) -> Result<Option<Child>, NetlinkError> {
    let reply = socket.get_raw(RouteNetlinkMessage::GetLink(link::query(index)), deadline)?;
    Ok(parse(&reply.payload))
}

fn parse(payload: &[u8]) -> Option<Child> {
    let (_, info) = attributes(payload.get(HEADER..)?).find(|(kind, _)| *kind == IFLA_LINKINFO)?;
    let data = find(info, IFLA_INFO_DATA)?;
    let short = |kind| find(data, kind).and_then(|value| read_u16(value, 0));
    match text(find(info, IFLA_INFO_KIND)?).as_str() {
        "macvlan" => {
            let number = read_u32(find(data, IFLA_MACVLAN_MODE)?, 0)?;
            Some(Child::Macvlan { mode: MacvlanMode::ALL.into_iter().find(|mode| mode.number() == number)? })
        }
        "ipvlan" => {
            let (mode, flag) = (short(IFLA_IPVLAN_MODE)?, short(IFLA_IPVLAN_FLAGS)?);
            let mode = IpvlanMode::ALL.into_iter().find(|m| m.number() == mode)?;
            Some(Child::Ipvlan { mode, flag: IpvlanFlag::ALL.into_iter().find(|f| f.number() == flag)? })
        }
        "vlan" => {
            // Big endian, as on the wire.
            let number = u16::from_be(short(IFLA_VLAN_PROTOCOL)?);
            let protocol = VlanProtocol::ALL.into_iter().find(|protocol| protocol.number() == number)?;
            Some(Child::Vlan { id: short(IFLA_VLAN_ID)?, protocol })
        }
        "ipoib" => {
            let number = short(IFLA_IPOIB_MODE)?;
            let mode = IpoibMode::ALL.into_iter().find(|mode| mode.number() == number)?;
            Some(Child::Ipoib { pkey: short(IFLA_IPOIB_PKEY)?, mode })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NetlinkSerializable;

    use super::*;
    use crate::netns::Netns;

    fn all() -> Vec<Child> {
        let macvlan = MacvlanMode::ALL.into_iter().map(|mode| Child::Macvlan { mode });
        let ipvlan = IpvlanMode::ALL.into_iter().flat_map(|mode| IpvlanFlag::ALL.map(|flag| Child::Ipvlan { mode, flag }));
        let vlan = VlanProtocol::ALL.into_iter().flat_map(|protocol| [1, 4094].map(|id| Child::Vlan { id, protocol }));
        let ipoib = IpoibMode::ALL.into_iter().flat_map(|mode| [0x8001, 0xffff].map(|pkey| Child::Ipoib { pkey, mode }));
        macvlan.chain(ipvlan).chain(vlan).chain(ipoib).collect()
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn a_partition_is_asked_for_as_a_full_member() {
        let data = |child: Child| child.data().iter().flat_map(super::super::raw::bytes).collect::<Vec<u8>>();
        let bytes = data(Child::Ipoib { pkey: 0x0102, mode: IpoibMode::Connected });
        assert_eq!(bytes, [6, 0, 1, 0, 2, 0x81, 0, 0, 6, 0, 2, 0, 1, 0, 0, 0, 6, 0, 3, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn what_is_asked_for_is_read_back() {
        let netns = Netns::current().unwrap();
        for child in all() {
            let target = std::os::fd::AsFd::as_fd(&netns);
            let create = Create { child, parent: 7, target, index: 9, name: "net1".into(), mtu: Some(1400), address: None };
            let request = create_request(&create);
            let mut bytes = vec![0; request.message.buffer_len()];
            request.message.serialize(&mut bytes);
            assert_eq!(parse(&bytes), Some(child));
        }
        assert_eq!(parse(&[0; 8]), None);
    }

    #[test]
    fn what_one_device_can_have_at_the_same_time() {
        let macvlan = |mode| Child::Macvlan { mode };
        let ipvlan = |mode| Child::Ipvlan { mode, flag: IpvlanFlag::Bridge };
        let vlan = |id| Child::Vlan { id, protocol: VlanProtocol::Dot1q };
        let (bridge, private) = (macvlan(MacvlanMode::Bridge), macvlan(MacvlanMode::Private));
        for (a, b) in [(bridge, private), (bridge, vlan(5)), (ipvlan(IpvlanMode::L3), vlan(5)), (vlan(5), vlan(6))] {
            assert!(a.conflict(&b).is_none() && b.conflict(&a).is_none(), "{a} {b}");
        }
        let passthru = macvlan(MacvlanMode::Passthru);
        let l2 = ipvlan(IpvlanMode::L2);
        for (a, b) in [(passthru, bridge), (passthru, vlan(5)), (bridge, l2), (l2, ipvlan(IpvlanMode::L3s)), (vlan(5), vlan(5))] {
            assert!(a.conflict(&b).is_some() && b.conflict(&a).is_some(), "{a} {b}");
        }
    }

    #[test]
    fn a_child_in_words() {
        let words: Vec<String> = all().iter().map(ToString::to_string).collect();
        assert_eq!(words[0], "macvlan (mode bridge)");
        assert!(words.contains(&"ipvlan (mode l3s, flag vepa)".to_owned()) && words.contains(&"vlan 4094 (802.1ad)".to_owned()));
    }
}
