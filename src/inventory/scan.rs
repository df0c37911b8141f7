//! One look at the host: links, routes, sysfs → devices.

use std::collections::{BTreeMap, BTreeSet};

use super::hardware::{self, HardwareId};
use super::rdma::{self, PortOf, RdmaDevice, RdmaSeen};
use super::sysfs::{LinkFacts, Sysfs};
use super::{Device, Ipoib, Lent, RdmaPart, Scan, ScanOptions, Withheld, attributes, policy};
use crate::names::DeviceName;
use crate::netdev::host_state::Snapshot;
use crate::netdev::{Address, Link, uplink};

/// `RTN_UNICAST`, `linux/rtnetlink.h`: a route that leads somewhere.
const RTN_UNICAST: u8 = 1;
/// Why an IPoIB link is not offered with [`Ipoib::Ignore`].
const IPOIB_IGNORED: &str = "IPoIB links are not offered (--ipoib=ignore): its RDMA device is, without it";

/// Builds the devices of this node from what was read: by netlink, and now in `sysfs`.
///
/// `snapshot` (of which links, addresses and routes are used) is an error text where these could not be read: then `previous` is
/// what stays, nothing new is offered, and the text is in [`Scan::problems`]. `lent` devices are always there, with the
/// attributes they had; they have a link when it is on the host.
#[must_use]
pub fn build(
    snapshot: Result<(&Snapshot, &RdmaSeen), String>,
    sysfs: &Sysfs,
    options: ScanOptions,
    lent: &[Lent],
    previous: Option<&Scan>,
) -> Scan {
    match snapshot {
        Ok((snapshot, seen)) => Look::new(snapshot, seen, sysfs, previous).devices(options, lent),
        Err(problem) => keep(previous, lent, problem),
    }
}

/// What stays when the host could not be looked at.
fn keep(previous: Option<&Scan>, lent: &[Lent], problem: String) -> Scan {
    let mut scan = previous.cloned().unwrap_or_default();
    for lent in lent {
        match scan.devices.iter_mut().find(|device| device.name == lent.name) {
            Some(device) => device.attributes = lent.attributes.clone(),
            None => scan.devices.push(lent_device(lent, None, None)),
        }
    }
    scan.problems = vec![problem];
    sorted(scan)
}

