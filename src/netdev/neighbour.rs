//! Permanent neighbour entries.

use std::fmt;
use std::net::IpAddr;
use std::time::Instant;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use serde::{Deserialize, Serialize};

use super::LinkAddress;
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `NUD_PERMANENT`, `linux/neighbour.h`.
pub const NUD_PERMANENT: u16 = 0x80;
/// `NTF_PROXY`, `linux/neighbour.h`: we answer for somebody else's address.
pub const NTF_PROXY: u8 = 0x08;
/// `NTF_USE`, `NTF_OFFLOADED`: commands and states, not properties.
const NOT_KEPT: u8 = 0x01 | 0x20;

/// A permanent neighbour entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Neighbour {
    /// `NDA_DST`.
    pub ip: IpAddr,
    /// `NDA_LLADDR`; a proxy entry has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<LinkAddress>,
    /// `NTF_*` (`ndm_flags`): 8 proxy, 0x80 router.
    #[serde(default)]
    pub flags: u8,
    /// `NDA_PROTOCOL` (`RTPROT_*`): who made it, 0 where nobody said.
    #[serde(default)]
    pub protocol: u8,
}

impl Neighbour {
    /// A permanent entry, as a claim configures it.
    #[must_use]
    pub fn permanent(ip: IpAddr, address: LinkAddress) -> Self {
        Self { ip, address: Some(address), flags: 0, protocol: 0 }
    }

    /// Whether it is a proxy entry.
    #[must_use]
    pub fn is_proxy(&self) -> bool {
        self.flags & NTF_PROXY != 0
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip)?;
        if let Some(address) = &self.address {
            write!(f, " lladdr {address}")?;
        }
        if self.is_proxy() {
            f.write_str(" proxy")?;
        }
        if self.flags & !NTF_PROXY != 0 {
            write!(f, " flags {:#x}", self.flags & !NTF_PROXY)?;
        }
        if self.protocol != 0 {
            write!(f, " proto {}", self.protocol)?;
        }
        Ok(())
    }
}

/// Reads the kernel's form: the link's index and the entry. None unless it is a permanent or proxy entry of IPv4 or IPv6.
#[must_use]
pub fn from_message(message: &NeighbourMessage) -> Option<(u32, Neighbour)> {
    let header = &message.header;
    let flags = header.flags.bits() & !NOT_KEPT;
    let proxy = flags & NTF_PROXY != 0;
    if header.ifindex == 0 || !(proxy || header.state == NeighbourState::Permanent) {
        return None;
    }
    let (mut ip, mut address, mut protocol) = (None, None, 0);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) if !proxy && !bytes.is_empty() && bytes.len() <= 32 => {
                address = Some(LinkAddress::new(bytes.clone()));
            }
            NeighbourAttribute::Protocol(p) => protocol = u8::from(*p),
            _ => {}
        }
    }
    Some((header.ifindex, Neighbour { ip: ip?, address, flags, protocol }))
}

/// The request that adds `neighbour` on the link with `index`, or replaces what is there.
#[must_use]
pub fn add_request(index: u32, neighbour: &Neighbour) -> Request {
    let mut message = key_message(index, neighbour);
    message.header.flags = NeighbourFlags::from_bits_retain(neighbour.flags & !NOT_KEPT);
    let attributes = &mut message.attributes;
    attributes.extend(neighbour.address.as_ref().map(|a| NeighbourAttribute::LinkLayerAddress(a.bytes().to_vec())));
    if neighbour.protocol != 0 {
        attributes.push(NeighbourAttribute::Protocol(neighbour.protocol.into()));
    }
    Request { message: RouteNetlinkMessage::NewNeighbour(message), flags: NLM_F_CREATE | NLM_F_REPLACE }
}

/// The request that deletes `neighbour` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, neighbour: &Neighbour) -> Request {
    Request { message: RouteNetlinkMessage::DelNeighbour(key_message(index, neighbour)), flags: 0 }
}

/// What identifies an entry: link, address, proxy or not.
fn key_message(index: u32, neighbour: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = if neighbour.ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::from_bits_retain(neighbour.flags & NTF_PROXY);
    message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::from(neighbour.ip)));
    message
}

/// All permanent and proxy entries of both families, each with its link's index.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(u32, Neighbour)>, NetlinkError> {
    list_of(socket, None, deadline)
}

/// The entries of one link, or of all.
pub(super) fn list_of(
    socket: &mut RouteSocket,
    index: Option<u32>,
    deadline: Instant,
) -> Result<Vec<(u32, Neighbour)>, NetlinkError> {
    let mut found = Vec::new();
    // Proxy entries are a table of their own, shown only when asked for.
    for (family, flags) in
        [(AddressFamily::Inet, 0), (AddressFamily::Inet6, 0), (AddressFamily::Inet, NTF_PROXY), (AddressFamily::Inet6, NTF_PROXY)]
    {
        let mut message = NeighbourMessage::default();
        message.header.family = family;
        message.header.flags = NeighbourFlags::from_bits_retain(flags);
        message.attributes.extend(index.map(NeighbourAttribute::IfIndex));
        for reply in super::raw::dump(socket, RouteNetlinkMessage::GetNeighbour(message), deadline)? {
            let RouteNetlinkMessage::NewNeighbour(reply) = reply else { continue };
            let of_link = index.is_none_or(|i| i == reply.header.ifindex);
            if of_link && reply.header.family == family && reply.header.flags.bits() & NTF_PROXY == flags {
                found.extend(from_message(&reply));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
