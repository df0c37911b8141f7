use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Counter, DeviceAttribute, DeviceCounterConsumption, DeviceTaint, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;

use super::compare::{dropped, same};
use super::*;
use crate::inventory::{self, Attribute, HardwareId, Scan};
use crate::names::DeviceName;

fn target() -> Target {
    Target { driver: "dra.net".to_owned(), node_name: "node-1".to_owned(), node_uid: "u-1".to_owned() }
}

fn device(name: &str, mtu: i64) -> Device {
    let attribute = DeviceAttribute { int: Some(mtu), ..DeviceAttribute::default() };
    Device { name: name.to_owned(), attributes: Some([("dra.net/mtu".to_owned(), attribute)].into()), ..Device::default() }
}

fn tainted(name: &str) -> Device {
    let taint = DeviceTaint { key: "k".to_owned(), value: None, effect: "NoSchedule".to_owned(), time_added: None };
    Device { taints: Some(vec![taint]), ..device(name, 1500) }
}

fn spread(devices: &[Device]) -> Vec<Vec<Device>> {
    let owned: Vec<Device> = devices.to_vec();
    split(owned)
}

/// A server: applies changes, and sets what a server sets.
#[derive(Default)]
struct Server {
    slices: BTreeMap<String, ResourceSlice>,
    made: u64,
}

impl Server {
    fn apply(&mut self, changes: Changes) {
        for slice in changes.delete {
            assert!(self.slices.remove(slice.metadata.name.as_deref().unwrap()).is_some());
        }
        for mut slice in changes.update.into_iter().chain(changes.create) {
            self.made += 1;
            let generated = slice.metadata.generate_name.clone().unwrap_or_default();
            let name = slice.metadata.name.get_or_insert_with(|| format!("{generated}{}", self.made)).clone();
            slice.metadata.resource_version = Some(self.made.to_string());
            for taint in slice.spec.devices.iter_mut().flatten().flat_map(|d| d.taints.iter_mut().flatten()) {
                taint.time_added.get_or_insert(Time(Timestamp::from_second(1_700_000_000).unwrap()));
            }
            self.slices.insert(name, slice);
        }
    }

    fn list(&self) -> Vec<ResourceSlice> {
        self.slices.values().cloned().collect()
    }

    fn reach(&mut self, devices: &[Device]) -> Changes {
        let wanted = spread(devices);
        let changes = plan(&self.list(), &wanted, &target());
        self.apply(changes.clone());
        changes
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.slices.values().flat_map(|s| s.spec.devices.iter().flatten().map(|d| d.name.clone())).collect();
        names.sort();
        names
    }
}

fn many(range: std::ops::Range<usize>) -> Vec<Device> {
    range.map(|i| device(&format!("d{i:04}"), 1500)).collect()
}

fn counts(changes: &Changes) -> (usize, usize, usize) {
    (changes.create.len(), changes.update.len(), changes.delete.len())
}

#[test]
fn slices_have_at_most_128_devices_or_64_with_a_tainted_one() {
    let sizes = |devices| split(devices).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(Vec::new()), [0]);
    assert_eq!(sizes(many(0..128)), [128]);
    assert_eq!(sizes(many(0..129)), [128, 1]);
    let mut devices = many(0..100);
    devices.push(tainted("d0010x"));
    assert_eq!(sizes(devices), [64, 37]);
    let mut devices = many(0..100);
    devices.push(tainted("d0090x"));
    assert_eq!(sizes(devices), [91, 10], "the tainted one does not fit behind 91");
    let list = DeviceAttribute { strings: Some(vec!["a".to_owned()]), ..DeviceAttribute::default() };
    let with_list = Device { attributes: Some([("a".to_owned(), list)].into()), ..Device::default() };
    assert_eq!(limit_for(&with_list), 64);
    assert_eq!(sizes(vec![device("a", 1), device("a", 2)]), [1], "a name is there once");
}

#[test]
fn a_node_without_devices_has_one_empty_slice() {
    let mut server = Server::default();
    let changes = server.reach(&[]);
    assert_eq!(counts(&changes), (1, 0, 0));
    let slice = &changes.create[0];
    assert_eq!(slice.metadata.generate_name.as_deref(), Some("node-1-dra.net-"));
    let owner = &slice.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("Node", "u-1", Some(true)));
    assert_eq!((slice.spec.pool.generation, slice.spec.pool.resource_slice_count), (1, 1));
    assert_eq!(slice.spec.skip_node_operations, None);
    assert!(server.reach(&[]).is_empty());
}

