//! Release: every device of a sandbox back to the host, in the state prepare left it; and unprepare: back as it was.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::home::{Leftover, leftovers_of};
use super::jobs::Job;
use super::{Engine, LOCK_LIMIT, Observed, Pace, locate, look_deadline, now_unix_ms};
use crate::crash;
use crate::ledger::{Attachment, ClaimRecord, ClaimRef, DeviceRecord, Durability, Phase, Share};
use crate::names::{ClaimUid, PodUid, SandboxId};
use crate::netdev::link;
use crate::netns::Netns;

/// What became of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// It was moved back.
    Moved(Share),
    /// It was on the host already: the kernel returns hardware when a namespace ends.
    AtHome(Share),
    /// It is nowhere: a link without hardware ends with its namespace.
    Gone(Share),
    /// What was made on top of it was deleted, or ended with its namespace. The device itself never left the host.
    Deleted(Share),
    /// It is still in the pod, and why.
    Stuck(Share, String),
}

impl Engine {
    /// Takes back every device of `pod` that is in `sandbox` (or on its way there): cancels a running attach into it, waits for its
    /// roll-back, moves links back to the host under their host names, down, as prepare left them. Nothing is attached to the sandbox any
    /// more from now on, whoever asks. An unknown pod or sandbox gives nothing to do.
    #[must_use]
    pub fn release(&self, pod: &PodUid, sandbox: &SandboxId) -> Vec<Released> {
        self.ended.add(sandbox);
        // Without a limit there is always a guard.
        let _guard = self.pods.lock_cancelling(pod, Some(sandbox), None);
        let records = self.current(self.ledger.by_pod(pod));
        let released =
            self.release_locked(&records, Pace::Background, |d| d.attachment.as_ref().is_some_and(|a| a.sandbox == *sandbox));
        self.unpin_unused(pod, sandbox);
        released
    }

