//! Settings of `ethtool` in the pod.

use std::collections::BTreeMap;

use serde::Serialize;

use super::PlanError;
use crate::config::{EthtoolConfig, NetworkConfig};
use crate::netdev::ethtool::{Change, Group, Numbers, in_order, resolve};
use crate::netdev::{Ethtool, HostState};

/// What to ask for so that the device is as configured, in order: also what it is on the host already, because the pod may have had
/// the device in another sandbox before, and changed it there. The kernel does nothing where nothing differs.
pub(super) fn of_pod(config: &NetworkConfig, host: &HostState) -> Result<Vec<Change>, PlanError> {
    let Some(config) = &config.ethtool else { return Ok(Vec::new()) };
    let mut changes = Vec::new();
    for group in Group::ALL {
        let set =
            if group == Group::Features { features(config, &host.ethtool)? } else { numbers(group, config, &host.ethtool)? };
        changes.extend(in_order(Change { group, set }));
    }
    Ok(changes)
}

fn features(config: &EthtoolConfig, device: &Ethtool) -> Result<BTreeMap<String, u32>, PlanError> {
    let Some(asked) = config.features.as_ref().filter(|asked| !asked.is_empty()) else { return Ok(BTreeMap::new()) };
    let device = device.features.as_ref().ok_or_else(|| refusal(Group::Features, None, "the node's kernel told none of them"))?;
    let wanted = resolve(asked, device).map_err(|r| refusal(Group::Features, Some(&r.name), r.reason))?;
    Ok(wanted.into_iter().map(|(name, on)| (name, u32::from(on))).collect())
}

fn numbers(group: Group, config: &EthtoolConfig, device: &Ethtool) -> Result<BTreeMap<String, u32>, PlanError> {
    let asked = asked(group, config);
    let Some(first) = asked.keys().next() else { return Ok(asked) };
    let no_such = || refusal(group, Some(first), "the device's driver has no such settings; remove it");
    let device = device.numbers.get(&group).ok_or_else(no_such)?;
    for (name, value) in &asked {
        check(group, name, *value, device)?;
    }
    if group == Group::Channels {
        channels(&asked, device)?;
    }
    Ok(asked)
}

fn check(group: Group, name: &str, value: u32, device: &Numbers) -> Result<(), PlanError> {
    if !device.now.contains_key(name) {
        let has: Vec<&str> = device.now.keys().map(String::as_str).collect();
        return Err(refusal(group, Some(name), format!("the device has no such setting; it has {}", has.join(", "))));
    }
    match device.max.get(name) {
        Some(max) if value > *max => {
            Err(refusal(group, Some(name), format!("{value} is more than the device can have; its maximum is {max}")))
        }
        _ => Ok(()),
    }
}

/// The kernel refuses a device that could not receive, or not send.
fn channels(asked: &BTreeMap<String, u32>, device: &Numbers) -> Result<(), PlanError> {
    let after = |name: &str| asked.get(name).or(device.now.get(name)).copied().unwrap_or(0);
    for way in ["rx", "tx"] {
        if after(way) == 0 && after("combined") == 0 {
            let reason = format!("neither {way} nor combined channels would be left; the device needs one");
            return Err(refusal(Group::Channels, None, reason));
        }
    }
    Ok(())
}

/// What the configuration says of a group, by its own names.
fn asked(group: Group, config: &EthtoolConfig) -> BTreeMap<String, u32> {
    match group {
        Group::Features => BTreeMap::new(),
        Group::PrivateFlags => values(config.private_flags.as_ref()),
        Group::Channels => values(config.channels.as_ref()),
        Group::Rings => values(config.rings.as_ref()),
        Group::Coalesce => values(config.coalesce.as_ref()),
        Group::Pause => values(config.pause.as_ref()),
    }
}

/// The fields that are set, by their names in the configuration: numbers, and switches as 0 or 1.
fn values(config: Option<&impl Serialize>) -> BTreeMap<String, u32> {
    let json = config.and_then(|config| serde_json::to_value(config).ok());
    let fields = json.as_ref().and_then(|json| json.as_object()).into_iter().flatten();
    let value = |json: &serde_json::Value| {
        json.as_bool().map(u32::from).or_else(|| json.as_u64().and_then(|number| u32::try_from(number).ok()))
    };
    fields.filter_map(|(name, json)| Some((name.clone(), value(json)?))).collect()
}

