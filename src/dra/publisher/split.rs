//! Spreads devices over slices. Pure.

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute};

/// `ResourceSliceMaxDevices`, `k8s.io/api/resource/v1`.
const DEVICES_MAX: usize = 128;
/// `ResourceSliceMaxDevicesWithAdvancedFeatures`.
const ADVANCED_DEVICES_MAX: usize = 64;

/// How many devices a slice with this one in it may have: 64 where it has taints or list attributes or consumes counters,
/// else 128.
#[must_use]
pub fn limit_for(device: &Device) -> usize {
    let some = |n: Option<usize>| n.is_some_and(|n| n > 0);
    let lists = device.attributes.iter().flatten().any(|(_, value)| is_list(value));
    let advanced = some(device.taints.as_ref().map(Vec::len)) || some(device.consumes_counters.as_ref().map(Vec::len));
    if advanced || lists { ADVANCED_DEVICES_MAX } else { DEVICES_MAX }
}

fn is_list(value: &DeviceAttribute) -> bool {
    value.bools.is_some() || value.ints.is_some() || value.strings.is_some() || value.versions.is_some()
}

/// The devices sorted by name, in as few slices as their limits allow; at least one slice, so that a node without devices shows
/// that its driver runs. Of devices with the same name the first one stays.
#[must_use]
pub fn split(mut devices: Vec<Device>) -> Vec<Vec<Device>> {
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices.dedup_by(|later, first| later.name == first.name);
    let mut slices = vec![Vec::new()];
    let mut limit = DEVICES_MAX;
    for device in devices {
        let with_it = limit.min(limit_for(&device));
        match slices.last_mut() {
            Some(last) if last.len() < with_it => {
                limit = with_it;
                last.push(device);
            }
            _ => {
                limit = limit_for(&device);
                slices.push(vec![device]);
            }
        }
    }
    slices
}
