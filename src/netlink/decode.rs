//! Reads what the kernel sent. Pure functions over bytes; nothing here panics, whatever the bytes are.

use super::NetlinkError;

/// `NLMSG_NOOP`, `linux/netlink.h`.
pub const NLMSG_NOOP: u16 = 1;
/// `NLMSG_ERROR`, `linux/netlink.h`: also the acknowledgement, with error 0.
pub const NLMSG_ERROR: u16 = 2;
/// `NLMSG_DONE`, `linux/netlink.h`: the end of a dump.
pub const NLMSG_DONE: u16 = 3;
/// `NLMSG_OVERRUN`, `linux/netlink.h`.
pub const NLMSG_OVERRUN: u16 = 4;
/// `NLM_F_DUMP_INTR`, `linux/netlink.h`: the table changed while it was dumped.
pub const NLM_F_DUMP_INTR: u16 = 0x10;
/// `NLM_F_CAPPED`, `linux/netlink.h`: the error carries only the header of the request.
pub const NLM_F_CAPPED: u16 = 0x100;
/// `NLM_F_ACK_TLVS`, `linux/netlink.h`: attributes follow in the error.
pub const NLM_F_ACK_TLVS: u16 = 0x200;

/// `sizeof(struct nlmsghdr)`, `linux/netlink.h`.
pub const HEADER: usize = 16;
/// `NLMSGERR_ATTR_MSG`, `linux/netlink.h`.
const NLMSGERR_ATTR_MSG: u16 = 1;
/// `NLA_F_NESTED | NLA_F_NET_BYTEORDER`, `linux/netlink.h`: the bits of an attribute's type that are not its number.
const NLA_FLAGS: u16 = 0xc000;

/// One message of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`.
    pub flags: u16,
    /// `nlmsg_seq`.
    pub sequence: u32,
    /// What follows the header.
    pub payload: &'a [u8],
}

/// The messages of one datagram, in order. After one that can't be read there is nothing more.
#[derive(Debug, Clone)]
pub struct Frames<'a> {
    rest: &'a [u8],
}

/// Splits a datagram into its messages.
#[must_use]
pub fn frames(datagram: &[u8]) -> Frames<'_> {
    Frames { rest: datagram }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let rest = std::mem::take(&mut self.rest);
        let length = read_u32(rest, 0).unwrap_or(0) as usize;
        let (Some(payload), Some(kind), Some(flags), Some(sequence)) =
            (rest.get(HEADER..length), read_u16(rest, 4), read_u16(rest, 6), read_u32(rest, 8))
        else {
            return Some(Err(NetlinkError::Protocol(format!("length {length} in a rest of {} bytes", rest.len()))));
        };
        self.rest = rest.get(align(length)..).unwrap_or_default();
        Some(Ok(Frame { kind, flags, sequence, payload }))
    }
}

impl Frame<'_> {
    /// What an `NLMSG_ERROR` says: nothing wrong (an acknowledgement), or the kernel's refusal with its text.
    ///
    /// # Errors
    /// [`NetlinkError::Kernel`], or [`NetlinkError::Protocol`] when the message is too short.
    pub fn acknowledgement(&self) -> Result<(), NetlinkError> {
        let capped = self.flags & NLM_F_CAPPED != 0;
        let request = read_u32(self.payload, 4).map_or(HEADER, |length| length as usize);
        let attributes = 4 + if capped { HEADER } else { align(request) };
        self.status(attributes, "acknowledgement")
    }

    /// What an `NLMSG_DONE` says: the dump ended well, or why it was given up.
    ///
    /// # Errors
    /// As [`Self::acknowledgement`].
    pub fn done(&self) -> Result<(), NetlinkError> {
        // Old kernels end some dumps without a code.
        if self.payload.is_empty() { Ok(()) } else { self.status(4, "end of dump") }
    }

    fn status(&self, attributes: usize, what: &str) -> Result<(), NetlinkError> {
        let Some(code) = read_u32(self.payload, 0) else {
            return Err(NetlinkError::Protocol(format!("{what} of {} bytes", self.payload.len())));
        };
        // The kernel sends a negative errno; a dump's end may carry a positive count, which is no error.
        let code = code.cast_signed();
        if code >= 0 {
            return Ok(());
        }
        let with_attributes = self.flags & NLM_F_ACK_TLVS != 0;
        let message = self.payload.get(attributes..).filter(|_| with_attributes).and_then(|bytes| find(bytes, NLMSGERR_ATTR_MSG));
        Err(NetlinkError::Kernel { errno: code.saturating_neg(), message: message.map(text) })
    }
}

/// The attributes (`struct nlattr`) in `bytes`, number and value, until the first that can't be read.
#[derive(Debug, Clone)]
pub struct Attributes<'a> {
    rest: &'a [u8],
}

/// Splits a run of attributes; nested ones are split by calling it on the value.
#[must_use]
pub fn attributes(bytes: &[u8]) -> Attributes<'_> {
    Attributes { rest: bytes }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.rest);
        let length = usize::from(read_u16(rest, 0)?);
        let kind = read_u16(rest, 2)? & !NLA_FLAGS;
        let value = rest.get(4..length)?;
        self.rest = rest.get(align(length)..).unwrap_or_default();
        Some((kind, value))
    }
}

/// The first attribute with this number.
#[must_use]
pub fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// A text attribute: up to the first NUL, what is not UTF-8 replaced.
#[must_use]
pub fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

/// Two bytes at `at`, in the machine's order.
#[must_use]
pub fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Four bytes at `at`, in the machine's order.
#[must_use]
pub fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The next multiple of four (`NLMSG_ALIGN`, `NLA_ALIGN`).
const fn align(length: usize) -> usize {
    length.saturating_add(3) & !3
}

#[cfg(test)]
mod tests;
