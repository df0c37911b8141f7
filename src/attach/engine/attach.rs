//! Attach: all devices of a pod into its sandbox, all or nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::configure::{self, StepFailure};
use super::jobs::{self, Job};
use super::rdma_in::Lanes;
use super::there::There;
use super::turns::Moving;
use super::{Engine, KernelError, Observed, Pace, PodGuard, Released, look_deadline};
use crate::crash;
use crate::ledger::{ClaimRecord, DeviceRecord, Phase, Share};
use crate::names::{DeviceName, PodUid, SandboxId};
use crate::netdev::moves;
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// Why a sandbox did not get its devices. Those that were moved are back, unless the text says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The pod has no network namespace of its own.
    #[error("the pod uses the host's network, so there is no namespace to put its NICs into; remove hostNetwork or the claim")]
    HostNetwork,
    /// Killed while it made the sandbox, the runtime goes on with it and does not know its namespaces.
    #[error(
        "the runtime does not know the network namespace of this sandbox (it was killed while it made it), and not exactly one in \
         {} has the pod's address; delete the pod",
        dir.display()
    )]
    NamespaceLost {
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// The sandbox is being taken down, or is.
    #[error("the sandbox was stopped; a new one gets the devices")]
    Ended,
    /// The thread that worked on it is gone.
    #[error("the attach ended badly (see the agent's log); the kubelet will try again")]
    Broken,
    /// What is recorded is of before a reboot.
    #[error("claim {claim} was prepared before the node was rebooted; the kubelet has to prepare it again")]
    EarlierBoot {
        /// Which claim.
        claim: String,
    },
    /// The kernel would not carry the move out whole: a name is taken in the pod, or a value does not fit.
    #[error("claim {claim}, device {device}: {source}; nothing was moved. The claim's configuration can set interface.name")]
    Refused {
        /// Which claim.
        claim: String,
        /// Which device.
        device: DeviceName,
        /// Why.
        source: moves::Refusal,
    },
    /// The link is neither on the host nor in the pod.
    #[error("claim {claim}, device {device}: its link ({name} on the host) is gone; was it unplugged? See: dranic status")]
    Gone {
        /// Which claim.
        claim: String,
        /// Which device.
        device: DeviceName,
        /// Its name on the host.
        name: String,
    },
    /// It gets its address by DHCP, and has none.
    #[error("claim {claim}, device {device}: {why}; nothing was moved, and the kubelet will try again")]
    NoLease {
        /// Which claim.
        claim: String,
        /// Which device.
        device: DeviceName,
        /// Why.
        why: String,
    },
    /// A step failed.
    #[error("claim {claim}, device {device}: {step} failed: {why}; every device of the pod was taken back")]
    Step {
        /// Which claim.
        claim: String,
        /// Which device.
        device: DeviceName,
        /// What was tried, with its values.
        step: String,
        /// Why it failed.
        why: String,
    },
    /// By what such attaches took before, there is not time enough.
    #[error(
        "attaching {devices} devices takes about {} ms by what it took before, and {} ms are left of the runtime's time for this \
         request; nothing was moved. A longer plugin_request_timeout in the runtime's NRI configuration, or --on-overrun=defer, gives it \
         more",
        needs.as_millis(),
        left.as_millis()
    )]
    NoTime {
        /// How many.
        devices: usize,
        /// The forecast.
        needs: Duration,
        /// Until the answer is due.
        left: Duration,
    },
    /// The budget ran out, or the sandbox is being stopped.
    #[error("{done} of {all} devices were moved when {why}; every device of the pod was taken back, the kubelet will try again")]
    Stopped {
        /// How many were moved.
        done: usize,
        /// How many there are.
        all: usize,
        /// What stopped it.
        why: &'static str,
    },
    /// The kernel or the ledger refused.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: KernelError,
    },
}

impl AttachError {
    /// Whether trying again in the same sandbox can't help.
    #[must_use]
    pub const fn is_final(&self) -> bool {
        matches!(self, Self::HostNetwork | Self::NamespaceLost { .. } | Self::EarlierBoot { .. } | Self::Ended)
    }
}

