//! IP addresses of a link, with everything that a move loses.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fmt, fs};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeader, AddressHeaderFlags, AddressMessage, AddressScope, CacheInfo,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use serde::{Deserialize, Serialize};

use crate::netlink::{NetlinkError, Request, RouteSocket};
use crate::netns::Netns;

/// `IFA_F_SECONDARY`, `linux/if_addr.h`: not the first of its subnet. The same bit on IPv6 is `IFA_F_TEMPORARY`.
pub const IFA_F_SECONDARY: u32 = 0x01;
/// `IFA_F_NODAD`, `linux/if_addr.h`: no duplicate address detection.
pub const IFA_F_NODAD: u32 = 0x02;
/// `IFA_F_OPTIMISTIC`, `linux/if_addr.h`: used while duplicate address detection is still running.
pub const IFA_F_OPTIMISTIC: u32 = 0x04;
/// `IFA_F_DADFAILED`, `linux/if_addr.h`: somebody else has the address.
pub const IFA_F_DADFAILED: u32 = 0x08;
/// `IFA_F_DEPRECATED`, `linux/if_addr.h`: its preferred life time is over.
pub const IFA_F_DEPRECATED: u32 = 0x20;
/// `IFA_F_TENTATIVE`, `linux/if_addr.h`: duplicate address detection is still running.
pub const IFA_F_TENTATIVE: u32 = 0x40;
/// `IFA_F_PERMANENT`, `linux/if_addr.h`.
pub const IFA_F_PERMANENT: u32 = 0x80;
/// `IFA_F_NOPREFIXROUTE`, `linux/if_addr.h`: no connected route.
pub const IFA_F_NOPREFIXROUTE: u32 = 0x200;
/// `IFA_F_STABLE_PRIVACY`, `linux/if_addr.h`: made by the kernel from a secret.
pub const IFA_F_STABLE_PRIVACY: u32 = 0x800;
/// Those a request may set: no-dad, optimistic, home address, manage-temporary, no-prefix-route, auto-join. The kernel computes
/// the others.
const SETTABLE: u32 = IFA_F_NODAD | IFA_F_OPTIMISTIC | 0x10 | 0x100 | IFA_F_NOPREFIXROUTE | 0x400;
/// `RT_SCOPE_UNIVERSE`, `linux/rtnetlink.h`.
pub const SCOPE_UNIVERSE: u8 = 0;
/// `RT_SCOPE_LINK`, `linux/rtnetlink.h`.
pub const SCOPE_LINK: u8 = 253;
/// Life time that never ends, seconds (`INFINITY_LIFE_TIME`, `net/ipv6.h`).
pub const FOREVER: u32 = u32::MAX;

/// An address as `RTM_GETADDR` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// `IFA_LOCAL` (or `IFA_ADDRESS` where there is no local).
    pub ip: IpAddr,
    /// `ifa_prefixlen`.
    pub prefix_len: u8,
    /// `IFA_ADDRESS` where it differs from `ip`: the peer of a point-to-point link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<IpAddr>,
    /// `IFA_BROADCAST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broadcast: Option<Ipv4Addr>,
    /// `IFA_LABEL`, IPv4 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// `IFA_F_*`, all 32 bits (`IFA_FLAGS`).
    pub flags: u32,
    /// Seconds; [`FOREVER`] never ends. As it was when it was read.
    pub valid_lifetime: u32,
    /// Seconds; [`FOREVER`] never ends.
    pub preferred_lifetime: u32,
    /// `IFA_RT_PRIORITY`: metric of the connected route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<u32>,
    /// `IFA_PROTO`: who made it (1 loopback, 2 router advertisement, 3 link-local).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proto: Option<u8>,
}

impl Address {
    /// A permanent, global address, as a claim configures it.
    #[must_use]
    pub fn permanent(ip: IpAddr, prefix_len: u8) -> Self {
        Self {
            ip,
            prefix_len,
            peer: None,
            broadcast: None,
            label: None,
            scope: SCOPE_UNIVERSE,
            flags: IFA_F_PERMANENT,
            valid_lifetime: FOREVER,
            preferred_lifetime: FOREVER,
            metric: None,
            proto: None,
        }
    }
}

impl fmt::Display for Address {
    /// As `ip address` would show it: `10.0.0.1/24 label eth0:1 valid 600s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_len)?;
        if let Some(peer) = self.peer {
            write!(f, " peer {peer}")?;
        }
        if let Some(broadcast) = self.broadcast {
            write!(f, " broadcast {broadcast}")?;
        }
        if let Some(label) = &self.label {
            write!(f, " label {label}")?;
        }
        if self.scope != SCOPE_UNIVERSE {
            write!(f, " scope {}", self.scope)?;
        }
        if let Some(metric) = self.metric {
            write!(f, " metric {metric}")?;
        }
        if let Some(proto) = self.proto {
            write!(f, " proto {proto}")?;
        }
        for (name, seconds) in [("valid", self.valid_lifetime), ("preferred", self.preferred_lifetime)] {
            if seconds != FOREVER {
                write!(f, " {name} {seconds}s")?;
            }
        }
        write!(f, " flags {:#x}", self.flags)
    }
}