    /// Gives back everything of a claim: releases its devices wherever they are, restores the host state, forgets the claim.
    ///
    /// # Errors
    /// When a device is stuck in a pod, the host can't be looked at, or the record can't be removed; the kubelet asks again.
    pub fn unprepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let Some(record) = self.ledger.get(&claim.uid) else { return Ok(()) };
        let limit = Some(Instant::now() + LOCK_LIMIT);
        let Some(_guard) = self.pods.lock_cancelling(&record.pod.uid, None, limit) else {
            return Err(format!("claim {claim}: something else is still under way for the pod; the kubelet will try again"));
        };
        // It may have changed while we waited.
        let Some(record) = self.ledger.get(&claim.uid) else { return Ok(()) };
        if record.boot_id == self.boot_id {
            self.give_back(&record).map_err(|why| format!("claim {claim}: {why}; the kubelet will try again"))?;
        }
        self.forget(&record).map_err(|e| format!("claim {claim}: {e}"))?;
        self.observe(&record, Observed::Forgotten);
        crash::point("unprepare: removed");
        for attachment in record.devices.iter().filter_map(|d| d.attachment.as_ref()) {
            self.unpin_unused(&record.pod.uid, &attachment.sandbox);
        }
        Ok(())
    }

    fn give_back(&self, record: &Arc<ClaimRecord>) -> Result<(), String> {
        for outcome in self.release_locked(std::slice::from_ref(record), Pace::Background, |d| d.attachment.is_some()) {
            match outcome {
                Released::Stuck(device, why) => return Err(format!("device {device} could not be taken back: {why}")),
                Released::Gone(device) => {
                    tracing::warn!(claim = %record.claim, %device, "the device is gone, there is nothing to give back");
                }
                Released::Moved(_) | Released::AtHome(_) | Released::Deleted(_) => {}
            }
        }
        crash::point("unprepare: released");
        // The index on the host may be another by now.
        let record = self.ledger.get(&record.claim.uid).unwrap_or_else(|| record.clone());
        self.release_leases(&record);
        self.restore_devices(&record)
    }

    /// Undoes an attach that failed, as far as it came; the pod's lock is held.
    pub(super) fn roll_back(&self, pod: &PodUid, jobs: &[Job]) {
        let is_of_it = |d: &DeviceRecord| d.attachment.is_some() && jobs.iter().any(|job| job.device().share() == d.share());
        for outcome in self.release_locked(&self.ledger.by_pod(pod), Pace::Background, is_of_it) {
            match outcome {
                Released::Stuck(device, why) => tracing::error!(%device, %why, "roll-back: the device is still in the pod"),
                Released::Gone(device) => tracing::error!(%device, "roll-back: the device is gone"),
                Released::Moved(_) | Released::AtHome(_) | Released::Deleted(_) => {}
            }
        }
    }

    /// Records of this boot.
    pub(super) fn current(&self, mut records: Vec<Arc<ClaimRecord>>) -> Vec<Arc<ClaimRecord>> {
        records.retain(|record| record.boot_id == self.boot_id);
        records
    }

    /// Takes back the devices that are `wanted` and recorded as in, or on their way to, a sandbox; the pod's lock is held.
    pub(super) fn release_locked(
        &self,
        records: &[Arc<ClaimRecord>],
        pace: Pace,
        wanted: impl Fn(&DeviceRecord) -> bool,
    ) -> Vec<Released> {
        let mut outcomes = Vec::new();
        for record in records {
            let devices: Vec<&DeviceRecord> = record.devices.iter().filter(|d| d.attachment.is_some() && wanted(d)).collect();
            outcomes.extend(self.release_devices(&record.claim.uid, &devices, pace));
        }
        outcomes
    }

    /// Devices of one claim, which may be in one namespace or several.
    fn release_devices(&self, claim: &ClaimUid, devices: &[&DeviceRecord], pace: Pace) -> Vec<Released> {
        let mut outcomes = Vec::new();
        let mut rest = devices.to_vec();
        while let Some(attachment) = rest.first().and_then(|d| d.attachment.clone()) {
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|d| d.attachment.as_ref().is_some_and(|a| a.netns == attachment.netns));
            rest = elsewhere;
            outcomes.extend(self.release_from(claim, &attachment, &here, pace));
        }
        if !outcomes.is_empty() {
            self.observe_claim(claim, &Observed::Released(outcomes.clone()));
        }
        outcomes
    }

    fn release_from(&self, claim: &ClaimUid, attachment: &Attachment, devices: &[&DeviceRecord], pace: Pace) -> Vec<Released> {
        self.change(claim, devices, |device| device.phase = Phase::Releasing);
        crash::point("release: recorded");
        let outcomes = match self.seek_pod(attachment) {
            Some(netns) => {
                self.tell_holder(claim, attachment);
                self.move_back(&netns, devices, &self.leftovers_that_stay(claim, attachment, devices), pace)
            }
            None => self.look_at_home(devices),
        };
        let home: Vec<&DeviceRecord> = devices
            .iter()
            .copied()
            .filter(|d| !outcomes.iter().any(|o| matches!(o, Released::Stuck(share, _) if *share == d.share())))
            .collect();
        self.note_home(claim, &home);
        let by_itself = |d: &DeviceRecord| outcomes.iter().any(|o| matches!(o, Released::AtHome(share) if *share == d.share()));
        let returned: Vec<&DeviceRecord> = devices.iter().copied().filter(|d| by_itself(d)).collect();
        if let Some(record) = self.ledger.get(claim).filter(|_| !returned.is_empty()) {
            self.put_right(&record, &returned);
        }
        outcomes
    }

    /// Devices that are on the host again, with the index they have there now.
    pub(super) fn note_home(&self, claim: &ClaimUid, devices: &[&DeviceRecord]) {
        let links = self.host_socket().and_then(|mut s| Ok(link::list(&mut s, look_deadline())?)).unwrap_or_default();
        self.change(claim, devices, |device| {
            device.phase = Phase::Prepared;
            device.attachment = None;
            device.forget_usable();
            if let Some(found) = locate::find(device, device.host.index, &links) {
                device.host.set_index(found.index);
            }
        });
        crash::point("release: home");
    }

    fn change(&self, claim: &ClaimUid, devices: &[&DeviceRecord], change: impl Fn(&mut DeviceRecord)) {
        let shares: BTreeSet<Share> = devices.iter().map(|d| d.share()).collect();
        let written = self.ledger.update(claim, Durability::Process, |record| {
            for device in record.devices.iter_mut().filter(|d| shares.contains(&d.share())) {
                device.since_unix_ms = now_unix_ms();
                change(device);
            }
        });
        if let Err(error) = written {
            tracing::error!(%claim, %error, "the ledger does not know where devices are; the kernel does");
        }
    }

    /// The sandbox's namespace, if it still exists: the pinned one, or the path if it still leads to the same namespace.
    pub(super) fn open_pod(&self, attachment: &Attachment) -> Option<Arc<Netns>> {
        let pinned = self.pins().get(&attachment.sandbox).cloned();
        let opened = pinned.or_else(|| Netns::open(&attachment.netns_path).ok().map(Arc::new));
        opened.filter(|netns| netns.id() == attachment.netns)
    }

    /// What a device which stays in the namespace brought as well.
    fn leftovers_that_stay(&self, claim: &ClaimUid, attachment: &Attachment, leaving: &[&DeviceRecord]) -> Vec<Leftover> {
        let Some(record) = self.ledger.get(claim) else { return Vec::new() };
        let leaves = |device: &DeviceRecord| leaving.iter().any(|other| other.share() == device.share());
        self.ledger
            .by_pod(&record.pod.uid)
            .iter()
            .flat_map(|r| &r.devices)
            .filter(|d| d.attachment.as_ref().is_some_and(|a| a.netns == attachment.netns) && !leaves(d))
            .flat_map(leftovers_of)
            .collect()
    }
}
