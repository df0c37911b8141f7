//! The socket under every family: bytes out, bytes in, one deadline for each call.

use std::io::{Error, ErrorKind};
use std::os::fd::AsFd;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

use super::NetlinkError;
use super::decode::{self, Frame};
use crate::netns::Netns;

/// `NLM_F_REQUEST`, `linux/netlink.h`.
pub const NLM_F_REQUEST: u16 = 0x01;
/// `NLM_F_ACK`, `linux/netlink.h`.
pub const NLM_F_ACK: u16 = 0x04;
/// `NLM_F_ROOT | NLM_F_MATCH`, `linux/netlink.h`.
pub const NLM_F_DUMP: u16 = 0x300;

/// How often an interrupted dump is done again.
const DUMP_ATTEMPTS: u32 = 16;
/// Bytes of one datagram. The kernel fills at most 32 KiB for a dump, and more only for one message of up to 64 KiB.
const DATAGRAM: usize = 128 << 10;
/// Bytes of one dump: a full Internet table is about 100 MiB.
const MAX_DUMP: usize = 512 << 20;
/// Requests in one send. Each acknowledgement costs about 1 KiB of the receive buffer, which has 208 KiB where it can't be raised.
const BATCH: usize = 32;
/// Bytes in one send (one larger message still goes, alone).
const BATCH_BYTES: usize = 32 << 10;
/// Bytes of the receive buffer we ask for.
const RECEIVE_BUFFER: usize = 1 << 20;

/// A netlink message without its header's length, sequence and port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`; in a request those beside the ones that the call itself sets.
    pub flags: u16,
    /// The family's header and attributes.
    pub payload: Vec<u8>,
}

impl Message {
    fn of(frame: &Frame<'_>) -> Self {
        Self { kind: frame.kind, flags: frame.flags, payload: frame.payload.to_vec() }
    }

    /// Bytes on the wire, padded.
    fn size(&self) -> usize {
        (decode::HEADER + self.payload.len()).next_multiple_of(4)
    }

    fn append(&self, flags: u16, sequence: u32, bytes: &mut Vec<u8>) -> Result<(), NetlinkError> {
        let length = u32::try_from(decode::HEADER + self.payload.len());
        let length = length.map_err(|_| NetlinkError::Protocol(format!("request of {} bytes", self.payload.len())))?;
        let end = bytes.len() + self.size();
        bytes.extend(length.to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend((self.flags | flags | NLM_F_REQUEST).to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]); // port: the kernel fills in ours
        bytes.extend(&self.payload);
        bytes.resize(end, 0);
        Ok(())
    }
}

/// A blocking socket of any netlink protocol, bound to the namespace it was made in.
///
/// The kernel does the work inside `send(2)`, or for a dump inside `recv(2)`, and can't be interrupted there: a call outlasts its
/// deadline by as long as the kernel works on what was sent last.
#[derive(Debug)]
pub struct Socket {
    inner: netlink_sys::Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// The sequence number of a dump whose end was not read. The kernel refuses the next one (`EBUSY`) until it is.
    dumping: Option<u32>,
}

impl Socket {
    /// A socket of `protocol` (`NETLINK_ROUTE` 0, `NETLINK_GENERIC` 16, `NETLINK_RDMA` 20) in the calling thread's namespace.
    ///
    /// # Errors
    /// When it can't be made or set up.
    pub fn open(protocol: isize) -> Result<Self, NetlinkError> {
        let mut inner = netlink_sys::Socket::new(protocol)?;
        inner.bind_auto()?;
        // Connected to the kernel: what other processes send us is refused.
        inner.connect(&netlink_sys::SocketAddr::new(0, 0))?;
        inner.set_ext_ack(true)?;
        inner.set_cap_ack(true)?;
        inner.set_netlink_get_strict_chk(true)?;
        set_receive_buffer(&inner, RECEIVE_BUFFER)?;
        Ok(Self { inner, sequence: 0, buffer: Vec::with_capacity(DATAGRAM), dumping: None })
    }

    /// A socket of `protocol` in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// When the namespace can't be entered, or as [`Self::open`].
    pub fn open_in(netns: &Netns, protocol: isize) -> Result<Self, NetlinkError> {
        netns.run(|| Self::open(protocol))?
    }

