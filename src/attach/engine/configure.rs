//! Everything inside the pod: one pipeline for all devices.

use std::time::Instant;

use super::attach::Job;
use crate::attach::Step;
use crate::netdev::{address, link, neighbour, route, rule, sysctl};
use crate::netlink::{Request, RouteSocket};
use crate::netns::Netns;

/// A step that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepFailure {
    /// Position of the job.
    pub(super) job: usize,
    /// What was tried, with its values.
    pub(super) step: String,
    /// Why it failed.
    pub(super) why: String,
}

/// Stages: all devices pass one before any enters the next, so that a rule or route of one may depend on a link of another.
fn stage(step: &Step) -> u8 {
    match step {
        Step::Move { .. } | Step::Sysctl { .. } => 0,
        Step::Address { .. } => 1,
        Step::Up => 2,
        Step::Neighbour { .. } => 3,
        Step::Route { .. } => 4,
        Step::Rule { .. } => 5,
    }
}

/// Carries out every step but the moves.
pub(super) fn run(netns: &Netns, socket: &mut RouteSocket, jobs: &[Job], deadline: Instant) -> Result<(), StepFailure> {
    write_sysctls(netns, jobs)?;
    let mut work: Vec<(usize, &Step)> = jobs
        .iter()
        .enumerate()
        .flat_map(|(position, job)| job.device.plan.steps.iter().map(move |step| (position, step)))
        .filter(|(_, step)| stage(step) > 0)
        .collect();
    // Stable: within a stage the plan's order holds.
    work.sort_by_key(|(_, step)| stage(step));
    let requests = work.iter().filter_map(|(position, step)| request(jobs[*position].index, step)).collect();
    let results = socket.pipeline(requests, deadline);
    for ((position, step), result) in work.iter().zip(results) {
        match result {
            Ok(()) => {}
            // Two claims of a pod, or a shared table: the same route or rule once more is what was wanted.
            Err(e) if e.errno() == Some(nix::libc::EEXIST) && stage(step) >= 3 => {}
            Err(e) => return Err(StepFailure { job: *position, step: describe(step), why: e.to_string() }),
        }
    }
    Ok(())
}

fn request(index: u32, step: &Step) -> Option<Request> {
    Some(match step {
        Step::Move { .. } | Step::Sysctl { .. } => return None,
        Step::Up => link::up_request(index, true),
        Step::Address { address } => address::add_request(index, address),
        Step::Neighbour { neighbour } => neighbour::add_request(index, neighbour),
        Step::Route { route } => route::add_request(index, route, false),
        Step::Rule { rule } => rule::add_request(rule),
    })
}

fn write_sysctls(netns: &Netns, jobs: &[Job]) -> Result<(), StepFailure> {
    let any = jobs.iter().any(|job| job.device.plan.steps.iter().any(|s| matches!(s, Step::Sysctl { .. })));
    if !any {
        return Ok(());
    }
    let written = netns.run(|| {
        for (position, job) in jobs.iter().enumerate() {
            for step in &job.device.plan.steps {
                if let Step::Sysctl { key, value } = step {
                    sysctl::write(job.device.plan.pod_link.as_str(), key, value).map_err(|e| StepFailure {
                        job: position,
                        step: describe(step),
                        why: e.to_string(),
                    })?;
                }
            }
        }
        Ok(())
    });
    written.unwrap_or_else(|e| Err(StepFailure { job: 0, step: "entering the pod's namespace".to_owned(), why: e.to_string() }))
}

/// A step in words, for errors and status.
pub(super) fn describe(step: &Step) -> String {
    match step {
        Step::Move { name, .. } => format!("moving it into the pod as {name}"),
        Step::Sysctl { key, value } => format!("setting sysctl {key} to {value}"),
        Step::Up => "setting it up".to_owned(),
        Step::Address { address } => format!("adding address {}/{}", address.ip, address.prefix_len),
        Step::Neighbour { neighbour } => format!("adding neighbour {}", neighbour.ip),
        Step::Route { route } => {
            let via = route.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
            format!("adding route {}{via} in table {}", route.destination, route.table)
        }
        Step::Rule { rule } => {
            let from = rule.source.map(|s| format!(" from {s}")).unwrap_or_default();
            let to = rule.destination.map(|d| format!(" to {d}")).unwrap_or_default();
            format!("adding rule{from}{to} lookup {}", rule.table)
        }
    }
}
