//! Writes attributes (`struct nlattr`). Pure.

/// `NLA_F_NESTED`, `linux/netlink.h`: the value is attributes again. Strict families refuse those without it.
pub const NLA_F_NESTED: u16 = 0x8000;
/// Bytes of an attribute's header: length and number, two bytes each.
const HEADER: usize = 4;

/// Appends one attribute, padded to four bytes. A value that no attribute has room for (64 KiB less the header) is left out.
pub fn attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let Ok(length) = u16::try_from(HEADER + value.len()) else { return };
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// Appends one attribute whose value is what `inner` appends.
pub fn nested(bytes: &mut Vec<u8>, kind: u16, inner: impl FnOnce(&mut Vec<u8>)) {
    let mut value = Vec::new();
    inner(&mut value);
    attribute(bytes, kind | NLA_F_NESTED, &value);
}

#[cfg(test)]
mod tests {
    use super::super::decode;
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        attribute(&mut bytes, 1, &[7]);
        nested(&mut bytes, 2, |inner| attribute(inner, 3, b"name\0"));
        attribute(&mut bytes, 4, &vec![0; usize::from(u16::MAX)]);
        let read: Vec<_> = decode::attributes(&bytes).collect();
        assert_eq!(read.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [1, 2]);
        assert_eq!((read[0].1, decode::find(read[1].1, 3).map(decode::text)), (&[7][..], Some("name".to_owned())));
        assert_eq!(bytes.len() % 4, 0);
    }
}
