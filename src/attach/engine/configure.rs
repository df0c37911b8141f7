//! Everything inside the pod: one pipeline for all devices.

use std::time::Instant;

use super::jobs::Job;
use super::{settings, taken};
use crate::attach::Step;
use crate::attach::plan::dhcp::address_now;
use crate::dhcp::Moment;
use crate::netdev::{address, link, neighbour, route, rule, sysctl};
use crate::netlink::{NetlinkError, Request, RouteSocket};
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Addresses,
    Up,
    /// IPv6 addresses with a finite life time get their connected route only on a link that is up: the plan has them after it.
    LateAddresses,
    Neighbours,
    Routes,
    Rules,
}

/// The stage of each step that is a route message, but those of prepare and the moves, in the plan's order.
fn staged(steps: &[Step]) -> impl Iterator<Item = (Stage, &Step)> {
    let mut up = false;
    steps.iter().filter_map(move |step| {
        up |= matches!(step, Step::Up);
        let stage = match step {
            Step::DetachPrograms { .. }
            | Step::Vf { .. }
            | Step::Move { .. }
            | Step::Create { .. }
            | Step::Sysctl { .. }
            | Step::Ethtool { .. } => return None,
            Step::Address { .. } if up => Stage::LateAddresses,
            Step::Address { .. } => Stage::Addresses,
            Step::Up => Stage::Up,
            Step::Neighbour { .. } => Stage::Neighbours,
            Step::Route { .. } => Stage::Routes,
            Step::Rule { .. } => Stage::Rules,
        };
        Some((stage, step))
    })
}

/// Carries out every step but the moves.
pub(super) fn run(netns: &Netns, socket: &mut RouteSocket, jobs: &[Job], deadline: Instant) -> Result<(), StepFailure> {
    write_sysctls(netns, jobs)?;
    settings::change(netns, jobs, deadline)?;
    let mut work: Vec<(usize, Stage, &Step)> = jobs
        .iter()
        .enumerate()
        .flat_map(|(position, job)| staged(&job.device().plan.steps).map(move |(stage, step)| (position, stage, step)))
        .collect();
    // Stable: within a stage the plan's order holds.
    work.sort_by_key(|(_, stage, _)| *stage);
    let requests = work.iter().filter_map(|(position, _, step)| request(&jobs[*position], step)).collect();
    let results = socket.pipeline(requests, deadline);
    for ((position, stage, step), result) in work.iter().zip(results) {
        let job = &jobs[*position];
        let exists = |e: &NetlinkError| e.errno() == Some(nix::libc::EEXIST);
        let why = match (result, step) {
            (Err(e), Step::Route { route, configured }) if exists(&e) => taken::conflict(socket, jobs, job, route, *configured),
            // Two devices of a pod may bring the same neighbour or rule: once more is what was wanted.
            (Err(e), _) if exists(&e) && *stage >= Stage::Neighbours => None,
            (Err(e), Step::Up) if e.errno() == Some(nix::libc::EADDRINUSE) => {
                Some(format!("{e}: another link on {} has its link-layer address", job.device().host.name))
            }
            (result, _) => result.err().map(|e| e.to_string()),
        };
        if let Some(why) = why {
            return Err(StepFailure { job: *position, step: step.describe(), why });
        }
    }
    Ok(())
}

fn request(job: &Job, step: &Step) -> Option<Request> {
    let index = job.index;
    Some(match step.clone().by_link(index) {
        Step::DetachPrograms { .. }
        | Step::Vf { .. }
        | Step::Move { .. }
        | Step::Create { .. }
        | Step::Sysctl { .. }
        | Step::Ethtool { .. } => {
            return None;
        }
        Step::Up => link::up_request(index, true),
        Step::Address { address } => address::add_request(index, &address_now(&address, job.device().lease(), Moment::now())),
        Step::Neighbour { neighbour } => neighbour::add_request(index, &neighbour),
        Step::Route { route, .. } => route::add_request(index, &route, false),
        Step::Rule { rule } => rule::add_request(&rule),
    })
}

fn write_sysctls(netns: &Netns, jobs: &[Job]) -> Result<(), StepFailure> {
    let any = jobs.iter().any(|job| job.device().plan.steps.iter().any(|s| matches!(s, Step::Sysctl { .. })));
    if !any {
        return Ok(());
    }
    let written = netns.run(|| {
        for (position, job) in jobs.iter().enumerate() {
            for step in &job.device().plan.steps {
                if let Step::Sysctl { key, value } = step {
                    sysctl::write(job.device().plan.pod_link.as_str(), key, value).map_err(|e| StepFailure {
                        job: position,
                        step: step.describe(),
                        why: e.to_string(),
                    })?;
                }
            }
        }
        Ok(())
    });
    written.unwrap_or_else(|e| Err(StepFailure { job: 0, step: "entering the pod's namespace".to_owned(), why: e.to_string() }))
}
