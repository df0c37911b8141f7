//! Settings of `ethtool`, in the pod: over a socket of another family, before the links go up.

use std::time::Instant;

use super::configure::StepFailure;
use super::jobs::Job;
use crate::attach::Step;
use crate::netdev::ethtool::{Change, EthtoolSocket};
use crate::netns::Netns;

/// Changes what the plans say, in their order. A switch that the kernel does not set is a failure; a number that the driver rounds
/// is logged.
pub(super) fn change(netns: &Netns, jobs: &[Job], deadline: Instant) -> Result<(), StepFailure> {
    let mut work = jobs.iter().enumerate().flat_map(|(position, job)| {
        let steps = job.device().plan.steps.iter();
        steps.filter_map(move |step| if let Step::Ethtool { change } = step { Some((position, step, change)) } else { None })
    });
    let Some(first) = work.next() else { return Ok(()) };
    let failure = |position: usize, step: &Step, why: String| StepFailure { job: position, step: step.describe(), why };
    let mut socket = match EthtoolSocket::open_in(netns, deadline) {
        Ok(Some(socket)) => socket,
        Ok(None) => return Err(failure(first.0, first.1, "the kernel has no ethtool over netlink in this namespace".to_owned())),
        Err(error) => return Err(failure(first.0, first.1, error.to_string())),
    };
    for (position, step, change) in std::iter::once(first).chain(work) {
        let done = one(&mut socket, &jobs[position], change, deadline);
        done.map_err(|why| failure(position, step, why))?;
    }
    Ok(())
}

fn one(socket: &mut EthtoolSocket, job: &Job, change: &Change, deadline: Instant) -> Result<(), String> {
    let other = socket.change(job.index, change, deadline).map_err(|error| error.to_string())?;
    if other.is_empty() {
        return Ok(());
    }
    let other = Change { group: change.group, set: other.into_iter().collect() };
    if change.group.is_exact() {
        return Err(format!("the kernel took the request and left {other}; perhaps another setting or the MTU is in the way"));
    }
    tracing::info!(device = %job.device().device, wanted = %change, is = %other, "the driver chose another value");
    Ok(())
}
