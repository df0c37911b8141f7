//! From one state of a device to another: what differs, and what to ask for, in which order. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{Change, Ethtool, Feature, Group, value_text};

/// A setting that differs between two states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// For example `ethtool rings rx`.
    pub what: String,
    /// What it was; empty when it was not there.
    pub before: String,
    /// What it is; empty when it is not there.
    pub after: String,
}

/// Every setting that differs. A group that `before` says nothing of does not count (a record of an earlier version), nor does what
/// the device chooses by itself.
#[must_use]
pub fn differences(before: &Ethtool, after: &Ethtool) -> Vec<Setting> {
    let mut found = Vec::new();
    for group in Group::ALL {
        let (Some(old), new) = (texts(before, group), texts(after, group).unwrap_or_default()) else { continue };
        for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
            if is_chosen(before, after, group, name) {
                continue;
            }
            let text = |texts: &BTreeMap<String, String>| texts.get(name).cloned().unwrap_or_default();
            let (before, after) = (text(&old), text(&new));
            if before != after {
                found.push(Setting { what: format!("ethtool {} {name}", group.name()), before, after });
            }
        }
    }
    found
}

/// The requests that bring a device from `now` to `before`, in order: only what differs, and only what it still has.
#[must_use]
pub fn changes(now: &Ethtool, before: &Ethtool) -> Vec<Change> {
    Group::ALL.into_iter().flat_map(|group| in_order(Change { group, set: lacking(now, before, group) })).collect()
}

/// `change` as the requests that carry it out; none where there is nothing to do. Some drivers refuse numbers for coalescing while
/// they choose them: those are set after that was switched off and before it is switched on.
#[must_use]
pub fn in_order(change: Change) -> Vec<Change> {
    let turn = |name: &str, value: u32| match (change.group, name.starts_with(ADAPTIVE), value) {
        (Group::Coalesce, true, 0) => 0,
        (Group::Coalesce, true, _) => 2,
        _ => 1,
    };
    let mut turns: [BTreeMap<String, u32>; 3] = Default::default();
    for (name, value) in &change.set {
        turns[turn(name, *value)].insert(name.clone(), *value);
    }
    let asks = turns.into_iter().filter(|set| !set.is_empty());
    asks.map(|set| Change { group: change.group, set }).collect()
}

/// `adaptiveRx` and `adaptiveTx`.
const ADAPTIVE: &str = "adaptive";

/// What of a group differs, as it shall be.
fn lacking(now: &Ethtool, before: &Ethtool, group: Group) -> BTreeMap<String, u32> {
    if group == Group::Features {
        let (Some(now), Some(before)) = (&now.features, &before.features) else { return BTreeMap::new() };
        let other = |(name, feature): (&String, &Feature)| {
            let is_other = now.changeable.get(name)?.wanted() != feature.wanted();
            is_other.then(|| (name.clone(), u32::from(feature.wanted())))
        };
        return before.changeable.iter().filter_map(other).collect();
    }
    let (Some(there), Some(wanted)) = (now.numbers.get(&group), before.numbers.get(&group)) else { return BTreeMap::new() };
    let differs = |(name, value): &(&String, &u32)| there.now.get(*name).is_some_and(|now| now != *value);
    let wanted = wanted.now.iter().filter(differs).filter(|(name, _)| !is_rate(now, before, group, name));
    wanted.map(|(name, value)| (name.clone(), *value)).collect()
}

/// Name and value in words of each setting that can differ; none where the group is not known.
fn texts(state: &Ethtool, group: Group) -> Option<BTreeMap<String, String>> {
    if group == Group::Features {
        let features = state.features.as_ref()?;
        return Some(features.changeable.iter().map(|(name, feature)| (name.clone(), feature.to_string())).collect());
    }
    let numbers = state.numbers.get(&group)?;
    Some(numbers.now.iter().map(|(name, value)| (name.clone(), value_text(group, *value))).collect())
}

/// Whether the device chooses the value itself, in both states: coalescing that adapts to the load, and flow control that is agreed
/// with the other end.
fn is_chosen(one: &Ethtool, other: &Ethtool, group: Group, name: &str) -> bool {
    let agreed = || group == Group::Pause && name != "autoneg" && is_on_in_both(one, other, group, "autoneg");
    is_rate(one, other, group, name) || agreed()
}

fn is_rate(one: &Ethtool, other: &Ethtool, group: Group, name: &str) -> bool {
    let switch = match () {
        () if name.starts_with("rx") => "adaptiveRx",
        () if name.starts_with("tx") => "adaptiveTx",
        () => return false,
    };
    group == Group::Coalesce && is_on_in_both(one, other, group, switch)
}

fn is_on_in_both(one: &Ethtool, other: &Ethtool, group: Group, name: &str) -> bool {
    let is_on = |state: &Ethtool| state.numbers.get(&group).and_then(|n| n.now.get(name)).is_some_and(|value| *value != 0);
    is_on(one) && is_on(other)
}

#[cfg(test)]
mod tests {
    use super::super::{Features, Numbers};
    use super::*;

