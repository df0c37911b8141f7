//! Attach: all devices of a pod into its sandbox, all or nothing.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::configure::{self, StepFailure};
use super::{Engine, KernelError, Observed, PodGuard, locate, look_deadline, now_unix_ms, phase_word};
use crate::attach::Step;
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, Durability, Phase, StepTime};
use crate::names::{ClaimUid, DeviceName, PodUid, SandboxId};
use crate::netdev::{HostState, Link, link, moves};
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// Why a sandbox did not get its devices. Those that were moved are back, unless the text says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The pod has no network namespace of its own.
    #[error("the pod uses the host's network, so there is no namespace to put its NICs into; remove hostNetwork or the claim")]
    HostNetwork,
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

/// How long an attach took.
#[derive(Debug, Clone, Default)]
pub struct AttachTimes {
    /// Device and the time of its move.
    pub moves: Vec<(DeviceName, Duration)>,
    /// Everything inside the pod, for all devices.
    pub configure: Duration,
    /// From the call to its end.
    pub total: Duration,
}

/// One device on its way in.
pub(super) struct Job {
    pub(super) claim: ClaimUid,
    pub(super) claim_text: String,
    pub(super) device: DeviceRecord,
    /// Index in the pod.
    pub(super) index: u32,
    /// It is in the pod by now.
    pub(super) inside: bool,
}

