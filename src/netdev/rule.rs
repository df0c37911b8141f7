//! Policy rules.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Nla};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use serde::{Deserialize, Serialize};

use super::raw;
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `FR_ACT_TO_TBL`, `linux/fib_rules.h`.
pub const ACTION_TO_TABLE: u8 = 1;
/// `RT_TABLE_DEFAULT`, `linux/rtnetlink.h`.
pub const TABLE_DEFAULT: u32 = 253;

/// A policy rule as `RTM_GETRULE` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rule {
    /// True for IPv6.
    pub ipv6: bool,
    /// `FRA_PRIORITY`; none lets the kernel choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// `FRA_SRC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<IpNet>,
    /// `FRA_DST`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<IpNet>,
    /// `FRA_TABLE`.
    pub table: u32,
    /// `FR_ACT_*`: 1 to a table, 6 blackhole, 7 unreachable, 8 prohibit.
    pub action: u8,
    /// Type of service (`tos` of the header).
    #[serde(default)]
    pub tos: u8,
    /// `FIB_RULE_INVERT`.
    #[serde(default)]
    pub invert: bool,
    /// `FRA_PROTOCOL`: who made it (2 kernel).
    #[serde(default)]
    pub protocol: u8,
    /// `FRA_IIFNAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_link: Option<String>,
    /// `FRA_OIFNAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_link: Option<String>,
    /// Hex of the attributes above none covers (fwmark, ports, suppress, …), as the kernel sent them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub other: String,
}

impl Rule {
    /// A rule that sends everything to `table`; set what it selects.
    #[must_use]
    pub fn to_table(ipv6: bool, table: u32) -> Self {
        Self {
            ipv6,
            priority: None,
            source: None,
            destination: None,
            table,
            action: ACTION_TO_TABLE,
            tos: 0,
            invert: false,
            protocol: 0,
            input_link: None,
            output_link: None,
            other: String::new(),
        }
    }
}

/// `FRA_FWMARK`, `FRA_SUPPRESS_PREFIXLEN`, `FRA_FWMASK`, `linux/fib_rules.h`.
const FRA_FWMARK: u16 = 10;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_FWMASK: u16 = 16;

/// [`Rule::other`] for a firewall mark with its mask, and for the longest prefix whose routes do not count.
#[must_use]
pub fn selectors(mark: Option<(u32, u32)>, suppress_prefix_length: Option<u32>) -> String {
    let values = [
        (FRA_FWMARK, mark.map(|(mark, _)| mark)),
        (FRA_SUPPRESS_PREFIXLEN, suppress_prefix_length),
        (FRA_FWMASK, mark.map(|(_, mask)| mask)),
    ];
    let attribute = |(kind, value): (u16, Option<u32>)| {
        Some((kind, raw::bytes(&netlink_packet_core::DefaultNla::new(kind, value?.to_ne_bytes().to_vec()))))
    };
    raw::to_hex(values.into_iter().filter_map(attribute).collect())
}

impl fmt::Display for Rule {
    /// As `ip rule` would show it: `100: from 10.0.0.0/8 lookup 100`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(priority) = self.priority {
            write!(f, "{priority}: ")?;
        }
        if self.invert {
            f.write_str("not ")?;
        }
        f.write_str(if self.ipv6 { "IPv6 from " } else { "from " })?;
        match self.source {
            Some(source) => write!(f, "{source}")?,
            None => f.write_str("all")?,
        }
        let optional: [(&str, Option<String>); 3] = [
            ("to", self.destination.map(|n| n.to_string())),
            ("iif", self.input_link.clone()),
            ("oif", self.output_link.clone()),
        ];
        for (name, value) in optional {
            if let Some(value) = value {
                write!(f, " {name} {value}")?;
            }
        }
        if self.tos != 0 {
            write!(f, " tos {:#x}", self.tos)?;
        }
        match self.action {
            ACTION_TO_TABLE => write!(f, " lookup {}", self.table)?,
            action => write!(f, " action {action}")?,
        }
        if self.protocol != 0 {
            write!(f, " proto {}", self.protocol)?;
        }
        if !self.other.is_empty() {
            write!(f, " other {}", self.other)?;
        }
        Ok(())
    }
}