fn lent_device(lent: &Lent, link: Option<&Link>, rdma: Option<RdmaPart>) -> Device {
    Device {
        name: lent.name.clone(),
        hardware: lent.hardware.clone(),
        link: link.cloned(),
        attributes: lent.attributes.clone(),
        rdma,
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
    seen: &'a RdmaSeen,
    rdma: Vec<RdmaDevice>,
    /// Which port belongs to which link, by the link's index.
    ports: BTreeMap<u32, PortOf>,
    addresses: BTreeMap<u32, Vec<&'a Address>>,
    /// What there was before.
    previous: &'a [Device],
}

impl<'a> Look<'a> {
    fn new(snapshot: &'a Snapshot, seen: &'a RdmaSeen, sysfs: &Sysfs, previous: Option<&'a Scan>) -> Self {
        let mut addresses = BTreeMap::<u32, Vec<&Address>>::new();
        for (index, address) in &snapshot.addresses {
            addresses.entry(*index).or_default().push(address);
        }
        let facts: BTreeMap<_, _> = snapshot.links.iter().map(|link| (link.index, sysfs.link(&link.name, link.index))).collect();
        let rdma = rdma::devices(sysfs.rdma_devices(), seen);
        let ports = rdma::bind(&rdma, &snapshot.links, |index| facts.get(&index)?.as_ref().ok()?.as_ref());
        Self {
            snapshot,
            places: snapshot.links.iter().filter_map(|l| Some((l.index, sysfs.place(&l.name, l.index)?))).collect(),
            facts,
            seen,
            rdma,
            ports,
            addresses,
            previous: previous.map_or(&[], |scan| &scan.devices),
        }
    }

    fn devices(&self, options: ScanOptions, lent: &[Lent]) -> Scan {
        let mut scan = Scan { problems: self.seen.problem.clone().into_iter().collect(), ..Scan::default() };
        let here = self.find_lent(lent);
        for lent in lent {
            let link = here.iter().find(|(_, of)| of.name == lent.name).map(|(link, _)| *link);
            let port = link.map_or_else(|| rdma::of_lent(&self.rdma, lent), |link| self.ports.get(&link.index).copied());
            scan.devices.push(lent_device(lent, link, port.and_then(|port| rdma::part(&self.rdma, port))));
        }
        let offered = self.offered(options, lent, &here, &mut scan);
        let taken = lent.iter().map(|lent| lent.hardware.clone()).collect();
        let previous = self.previous.iter().filter_map(|d| Some((d.link.as_ref()?.index, d.hardware.clone()))).collect();
        let ids = hardware::assign(&offered, &previous, &taken);
        let mut names: BTreeSet<DeviceName> = lent.iter().map(|lent| lent.name.clone()).collect();
        for (link, facts) in offered {
            let id = ids.get(&link.index).map(|id| (id, id.device_name()));
            let Some((hardware, name)) = id.filter(|(_, name)| names.insert(name.clone())) else {
                self.withhold(&mut scan, link, "it can't be told from a device that is lent to a pod".to_owned());
                continue;
            };
            scan.devices.push(self.device(link, facts, hardware.clone(), name));
        }
        self.without_link(options, lent, &mut scan);
        sorted(scan)
    }

    fn device(&self, link: &Link, facts: &LinkFacts, hardware: HardwareId, name: DeviceName) -> Device {
        let port = self.ports.get(&link.index).copied();
        let addresses = self.addresses.get(&link.index).map_or(&[][..], Vec::as_slice);
        let mut attributes = attributes::of_link(link, self.places.get(&link.index).unwrap_or(facts), addresses);
        attributes.extend(port.map(|port| rdma::attributes(&self.rdma, port, self.seen.mode)).unwrap_or_default());
        if let Some(programs) = self.snapshot.programs.get(&link.index) {
            attributes.extend(attributes::of_programs(link, programs));
        }
        attributes::fit(&mut attributes);
        let rdma = port.and_then(|port| rdma::part(&self.rdma, port));
        Device { name, hardware, link: Some(link.clone()), attributes, rdma, is_rdma_only: false }
    }

    /// RDMA devices that no link is of: those that have none by nature are devices.
    fn without_link(&self, options: ScanOptions, lent: &[Lent], scan: &mut Scan) {
        let companions = rdma::companions(&self.rdma);
        let ignored =
            |index: &u32| scan.withheld.iter().any(|w| w.reason == IPOIB_IGNORED && self.link_name(*index) == Some(&w.link));
        let bound: BTreeSet<usize> = self.ports.iter().filter(|(index, _)| !ignored(index)).map(|(_, port)| port.0).collect();
        let mut open: Vec<(usize, &RdmaDevice)> = self.rdma.iter().enumerate().collect();
        open.retain(|(place, device)| {
            !bound.contains(place) && !companions.contains_key(place) && !lent.iter().any(|lent| rdma::is_lents(device, lent))
        });
        // In an order that does not change with names.
        open.sort_by_key(|(_, device)| (device.node_guid, &device.facts.name));
        for (place, device) in open {
            match rdma::withhold(device).or_else(|| self.no_default_route(options)) {
                Some(reason) => self.withhold_rdma(scan, device, reason),
                None => self.offer_rdma(scan, (place, device)),
            }
        }
    }

    fn offer_rdma(&self, scan: &mut Scan, (place, device): (usize, &RdmaDevice)) {
        let candidates = rdma::candidates(device);
        let before = |d: &&Device| {
            let same = |rdma: &RdmaPart| rdma.node_guid == device.node_guid && rdma.name.as_str() == device.facts.name;
            d.is_rdma_only && candidates.contains(&d.hardware) && d.rdma.as_ref().is_some_and(same)
        };
        let before = self.previous.iter().find(before).map(|d| d.hardware.clone());
        let is_free = |id: &HardwareId| !scan.devices.iter().any(|d| d.hardware == *id || d.name == id.device_name());
        let Some(hardware) = before.into_iter().chain(candidates).find(is_free) else {
            let reason = format!("the RDMA device {} can't be told from another of its function", device.facts.name);
            return self.withhold_rdma(scan, device, reason);
        };
        let port = (place, device.facts.ports.keys().next().copied().unwrap_or(1));
        let Some(part) = rdma::part(&self.rdma, port) else { return };
        let mut attributes = attributes::without_link(&device.facts);
        attributes.extend(rdma::attributes(&self.rdma, port, self.seen.mode));
        scan.devices.push(Device {
            name: hardware.device_name(),
            hardware,
            link: None,
            attributes,
            rdma: Some(part),
            is_rdma_only: true,
        });
    }

    fn withhold_rdma(&self, scan: &mut Scan, device: &RdmaDevice, reason: String) {
        let name = rdma::candidates(device).first().map(HardwareId::device_name);
        let is_known = |name: &DeviceName| scan.devices.iter().any(|d| d.name == *name) || scan.withheld(name).is_some();
        scan.withheld.push(Withheld { link: device.facts.name.clone(), device: name.filter(|name| !is_known(name)), reason });
    }

    fn link_name(&self, index: u32) -> Option<&String> {
        self.snapshot.links.iter().find(|link| link.index == index).map(|link| &link.name)
    }

    fn no_default_route(&self, options: ScanOptions) -> Option<String> {
        let is_there = || self.snapshot.routes.iter().any(|(_, route)| route.is_default() && route.kind == RTN_UNICAST);
        let is_missing = options.need_default_route && !is_there();
        is_missing.then(|| "the host has no default route yet, so it may become its uplink".to_owned())
    }

    /// Why a link that could be a device is none, as far as RDMA matters.
    fn withhold_ipoib(&self, link: &Link, options: ScanOptions, lent: &[Lent]) -> Option<String> {
        if options.ipoib == Ipoib::Ignore && rdma::is_ipoib(link) {
            return Some(IPOIB_IGNORED.to_owned());
        }
        let device = &self.rdma[self.ports.get(&link.index)?.0];
        let lent = lent.iter().find(|lent| lent.is_rdma_only && rdma::is_lents(device, lent))?;
        Some(format!("its RDMA device {} is lent to a pod as {}", device.facts.name, lent.name))
    }

    /// The links that may be devices. The others are noted in `scan`, but for those of `lent` devices.
    fn offered<'b>(
        &'b self,
        options: ScanOptions,
        lent: &[Lent],
        here: &[(&Link, &Lent)],
        scan: &mut Scan,
    ) -> Vec<(&'b Link, &'b LinkFacts)> {
        static NONE: LinkFacts = LinkFacts::NONE;
        let needed = uplink::needed(&self.snapshot.links, &self.snapshot.routes);
        let names = self.snapshot.links.iter().map(|link| (link.index, link.name.as_str())).collect();
        let no_default = self.no_default_route(options);
        let mut offered = Vec::new();
        for link in &self.snapshot.links {
            if here.iter().any(|(here, _)| here.index == link.index) {
                continue;
            }
            let reason = policy::withhold(link, &needed, &names, options);
            if let Some(reason) = reason.or_else(|| self.withhold_ipoib(link, options, lent)) {
                self.withhold(scan, link, reason);
                continue;
            }
            let is_virtual = link.kind.is_some() && link.parent_device.is_none();
            match self.facts.get(&link.index) {
                _ if no_default.is_some() => self.withhold(scan, link, no_default.clone().unwrap_or_default()),
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
            for lent in lent.iter().filter(|lent| !lent.is_rdma_only) {
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
