//! Which device a person means. Pure.

use crate::inventory::{Device, Scan};
use crate::ledger::ClaimRecord;

/// Names that differ in so many letters are near.
const NEAR: usize = 2;
/// How many names are listed at most.
const SHOWN: usize = 12;

/// The device with this name, by which it is published, or whose link on the host has this name or altname, or that is an RDMA device of
/// this name.
///
/// # Errors
/// Why there is none, with the reason why a link is not offered, or with names that are near.
pub fn device<'a>(scan: &'a Scan, name: &str) -> Result<&'a Device, String> {
    let named = |device: &&Device| {
        let link = device.link.as_ref();
        let rdma = device.rdma.as_ref().filter(|_| device.is_rdma_only);
        let is_link = link.is_some_and(|l| l.name == name || l.alt_names.iter().any(|alt| alt == name));
        device.name.as_str() == name || is_link || rdma.is_some_and(|rdma| rdma.name.as_str() == name)
    };
    if let Some(found) = scan.devices.iter().find(named) {
        return Ok(found);
    }
    let withheld = |w: &&crate::inventory::Withheld| w.link == name || w.device.as_ref().is_some_and(|d| d.as_str() == name);
    if let Some(link) = scan.withheld.iter().find(withheld) {
        return Err(format!("{name} is not offered: {}; see: dranic devices", link.reason));
    }
    let links = scan.devices.iter().filter_map(|d| d.link.as_ref()).map(|l| l.name.as_str());
    let names: Vec<&str> = scan.devices.iter().map(|d| d.name.as_str()).chain(links).collect();
    Err(not_found(name, &names))
}

/// The record of the device with this name, by which it is published, or by its link's name on the host or in the namespace.
///
/// # Errors
/// Why there is none, with names that are near.
pub fn attached<'a>(records: impl Iterator<Item = &'a ClaimRecord>, name: &str) -> Result<&'a ClaimRecord, String> {
    let records: Vec<&ClaimRecord> = records.collect();
    let devices = || records.iter().flat_map(|r| r.devices.iter().map(move |d| (*r, d)));
    let is_named = |d: &crate::ledger::DeviceRecord| d.device.as_str() == name || d.host.name == name;
    let found = devices().find(|(_, d)| is_named(d)).or_else(|| devices().find(|(_, d)| d.plan.pod_link.as_str() == name));
    found.map(|(record, _)| record).ok_or_else(|| {
        let names: Vec<&str> = devices().flat_map(|(_, d)| [d.device.as_str(), d.host.name.as_str()]).collect();
        if names.is_empty() { "nothing is attached".to_owned() } else { not_found(name, &names) }
    })
}

fn not_found(name: &str, names: &[&str]) -> String {
    let distance = |other: &str| crate::config::distance(name, other);
    let nearest = names.iter().map(|n| (distance(n), *n)).min().filter(|(d, _)| *d <= NEAR);
    let short: String = name.chars().take(64).collect();
    match nearest {
        Some((_, near)) => format!("no device or link is called {short:?}; did you mean {near}?"),
        None if names.is_empty() => format!("no device or link is called {short:?}, and none is offered; see: dranic devices"),
        None => {
            let more = if names.len() > SHOWN { ", …" } else { "" };
            let known = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
            format!("no device or link is called {short:?}; there are {known}{more}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::inventory::{HardwareId, Withheld};
    use crate::names::DeviceName;

    fn scan() -> Scan {
        let device = |name: &str| Device {
            name: DeviceName::new(name).unwrap(),
            hardware: HardwareId::Virtual { kind: "veth".to_owned(), address: None, twin: None },
            link: None,
            attributes: BTreeMap::new(),
            rdma: None,
            is_rdma_only: false,
        };
        let withheld = Withheld { link: "eth0".to_owned(), device: None, reason: "it is the uplink".to_owned() };
        Scan { devices: vec![device("pci-0000-8a-00-0"), device("pci-0000-8b-00-0")], withheld: vec![withheld], problems: vec![] }
    }

    #[test]
    fn a_name_that_is_not_there_says_which_are() {
        let scan = scan();
        let why = |name: &str| device(&scan, name).unwrap_err();
        assert_eq!(device(&scan, "pci-0000-8b-00-0").unwrap().name.as_str(), "pci-0000-8b-00-0");
        assert_eq!(why("eth0"), "eth0 is not offered: it is the uplink; see: dranic devices");
        assert_eq!(why("pci-0000-8b-00-1"), "no device or link is called \"pci-0000-8b-00-1\"; did you mean pci-0000-8b-00-0?");
        assert_eq!(why("x"), "no device or link is called \"x\"; there are pci-0000-8a-00-0, pci-0000-8b-00-0");
        assert!(device(&Scan::default(), "x").unwrap_err().contains("none is offered"));
        assert_eq!(attached(std::iter::empty(), "x").unwrap_err(), "nothing is attached");
    }
}
