//! Tells when RDMA devices of a namespace change, without saying how: whoever listens looks again.
//!
//! The kernel's events of devices (`uevent`) tell of what comes, goes, is renamed or moves, and of character devices. Since 6.12 RDMA
//! netlink tells besides which link a port is over.

use std::io::{Error, ErrorKind};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::socket::NETLINK_RDMA;
use crate::netlink::{NetlinkError, set_receive_buffer};
use crate::netns::Netns;

/// `NETLINK_KOBJECT_UEVENT`, `linux/netlink.h`.
const NETLINK_KOBJECT_UEVENT: isize = 15;
/// The kernel's own events; 2 has those that udev has worked on.
const KERNEL_EVENTS: u32 = 1;
/// `RDMA_NL_GROUP_NOTIFY`, `rdma/rdma_netlink.h`. Kernels without it take the membership and send nothing.
const NOTIFY: u32 = 4;
/// Bytes of the receive buffer we ask for.
const RECEIVE_BUFFER: usize = 1 << 20;
/// More than the kernel's longest event, bytes: `UEVENT_BUFFER_SIZE` (2048), `linux/kobject.h`, and the path in front.
const EVENT_MAX: usize = 8192;
/// Messages read in one go.
const DRAIN: usize = 10_000;

/// A subscription in one namespace. Port states are not told by anything.
#[derive(Debug)]
pub struct RdmaMonitor {
    events: AsyncFd<netlink_sys::Socket>,
    netlink: Option<AsyncFd<netlink_sys::Socket>>,
}

impl RdmaMonitor {
    /// Subscribes. `has_rdma`: whether the kernel has RDMA at the moment; where it has not, asking for it would make the kernel look
    /// for a module. Needs a tokio runtime with I/O around it.
    ///
    /// # Errors
    /// When a socket can't be made in `netns`.
    pub fn open(netns: &Netns, has_rdma: bool) -> Result<Self, NetlinkError> {
        tokio::runtime::Handle::try_current().map_err(Error::other)?;
        let subscribe = || {
            let netlink = has_rdma.then(|| subscribe(NETLINK_RDMA, NOTIFY)).transpose();
            let netlink = match netlink {
                Err(error) if error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => None,
                netlink => netlink?,
            };
            Ok::<_, Error>((subscribe(NETLINK_KOBJECT_UEVENT, KERNEL_EVENTS)?, netlink))
        };
        let (events, netlink) = netns.run(subscribe)??;
        Ok(Self { events: watched(events)?, netlink: netlink.map(watched).transpose()? })
    }

    /// Whether it was opened while the kernel had RDMA. If not, open another one when it has.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.netlink.is_some()
    }

    /// Waits until something changed, or may have, and drains what is queued. Safe to drop at any time (nothing is lost).
    ///
    /// # Errors
    /// When a socket fails for another reason than an overrun. Open a new monitor then.
    pub async fn changed(&mut self) -> Result<(), NetlinkError> {
        let Some(netlink) = &self.netlink else {
            return Ok(wait(&self.events, is_of_rdma).await?);
        };
        tokio::select! {
            changed = wait(&self.events, is_of_rdma) => Ok(changed?),
            changed = wait(netlink, |_| true) => Ok(changed?),
        }
    }
}

fn subscribe(protocol: isize, group: u32) -> std::io::Result<netlink_sys::Socket> {
    let mut socket = netlink_sys::Socket::new(protocol)?;
    set_receive_buffer(&socket, RECEIVE_BUFFER)?;
    socket.set_non_blocking(true)?;
    socket.bind_auto()?;
    socket.add_membership(group)?;
    Ok(socket)
}

fn watched(socket: netlink_sys::Socket) -> std::io::Result<AsyncFd<netlink_sys::Socket>> {
    #[allow(
        deprecated,
        reason = "the other constructor is unsafe; what it asks for holds: Socket owns one fd until it is dropped"
    )]
    AsyncFd::with_interest(socket, Interest::READABLE)
}

/// Waits until a message came that is wanted.
async fn wait(socket: &AsyncFd<netlink_sys::Socket>, is_wanted: fn(&[u8]) -> bool) -> std::io::Result<()> {
    loop {
        // Nothing is awaited between reading and returning, so what was read is always told.
        let mut ready = socket.readable().await?;
        match ready.try_io(|socket| drain(socket.get_ref(), is_wanted)) {
            Ok(Ok(true)) => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Ok(Ok(false)) | Err(_) => {}
        }
    }
}

/// Reads what is queued, and tells whether something of it is wanted, or was lost. `WouldBlock` when there was nothing at all.
fn drain(socket: &netlink_sys::Socket, is_wanted: fn(&[u8]) -> bool) -> std::io::Result<bool> {
    let (mut is_any, mut is_found) = (false, false);
    let mut buffer = vec![0_u8; EVENT_MAX];
    for _ in 0..DRAIN {
        match socket.recv(&mut &mut buffer[..], 0) {
            Ok(length) => is_found |= is_wanted(&buffer[..length.min(EVENT_MAX)]),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => is_found = true,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return if is_any { Ok(is_found) } else { Err(error) };
            }
            Err(error) => return Err(error),
        }
        is_any = true;
    }
    Ok(is_found)
}

/// Whether an event is of an RDMA device, or of its character devices (`infiniband`, `infiniband_verbs`, `infiniband_mad`):
/// `add@/devices/…` and then `NAME=value`, each with a NUL at its end (`lib/kobject_uevent.c`).
pub(super) fn is_of_rdma(event: &[u8]) -> bool {
    event.split(|byte| *byte == 0).any(|field| field.starts_with(b"SUBSYSTEM=infiniband"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_rdma_devices_are_told_from_others() {
        let event = |subsystem: &str| format!("add@/devices/x/infiniband/rxe0\0ACTION=add\0SUBSYSTEM={subsystem}\0SEQNUM=7\0");
        for (subsystem, is_it) in
            [("infiniband", true), ("infiniband_verbs", true), ("infiniband_mad", true), ("net", false), ("queues", false)]
        {
            assert_eq!(is_of_rdma(event(subsystem).as_bytes()), is_it, "{subsystem}");
        }
        assert!(!is_of_rdma(b"") && !is_of_rdma(b"add@/devices/SUBSYSTEM=infiniband\0ACTION=add\0"));
    }
}
