//! Devices that several claims may have at the same time: a second device for each NIC, of which shares are allocated. Pure.
//!
//! The NIC as a whole and its shares exclude each other: both devices consume one counter, of which there is one. Shares of a device
//! that is in use consume no more of it (`allocateDevice` of the scheduler's allocator skips the check for them).

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::inventory::hardware::share_name;
use crate::inventory::{self, Attribute, HardwareId, Scan};
use crate::names::DeviceName;

/// `ResourceSliceMaxCountersPerCounterSet`, `k8s.io/api/resource/v1`.
const COUNTERS_MAX: usize = 32;
/// `ResourceSliceMaxCounterSets`: of one slice, and one is enough.
const SETS_MAX: usize = 8;
/// What `encapsulation` says of Ethernet.
const ETHERNET: &str = "ether";
/// What it says of IPoIB.
const INFINIBAND: &str = "infiniband";
/// The pattern that every name fits.
const ALL: &str = "*";

/// Which NICs are shared, and by how many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shares {
    /// How many claims may have a NIC at the same time; 0: none is shared.
    pub slots: u32,
    /// Names of devices or links on the host; `*` stands for any characters, `?` for one.
    pub patterns: Vec<String>,
}

impl Shares {
    /// Whether shares of the device are offered. IPoIB links have partitions only, which a class for Ethernet does not ask for: they are
    /// shared where a pattern means them.
    #[must_use]
    pub fn covers(&self, device: &inventory::Device) -> bool {
        let text = |name: &str| match device.attributes.get(name) {
            Some(Attribute::String(text)) => text.as_str(),
            _ => "",
        };
        let names = [device.name.as_str(), text("ifName")];
        let fits = |pattern: &String| names.iter().any(|name| matches(pattern.as_bytes(), name.as_bytes()));
        let is_hardware = !matches!(device.hardware, HardwareId::Virtual { .. });
        self.slots > 0
            && match text("encapsulation") {
                ETHERNET => self.patterns.iter().any(fits),
                INFINIBAND if is_hardware => self.patterns.iter().filter(|pattern| *pattern != ALL).any(fits),
                _ => false,
            }
    }
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) if matches(rest, name) => true,
        (Some((b'*', _)), Some((_, left))) => matches(pattern, left),
        (Some((b'?', rest)), Some((_, left))) => matches(rest, left),
        (Some((wanted, rest)), Some((is, left))) => wanted == is && matches(rest, left),
        _ => false,
    }
}

/// `devices`, made of `scan`, and for each that is shared a second one. All say whether they are shares, so that classes can tell them
/// apart. `speeds`: of links, bits per second. Without slots, nothing changes.
#[must_use]
pub fn with_shares(
    mut devices: Vec<Device>,
    scan: &Scan,
    driver: &str,
    shares: &Shares,
    speeds: &BTreeMap<DeviceName, u64>,
) -> Vec<Device> {
    if shares.slots == 0 {
        return devices;
    }
    devices.iter_mut().for_each(|device| mark(device, driver, false));
    let covered = scan.devices.iter().filter(|device| shares.covers(device));
    for (number, device) in covered.take(COUNTERS_MAX * SETS_MAX).enumerate() {
        let Some(whole) = devices.iter_mut().find(|whole| whole.name == device.name.as_str()) else { continue };
        whole.consumes_counters = Some(vec![DeviceCounterConsumption {
            counter_set: format!("nics-{}", number / COUNTERS_MAX),
            counters: BTreeMap::from([(whole.name.clone(), one())]),
            ..DeviceCounterConsumption::default()
        }]);
        let mut share = whole.clone();
        share_name(&device.name).as_str().clone_into(&mut share.name);
        share.allow_multiple_allocations = Some(true);
        share.capacity = Some(capacity(driver, shares.slots, speeds.get(&device.name).copied()));
        mark(&mut share, driver, true);
        devices.push(share);
    }
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices
}

fn mark(device: &mut Device, driver: &str, is_shared: bool) {
    let value = DeviceAttribute { bool: Some(is_shared), ..DeviceAttribute::default() };
    device.attributes.get_or_insert_default().insert(format!("{driver}/shared"), value);
}

fn one() -> Counter {
    Counter { value: Quantity("1".to_owned()) }
}

/// A claim takes one slot, whatever it asks for, and so much of the bandwidth as it asks for.
fn capacity(driver: &str, slots: u32, speed: Option<u64>) -> BTreeMap<String, DeviceCapacity> {
    let of = |value: u64, policy| DeviceCapacity { value: Quantity(value.to_string()), request_policy: Some(policy) };
    let quantity = |value: &str| Quantity(value.to_owned());
    let slot = CapacityRequestPolicy {
        default: Some(quantity("1")),
        valid_values: Some(vec![quantity("1")]),
        ..CapacityRequestPolicy::default()
    };
    let free = CapacityRequestPolicy { default: Some(quantity("0")), ..CapacityRequestPolicy::default() };
    let bandwidth = speed.map(|speed| (format!("{driver}/bandwidth"), of(speed, free)));
    std::iter::once((format!("{driver}/slots"), of(slots.into(), slot))).chain(bandwidth).collect()
}

