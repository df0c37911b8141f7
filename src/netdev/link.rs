//! A link as the kernel describes it.

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkFlags, LinkMessage, Prop};
use serde::{Deserialize, Serialize};

use super::bpf::Xdp;
use crate::netlink::{NetlinkError, Request, RouteSocket};

mod parse;
mod settings;

pub use parse::parse;
pub use settings::{LinkSettings, PacketSizes, delete_request, enslave_request, set_request, vrf_request};

/// A link-layer address of up to 32 bytes (`MAX_ADDR_LEN`, `linux/netdevice.h`): 6 for Ethernet, 20 for InfiniBand.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LinkAddress(Vec<u8>);

/// Why a text is not a link-layer address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a link-layer address (write 02:00:00:00:00:05)")]
pub struct LinkAddressError(pub String);

impl LinkAddress {
    /// Takes the bytes as they are.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for LinkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            write!(f, "{}{byte:02x}", if i == 0 { "" } else { ":" })?;
        }
        Ok(())
    }
}

impl FromStr for LinkAddress {
    type Err = LinkAddressError;
    fn from_str(text: &str) -> Result<Self, LinkAddressError> {
        let bytes: Option<Vec<u8>> =
            text.split([':', '-']).map(|p| if p.len() == 2 { u8::from_str_radix(p, 16).ok() } else { None }).collect();
        match bytes {
            Some(bytes) if bytes.len() >= 6 && bytes.len() <= 32 => Ok(Self(bytes)),
            _ => Err(LinkAddressError(text.chars().take(64).collect())),
        }
    }
}

impl TryFrom<String> for LinkAddress {
    type Error = LinkAddressError;
    fn try_from(text: String) -> Result<Self, LinkAddressError> {
        text.parse()
    }
}

impl From<LinkAddress> for String {
    fn from(address: LinkAddress) -> Self {
        address.to_string()
    }
}

/// The bus device a link belongs to (`IFLA_PARENT_DEV_BUS_NAME`, `IFLA_PARENT_DEV_NAME`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParentDevice {
    /// `pci`, `virtio`, `vmbus`, …
    pub bus: String,
    /// `0000:8a:00.0`, `virtio0`, …
    pub name: String,
}

/// A link, with what discovery, the plan and the move need to know of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Link {
    /// Index in its namespace (`ifi_index`).
    pub index: u32,
    /// `IFLA_IFNAME`.
    pub name: String,
    /// `IFLA_PROP_LIST` / `IFLA_ALT_IFNAME`.
    pub alt_names: Vec<String>,
    /// `IFLA_IFALIAS`.
    pub alias: Option<String>,
    /// `IFLA_INFO_KIND`: `veth`, `macvlan`, …; none for a hardware device.
    pub kind: Option<String>,
    /// `ARPHRD_*` (`ifi_type`): 1 Ethernet, 32 InfiniBand, 772 loopback.
    pub arphrd: u16,
    /// `IFF_*` (`ifi_flags`, `linux/if.h`).
    pub flags: u32,
    /// `IFLA_MTU`, bytes.
    pub mtu: u32,
    /// `IFLA_MIN_MTU`, bytes.
    pub min_mtu: Option<u32>,
    /// `IFLA_MAX_MTU`, bytes; 0 or none where the driver gives no limit.
    pub max_mtu: Option<u32>,
    /// `IFLA_ADDRESS`.
    pub address: Option<LinkAddress>,
    /// `IFLA_PERM_ADDRESS`: what the hardware came with.
    pub perm_address: Option<LinkAddress>,
    /// `IFLA_OPERSTATE` in words: `up`, `down`, `unknown`, `dormant`, `lowerlayerdown`, `testing`, `notpresent`.
    pub oper_state: String,
    /// `IFLA_MASTER`: the bridge, bond, team or VRF it is enslaved to.
    pub master: Option<u32>,
    /// `IFLA_LINK`: the lower link (of a vlan, macvlan) or the peer (of a veth), an index in `link_netnsid` if that is set.
    pub parent: Option<u32>,
    /// `IFLA_LINK_NETNSID`: the namespace `parent` is in, when it is not this one.
    pub link_netnsid: Option<i32>,
    /// The bus device behind the link.
    pub parent_device: Option<ParentDevice>,
    /// `IFLA_TXQLEN`, packets.
    pub tx_queue_len: Option<u32>,
    /// `IFLA_GROUP`.
    pub group: u32,
    /// How large its packets may be.
    pub sizes: PacketSizes,
    /// `IFLA_TSO_MAX_SIZE`, bytes: the most that [`PacketSizes::gso`] and [`PacketSizes::gso_ipv4`] can be.
    pub tso_max_size: Option<u32>,
    /// `IFLA_VRF_TABLE`: the table of a VRF.
    pub vrf_table: Option<u32>,
    /// `IFLA_PHYS_PORT_NAME` (`p0`, `pf0vf1`), where the driver gives one.
    pub phys_port_name: Option<String>,
    /// `IFLA_XDP`: XDP programs.
    pub xdp: Xdp,
}