    /// Sends a request that has one reply, and returns it.
    ///
    /// # Errors
    /// [`NetlinkError::NotSent`], [`NetlinkError::Timeout`], or what the kernel or the socket say.
    pub fn get(&mut self, message: &Message, deadline: Instant) -> Result<Message, NetlinkError> {
        let sequence = self.send(std::slice::from_ref(message), 0, deadline)?;
        loop {
            self.receive(deadline)?;
            for frame in decode::frames(&self.buffer) {
                let frame = frame?;
                match frame.kind {
                    _ if frame.sequence != sequence => {} // late, of an earlier request
                    decode::NLMSG_NOOP => {}
                    decode::NLMSG_ERROR => {
                        frame.acknowledgement()?;
                        return Err(NetlinkError::Protocol("acknowledgement in place of a reply".to_owned()));
                    }
                    decode::NLMSG_DONE => return Err(NetlinkError::Protocol("end of dump in place of a reply".to_owned())),
                    _ => return Ok(Message::of(&frame)),
                }
            }
        }
    }

    /// Dumps a table; an interrupted dump is done again.
    ///
    /// # Errors
    /// As [`Self::get`], and [`NetlinkError::Interrupted`].
    pub fn dump(&mut self, message: &Message, deadline: Instant) -> Result<Vec<Message>, NetlinkError> {
        for _ in 0..DUMP_ATTEMPTS {
            if let Some(all) = self.dump_once(message, deadline)? {
                return Ok(all);
            }
        }
        Err(NetlinkError::Interrupted(DUMP_ATTEMPTS))
    }

