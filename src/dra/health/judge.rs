//! What is healthy. Pure.
//!
//! The kubelet shows the health of devices that a pod has. For them it is the link in the pod that counts: is it there, is it up,
//! has it a carrier, and is the port of its RDMA device active, wherever that is. A device that is prepared is down because we took it
//! down, so all it can lack is itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{DeviceHealth, MESSAGE_MAX, State};
use crate::attach::engine::locate;
use crate::inventory::{Device, Scan};
use crate::ledger::record::RdmaRecord;
use crate::ledger::{ClaimRecord, DeviceRecord, Phase};
use crate::names::{DeviceName, SandboxId};
use crate::netdev::Link;
use crate::rdma::{NetnsMode, PortState};

/// Links of one namespace, or why they can't be read.
pub type Seen = Result<Arc<Vec<Link>>, String>;

/// An RDMA device and the states of its ports, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaState {
    /// The device.
    pub device: crate::rdma::Device,
    /// Its ports.
    pub ports: BTreeMap<u32, PortState>,
}

/// RDMA devices that one namespace sees, or why they can't be read.
pub type SeenRdma = Result<Arc<Vec<RdmaState>>, String>;

/// What was seen in one namespace.
#[derive(Debug, Clone)]
pub struct Place {
    /// Its links.
    pub links: Seen,
    /// Its RDMA devices; in pods they are looked at only where the RDMA device is in the pod.
    pub rdma: SeenRdma,
}

/// What was seen. A sandbox whose namespace is not open is not in it.
#[derive(Debug, Clone)]
pub struct Links {
    /// On the host.
    pub host: Place,
    /// In the sandboxes that have devices.
    pub pods: BTreeMap<SandboxId, Place>,
}

/// State and message.
type Verdict = (State, String);

const HEALTHY: Verdict = (State::Healthy, String::new());

/// Every device of this node: those of `records` by where they are, the others of `scan` by their link on the host. `pool` is the
/// pool of the latter. Sorted by pool and name.
#[must_use]
pub fn all<'a>(pool: &str, scan: &Scan, records: impl IntoIterator<Item = &'a ClaimRecord>, links: &Links) -> Vec<DeviceHealth> {
    let free = scan.devices.iter().map(|device| {
        let (state, message) = free(device, links);
        entry(pool, &device.name, state, message)
    });
    let lent = records.into_iter().flat_map(|record| health(record, links));
    let by_name: BTreeMap<(String, DeviceName), DeviceHealth> =
        free.chain(lent).map(|device| ((device.pool.clone(), device.device.clone()), device)).collect();
    by_name.into_values().collect()
}

/// The devices of one claim.
#[must_use]
pub fn health(record: &ClaimRecord, links: &Links) -> Vec<DeviceHealth> {
    let judged = record.devices.iter().map(|device| {
        let (state, message) = both(lent(device, links), || lent_rdma(device, links));
        entry(&device.pool, &device.device, state, message)
    });
    judged.collect()
}

/// The link's verdict, and where it is well, that of the RDMA device: a port can only be active over a link that is.
fn both(link: Verdict, rdma: impl FnOnce() -> Verdict) -> Verdict {
    if link.0 == State::Healthy { rdma() } else { link }
}

/// The RDMA device of a device of a claim, where it is now.
fn lent_rdma(device: &DeviceRecord, links: &Links) -> Verdict {
    let Some(rdma) = &device.rdma else { return HEALTHY };
    let moves = rdma.mode == NetnsMode::Exclusive;
    match (device.phase, &device.attachment) {
        (Phase::Attached, Some(attachment)) if moves => match links.pods.get(&attachment.sandbox) {
            None => (State::Unknown, "the pod's network namespace is not open".to_owned()),
            Some(pod) => port_of(rdma, &pod.rdma, "in the pod's network namespace"),
        },
        (Phase::Attached, _) => port_of(rdma, &links.host.rdma, "on the host"),
        (phase, _) => match &links.host.rdma {
            Err(why) => (State::Unknown, format!("the host's RDMA devices can't be read: {why}")),
            Ok(seen) if find(rdma, seen).is_some() => HEALTHY,
            Ok(_) if matches!(phase, Phase::Attaching | Phase::Releasing) => {
                (State::Unknown, "its RDMA device is on its way into the pod or back".to_owned())
            }
            Ok(_) => (State::Unhealthy, format!("RDMA device gone: {} is not on the host any more", rdma.name)),
        },
    }
}

/// The port that the record names. `place` for the text.
fn port_of(rdma: &RdmaRecord, seen: &SeenRdma, place: &str) -> Verdict {
    let seen = match seen {
        Err(why) => return (State::Unknown, format!("RDMA devices {place} can't be read: {why}")),
        Ok(seen) => seen,
    };
    match find(rdma, seen) {
        None => (State::Unhealthy, format!("RDMA device gone: {} is not {place} any more", rdma.name)),
        Some(state) => active(state, rdma.port),
    }
}