#[test]
fn one_update_keeps_the_generation_more_let_it_grow() {
    let mut server = Server::default();
    server.reach(&many(0..3));
    let changed = [device("d0000", 9000), device("d0001", 1500)];
    let changes = server.reach(&changed);
    assert_eq!(counts(&changes), (0, 1, 0));
    assert_eq!(changes.update[0].spec.pool.generation, 1);

    let changes = server.reach(&many(0..200));
    assert_eq!(counts(&changes), (1, 1, 0));
    assert!(server.list().iter().all(|s| (s.spec.pool.generation, s.spec.pool.resource_slice_count) == (2, 2)));

    // A deletion and one update: nobody can see half of it.
    let changes = server.reach(&many(0..10));
    assert_eq!(counts(&changes), (0, 1, 1));
    assert_eq!(server.list()[0].spec.pool.generation, 2);
}

#[test]
fn what_consumes_counters_has_one_slice_more() {
    let consuming = |name: &str, counter: &str| {
        let one = Counter { value: Quantity("1".to_owned()) };
        let counters = BTreeMap::from([(counter.to_owned(), one)]);
        let consumed = DeviceCounterConsumption { counter_set: "nics-0".to_owned(), counters, ..Default::default() };
        Device { consumes_counters: Some(vec![consumed]), ..device(name, 1500) }
    };
    let mut server = Server::default();
    server.reach(&many(0..3));
    let shared = [consuming("a", "a"), consuming("b", "b")];
    let changes = server.reach(&shared);
    assert_eq!(counts(&changes), (1, 1, 0));
    let slices = server.list();
    assert!(slices.iter().all(|s| (s.spec.pool.generation, s.spec.pool.resource_slice_count) == (2, 2)));
    let of_counters: Vec<_> = slices.iter().filter(|s| s.spec.shared_counters.is_some()).collect();
    assert!(of_counters.len() == 1 && of_counters[0].spec.devices.is_none());
    assert_eq!(of_counters[0].spec.shared_counters.as_ref().unwrap()[0].counters.len(), 2);
    assert!(server.reach(&shared).is_empty());

    // A counter more: both slices change, so the generation grows.
    let changes = server.reach(&[consuming("a", "a"), consuming("b", "b"), consuming("c", "c")]);
    assert_eq!(counts(&changes), (0, 2, 0));
    assert!(server.list().iter().all(|s| s.spec.pool.generation == 3));
    // Only a device changes.
    let changes = server.reach(&[consuming("a", "a"), consuming("b", "b"), consuming("d", "c")]);
    assert_eq!(counts(&changes), (0, 1, 0));
    // None is shared any more.
    let changes = server.reach(&many(0..3));
    assert_eq!(counts(&changes), (0, 1, 1));
    assert_eq!(server.list().len(), 1);
    assert!(server.reach(&many(0..3)).is_empty());
}

#[test]
fn existing_slices_are_kept_by_what_is_in_them_whatever_they_are_called() {
    let mut server = Server::default();
    server.reach(&many(0..200));
    let mut renamed = Server { made: 50, ..Server::default() };
    for (index, mut slice) in server.list().into_iter().rev().enumerate() {
        let name = format!("x{index}");
        slice.metadata.name = Some(name.clone());
        renamed.slices.insert(name, slice);
    }
    assert!(renamed.reach(&many(0..200)).is_empty());
}

#[test]
fn stale_slices_go_and_those_of_others_stay() {
    let mut server = Server::default();
    server.reach(&many(0..3));
    let good = server.list().remove(0);
    let with = |name: &str, change: fn(&mut ResourceSlice)| {
        let mut slice = good.clone();
        slice.metadata.name = Some(name.to_owned());
        change(&mut slice);
        (name.to_owned(), slice)
    };
    server.slices.get_mut(good.metadata.name.as_ref().unwrap()).unwrap().spec.pool.generation = 7;
    server.slices.extend([
        with("older", |s| s.spec.pool.generation = 6),
        with("twin", |s| s.spec.pool.generation = 7),
        with("other-pool", |s| s.spec.pool.name = "elsewhere".to_owned()),
        with("other-driver", |s| s.spec.driver = "gpu.example.com".to_owned()),
        with("other-node", |s| s.spec.node_name = Some("node-2".to_owned())),
    ]);
    let changes = server.reach(&many(0..3));
    assert_eq!(counts(&changes), (0, 0, 3));
    let left: Vec<&str> = server.slices.keys().map(String::as_str).collect();
    assert_eq!(left.len(), 3);
    assert!(left.contains(&"other-driver") && left.contains(&"other-node"));
    assert!(server.reach(&many(0..3)).is_empty());
}

#[test]
fn what_the_server_sets_is_no_difference_and_what_we_never_set_is() {
    let mut server = Server::default();
    server.reach(&[tainted("a")]);
    assert!(
        server.slices.values().next().unwrap().spec.devices.as_ref().unwrap()[0].taints.as_ref().unwrap()[0].time_added.is_some()
    );
    assert!(server.reach(&[tainted("a")]).is_empty());
    let changes = server.reach(&[tainted("a"), device("b", 1)]);
    let kept = changes.update[0].spec.devices.as_ref().unwrap()[0].taints.as_ref().unwrap()[0].time_added.clone();
    assert!(kept.is_some(), "the time of a taint that stays is kept");

    server.slices.values_mut().next().unwrap().spec.skip_node_operations = Some(vec!["*".to_owned()]);
    let changes = server.reach(&[tainted("a"), device("b", 1)]);
    assert_eq!(changes.update[0].spec.skip_node_operations, None);
}

