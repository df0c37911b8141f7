//! Between the kernel's route messages and [`Route`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, Emitable, NLA_F_NESTED, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, Nla};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteIp6Tunnel, RouteIpTunnel, RouteLwTunnelEncap, RouteMessage,
    RouteMetric, RouteNextHop, RouteNextHopFlags, RouteProtocol, RouteScope, RouteType, RouteVia, RouteXfrmTunnel,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::super::raw;
use super::{NextHop, Route};
use crate::netlink::Request;

/// `RTA_METRICS`, `linux/rtnetlink.h`.
const RTA_METRICS: u16 = 8;
/// `RTA_ENCAP`, `linux/rtnetlink.h`.
const RTA_ENCAP: u16 = 22;
/// `RTA_EXPIRES`, `linux/rtnetlink.h`: seconds.
const RTA_EXPIRES: u16 = 23;
/// `RTAX_CC_ALGO`, `linux/rtnetlink.h`: the one metric that is a text.
const RTAX_CC_ALGO: u16 = 16;
/// Units of `rta_expires` in a second (`USER_HZ`).
const USER_HZ: u32 = 100;

/// Reads the kernel's form: the links it leaves by (one, or those of the next hops; none for a blackhole), and the route.
/// None when the message can't be read as an IP route.
#[must_use]
pub fn from_message(message: &RouteMessage) -> Option<(Vec<u32>, Route)> {
    let any = match message.header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let mut route = header_only(&message.header, any)?;
    let (mut destination, mut from, mut link, mut other) = (any, any, None, Vec::new());
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(ip) => destination = address(ip)?,
            RouteAttribute::Source(ip) => from = address(ip)?,
            RouteAttribute::Gateway(ip) => route.gateway = Some(address(ip)?),
            RouteAttribute::Via(via) => route.gateway = Some(via_address(via)?),
            RouteAttribute::PrefSource(ip) => route.source = Some(address(ip)?),
            RouteAttribute::Priority(metric) => route.metric = Some(*metric),
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Metrics(list) => match metrics(list) {
                Some(list) => route.metrics = list,
                None => other.push(kept(attribute)),
            },
            RouteAttribute::MultiPath(hops) => route.next_hops = hops.iter().map(next_hop).collect::<Option<_>>()?,
            RouteAttribute::CacheInfo(info) if any.is_ipv6() && (1..=i32::MAX as u32).contains(&info.expires) => {
                other.push(kept(&RouteAttribute::Expires((info.expires / USER_HZ).max(1))));
            }
            // What the kernel counts, and the number of a next-hop object: its contents are shown beside it, and the object
            // itself goes away with the link.
            RouteAttribute::CacheInfo(_)
            | RouteAttribute::Uid(_)
            | RouteAttribute::Iif(_)
            | RouteAttribute::MfcStats(_)
            | RouteAttribute::NhId(_)
            | RouteAttribute::Expires(_)
            | RouteAttribute::MulticastExpires(_) => {}
            _ => other.push(kept(attribute)),
        }
    }
    route.destination = network(destination, message.header.destination_prefix_length)?;
    if message.header.source_prefix_length > 0 {
        route.from = Some(network(from, message.header.source_prefix_length)?);
    }
    route.other = raw::to_hex(other);
    let links = if route.next_hops.is_empty() { link.into_iter().collect() } else { hop_links(&route.next_hops) };
    Some((links, route))
}

fn header_only(header: &RouteHeader, any: IpAddr) -> Option<Route> {
    let mut route = Route::to(network(any, 0)?);
    route.table = u32::from(header.table);
    route.scope = u8::from(header.scope);
    route.kind = u8::from(header.kind);
    route.protocol = u8::from(header.protocol);
    route.onlink = header.flags.contains(RouteFlags::Onlink);
    route.tos = header.tos;
    Some(route)
}

fn network(ip: IpAddr, prefix_len: u8) -> Option<IpNet> {
    IpNet::new(ip, prefix_len).ok()
}

