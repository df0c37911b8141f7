//! The permanent neighbour entries that the link has in the pod.

use std::collections::HashSet;

use super::LeftOut;
use super::reach::Reach;
use crate::config::NetworkConfig;
use crate::netdev::{HostState, Neighbour};

/// `NTF_PROXY`, `linux/neighbour.h`.
const NTF_PROXY: u8 = 8;
/// Most entries that are copied from the host.
const COPIED_MAX: usize = 1024;

/// The configured entries, then those of the host's that the pod can use.
pub(super) fn of_pod(
    config: &NetworkConfig,
    host: &HostState,
    reach: &Reach,
    ipv6: bool,
    left_out: &mut LeftOut,
) -> Vec<Neighbour> {
    let configured = config.neighbors.iter().flatten();
    let entry = |n: &crate::config::NeighborConfig| {
        Some(Neighbour { ip: n.destination?, address: Some(n.hardware_addr.clone()?), flags: 0, protocol: 0 })
    };
    let mut all: Vec<Neighbour> = configured.filter_map(entry).collect();
    if !config.host_state().neighbors {
        return all;
    }
    let mut taken: HashSet<_> = all.iter().map(|n| n.ip).collect();
    let mut copied = Vec::new();
    for neighbour in &host.neighbours {
        if taken.contains(&neighbour.ip) {
            continue;
        }
        match not_for_pod(neighbour, reach, ipv6) {
            Some(why) => left_out.add(format!("neighbour {}: {why}", neighbour.ip)),
            None => {
                taken.insert(neighbour.ip);
                copied.push(neighbour.clone());
            }
        }
    }
    left_out.cut(&mut copied, COPIED_MAX, "neighbours");
    all.extend(copied);
    all
}

fn not_for_pod(neighbour: &Neighbour, reach: &Reach, ipv6: bool) -> Option<&'static str> {
    if neighbour.address.is_none() || neighbour.flags & NTF_PROXY != 0 {
        return Some("it is a proxy entry, by which the host answers for others");
    }
    if neighbour.ip.is_ipv6() && !ipv6 {
        return Some("the pod has no IPv6 on this link");
    }
    if reach.is_own(neighbour.ip) {
        return Some("it is the pod's own address");
    }
    (!reach.neighbour(neighbour.ip)).then_some("it is not in a subnet that the pod reaches by this link")
}
