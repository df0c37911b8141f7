//! Routes of every table.

mod codec;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use serde::{Deserialize, Serialize};

pub use codec::{add_request, delete_request, from_message};

use crate::netlink::{NetlinkError, RouteSocket};

/// `RT_TABLE_MAIN`, `linux/rtnetlink.h`.
pub const TABLE_MAIN: u32 = 254;
/// `RT_TABLE_LOCAL`, `linux/rtnetlink.h`: the kernel's own, never touched.
pub const TABLE_LOCAL: u32 = 255;
/// `RTPROT_KERNEL`, `linux/rtnetlink.h`: made by the kernel (connected routes).
pub const PROTO_KERNEL: u8 = 2;
/// `RTPROT_STATIC`, `linux/rtnetlink.h`.
pub const PROTO_STATIC: u8 = 4;
/// `RTPROT_RA`, `linux/rtnetlink.h`: from a router advertisement.
pub const PROTO_RA: u8 = 9;

/// One next hop of a multipath route.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NextHop {
    /// Index of the link it leaves by, in the namespace where the route was read.
    pub index: u32,
    /// `RTA_GATEWAY` or `RTA_VIA`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// Weight, 1 to 256 (`rtnh_hops` + 1).
    pub weight: u16,
    /// `RTNH_F_ONLINK`.
    pub onlink: bool,
    /// As [`Route::other`], for this next hop.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub other: String,
}

impl NextHop {
    /// A plain next hop of weight 1.
    #[must_use]
    pub fn by(index: u32, gateway: Option<IpAddr>) -> Self {
        Self { index, gateway, weight: 1, onlink: false, other: String::new() }
    }
}

/// A route as `RTM_GETROUTE` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// `RTA_DST`; `0.0.0.0/0` or `::/0` for a default route.
    pub destination: IpNet,
    /// `RTA_SRC`, IPv6 only: the route is only for packets from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<IpNet>,
    /// `RTA_TABLE`.
    pub table: u32,
    /// `RTA_GATEWAY` or `RTA_VIA`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
    /// `RTA_PREFSRC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpAddr>,
    /// `RTA_PRIORITY`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<u32>,
    /// `RT_SCOPE_*`.
    pub scope: u8,
    /// `RTN_*`: 1 unicast, 6 blackhole, …
    pub kind: u8,
    /// `RTPROT_*`.
    pub protocol: u8,
    /// `RTNH_F_ONLINK`.
    #[serde(default)]
    pub onlink: bool,
    /// Type of service (`rtm_tos`).
    #[serde(default)]
    pub tos: u8,
    /// `RTA_METRICS`: `RTAX_*` number and value (2 mtu, 8 advmss, …), sorted by number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<(u16, u32)>,
    /// `RTA_MULTIPATH`; empty for a route with one next hop.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub next_hops: Vec<NextHop>,
    /// Hex of the attributes above none covers (encapsulation, `RTA_PREF`, …), as the kernel sent them, in the order of their
    /// numbers; given back byte for byte. A route that ends by itself (IPv6) has its seconds here, as `RTA_EXPIRES`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub other: String,
}

impl Route {
    /// A unicast route in the main table, protocol static, as a claim configures it.
    #[must_use]
    pub fn to(destination: IpNet) -> Self {
        Self {
            destination,
            from: None,
            table: TABLE_MAIN,
            gateway: None,
            source: None,
            metric: None,
            scope: 0,
            kind: 1,
            protocol: PROTO_STATIC,
            onlink: false,
            tos: 0,
            metrics: Vec::new(),
            next_hops: Vec::new(),
            other: String::new(),
        }
    }

