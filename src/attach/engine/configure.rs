//! Everything inside the pod: one pipeline for all devices, but for setting real NICs up.

use std::io;
use std::time::{Duration, Instant};

use super::attach::{AttachError, Target, step_error};
use super::jobs::Job;
use super::turns::{Pace, Turns};
use super::{settings, taken, vrf};
use crate::attach::Step;
use crate::attach::plan::dhcp::address_now;
use crate::crash;
use crate::dhcp::Moment;
use crate::inventory::HardwareId;
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

/// A step of a job, and when it is carried out.
type Part<'a> = (usize, Stage, &'a Step);

/// Carries out every step but the moves: everything that can be done with links down for all devices, then up, then the rest. Gives how
/// long it waited for others.
pub(super) fn run(target: &Target<'_>, turns: &Turns, socket: &mut RouteSocket, jobs: &[Job]) -> Result<Duration, AttachError> {
    let failed = |failure| step_error(jobs, failure);
    write_sysctls(target.netns, jobs).map_err(failed)?;
    settings::change(target.netns, jobs, target.deadline).map_err(failed)?;
    let [before, slow, after] = in_order(jobs);
    send(socket, jobs, &before, target.deadline).map_err(failed)?;
    target.moving.done();
    let waited = open_one_by_one(target, turns, socket, jobs, &slow)?;
    send(socket, jobs, &after, target.deadline).map_err(failed)?;
    Ok(waited)
}

/// Everything in the order of its stages: what comes first, links whose opening takes long, and what comes after these. Where there are
/// none, all comes first, in one go.
fn in_order(jobs: &[Job]) -> [Vec<Part<'_>>; 3] {
    let steps = jobs
        .iter()
        .map(|job| (opens_slowly(&job.device().hardware, job.device().child().is_some()), &job.device().plan.steps[..]));
    in_order_of(steps)
}

fn in_order_of<'a>(jobs: impl Iterator<Item = (bool, &'a [Step])>) -> [Vec<Part<'a>>; 3] {
    let (mut slow, mut quick) = (Vec::new(), Vec::new());
    for (position, (is_slow, steps)) in jobs.enumerate() {
        for (stage, step) in staged(steps) {
            let into = if is_slow && stage == Stage::Up { &mut slow } else { &mut quick };
            into.push((position, stage, step));
        }
    }
    // Stable: within a stage the plan's order holds.
    quick.sort_by_key(|(_, stage, _)| *stage);
    let first = if slow.is_empty() { quick.len() } else { quick.partition_point(|(_, stage, _)| *stage <= Stage::Up) };
    let after = quick.split_off(first);
    [quick, slow, after]
}

/// A driver of hardware allocates rings and waits for firmware, hundreds of milliseconds under RTNL. What has none, or was made on top of
/// a device, opens in microseconds.
fn opens_slowly(hardware: &HardwareId, is_child: bool) -> bool {
    !is_child && !matches!(hardware, HardwareId::Virtual { .. })
}

/// Sets links up that take long, each in a turn of its own: in one system call they would hold RTNL for seconds, and neither another pod's
/// move nor the end of this sandbox could come in between.
fn open_one_by_one(
    target: &Target<'_>,
    turns: &Turns,
    socket: &mut RouteSocket,
    jobs: &[Job],
    slow: &[Part<'_>],
) -> Result<Duration, AttachError> {
    let mut waited = Duration::ZERO;
    for part in slow {
        let pace = if target.pace() == Pace::Held { Pace::Held } else { Pace::Opening };
        let asked = Instant::now();
        let turn = turns.take(pace, target.deadline);
        waited += asked.elapsed();
        if let Some(why) = target.why_stop() {
            return Err(AttachError::Stopped { done: jobs.len(), all: jobs.len(), why });
        }
        let opened = send(socket, jobs, std::slice::from_ref(part), target.deadline);
        drop(turn);
        opened.map_err(|failure| step_error(jobs, failure))?;
        crash::point("attach: link up");
    }
    Ok(waited)
}

/// Sends all requests of these parts in one pipeline.
fn send(socket: &mut RouteSocket, jobs: &[Job], work: &[Part<'_>], deadline: Instant) -> Result<(), StepFailure> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::{Address, Route};

    fn steps() -> Vec<Step> {
        let address = Address::permanent([10, 0, 0, 1].into(), 24);
        let route = Route::to("10.1.0.0/24".parse().unwrap());
        vec![Step::Address { address }, Step::Up, Step::Route { route, configured: false }]
    }

    fn stages(parts: &[Part<'_>]) -> Vec<(usize, Stage)> {
        parts.iter().map(|(position, stage, _)| (*position, *stage)).collect()
    }

    #[test]
    fn links_that_open_slowly_do_so_after_all_addresses_and_before_all_routes() {
        let steps = steps();
        let [before, slow, after] = in_order_of([(true, &steps[..]), (false, &steps[..]), (true, &steps[..])].into_iter());
        let addresses = [(0, Stage::Addresses), (1, Stage::Addresses), (2, Stage::Addresses), (1, Stage::Up)];
        assert_eq!(stages(&before), addresses);
        assert_eq!(stages(&slow), [(0, Stage::Up), (2, Stage::Up)]);
        assert_eq!(stages(&after), [(0, Stage::Routes), (1, Stage::Routes), (2, Stage::Routes)]);
    }

    #[test]
    fn where_all_links_open_quickly_everything_goes_at_once() {
        let steps = steps();
        let [all, slow, after] = in_order_of([(false, &steps[..]), (false, &steps[..])].into_iter());
        assert_eq!((all.len(), slow.len(), after.len()), (6, 0, 0));
    }

    #[test]
    fn hardware_opens_slowly_and_nothing_else() {
        let pci = HardwareId::Pci { address: "0000:8a:00.0".to_owned(), port: String::new() };
        let veth = HardwareId::Virtual { kind: "veth".to_owned(), address: None, twin: None };
        assert!(opens_slowly(&pci, false));
        assert!(!opens_slowly(&pci, true) && !opens_slowly(&veth, false));
    }
}