    fn numbers(group: Group, now: &[(&str, u32)]) -> Ethtool {
        let now = now.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Ethtool { features: None, numbers: [(group, Numbers { now, max: BTreeMap::new() })].into() }
    }

    fn features(changeable: &[(&str, Feature)]) -> Ethtool {
        let changeable = changeable.iter().map(|(name, feature)| ((*name).to_owned(), *feature)).collect();
        Ethtool { features: Some(Features { changeable, fixed: BTreeMap::new() }), numbers: BTreeMap::new() }
    }

    fn words(changes: &[Change]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    fn found(before: &Ethtool, after: &Ethtool) -> Vec<String> {
        differences(before, after).into_iter().map(|s| format!("{}: {:?} -> {:?}", s.what, s.before, s.after)).collect()
    }

    #[test]
    fn features_differ_in_what_is_wanted_and_in_what_they_are() {
        let before = features(&[("a", Feature::On), ("b", Feature::OffWantedOn), ("c", Feature::Off), ("gone", Feature::On)]);
        let after = features(&[("a", Feature::Off), ("b", Feature::Off), ("c", Feature::OnWantedOff), ("new", Feature::On)]);
        let wanted = [
            r#"ethtool features a: "on" -> "off""#,
            r#"ethtool features b: "off, wanted on" -> "off""#,
            r#"ethtool features c: "off" -> "on, wanted off""#,
            r#"ethtool features gone: "on" -> """#,
            r#"ethtool features new: "" -> "on""#,
        ];
        assert_eq!(found(&before, &after), wanted);
        // What another feature forces is not asked for: it follows when that one does.
        assert_eq!(words(&changes(&after, &before)), ["ethtool features a on, b on"]);
        assert_eq!((changes(&before, &before), found(&before, &before)), (vec![], vec![]));
    }

    #[test]
    fn only_what_differs_is_asked_for() {
        let (before, after) = (
            numbers(Group::Rings, &[("rx", 512), ("tx", 512), ("rxMini", 9)]),
            numbers(Group::Rings, &[("rx", 256), ("tx", 512), ("txPush", 1)]),
        );
        assert_eq!(words(&changes(&after, &before)), ["ethtool rings rx 512"]);
        let wanted =
            [r#"ethtool rings rx: "512" -> "256""#, r#"ethtool rings rxMini: "9" -> """#, r#"ethtool rings txPush: "" -> "1""#];
        assert_eq!(found(&before, &after), wanted);
    }

    #[test]
    fn an_earlier_record_says_nothing() {
        let now = numbers(Group::Rings, &[("rx", 512)]);
        assert_eq!(found(&Ethtool::default(), &now), [""; 0]);
        assert_eq!(changes(&now, &Ethtool::default()), []);
        assert_eq!(found(&now, &Ethtool::default()), [r#"ethtool rings rx: "512" -> """#]);
        assert_eq!(changes(&Ethtool::default(), &now), []);
    }

    #[test]
    fn rates_are_set_while_the_driver_does_not_choose_them() {
        let fixed = numbers(Group::Coalesce, &[("adaptiveRx", 0), ("adaptiveTx", 1), ("rxUsecs", 50), ("txUsecs", 8)]);
        let chosen = numbers(Group::Coalesce, &[("adaptiveRx", 1), ("adaptiveTx", 1), ("rxUsecs", 3), ("txUsecs", 99)]);
        assert_eq!(words(&changes(&chosen, &fixed)), ["ethtool coalesce adaptiveRx 0", "ethtool coalesce rxUsecs 50"]);
        assert_eq!(words(&changes(&fixed, &chosen)), ["ethtool coalesce rxUsecs 3", "ethtool coalesce adaptiveRx 1"]);
        // The rate for sending is the driver's own on both sides.
        assert_eq!(found(&fixed, &chosen).len(), 2);
    }

    #[test]
    fn agreed_flow_control_is_no_difference_but_is_asked_for() {
        let before = numbers(Group::Pause, &[("autoneg", 1), ("rx", 1), ("tx", 1)]);
        let after = numbers(Group::Pause, &[("autoneg", 1), ("rx", 0), ("tx", 0)]);
        assert_eq!(found(&before, &after), [""; 0]);
        assert_eq!(words(&changes(&after, &before)), ["ethtool pause rx 1, tx 1"]);
        let forced = numbers(Group::Pause, &[("autoneg", 0), ("rx", 0), ("tx", 0)]);
        assert_eq!(found(&before, &forced).len(), 3);
    }

    #[test]
    fn groups_are_changed_in_their_order() {
        let state = |value| {
            let mut all = features(&[("a", Feature::new(value != 0, value != 0))]);
            for group in Group::ALL.into_iter().filter(|group| *group != Group::Features) {
                all.numbers.extend(numbers(group, &[("rx", value)]).numbers);
            }
            all
        };
        let order: Vec<Group> = changes(&state(0), &state(1)).into_iter().map(|change| change.group).collect();
        assert_eq!(order, Group::ALL);
    }
}