/// Reads the kernel's form. None when the message is not an IPv4 or IPv6 rule.
#[must_use]
pub fn from_message(message: &RuleMessage) -> Option<Rule> {
    let header = &message.header;
    let ipv6 = match header.family {
        AddressFamily::Inet => false,
        AddressFamily::Inet6 => true,
        _ => return None,
    };
    let any = if ipv6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let (mut source, mut destination, mut other) = (any, any, Vec::new());
    let mut rule = Rule::to_table(ipv6, u32::from(header.table));
    rule.action = u8::from(header.action);
    rule.tos = header.tos;
    rule.invert = header.flags.contains(RuleFlags::Invert);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => rule.priority = Some(*priority),
            RuleAttribute::Source(ip) => source = *ip,
            RuleAttribute::Destination(ip) => destination = *ip,
            RuleAttribute::Table(table) => rule.table = *table,
            RuleAttribute::Protocol(protocol) => rule.protocol = u8::from(*protocol),
            RuleAttribute::Iifname(name) => rule.input_link = Some(name.clone()),
            RuleAttribute::Oifname(name) => rule.output_link = Some(name.clone()),
            // -1: the kernel sends it always, and it is the same as nothing.
            RuleAttribute::SuppressPrefixLen(u32::MAX) => {}
            _ => other.push((attribute.kind() & netlink_packet_core::NLA_TYPE_MASK, raw::bytes(attribute))),
        }
    }
    if header.src_len > 0 {
        rule.source = Some(network(ipv6, source, header.src_len)?);
    }
    if header.dst_len > 0 {
        rule.destination = Some(network(ipv6, destination, header.dst_len)?);
    }
    rule.other = raw::to_hex(other);
    Some(rule)
}

fn network(ipv6: bool, ip: IpAddr, prefix_len: u8) -> Option<IpNet> {
    if ip.is_ipv6() == ipv6 { IpNet::new(ip, prefix_len).ok() } else { None }
}

/// The request that adds `rule`. It is an error (`EEXIST`) when an equal one is there. An `other` that is no hex of attributes
/// is left out.
#[must_use]
pub fn add_request(rule: &Rule) -> Request {
    Request { message: RouteNetlinkMessage::NewRule(to_message(rule)), flags: NLM_F_CREATE | NLM_F_EXCL }
}

/// The request that deletes `rule`.
#[must_use]
pub fn delete_request(rule: &Rule) -> Request {
    Request { message: RouteNetlinkMessage::DelRule(to_message(rule)), flags: 0 }
}

fn to_message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header = RuleHeader {
        family: if rule.ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet },
        dst_len: rule.destination.map_or(0, |net| net.prefix_len()),
        src_len: rule.source.map_or(0, |net| net.prefix_len()),
        tos: rule.tos,
        // A number above 255 is only in the attribute.
        table: u8::try_from(rule.table).unwrap_or(0),
        action: RuleAction::from(rule.action),
        flags: if rule.invert { RuleFlags::Invert } else { RuleFlags::empty() },
    };
    let attributes = &mut message.attributes;
    attributes.extend(rule.destination.map(|net| RuleAttribute::Destination(net.addr())));
    attributes.extend(rule.source.map(|net| RuleAttribute::Source(net.addr())));
    attributes.extend(rule.input_link.clone().map(RuleAttribute::Iifname));
    attributes.extend(rule.output_link.clone().map(RuleAttribute::Oifname));
    attributes.extend(rule.priority.map(RuleAttribute::Priority));
    // No table: a goto, a blackhole, or a rule whose table is that of the VRF; the kernel refuses a 0 beside the last.
    if rule.table != 0 {
        attributes.push(RuleAttribute::Table(rule.table));
    }
    if rule.protocol != 0 {
        attributes.push(RuleAttribute::Protocol(rule.protocol.into()));
    }
    attributes.extend(raw::from_hex(&rule.other).unwrap_or_default().into_iter().map(RuleAttribute::Other));
    message
}

/// All rules of both families.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<Rule>, NetlinkError> {
    let mut found = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut message = RuleMessage::default();
        message.header.family = family;
        for reply in raw::dump(socket, RouteNetlinkMessage::GetRule(message), deadline)? {
            if let RouteNetlinkMessage::NewRule(reply) = reply
                && reply.header.family == family
            {
                found.extend(from_message(&reply));
            }
        }
    }
    Ok(found)
}