fn refusal(group: Group, name: Option<&str>, reason: impl Into<String>) -> PlanError {
    let name = name.map_or_else(String::new, |name| format!(".{name}"));
    PlanError::Ethtool { path: format!("ethtool.{}{name}", group.name()), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::ethtool::{Feature, Features};

    fn map(values: &[(&str, u32)]) -> BTreeMap<String, u32> {
        values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    fn device() -> Ethtool {
        let numbers = |now: &[(&str, u32)], max: &[(&str, u32)]| Numbers { now: map(now), max: map(max) };
        let features = Features {
            changeable: [("rx-gro".to_owned(), Feature::On), ("tx-tcp-segmentation".to_owned(), Feature::On)].into(),
            fixed: [("rx-lro".to_owned(), false)].into(),
        };
        Ethtool {
            features: Some(features),
            numbers: [
                (Group::PrivateFlags, numbers(&[("legacy-rx", 0)], &[])),
                (Group::Channels, numbers(&[("combined", 4), ("other", 1)], &[("combined", 4), ("other", 1)])),
                (Group::Rings, numbers(&[("rx", 256), ("tx", 256)], &[("rx", 4096), ("tx", 4096)])),
                (Group::Coalesce, numbers(&[("rxUsecs", 3), ("adaptiveRx", 1)], &[])),
                (Group::Pause, numbers(&[("autoneg", 1), ("rx", 0), ("tx", 0)], &[])),
            ]
            .into(),
        }
    }

    fn planned(ethtool: &str) -> Result<Vec<String>, String> {
        planned_on(ethtool, device())
    }

    fn planned_on(ethtool: &str, device: Ethtool) -> Result<Vec<String>, String> {
        let config = crate::config::parse(&format!(r#"{{"ethtool": {ethtool}}}"#)).unwrap();
        assert_eq!(config.validate(), []);
        let host = HostState { ethtool: device, ..super::super::tests::host() };
        let changes = of_pod(&config, &host).map_err(|error| error.to_string())?;
        Ok(changes.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn everything_in_the_order_of_the_groups() {
        let all = r#"{"features": {"tso": false, "rx-gro": true}, "privateFlags": {"legacy-rx": true}, "rings": {"rx": 512, "tx": 256},
            "channels": {"combined": 2}, "coalesce": {"rxUsecs": 50, "adaptiveRx": false}, "pause": {"autoneg": false, "rx": true}}"#;
        let wanted = [
            "ethtool privateFlags legacy-rx on",
            "ethtool channels combined 2",
            "ethtool rings rx 512, tx 256",
            "ethtool features rx-gro on, tx-tcp-segmentation off",
            "ethtool coalesce adaptiveRx 0",
            "ethtool coalesce rxUsecs 50",
            "ethtool pause autoneg 0, rx 1",
        ];
        assert_eq!(planned(all).unwrap(), wanted);
    }

    #[test]
    fn nothing_for_nothing() {
        for nothing in ["{}", r#"{"features": {}, "rings": {}}"#, r#"{"features": {"lro": false}}"#] {
            assert_eq!(planned(nothing).unwrap(), [""; 0], "{nothing}");
        }
        assert_eq!(planned_on(r#"{"features": {}, "rings": {}}"#, Ethtool::default()).unwrap(), [""; 0]);
    }

    #[test]
    fn refusals_have_a_path_and_say_what_the_device_has() {
        let cases = [
            (r#"{"features": {"lro": true}}"#, "ethtool.features.lro: stands for rx-lro, which this device does not have"),
            (r#"{"features": {"rx-lro": true}}"#, "ethtool.features.rx-lro: rx-lro is off and fixed"),
            (
                r#"{"features": {"x": true}}"#,
                "ethtool.features.x: is no feature that the node's kernel knows; this device can change rx-gro, ",
            ),
            (r#"{"privateFlags": {"x": true}}"#, "ethtool.privateFlags.x: the device has no such setting; it has legacy-rx"),
            (r#"{"rings": {"rxMini": 8}}"#, "ethtool.rings.rxMini: the device has no such setting; it has rx, tx"),
            (r#"{"rings": {"rx": 8192}}"#, "ethtool.rings.rx: 8192 is more than the device can have; its maximum is 4096"),
            (
                r#"{"channels": {"combined": 5}}"#,
                "ethtool.channels.combined: 5 is more than the device can have; its maximum is 4",
            ),
            (r#"{"channels": {"combined": 0}}"#, "ethtool.channels: neither rx nor combined channels would be left"),
            (
                r#"{"coalesce": {"txFrames": 5}}"#,
                "ethtool.coalesce.txFrames: the device has no such setting; it has adaptiveRx, rxUsecs",
            ),
        ];
        for (json, text) in cases {
            let error = planned(json).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        let silent = [
            (r#"{"pause": {"rx": true}}"#, "ethtool.pause.rx: the device's driver has no such settings; remove it"),
            (r#"{"features": {"gro": true}}"#, "ethtool.features: the node's kernel told none of them"),
        ];
        for (json, text) in silent {
            assert_eq!(planned_on(json, Ethtool::default()).unwrap_err(), text);
        }
    }
}
