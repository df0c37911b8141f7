//! Requests and replies of the family (`linux/ethtool_netlink.h`). Pure functions over attributes.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{Field, Width, fields};
use super::{Change, Feature, Features, Group, Numbers, bitset};
use crate::netlink::{decode, encode};

/// `ETHTOOL_A_*_HEADER`: the same number in every message.
const HEADER: u16 = 1;
/// `ETHTOOL_A_HEADER_DEV_INDEX`.
const DEV_INDEX: u16 = 1;
/// `ETHTOOL_A_FEATURES_HW`: every feature, set those that can be changed.
const FEATURES_HW: u16 = 2;
/// `ETHTOOL_A_FEATURES_WANTED`.
const FEATURES_WANTED: u16 = 3;
/// `ETHTOOL_A_FEATURES_ACTIVE`.
const FEATURES_ACTIVE: u16 = 4;
/// `ETHTOOL_A_FEATURES_NOCHANGE`: those that can't be changed, whatever the driver says.
const FEATURES_NOCHANGE: u16 = 5;
/// `ETHTOOL_A_PRIVFLAGS_FLAGS`.
const PRIVFLAGS_FLAGS: u16 = 2;

/// A request about the link with `index`: every one begins like this, and one that asks has no more.
pub(super) fn request(index: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode::nested(&mut bytes, HEADER, |header| encode::attribute(header, DEV_INDEX, &index.to_ne_bytes()));
    bytes
}

/// The request that carries out `change`. None where a name or a value can't be on the wire.
pub(super) fn change_request(index: u32, change: &Change) -> Option<Vec<u8>> {
    let mut bytes = request(index);
    let bits = || change.set.iter().map(|(name, value)| (name.as_str(), *value != 0));
    match change.group {
        Group::Features => encode::nested(&mut bytes, FEATURES_WANTED, |set| set.extend(bitset::encode(bits()))),
        Group::PrivateFlags => encode::nested(&mut bytes, PRIVFLAGS_FLAGS, |set| set.extend(bitset::encode(bits()))),
        group => {
            for (name, value) in &change.set {
                let field = fields(group).iter().find(|field| field.name == name)?;
                match field.width {
                    Width::One => encode::attribute(&mut bytes, field.kind, &[u8::try_from(*value).ok()?]),
                    Width::Four => encode::attribute(&mut bytes, field.kind, &value.to_ne_bytes()),
                }
            }
        }
    }
    Some(bytes)
}

/// Reads the reply about features. None when it can't be read.
pub(super) fn features(reply: &[u8]) -> Option<Features> {
    let set = |kind| {
        let bits = bitset::decode(decode::find(reply, kind)?)?;
        Some(bits.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect::<BTreeSet<_>>())
    };
    let (wanted, active) = (set(FEATURES_WANTED)?, set(FEATURES_ACTIVE)?);
    let never = set(FEATURES_NOCHANGE).unwrap_or_default();
    let mut features = Features::default();
    for (name, in_hardware) in bitset::decode(decode::find(reply, FEATURES_HW)?)? {
        let is_active = active.contains(&name);
        if in_hardware && !never.contains(&name) {
            let feature = Feature::new(wanted.contains(&name), is_active);
            features.changeable.insert(name, feature);
        } else {
            features.fixed.insert(name, is_active);
        }
    }
    Some(features)
}

/// Reads the reply to a change of features: those that are not as it wanted them. None when it can't be read.
pub(super) fn unmet(reply: &[u8]) -> Option<BTreeSet<String>> {
    let Some(wanted) = decode::find(reply, FEATURES_WANTED) else { return Some(BTreeSet::new()) };
    Some(bitset::decode(wanted)?.into_iter().map(|(name, _)| name).collect())
}

/// Reads the reply about any other group. None when it can't be read.
pub(super) fn numbers(group: Group, reply: &[u8]) -> Option<Numbers> {
    if group == Group::PrivateFlags {
        let flags = bitset::decode(decode::find(reply, PRIVFLAGS_FLAGS)?)?;
        let now = flags.into_iter().map(|(name, is_set)| (name, u32::from(is_set))).collect();
        return Some(Numbers { now, max: BTreeMap::new() });
    }
    let mut numbers = Numbers::default();
    for field in fields(group) {
        let Some(value) = value(field, reply) else { continue };
        numbers.now.insert(field.name.to_owned(), value);
        let max = field.max.and_then(|max| decode::read_u32(decode::find(reply, max)?, 0));
        numbers.max.extend(max.map(|max| (field.name.to_owned(), max)));
    }
    Some(numbers)
}

