//! Tells when links, addresses or routes of a namespace change, without saying how: whoever listens looks again.

use std::io::{Error, ErrorKind};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::netlink::{NetlinkError, set_receive_buffer};
use crate::netns::Netns;

/// Groups a monitor can listen to (`RTNLGRP_*`, `linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// `RTNLGRP_LINK`.
    Link,
    /// `RTNLGRP_IPV4_ROUTE` and `RTNLGRP_IPV6_ROUTE`.
    Route,
    /// `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR`.
    Address,
}

impl Group {
    fn numbers(self) -> &'static [u32] {
        match self {
            Self::Link => &[1],
            Self::Route => &[7, 11],
            Self::Address => &[5, 9],
        }
    }
}

/// Why [`Monitor::changed`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// At least one message came; everything that was queued has been read.
    Events,
    /// The kernel dropped messages (`ENOBUFS`): look at everything again.
    Overrun,
}

/// A multicast subscription in one namespace.
#[derive(Debug)]
pub struct Monitor {
    socket: AsyncFd<netlink_sys::Socket>,
}

/// Bytes of the receive buffer we ask for.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Messages read in one go; a flood longer than that makes [`Monitor::changed`] return again.
const DRAIN: usize = 10_000;

impl Monitor {
    /// Subscribes, with a receive buffer of 4 MiB where the system allows it. Needs a tokio runtime with I/O around it.
    ///
    /// # Errors
    /// When the socket can't be made in `netns`.
    pub fn open(netns: &Netns, groups: &[Group]) -> Result<Self, NetlinkError> {
        Self::with_receive_buffer(netns, groups, RECEIVE_BUFFER)
    }

    /// As [`Self::open`], with a receive buffer of `bytes` (the kernel doubles it, and takes no less than about 2 KiB).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_receive_buffer(netns: &Netns, groups: &[Group], bytes: usize) -> Result<Self, NetlinkError> {
        tokio::runtime::Handle::try_current().map_err(Error::other)?;
        let socket = netns.run(|| subscribe(groups, bytes))??;
        #[allow(
            deprecated,
            reason = "the other constructor is unsafe; what it asks for holds: Socket owns one fd until it is dropped"
        )]
        let socket = AsyncFd::with_interest(socket, Interest::READABLE)?;
        Ok(Self { socket })
    }

    /// Waits until something changed, and drains what is queued. Safe to drop at any time (nothing is lost).
    ///
    /// # Errors
    /// When the socket fails for another reason than an overrun. Open a new monitor then.
    pub async fn changed(&mut self) -> Result<Change, NetlinkError> {
        loop {
            // Nothing is awaited between reading and returning, so what was read is always told.
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|socket| drain(socket.get_ref())) {
                Ok(change) => return Ok(change?),
                Err(_would_block) => {}
            }
        }
    }
}

fn subscribe(groups: &[Group], bytes: usize) -> std::io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(netlink_sys::protocols::NETLINK_ROUTE)?;
    set_receive_buffer(&socket, bytes)?;
    socket.set_non_blocking(true)?;
    socket.bind_auto()?;
    for group in groups.iter().flat_map(|group| group.numbers()) {
        socket.add_membership(*group)?;
    }
    Ok(socket)
}

/// Reads what is queued and throws it away. `WouldBlock` when there was nothing at all.
fn drain(socket: &netlink_sys::Socket) -> std::io::Result<Change> {
    let mut seen = None;
    for _ in 0..DRAIN {
        // The rest of a message that does not fit is dropped by the kernel, and so is the message.
        let mut start = [0u8; 16];
        match socket.recv(&mut &mut start[..], 0) {
            Ok(_) => seen = seen.or(Some(Change::Events)),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => seen = Some(Change::Overrun),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return seen.ok_or(error),
            Err(error) => return Err(error),
        }
    }
    seen.ok_or_else(|| ErrorKind::WouldBlock.into())
}
