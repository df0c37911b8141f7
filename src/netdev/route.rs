//! Routes of every table.

use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use netlink_packet_route::route::RouteMessage;
use serde::{Deserialize, Serialize};

use crate::netlink::{NetlinkError, Request, RouteSocket};

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
}

/// A route as `RTM_GETROUTE` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// `RTA_DST`; `0.0.0.0/0` or `::/0` for a default route.
    pub destination: IpNet,
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
    /// numbers; given back byte for byte.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub other: String,
}

impl Route {
    /// A unicast route in the main table, protocol static, as a claim configures it.
    #[must_use]
    pub fn to(destination: IpNet) -> Self {
        Self {
            destination,
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
}

/// Reads the kernel's form: the links it leaves by (one, or those of the next hops; none for a blackhole), and the route.
/// None when the message can't be read as an IP route.
#[must_use]
pub fn from_message(message: &RouteMessage) -> Option<(Vec<u32>, Route)> {
    let _ = message;
    todo!()
}

/// The request that adds `route` by the link with `index`. With `replace`, an equal one (same destination, table, metric, tos)
/// is replaced; otherwise it is an error (`EEXIST`).
#[must_use]
pub fn add_request(index: u32, route: &Route, replace: bool) -> Request {
    let _ = (index, route, replace);
    todo!()
}

/// The request that deletes `route` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, route: &Route) -> Request {
    let _ = (index, route);
    todo!()
}

/// All routes of both families and every table but the cache, each with the indices of the links it leaves by.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(Vec<u32>, Route)>, NetlinkError> {
    let _ = (socket, deadline);
    todo!()
}
