//! Moving links between namespaces.
//!
//! The move is one `RTM_NEWLINK` that carries namespace, new index, name and MTU. The kernel moves first and applies the rest
//! afterwards, so a refused attribute leaves the link moved under its old name: check beforehand, and look afterwards.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::LinkAddress;
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
    let _ = m;
    todo!()
}

/// Sends all moves in one pipeline on `from`, a socket in the namespace they leave, and returns each one's answer, in order.
/// An error says nothing about where the link is: look in both namespaces.
pub fn send(from: &mut RouteSocket, moves: &[Move<'_>], deadline: Instant) -> Vec<Result<(), NetlinkError>> {
    let _ = (from, moves, deadline);
    todo!()
}
