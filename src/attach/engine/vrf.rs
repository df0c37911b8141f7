//! VRFs in a pod: found or made before the links that belong in them, and deleted when the last link has left.

use std::collections::BTreeSet;

use super::look_deadline;
use crate::attach::Step;
use crate::attach::plan::Undo;
use crate::ledger::DeviceRecord;
use crate::names::PodLinkName;
use crate::netdev::moves::{self, Occupied};
use crate::netdev::{Link, LinkSettings, link};
use crate::netlink::{Request, RouteSocket};

/// `IFLA_INFO_KIND` of a VRF.
const KIND: &str = "vrf";
/// Alias of those we made, so that nobody else's is deleted.
const ALIAS: &str = "made by dranic";

/// The VRF of one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its index in the pod.
    pub(super) index: u32,
    /// It is not there yet, and this job comes first.
    make: bool,
}

/// The VRFs that an attach makes.
#[derive(Debug, Default)]
pub(super) struct Planned(Vec<(PodLinkName, u32, u32)>);

impl Planned {
    /// The place of a device with this plan; none when it needs no VRF. A new VRF's name and index are taken from now on.
    ///
    /// # Errors
    /// Step and reason, when the pod has another link of the VRF's name.
    pub(super) fn place(
        &mut self,
        steps: &[Step],
        links: &[Link],
        occupied: &mut Occupied,
    ) -> Result<Option<Place>, (String, String)> {
        let Some((step, name, table)) = steps.iter().find_map(|step| match step {
            Step::Vrf { name, table } => Some((step, name, *table)),
            _ => None,
        }) else {
            return Ok(None);
        };
        self.place_in(name, table, links, occupied).map(Some).map_err(|why| (step.describe(), why))
    }

    fn place_in(&mut self, name: &PodLinkName, table: u32, links: &[Link], occupied: &mut Occupied) -> Result<Place, String> {
        let another = |other: u32| {
            format!("interface.vrf: the pod has a VRF of that name with table {other}; use the same table, or another name")
        };
        if let Some((_, other, index)) = self.0.iter().find(|(planned, ..)| planned == name) {
            return if *other == table { Ok(Place { index: *index, make: false }) } else { Err(another(*other)) };
        }
        match links.iter().find(|l| l.name == name.as_str()) {
            Some(found) if found.kind.as_deref() == Some(KIND) => match found.vrf_table {
                Some(other) if other != table => return Err(another(other)),
                _ => return Ok(Place { index: found.index, make: false }),
            },
            None if !occupied.names.contains(name.as_str()) => {}
            _ => return Err("interface.vrf: another link in the pod has that name; use another one for the VRF".to_owned()),
        }
        let index = moves::pick_index(&occupied.indices, 0);
        occupied.indices.insert(index);
        occupied.names.insert(name.as_str().to_owned());
        self.0.push((name.clone(), table, index));
        Ok(Place { index, make: true })
    }
}

/// The requests that make the VRF, if it is this job's turn, and put the link with `index` into it.
pub(super) fn requests(index: u32, name: &PodLinkName, table: u32, place: Place) -> Vec<Request> {
    let mut requests = Vec::new();
    if place.make {
        let alias = LinkSettings { alias: Some(ALIAS.to_owned()), ..LinkSettings::default() };
        requests.push(link::vrf_request(place.index, name.as_str(), table));
        requests.push(link::set_request(place.index, &alias));
    }
    requests.push(link::enslave_request(index, place.index));
    requests
}

/// Deletes the VRFs that we made for these devices and in which no link is any more. After the devices have moved back.
pub(super) fn delete_empty(pod: &mut RouteSocket, devices: &[&DeviceRecord]) {
    let undo = devices.iter().flat_map(|device| &device.plan.steps).map(Step::undo);
    let names: BTreeSet<String> = undo
        .filter_map(|undo| match undo {
            Undo::LeaveVrf { name } => Some(name.as_str().to_owned()),
            _ => None,
        })
        .collect();
    if names.is_empty() {
        return;
    }
    let links = match link::list(pod, look_deadline()) {
        Ok(links) => links,
        Err(error) => return tracing::warn!(%error, "VRFs of the pod can't be looked at and stay until it ends"),
    };
    let is_ours = |l: &&Link| names.contains(&l.name) && l.kind.as_deref() == Some(KIND) && l.alias.as_deref() == Some(ALIAS);
    let is_empty = |l: &&Link| !links.iter().any(|other| other.master == Some(l.index));
    let requests = links.iter().filter(is_ours).filter(is_empty).map(|l| link::delete_request(l.index)).collect();
    for error in pod.pipeline(requests, look_deadline()).into_iter().filter_map(Result::err) {
        tracing::warn!(%error, "a VRF stays in the pod until it ends");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str, table: u32) -> Vec<Step> {
        vec![Step::Up, Step::Vrf { name: PodLinkName::new(name).unwrap(), table }]
    }

    fn links() -> Vec<Link> {
        let link = |index, name: &str, kind: &str, vrf_table| Link {
            index,
            name: name.to_owned(),
            kind: Some(kind.to_owned()),
            vrf_table,
            ..Link::default()
        };
        vec![link(2, "blue", "vrf", Some(10)), link(3, "br0", "bridge", None)]
    }

    #[test]
    fn a_vrf_is_made_once_and_one_that_is_there_is_used() {
        let (links, mut planned) = (links(), Planned::default());
        let mut occupied = Occupied::by(&links);
        let mut place = |name, table| planned.place(&step(name, table), &links, &mut occupied);
        assert_eq!(place("blue", 10), Ok(Some(Place { index: 2, make: false })));
        assert_eq!(place("red", 11), Ok(Some(Place { index: 4, make: true })));
        assert_eq!(place("red", 11), Ok(Some(Place { index: 4, make: false })));
        assert_eq!(place("green", 12), Ok(Some(Place { index: 5, make: true })));
        for (name, table, words) in [
            ("blue", 11, "a VRF of that name with table 10"),
            ("red", 10, "a VRF of that name with table 11"),
            ("br0", 10, "another link in the pod has that name"),
        ] {
            let (step, why) = place(name, table).unwrap_err();
            assert!(step.contains(name) && why.contains(words), "{step}: {why}");
        }
        assert!(occupied.names.contains("red") && occupied.indices.contains(&5));
        assert_eq!(Planned::default().place(&[Step::Up], &links, &mut occupied), Ok(None));
    }
}
