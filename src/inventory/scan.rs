//! One look at the host: links, routes, sysfs → devices.

use std::collections::{BTreeMap, BTreeSet};

use super::hardware::{self, HardwareId};
use super::sysfs::{LinkFacts, RdmaFacts, Sysfs};
use super::{Device, Lent, Scan, ScanOptions, Withheld, attributes, policy};
use crate::names::DeviceName;
use crate::netdev::host_state::Snapshot;
use crate::netdev::{Address, Link, uplink};

/// `RTN_UNICAST`, `linux/rtnetlink.h`: a route that leads somewhere.
const RTN_UNICAST: u8 = 1;

/// Builds the devices of this node from what was read.
///
/// `snapshot` (of which links, addresses and routes are used) is an error text where these could not be read: then `previous` is
/// what stays, nothing new is offered, and the text is in [`Scan::problems`]. `lent` devices are always there, with the
/// attributes they had; they have a link when it is on the host.
#[must_use]
pub fn build(
    snapshot: Result<&Snapshot, String>,
    sysfs: &Sysfs,
    options: ScanOptions,
    lent: &[Lent],
    previous: Option<&Scan>,
) -> Scan {
    match snapshot {
        Ok(snapshot) => Look::new(snapshot, sysfs, previous).devices(options, lent),
        Err(problem) => keep(previous, lent, problem),
    }
}

/// What stays when the host could not be looked at.
fn keep(previous: Option<&Scan>, lent: &[Lent], problem: String) -> Scan {
    let mut scan = previous.cloned().unwrap_or_default();
    for lent in lent {
        match scan.devices.iter_mut().find(|device| device.name == lent.name) {
            Some(device) => device.attributes = lent.attributes.clone(),
            None => scan.devices.push(lent_device(lent, None)),
        }
    }
    scan.problems = vec![problem];
    sorted(scan)
}

fn lent_device(lent: &Lent, link: Option<&Link>) -> Device {
    Device {
        name: lent.name.clone(),
        hardware: lent.hardware.clone(),
        link: link.cloned(),
        attributes: lent.attributes.clone(),
        rdma: None,
        is_rdma_only: lent.is_rdma_only,
    }
}

fn sorted(mut scan: Scan) -> Scan {
    scan.devices.sort_by(|a, b| a.name.cmp(&b.name));
    scan.devices.dedup_by(|a, b| a.name == b.name);
    scan.withheld.sort_by(|a, b| a.link.cmp(&b.link));
    scan
}

/// What was read, and what was thought of it the last time.
struct Look<'a> {
    snapshot: &'a Snapshot,
    /// By index; none for links that sysfs does not have.
    facts: BTreeMap<u32, Result<Option<LinkFacts>, String>>,
    /// By index: what attributes say of a link instead, in tests.
    places: BTreeMap<u32, LinkFacts>,
    rdma: Vec<RdmaFacts>,
    addresses: BTreeMap<u32, Vec<&'a Address>>,
    /// Ids that links had before, by index.
    previous: BTreeMap<u32, HardwareId>,
}

impl<'a> Look<'a> {
    fn new(snapshot: &'a Snapshot, sysfs: &Sysfs, previous: Option<&Scan>) -> Self {
        let mut addresses = BTreeMap::<u32, Vec<&Address>>::new();
        for (index, address) in &snapshot.addresses {
            addresses.entry(*index).or_default().push(address);
        }
        let known = previous.map_or(&[][..], |scan| &scan.devices);
        Self {
            snapshot,
            facts: snapshot.links.iter().map(|link| (link.index, sysfs.link(&link.name, link.index))).collect(),
            places: snapshot.links.iter().filter_map(|l| Some((l.index, sysfs.place(&l.name, l.index)?))).collect(),
            rdma: sysfs.rdma_devices(),
            addresses,
            previous: known.iter().filter_map(|d| Some((d.link.as_ref()?.index, d.hardware.clone()))).collect(),
        }
    }

    fn devices(&self, options: ScanOptions, lent: &[Lent]) -> Scan {
        let mut scan = Scan::default();
        let here = self.find_lent(lent);
        for lent in lent {
            scan.devices.push(lent_device(lent, here.iter().find(|(_, of)| of.name == lent.name).map(|(link, _)| *link)));
        }
        let offered = self.offered(options, &here, &mut scan);
        let taken = lent.iter().map(|lent| lent.hardware.clone()).collect();
        let ids = hardware::assign(&offered, &self.previous, &taken);
        let mut names: BTreeSet<DeviceName> = lent.iter().map(|lent| lent.name.clone()).collect();
        for (link, facts) in offered {
            let id = ids.get(&link.index).map(|id| (id, id.device_name()));
            let Some((hardware, name)) = id.filter(|(_, name)| names.insert(name.clone())) else {
                self.withhold(&mut scan, link, "it can't be told from a device that is lent to a pod".to_owned());
                continue;
            };
            let rdma = attributes::rdma_of(link, facts, &self.rdma);
            let addresses = self.addresses.get(&link.index).map_or(&[][..], Vec::as_slice);
            let mut attributes = attributes::of_link(link, self.places.get(&link.index).unwrap_or(facts), addresses, rdma);
            if let Some(programs) = self.snapshot.programs.get(&link.index) {
                attributes.extend(attributes::of_programs(link, programs));
            }
            scan.devices.push(Device {
                name,
                hardware: hardware.clone(),
                link: Some(link.clone()),
                attributes,
                rdma: None,
                is_rdma_only: false,
            });
        }
        sorted(scan)
    }