#[test]
fn dropped_fields_are_named() {
    let want = [tainted("a"), device("b", 1)];
    let stored = [device("a", 1500), device("b", 2)];
    assert!(!same(&want, &stored));
    let names: Vec<String> = dropped(&want, &stored).into_iter().collect();
    assert_eq!(names, ["devices[].attributes.dra.net/mtu.int", "devices[].taints"]);
    assert!(dropped(&stored, &stored).is_empty());
}

fn found(name: &str, attributes: &[(&str, Attribute)]) -> inventory::Device {
    inventory::Device {
        name: DeviceName::new(name).unwrap(),
        hardware: HardwareId::Virtual { kind: "dummy".to_owned(), address: None, twin: Some(1) },
        link: None,
        attributes: attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect(),
        rdma: None,
        is_rdma_only: false,
    }
}

#[test]
fn attributes_get_the_drivers_domain_and_bad_ones_are_dropped_by_name() {
    let text = |s: &str| Attribute::String(s.to_owned());
    let long = "x".repeat(65);
    let scan = Scan {
        devices: vec![
            found(
                "net-b",
                &[("ifName", text("b")), ("alias", text(&long)), ("a-b", Attribute::Int(1)), ("/x", Attribute::Int(1))],
            ),
            found(
                "net-a",
                &[("resource.kubernetes.io/numaNode", Attribute::Int(0)), (&format!("A.b/{long}"), Attribute::Int(1))],
            ),
            found("net-a", &[]),
        ],
        ..Scan::default()
    };
    let (devices, refused) = devices(&scan, "dra.net");
    let shown: Vec<(&str, Vec<&String>)> =
        devices.iter().map(|d| (d.name.as_str(), d.attributes.iter().flatten().map(|(k, _)| k).collect())).collect();
    assert_eq!(shown[0].0, "net-a");
    assert_eq!(shown[0].1, ["resource.kubernetes.io/numaNode"]);
    assert_eq!((shown[1].0, shown[1].1.len()), ("net-b", 1));
    assert_eq!(shown[1].1[0], "dra.net/ifName");
    assert_eq!(refused.len(), 5, "{refused:#?}");
    assert!(refused.iter().any(|r| r.contains("net-b") && r.contains("alias") && r.contains("65 bytes")), "{refused:#?}");
}

#[test]
fn a_device_has_at_most_32_attributes_and_keeps_the_standard_ones() {
    let mut all: Vec<(String, Attribute)> = (0..60).map(|i| (format!("a{i:02}"), Attribute::Int(i))).collect();
    all.push(("resource.kubernetes.io/pcieRoot".to_owned(), Attribute::String("pci0000:00".to_owned())));
    let all: Vec<(&str, Attribute)> = all.iter().map(|(k, v)| (k.as_str(), v.clone())).collect();
    let scan = Scan { devices: vec![found("a", &all)], ..Scan::default() };
    let (devices, refused) = devices(&scan, "dra.net");
    let attributes = devices[0].attributes.as_ref().unwrap();
    assert_eq!(attributes.len(), 32);
    assert!(attributes.contains_key("resource.kubernetes.io/pcieRoot") && attributes.contains_key("dra.net/a30"));
    assert_eq!(refused.len(), 29);
}

fn some_devices() -> impl Strategy<Value = Vec<Device>> {
    let one = (0..400u32, 0..3i64, prop::bool::weighted(0.02)).prop_map(|(name, mtu, taint)| {
        let name = format!("d{name:03}");
        if taint { tainted(&name) } else { device(&name, mtu) }
    });
    prop::collection::vec(one, 0..300)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_wanted_state_is_reached_in_one_round(states in prop::collection::vec(some_devices(), 1..4), wipe in any::<bool>()) {
        let mut server = Server::default();
        for devices in &states {
            server.reach(devices);
            let expected: BTreeSet<&str> = devices.iter().map(|d| d.name.as_str()).collect();
            prop_assert_eq!(server.names(), expected.into_iter().map(str::to_owned).collect::<Vec<_>>());
            let slices = server.list();
            let generation = slices[0].spec.pool.generation;
            for slice in &slices {
                let limit = slice.spec.devices.iter().flatten().map(limit_for).min().unwrap_or(128);
                prop_assert!(slice.spec.devices.as_ref().map_or(0, Vec::len) <= limit);
                prop_assert_eq!(usize::try_from(slice.spec.pool.resource_slice_count).unwrap(), slices.len());
                prop_assert_eq!(slice.spec.pool.generation, generation);
            }
            prop_assert!(server.reach(devices).is_empty(), "a second plan is empty");
            if wipe {
                let first = server.slices.keys().next().unwrap().clone();
                server.slices.remove(&first);
            }
        }
    }
}
