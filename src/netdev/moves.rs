//! Moving links between namespaces.
//!
//! The move is one `RTM_NEWLINK` that carries namespace, new index, name and MTU. The kernel moves first and applies the rest
//! afterwards, so a refused attribute leaves the link moved under its old name: [`check`] beforehand, and [`locate`] afterwards.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use super::link::{self, Link, LinkAddress, ParentDevice};
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// One move.
#[derive(Debug, Clone)]
pub struct Move<'a> {
    /// Index in the namespace it leaves.
    pub index: u32,
    /// The namespace it goes to.
    pub target: BorrowedFd<'a>,
    /// Index it shall have there (`IFLA_NEW_IFINDEX`), so that it can be found after any answer.
    pub new_index: u32,
    /// Name it shall have there.
    pub name: String,
    /// MTU it shall have there, bytes.
    pub mtu: Option<u32>,
    /// Link-layer address it shall have there.
    pub address: Option<LinkAddress>,
}

/// The one message of a move.
#[must_use]
pub fn request(m: &Move<'_>) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = m.index;
    message.attributes.push(LinkAttribute::NetNsFd(m.target.as_raw_fd()));
    message.attributes.push(LinkAttribute::NewIfIndex(m.new_index.cast_signed()));
    message.attributes.push(LinkAttribute::IfName(m.name.clone()));
    message.attributes.extend(m.mtu.map(LinkAttribute::Mtu));
    message.attributes.extend(m.address.as_ref().map(|address| LinkAttribute::Address(address.bytes().to_vec())));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// Sends the moves on `from`, a socket in the namespace they leave, and returns each one's answer, in order. An error other than
/// [`NetlinkError::NotSent`] says nothing about where the link is: [`locate`] it.
///
/// One message a system call: the kernel needs 15 to 20 ms for each and works inside the call, so this is what makes the deadline
/// hold to within one move; putting them in one call would not be faster.
pub fn send(from: &mut RouteSocket, moves: &[Move<'_>], deadline: Instant) -> Vec<Result<(), NetlinkError>> {
    moves.iter().map(|m| from.request(request(m), deadline)).collect()
}

/// An index for a link in a namespace where `taken` are in use: `wanted` if it is free, else one above all taken.
///
/// The namespace's other users may take it in between; the kernel then refuses (`EBUSY`) and moves nothing.
#[must_use]
pub fn pick_index(taken: &BTreeSet<u32>, wanted: u32) -> u32 {
    let usable = |index: &u32| *index > 0 && *index <= MAX_INDEX && !taken.contains(index);
    let above = taken.last().map_or(1, |last| last.saturating_add(1));
    // Only where the largest index of all is taken is there none above: then the largest free one.
    Some(wanted).filter(usable).or(Some(above).filter(usable)).or_else(|| (1..=MAX_INDEX).rev().find(usable)).unwrap_or(above)
}

/// Largest interface index: the kernel's is a signed integer.
const MAX_INDEX: u32 = i32::MAX.cast_unsigned();
/// Longest link name (`IFNAMSIZ` - 1, `linux/if.h`), bytes.
const NAME_MAX: usize = 15;

/// What a namespace already holds, as far as a move minds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Occupied {
    /// Names and altnames: they share one space.
    pub names: BTreeSet<String>,
    /// Indices.
    pub indices: BTreeSet<u32>,
}

impl Occupied {
    /// By these links.
    #[must_use]
    pub fn by(links: &[Link]) -> Self {
        let mut occupied = Self::default();
        links.iter().for_each(|link| occupied.add(link));
        occupied
    }

    /// By this link, too.
    pub fn add(&mut self, link: &Link) {
        self.names.insert(link.name.clone());
        self.names.extend(link.alt_names.iter().cloned());
        self.indices.insert(link.index);
    }
}

/// Why a move would be refused, or would be carried out by half.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not a name the kernel takes, or one that it would fill in (`%d`).
    #[error("{name:?} can't be a link's name (1 to 15 bytes; no '/', ':', '%' or blank; not '.' or '..')")]
    BadName {
        /// The name.
        name: String,
    },
    /// The name is taken there, as a name or an altname.
    #[error("the name {name:?} is taken in the target namespace")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// One of the link's altnames is taken there.
    #[error("the altname {name:?} of the link is taken in the target namespace: remove it from one of the two")]
    AltNameTaken {
        /// The altname.
        name: String,
    },
    /// An altname that the link is to get is taken there.
    #[error("the altname {name:?} of interface.altNames is taken in the target namespace: choose another one")]
    NewAltNameTaken {
        /// The altname.
        name: String,
    },
    /// The new name is one of the link's own altnames.
    #[error("the name {name:?} is an altname of the link itself: remove the altname first")]
    OwnAltName {
        /// The name.
        name: String,
    },
    /// The index is taken there, or no index.
    #[error("the interface index {index} can't be had in the target namespace")]
    IndexTaken {
        /// The index.
        index: u32,
    },
    /// The MTU is outside of what the driver takes.
    #[error("MTU {mtu} is not within {min} to {max}, which is what the driver takes")]
    Mtu {
        /// Bytes.
        mtu: u32,
        /// Bytes.
        min: u32,
        /// Bytes.
        max: u32,
    },
    /// The link-layer address has another length than the link's.
    #[error("the address {address} has not the {length} bytes of the link's")]
    AddressLength {
        /// The address asked for.
        address: LinkAddress,
        /// Bytes of the link's own.
        length: usize,
    },
}

