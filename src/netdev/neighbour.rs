//! Permanent neighbour entries.

use std::net::IpAddr;
use std::time::Instant;

use netlink_packet_route::neighbour::NeighbourMessage;
use serde::{Deserialize, Serialize};

use super::LinkAddress;
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `NUD_PERMANENT`, `linux/neighbour.h`.
pub const NUD_PERMANENT: u16 = 0x80;

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
}

/// Reads the kernel's form: the link's index and the entry. None unless it is a permanent or proxy entry of IPv4 or IPv6.
#[must_use]
pub fn from_message(message: &NeighbourMessage) -> Option<(u32, Neighbour)> {
    let _ = message;
    todo!()
}

/// The request that adds `neighbour` on the link with `index`, or replaces what is there.
#[must_use]
pub fn add_request(index: u32, neighbour: &Neighbour) -> Request {
    let _ = (index, neighbour);
    todo!()
}

/// The request that deletes `neighbour` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, neighbour: &Neighbour) -> Request {
    let _ = (index, neighbour);
    todo!()
}

/// All permanent and proxy entries of both families, each with its link's index.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(u32, Neighbour)>, NetlinkError> {
    let _ = (socket, deadline);
    todo!()
}
