//! Bitsets by name (`ETHTOOL_A_BITSET_*`, `linux/ethtool_netlink.h`). Pure.

use super::NAME_MAX;
use crate::netlink::{decode, encode};

/// `ETHTOOL_A_BITSET_NOMASK`: every bit that is listed is set.
const NOMASK: u16 = 1;
/// `ETHTOOL_A_BITSET_BITS`.
const BITS: u16 = 3;
/// `ETHTOOL_A_BITSET_BITS_BIT`.
const BIT: u16 = 1;
/// `ETHTOOL_A_BITSET_BIT_NAME`.
const BIT_NAME: u16 = 2;
/// `ETHTOOL_A_BITSET_BIT_VALUE`: a flag, there or not.
const BIT_VALUE: u16 = 3;
/// More bits than any set has: the kernel knows 64 features, and drivers a few dozens of flags.
pub(super) const BITS_MAX: usize = 1024;

/// The named bits that are listed, each with its value. None for the form without names, which nobody asks for, and for more than
/// [`BITS_MAX`]. A bit whose name is empty or too long is left out: the kernel has numbers that nobody uses.
pub(super) fn decode(value: &[u8]) -> Option<Vec<(String, bool)>> {
    let all_set = decode::find(value, NOMASK).is_some();
    let bits = decode::find(value, BITS)?;
    let bits: Vec<&[u8]> = decode::attributes(bits).filter(|(kind, _)| *kind == BIT).map(|(_, bit)| bit).collect();
    if bits.len() > BITS_MAX {
        return None;
    }
    let named = bits.into_iter().filter_map(|bit| {
        let name = decode::text(decode::find(bit, BIT_NAME)?);
        let is_set = all_set || decode::find(bit, BIT_VALUE).is_some();
        (!name.is_empty() && name.len() <= NAME_MAX).then_some((name, is_set))
    });
    Some(named.collect())
}

/// The set that changes these bits and no others, as the value of an attribute.
pub(super) fn encode<'a>(bits: impl IntoIterator<Item = (&'a str, bool)>) -> Vec<u8> {
    let mut set = Vec::new();
    encode::nested(&mut set, BITS, |inner| {
        for (name, value) in bits {
            encode::nested(inner, BIT, |bit| {
                encode::attribute(bit, BIT_NAME, &[name.as_bytes(), &[0]].concat());
                if value {
                    encode::attribute(bit, BIT_VALUE, &[]);
                }
            });
        }
    });
    set
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(bits: &[(&str, bool)]) -> Vec<(String, bool)> {
        bits.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn listed_bits_are_set_where_there_is_no_mask() {
        let bits = [("rx-gro", true), ("rx-lro", false)];
        let mut set = encode(bits);
        assert_eq!(decode(&set), Some(named(&bits)));
        encode::attribute(&mut set, NOMASK, &[]);
        assert_eq!(decode(&set), Some(named(&[("rx-gro", true), ("rx-lro", true)])));
    }

    #[test]
    fn what_has_no_names_is_refused_or_left_out() {
        assert_eq!(decode(&[]), None);
        let mut compact = Vec::new();
        encode::attribute(&mut compact, 4, &[255; 8]);
        assert_eq!(decode(&compact), None);
        let long = "x".repeat(NAME_MAX + 1);
        assert_eq!(decode(&encode([("", true), (&long, true), (&long[1..], true)])), Some(named(&[(&long[1..], true)])));
        // Within the size of an attribute, and still too many.
        assert_eq!(decode(&encode(std::iter::repeat_n(("x", true), BITS_MAX + 1))), None);
        assert_eq!(decode(&encode(std::iter::repeat_n(("x", true), BITS_MAX))).map(|bits| bits.len()), Some(BITS_MAX));
    }

    proptest! {
        #[test]
        fn round_trip(bits in proptest::collection::btree_map("[a-z0-9-]{1,31}", any::<bool>(), 0..60)) {
            let wanted: Vec<_> = bits.into_iter().collect();
            prop_assert_eq!(decode(&encode(wanted.iter().map(|(n, v)| (n.as_str(), *v)))), Some(wanted));
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
