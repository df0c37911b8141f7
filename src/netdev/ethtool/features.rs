//! Names of features as people write them. Pure.

use std::collections::BTreeMap;

use super::Features;

/// Names that `ethtool` has for one or several features, short and long, and which those are: one name, or all that begin with what
/// is before the star and end with what is after it.
const ALIASES: [(&str, &str, &str); 12] = [
    ("rx", "rx-checksumming", "rx-checksum"),
    ("tx", "tx-checksumming", "tx-checksum-*"),
    ("sg", "scatter-gather", "tx-scatter-gather*"),
    ("tso", "tcp-segmentation-offload", "tx-tcp*-segmentation"),
    ("ufo", "udp-fragmentation-offload", "tx-udp-fragmentation"),
    ("gso", "generic-segmentation-offload", "tx-generic-segmentation"),
    ("gro", "generic-receive-offload", "rx-gro"),
    ("lro", "large-receive-offload", "rx-lro"),
    ("rxvlan", "rx-vlan-offload", "rx-vlan-hw-parse"),
    ("txvlan", "tx-vlan-offload", "tx-vlan-hw-insert"),
    ("ntuple", "ntuple-filters", "rx-ntuple-filter"),
    ("rxhash", "receive-hashing", "rx-hashing"),
];

/// A feature that can't be as asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureRefusal {
    /// As written.
    pub name: String,
    /// Why, and what the device has.
    pub reason: String,
}

/// The features to ask the kernel for so that `device` is as `asked`, by the kernel's names: those that can be changed, also where
/// they are so already. A kernel's name says more than one that stands for several, and wins over it. Off is granted where there
/// is nothing to switch off.
///
/// # Errors
/// The first name that the device does not have, or has and can't change.
pub fn resolve(asked: &BTreeMap<String, bool>, device: &Features) -> Result<BTreeMap<String, bool>, FeatureRefusal> {
    let (mut wanted, mut single) = (BTreeMap::new(), BTreeMap::new());
    for (name, on) in asked {
        let refusal = |reason| FeatureRefusal { name: name.clone(), reason };
        if let Some((.., pattern)) = ALIASES.iter().find(|(short, long, _)| name == short || name == long) {
            for member in members(pattern, *on, device).map_err(refusal)? {
                if wanted.insert(member.clone(), *on).is_some_and(|other| other != *on) {
                    let both = format!("is asked for as {}, and under another name as {}", word(*on), word(!*on));
                    return Err(refusal(both));
                }
            }
        } else if is_changeable(name, *on, device).map_err(refusal)? {
            single.insert(name.clone(), *on);
        }
    }
    wanted.append(&mut single);
    Ok(wanted)
}

/// Those of `pattern` that can be changed. Where there are none, one that is as asked for will do for on, and all must be for off.
fn members<'a>(pattern: &str, on: bool, device: &'a Features) -> Result<Vec<&'a String>, String> {
    let (begin, end) = pattern.split_once('*').unwrap_or((pattern, ""));
    let fits = |name: &&String| match pattern.contains('*') {
        true => name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end),
        false => *name == pattern,
    };
    let changeable: Vec<&String> = device.changeable.keys().filter(fits).collect();
    let mut fixed = device.fixed.iter().filter(|(name, _)| fits(name));
    match (on, fixed.find(|(_, is_on)| **is_on)) {
        (false, Some((name, _))) if changeable.is_empty() => Err(fixed_text(name, true)),
        (true, None) if changeable.is_empty() => {
            Err(format!("stands for {pattern}, which this device does not have or can't change"))
        }
        _ => Ok(changeable),
    }
}

/// Whether there is something to change for one name of the kernel's.
fn is_changeable(name: &str, on: bool, device: &Features) -> Result<bool, String> {
    match (device.changeable.contains_key(name), device.fixed.get(name)) {
        (true, _) => Ok(true),
        (false, Some(is_on)) if *is_on == on => Ok(false),
        (false, Some(is_on)) => Err(fixed_text(name, *is_on)),
        (false, None) => {
            let has: Vec<&str> = device.changeable.keys().map(String::as_str).collect();
            let short: Vec<&str> = ALIASES.iter().map(|(short, ..)| *short).collect();
            let why = "is no feature that the node's kernel knows";
            Err(format!("{why}; this device can change {}; short names are {}", has.join(", "), short.join(", ")))
        }
    }
}

