//! A socket of one generic netlink family (`linux/genetlink.h`), above the same [`Socket`] as the route family's.

use std::time::Instant;

use super::{Message, NetlinkError, Socket, decode, encode};
use crate::netns::Netns;

/// `NETLINK_GENERIC`, `linux/netlink.h`.
const NETLINK_GENERIC: isize = 16;
/// `GENL_ID_CTRL`, `linux/genetlink.h`: the family that knows the others.
const CONTROLLER: u16 = 0x10;
/// `CTRL_CMD_GETFAMILY`, `linux/genetlink.h`.
const CTRL_CMD_GETFAMILY: u8 = 3;
/// `CTRL_ATTR_FAMILY_ID`, `linux/genetlink.h`: two bytes.
const CTRL_ATTR_FAMILY_ID: u16 = 1;
/// `CTRL_ATTR_FAMILY_NAME`, `linux/genetlink.h`.
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// `GENL_HDRLEN`, `linux/genetlink.h`: command, version, two reserved bytes.
const HEADER: usize = 4;
/// The version of every family that is spoken here (`ETHTOOL_GENL_VERSION`, `linux/ethtool_netlink.h`).
const VERSION: u8 = 1;

/// A blocking socket of one generic netlink family, bound to the namespace it was made in.
#[derive(Debug)]
pub struct GenericSocket {
    socket: Socket,
    family: u16,
}

impl GenericSocket {
    /// A socket of the family called `name` in the calling thread's namespace; none where the kernel has no such family.
    ///
    /// # Errors
    /// When the socket can't be made, or as [`Socket::get`].
    pub fn open(name: &str, deadline: Instant) -> Result<Option<Self>, NetlinkError> {
        Self::of(Socket::open(NETLINK_GENERIC)?, name, deadline)
    }

    /// As [`Self::open`], in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// When the namespace can't be entered, or as [`Self::open`].
    pub fn open_in(netns: &Netns, name: &str, deadline: Instant) -> Result<Option<Self>, NetlinkError> {
        Self::of(Socket::open_in(netns, NETLINK_GENERIC)?, name, deadline)
    }

    fn of(mut socket: Socket, name: &str, deadline: Instant) -> Result<Option<Self>, NetlinkError> {
        let mut attributes = Vec::new();
        encode::attribute(&mut attributes, CTRL_ATTR_FAMILY_NAME, &[name.as_bytes(), &[0]].concat());
        let reply = match socket.get(&message(CONTROLLER, CTRL_CMD_GETFAMILY, &attributes), deadline) {
            Err(error) if error.errno() == Some(libc::ENOENT) => return Ok(None),
            reply => reply?,
        };
        let id = decode::find(body(&reply), CTRL_ATTR_FAMILY_ID).and_then(|value| decode::read_u16(value, 0));
        match id {
            Some(family) => Ok(Some(Self { socket, family })),
            None => Err(NetlinkError::Protocol(format!("no number for the family {name}"))),
        }
    }

    /// Sends a command that has one reply, and returns the reply's attributes.
    ///
    /// # Errors
    /// As [`Socket::get`].
    pub fn get(&mut self, command: u8, attributes: &[u8], deadline: Instant) -> Result<Vec<u8>, NetlinkError> {
        let reply = self.socket.get(&message(self.family, command, attributes), deadline)?;
        Ok(body(&reply).to_vec())
    }

    /// Sends a command and waits for its acknowledgement.
    ///
    /// # Errors
    /// As [`Socket::pipeline`].
    pub fn request(&mut self, command: u8, attributes: &[u8], deadline: Instant) -> Result<(), NetlinkError> {
        let message = message(self.family, command, attributes);
        self.socket.pipeline(std::slice::from_ref(&message), deadline).pop().unwrap_or(Err(NetlinkError::NotSent))
    }
}

fn message(family: u16, command: u8, attributes: &[u8]) -> Message {
    Message { kind: family, flags: 0, payload: [&[command, VERSION, 0, 0], attributes].concat() }
}

/// The attributes of a reply; none of one that is too short.
fn body(reply: &Message) -> &[u8] {
    reply.payload.get(HEADER..).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn the_kernel_knows_its_controller_and_not_what_does_not_exist() {
        let found = GenericSocket::open("nlctrl", soon()).unwrap().unwrap();
        assert_eq!(found.family, CONTROLLER);
        assert!(GenericSocket::open("no-such-family", soon()).unwrap().is_none());
        assert!(GenericSocket::open("longer-than-any-family", soon()).unwrap_err().errno().is_some());
    }

    #[test]
    fn a_reply_without_a_header_has_no_attributes() {
        for length in 0..=HEADER {
            assert_eq!(body(&Message { kind: 1, flags: 0, payload: vec![0; length] }), [0; 0]);
        }
    }
}
