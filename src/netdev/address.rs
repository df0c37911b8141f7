//! IP addresses of a link, with everything that a move loses.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use netlink_packet_route::address::AddressMessage;
use serde::{Deserialize, Serialize};

use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `IFA_F_NODAD`, `linux/if_addr.h`: no duplicate address detection.
pub const IFA_F_NODAD: u32 = 0x02;
/// `IFA_F_TENTATIVE`, `linux/if_addr.h`: duplicate address detection is still running.
pub const IFA_F_TENTATIVE: u32 = 0x40;
/// `IFA_F_PERMANENT`, `linux/if_addr.h`.
pub const IFA_F_PERMANENT: u32 = 0x80;
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

/// Reads the kernel's form. None when the message has no address.
#[must_use]
pub fn from_message(message: &AddressMessage) -> Option<(u32, Address)> {
    let _ = message;
    todo!()
}

/// The request that adds (or, if it is there already, updates) `address` on the link with `index`.
#[must_use]
pub fn add_request(index: u32, address: &Address) -> Request {
    let _ = (index, address);
    todo!()
}

/// The request that deletes `address` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, address: &Address) -> Request {
    let _ = (index, address);
    todo!()
}

/// All addresses of the socket's namespace, each with its link's index.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(u32, Address)>, NetlinkError> {
    let _ = (socket, deadline);
    todo!()
}
