//! One socket for every netlink family: deadline, sequence check, the kernel's error text, interrupted dumps, pipelining.
//!
//! Blocking by design: netlink work happens on threads of its own (see [`crate::netns::Netns::run`]); a socket stays in the
//! network namespace where it was made, whichever thread uses it later.

use std::time::Instant;

use netlink_packet_route::RouteNetlinkMessage;

use crate::netns::Netns;

/// Why a netlink request failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The kernel refused, with its errno and, where it gave one, its text (extended ack).
    #[error("{}", kernel_text(*errno, message.as_deref()))]
    Kernel {
        /// Positive errno.
        errno: i32,
        /// `NLMSGERR_ATTR_MSG`, when the kernel sent one.
        message: Option<String>,
    },
    /// No answer before the deadline. The request may still have been carried out: look before you act.
    #[error("the kernel did not answer before the deadline")]
    Timeout,
    /// The socket itself failed.
    #[error("netlink socket: {0}")]
    Io(#[from] std::io::Error),
    /// The kernel sent something that can't be decoded.
    #[error("netlink message: {0}")]
    Protocol(String),
    /// A dump was interrupted by changes more often than we retry.
    #[error("netlink dump was interrupted {0} times in a row")]
    Interrupted(u32),
    /// The namespace can't be used.
    #[error(transparent)]
    Netns(#[from] crate::netns::NetnsError),
}

impl NetlinkError {
    /// The kernel's errno, when the kernel is what refused.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Kernel { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

fn kernel_text(errno: i32, message: Option<&str>) -> String {
    let error = std::io::Error::from_raw_os_error(errno);
    match message {
        Some(text) => format!("{error}: {text}"),
        None => error.to_string(),
    }
}

/// One request of a pipeline: the message and the flags beside `NLM_F_REQUEST | NLM_F_ACK` (for example `NLM_F_CREATE`).
#[derive(Debug)]
pub struct Request {
    /// The message.
    pub message: RouteNetlinkMessage,
    /// `NLM_F_*` flags beside `NLM_F_REQUEST | NLM_F_ACK`.
    pub flags: u16,
}

/// A blocking `NETLINK_ROUTE` socket, bound to the namespace it was made in.
#[derive(Debug)]
pub struct RouteSocket {}

impl RouteSocket {
    /// A socket in the namespace of the calling thread.
    ///
    /// # Errors
    /// When the socket can't be made or set up.
    pub fn open() -> Result<Self, NetlinkError> {
        todo!()
    }

    /// A socket in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// When the namespace can't be entered or the socket can't be made.
    pub fn open_in(netns: &Netns) -> Result<Self, NetlinkError> {
        todo!("{netns:?}")
    }

    /// Sends one request and waits for its acknowledgement.
    ///
    /// # Errors
    /// [`NetlinkError::Kernel`] when the kernel refuses, [`NetlinkError::Timeout`] at the deadline.
    pub fn request(&mut self, request: Request, deadline: Instant) -> Result<(), NetlinkError> {
        todo!("{request:?} {deadline:?}")
    }

    /// Sends a get request that has one reply (for example one link).
    ///
    /// # Errors
    /// As [`Self::request`].
    pub fn get(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<RouteNetlinkMessage, NetlinkError> {
        todo!("{message:?} {deadline:?}")
    }

    /// Dumps a table. A dump that the kernel marks as interrupted (`NLM_F_DUMP_INTR`) is done again, up to 16 times.
    ///
    /// # Errors
    /// As [`Self::request`], and [`NetlinkError::Interrupted`].
    pub fn dump(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        todo!("{message:?} {deadline:?}")
    }

    /// Sends all requests in as few system calls as fit and collects each one's result, in order. The kernel carries them out
    /// one by one; a refused one does not stop the next.
    ///
    /// At the deadline those without an answer are [`NetlinkError::Timeout`].
    pub fn pipeline(&mut self, requests: Vec<Request>, deadline: Instant) -> Vec<Result<(), NetlinkError>> {
        todo!("{requests:?} {deadline:?}")
    }
}
