//! XDP over rtnetlink: which programs a link has, and those that are attached without a link of their own.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

use super::super::raw;
use super::Place;
use crate::netlink::decode::{find, read_u32};
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `IFLA_XDP`, `linux/if_link.h`.
pub const IFLA_XDP: u16 = 43;
// In IFLA_XDP, linux/if_link.h.
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_FLAGS: u16 = 3;
const IFLA_XDP_DRV_PROG_ID: u16 = 5;
const IFLA_XDP_SKB_PROG_ID: u16 = 6;
const IFLA_XDP_HW_PROG_ID: u16 = 7;
const IFLA_XDP_EXPECTED_FD: u16 = 8;
/// `XDP_FLAGS_UPDATE_IF_NOEXIST`, `linux/if_link.h`.
const IF_NONE: u32 = 1;
/// `XDP_FLAGS_REPLACE`, `linux/if_link.h`: only in place of the program that is expected.
const REPLACE: u32 = 1 << 4;
/// `NLA_F_NESTED`, `linux/netlink.h`.
const NESTED: u16 = 1 << 15;
/// For a descriptor: no program.
const NONE: i32 = -1;

/// Numbers of the XDP programs of a link, in each of its modes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Xdp {
    /// In the driver.
    pub native: Option<u32>,
    /// In the kernel's own receive path.
    pub generic: Option<u32>,
    /// In the NIC.
    pub offload: Option<u32>,
}

impl Xdp {
    /// Reads the value of an `IFLA_XDP`.
    #[must_use]
    pub fn parse(value: &[u8]) -> Self {
        let id = |kind| find(value, kind).and_then(|value| read_u32(value, 0)).filter(|id| *id != 0);
        Self { native: id(IFLA_XDP_DRV_PROG_ID), generic: id(IFLA_XDP_SKB_PROG_ID), offload: id(IFLA_XDP_HW_PROG_ID) }
    }

    /// Each that there is.
    pub(super) fn programs(self) -> impl Iterator<Item = (Place, u32)> {
        let all = [(Place::XdpNative, self.native), (Place::XdpGeneric, self.generic), (Place::XdpOffload, self.offload)];
        all.into_iter().filter_map(|(place, id)| Some((place, id?)))
    }
}

fn request(index: u32, fd: i32, flags: u32, expected: Option<i32>) -> Request {
    let number = |kind, value: u32| raw::bytes(&DefaultNla::new(kind, value.to_ne_bytes().to_vec()));
    let mut value = number(IFLA_XDP_FD, fd.cast_unsigned());
    value.extend(number(IFLA_XDP_FLAGS, flags));
    value.extend(expected.map(|fd| number(IFLA_XDP_EXPECTED_FD, fd.cast_unsigned())).unwrap_or_default());
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::Other(DefaultNla::new(IFLA_XDP | NESTED, value)));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// Whether the program at `place` of the link with `index`, where there is one, is there by a link of its own. Changes nothing: the
/// kernel is asked to take the program off on the condition that there is none, and it looks at the link first (`EBUSY`), then at the
/// condition (`EEXIST`).
pub(super) fn is_by_link(socket: &mut RouteSocket, index: u32, place: Place, deadline: Instant) -> Result<bool, NetlinkError> {
    match socket.request(request(index, NONE, place.xdp_flags() | REPLACE, Some(NONE)), deadline) {
        Err(error) if error.errno() == Some(libc::EBUSY) => Ok(true),
        Err(error) if error.errno() == Some(libc::EEXIST) => Ok(false),
        // There is none.
        Ok(()) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The request that takes `program` off, if it is what is there.
pub(super) fn detach_request(index: u32, place: Place, program: &impl AsFd) -> Request {
    request(index, NONE, place.xdp_flags() | REPLACE, Some(program.as_fd().as_raw_fd()))
}

/// The request that attaches `program`, if there is none.
pub(super) fn attach_request(index: u32, place: Place, program: &impl AsFd) -> Request {
    request(index, program.as_fd().as_raw_fd(), place.xdp_flags() | IF_NONE, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_has_its_own() {
        let number = |kind, value: u32| raw::bytes(&DefaultNla::new(kind, value.to_ne_bytes().to_vec()));
        let value = [number(IFLA_XDP_DRV_PROG_ID, 5), number(IFLA_XDP_SKB_PROG_ID, 0), number(IFLA_XDP_HW_PROG_ID, 7)].concat();
        let xdp = Xdp::parse(&value);
        assert_eq!(xdp, Xdp { native: Some(5), generic: None, offload: Some(7) });
        assert_eq!(xdp.programs().collect::<Vec<_>>(), [(Place::XdpNative, 5), (Place::XdpOffload, 7)]);
        assert_eq!(Xdp::parse(&[2, 0, 2, 0, 0]), Xdp::default());
    }
}
