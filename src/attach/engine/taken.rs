//! What it means when the kernel has a route already that a device brings.

use super::jobs::Job;
use super::look_deadline;
use crate::netdev::{Route, link, route};
use crate::netlink::{NetlinkError, RouteSocket};

/// Metric that the kernel gives to an IPv6 route without one (`IP6_RT_PRIO_USER`).
const IPV6_METRIC: u32 = 1024;

/// Why it is a fault that the pod has a route with the destination, table and metric of `wanted`; none when it is not: another
/// device of the pod brought it as well, or nobody asked for it and the pod network's own one goes first.
pub(super) fn conflict(socket: &mut RouteSocket, jobs: &[Job], job: &Job, wanted: &Route, configured: bool) -> Option<String> {
    let holder = match holder(socket, jobs, wanted) {
        Ok(None) => return None,
        Ok(Some(holder)) => holder,
        Err(error) => format!("another one, but looking for it failed: {error}"),
    };
    let why = format!("the pod has one to this destination already ({holder}); use a table of its own and a rule for it");
    if configured {
        return Some(why);
    }
    tracing::warn!(claim = %job.claim_text, device = %job.device().device, route = %wanted, %why, "a route of the host's is left out");
    None
}

/// The route in the pod that stands where `wanted` should, unless it is by one of `jobs`.
fn holder(socket: &mut RouteSocket, jobs: &[Job], wanted: &Route) -> Result<Option<String>, NetlinkError> {
    let all = route::list(socket, look_deadline())?;
    let Some((links, found)) = all.into_iter().find(|(_, route)| key(route) == key(wanted)) else {
        return Ok(Some("it went away just now".to_owned()));
    };
    if wanted.is_dead_end() && found.kind == wanted.kind {
        return Ok(None);
    }
    let ours = |index: &u32| jobs.iter().any(|job| job.index == *index);
    if !links.is_empty() && links.iter().all(ours) {
        return Ok(None);
    }
    let mut names = Vec::new();
    for index in links {
        names.push(link::by_index(socket, index, look_deadline())?.map_or_else(|| format!("link {index}"), |l| l.name));
    }
    Ok(Some(format!("{found} by {}", names.join(", "))))
}

/// What the kernel keeps one route for.
fn key(route: &Route) -> impl PartialEq {
    let metric = match route.metric.unwrap_or(0) {
        0 if route.is_ipv6() => IPV6_METRIC,
        metric => metric,
    };
    (route.destination.trunc(), route.from, route.table, metric, route.tos)
}