    /// The links that may be devices. The others are noted in `scan`, but for those of `lent` devices.
    fn offered<'b>(&'b self, options: ScanOptions, lent: &[(&Link, &Lent)], scan: &mut Scan) -> Vec<(&'b Link, &'b LinkFacts)> {
        static NONE: LinkFacts = LinkFacts::NONE;
        let needed = uplink::needed(&self.snapshot.links, &self.snapshot.routes);
        let names = self.snapshot.links.iter().map(|link| (link.index, link.name.as_str())).collect();
        let no_default = options.need_default_route
            && !self.snapshot.routes.iter().any(|(_, route)| route.is_default() && route.kind == RTN_UNICAST);
        let mut offered = Vec::new();
        for link in &self.snapshot.links {
            if lent.iter().any(|(here, _)| here.index == link.index) {
                continue;
            }
            if let Some(reason) = policy::withhold(link, &needed, &names, options) {
                self.withhold(scan, link, reason);
                continue;
            }
            let is_virtual = link.kind.is_some() && link.parent_device.is_none();
            match self.facts.get(&link.index) {
                _ if no_default => {
                    self.withhold(scan, link, "the host has no default route yet, so it may become its uplink".to_owned())
                }
                Some(Ok(Some(facts))) if is_virtual || facts.is_virtual || facts.device.is_some() => offered.push((link, facts)),
                // Netlink alone tells enough.
                _ if is_virtual => offered.push((link, &NONE)),
                Some(Err(problem)) => {
                    scan.problems.push(problem.clone());
                    self.withhold(scan, link, format!("it could not be looked up: {problem}"));
                }
                _ => self.withhold(scan, link, "sysfs does not show its device, so its hardware can't be told".to_owned()),
            }
        }
        offered
    }

    fn withhold(&self, scan: &mut Scan, link: &Link, reason: String) {
        let facts = self.facts.get(&link.index).and_then(|facts| facts.as_ref().ok()).cloned().flatten().unwrap_or_default();
        let device = hardware::candidates(link, &facts).first().map(HardwareId::device_name);
        scan.withheld.push(Withheld { link: link.name.clone(), device, reason });
    }

    /// The links that are lent devices, each with its device: those that are still, or again, on the host.
    fn find_lent<'b>(&self, lent: &'b [Lent]) -> Vec<(&'a Link, &'b Lent)> {
        let mut found: Vec<(&Link, &Lent)> = Vec::new();
        // Surest first: a link can be one device only.
        for sure in [true, false] {
            for lent in lent {
                let is_free = |link: &&Link| !found.iter().any(|(other, of)| other.index == link.index || of.name == lent.name);
                let matches = |link: &&Link| self.is_lent(link, lent) && (!sure || link.index == lent.index);
                if let Some(link) = self.snapshot.links.iter().filter(is_free).find(matches) {
                    found.push((link, lent));
                }
            }
        }
        found
    }

    fn is_lent(&self, link: &Link, lent: &Lent) -> bool {
        let facts = self.facts.get(&link.index).and_then(|facts| facts.as_ref().ok()).cloned().flatten().unwrap_or_default();
        let candidates = hardware::candidates(link, &facts);
        let same_index = link.index == lent.index;
        let same_name = link.name == lent.host_name || link.alt_names.contains(&lent.host_name);
        match &lent.hardware {
            // The kernel destroys a virtual link with its namespace, so one on the host never left, or we brought it back under
            // its name. Either its address or its name may have been changed.
            HardwareId::Virtual { kind, address, .. } => {
                let same_kind = matches!(&candidates[..], [HardwareId::Virtual { kind: k, .. }, ..] if k == kind);
                let same_address = hardware::own_address(link) == address.as_ref();
                same_kind && [same_index, same_name, same_address].into_iter().filter(|same| *same).count() >= 2
            }
            // Hardware comes back under any name. A second choice of id has the index in it.
            id => candidates.first() == Some(id) || (same_index && candidates.contains(id)),
        }
    }
}