impl Engine {
    /// Puts every device of the pod's claims into the sandbox's namespace and configures it. A sandbox that has everything
    /// is left alone; what a crash left half way is taken back first. At `deadline`, or when a release waits, everything is taken
    /// back.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach(&self, pod: &PodUid, sandbox: &SandboxId, path: &Path, deadline: Instant) -> Result<AttachTimes, AttachError> {
        let start = Instant::now();
        let guard = self.pods.lock(pod);
        let netns = self.pin(sandbox, path)?;
        if netns.id() == self.host.id() {
            self.unpin(sandbox);
            return Err(AttachError::HostNetwork);
        }
        let records = self.ledger.by_pod(pod);
        if is_complete(&records, sandbox, &netns) {
            return Ok(AttachTimes::default());
        }
        self.bring_home_strays(&records, sandbox);
        let mut times = AttachTimes::default();
        let outcome = self.attach_locked(&guard, pod, sandbox, path, &netns, deadline, &mut times);
        times.total = start.elapsed();
        match &outcome {
            Ok(()) => self.observe_pod(pod, &Observed::Attached),
            Err(error) => self.note_error(pod, &error.to_string()),
        }
        outcome.map(|()| times)
    }

    /// Whether every device of the pod is attached in this sandbox; else what is missing, for people.
    ///
    /// # Errors
    /// One line that names claim, device, phase and the last error.
    pub fn check_attached(&self, pod: &PodUid, sandbox: &SandboxId) -> Result<(), String> {
        for record in self.ledger.by_pod(pod) {
            for device in &record.devices {
                let here = device.attachment.as_ref().is_some_and(|a| a.sandbox == *sandbox);
                if device.phase == Phase::Attached && here {
                    continue;
                }
                let why = device.last_error.as_ref().map(|e| format!("; last error: {e}")).unwrap_or_default();
                let state = phase_word(device.phase);
                return Err(format!("claim {}, device {} is {state}{why}", record.claim, device.device));
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "one call site; the arguments are the sandbox")]
    fn attach_locked(
        &self,
        guard: &PodGuard<'_>,
        pod: &PodUid,
        sandbox: &SandboxId,
        path: &Path,
        netns: &Netns,
        deadline: Instant,
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let mut inside = RouteSocket::open_in(netns).map_err(|e| kernel("opening a netlink socket in the pod", e))?;
        let links = link::list(&mut inside, look_deadline()).map_err(|e| kernel("listing the pod's links", e))?;
        let mut jobs = jobs(&self.ledger.by_pod(pod), &links, netns)?;
        self.write_intent(&jobs, sandbox, path, netns)?;
        let moved = self.move_all(guard, &mut jobs, netns, deadline, times);
        let configured = moved.and_then(|()| {
            let start = Instant::now();
            let done = configure::run(netns, &mut inside, &jobs, deadline);
            times.configure = start.elapsed();
            done.map_err(|failure| step_error(&jobs, failure))
        });
        let verified = configured.and_then(|()| verify(&mut inside, &jobs));
        if let Err(error) = verified {
            self.roll_back(pod, sandbox);
            return Err(error);
        }
        self.write_attached(&jobs, times).map_err(|e| kernel("writing the ledger", e))
    }

    /// Says in the ledger where each device is about to go, before it goes. Not synced to the disk: after a power cut the boot id
    /// is another and no attachment counts.
    fn write_intent(&self, jobs: &[Job], sandbox: &SandboxId, path: &Path, netns: &Netns) -> Result<(), AttachError> {
        self.update_devices(jobs, |job, device| {
            device.phase = Phase::Attaching;
            device.since_unix_ms = now_unix_ms();
            device.attachment =
                Some(Attachment { sandbox: sandbox.clone(), netns_path: path.to_owned(), netns: netns.id(), index: job.index });
        })
        .map_err(|e| kernel("writing the ledger", e))
    }

    fn write_attached(&self, jobs: &[Job], times: &AttachTimes) -> Result<(), KernelError> {
        let configure = u64::try_from(times.configure.as_micros()).unwrap_or(u64::MAX);
        self.update_devices(jobs, |job, device| {
            device.phase = Phase::Attached;
            device.since_unix_ms = now_unix_ms();
            device.last_error = None;
            device.times.retain(|t| t.step == "capture" || t.step == "down");
            if let Some((_, time)) = times.moves.iter().find(|(name, _)| *name == job.device.device) {
                let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
                device.times.push(StepTime { step: "move".to_owned(), micros });
            }
            device.times.push(StepTime { step: "configure".to_owned(), micros: configure });
        })
    }

    /// One write for each claim.
    fn update_devices(&self, jobs: &[Job], change: impl Fn(&Job, &mut DeviceRecord)) -> Result<(), KernelError> {
        let claims: BTreeSet<&ClaimUid> = jobs.iter().map(|job| &job.claim).collect();
        for claim in claims {
            self.ledger.update(claim, Durability::Process, |record| {
                for job in jobs.iter().filter(|job| job.claim == *claim) {
                    for device in record.devices.iter_mut().filter(|d| d.device == job.device.device) {
                        change(job, device);
                    }
                }
            })?;
        }
        Ok(())
    }

    /// Moves what is not inside yet, one message each on one socket. The kernel holds RTNL and waits for RCU in each of them, so
    /// several threads would only wait for each other (`docs/architecture.md` has the measurement).
    fn move_all(
        &self,
        guard: &PodGuard<'_>,
        jobs: &mut [Job],
        netns: &Netns,
        deadline: Instant,
        times: &mut AttachTimes,
    ) -> Result<(), AttachError> {
        let mut host = RouteSocket::open_in(&self.host).map_err(|e| kernel("opening a netlink socket on the host", e))?;
        let all = jobs.len();
        for position in 0..all {
            let why = if guard.is_cancelled() {
                Some("the sandbox was stopped")
            } else if Instant::now() >= deadline {
                Some("the runtime's time for this request ran out")
            } else {
                None
            };
            if let Some(why) = why {
                return Err(AttachError::Stopped { done: jobs.iter().filter(|j| j.inside).count(), all, why });
            }
            let start = Instant::now();
            let job = &mut jobs[position];
            let result = moves::send(&mut host, &[move_in(job, netns)], look_deadline()).pop();
            times.moves.push((job.device.device.clone(), start.elapsed()));
            match result {
                Some(Ok(())) => job.inside = true,
                Some(Err(e)) if e.errno() == Some(nix::libc::ENODEV) => {
                    return Err(AttachError::Gone {
                        claim: job.claim_text.clone(),
                        device: job.device.device.clone(),
                        name: job.device.host.name.clone(),
                    });
                }
                // The link may be inside all the same, under its old name: the roll-back looks.
                other => {
                    let why = other.and_then(Result::err).map_or_else(|| "no answer".to_owned(), |e| e.to_string());
                    return Err(AttachError::Step {
                        claim: job.claim_text.clone(),
                        device: job.device.device.clone(),
                        step: format!("moving {} into the pod as {}", job.device.host.name, job.device.plan.pod_link),
                        why,
                    });
                }
            }
        }
        Ok(())
    }

    pub(super) fn note_error(&self, pod: &PodUid, error: &str) {
        for record in self.ledger.by_pod(pod) {
            let noted = self.ledger.update(&record.claim.uid, Durability::Process, |record| {
                for device in &mut record.devices {
                    device.last_error = Some(error.to_owned());
                }
            });
            if let Err(why) = noted {
                tracing::warn!(claim = %record.claim, %why, "the ledger does not know why the attach failed");
            }
        }
        self.observe_pod(pod, &Observed::AttachFailed(error.to_owned()));
    }

    /// Opens the sandbox's namespace and keeps it open until [`Engine::unpin`].
    pub(super) fn pin(&self, sandbox: &SandboxId, path: &Path) -> Result<Arc<Netns>, AttachError> {
        if let Some(netns) = self.pins().get(sandbox) {
            return Ok(netns.clone());
        }
        let netns = Arc::new(Netns::open(path).map_err(|e| kernel("opening the pod's network namespace", e))?);
        self.pins().insert(sandbox.clone(), netns.clone());
        Ok(netns)
    }

    pub(super) fn unpin(&self, sandbox: &SandboxId) {
        self.pins().remove(sandbox);
    }
}

