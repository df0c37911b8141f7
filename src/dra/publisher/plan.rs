//! What has to be written, so that the server has what is wanted. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::compare::same;
use super::share;

/// Whose slices these are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name of the driver.
    pub driver: String,
    /// Name of the Node, and of the pool.
    pub node_name: String,
    /// UID of the Node, for the owner reference.
    pub node_uid: String,
}

/// Requests to the server, to be made in the order of the fields.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Changes {
    /// Slices that nobody wants.
    pub delete: Vec<ResourceSlice>,
    /// Slices to replace; each has the resource version it was made from.
    pub update: Vec<ResourceSlice>,
    /// New slices.
    pub create: Vec<ResourceSlice>,
}

impl Changes {
    /// Whether nothing has to be done.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.update.is_empty() && self.create.is_empty()
    }
}

/// Compares the slices of this driver and node with what is wanted, one list of devices for each slice, and one slice more for the
/// counters that they consume, where they do: the API takes either in a slice.
///
/// The generation stays while one update (and deletions) is enough to get there: readers never see half of a change. As soon as
/// more has to be written it grows by one and all slices carry it, so that the scheduler ignores the pool until the last is
/// there. Existing slices are matched by the devices they have in common with a wanted one.
#[must_use]
pub fn plan(existing: &[ResourceSlice], wanted: &[Vec<Device>], target: &Target) -> Changes {
    let ours: Vec<&ResourceSlice> = existing.iter().filter(|s| belongs(s, target)).collect();
    let current = ours.iter().map(|s| s.spec.pool.generation).max().unwrap_or(0);
    let counters = share::counters(wanted.iter().flatten());
    let count = i64::try_from(wanted.len() + usize::from(!counters.is_empty())).unwrap_or(i64::MAX);
    let (of_counters, candidates): (Vec<&ResourceSlice>, Vec<&ResourceSlice>) =
        ours.into_iter().filter(|s| s.spec.pool.generation == current).partition(|s| !counters_of(s).is_empty());
    let of_counters = of_counters.into_iter().next().filter(|_| !counters.is_empty());
    let matched = assign(&candidates, wanted);

    let stale = |slice: &ResourceSlice, devices: &[Device]| {
        slice.spec.pool.resource_slice_count != count || !as_wanted(&slice.spec) || !same(devices, devices_of(slice))
    };
    let differ = wanted.iter().zip(&matched).filter(|(d, m)| m.is_some_and(|at| stale(candidates[at], d))).count();
    let miscounts = |s: &ResourceSlice| s.spec.pool.resource_slice_count != count || counters_of(s) != counters;
    let is_new = matched.iter().any(Option::is_none) || (!counters.is_empty() && of_counters.is_none());
    let grows = is_new || differ + usize::from(of_counters.is_some_and(miscounts)) > 1;
    let generation = if grows { current.saturating_add(1) } else { current };
    let pool = ResourcePool { name: target.node_name.clone(), generation, resource_slice_count: count };

    let mut changes = Changes::default();
    for (devices, found) in wanted.iter().zip(&matched) {
        match found {
            Some(at) if grows || stale(candidates[*at], devices) => {
                changes.update.push(replaced(candidates[*at], devices, &pool, target));
            }
            Some(_) => {}
            None => changes.create.push(new_slice(devices, &pool, target)),
        }
    }
    match of_counters {
        Some(slice) if grows || miscounts(slice) => {
            let spec = counter_spec(counters, &pool, target);
            changes.update.push(ResourceSlice { metadata: slice.metadata.clone(), spec });
        }
        None if !counters.is_empty() => {
            let spec = counter_spec(counters, &pool, target);
            changes.create.push(ResourceSlice { spec, ..new_slice(&[], &pool, target) });
        }
        _ => {}
    }
    let kept: BTreeSet<Option<&str>> =
        matched.iter().flatten().map(|at| candidates[*at]).chain(of_counters).map(|s| s.metadata.name.as_deref()).collect();
    let unwanted = |s: &&ResourceSlice| {
        is_of(s, target) && s.metadata.deletion_timestamp.is_none() && !kept.contains(&s.metadata.name.as_deref())
    };
    changes.delete = existing.iter().filter(unwanted).cloned().collect();
    changes
}

/// A slice of our driver on our node, whatever its pool.
fn is_of(slice: &ResourceSlice, target: &Target) -> bool {
    slice.spec.driver == target.driver && slice.spec.node_name.as_deref() == Some(&target.node_name)
}

