//! Policy rules.

use std::time::Instant;

use ipnet::IpNet;
use netlink_packet_route::rule::RuleMessage;
use serde::{Deserialize, Serialize};

use crate::netlink::{NetlinkError, Request, RouteSocket};

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

/// Reads the kernel's form. None when the message is not an IPv4 or IPv6 rule.
#[must_use]
pub fn from_message(message: &RuleMessage) -> Option<Rule> {
    let _ = message;
    todo!()
}

/// The request that adds `rule`.
#[must_use]
pub fn add_request(rule: &Rule) -> Request {
    let _ = rule;
    todo!()
}

/// The request that deletes `rule`.
#[must_use]
pub fn delete_request(rule: &Rule) -> Request {
    let _ = rule;
    todo!()
}

/// All rules of both families.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<Rule>, NetlinkError> {
    let _ = (socket, deadline);
    todo!()
}
