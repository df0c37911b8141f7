//! What the ledger is told of an attach, and what it tells the gate.

use std::collections::BTreeSet;
use std::time::Duration;

use super::attach::{AttachTimes, Target};
use super::jobs::Job;
use super::{Engine, KernelError, Observed, now_unix_ms, phase_word};
use crate::crash;
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, Durability, Missed, Phase, StepTime};
use crate::names::{ClaimUid, PodUid, SandboxId};

impl Engine {
    /// Whether every device of the pod is recorded as attached in this sandbox; else what is missing, for people. Looks at the
    /// ledger only: [`Engine::attach`] compares it with the kernel.
    ///
    /// # Errors
    /// One line that names claim, device, phase and the last error.
    pub fn check_attached(&self, pod: &PodUid, sandbox: &SandboxId) -> Result<(), String> {
        for record in self.ledger.by_pod(pod) {
            if record.boot_id != self.boot_id {
                return Err(format!("claim {} was prepared before the node was rebooted", record.claim));
            }
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

    /// Says where each device is about to go, before it goes. Not synced to the disk: after a power cut the boot id is another
    /// and no attachment counts.
    pub(super) fn write_intent(&self, jobs: &[Job], target: &Target<'_>) -> Result<(), KernelError> {
        // What was missed in one sandbox is of no account in the next.
        let elsewhere = |record: &mut ClaimRecord| {
            record.missed.take_if(|missed| missed.sandbox != *target.sandbox);
        };
        self.update_devices(jobs, elsewhere, |job, device| {
            device.phase = Phase::Attaching;
            device.since_unix_ms = now_unix_ms();
            device.attachment = Some(Attachment {
                sandbox: target.sandbox.clone(),
                netns_path: target.path.to_owned(),
                netns: target.netns.id(),
                index: job.index,
            });
            if let (Some(rdma), Some(index)) = (&mut device.rdma, job.rdma) {
                rdma.index = index;
            }
        })
    }

    /// Says that everything is in place.
    pub(super) fn write_attached(&self, jobs: &[Job], times: &AttachTimes) -> Result<(), KernelError> {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let configure = us(times.configure);
        self.update_devices(
            jobs,
            |_| {},
            |job, device| {
                device.phase = Phase::Attached;
                device.since_unix_ms = now_unix_ms();
                device.last_error = None;
                device.times.retain(|t| ["capture", "lease", "down"].contains(&t.step.as_str()));
                if let Some((_, time)) = times.moves.iter().find(|(share, _)| *share == job.device().share()) {
                    let step = if device.child().is_some() { "create" } else { "move" };
                    device.times.push(StepTime { step: step.to_owned(), micros: us(*time) });
                }
                if let Some((_, time)) = times.rdma.iter().find(|(share, _)| *share == job.device().share()) {
                    device.times.push(StepTime { step: "rdma".to_owned(), micros: us(*time) });
                }
                device.times.push(StepTime { step: "configure".to_owned(), micros: configure });
            },
        )
    }

    /// One write for each claim.
    fn update_devices(
        &self,
        jobs: &[Job],
        of_claim: impl Fn(&mut ClaimRecord),
        change: impl Fn(&Job, &mut DeviceRecord),
    ) -> Result<(), KernelError> {
        let claims: BTreeSet<&ClaimUid> = jobs.iter().map(|job| &job.claim).collect();
        for claim in claims {
            self.ledger.update(claim, Durability::Process, |record| {
                of_claim(record);
                for job in jobs.iter().filter(|job| job.claim == *claim) {
                    for device in record.devices.iter_mut().filter(|d| d.share() == job.device().share()) {
                        change(job, device);
                    }
                }
            })?;
            crash::point("attach: recorded");
        }
        Ok(())
    }

    /// Records that containers of the pod run in this sandbox without the pod's devices, until the pod gets them in another one.
    pub fn note_missed(&self, pod: &PodUid, missed: &Missed) {
        for record in self.ledger.by_pod(pod) {
            let noted = self.ledger.update(&record.claim.uid, Durability::Process, |record| record.missed = Some(missed.clone()));
            if let Err(why) = noted {
                tracing::warn!(claim = %record.claim, %why, "the ledger does not know that containers run without its devices");
            }
        }
        self.observe_pod(pod, &Observed::Missed);
    }

    /// What failed last, for `dranic status` and the gate.
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
}