    /// None when the dump was interrupted.
    fn dump_once(&mut self, message: &Message, deadline: Instant) -> Result<Option<Vec<Message>>, NetlinkError> {
        self.finish_dump(deadline)?;
        let sequence = self.send(std::slice::from_ref(message), NLM_F_DUMP, deadline)?;
        self.dumping = Some(sequence);
        let (mut all, mut bytes, mut interrupted) = (Vec::new(), 0, false);
        loop {
            match self.receive(deadline) {
                Err(NetlinkError::Io(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    interrupted = true;
                    continue;
                }
                other => other?,
            }
            bytes += self.buffer.len();
            if bytes > MAX_DUMP {
                return Err(NetlinkError::Protocol(format!("dump of more than {MAX_DUMP} bytes")));
            }
            for frame in decode::frames(&self.buffer) {
                let frame = frame?;
                if frame.sequence != sequence {
                    continue;
                }
                interrupted |= frame.flags & decode::NLM_F_DUMP_INTR != 0 || frame.kind == decode::NLMSG_OVERRUN;
                match frame.kind {
                    decode::NLMSG_NOOP | decode::NLMSG_OVERRUN => {}
                    decode::NLMSG_ERROR | decode::NLMSG_DONE => {
                        if frame.kind == decode::NLMSG_ERROR { frame.acknowledgement() } else { frame.done() }?;
                        return Ok((!interrupted).then_some(all));
                    }
                    _ => all.push(Message::of(&frame)),
                }
            }
            // The kernel makes the next part when we ask for it, so there is always something to read.
            if Instant::now() >= deadline {
                return Err(NetlinkError::Timeout);
            }
        }
    }

    fn finish_dump(&mut self, deadline: Instant) -> Result<(), NetlinkError> {
        while self.dumping.is_some() {
            self.receive(deadline)?;
        }
        Ok(())
    }

    /// Sends all messages in as few calls as fit and returns the answer to each, in order. A refused one stops none.
    ///
    /// At the deadline those sent and unanswered are [`NetlinkError::Timeout`], the others [`NetlinkError::NotSent`].
    pub fn pipeline(&mut self, messages: &[Message], deadline: Instant) -> Vec<Result<(), NetlinkError>> {
        let mut answers = Vec::with_capacity(messages.len());
        let mut rest = messages;
        while !rest.is_empty() {
            let (batch, after) = rest.split_at(batch_len(rest));
            rest = after;
            match self.send(batch, NLM_F_ACK, deadline) {
                Ok(first) => answers.extend(self.acknowledgements(first, batch.len(), deadline)),
                Err(error) => answers.extend(batch.iter().map(|_| Err(again(&error)))),
            }
        }
        answers
    }

    /// The answers to `count` requests whose sequence numbers start at `first`.
    fn acknowledgements(&mut self, first: u32, count: usize, mut deadline: Instant) -> Vec<Result<(), NetlinkError>> {
        let mut answers: Vec<Option<Result<(), NetlinkError>>> = std::iter::repeat_with(|| None).take(count).collect();
        let mut missing = count;
        while missing > 0 {
            match self.receive(deadline) {
                Ok(()) => {}
                // Some acknowledgements are lost: what is queued is all that comes.
                Err(NetlinkError::Io(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    deadline = Instant::now();
                    continue;
                }
                Err(error) => return answers.into_iter().map(|a| a.unwrap_or_else(|| Err(again(&error)))).collect(),
            }
            for frame in decode::frames(&self.buffer).flatten().filter(|frame| frame.kind == decode::NLMSG_ERROR) {
                let slot = answers.get_mut(frame.sequence.wrapping_sub(first) as usize);
                if let Some(slot @ None) = slot {
                    *slot = Some(frame.acknowledgement());
                    missing -= 1;
                }
            }
        }
        answers.into_iter().map(|answer| answer.unwrap_or(Err(NetlinkError::Timeout))).collect()
    }

    /// Sends the messages in one call and returns the sequence number of the first.
    fn send(&mut self, messages: &[Message], flags: u16, deadline: Instant) -> Result<u32, NetlinkError> {
        if Instant::now() >= deadline {
            return Err(NetlinkError::NotSent);
        }
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::with_capacity(messages.iter().map(Message::size).sum());
        for message in messages {
            self.sequence = self.sequence.wrapping_add(1);
            message.append(flags, self.sequence, &mut bytes)?;
        }
        loop {
            match self.inner.send(&bytes, 0) {
                Ok(_) => return Ok(first),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads the next datagram into the buffer. What is queued is read even after the deadline.
    fn receive(&mut self, deadline: Instant) -> Result<(), NetlinkError> {
        loop {
            self.buffer.clear();
            match self.inner.recv(&mut self.buffer, libc::MSG_DONTWAIT | libc::MSG_TRUNC) {
                Ok(length) if length > self.buffer.len() => {
                    return Err(NetlinkError::Protocol(format!("datagram of {length} bytes, room for {}", self.buffer.len())));
                }
                Ok(_) => {
                    self.note_end_of_dump();
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(deadline)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whoever reads the end of a dump: it may be a later call that skips what is left of it.
    fn note_end_of_dump(&mut self) {
        let ends = |frame: &Frame<'_>| {
            Some(frame.sequence) == self.dumping && matches!(frame.kind, decode::NLMSG_DONE | decode::NLMSG_ERROR)
        };
        if self.dumping.is_some() && decode::frames(&self.buffer).flatten().any(|frame| ends(&frame)) {
            self.dumping = None;
        }
    }

    /// Waits until there is something to read.
    fn wait(&self, deadline: Instant) -> Result<(), NetlinkError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(NetlinkError::Timeout);
        }
        // Rounded up, or the last millisecond would be spent spinning.
        let millis = i32::try_from(left.as_millis().saturating_add(1)).unwrap_or(i32::MAX);
        let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.inner.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(Error::from(errno).into()),
        }
    }
}

/// How many of `messages` go in one send: at least one.
fn batch_len(messages: &[Message]) -> usize {
    let mut bytes = 0;
    let fits = |message: &&Message| {
        bytes += message.size();
        bytes <= BATCH_BYTES
    };
    messages.iter().take(BATCH).take_while(fits).count().max(1)
}

/// The same error for another request of the same send.
fn again(error: &NetlinkError) -> NetlinkError {
    match error {
        NetlinkError::NotSent => NetlinkError::NotSent,
        NetlinkError::Timeout => NetlinkError::Timeout,
        NetlinkError::Io(io) => NetlinkError::Io(io.raw_os_error().map_or_else(|| io.kind().into(), Error::from_raw_os_error)),
        other => NetlinkError::Protocol(other.to_string()),
    }
}

/// Raises the receive buffer, past the system's limit where we may (`CAP_NET_ADMIN` in the first user namespace).
pub(crate) fn set_receive_buffer(socket: &netlink_sys::Socket, bytes: usize) -> std::io::Result<()> {
    if setsockopt(socket, RcvBufForce, &bytes).is_ok() {
        return Ok(());
    }
    socket.set_rx_buf_sz(i32::try_from(bytes).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(size: usize) -> Message {
        Message { kind: 16, flags: 0, payload: vec![0; size] }
    }

    #[test]
    fn batches_are_bounded_by_count_and_bytes() {
        assert_eq!(batch_len(&vec![message(16); 100]), BATCH);
        assert_eq!(batch_len(&[message(20_000), message(20_000)]), 1);
        assert_eq!(batch_len(&[message(100_000)]), 1);
    }

    #[test]
    fn requests_are_padded_and_numbered() {
        let mut bytes = Vec::new();
        message(5).append(NLM_F_ACK, 9, &mut bytes).unwrap();
        message(0).append(NLM_F_ACK, 10, &mut bytes).unwrap();
        let frames: Vec<_> = decode::frames(&bytes).collect::<Result<_, _>>().unwrap();
        assert_eq!((frames[0].sequence, frames[0].flags, frames[0].payload.len()), (9, 5, 5));
        assert_eq!((frames[1].sequence, frames[1].payload.len(), bytes.len()), (10, 0, 40));
    }
}
