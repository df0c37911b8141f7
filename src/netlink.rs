//! One socket for every netlink family: deadline, sequence check, the kernel's error text, interrupted dumps, pipelining.
//!
//! Blocking by design: netlink work happens on threads of its own (see [`crate::netns::Netns::run`]); a socket stays in the
//! network namespace where it was made, whichever thread uses it later.

use std::time::Instant;

use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader, NetlinkSerializable};
use netlink_packet_route::RouteNetlinkMessage;

pub mod decode;
pub mod encode;
mod generic;
mod socket;

pub use generic::GenericSocket;
pub(crate) use socket::set_receive_buffer;
pub use socket::{Message, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, Socket};

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
    /// The deadline passed before the request was sent: nothing was done.
    #[error("the deadline passed before the request was sent to the kernel")]
    NotSent,
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
///
/// The kernel works inside the system call, so a call outlasts its deadline by as long as the kernel needs for what was sent
/// last (15 to 20 ms for the move of a link, seconds for closing a large NIC).
#[derive(Debug)]
pub struct RouteSocket {
    socket: Socket,
}

/// `NETLINK_ROUTE`, `linux/netlink.h`.
const NETLINK_ROUTE: isize = 0;

impl RouteSocket {
    /// A socket in the namespace of the calling thread.
    ///
    /// # Errors
    /// When the socket can't be made or set up.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { socket: Socket::open(NETLINK_ROUTE)? })
    }

    /// A socket in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// When the namespace can't be entered or the socket can't be made.
    pub fn open_in(netns: &Netns) -> Result<Self, NetlinkError> {
        Ok(Self { socket: Socket::open_in(netns, NETLINK_ROUTE)? })
    }

    /// Sends one request and waits for its acknowledgement.
    ///
    /// # Errors
    /// [`NetlinkError::Kernel`] when the kernel refuses; at the deadline [`NetlinkError::NotSent`] (nothing was done) or
    /// [`NetlinkError::Timeout`].
    pub fn request(&mut self, request: Request, deadline: Instant) -> Result<(), NetlinkError> {
        self.pipeline(vec![request], deadline).pop().unwrap_or(Err(NetlinkError::NotSent))
    }

    /// Sends a get request that has one reply (for example one link).
    ///
    /// # Errors
    /// As [`Self::request`], and [`NetlinkError::Protocol`] when the reply can't be decoded.
    pub fn get(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<RouteNetlinkMessage, NetlinkError> {
        decoded(&self.get_raw(message, deadline)?)
    }

    /// As [`Self::get`], the reply undecoded: for attributes that the typed form lacks.
    ///
    /// # Errors
    /// As [`Self::request`].
    pub fn get_raw(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<Message, NetlinkError> {
        self.socket.get(&encoded(&message, 0), deadline)
    }

    /// Dumps a table. A dump that the kernel marks as interrupted (`NLM_F_DUMP_INTR`) is done again, up to 16 times.
    ///
    /// The socket checks strictly: the kernel refuses header fields and attributes that the table's filter does not know.
    ///
    /// # Errors
    /// As [`Self::get`], and [`NetlinkError::Interrupted`]. One message that can't be decoded fails the dump: a table with holes
    /// would be taken for the truth.
    pub fn dump(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
        self.dump_raw(message, deadline)?.iter().map(decoded).collect()
    }

    /// As [`Self::dump`], the messages undecoded.
    ///
    /// # Errors
    /// As [`Self::request`], and [`NetlinkError::Interrupted`].
    pub fn dump_raw(&mut self, message: RouteNetlinkMessage, deadline: Instant) -> Result<Vec<Message>, NetlinkError> {
        self.socket.dump(&encoded(&message, 0), deadline)
    }

    /// Sends all requests in as few system calls as fit and collects each one's result, in order. The kernel carries them out
    /// one by one; a refused one does not stop the next.
    ///
    /// At the deadline those sent without an answer are [`NetlinkError::Timeout`], those not sent [`NetlinkError::NotSent`]. Up to
    /// 32 requests go in one system call, and the deadline is looked at only between calls: send slow ones one by one.
    pub fn pipeline(&mut self, requests: Vec<Request>, deadline: Instant) -> Vec<Result<(), NetlinkError>> {
        let messages: Vec<_> = requests.iter().map(|request| encoded(&request.message, request.flags)).collect();
        self.socket.pipeline(&messages, deadline)
    }
}

fn encoded(message: &RouteNetlinkMessage, flags: u16) -> Message {
    let mut payload = vec![0; message.buffer_len()];
    message.serialize(&mut payload);
    Message { kind: message.message_type(), flags, payload }
}

fn decoded(message: &Message) -> Result<RouteNetlinkMessage, NetlinkError> {
    let mut header = NetlinkHeader::default();
    header.message_type = message.kind;
    header.flags = message.flags;
    RouteNetlinkMessage::deserialize(&header, &message.payload)
        .map_err(|error| NetlinkError::Protocol(format!("type {}: {error}", message.kind)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn errors_say_what_the_kernel_said() {
        let error = NetlinkError::Kernel { errno: libc::EINVAL, message: Some("mtu greater than device maximum".into()) };
        assert_eq!(error.to_string(), "Invalid argument (os error 22): mtu greater than device maximum");
        assert_eq!(error.errno(), Some(libc::EINVAL));
        assert_eq!(NetlinkError::Timeout.errno(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]
        #[test]
        fn any_message_is_decoded_or_refused(kind in 16u16..112, payload in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = decoded(&Message { kind, flags: 0, payload });
        }

        #[test]
        fn messages_with_odd_attributes_are_decoded_or_refused(
            kind in 16u16..34, attribute in 0u16..70, header in 4usize..25, value in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut payload = vec![2; header];
            payload.extend(u16::try_from(value.len() + 4).unwrap().to_ne_bytes());
            payload.extend(attribute.to_ne_bytes());
            payload.extend(value);
            let _ = decoded(&Message { kind, flags: 0, payload });
        }
    }
}
