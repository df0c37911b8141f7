//! What the files of this room share: dumps of a family that may be absent, and netlink attributes as hex text (what our own
//! types do not name is kept byte for byte).

use std::time::Instant;

use netlink_packet_core::{DefaultNla, Emitable, Nla, NlasIterator, Parseable};
use netlink_packet_route::RouteNetlinkMessage;

use crate::netlink::{NetlinkError, RouteSocket};

/// `EOPNOTSUPP` and `EAFNOSUPPORT`: the kernel has no such table, for example without IPv6.
const NO_SUCH_FAMILY: [i32; 2] = [libc::EOPNOTSUPP, libc::EAFNOSUPPORT];

/// A dump where a family that the kernel does not have is an empty one.
pub(super) fn dump(
    socket: &mut RouteSocket,
    message: RouteNetlinkMessage,
    deadline: Instant,
) -> Result<Vec<RouteNetlinkMessage>, NetlinkError> {
    match socket.dump(message, deadline) {
        Err(error) if error.errno().is_some_and(|e| NO_SUCH_FAMILY.contains(&e)) => Ok(Vec::new()),
        answer => answer,
    }
}

/// The attribute with its header and padding.
pub(super) fn bytes<N: Nla>(attribute: &N) -> Vec<u8> {
    let mut buffer = vec![0; attribute.buffer_len()];
    attribute.emit(&mut buffer);
    buffer
}

/// Type (without the nested and byte-order flags) and payload of an attribute.
pub(super) fn kind_and_value<N: Nla>(attribute: &N) -> (u16, Vec<u8>) {
    let mut value = vec![0; attribute.value_len()];
    attribute.emit_value(&mut value);
    (attribute.kind() & netlink_packet_core::NLA_TYPE_MASK, value)
}

/// Hex of whole attributes, sorted by their type.
pub(super) fn to_hex(mut attributes: Vec<(u16, Vec<u8>)>) -> String {
    attributes.sort_by_key(|(kind, _)| *kind);
    let mut text = String::with_capacity(attributes.iter().map(|(_, b)| b.len() * 2).sum());
    for byte in attributes.iter().flat_map(|(_, bytes)| bytes) {
        for nibble in [byte >> 4, byte & 0xf] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text
}

/// Reads what [`to_hex`] wrote. None when it is not hex of whole attributes.
pub(super) fn from_hex(text: &str) -> Option<Vec<DefaultNla>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    let bytes: Vec<u8> =
        text.as_bytes().chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect::<Option<_>>()?;
    NlasIterator::new(&bytes[..]).map(|nla| nla.ok().and_then(|nla| DefaultNla::parse(&nla).ok())).collect()
}

/// Whether [`from_hex`] can read it. The ledger is a file: somebody may have edited it.
pub(super) fn is_valid(text: &str) -> bool {
    from_hex(text).is_some()
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|d| u8::try_from(d).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn refuses_what_is_not_attributes() {
        assert!(from_hex("").is_some_and(|a| a.is_empty()));
        for bad in ["0", "zz", "00", "0300140000000000", "ff00140000", "0é00140"] {
            assert!(!is_valid(bad), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(attributes in proptest::collection::vec((1u16..100, proptest::collection::vec(any::<u8>(), 0..40)), 0..6)) {
            let mut wanted: Vec<DefaultNla> = attributes.iter().map(|(k, v)| DefaultNla::new(*k, v.clone())).collect();
            wanted.sort_by_key(Nla::kind);
            let text = to_hex(wanted.iter().map(|a| (a.kind(), bytes(a))).collect());
            prop_assert_eq!(from_hex(&text), Some(wanted));
        }

        #[test]
        fn never_panics(text in "\\PC{0,64}", hex in "[0-9a-f]{0,64}") {
            let _ = (from_hex(&text), from_hex(&hex));
        }
    }
}
