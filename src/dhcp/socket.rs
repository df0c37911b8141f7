//! A packet socket (`packet(7)`) that hears answers to DHCP clients on one link, in the namespace of the calling thread.

#![expect(unsafe_code, reason = "nix has neither addresses of packet sockets to send to nor SO_ATTACH_FILTER")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Instant;

use libc::{sock_filter, sock_fprog, sockaddr_ll};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrLike, bind, recvfrom, sendto};

use super::frame::CLIENT_PORT;

/// Takes whole UDP packets to the client's port: protocol, fragment, length of the head, port (`linux/filter.h`; the packet
/// begins with the IP head). So other traffic of the link wakes nobody and can't fill the queue.
const FILTER: [sock_filter; 8] = {
    const fn code(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code: code as u16, jt, jf, k }
    }
    [
        code(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, 9),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 5, libc::IPPROTO_UDP as u32),
        code(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 6),
        code(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, 3, 0, 0x1fff),
        code(libc::BPF_LDX | libc::BPF_B | libc::BPF_MSH, 0, 0, 0),
        code(libc::BPF_LD | libc::BPF_H | libc::BPF_IND, 0, 0, 2),
        code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, CLIENT_PORT as u32),
        code(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
};
/// Behind [`FILTER`]: the whole packet.
const TAKE: sock_filter = sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: u32::MAX };

/// The socket.
#[derive(Debug)]
pub(super) struct PacketSocket {
    fd: OwnedFd,
    index: u32,
}

impl PacketSocket {
    /// Opens it on the link with `index`, which must be up to send.
    ///
    /// # Errors
    /// Without `CAP_NET_RAW`, and where there is no such link.
    pub(super) fn open(index: u32) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        // Without a protocol it hears nothing before it has its filter and its link.
        let fd = nix::sys::socket::socket(AddressFamily::Packet, SockType::Datagram, flags, None)?;
        attach_filter(&fd)?;
        bind(fd.as_raw_fd(), &address(index, [0; 6])?)?;
        Ok(Self { fd, index })
    }

    /// Sends an IP packet to the link-layer address `to`.
    ///
    /// # Errors
    /// `ENETDOWN` where the link is down.
    pub(super) fn send(&self, packet: &[u8], to: [u8; 6]) -> io::Result<()> {
        sendto(self.fd.as_raw_fd(), packet, &address(self.index, to)?, MsgFlags::empty())?;
        Ok(())
    }

    /// Waits for a packet until `until`: its length in `buffer`, and the link-layer address it came from. None at the end of the time.
    ///
    /// # Errors
    /// As `recvfrom(2)`: `ENETDOWN` when the link goes down.
    pub(super) fn receive(&self, buffer: &mut [u8], until: Instant) -> io::Result<Option<(usize, [u8; 6])>> {
        loop {
            match recvfrom::<LinkAddr>(self.fd.as_raw_fd(), buffer) {
                Ok((length, from)) => return Ok(Some((length, from.and_then(|from| from.addr()).unwrap_or_default()))),
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            // Rounded up, so that it does not spin through the last millisecond.
            let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
            match nix::poll::poll(&mut [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn attach_filter(fd: &OwnedFd) -> io::Result<()> {
    let mut program: Vec<sock_filter> = FILTER.into_iter().chain([TAKE]).collect();
    let wanted = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: `wanted` and the instructions it points to live until the call returns, and the kernel copies them; the length is that
    // of the structure.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&wanted).cast(),
            size_of::<sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// IPv4 on the link with `index`, to the station `mac`.
fn address(index: u32, mac: [u8; 6]) -> io::Result<LinkAddr> {
    let mut raw = sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_IP as u16).to_be(),
        sll_ifindex: i32::try_from(index).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [0; 8],
    };
    raw.sll_addr[..6].copy_from_slice(&mac);
    // SAFETY: `raw` is a whole, initialised sockaddr_ll of the family that `from_raw` checks, and the length is its own; it is copied.
    let made = unsafe { LinkAddr::from_raw(std::ptr::from_ref(&raw).cast(), Some(size_of::<sockaddr_ll>() as libc::socklen_t)) };
    made.ok_or_else(|| io::Error::other("not an address of a packet socket"))
}