/// Reads the kernel's form. None when the message has no address.
#[must_use]
pub fn from_message(message: &AddressMessage) -> Option<(u32, Address)> {
    let header = &message.header;
    let (mut local, mut other) = (None, None);
    let mut address = Address::permanent(IpAddr::V4(Ipv4Addr::UNSPECIFIED), header.prefix_len);
    address.scope = u8::from(header.scope);
    address.flags = u32::from(header.flags.bits());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => other = Some(*ip),
            AddressAttribute::Label(label) => address.label = Some(label.clone()),
            AddressAttribute::Broadcast(ip) => address.broadcast = Some(*ip),
            AddressAttribute::Flags(flags) => address.flags = flags.bits(),
            AddressAttribute::RoutePriority(metric) => address.metric = Some(*metric),
            AddressAttribute::Protocol(proto) => address.proto = Some(u8::from(*proto)),
            AddressAttribute::CacheInfo(info) => {
                address.valid_lifetime = info.ifa_valid;
                address.preferred_lifetime = info.ifa_preferred;
            }
            _ => {}
        }
    }
    address.ip = local.or(other)?;
    address.peer = other.filter(|peer| *peer != address.ip);
    let longest = if address.ip.is_ipv4() { 32 } else { 128 };
    (family(address.ip) == header.family && header.prefix_len <= longest).then_some((header.index, address))
}

/// The request that adds (or, if it is there already, updates) `address` on the link with `index`.
#[must_use]
pub fn add_request(index: u32, address: &Address) -> Request {
    let mut message = key_message(index, address);
    let flags = address.flags & SETTABLE;
    message.header.flags = AddressHeaderFlags::from_bits_retain((flags & 0xff) as u8);
    let attributes = &mut message.attributes;
    attributes.extend(address.broadcast.map(AddressAttribute::Broadcast));
    attributes.push(AddressAttribute::Flags(AddressFlags::from_bits_retain(flags)));
    attributes.extend(address.metric.map(AddressAttribute::RoutePriority));
    attributes.extend(address.proto.map(|p| AddressAttribute::Protocol(p.into())));
    if (address.valid_lifetime, address.preferred_lifetime) != (FOREVER, FOREVER) {
        let mut info = CacheInfo::default();
        info.ifa_valid = address.valid_lifetime;
        info.ifa_preferred = address.preferred_lifetime;
        attributes.push(AddressAttribute::CacheInfo(info));
    }
    Request { message: RouteNetlinkMessage::NewAddress(message), flags: NLM_F_CREATE | NLM_F_REPLACE }
}

/// The request that deletes `address` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, address: &Address) -> Request {
    Request { message: RouteNetlinkMessage::DelAddress(key_message(index, address)), flags: 0 }
}

/// What identifies an address: link, addresses, prefix and label.
fn key_message(index: u32, address: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header = AddressHeader {
        family: family(address.ip),
        prefix_len: address.prefix_len,
        flags: AddressHeaderFlags::empty(),
        scope: AddressScope::from(address.scope),
        index,
    };
    message.attributes.push(AddressAttribute::Local(address.ip));
    message.attributes.push(AddressAttribute::Address(address.peer.unwrap_or(address.ip)));
    message.attributes.extend(address.label.clone().map(AddressAttribute::Label));
    message
}

fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

/// All addresses of the socket's namespace, each with its link's index.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(u32, Address)>, NetlinkError> {
    list_of(socket, None, deadline)
}

/// The one namespace among those mounted in `dir` that has one of `ips`; none where none or several have.
pub fn namespace_with(dir: &Path, ips: &[IpAddr], deadline: Instant) -> Option<PathBuf> {
    let paths = fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    // A file that is no namespace, or is one no more, is not the one.
    let has = |path: &PathBuf| {
        let netns = Netns::open(path).ok()?;
        let addresses = list(&mut RouteSocket::open_in(&netns).ok()?, deadline).ok()?;
        addresses.iter().any(|(_, address)| ips.contains(&address.ip)).then_some(())
    };
    let mut found = paths.filter(|path| has(path).is_some());
    let one = found.next()?;
    found.next().is_none().then_some(one)
}

/// The addresses of one link, or of all.
pub(super) fn list_of(
    socket: &mut RouteSocket,
    index: Option<u32>,
    deadline: Instant,
) -> Result<Vec<(u32, Address)>, NetlinkError> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut message = AddressMessage::default();
        message.header.family = family;
        message.header.index = index.unwrap_or(0);
        for reply in super::raw::dump(socket, RouteNetlinkMessage::GetAddress(message), deadline)? {
            // Without IPv6 the kernel answers for every family, and without strict checking for every link.
            let RouteNetlinkMessage::NewAddress(reply) = reply else { continue };
            if reply.header.family == family && index.is_none_or(|i| i == reply.header.index) {
                found.extend(from_message(&reply));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