/// What is to be attached where.
#[derive(Debug, Clone)]
pub struct Attach<'a> {
    /// Everything of this pod.
    pub pod: &'a PodUid,
    /// Into this sandbox.
    pub sandbox: &'a SandboxId,
    /// Path of its network namespace, by which it is found again.
    pub path: &'a Path,
    /// Its network namespace, where somebody brought it; else what is at the path.
    pub netns: Option<Arc<Netns>>,
    /// Everything is taken back then.
    pub deadline: Instant,
    /// Until then the runtime waits for it, and every pod of the node with the runtime.
    pub held_until: Instant,
}

/// How long an attach took.
#[derive(Debug, Clone, Default)]
pub struct AttachTimes {
    /// How many devices were not in place.
    pub devices: usize,
    /// Device and the time of its move, or of making a link on top of it.
    pub moves: Vec<(Share, Duration)>,
    /// Device and the time of its RDMA device's move. They go beside everything else, up to `verify`.
    pub rdma: Vec<(Share, Duration)>,
    /// Opening the namespace and the sockets.
    pub open: Duration,
    /// Looking at what is in the pod, and checking the moves against it.
    pub look: Duration,
    /// Recording what is about to happen.
    pub intent: Duration,
    /// Everything inside the pod, for all devices.
    pub configure: Duration,
    /// Waiting for moves of RDMA devices after that.
    pub rdma_rest: Duration,
    /// Looking at the result.
    pub verify: Duration,
    /// Recording it.
    pub record: Duration,
    /// From the call to its end.
    pub total: Duration,
    /// What was foretold, where such devices were attached before.
    pub forecast: Option<Duration>,
}

/// Laps.
struct Clock(Instant);

impl Default for Clock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock {
    /// Time since the last lap.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

/// Where the devices go.
pub(super) struct Target<'a> {
    pub(super) sandbox: &'a SandboxId,
    pub(super) path: &'a Path,
    pub(super) netns: &'a Arc<Netns>,
    pub(super) deadline: Instant,
    held_until: Instant,
    guard: &'a PodGuard<'a>,
    pub(super) moving: Moving<'a>,
}

