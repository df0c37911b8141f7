//! A record comes back from a file: what in it no kernel ever said is left out.

use super::layout::{Width, fields};
use super::{Ethtool, Group, NAME_MAX, Numbers, bitset::BITS_MAX};

/// `state` without what can't be on the wire, and the names of that, shortened.
pub(in super::super) fn sound(state: &Ethtool) -> (Ethtool, Vec<String>) {
    let (mut sound, mut bad) = (state.clone(), Vec::new());
    if let Some(features) = &mut sound.features {
        if features.changeable.len() > BITS_MAX {
            features.changeable.clear();
            bad.push("ethtool features".to_owned());
        }
        features.changeable.retain(|name, _| keep(Group::Features, name, is_name(name), &mut bad));
    }
    for (group, numbers) in &mut sound.numbers {
        if numbers.now.len() > BITS_MAX {
            *numbers = Numbers::default();
            bad.push(format!("ethtool {}", group.name()));
        }
        numbers.now.retain(|name, value| keep(*group, name, is_setting(*group, name, *value), &mut bad));
    }
    (sound, bad)
}

fn keep(group: Group, name: &str, good: bool, bad: &mut Vec<String>) -> bool {
    if !good {
        let name: String = name.chars().take(NAME_MAX).collect();
        bad.push(format!("ethtool {} {name}", group.name()));
    }
    good
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_MAX && !name.contains('\0')
}

fn is_setting(group: Group, name: &str, value: u32) -> bool {
    match group {
        Group::Features => false,
        Group::PrivateFlags => is_name(name),
        _ => fields(group).iter().any(|field| field.name == name && (field.width == Width::Four || value <= u32::from(u8::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Feature, Features};
    use super::*;

    #[test]
    fn names_and_values_that_can_not_be_are_left_out() {
        let numbers = |now: &[(&str, u32)]| Numbers {
            now: now.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            ..Numbers::default()
        };
        let long = "x".repeat(NAME_MAX + 1);
        let good = Ethtool {
            features: Some(Features { changeable: [("rx-gro".to_owned(), Feature::On)].into(), ..Features::default() }),
            numbers: [
                (Group::PrivateFlags, numbers(&[("legacy-rx", 1)])),
                (Group::Rings, numbers(&[("rx", 512)])),
                (Group::Pause, numbers(&[("rx", 1)])),
            ]
            .into(),
        };
        assert_eq!(sound(&good), (good.clone(), vec![]));
        let mut damaged = good.clone();
        let features = damaged.features.as_mut().unwrap();
        features.changeable.extend([(long.clone(), Feature::On), ("a\0b".to_owned(), Feature::Off)]);
        damaged.numbers.get_mut(&Group::PrivateFlags).unwrap().now.insert(String::new(), 1);
        damaged.numbers.get_mut(&Group::Rings).unwrap().now.insert("rxx".to_owned(), 1);
        damaged.numbers.get_mut(&Group::Pause).unwrap().now.insert("tx".to_owned(), 256);
        damaged.numbers.insert(Group::Features, numbers(&[("rx-gro", 1)]));
        let (left, bad) = sound(&damaged);
        assert_eq!(bad.len(), 6, "{bad:?}");
        assert!(bad.contains(&format!("ethtool features {}", &long[1..])));
        assert_eq!((left.features, &left.numbers[&Group::Pause]), (good.features, &good.numbers[&Group::Pause]));
        let many = (0..=BITS_MAX).map(|n| (n.to_string(), 1)).collect();
        let many =
            Ethtool { features: None, numbers: [(Group::PrivateFlags, Numbers { now: many, ..Numbers::default() })].into() };
        assert_eq!(sound(&many).1, ["ethtool privateFlags"]);
    }
}