fn active(state: &RdmaState, port: u32) -> Verdict {
    let name = &state.device.name;
    match state.ports.get(&port) {
        Some(PortState::Active | PortState::ActiveDefer) => HEALTHY,
        Some(other) => (State::Unhealthy, format!("RDMA port not active: port {port} of {name} is {other}")),
        None => (State::Unhealthy, format!("RDMA port gone: {name} has no port {port}")),
    }
}

/// By index and GUID, which a pod can't change; a driver that registers it anew gives it another index.
fn find<'a>(rdma: &RdmaRecord, seen: &'a [RdmaState]) -> Option<&'a RdmaState> {
    let same_guid = |state: &&RdmaState| rdma.node_guid.is_some() && state.device.node_guid == rdma.node_guid;
    let same_index = |state: &&RdmaState| state.device.index == rdma.index && (rdma.node_guid.is_none() || same_guid(state));
    let by_index = seen.iter().find(same_index);
    by_index.or_else(|| seen.iter().find(|state| same_guid(state) && state.device.parent.is_none()))
}

fn entry(pool: &str, device: &DeviceName, state: State, mut message: String) -> DeviceHealth {
    let ends = message.char_indices().map(|(start, c)| start + c.len_utf8());
    message.truncate(ends.take_while(|end| *end <= MESSAGE_MAX).last().unwrap_or(0));
    DeviceHealth { pool: pool.to_owned(), device: device.clone(), state, message }
}

fn free(device: &Device, links: &Links) -> Verdict {
    let verdict = match &device.link {
        None if device.is_rdma_only && device.rdma.is_some() => HEALTHY,
        // The scan is from before its claim ended: a device that is free and gone is in no scan.
        None => (State::Unknown, "it was given back a moment ago, and is being looked at".to_owned()),
        Some(link) if !link.is_up() => {
            (State::Unknown, format!("{} is administratively down on the host, so nothing is known of its carrier", link.name))
        }
        Some(link) => of_link(link, "on the host"),
    };
    both(verdict, || match (&device.rdma, &links.host.rdma) {
        (Some(rdma), Ok(seen)) => {
            // One that went away since the scan is in no scan in a moment.
            seen.iter().find(|state| state.device.name == rdma.name.as_str()).map_or(HEALTHY, |state| active(state, rdma.port))
        }
        _ => HEALTHY,
    })
}

fn lent(device: &DeviceRecord, links: &Links) -> Verdict {
    if !device.has_link() {
        return HEALTHY;
    }
    if device.child().is_some() {
        return shared(device, links);
    }
    match (device.phase, &device.attachment) {
        (Phase::Attached, Some(attachment)) => match links.pods.get(&attachment.sandbox) {
            None => (State::Unknown, "the pod's network namespace is not open".to_owned()),
            Some(Place { links: Err(why), .. }) => (State::Unknown, format!("the pod's network namespace can't be read: {why}")),
            Some(Place { links: Ok(inside), .. }) => match locate::in_pod(device, attachment.index, inside) {
                Some(link) => of_link(link, "in the pod"),
                None => {
                    let text = format!("device gone: {} is not in the pod's network namespace any more", device.plan.pod_link);
                    (State::Unhealthy, text)
                }
            },
        },
        (phase, _) => match &links.host.links {
            Err(why) => (State::Unknown, format!("the host's links can't be read: {why}")),
            Ok(host) if locate::find(device, device.host.index, host).is_some() => HEALTHY,
            Ok(_) if matches!(phase, Phase::Attaching | Phase::Releasing) => {
                (State::Unknown, "it is on its way into the pod or back".to_owned())
            }
            Ok(_) => (State::Unhealthy, format!("device gone: {} is not on the host any more", device.host.name)),
        },
    }
}

/// A device with links on top: the kubelet knows no health of shares, so what one pod does to its link must not count for the others.
fn shared(device: &DeviceRecord, links: &Links) -> Verdict {
    match &links.host.links {
        Err(why) => (State::Unknown, format!("the host's links can't be read: {why}")),
        Ok(host) => match locate::find(device, device.host.index, host) {
            Some(link) => of_link(link, "on the host"),
            None => (State::Unhealthy, format!("device gone: {} is not on the host any more", device.host.name)),
        },
    }
}

/// `IFF_LOWER_UP`, `linux/if.h`: the driver sees a carrier.
const IFF_LOWER_UP: u32 = 1 << 16;

/// A link that should carry traffic. `place` for the text.
fn of_link(link: &Link, place: &str) -> Verdict {
    let has_carrier = link.flags & IFF_LOWER_UP != 0;
    match link.oper_state.as_str() {
        _ if !link.is_up() => (State::Unhealthy, format!("link down: {} is administratively down {place}", link.name)),
        "up" => HEALTHY,
        // Drivers that don't keep it, and kinds of links that have none.
        "unknown" if has_carrier => HEALTHY,
        "down" | "unknown" => (State::Unhealthy, format!("link down: {} has no carrier {place}", link.name)),
        other => (State::Unhealthy, format!("link down: {} is {other} {place}", link.name)),
    }
}

#[cfg(test)]
mod tests;
