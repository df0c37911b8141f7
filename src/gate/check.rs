//! Whether everything that the claims of a pod name is in a namespace, and as planned. Pure.

use crate::attach::Step;
use crate::attach::engine::locate;
use crate::ledger::{ClaimRecord, DeviceRecord, Phase, RdmaRecord};
use crate::names::{ClaimUid, PodUid};
use crate::netdev::{Address, Link};
use crate::netns::NetnsId;
use crate::rdma::{self, NetnsMode};

/// What there is.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The container's network namespace.
    pub netns: NetnsId,
    /// Boot id of the machine.
    pub boot_id: &'a str,
    /// All links in the namespace.
    pub links: &'a [Link],
    /// All addresses in it, by the index of their link.
    pub addresses: &'a [(u32, Address)],
    /// All RDMA devices that it sees.
    pub rdma: &'a [rdma::Device],
}

/// The first device that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lack {
    /// Its claim, as `namespace/name`.
    pub claim: String,
    /// Its name.
    pub device: String,
    /// What is wrong with it.
    pub what: String,
    /// What failed last, by the record.
    pub last_error: Option<String>,
    /// How many others are not as they should be.
    pub more: usize,
}

/// What follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Everything is there.
    Complete,
    /// Everything was attached here and is here, but a link is not as it was planned. The agent looks at each link before it records
    /// a device as attached, so somebody in the pod changed it since: a container may well put its NICs into a bond and start again.
    Altered(Lack),
    /// Something is not there.
    Lacking(Lack),
    /// It will not be there, however long one waits.
    Refused(String),
}

/// Compares the records of a pod with what there is in its namespace.
#[must_use]
pub fn check(records: &[ClaimRecord], seen: &Seen<'_>) -> Verdict {
    if let Some(old) = records.iter().find(|record| record.boot_id != seen.boot_id) {
        return Verdict::Refused(format!("claim {}: it was prepared before the node was rebooted", name(old)));
    }
    let devices = || records.iter().flat_map(|record| record.devices.iter().map(move |device| (record, device)));
    let lack = |wrong: Vec<(&ClaimRecord, &DeviceRecord, String)>| {
        let more = wrong.len().saturating_sub(1);
        let first = wrong.into_iter().next();
        first.map(|(record, device, what)| Lack {
            claim: name(record),
            device: device.share().to_string(),
            what,
            last_error: device.last_error.clone(),
            more,
        })
    };
    let absent = devices().filter_map(|(record, device)| Some((record, device, absent(device, seen).err()?)));
    if let Some(lack) = lack(absent.collect()) {
        return Verdict::Lacking(lack);
    }
    let changed = devices().filter_map(|(record, device)| Some((record, device, changed(device, link_of(device, seen)?, seen)?)));
    lack(changed.collect()).map_or(Verdict::Complete, Verdict::Altered)
}

/// A claim that a container brings must be prepared, and for the container's pod.
///
/// # Errors
/// Why the container can't start.
pub fn admit(claim: &ClaimUid, record: Option<&ClaimRecord>, pod: &PodUid) -> Result<(), String> {
    match record {
        Some(record) if record.pod.uid == *pod => Ok(()),
        Some(record) => Err(format!(
            "claim {}: its NICs are in pod {}/{}; a NIC can be in one pod only: use a ResourceClaimTemplate, so that each pod gets \
             a claim of its own",
            name(record),
            record.claim.namespace,
            record.pod.name
        )),
        None => Err(format!("claim with UID {claim}: it is not prepared on this node (any more)")),
    }
}

fn name(record: &ClaimRecord) -> String {
    format!("{}/{}", record.claim.namespace, record.claim.name)
}

/// The device's link, if the device is attached in this namespace, and usable; none of one that has no link.
fn absent<'a>(device: &DeviceRecord, seen: &Seen<'a>) -> Result<Option<&'a Link>, String> {
    let here = device.attachment.as_ref().filter(|attachment| attachment.netns == seen.netns);
    let link = match (device.phase, here, &device.attachment) {
        (Phase::Attached, Some(_), _) if !device.has_link() => None,
        (Phase::Attached, Some(here), _) => {
            let link = locate::as_planned(device, here.index, seen.links);
            Some(link.ok_or_else(|| format!("its link {} is not in the pod (any more)", device.plan.pod_link))?)
        }
        (Phase::Attached, None, Some(other)) => return Err(format!("it is in another sandbox of the pod, {}", other.sandbox)),
        (Phase::Attaching, ..) => return Err("it is on its way into the pod".to_owned()),
        (Phase::Releasing, ..) => return Err("it is on its way back to the host".to_owned()),
        (Phase::Prepared | Phase::Attached, ..) => return Err("it is not in the pod yet".to_owned()),
    };
    device.rdma.as_ref().map_or(Ok(()), |rdma| unusable(rdma, seen))?;
    Ok(link)
}

/// The RDMA device is there, and ready where that is waited for.
fn unusable(rdma: &RdmaRecord, seen: &Seen<'_>) -> Result<(), String> {
    let words = |why: String| match &rdma.problem {
        Some(problem) => format!("{why}: {problem}"),
        None => why,
    };
    if rdma.mode == NetnsMode::Exclusive && rdma.find(seen.rdma).is_none() {
        return Err(words(format!("its RDMA device {} is not in the pod (any more)", rdma.name)));
    }
    if rdma.wait_for_port && rdma.usable.is_none() {
        return Err(words(format!("its RDMA device {} can't be used yet", rdma.name)));
    }
    Ok(())
}

fn link_of<'a>(device: &DeviceRecord, seen: &Seen<'a>) -> Option<&'a Link> {
    absent(device, seen).ok().flatten()
}

/// What of its link is not as planned.
fn changed(device: &DeviceRecord, link: &Link, seen: &Seen<'_>) -> Option<String> {
    let wanted = device.plan.pod_link.as_str();
    if link.name != wanted {
        return Some(format!("its link is called {}, not {wanted}", link.name));
    }
    device.plan.steps.iter().find_map(|step| match step {
        Step::Up if !link.is_up() => Some(format!("its link {wanted} is down")),
        Step::Address { address } if !has(seen, link.index, address) => {
            Some(format!("its link {wanted} has no address {}/{}", address.ip, address.prefix_len))
        }
        _ => None,
    })
}

fn has(seen: &Seen<'_>, index: u32, wanted: &Address) -> bool {
    let is = |a: &Address| (a.ip, a.prefix_len) == (wanted.ip, wanted.prefix_len);
    seen.addresses.iter().any(|(of, address)| *of == index && is(address))
}

#[cfg(test)]
mod tests;
