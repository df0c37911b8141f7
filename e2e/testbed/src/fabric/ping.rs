//! ICMP echo without an external program.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use dranic::netns::Netns;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, SockaddrIn6, SockaddrLike, bind, recv, sendto, socket,
};

/// How long an echo may take before the next is sent: the first can be lost while the link comes up.
const AGAIN: Duration = Duration::from_millis(200);

static NEXT_ID: AtomicU16 = AtomicU16::new(1);

/// Pings `target` from `source` in `netns` until an answer comes, and returns how long that one took.
///
/// # Errors
/// `TimedOut` without an answer in `timeout`; at once when the kernel has no route or no such source address.
pub fn ping(netns: &Netns, source: IpAddr, target: IpAddr, timeout: Duration) -> io::Result<Duration> {
    let inside = || {
        let echo = Echo::new(source, target)?;
        let deadline = Instant::now() + timeout;
        for sequence in 1u16.. {
            let sent = Instant::now();
            if sent >= deadline {
                break;
            }
            echo.send(sequence)?;
            if echo.answered(deadline.min(sent + AGAIN))? {
                return Ok(sent.elapsed());
            }
        }
        Err(io::Error::new(ErrorKind::TimedOut, format!("no answer of {target} to {source} in {timeout:?}")))
    };
    netns.run(inside).map_err(io::Error::other)?
}

struct Echo {
    socket: OwnedFd,
    target: IpAddr,
    id: u16,
}

impl Echo {
    fn new(source: IpAddr, target: IpAddr) -> io::Result<Self> {
        let (family, protocol) = match target {
            IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
            IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, protocol)?;
        with_address(source, |address| bind(socket.as_raw_fd(), address))?;
        Ok(Self { socket, target, id: NEXT_ID.fetch_add(1, Ordering::Relaxed) })
    }

    fn send(&self, sequence: u16) -> io::Result<()> {
        let kind = if self.target.is_ipv4() { 8 } else { 128 };
        let mut packet = [kind, 0, 0, 0, 0, 0, 0, 0];
        packet[4..6].copy_from_slice(&self.id.to_be_bytes());
        packet[6..8].copy_from_slice(&sequence.to_be_bytes());
        // The kernel adds the checksum of ICMPv6 itself.
        let sum = checksum(&packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
        with_address(self.target, |to| sendto(self.socket.as_raw_fd(), &packet, to, MsgFlags::empty()).map(drop))
    }

    /// Whether an answer to any of our echoes comes before `until`.
    fn answered(&self, until: Instant) -> io::Result<bool> {
        let mut packet = [0u8; 1500];
        loop {
            match recv(self.socket.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                Ok(length) if self.is_answer(&packet[..length]) => return Ok(true),
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(nix::errno::Errno::EAGAIN) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
                    poll(&mut [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)], timeout)?;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// A raw socket sees every ICMP packet of the namespace, for IPv4 with its IP header.
    fn is_answer(&self, packet: &[u8]) -> bool {
        let (header, kind) = match self.target {
            IpAddr::V4(_) => (packet.first().map_or(0, |byte| usize::from(byte & 15) * 4), 0),
            IpAddr::V6(_) => (0, 129),
        };
        let id = self.id.to_be_bytes();
        packet.get(header..).is_some_and(|icmp| icmp.first() == Some(&kind) && icmp.get(4..6) == Some(&id))
    }
}

fn with_address(address: IpAddr, call: impl FnOnce(&dyn SockaddrLike) -> nix::Result<()>) -> io::Result<()> {
    match address {
        IpAddr::V4(v4) => call(&SockaddrIn::from(std::net::SocketAddrV4::new(v4, 0)))?,
        IpAddr::V6(v6) => call(&SockaddrIn6::from(std::net::SocketAddrV6::new(v6, 0, 0, 0)))?,
    }
    Ok(())
}

/// RFC 1071.
fn checksum(packet: &[u8]) -> u16 {
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}
