//! Release: every device of a sandbox back to the host, in the state prepare left it; and unprepare: back as it was.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::{Engine, KernelError, Observed, locate, look_deadline, now_unix_ms};
use crate::attach::Step;
use crate::attach::plan::Undo;
use crate::ledger::{Attachment, ClaimRecord, ClaimRef, DeviceRecord, Durability, Phase};
use crate::names::{ClaimUid, DeviceName, PodUid, SandboxId};
use crate::netdev::{Link, Rule, link, moves, rule};
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// What became of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// It was moved back.
    Moved(DeviceName),
    /// It was on the host already: the kernel returns hardware when a namespace ends.
    AtHome(DeviceName),
    /// It is nowhere: a link without hardware ends with its namespace.
    Gone(DeviceName),
    /// It is still in the pod, and why.
    Stuck(DeviceName, String),
}

impl Engine {
    /// Takes back every device of `pod` that is in `sandbox` (or on its way there): cancels a running attach, waits for its
    /// roll-back, moves links back to the host under their host names, down, as prepare left them. An unknown pod or sandbox
    /// gives nothing to do.
    #[must_use]
    pub fn release(&self, pod: &PodUid, sandbox: &SandboxId) -> Vec<Released> {
        let _guard = self.pods.lock_cancelling(pod);
        let released = self.release_locked(&self.ledger.by_pod(pod), |a| a.sandbox == *sandbox);
        self.unpin(sandbox);
        released
    }

