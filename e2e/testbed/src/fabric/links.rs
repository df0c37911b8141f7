//! Making links, for tests: each call is one request of at most ten seconds.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dranic::netdev::{Link, LinkAddress, link};
use dranic::netlink::{Request, RouteSocket};
use dranic::netns::Netns;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage, Prop};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

/// Ten seconds from now: long enough for a busy machine, and a test still ends.
#[must_use]
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// The link called `name`.
///
/// # Errors
/// When there is none.
pub fn find(socket: &mut RouteSocket, name: &str) -> Result<Link> {
    link::by_name(socket, name, soon())?.with_context(|| format!("no link {name}"))
}

/// Sets the link called `name` up.
///
/// # Errors
/// When there is none, or the kernel refuses.
pub fn up(socket: &mut RouteSocket, name: &str) -> Result<()> {
    let index = find(socket, name)?.index;
    link::set_up(socket, index, true, soon()).with_context(|| format!("{name} up"))
}

/// A veth to be made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Veth<'a> {
    /// Name in the socket's namespace.
    pub name: &'a str,
    /// Address there; the kernel's choice if none.
    pub mac: Option<&'a LinkAddress>,
    /// Bytes, of both ends; 1500 if none.
    pub mtu: Option<u32>,
    /// Name of the other end.
    pub peer: &'a str,
    /// Namespace of the other end; the socket's if none.
    pub peer_netns: Option<&'a Netns>,
}

impl Veth<'_> {
    /// Makes it in the socket's namespace, both ends down.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn create(&self, socket: &mut RouteSocket) -> Result<()> {
        let mut peer = LinkMessage::default();
        peer.attributes.push(LinkAttribute::IfName(self.peer.to_owned()));
        peer.attributes.extend(self.mtu.map(LinkAttribute::Mtu));
        peer.attributes.extend(self.peer_netns.map(|netns| LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd())));
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(self.name.to_owned()));
        message.attributes.extend(self.mtu.map(LinkAttribute::Mtu));
        message.attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.bytes().to_vec())));
        let info = vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer)))];
        message.attributes.push(LinkAttribute::LinkInfo(info));
        request(socket, RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }
}

/// Makes a link of a kind that needs no more than a name (`bridge`, `ifb`, `dummy`).
///
/// # Errors
/// When the kernel refuses; `EOPNOTSUPP` when it lacks the kind.
pub fn create(socket: &mut RouteSocket, kind: &str, name: &str) -> Result<()> {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Other(kind.to_owned()))]));
    request(socket, RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
}

/// Deletes the link with `index`.
///
/// # Errors
/// When the kernel refuses.
pub fn delete(socket: &mut RouteSocket, index: u32) -> Result<()> {
    request(socket, RouteNetlinkMessage::DelLink(by_index(index)), 0)
}

/// Makes the link a port of `master` (0: of none).
///
/// # Errors
/// When the kernel refuses.
pub fn set_master(socket: &mut RouteSocket, index: u32, master: u32) -> Result<()> {
    let mut message = by_index(index);
    message.attributes.push(LinkAttribute::Controller(master));
    request(socket, RouteNetlinkMessage::NewLink(message), 0)
}

/// Gives the link another name beside its own.
///
/// # Errors
/// When the kernel refuses.
pub fn add_alt_name(socket: &mut RouteSocket, index: u32, name: &str) -> Result<()> {
    let mut message = by_index(index);
    message.attributes.push(LinkAttribute::PropList(vec![Prop::AltIfName(name.to_owned())]));
    request(socket, RouteNetlinkMessage::NewLinkProp(message), NLM_F_CREATE | NLM_F_EXCL)
}

/// Adds an address, for IPv6 without duplicate address detection.
///
/// # Errors
/// When the kernel refuses.
pub fn add_address(socket: &mut RouteSocket, index: u32, address: IpNet) -> Result<()> {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = address.prefix_len();
    message.attributes.push(AddressAttribute::Local(address.addr()));
    message.attributes.push(AddressAttribute::Address(address.addr()));
    message.header.family = match address.addr() {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    if address.addr().is_ipv6() {
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    request(socket, RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
}

fn by_index(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

fn request(socket: &mut RouteSocket, message: RouteNetlinkMessage, flags: u16) -> Result<()> {
    Ok(socket.request(Request { message, flags }, soon())?)
}