/// The counters that `devices` consume, in sets: of each there is one.
pub(super) fn counters<'a>(devices: impl IntoIterator<Item = &'a Device>) -> Vec<CounterSet> {
    let mut sets: BTreeMap<&str, BTreeMap<String, Counter>> = BTreeMap::new();
    for consumed in devices.into_iter().flat_map(|device| device.consumes_counters.iter().flatten()) {
        let names = consumed.counters.keys().map(|name| (name.clone(), one()));
        sets.entry(&consumed.counter_set).or_default().extend(names);
    }
    sets.into_iter().map(|(name, counters)| CounterSet { name: name.to_owned(), counters }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Attributes;

    fn scan(count: usize) -> Scan {
        let device = |number: usize| {
            let hardware = HardwareId::Pci { address: format!("0000:{number:02x}:00.0"), port: String::new() };
            let texts = [("ifName", format!("rail{number}")), ("encapsulation", "ether".to_owned())];
            let attributes: Attributes = texts.into_iter().map(|(k, v)| (k.to_owned(), Attribute::String(v))).collect();
            inventory::Device { name: hardware.device_name(), hardware, link: None, attributes, rdma: None, is_rdma_only: false }
        };
        Scan { devices: (0..count).map(device).collect(), ..Scan::default() }
    }

    fn published(scan: &Scan, slots: u32, pattern: &str) -> Vec<Device> {
        let shares = Shares { slots, patterns: vec![pattern.to_owned()] };
        let speeds = BTreeMap::from([(scan.devices[0].name.clone(), 25_000_000_000)]);
        with_shares(super::super::devices(scan, "dranic.dev").0, scan, "dranic.dev", &shares, &speeds)
    }

    #[test]
    fn without_slots_nothing_is_another() {
        let scan = scan(3);
        let plain = super::super::devices(&scan, "dranic.dev").0;
        assert_eq!(published(&scan, 0, "*"), plain);
        assert_eq!(counters(&plain), []);
        let unshared = published(&scan, 5, "other*");
        assert!(unshared.len() == 3 && counters(&unshared).is_empty());
        assert!(unshared.iter().all(|d| d.attributes.as_ref().unwrap()["dranic.dev/shared"].bool == Some(false)));
    }

    #[test]
    fn a_shared_nic_is_two_devices_that_consume_one_counter() {
        let all = published(&scan(2), 16, "rail0");
        let names: Vec<&str> = all.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["pci-0000-00-00-0", "pci-0000-01-00-0", "share-pci-0000-00-00-0"]);
        assert_eq!(all[1].consumes_counters, None);
        assert_eq!(all[0].consumes_counters, all[2].consumes_counters);
        assert_eq!(all[0].allow_multiple_allocations, None);
        assert_eq!(all[0].attributes.as_ref().unwrap()["dranic.dev/shared"].bool, Some(false));
        assert_eq!(all[2].attributes.as_ref().unwrap()["dranic.dev/shared"].bool, Some(true));
        assert_eq!(all[2].attributes.as_ref().unwrap()["dranic.dev/ifName"].string.as_deref(), Some("rail0"));
        assert_eq!(all[2].allow_multiple_allocations, Some(true));
        let capacity = all[2].capacity.as_ref().unwrap();
        assert_eq!(capacity["dranic.dev/slots"].value.0, "16");
        assert_eq!(capacity["dranic.dev/bandwidth"].value.0, "25000000000");
        let sets = counters(&all);
        assert_eq!(sets.len(), 1);
        assert_eq!(sets[0].counters.keys().collect::<Vec<_>>(), ["pci-0000-00-00-0"]);
    }

    #[test]
    fn counters_are_spread_over_sets_and_what_has_none_is_not_shared() {
        let all = published(&scan(300), 4, "pci-*");
        assert_eq!(all.len(), 300 + 256);
        let sets = counters(&all);
        assert_eq!(sets.iter().map(|set| set.counters.len()).collect::<Vec<_>>(), [32; 8]);
        let mut infiniband = scan(1);
        infiniband.devices[0].attributes.insert("encapsulation".into(), Attribute::String("infiniband".into()));
        assert_eq!(published(&infiniband, 4, "*").len(), 1);
        assert_eq!(published(&infiniband, 4, "rail*").len(), 2, "where it is meant");
    }

    #[test]
    fn patterns() {
        let fits = |pattern: &str, name: &str| matches(pattern.as_bytes(), name.as_bytes());
        for (pattern, name) in [("*", ""), ("*", "a"), ("rail?", "rail1"), ("r*l*", "rail10"), ("rail0", "rail0"), ("*0", "000")]
        {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("", "a"), ("rail?", "rail"), ("rail?", "rail10"), ("*1", "rail0"), ("ail*", "rail")] {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }
}
