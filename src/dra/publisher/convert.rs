//! The inventory's devices as the API's, without anything that the API would refuse. Pure.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

use crate::inventory::{self, Attribute, Attributes, Scan};
use crate::names::DNS_LABEL_MAX;

// Limits of `k8s.io/api/resource/v1`, by the names they have there.
/// `ResourceSliceMaxAttributesAndCapacitiesPerDevice`.
const ATTRIBUTES_MAX: usize = 32;
/// `DeviceAttributeMaxValueLength`, bytes.
const VALUE_MAX: usize = 64;
/// `DeviceMaxIDLength`, bytes: the part of an attribute's name after the domain.
const ID_MAX: usize = 32;
/// `DeviceMaxDomainLength`, bytes.
const DOMAIN_MAX: usize = 63;
/// Kubernetes' own attributes, which other drivers' devices are lined up by: the last to go.
const STANDARD_DOMAIN: &str = "resource.kubernetes.io";
/// How much of a strange value a reason shows, in characters.
const SHOWN_MAX: usize = 80;

/// The devices to publish for `scan`, sorted by name, and what was left out and why. Attribute names without a domain get
/// `driver` as theirs. A bad attribute is dropped, a bad device left out; neither blocks others.
#[must_use]
pub fn devices(scan: &Scan, driver: &str) -> (Vec<Device>, Vec<String>) {
    let mut refused = Vec::new();
    let mut names = BTreeSet::new();
    let mut devices = Vec::with_capacity(scan.devices.len());
    for device in &scan.devices {
        let name = device.name.as_str();
        if !names.insert(name) {
            refused.push(format!("device {name}: left out, another device has the same name"));
            continue;
        }
        devices.push(convert(device, driver, &mut refused));
    }
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    (devices, refused)
}

fn convert(device: &inventory::Device, driver: &str, refused: &mut Vec<String>) -> Device {
    let name = device.name.as_str();
    let mut drop = |what: &str, why: &str| {
        let shown: String = what.chars().take(SHOWN_MAX).collect();
        refused.push(format!("device {name}: attribute {shown:?} dropped, {why}"));
    };
    let qualified = qualify(&device.attributes, driver, &mut drop);
    let mut chosen: Vec<(String, &Attribute)> = qualified.into_iter().collect();
    // Stable: by name within each group.
    chosen.sort_by_key(|(key, _)| !key.starts_with(STANDARD_DOMAIN));
    for (key, _) in chosen.iter().skip(ATTRIBUTES_MAX) {
        drop(key, "a device can have 32 attributes");
    }
    let attributes: BTreeMap<_, _> = chosen.into_iter().take(ATTRIBUTES_MAX).map(|(key, v)| (key, value(v))).collect();
    Device { name: name.to_owned(), attributes: (!attributes.is_empty()).then_some(attributes), ..Device::default() }
}

/// The good attributes by full name.
fn qualify<'a>(all: &'a Attributes, driver: &str, drop: &mut impl FnMut(&str, &str)) -> BTreeMap<String, &'a Attribute> {
    let mut good = BTreeMap::new();
    for (key, value) in all {
        let full = if key.contains('/') { key.clone() } else { format!("{driver}/{key}") };
        match check(&full, value) {
            Err(why) => drop(key, &why),
            Ok(()) => match good.entry(full) {
                Entry::Vacant(free) => {
                    free.insert(value);
                }
                Entry::Occupied(_) => drop(key, "it is there twice, with and without the driver's domain"),
            },
        }
    }
    good
}

fn check(full: &str, value: &Attribute) -> Result<(), String> {
    let (domain, id) = full.split_once('/').unwrap_or(("", full));
    if !is_domain(domain) {
        return Err(format!("its domain must be a DNS subdomain of 1 to {DOMAIN_MAX} bytes"));
    }
    if !is_identifier(id) {
        return Err(format!("its name must be a C identifier of 1 to {ID_MAX} bytes"));
    }
    match value {
        Attribute::String(text) if text.len() > VALUE_MAX => {
            Err(format!("its value has {} bytes, the API allows {VALUE_MAX}", text.len()))
        }
        _ => Ok(()),
    }
}

fn is_domain(domain: &str) -> bool {
    let label = |l: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !l.is_empty() && l.len() <= DNS_LABEL_MAX && l.bytes().all(inner) && !l.starts_with('-') && !l.ends_with('-')
    };
    domain.len() <= DOMAIN_MAX && domain.split('.').all(label)
}

fn is_identifier(id: &str) -> bool {
    let begins = id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && id.len() <= ID_MAX && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn value(attribute: &Attribute) -> DeviceAttribute {
    match attribute {
        Attribute::Bool(v) => DeviceAttribute { bool: Some(*v), ..DeviceAttribute::default() },
        Attribute::Int(v) => DeviceAttribute { int: Some(*v), ..DeviceAttribute::default() },
        Attribute::String(v) => DeviceAttribute { string: Some(v.clone()), ..DeviceAttribute::default() },
    }
}
