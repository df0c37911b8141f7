//! What is healthy. Pure.
//!
//! The kubelet shows the health of devices that a pod has. For them it is the link in the pod that counts: is it there, is it up,
//! has it a carrier, and are the ports of its RDMA device active. A device that is prepared is down because we took it down, so all
//! it can lack is itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{DeviceHealth, MESSAGE_MAX, State};
use crate::attach::engine::locate;
use crate::inventory::{Attribute, Attributes, Device, Scan};
use crate::ledger::{ClaimRecord, DeviceRecord, Phase};
use crate::names::{DeviceName, SandboxId};
use crate::netdev::Link;

/// Links of one namespace, or why they can't be read.
pub type Seen = Result<Arc<Vec<Link>>, String>;

/// States of the ports of RDMA devices, by the device's name and the port's number.
pub type RdmaPorts = BTreeMap<String, BTreeMap<u32, String>>;

/// What was seen. A sandbox whose namespace is not open is not in it.
#[derive(Debug, Clone)]
pub struct Links {
    /// On the host.
    pub host: Seen,
    /// In the sandboxes that have devices.
    pub pods: BTreeMap<SandboxId, Seen>,
    /// Of the RDMA devices that the host shows.
    pub ports: RdmaPorts,
}

/// State and message.
type Verdict = (State, String);

const HEALTHY: Verdict = (State::Healthy, String::new());

/// Every device of this node: those of `records` by where they are, the others of `scan` by their link on the host. `pool` is the
/// pool of the latter. Sorted by pool and name.
#[must_use]
pub fn all<'a>(pool: &str, scan: &Scan, records: impl IntoIterator<Item = &'a ClaimRecord>, links: &Links) -> Vec<DeviceHealth> {
    let free = scan.devices.iter().map(|device| {
        let (state, message) = active(free(device), &device.attributes, &links.ports);
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
        let mut verdict = lent(device, links);
        if device.phase == Phase::Attached {
            verdict = active(verdict, &device.attributes, &links.ports);
        }
        let (state, message) = verdict;
        entry(&device.pool, &device.device, state, message)
    });
    judged.collect()
}

/// What it is with its RDMA device in view. A port can only be active over a link that is, so it is looked at where the link is well.
/// Which of several ports belongs to the link can't be told here: one that is active is enough. In exclusive mode a device that is in
/// a pod is not in the host's sysfs; then the link alone counts.
fn active(verdict: Verdict, attributes: &Attributes, ports: &RdmaPorts) -> Verdict {
    let Some(Attribute::String(name)) = attributes.get("rdmaDevice").filter(|_| verdict.0 == State::Healthy) else {
        return verdict;
    };
    match ports.get(name) {
        Some(ports) if !ports.is_empty() && ports.values().all(|state| state != "ACTIVE") => {
            let states: Vec<_> = ports.iter().map(|(number, state)| format!("port {number} of {name} is {state}")).collect();
            (State::Unhealthy, format!("RDMA port not active: {}", states.join(", ")))
        }
        _ => verdict,
    }
}

fn entry(pool: &str, device: &DeviceName, state: State, mut message: String) -> DeviceHealth {
    let ends = message.char_indices().map(|(start, c)| start + c.len_utf8());
    message.truncate(ends.take_while(|end| *end <= MESSAGE_MAX).last().unwrap_or(0));
    DeviceHealth { pool: pool.to_owned(), device: device.clone(), state, message }
}

fn free(device: &Device) -> Verdict {
    match &device.link {
        // The scan is from before its claim ended: a device that is free and gone is in no scan.
        None => (State::Unknown, "it was given back a moment ago, and is being looked at".to_owned()),
        Some(link) if !link.is_up() => {
            (State::Unknown, format!("{} is administratively down on the host, so nothing is known of its carrier", link.name))
        }
        Some(link) => of_link(link, "on the host"),
    }
}

fn lent(device: &DeviceRecord, links: &Links) -> Verdict {
    match (device.phase, &device.attachment) {
        (Phase::Attached, Some(attachment)) => match links.pods.get(&attachment.sandbox) {
            None => (State::Unknown, "the pod's network namespace is not open".to_owned()),
            Some(Err(why)) => (State::Unknown, format!("the pod's network namespace can't be read: {why}")),
            Some(Ok(inside)) => match locate::in_pod(device, attachment.index, inside) {
                Some(link) => of_link(link, "in the pod"),
                None => {
                    let text = format!("device gone: {} is not in the pod's network namespace any more", device.plan.pod_link);
                    (State::Unhealthy, text)
                }
            },
        },
        (phase, _) => match &links.host {
            Err(why) => (State::Unknown, format!("the host's links can't be read: {why}")),
            Ok(host) if locate::find(device, device.host.index, host).is_some() => HEALTHY,
            Ok(_) if matches!(phase, Phase::Attaching | Phase::Releasing) => {
                (State::Unknown, "it is on its way into the pod or back".to_owned())
            }
            Ok(_) => (State::Unhealthy, format!("device gone: {} is not on the host any more", device.host.name)),
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