    /// Gives back everything of a claim: releases its devices wherever they are, restores the host state, forgets the claim.
    ///
    /// # Errors
    /// When a device is stuck in a pod, or the record can't be removed; the kubelet asks again.
    pub fn unprepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let Some(record) = self.ledger.get(&claim.uid) else { return Ok(()) };
        let _guard = self.pods.lock_cancelling(&record.pod.uid);
        // It may have changed while we waited.
        let Some(record) = self.ledger.get(&claim.uid) else { return Ok(()) };
        if record.boot_id != self.boot_id {
            self.forget(&record).map_err(|e| format!("claim {claim}: {e}"))?;
            self.observe(&record, Observed::Forgotten);
            return Ok(());
        }
        for outcome in self.release_locked(std::slice::from_ref(&record), |_| true) {
            match outcome {
                Released::Stuck(device, why) => {
                    return Err(format!(
                        "claim {claim}: device {device} could not be taken back: {why}; the kubelet will try again"
                    ));
                }
                Released::Gone(device) => tracing::warn!(%claim, %device, "the device is gone, there is nothing to give back"),
                Released::Moved(_) | Released::AtHome(_) => {}
            }
        }
        self.restore_devices(&record);
        self.unpin_unused(&record);
        self.forget(&record).map_err(|e| format!("claim {claim}: {e}"))?;
        self.observe(&record, Observed::Forgotten);
        Ok(())
    }

    /// Undoes an attach that failed; the pod's lock is held.
    pub(super) fn roll_back(&self, pod: &PodUid, sandbox: &SandboxId) {
        for outcome in self.release_locked(&self.ledger.by_pod(pod), |a| a.sandbox == *sandbox) {
            match outcome {
                Released::Stuck(device, why) => tracing::error!(%device, %why, "roll-back: the device is still in the pod"),
                Released::Gone(device) => tracing::error!(%device, "roll-back: the device is gone"),
                Released::Moved(_) | Released::AtHome(_) => {}
            }
        }
    }

    /// Takes back what is neither on the host nor completely attached in `sandbox`; the pod's lock is held.
    pub(super) fn bring_home_strays(&self, records: &[Arc<ClaimRecord>], sandbox: &SandboxId) {
        let attached_here: BTreeSet<&DeviceName> = records
            .iter()
            .flat_map(|r| &r.devices)
            .filter(|d| d.phase == Phase::Attached && d.attachment.as_ref().is_some_and(|a| a.sandbox == *sandbox))
            .map(|d| &d.device)
            .collect();
        for record in records {
            for device in record.devices.iter().filter(|d| d.attachment.is_some() && !attached_here.contains(&d.device)) {
                let outcome = self.release_devices(&record.claim.uid, &[device]);
                tracing::info!(claim = %record.claim, device = %device.device, ?outcome, "taken back before a new attach");
            }
        }
    }

    fn release_locked(&self, records: &[Arc<ClaimRecord>], wanted: impl Fn(&Attachment) -> bool) -> Vec<Released> {
        let mut outcomes = Vec::new();
        for record in records {
            let devices: Vec<&DeviceRecord> =
                record.devices.iter().filter(|d| d.attachment.as_ref().is_some_and(&wanted)).collect();
            outcomes.extend(self.release_devices(&record.claim.uid, &devices));
        }
        outcomes
    }

    /// Devices of one claim, which may be in one namespace or several.
    fn release_devices(&self, claim: &ClaimUid, devices: &[&DeviceRecord]) -> Vec<Released> {
        let mut outcomes = Vec::new();
        let mut rest = devices.to_vec();
        while let Some(attachment) = rest.first().and_then(|d| d.attachment.clone()) {
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                rest.into_iter().partition(|d| d.attachment.as_ref().is_some_and(|a| a.netns == attachment.netns));
            rest = elsewhere;
            outcomes.extend(self.release_from(claim, &attachment, &here));
        }
        if !outcomes.is_empty() {
            self.observe_claim(claim, &Observed::Released(outcomes.clone()));
        }
        outcomes
    }

    fn release_from(&self, claim: &ClaimUid, attachment: &Attachment, devices: &[&DeviceRecord]) -> Vec<Released> {
        self.change(claim, devices, |device| device.phase = Phase::Releasing);
        let outcomes = match self.open_pod(attachment) {
            Some(netns) => self.move_back(&netns, devices, &self.rules_that_stay(claim, attachment, devices)),
            None => self.look_at_home(devices),
        };
        let home: Vec<&DeviceRecord> = devices
            .iter()
            .copied()
            .filter(|d| !outcomes.iter().any(|o| matches!(o, Released::Stuck(name, _) if *name == d.device)))
            .collect();
        self.note_home(claim, &home);
        outcomes
    }

    /// Devices that are on the host again, with the index they have there now.
    fn note_home(&self, claim: &ClaimUid, devices: &[&DeviceRecord]) {
        let links = self.host_socket().and_then(|mut s| Ok(link::list(&mut s, look_deadline())?)).unwrap_or_default();
        self.change(claim, devices, |device| {
            device.phase = Phase::Prepared;
            device.attachment = None;
            if let Some(found) = locate::find(device, device.host.index, &links) {
                device.host.index = found.index;
            }
        });
    }

    fn change(&self, claim: &ClaimUid, devices: &[&DeviceRecord], change: impl Fn(&mut DeviceRecord)) {
        let names: BTreeSet<&DeviceName> = devices.iter().map(|d| &d.device).collect();
        let written = self.ledger.update(claim, Durability::Process, |record| {
            for device in record.devices.iter_mut().filter(|d| names.contains(&d.device)) {
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

    /// Rules that a device which stays in the namespace brought as well.
    fn rules_that_stay(&self, claim: &ClaimUid, attachment: &Attachment, leaving: &[&DeviceRecord]) -> Vec<Rule> {
        let Some(record) = self.ledger.get(claim) else { return Vec::new() };
        let leaves = |device: &DeviceRecord| leaving.iter().any(|other| other.device == device.device);
        self.ledger
            .by_pod(&record.pod.uid)
            .iter()
            .flat_map(|r| &r.devices)
            .filter(|d| d.attachment.as_ref().is_some_and(|a| a.netns == attachment.netns) && !leaves(d))
            .flat_map(rules_of)
            .collect()
    }

    fn move_back(&self, netns: &Netns, devices: &[&DeviceRecord], stay: &[Rule]) -> Vec<Released> {
        match self.both_sides(netns) {
            Ok((mut pod, inside, outside)) => {
                delete_rules(&mut pod, devices, stay);
                let mut home = Home::new(&outside);
                devices.iter().map(|device| self.move_one_back(&mut pod, device, &inside, &mut home)).collect()
            }
            Err(error) => devices.iter().map(|d| Released::Stuck(d.device.clone(), error.to_string())).collect(),
        }
    }

    fn both_sides(&self, netns: &Netns) -> Result<(RouteSocket, Vec<Link>, Vec<Link>), KernelError> {
        let mut pod = RouteSocket::open_in(netns)?;
        let inside = link::list(&mut pod, look_deadline())?;
        let outside = link::list(&mut self.host_socket()?, look_deadline())?;
        Ok((pod, inside, outside))
    }

    fn move_one_back(&self, pod: &mut RouteSocket, device: &DeviceRecord, inside: &[Link], home: &mut Home<'_>) -> Released {
        let index = device.attachment.as_ref().map_or(0, |a| a.index);
        let Some(found) = locate::find(device, index, inside) else {
            return self.at_home_or_gone(device, home.links);
        };
        let name = home.name_for(device);
        let back = moves::Move {
            index: found.index,
            target: self.host.as_fd(),
            new_index: home.index_for(device),
            name,
            mtu: (found.mtu != device.host.mtu).then_some(device.host.mtu),
            address: if found.address == device.host.address { None } else { device.host.address.clone() },
        };
        let result = moves::send(pod, std::slice::from_ref(&back), look_deadline()).pop();
        let Some(Err(error)) = result else { return Released::Moved(device.device.clone()) };
        // Not atomic: it may be back all the same; what the message could not set, the restore will.
        match link::by_index(pod, found.index, look_deadline()) {
            Ok(None) => {
                tracing::warn!(device = %device.device, %error, "the link came back, but not with everything set");
                Released::Moved(device.device.clone())
            }
            _ => Released::Stuck(device.device.clone(), error.to_string()),
        }
    }

    fn look_at_home(&self, devices: &[&DeviceRecord]) -> Vec<Released> {
        let links = self.host_socket().and_then(|mut s| Ok(link::list(&mut s, look_deadline())?));
        match links {
            Ok(links) => devices.iter().map(|device| self.at_home_or_gone(device, &links)).collect(),
            Err(error) => devices.iter().map(|d| Released::Stuck(d.device.clone(), error.to_string())).collect(),
        }
    }

    fn at_home_or_gone(&self, device: &DeviceRecord, links: &[Link]) -> Released {
        match locate::find(device, device.host.index, links) {
            Some(_) => Released::AtHome(device.device.clone()),
            None => Released::Gone(device.device.clone()),
        }
    }

    fn unpin_unused(&self, record: &ClaimRecord) {
        let others: BTreeSet<SandboxId> = self
            .ledger
            .by_pod(&record.pod.uid)
            .iter()
            .filter(|r| r.claim.uid != record.claim.uid)
            .flat_map(|r| r.devices.iter().filter_map(|d| d.attachment.as_ref().map(|a| a.sandbox.clone())))
            .collect();
        for attachment in record.devices.iter().filter_map(|d| d.attachment.as_ref()) {
            if !others.contains(&attachment.sandbox) {
                self.unpin(&attachment.sandbox);
            }
        }
    }
}

/// Names and indices on the host while links come back to it.
struct Home<'a> {
    links: &'a [Link],
    indices: BTreeSet<u32>,
    names: BTreeSet<String>,
}

impl<'a> Home<'a> {
    fn new(links: &'a [Link]) -> Self {
        let names = links.iter().flat_map(|l| std::iter::once(&l.name).chain(&l.alt_names)).cloned().collect();
        Self { links, indices: links.iter().map(|l| l.index).collect(), names }
    }

    fn index_for(&mut self, device: &DeviceRecord) -> u32 {
        let index = moves::pick_index(&self.indices, device.host.index);
        self.indices.insert(index);
        index
    }

    /// The host's name for it, or, when another link has that, one that no link has: the restore says so and tries again.
    fn name_for(&mut self, device: &DeviceRecord) -> String {
        let mut name = device.host.name.clone();
        let mut n = 0;
        while self.names.contains(&name) {
            name = format!("dranic{n}");
            n += 1;
        }
        self.names.insert(name.clone());
        name
    }
}

fn rules_of(device: &DeviceRecord) -> Vec<Rule> {
    let undo = device.plan.steps.iter().rev().map(Step::undo);
    undo.filter_map(|undo| match undo {
        Undo::DeleteRule { rule } => Some(rule),
        Undo::MoveBack | Undo::WithMove => None,
    })
    .collect()
}

/// Rules stay in a namespace when a link leaves it.
fn delete_rules(pod: &mut RouteSocket, devices: &[&DeviceRecord], stay: &[Rule]) {
    let rules = devices.iter().flat_map(|device| rules_of(device)).filter(|rule| !stay.contains(rule));
    let requests = rules.map(|rule| rule::delete_request(&rule)).collect();
    // One that is not there (the attach did not get so far) is what is wanted.
    drop(pod.pipeline(requests, look_deadline()));
}