fn value(field: &Field, reply: &[u8]) -> Option<u32> {
    let value = decode::find(reply, field.kind)?;
    match field.width {
        Width::One => value.first().map(|byte| u32::from(*byte)),
        Width::Four => decode::read_u32(value, 0),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change(group: Group, set: &[(&str, u32)]) -> Change {
        Change { group, set: set.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect() }
    }

    /// Words of bytes, as a request is read in a hex dump.
    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    /// `ethtool --debug 0xff` shows the same attributes.
    #[test]
    fn requests_are_those_of_the_header_file() {
        let rings = change_request(7, &change(Group::Rings, &[("rx", 256), ("txPush", 1)])).unwrap();
        let word =
            |length: u32, kind: u32| if cfg!(target_endian = "little") { kind << 16 | length } else { length << 16 | kind };
        let first = if cfg!(target_endian = "little") { 1 } else { 1 << 24 };
        assert_eq!(words(&rings), [word(12, 0x8001), word(8, 1), 7, word(8, 6), 256, word(5, 13), first]);
        let features = change_request(7, &change(Group::Features, &[("rx-gro", 1)])).unwrap();
        let name = [u32::from_ne_bytes(*b"rx-g"), u32::from_ne_bytes(*b"ro\0\0")];
        let bit = [word(20, 0x8001), word(11, 2), name[0], name[1], word(4, 3)];
        assert_eq!(words(&features)[3..], [&[word(28, 0x8003), word(24, 0x8003)][..], &bit].concat());
    }

    #[test]
    fn what_can_not_be_on_the_wire_is_refused() {
        assert_eq!(change_request(7, &change(Group::Rings, &[("rxx", 256)])), None);
        assert_eq!(change_request(7, &change(Group::Pause, &[("rx", 256)])), None);
    }

    #[test]
    fn features_are_told_apart() {
        let mut reply = request(7);
        let mut add = |kind, bits: &[(&str, bool)], whole: bool| {
            let mut set = bitset::encode(bits.iter().copied());
            if !whole {
                encode::attribute(&mut set, 1, &[]);
            }
            encode::attribute(&mut reply, kind | encode::NLA_F_NESTED, &set);
        };
        add(FEATURES_HW, &[("a", true), ("b", true), ("c", false), ("d", false), ("e", true)], true);
        add(FEATURES_WANTED, &[("a", true), ("b", true)], false);
        add(FEATURES_ACTIVE, &[("a", true), ("d", true), ("e", true)], false);
        add(FEATURES_NOCHANGE, &[("e", true)], false);
        let read = features(&reply).unwrap();
        assert_eq!(read.changeable, [("a".into(), Feature::On), ("b".into(), Feature::OffWantedOn)].into());
        assert_eq!(read.fixed, [("c".into(), false), ("d".into(), true), ("e".into(), true)].into());
        assert_eq!(unmet(&reply), Some(["a".to_owned(), "b".to_owned()].into()));
        assert_eq!((features(&request(7)), unmet(&request(7))), (None, Some(BTreeSet::new())));
    }

    proptest! {
        #[test]
        fn numbers_round_trip(rx in any::<u32>(), adaptive in 0u32..256) {
            let set = change(Group::Coalesce, &[("rxUsecs", rx), ("adaptiveRx", adaptive)]);
            let read = numbers(Group::Coalesce, &change_request(7, &set).unwrap()).unwrap();
            prop_assert_eq!(read, Numbers { now: set.set, max: BTreeMap::new() });
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = (features(&bytes), unmet(&bytes));
            for group in Group::ALL {
                let _ = numbers(group, &bytes);
            }
        }

        #[test]
        fn odd_attributes(kind in 1u16..30, value in proptest::collection::vec(any::<u8>(), 0..12)) {
            let mut reply = request(7);
            encode::attribute(&mut reply, kind, &value);
            let _ = (features(&reply), unmet(&reply));
            for group in Group::ALL {
                let _ = numbers(group, &reply);
            }
        }
    }
}
