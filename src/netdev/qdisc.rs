//! Queueing disciplines that somebody chose for a link. A move to another namespace resets them.

use std::fmt;
use std::time::Instant;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL, NlasIterator, Parseable};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use serde::{Deserialize, Serialize};

use super::raw;
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `TCA_KIND`, `linux/rtnetlink.h`.
const TCA_KIND: u16 = 1;
/// `TCA_OPTIONS`, `TCA_STAB`, `TCA_INGRESS_BLOCK` and `TCA_EGRESS_BLOCK`, `linux/rtnetlink.h`: what was chosen. The rest are counters.
const CHOSEN: [u16; 4] = [2, 8, 13, 14];
/// `struct tcmsg`, `linux/rtnetlink.h`, bytes.
const HEADER: usize = 20;
/// `IFNAMSIZ`: longest kind, bytes.
const MAX_KIND: usize = 16;

/// A queueing discipline that somebody chose. The kernel's defaults have no handle and are not listed. Ingress and clsact, which are
/// only a place for filters, are; the filters are in [`super::bpf`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qdisc {
    /// Where it hangs: `0xffffffff` for the root, otherwise a class of another.
    pub parent: u32,
    /// Its number, major in the upper 16 bits.
    pub handle: u32,
    /// `pfifo`, `fq`, `mq`, …
    pub kind: String,
    /// Hex of its options as the kernel sent them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub options: String,
}

impl fmt::Display for Qdisc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:x}: parent {:x}", self.kind, self.handle >> 16, self.parent)?;
        if self.options.is_empty() { Ok(()) } else { write!(f, " options {}", self.options) }
    }
}

/// Reads the body of an `RTM_NEWQDISC`: the link's index and what was chosen. None for the kernel's default.
#[must_use]
pub fn from_bytes(bytes: &[u8]) -> Option<(u32, Qdisc)> {
    let (header, attributes) = bytes.split_at_checked(HEADER)?;
    let word = |at: usize| Some(u32::from_ne_bytes(header.get(at..at + 4)?.try_into().ok()?));
    let (index, handle, parent) = (word(4)?, word(8)?, word(12)?);
    if handle == 0 {
        return None;
    }
    let (mut kind, mut options) = (String::new(), Vec::new());
    for attribute in NlasIterator::new(attributes) {
        let attribute = attribute.ok()?;
        if attribute.kind() == TCA_KIND {
            kind = std::str::from_utf8(attribute.value()).ok()?.trim_end_matches('\0').to_owned();
        } else if CHOSEN.contains(&attribute.kind()) {
            options.push((attribute.kind(), raw::bytes(&DefaultNla::parse(&attribute).ok()?)));
        }
    }
    let legal = !kind.is_empty() && kind.len() < MAX_KIND;
    legal.then(|| (index, Qdisc { parent, handle, kind, options: raw::to_hex(options) }))
}

/// The request that gives the link with `index` this discipline. It is an error (`EEXIST`) where somebody chose one already.
#[must_use]
pub fn add_request(index: u32, qdisc: &Qdisc) -> Request {
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.handle = TcHandle::from(qdisc.handle);
    message.header.parent = TcHandle::from(qdisc.parent);
    message.attributes.push(TcAttribute::Kind(qdisc.kind.clone()));
    message.attributes.extend(raw::from_hex(&qdisc.options).unwrap_or_default().into_iter().map(TcAttribute::Other));
    Request { message: RouteNetlinkMessage::NewQueueDiscipline(message), flags: NLM_F_CREATE | NLM_F_EXCL }
}

/// All that were chosen in the socket's namespace, each with its link's index, roots before those below them.
///
/// # Errors
/// As [`RouteSocket::dump`].
pub fn list(socket: &mut RouteSocket, deadline: Instant) -> Result<Vec<(u32, Qdisc)>, NetlinkError> {
    let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let messages = socket.dump_raw(request, deadline)?;
    Ok(messages.iter().filter_map(|message| from_bytes(&message.payload)).collect())
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::Emitable;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_trip(parent in any::<u32>(), handle in 1u32.., kind in "[a-z_]{1,15}", limit in any::<[u8; 4]>()) {
            let options = raw::to_hex(vec![(2, raw::bytes(&DefaultNla::new(2, limit.to_vec())))]);
            let qdisc = Qdisc { parent, handle, kind, options };
            let RouteNetlinkMessage::NewQueueDiscipline(message) = add_request(7, &qdisc).message else { panic!() };
            let mut bytes = vec![0; message.buffer_len()];
            message.emit(&mut bytes);
            prop_assert_eq!(from_bytes(&bytes), Some((7, qdisc)));
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = from_bytes(&bytes);
        }
    }

    #[test]
    fn defaults_are_nobodys_choice() {
        let mut bytes = vec![0; HEADER];
        bytes.extend(raw::bytes(&DefaultNla::new(TCA_KIND, b"fq\0".to_vec())));
        assert_eq!(from_bytes(&bytes), None);
        bytes[8] = 1;
        assert!(from_bytes(&bytes).is_some());
    }
}