fn address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn via_address(via: &RouteVia) -> Option<IpAddr> {
    match via {
        RouteVia::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteVia::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn hop_links(hops: &[NextHop]) -> Vec<u32> {
    let mut links: Vec<u32> = hops.iter().map(|hop| hop.index).collect();
    links.sort_unstable();
    links.dedup();
    links
}

/// None when there is one among them that is no 32-bit number: then the whole attribute is kept as it is.
fn metrics(list: &[RouteMetric]) -> Option<Vec<(u16, u32)>> {
    let mut found = Vec::with_capacity(list.len());
    for metric in list {
        let (kind, value) = raw::kind_and_value(metric);
        let value: [u8; 4] = value.try_into().ok()?;
        if kind == RTAX_CC_ALGO {
            return None;
        }
        found.push((kind, u32::from_ne_bytes(value)));
    }
    found.sort_unstable();
    Some(found)
}

fn next_hop(hop: &RouteNextHop) -> Option<NextHop> {
    let mut found = NextHop::by(hop.interface_index, None);
    found.weight = u16::from(hop.hops) + 1;
    found.onlink = hop.flags.contains(RouteNextHopFlags::Onlink);
    let mut other = Vec::new();
    for attribute in &hop.attributes {
        match attribute {
            RouteAttribute::Gateway(ip) => found.gateway = Some(address(ip)?),
            RouteAttribute::Via(via) => found.gateway = Some(via_address(via)?),
            _ => other.push(kept(attribute)),
        }
    }
    found.other = raw::to_hex(other);
    Some(found)
}

/// An attribute for `other`. The kernel leaves the nested flag out of an encapsulation and asks for it on the way back; and the
/// library panics on three unknown parts of one, so those are written out by hand.
fn kept(attribute: &RouteAttribute) -> (u16, Vec<u8>) {
    let RouteAttribute::Encap(parts) = attribute else {
        return (attribute.kind() & netlink_packet_core::NLA_TYPE_MASK, raw::bytes(attribute));
    };
    let mut value = Vec::new();
    for part in parts {
        value.extend(match part {
            RouteLwTunnelEncap::Ip(RouteIpTunnel::Other(unknown))
            | RouteLwTunnelEncap::Ip6(RouteIp6Tunnel::Other(unknown))
            | RouteLwTunnelEncap::Xfrm(RouteXfrmTunnel::Other(unknown)) => raw::bytes(unknown),
            part => raw::bytes(part),
        });
    }
    (RTA_ENCAP, raw::bytes(&DefaultNla::new(RTA_ENCAP | NLA_F_NESTED, value)))
}

/// The seconds of an `RTA_EXPIRES` in `other`.
pub(super) fn expires(other: &str) -> Option<u32> {
    let attribute = raw::from_hex(other)?.into_iter().find(|a| a.kind() == RTA_EXPIRES)?;
    raw::kind_and_value(&attribute).1.try_into().ok().map(u32::from_ne_bytes)
}

/// `other` without an `RTA_EXPIRES`.
pub(super) fn without_expiry(other: &str) -> String {
    match raw::from_hex(other) {
        Some(all) => raw::to_hex(all.iter().filter(|a| a.kind() != RTA_EXPIRES).map(|a| (a.kind(), raw::bytes(a))).collect()),
        None => other.to_owned(),
    }
}

/// The request that adds `route` by the link with `index` (next hops carry their own). With `replace`, an equal one (same
/// destination, table, metric, tos) is replaced; otherwise it is an error (`EEXIST`). An `other` that is no hex of attributes
/// is left out.
#[must_use]
pub fn add_request(index: u32, route: &Route, replace: bool) -> Request {
    let flags = if replace { NLM_F_CREATE | NLM_F_REPLACE } else { NLM_F_CREATE | NLM_F_EXCL };
    Request { message: RouteNetlinkMessage::NewRoute(message(index, route)), flags }
}

/// The request that deletes `route` from the link with `index`.
#[must_use]
pub fn delete_request(index: u32, route: &Route) -> Request {
    Request { message: RouteNetlinkMessage::DelRoute(message(index, route)), flags: 0 }
}

fn message(index: u32, route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = header(route);
    let attributes = &mut message.attributes;
    if route.destination.prefix_len() > 0 {
        attributes.push(RouteAttribute::Destination(route.destination.addr().into()));
    }
    attributes.extend(route.from.map(|net| RouteAttribute::Source(net.addr().into())));
    attributes.push(RouteAttribute::Table(route.table));
    attributes.extend(route.gateway.map(|ip| gateway(route.is_ipv6(), ip)));
    attributes.extend(route.source.map(|ip| RouteAttribute::PrefSource(ip.into())));
    attributes.extend(route.metric.map(RouteAttribute::Priority));
    if !route.metrics.is_empty() {
        attributes.push(RouteAttribute::Other(metrics_attribute(&route.metrics)));
    }
    if !route.next_hops.is_empty() {
        attributes.push(RouteAttribute::MultiPath(route.next_hops.iter().map(|h| hop(route.is_ipv6(), h)).collect()));
    } else if !route.is_dead_end() {
        attributes.push(RouteAttribute::Oif(index));
    }
    attributes.extend(others(&route.other));
    message
}

fn header(route: &Route) -> RouteHeader {
    RouteHeader {
        address_family: if route.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet },
        destination_prefix_length: route.destination.prefix_len(),
        source_prefix_length: route.from.map_or(0, |net| net.prefix_len()),
        tos: route.tos,
        // A number above 255 is only in the attribute.
        table: u8::try_from(route.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC),
        protocol: RouteProtocol::from(route.protocol),
        scope: RouteScope::from(route.scope),
        kind: RouteType::from(route.kind),
        flags: if route.onlink { RouteFlags::Onlink } else { RouteFlags::empty() },
    }
}

/// A gateway of the other family is an `RTA_VIA`.
fn gateway(ipv6: bool, ip: IpAddr) -> RouteAttribute {
    if ip.is_ipv6() == ipv6 { RouteAttribute::Gateway(ip.into()) } else { RouteAttribute::Via(ip.into()) }
}

fn hop(ipv6: bool, hop: &NextHop) -> RouteNextHop {
    let mut message = RouteNextHop::default();
    message.interface_index = hop.index;
    message.hops = u8::try_from(hop.weight.saturating_sub(1)).unwrap_or(u8::MAX);
    message.flags = if hop.onlink { RouteNextHopFlags::Onlink } else { RouteNextHopFlags::empty() };
    message.attributes.extend(hop.gateway.map(|ip| gateway(ipv6, ip)));
    message.attributes.extend(others(&hop.other));
    message
}

fn metrics_attribute(metrics: &[(u16, u32)]) -> DefaultNla {
    let list: Vec<DefaultNla> =
        metrics.iter().map(|(kind, value)| DefaultNla::new(*kind, value.to_ne_bytes().to_vec())).collect();
    let mut value = vec![0; list.as_slice().buffer_len()];
    list.as_slice().emit(&mut value);
    DefaultNla::new(RTA_METRICS, value)
}

fn others(text: &str) -> impl Iterator<Item = RouteAttribute> {
    raw::from_hex(text).unwrap_or_default().into_iter().map(RouteAttribute::Other)
}
