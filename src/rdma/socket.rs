//! The socket of the kernel's RDMA netlink.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use super::codec::{self, command};
use super::{Device, NetnsMode, Port, Resources};
use crate::netlink::{Message, NetlinkError, Socket};
use crate::netns::Netns;

/// `NETLINK_RDMA`, `linux/netlink.h`.
pub(super) const NETLINK_RDMA: isize = 20;

/// A blocking `NETLINK_RDMA` socket, bound to the namespace it was made in: in exclusive mode it sees, and can move, the devices of
/// that namespace.
#[derive(Debug)]
pub struct RdmaSocket {
    socket: Socket,
}

impl RdmaSocket {
    /// A socket in the namespace of the calling thread; none where the kernel has no RDMA at all.
    ///
    /// # Errors
    /// When the socket can't be made or set up.
    pub fn open() -> Result<Option<Self>, NetlinkError> {
        Self::of(Socket::open(NETLINK_RDMA))
    }

    /// As [`Self::open`], in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// When the namespace can't be entered, or as [`Self::open`].
    pub fn open_in(netns: &Netns) -> Result<Option<Self>, NetlinkError> {
        Self::of(Socket::open_in(netns, NETLINK_RDMA))
    }

    fn of(opened: Result<Socket, NetlinkError>) -> Result<Option<Self>, NetlinkError> {
        match opened {
            Ok(socket) => Ok(Some(Self { socket })),
            // The kernel was built without, or its module `ib_core` is not there.
            Err(NetlinkError::Io(error)) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Which namespaces see a device, now.
    ///
    /// # Errors
    /// As [`Socket::get`].
    pub fn netns_mode(&mut self, deadline: Instant) -> Result<NetnsMode, NetlinkError> {
        codec::netns_mode(&self.socket.get(&codec::bare(command::SYS_GET), deadline)?)
    }

    /// The devices that this namespace sees.
    ///
    /// # Errors
    /// As [`Socket::dump`]; one message that can't be read fails all.
    pub fn devices(&mut self, deadline: Instant) -> Result<Vec<Device>, NetlinkError> {
        self.socket.dump(&codec::bare(command::GET), deadline)?.iter().map(codec::device).collect()
    }

    /// The device with `index`; none when this namespace does not see it.
    ///
    /// # Errors
    /// As [`Socket::get`].
    pub fn device(&mut self, index: u32, deadline: Instant) -> Result<Option<Device>, NetlinkError> {
        match self.socket.get(&codec::of_device(command::GET, index), deadline) {
            // `EINVAL` for an index that is not there, too (`nldev_get_doit`).
            Err(error) if matches!(error.errno(), Some(libc::EINVAL | libc::ENODEV)) => Ok(None),
            reply => codec::device(&reply?).map(Some),
        }
    }

    /// The ports of the device with `index`; none when this namespace does not see it.
    ///
    /// # Errors
    /// As [`Socket::dump`].
    pub fn ports(&mut self, index: u32, deadline: Instant) -> Result<Vec<Port>, NetlinkError> {
        match self.socket.dump(&codec::of_device(command::PORT_GET, index), deadline) {
            Err(error) if matches!(error.errno(), Some(libc::EINVAL | libc::ENODEV)) => Ok(Vec::new()),
            ports => ports?.iter().map(codec::port).collect(),
        }
    }

    /// What is in use of the device with `index`; none when this namespace does not see it.
    ///
    /// # Errors
    /// As [`Socket::get`].
    pub fn resources(&mut self, index: u32, deadline: Instant) -> Result<Option<Resources>, NetlinkError> {
        match self.socket.get(&codec::of_device(command::RES_GET, index), deadline) {
            Err(error) if matches!(error.errno(), Some(libc::EINVAL | libc::ENODEV)) => Ok(None),
            reply => Ok(Some(codec::resources(&reply?))),
        }
    }

    /// Moves the device with `index` from `own`, the namespace of this socket, into `target`. Only in exclusive mode, and only where its
    /// driver can.
    ///
    /// # Errors
    /// What the kernel says: `EOPNOTSUPP` where the driver can't or the mode is shared, `EINVAL` where there is no such device.
    pub fn move_to(&mut self, own: &Netns, index: u32, target: BorrowedFd<'_>, deadline: Instant) -> Result<(), NetlinkError> {
        // The kernel compares the device's namespace with that of the thread which asks, not of the socket (`ENODEV`;
        // `ib_device_set_netns_put`, `drivers/infiniband/core/device.c`).
        own.run(|| self.acknowledged(&codec::set_netns(index, target.as_raw_fd()), deadline))?
    }

    /// Renames the device with `index`.
    ///
    /// # Errors
    /// What the kernel says: `EEXIST` where another device has the name.
    pub fn rename(&mut self, index: u32, name: &str, deadline: Instant) -> Result<(), NetlinkError> {
        self.acknowledged(&codec::set_name(index, name), deadline)
    }

    fn acknowledged(&mut self, message: &Message, deadline: Instant) -> Result<(), NetlinkError> {
        self.socket.pipeline(std::slice::from_ref(message), deadline).pop().unwrap_or(Err(NetlinkError::NotSent))
    }
}