    /// Whether it is a default route.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.destination.prefix_len() == 0
    }

    /// Whether it leaves by no link: blackhole, unreachable, prohibit, throw (`RTN_*` 6 to 9).
    #[must_use]
    pub fn is_dead_end(&self) -> bool {
        (6..=9).contains(&self.kind)
    }

    /// True for IPv6.
    #[must_use]
    pub fn is_ipv6(&self) -> bool {
        matches!(self.destination, IpNet::V6(_))
    }

    /// Seconds until the kernel drops it, as they were when it was read; none for a route that stays.
    #[must_use]
    pub fn expires(&self) -> Option<u32> {
        codec::expires(&self.other)
    }

    /// The same route, staying for ever.
    #[must_use]
    pub fn without_expiry(&self) -> Self {
        Self { other: codec::without_expiry(&self.other), ..self.clone() }
    }

    /// Whether the kernel takes both for one: same destination, source, table, metric and type of service.
    #[must_use]
    pub fn same_key(&self, other: &Self) -> bool {
        let key = |r: &Self| (r.destination.trunc(), r.from, r.table, r.metric.unwrap_or(0), r.tos);
        key(self) == key(other)
    }
}

impl fmt::Display for Route {
    /// As `ip route` would show it: `10.0.0.0/8 via 192.0.2.1 table 100 metric 50`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.destination)?;
        let optional: [(&str, Option<String>); 4] = [
            ("from", self.from.map(|n| n.to_string())),
            ("via", self.gateway.map(|ip| ip.to_string())),
            ("src", self.source.map(|ip| ip.to_string())),
            ("metric", self.metric.map(|m| m.to_string())),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                write!(f, " {name} {value}")?;
            }
        }
        if self.table != TABLE_MAIN {
            write!(f, " table {}", self.table)?;
        }
        write!(f, " proto {} scope {}", self.protocol, self.scope)?;
        if self.kind != 1 {
            write!(f, " type {}", self.kind)?;
        }
        if self.tos != 0 {
            write!(f, " tos {:#x}", self.tos)?;
        }
        if self.onlink {
            f.write_str(" onlink")?;
        }
        for (number, value) in &self.metrics {
            write!(f, " rtax{number} {value}")?;
        }
        for hop in &self.next_hops {
            write!(f, " nexthop {hop}")?;
        }
        if !self.other.is_empty() {
            write!(f, " other {}", self.other)?;
        }
        Ok(())
    }
}

impl fmt::Display for NextHop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gateway) = self.gateway {
            write!(f, "via {gateway} ")?;
        }
        write!(f, "link {} weight {}", self.index, self.weight)?;
        if self.onlink {
            f.write_str(" onlink")?;
        }
        if !self.other.is_empty() {
            write!(f, " other {}", self.other)?;
        }
        Ok(())
    }
}

/// All routes of both families and every table but `local`, each with the indices of the links it leaves by. Left out are the
/// cache and what the kernel makes for its own addresses elsewhere than in `local` (in the table of a VRF).
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(Vec<u32>, Route)>, NetlinkError> {
    list_of(socket, None, deadline)
}

/// The routes of one link, or of all.
pub(super) fn list_of(
    socket: &mut RouteSocket,
    index: Option<u32>,
    deadline: Instant,
) -> Result<Vec<(Vec<u32>, Route)>, NetlinkError> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        message.attributes.extend(index.map(RouteAttribute::Oif));
        for reply in super::raw::dump(socket, RouteNetlinkMessage::GetRoute(message), deadline)? {
            let RouteNetlinkMessage::NewRoute(reply) = reply else { continue };
            if reply.header.address_family != family || reply.header.flags.contains(RouteFlags::Cloned) {
                continue;
            }
            found.extend(
                from_message(&reply).filter(|(links, route)| !is_kernels_own(route) && index.is_none_or(|i| links.contains(&i))),
            );
        }
    }
    Ok(found)
}

/// Table `local`, and local, broadcast, anycast and multicast routes (`RTN_*` 2 to 5) that the kernel made.
fn is_kernels_own(route: &Route) -> bool {
    route.table == TABLE_LOCAL || (route.protocol == PROTO_KERNEL && (2..=5).contains(&route.kind))
}
