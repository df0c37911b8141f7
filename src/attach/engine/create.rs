//! Links that are made in the pod on top of devices that stay on the host.

use std::time::Instant;

use super::attach::{AttachError, AttachTimes, Target};
use super::jobs::Job;
use super::{Engine, look_deadline};
use crate::crash;
use crate::netdev::child;
use crate::netlink::{NetlinkError, RouteSocket};

/// How many are made in one turn: the kernel needs some tenths of a millisecond for each, so all of them take as long as one move, and
/// one turn.
const TOGETHER: usize = 32;

impl Engine {
    /// Makes every link that is one on top of a device, many in one call.
    pub(super) fn create_all(
        &self,
        target: &Target<'_>,
        host: &mut RouteSocket,
        jobs: &mut [Job],
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let all = jobs.len();
        let wanted: Vec<usize> = (0..all).filter(|position| jobs[*position].device().child().is_some()).collect();
        for part in wanted.chunks(TOGETHER) {
            let turn = self.turns.take(target.pace(), target.deadline);
            if let Some(why) = target.why_stop() {
                return Err(AttachError::Stopped { done: jobs.iter().filter(|j| j.inside).count(), all, why });
            }
            let start = Instant::now();
            let creates = part.iter().filter_map(|position| jobs[*position].create(target.netns));
            let results = host.pipeline(creates.map(|create| child::create_request(&create)).collect(), look_deadline());
            crash::point("attach: created");
            drop(turn);
            let each = start.elapsed() / u32::try_from(part.len()).unwrap_or(u32::MAX);
            times.moves.extend(part.iter().map(|position| (jobs[*position].device().share(), each)));
            finish(jobs, part, results)?;
        }
        Ok(())
    }
}

/// Notes which were made, and fails with the first that was not.
fn finish(jobs: &mut [Job], part: &[usize], results: Vec<Result<(), NetlinkError>>) -> Result<(), AttachError> {
    let mut failed = None;
    for (position, result) in part.iter().zip(results) {
        let job = &mut jobs[*position];
        match result {
            Ok(()) => job.inside = true,
            Err(e) if e.errno() == Some(nix::libc::ENODEV) => failed = failed.or(Some(job.gone())),
            Err(error) => failed = failed.or_else(|| Some(refused(job, &error))),
        }
    }
    failed.map_or(Ok(()), Err)
}

fn refused(job: &Job, error: &NetlinkError) -> AttachError {
    let kind = job.device().child().map_or("", child::Child::kind);
    let host = &job.device().host.name;
    let hint = match error.errno() {
        Some(nix::libc::EOPNOTSUPP) => format!(" (has the node's kernel the module {kind}?)"),
        Some(nix::libc::EBUSY) => format!(" (is {host} the port of a bridge or bond, or has it links of another kind on top?)"),
        Some(nix::libc::EEXIST) if kind == "vlan" => format!(" (has {host} this VLAN already?)"),
        _ => String::new(),
    };
    let step = format!("making a {kind} link on {host} in the pod as {}", job.device().plan.pod_link);
    job.failed(step, format!("{error}{hint}"))
}