/// One that can be kept: the pool's name can't be changed later.
fn belongs(slice: &ResourceSlice, target: &Target) -> bool {
    is_of(slice, target) && slice.spec.pool.name == target.node_name && slice.metadata.deletion_timestamp.is_none()
}

fn devices_of(slice: &ResourceSlice) -> &[Device] {
    slice.spec.devices.as_deref().unwrap_or_default()
}

fn counters_of(slice: &ResourceSlice) -> &[CounterSet] {
    slice.spec.shared_counters.as_deref().unwrap_or_default()
}

/// Nothing is set that we never set. `skipNodeOperations` above all: the kubelet would not call us.
fn as_wanted(spec: &ResourceSliceSpec) -> bool {
    let empty = |n: Option<usize>| n.unwrap_or(0) == 0;
    spec.node_selector.is_none()
        && !spec.all_nodes.unwrap_or(false)
        && !spec.per_device_node_selection.unwrap_or(false)
        && spec.partition_type_attribute.is_none()
        && empty(spec.shared_counters.as_ref().map(Vec::len))
        && empty(spec.skip_node_operations.as_ref().map(Vec::len))
}

/// For each wanted slice the index of the candidate to keep for it: the same devices first, then most names in common, then
/// whatever is left, since an update is one request and a deletion with a creation two.
fn assign(candidates: &[&ResourceSlice], wanted: &[Vec<Device>]) -> Vec<Option<usize>> {
    let mut pairs = Vec::new();
    for (w, devices) in wanted.iter().enumerate() {
        let names: BTreeSet<&str> = devices.iter().map(|d| d.name.as_str()).collect();
        for (c, slice) in candidates.iter().enumerate() {
            let found = devices_of(slice);
            let common = found.iter().filter(|d| names.contains(d.name.as_str())).count();
            pairs.push((!same(devices, found), usize::MAX - common, w, c));
        }
    }
    pairs.sort_unstable();
    let mut matched = vec![None; wanted.len()];
    let mut used = vec![false; candidates.len()];
    for (_, _, w, c) in pairs {
        if matched[w].is_none() && !used[c] {
            matched[w] = Some(c);
            used[c] = true;
        }
    }
    matched
}

fn replaced(slice: &ResourceSlice, devices: &[Device], pool: &ResourcePool, target: &Target) -> ResourceSlice {
    let mut devices = devices.to_vec();
    for device in &mut devices {
        keep_taint_times(device, devices_of(slice));
    }
    ResourceSlice { metadata: slice.metadata.clone(), spec: spec(devices, pool, target) }
}

/// A taint that stays was added when it was added; without this the server would take the time of the update.
fn keep_taint_times(device: &mut Device, old: &[Device]) {
    let Some(old) = old.iter().find(|d| d.name == device.name) else { return };
    for taint in device.taints.iter_mut().flatten().filter(|t| t.time_added.is_none()) {
        let same = |t: &&_| {
            let t: &&k8s_openapi::api::resource::v1::DeviceTaint = t;
            (&t.key, &t.value, &t.effect) == (&taint.key, &taint.value, &taint.effect)
        };
        taint.time_added = old.taints.iter().flatten().find(same).and_then(|t| t.time_added.clone());
    }
}

fn new_slice(devices: &[Device], pool: &ResourcePool, target: &Target) -> ResourceSlice {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: target.node_name.clone(),
        uid: target.node_uid.clone(),
        controller: Some(true),
        block_owner_deletion: None,
    };
    let metadata = ObjectMeta {
        generate_name: Some(format!("{}-{}-", target.node_name, target.driver)),
        owner_references: Some(vec![owner]),
        ..ObjectMeta::default()
    };
    ResourceSlice { metadata, spec: spec(devices.to_vec(), pool, target) }
}

fn counter_spec(counters: Vec<CounterSet>, pool: &ResourcePool, target: &Target) -> ResourceSliceSpec {
    ResourceSliceSpec { shared_counters: Some(counters), ..spec(Vec::new(), pool, target) }
}

fn spec(devices: Vec<Device>, pool: &ResourcePool, target: &Target) -> ResourceSliceSpec {
    ResourceSliceSpec {
        devices: (!devices.is_empty()).then_some(devices),
        driver: target.driver.clone(),
        node_name: Some(target.node_name.clone()),
        pool: pool.clone(),
        ..ResourceSliceSpec::default()
    }
}
