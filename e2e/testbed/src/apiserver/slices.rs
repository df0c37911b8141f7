//! What a real server checks of a ResourceSlice, and what it drops.

use std::collections::BTreeSet;

use serde_json::Value;

/// A fault: field and text.
pub(super) type Fault = (String, String);

/// All faults of a slice. `old` is the one it replaces.
pub(super) fn validate(slice: &Value, old: Option<&Value>) -> Vec<Fault> {
    let mut faults = Vec::new();
    let spec = &slice["spec"];
    let mut fault = |field: &str, text: String| faults.push((field.to_owned(), text));
    for (field, limit) in [("driver", 63), ("nodeName", 253)] {
        let value = spec[field].as_str().unwrap_or_default();
        if !is_subdomain(value, limit) {
            fault(&format!("spec.{field}"), format!("Invalid value: {value:?}: must be a DNS subdomain"));
        }
        if old.is_some_and(|old| old["spec"][field] != spec[field]) {
            fault(&format!("spec.{field}"), "field is immutable".to_owned());
        }
    }
    let pool = &spec["pool"];
    let name = pool["name"].as_str().unwrap_or_default();
    if name.len() > 253 || !name.split('/').all(|part| is_subdomain(part, 253)) {
        fault("spec.pool.name", format!("Invalid value: {name:?}: must be DNS subdomains separated by slashes"));
    }
    if old.is_some_and(|old| old["spec"]["pool"]["name"] != pool["name"]) {
        fault("spec.pool.name", "field is immutable".to_owned());
    }
    if pool["generation"].as_i64().is_none_or(|g| g < 0) {
        fault("spec.pool.generation", "must be greater than or equal to zero".to_owned());
    }
    if pool["resourceSliceCount"].as_i64().is_none_or(|c| c <= 0) {
        fault("spec.pool.resourceSliceCount", "must be greater than zero".to_owned());
    }
    for exclusive in ["nodeSelector", "allNodes", "perDeviceNodeSelection"] {
        if !spec[exclusive].is_null() {
            fault(
                "spec",
                format!("exactly one of nodeName, nodeSelector, allNodes, perDeviceNodeSelection: {exclusive} is set too"),
            );
        }
    }
    devices(spec, &mut faults);
    faults
}

fn devices(spec: &Value, faults: &mut Vec<Fault>) {
    let devices: &[Value] = spec["devices"].as_array().map_or(&[], Vec::as_slice);
    let limit = if devices.iter().any(is_advanced) { 64 } else { 128 };
    if devices.len() > limit {
        faults.push(("spec.devices".to_owned(), format!("Too many: {}: must have at most {limit} items", devices.len())));
    }
    let mut names = BTreeSet::new();
    for (index, device) in devices.iter().enumerate() {
        let path = format!("spec.devices[{index}]");
        let name = device["name"].as_str().unwrap_or_default();
        if !is_label(name) {
            faults.push((format!("{path}.name"), format!("Invalid value: {name:?}: must be a DNS label")));
        }
        if !names.insert(name) {
            faults.push((format!("{path}.name"), format!("Duplicate value: {name:?}")));
        }
        attributes(device, &path, faults);
    }
}

fn attributes(device: &Value, path: &str, faults: &mut Vec<Fault>) {
    let count = |field: &str| device[field].as_object().map_or(0, serde_json::Map::len);
    if count("attributes") + count("capacity") > 32 {
        faults.push((path.to_owned(), "the total number of attributes and capacities must not exceed 32".to_owned()));
    }
    if device["taints"].as_array().is_some_and(|t| t.len() > 16) {
        faults.push((format!("{path}.taints"), "Too many: must have at most 16 items".to_owned()));
    }
    for field in ["attributes", "capacity"] {
        for (key, value) in device[field].as_object().into_iter().flatten() {
            let at = format!("{path}.{field}[{key}]");
            let (domain, id) = key.split_once('/').map_or((None, key.as_str()), |(d, i)| (Some(d), i));
            if domain.is_some_and(|d| !is_subdomain(d, 63)) {
                faults.push((
                    at.clone(),
                    format!("Invalid value: {key:?}: the domain must be a DNS subdomain of at most 63 bytes"),
                ));
            }
            if !is_identifier(id) {
                faults.push((at.clone(), format!("Invalid value: {key:?}: must be a C identifier of at most 32 bytes")));
            }
            if field == "attributes" {
                attribute(value, &at, faults);
            }
        }
    }
}

fn attribute(value: &Value, at: &str, faults: &mut Vec<Fault>) {
    let set = value.as_object().map_or(0, serde_json::Map::len);
    if set != 1 {
        faults.push((at.to_owned(), format!("exactly one value must be specified, there are {set}")));
    }
    for field in ["string", "version"] {
        if value[field].as_str().is_some_and(|text| text.len() > 64) {
            faults.push((format!("{at}.{field}"), "Too long: may not be more than 64 bytes".to_owned()));
        }
    }
}

fn is_advanced(device: &Value) -> bool {
    let some = |field: &str| device[field].as_array().is_some_and(|items| !items.is_empty());
    let list = |value: &Value| ["bools", "ints", "strings", "versions"].iter().any(|f| !value[f].is_null());
    some("taints") || some("consumesCounters") || device["attributes"].as_object().is_some_and(|a| a.values().any(list))
}

fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

fn is_subdomain(text: &str, limit: usize) -> bool {
    text.len() <= limit && text.split('.').all(is_label)
}

fn is_identifier(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && text.len() <= 32 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// What the server sets itself: the times of taints.
pub(super) fn defaults(slice: &mut Value, now: &str) {
    let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten() {
        for taint in device.get_mut("taints").and_then(Value::as_array_mut).into_iter().flatten() {
            if taint["timeAdded"].is_null() {
                taint["timeAdded"] = Value::String(now.to_owned());
            }
        }
    }
}

/// Removes the fields at `path` (`devices[].taints`) below `value`.
pub(super) fn drop_field(value: &mut Value, path: &str) {
    let (part, rest) = path.split_once('.').map_or((path, None), |(part, rest)| (part, Some(rest)));
    let (key, each) = part.strip_suffix("[]").map_or((part, false), |key| (key, true));
    let Some(map) = value.as_object_mut() else { return };
    let Some(rest) = rest else {
        map.remove(key);
        return;
    };
    match (map.get_mut(key), each) {
        (Some(Value::Array(items)), true) => items.iter_mut().for_each(|item| drop_field(item, rest)),
        (Some(inner), false) => drop_field(inner, rest),
        _ => {}
    }
}
