//! Everything inside the pod: one pipeline for all devices.

use std::io;
use std::time::Instant;

use super::jobs::Job;
use super::{settings, taken, vrf};
use crate::attach::Step;
use crate::attach::plan::dhcp::address_now;
use crate::dhcp::Moment;
use crate::netdev::{address, link, neighbour, route, rule, sysctl};
use crate::netlink::{NetlinkError, Request, RouteSocket};
use crate::netns::Netns;

/// Why a VRF can't be made by a kernel that knows none.
const NO_VRF: &str =
    "interface.vrf: the node's kernel has no VRF links (CONFIG_NET_VRF, module vrf); load it, or remove interface.vrf";

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
    /// Before addresses: the kernel takes IPv6 ones away.
    Vrf,
    Link,
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
            | Step::Rdma { .. }
            | Step::Create { .. }
            | Step::Sysctl { .. }
            | Step::Ethtool { .. } => return None,
            Step::Vrf { .. } => Stage::Vrf,
            Step::Link { .. } | Step::AltName { .. } => Stage::Link,
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
    let (parts, all): (Vec<_>, Vec<_>) =
        work.iter().flat_map(|part| requests(&jobs[part.0], part.2).into_iter().map(move |request| (part, request))).unzip();
    let results = socket.pipeline(all, deadline);
    for (&(position, stage, step), result) in parts.into_iter().zip(results) {
        let job = &jobs[position];
        let exists = |e: &NetlinkError| e.errno() == Some(nix::libc::EEXIST);
        let why = match (result, step) {
            (Err(e), Step::Route { route, configured }) if exists(&e) => taken::conflict(socket, jobs, job, route, *configured),
            // Two devices of a pod may bring the same neighbour or rule: once more is what was wanted.
            (Err(e), _) if exists(&e) && stage >= Stage::Neighbours => None,
            (Err(e), Step::Up) if e.errno() == Some(nix::libc::EADDRINUSE) => {
                Some(format!("{e}: another link on {} has its link-layer address", job.device().host.name))
            }
            (Err(e), Step::Vrf { .. }) if e.errno() == Some(nix::libc::EOPNOTSUPP) => Some(NO_VRF.to_owned()),
            (result, _) => result.err().map(|e| e.to_string()),
        };
        if let Some(why) = why {
            return Err(StepFailure { job: position, step: step.describe(), why });
        }
    }
    Ok(())
}

fn requests(job: &Job, step: &Step) -> Vec<Request> {
    let index = job.index;
    let one = match step.clone().by_link(index) {
        Step::DetachPrograms { .. }
        | Step::Vf { .. }
        | Step::Move { .. }
        | Step::Rdma { .. }
        | Step::Create { .. }
        | Step::Sysctl { .. }
        | Step::Ethtool { .. } => return Vec::new(),
        Step::Vrf { name, table } => return job.vrf.map(|place| vrf::requests(index, &name, table, place)).unwrap_or_default(),
        Step::Link { settings } => link::set_request(index, &settings),
        // The kernel may have brought the link back from an earlier sandbox with it.
        Step::AltName { name } if job.alt_names.contains(&name) => return Vec::new(),
        Step::AltName { name } => link::alt_name_request(index, &name, true),
        Step::Up => link::up_request(index, true),
        Step::Address { address } => address::add_request(index, &address_now(&address, job.device().lease(), Moment::now())),
        Step::Neighbour { neighbour } => neighbour::add_request(index, &neighbour),
        Step::Route { route, .. } => route::add_request(index, &route, false),
        Step::Rule { rule } => rule::add_request(&rule),
    };
    vec![one]
}

fn write_sysctls(netns: &Netns, jobs: &[Job]) -> Result<(), StepFailure> {
    let is_one = |step: &Step| matches!(step, Step::Sysctl { .. } | Step::Vrf { .. });
    if !jobs.iter().any(|job| job.device().plan.steps.iter().any(is_one)) {
        return Ok(());
    }
    let written = netns.run(|| {
        for (position, job) in jobs.iter().enumerate() {
            for step in &job.device().plan.steps {
                let failed = |e: io::Error| StepFailure { job: position, step: step.describe(), why: e.to_string() };
                write_sysctl(job.device().plan.pod_link.as_str(), step).map_err(failed)?;
            }
        }
        Ok(())
    });
    written.unwrap_or_else(|e| Err(StepFailure { job: 0, step: "entering the pod's namespace".to_owned(), why: e.to_string() }))
}

fn write_sysctl(link: &str, step: &Step) -> io::Result<()> {
    let absent = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    match step {
        Step::Sysctl { key, value, may_lack } => match sysctl::write(link, key, value) {
            Err(e) if absent(&e) && *may_lack => Ok(()),
            result => result,
        },
        // A kernel without them has no VRF either, and says so.
        Step::Vrf { .. } => sysctl::accept_from_vrfs().or_else(|e| if absent(&e) { Ok(()) } else { Err(e) }),
        _ => Ok(()),
    }
}