impl Engine {
    /// [`Engine::attach_as`] into what is at `path`, while the runtime waits.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(&self, pod: &PodUid, sandbox: &SandboxId, path: &Path, deadline: Instant) -> Result<AttachTimes, AttachError> {
        self.attach_as(&Attach { pod, sandbox, path, netns: None, deadline, held_until: deadline })
    }

    /// Puts every device of the pod's claims into the sandbox's namespace and configures it. A sandbox that has everything, by the
    /// ledger and by the kernel, is left alone; what is elsewhere, or half way, is taken back first. At `deadline`, or when a
    /// release waits, everything is taken back. A pod without claims has nothing to attach.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach_as(&self, attach: &Attach<'_>) -> Result<AttachTimes, AttachError> {
        let start = Instant::now();
        let &Attach { pod, sandbox, deadline, .. } = attach;
        let Some(guard) = self.pods.lock(pod, deadline) else {
            let why = "the runtime's time for this request ran out, since something else was under way for the pod";
            return Err(AttachError::Stopped { done: 0, all: device_count(&self.ledger.by_pod(pod)), why });
        };
        if self.ledger.by_pod(pod).is_empty() {
            return Ok(AttachTimes::default());
        }
        // Looked at with the lock held: no release of it can be over and no attach have begun.
        if self.ended.has(sandbox) {
            return Err(AttachError::Ended);
        }
        let mut times = AttachTimes::default();
        let outcome = self.attach_locked(&guard, attach, &mut times);
        self.learn(pod, &times, outcome.is_ok());
        match outcome {
            Ok(()) if times.devices == 0 => {}
            Ok(()) => self.observe_pod(pod, &Observed::Attached),
            Err(error) => {
                self.note_error(pod, &error.to_string());
                // A Stop may never come; nothing is in there any more that would need the namespace.
                self.unpin_unused(pod, sandbox);
                return Err(error);
            }
        }
        Ok(AttachTimes { total: start.elapsed(), ..times })
    }

    fn attach_locked(&self, guard: &PodGuard<'_>, attach: &Attach<'_>, times: &mut AttachTimes) -> Result<(), AttachError> {
        let &Attach { pod, sandbox, path, deadline, held_until, .. } = attach;
        let mut clock = Clock::default();
        let records = self.ledger.by_pod(pod);
        if let Some(old) = records.iter().find(|record| record.boot_id != self.boot_id) {
            return Err(AttachError::EarlierBoot { claim: old.claim.to_string() });
        }
        let netns = match &attach.netns {
            Some(netns) => netns.clone(),
            None => Arc::new(Netns::open(path).map_err(|e| kernel("opening the pod's network namespace", e))?),
        };
        if netns.id() == self.host.id() {
            return Err(AttachError::HostNetwork);
        }
        let moving = self.turns.moving();
        let target = Target { sandbox, path, netns: &netns, deadline, held_until, guard, moving };
        let mut inside = RouteSocket::open_in(&netns).map_err(|e| kernel("opening a netlink socket in the pod", e))?;
        times.open = clock.lap();
        let devices = || records.iter().flat_map(|r| &r.devices);
        let look = |inside: &mut RouteSocket| There::look_by(inside, &netns, devices());
        let looking = |e| kernel("listing the pod's links and RDMA devices", e);
        let mut there = look(&mut inside).map_err(looking)?;
        if devices().all(|d| target.holds(d, &there)) {
            self.pin(sandbox, &netns);
            return Ok(());
        }
        if self.bring_home_strays(&records, &target, &there)? {
            there = look(&mut inside).map_err(looking)?;
        }
        self.pin(sandbox, &netns);
        crash::point("attach: pinned");
        let mut host = RouteSocket::open_in(&self.host).map_err(|e| kernel("opening a netlink socket on the host", e))?;
        let mut jobs = jobs::jobs(&self.ledger.by_pod(pod), &target, &there, &mut host)?;
        jobs.iter().try_for_each(Job::check_lease)?;
        self.find_rdma(&mut jobs, &there)?;
        times.devices = jobs.len();
        times.look = clock.lap();
        times.forecast = self.foretell(&jobs, &target)?;
        self.carry_out(&target, &mut jobs, &mut host, &mut inside, times).inspect_err(|_| self.roll_back(pod, &jobs))
    }

    /// Takes back what is recorded as in a sandbox, or on its way, and is not in place in this one. Gives whether there was any.
    fn bring_home_strays(&self, records: &[Arc<ClaimRecord>], target: &Target<'_>, there: &There) -> Result<bool, AttachError> {
        let is_stray = |device: &DeviceRecord| device.attachment.is_some() && !target.holds(device, there);
        let mut any = false;
        for record in records {
            for outcome in self.release_locked(std::slice::from_ref(record), target.pace(), is_stray) {
                any = true;
                tracing::info!(claim = %record.claim, ?outcome, "taken back before a new attach");
                if let Released::Stuck(device, why) = outcome {
                    let step = "taking it back from where it was before".to_owned();
                    return Err(AttachError::Step { claim: record.claim.to_string(), device: device.device, step, why });
                }
            }
        }
        Ok(any)
    }

    /// From the intent to the record of success. After an error the caller rolls back.
    fn carry_out(
        &self,
        target: &Target<'_>,
        jobs: &mut [Job],
        host: &mut RouteSocket,
        inside: &mut RouteSocket,
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let ledger_error = |e| kernel("writing the ledger", e);
        let mut clock = Clock::default();
        self.write_intent(jobs, target).map_err(ledger_error)?;
        times.intent = clock.lap();
        self.carry_in(target, host, inside, jobs, times)?;
        clock.lap();
        self.verify_rdma(target, jobs)?;
        jobs::verify(inside, jobs)?;
        crash::point("attach: verified");
        times.verify = clock.lap();
        self.write_attached(jobs, times).map_err(ledger_error)?;
        times.record = clock.lap();
        Ok(())
    }

    /// Links and what they get, and beside that, each after its link, RDMA devices. All of it has ended when this returns.
    fn carry_in(
        &self,
        target: &Target<'_>,
        host: &mut RouteSocket,
        inside: &mut RouteSocket,
        jobs: &mut [Job],
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let lanes = self.open_lanes(scope, target, &stop, jobs)?;
            let carried = self.carry_links(target, (host, inside), jobs, times, &lanes);
            stop.store(carried.is_err(), Ordering::Relaxed);
            let mut clock = Clock::default();
            let rdma = lanes.finish(jobs, times);
            times.rdma_rest = clock.lap();
            carried.and(rdma)
        })
    }

    fn carry_links(
        &self,
        target: &Target<'_>,
        (host, inside): (&mut RouteSocket, &mut RouteSocket),
        jobs: &mut [Job],
        times: &mut AttachTimes,
        lanes: &Lanes<'_>,
    ) -> Result<(), AttachError> {
        for position in (0..jobs.len()).filter(|position| !jobs[*position].device().has_link()) {
            self.order_rdma(lanes, jobs, position);
        }
        if self.remake_all(target, (host, inside), jobs, times)? {
            self.write_intent(jobs, target).map_err(|e| kernel("writing the ledger", e))?;
        }
        self.move_all(target, host, jobs, times, lanes)?;
        self.create_all(target, host, jobs, times)?;
        let mut clock = Clock::default();
        let waited = configure::run(target, &self.turns, inside, jobs)?;
        crash::point("attach: configured");
        times.configure = clock.lap().saturating_sub(waited);
        Ok(())
    }

    /// Moves every link, one message each on one socket. The kernel holds RTNL and waits for RCU in each of them, so several threads
    /// would only wait for each other (`docs/architecture.md` has the measurement).
    fn move_all(
        &self,
        target: &Target<'_>,
        host: &mut RouteSocket,
        jobs: &mut [Job],
        times: &mut AttachTimes,
        lanes: &Lanes<'_>,
    ) -> Result<(), AttachError> {
        let all = jobs.len();
        let moves = |job: &Job| job.device().has_link() && !job.inside && job.device().child().is_none();
        for position in (0..all).filter(|position| moves(&jobs[*position])).collect::<Vec<_>>() {
            let turn = self.turns.take(target.pace(), target.deadline);
            if let Some(why) = target.why_stop() {
                return Err(AttachError::Stopped { done: jobs.iter().filter(|j| j.inside).count(), all, why });
            }
            let start = Instant::now();
            let job = &mut jobs[position];
            let result = moves::send(host, &[job.move_in(target.netns)], look_deadline()).pop();
            crash::point("attach: moved");
            times.moves.push((job.device().share(), start.elapsed()));
            drop(turn);
            match result {
                Some(Ok(())) => {
                    job.inside = true;
                    self.order_rdma(lanes, jobs, position);
                }
                Some(Err(e)) if e.errno() == Some(nix::libc::ENODEV) => return Err(job.gone()),
                // The link may be inside all the same, under its old name: the roll-back looks.
                other => {
                    let why = other.and_then(Result::err).map_or_else(|| "no answer".to_owned(), |e| e.to_string());
                    let step = format!("moving {} into the pod as {}", job.device().host.name, job.device().plan.pod_link);
                    return Err(job.failed(step, why));
                }
            }
        }
        Ok(())
    }
}