/// Whether the kernel would carry out `m` of `link` whole, into a namespace that holds `there`. Pure; the namespace can change
/// before the move, so an answer of the kernel still needs [`locate`].
///
/// # Errors
/// The first reason found why it would not.
pub fn check(link: &Link, m: &Move<'_>, there: &Occupied) -> Result<(), Refusal> {
    let name = || m.name.clone();
    if !is_name(&m.name) {
        return Err(Refusal::BadName { name: name() });
    }
    if there.names.contains(&m.name) {
        return Err(Refusal::NameTaken { name: name() });
    }
    if let Some(taken) = link.alt_names.iter().find(|alt| there.names.contains(*alt)) {
        return Err(Refusal::AltNameTaken { name: taken.clone() });
    }
    if link.alt_names.contains(&m.name) {
        return Err(Refusal::OwnAltName { name: name() });
    }
    if m.new_index == 0 || m.new_index > MAX_INDEX || there.indices.contains(&m.new_index) {
        return Err(Refusal::IndexTaken { index: m.new_index });
    }
    let (min, max) = (link.min_mtu.unwrap_or(0), link.max_mtu.filter(|max| *max > 0).unwrap_or(i32::MAX.cast_unsigned()));
    if let Some(mtu) = m.mtu.filter(|mtu| !(min..=max).contains(mtu)) {
        return Err(Refusal::Mtu { mtu, min, max });
    }
    let length = link.address.as_ref().map_or(0, |address| address.bytes().len());
    match &m.address {
        Some(address) if address.bytes().len() != length => Err(Refusal::AddressLength { address: address.clone(), length }),
        _ => Ok(()),
    }
}

/// `dev_valid_name` of the kernel, and no pattern.
fn is_name(name: &str) -> bool {
    let good = |byte: u8| !matches!(byte, b'/' | b':' | b'%' | 0) && !byte.is_ascii_whitespace() && byte != 0x0b;
    (1..=NAME_MAX).contains(&name.len()) && name != "." && name != ".." && name.bytes().all(good)
}

/// Where a link is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whereabouts {
    /// In the namespace it was to leave, as it is now.
    Origin(Box<Link>),
    /// In the namespace it was to go to, as it is now (perhaps under its old name).
    Target(Box<Link>),
    /// In neither.
    Nowhere,
}

/// Looks for `link`, as it was before the move, in both namespaces: by the index it would have there, and where another link has
/// that index, by what it is. `new_index` and `new_address` are those of the [`Move`].
///
/// # Errors
/// As [`RouteSocket::get`] and [`RouteSocket::dump`].
pub fn locate(
    origin: &mut RouteSocket,
    target: &mut RouteSocket,
    link: &Link,
    new_index: u32,
    new_address: Option<&LinkAddress>,
    deadline: Instant,
) -> Result<Whereabouts, NetlinkError> {
    let sought = Identity::of(link, new_address);
    let at = |socket: &mut RouteSocket, index| -> Result<Option<Link>, NetlinkError> {
        Ok(link::by_index(socket, index, deadline)?.filter(|found| sought.matches(found)))
    };
    // First where it should be. A move in between can't hide it: the look at the target comes again after the one at the origin.
    if let Some(found) = at(target, new_index)? {
        return Ok(Whereabouts::Target(Box::new(found)));
    }
    if let Some(found) = at(origin, link.index)? {
        return Ok(Whereabouts::Origin(Box::new(found)));
    }
    if let Some(found) = at(target, new_index)? {
        return Ok(Whereabouts::Target(Box::new(found)));
    }
    let among = |socket: &mut RouteSocket| -> Result<Option<Box<Link>>, NetlinkError> {
        let strong = |found: &Link| sought.is_strong() && sought.matches(found);
        Ok(link::list(socket, deadline)?.into_iter().find(strong).map(Box::new))
    };
    if let Some(found) = among(target)? {
        return Ok(Whereabouts::Target(found));
    }
    Ok(among(origin)?.map_or(Whereabouts::Nowhere, Whereabouts::Origin))
}

/// What tells a link from others, in whichever namespace it is and whatever it is called there.
struct Identity<'a> {
    kind: Option<&'a str>,
    arphrd: u16,
    parent_device: Option<&'a ParentDevice>,
    perm_address: Option<&'a LinkAddress>,
    /// What it has now: before the move, or after.
    addresses: [Option<&'a LinkAddress>; 2],
}

impl<'a> Identity<'a> {
    fn of(link: &'a Link, new_address: Option<&'a LinkAddress>) -> Self {
        Self {
            kind: link.kind.as_deref(),
            arphrd: link.arphrd,
            parent_device: link.parent_device.as_ref(),
            perm_address: link.perm_address.as_ref(),
            addresses: [link.address.as_ref(), new_address.or(link.address.as_ref())],
        }
    }

    /// Whether it tells enough without the index: virtual links can be alike.
    fn is_strong(&self) -> bool {
        self.parent_device.is_some() || self.perm_address.is_some()
    }

    fn matches(&self, link: &Link) -> bool {
        let hardware = self.parent_device == link.parent_device.as_ref() && self.perm_address == link.perm_address.as_ref();
        let address = self.perm_address.is_some() || self.addresses.contains(&link.address.as_ref());
        self.kind == link.kind.as_deref() && self.arphrd == link.arphrd && hardware && address
    }
}

#[cfg(test)]
mod tests;