/// `IFF_UP`, `linux/if.h`.
pub const IFF_UP: u32 = 1;
/// `IFF_LOOPBACK`, `linux/if.h`.
pub const IFF_LOOPBACK: u32 = 1 << 3;
/// `IFF_PROMISC`, `linux/if.h`.
pub const IFF_PROMISC: u32 = 1 << 8;
/// `IFF_ALLMULTI`, `linux/if.h`.
pub const IFF_ALLMULTI: u32 = 1 << 9;

impl Link {
    /// Whether the link is administratively up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.flags & IFF_UP != 0
    }

    /// Whether it is a loopback link.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.flags & IFF_LOOPBACK != 0
    }
}

/// Longest name a link can be found by (`ALTIFNAMSIZ` - 1, `linux/if.h`), bytes.
const ALT_NAME_MAX: usize = 127;

/// All links of the socket's namespace. A link that can't be read at all (no index, no name) is left out.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<Link>, NetlinkError> {
    let messages = socket.dump_raw(RouteNetlinkMessage::GetLink(query(0)), deadline)?;
    Ok(messages.iter().filter_map(|message| parse(&message.payload)).collect())
}

/// The link with `index`, or none when there is none.
///
/// # Errors
/// As [`RouteSocket::get`], but a link that is not there is `Ok(None)`.
pub fn by_index(socket: &mut RouteSocket, index: u32, deadline: Instant) -> Result<Option<Link>, NetlinkError> {
    if index == 0 || index > i32::MAX.cast_unsigned() {
        return Ok(None);
    }
    one(socket, query(index), deadline)
}

/// The link called `name` (its name, or one of its altnames), or none when there is none.
///
/// # Errors
/// As [`by_index`].
pub fn by_name(socket: &mut RouteSocket, name: &str, deadline: Instant) -> Result<Option<Link>, NetlinkError> {
    if name.is_empty() || name.len() > ALT_NAME_MAX || name.contains('\0') {
        return Ok(None);
    }
    let mut message = query(0);
    // The kernel looks both kinds of names up by this attribute; IFLA_IFNAME would refuse more than 15 bytes.
    let name = [name.as_bytes(), &[0]].concat();
    message.attributes.push(LinkAttribute::Other(DefaultNla::new(parse::IFLA_ALT_IFNAME, name)));
    one(socket, message, deadline)
}

/// Sets the link administratively up or down.
///
/// # Errors
/// As [`RouteSocket::request`].
pub fn set_up(socket: &mut RouteSocket, index: u32, up: bool, deadline: Instant) -> Result<(), NetlinkError> {
    socket.request(up_request(index, up), deadline)
}

/// The request that sets the link administratively up or down.
#[must_use]
pub fn up_request(index: u32, up: bool) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.change_mask = LinkFlags::Up;
    message.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// The request that names the link. Some kernels and drivers refuse that (`EBUSY`) for a link that is up.
#[must_use]
pub fn name_request(index: u32, name: &str) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// The request that gives the link another name beside its own, or takes it away.
#[must_use]
pub fn alt_name_request(index: u32, name: &str, add: bool) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::PropList(vec![Prop::AltIfName(name.to_owned())]));
    if add {
        Request { message: RouteNetlinkMessage::NewLinkProp(message), flags: NLM_F_CREATE | NLM_F_EXCL | NLM_F_APPEND }
    } else {
        Request { message: RouteNetlinkMessage::DelLinkProp(message), flags: 0 }
    }
}

/// Asks for one link, or for all with index 0, without the statistics: they are most of the bytes.
pub(super) fn query(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message
}

fn one(socket: &mut RouteSocket, message: LinkMessage, deadline: Instant) -> Result<Option<Link>, NetlinkError> {
    match socket.get_raw(RouteNetlinkMessage::GetLink(message), deadline) {
        Ok(reply) => match parse(&reply.payload) {
            Some(link) => Ok(Some(link)),
            None => Err(NetlinkError::Protocol(format!("link of {} bytes can't be read", reply.payload.len()))),
        },
        Err(error) if error.errno() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}