impl Target<'_> {
    /// Whether the device is attached in this sandbox by the ledger, and by the kernel, among what is `there`.
    pub(super) fn holds(&self, device: &DeviceRecord, there: &There) -> bool {
        device.phase == Phase::Attached
            && device
                .attachment
                .as_ref()
                .is_some_and(|a| a.sandbox == *self.sandbox && a.netns == self.netns.id() && there.holds(device, a.index))
    }

    /// How much of a hurry there is, now.
    pub(super) fn pace(&self) -> Pace {
        if Instant::now() < self.held_until { Pace::Held } else { Pace::Background }
    }

    /// What is left of the runtime's time, where everything has to be done in it.
    pub(super) fn budget(&self) -> Option<Duration> {
        (self.held_until >= self.deadline).then(|| self.deadline.saturating_duration_since(Instant::now()))
    }

    pub(super) fn why_stop(&self) -> Option<&'static str> {
        // The deadline first: a runtime that was told of it stops the sandbox at once, and that is not the cause.
        if Instant::now() >= self.deadline {
            return Some(if self.budget().is_some() {
                "the runtime's time for this request ran out"
            } else {
                "its time ran out"
            });
        }
        self.guard.is_cancelled(self.sandbox).then_some("the sandbox was stopped")
    }
}

fn device_count(records: &[Arc<ClaimRecord>]) -> usize {
    records.iter().map(|record| record.devices.len()).sum()
}

pub(super) fn step_error(jobs: &[Job], failure: StepFailure) -> AttachError {
    let StepFailure { job, step, why } = failure;
    jobs[job].failed(step, why)
}

pub(super) fn kernel(step: &'static str, source: impl Into<KernelError>) -> AttachError {
    AttachError::Kernel { step, source: source.into() }
}