fn is_complete(records: &[Arc<ClaimRecord>], sandbox: &SandboxId, netns: &Netns) -> bool {
    records.iter().flat_map(|r| &r.devices).all(|device| {
        device.phase == Phase::Attached
            && device.attachment.as_ref().is_some_and(|a| a.sandbox == *sandbox && a.netns == netns.id())
    })
}

/// The work, with names checked and indices chosen, before anything is touched. Every device of it is on the host.
fn jobs(records: &[Arc<ClaimRecord>], links: &[Link], netns: &Netns) -> Result<Vec<Job>, AttachError> {
    let mut occupied = moves::Occupied::by(links);
    let mut jobs = Vec::new();
    for record in records {
        for device in record.devices.iter().filter(|d| d.phase != Phase::Attached) {
            let job = Job {
                claim: record.claim.uid.clone(),
                claim_text: record.claim.to_string(),
                device: device.clone(),
                index: moves::pick_index(&occupied.indices, device.host.index),
                inside: false,
            };
            let mut link = link_of(&device.host);
            moves::check(&link, &move_in(&job, netns), &occupied).map_err(|source| AttachError::Refused {
                claim: job.claim_text.clone(),
                device: device.device.clone(),
                source,
            })?;
            device.plan.pod_link.as_str().clone_into(&mut link.name);
            link.index = job.index;
            occupied.add(&link);
            jobs.push(job);
        }
    }
    Ok(jobs)
}

/// The link as prepare saw it, as far as a move minds.
fn link_of(host: &HostState) -> Link {
    Link {
        index: host.index,
        name: host.name.clone(),
        alt_names: host.alt_names.clone(),
        min_mtu: host.min_mtu,
        max_mtu: host.max_mtu,
        address: host.address.clone(),
        ..Link::default()
    }
}

fn move_in<'a>(job: &Job, netns: &'a Netns) -> moves::Move<'a> {
    let (mtu, address) = job
        .device
        .plan
        .steps
        .iter()
        .find_map(|step| match step {
            Step::Move { mtu, address, .. } => Some((*mtu, address.clone())),
            _ => None,
        })
        .unwrap_or_default();
    moves::Move {
        index: job.device.host.index,
        target: netns.as_fd(),
        new_index: job.index,
        name: job.device.plan.pod_link.as_str().to_owned(),
        mtu,
        address,
    }
}

/// The move is not atomic, so look: every link is there under its name, up, and is the device it should be.
fn verify(socket: &mut RouteSocket, jobs: &[Job]) -> Result<(), AttachError> {
    let links = link::list(socket, look_deadline()).map_err(|e| kernel("listing the pod's links", e))?;
    for job in jobs {
        let wrong = match links.iter().find(|l| l.index == job.index) {
            None => Some("it is not in the pod".to_owned()),
            Some(l) if l.name != job.device.plan.pod_link.as_str() => Some(format!("it is called {} there", l.name)),
            Some(l) if !locate::is_device(&job.device, l) => Some("another link has its index".to_owned()),
            Some(l) if !l.is_up() => Some("it is down".to_owned()),
            Some(_) => None,
        };
        if let Some(why) = wrong {
            let step = "looking for it in the pod after the move".to_owned();
            return Err(AttachError::Step { claim: job.claim_text.clone(), device: job.device.device.clone(), step, why });
        }
    }
    Ok(())
}

fn step_error(jobs: &[Job], failure: StepFailure) -> AttachError {
    let StepFailure { job, step, why } = failure;
    let job = &jobs[job];
    AttachError::Step { claim: job.claim_text.clone(), device: job.device.device.clone(), step, why }
}

fn kernel(step: &'static str, source: impl Into<KernelError>) -> AttachError {
    AttachError::Kernel { step, source: source.into() }
}