fn fixed_text(name: &str, is_on: bool) -> String {
    format!("{name} is {} and fixed: this device can't change it", word(is_on))
}

fn word(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::super::Feature;
    use super::*;

    fn device() -> Features {
        let changeable = [
            ("tx-checksum-ip-generic", Feature::On),
            ("tx-tcp-segmentation", Feature::On),
            ("tx-tcp6-segmentation", Feature::On),
            ("tx-tcp-ecn-segmentation", Feature::OffWantedOn),
            ("rx-gro", Feature::Off),
            ("tx-generic-segmentation", Feature::OnWantedOff),
        ];
        let fixed = [
            ("rx-lro", false),
            ("tx-checksum-ipv4", false),
            ("rx-checksum", true),
            ("tx-scatter-gather", true),
            ("tx-scatter-gather-fraglist", false),
        ];
        Features {
            changeable: changeable.map(|(name, feature)| (name.to_owned(), feature)).into(),
            fixed: fixed.map(|(name, on)| (name.to_owned(), on)).into(),
        }
    }

    fn of(asked: &[(&str, bool)]) -> Result<Vec<String>, String> {
        let asked = asked.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect();
        let wanted = resolve(&asked, &device()).map_err(|refusal| format!("{}: {}", refusal.name, refusal.reason))?;
        Ok(wanted.into_iter().map(|(name, on)| format!("{name} {}", word(on))).collect())
    }

    #[test]
    fn names_stand_for_what_the_device_has() {
        let tso = ["tx-tcp-ecn-segmentation off", "tx-tcp-segmentation off", "tx-tcp6-segmentation off"];
        for name in ["tso", "tcp-segmentation-offload"] {
            assert_eq!(of(&[(name, false)]).unwrap(), tso);
        }
        assert_eq!(of(&[("tx", false)]).unwrap(), ["tx-checksum-ip-generic off"]);
        assert_eq!(of(&[("gro", true), ("rx-gro", true)]).unwrap(), ["rx-gro on"]);
        // The kernel's name wins.
        let both = of(&[("tso", false), ("tx-tcp6-segmentation", true)]).unwrap();
        assert_eq!(both, [tso[0], tso[1], "tx-tcp6-segmentation on"]);
        assert_eq!(of(&[("gso", true)]).unwrap(), ["tx-generic-segmentation on"]);
        // As for the program: one that is on for good does not keep the others from being switched off.
        let mut device = device();
        device.fixed.insert("tx-checksum-fcoe-crc".to_owned(), true);
        let off = resolve(&[("tx".to_owned(), false)].into(), &device).unwrap();
        assert_eq!(off, [("tx-checksum-ip-generic".to_owned(), false)].into());
    }

    #[test]
    fn what_is_so_for_good_is_granted() {
        for (name, on) in [("lro", false), ("rx-lro", false), ("rx", true), ("sg", true), ("ufo", false), ("rx-checksum", true)] {
            assert_eq!(of(&[(name, on)]), Ok(vec![]), "{name}");
        }
    }

    #[test]
    fn what_can_not_be_is_refused_by_name() {
        let cases = [
            ("lro", true, "lro: stands for rx-lro, which this device does not have or can't change"),
            ("ufo", true, "ufo: stands for tx-udp-fragmentation, which"),
            ("rx-lro", true, "rx-lro: rx-lro is off and fixed: this device can't change it"),
            ("sg", false, "sg: tx-scatter-gather is on and fixed"),
            (
                "tso-x",
                true,
                "tso-x: is no feature that the node's kernel knows; this device can change rx-gro, tx-checksum-ip-generic, ",
            ),
            ("", true, ": is no feature"),
        ];
        for (name, on, text) in cases {
            let error = of(&[(name, on)]).unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
        let error = of(&[("tso", true), ("tcp-segmentation-offload", false)]).unwrap_err();
        assert_eq!(error, "tso: is asked for as on, and under another name as off");
    }
}
