//! After a start or a reconnect: the ledger says what we meant, the kernel says what is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::kept::Kept;
use super::{Engine, KernelError, locate, look_deadline};
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, Phase};
use crate::names::{PodUid, SandboxId};
use crate::netdev::{Link, link};
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// A sandbox that the runtime lists: pod UID, sandbox id, namespace path.
pub type Listed = (PodUid, SandboxId, Option<PathBuf>);

/// What [`Engine::reconcile`] found that the caller has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Sandboxes whose pods have devices that are not attached there: attach them.
    pub attach: Vec<(PodUid, SandboxId, PathBuf)>,
    /// Sandboxes that the runtime does not know any more: release them.
    pub release: Vec<(PodUid, SandboxId)>,
}

impl Engine {
    /// At start, before anything else: opens the namespaces of attached devices again, so that they are pinned, and the programs of
    /// lent links; notes what is on the host although it is recorded as in a sandbox: that gets its name back. Nothing is moved.
    /// Attachments of before a reboot are void: nothing of them exists.
    pub fn recover(&self) {
        let records = self.ledger.all();
        self.kept
            .tidy(|name| records.iter().any(|record| record.boot_id == self.boot_id && Kept::name(&record.claim.uid) == name));
        for record in records {
            if record.boot_id != self.boot_id {
                tracing::info!(claim = %record.claim, "prepared before a reboot; it counts again when the kubelet prepares it");
                continue;
            }
            if let Err(error) = self.kept.keep(&record) {
                tracing::warn!(claim = %record.claim, %error, "a program of the host's is lost; it can't be given back");
            }
            if let Err(error) = self.recover_claim(&record) {
                tracing::warn!(claim = %record.claim, %error, "its devices could not be looked for; the record stays as it is");
            }
        }
    }

    fn recover_claim(&self, record: &Arc<ClaimRecord>) -> Result<(), KernelError> {
        let outside = link::list(&mut self.host_socket()?, look_deadline())?;
        let mut home: Vec<&DeviceRecord> = Vec::new();
        for device in &record.devices {
            let Some(attachment) = &device.attachment else { continue };
            let (claim, name, sandbox) = (&record.claim, &device.device, &attachment.sandbox);
            let is_inside =
                self.reopen(attachment).is_some_and(|inside| locate::in_pod(device, attachment.index, &inside).is_some());
            if is_inside {
                tracing::debug!(%claim, device = %name, %sandbox, "still in its sandbox");
            } else if device.child().is_some() {
                tracing::warn!(%claim, device = %name, %sandbox, "the link on top of it ended while the agent was away");
                home.push(device);
            } else if locate::find(device, device.host.index, &outside).is_some() {
                tracing::warn!(%claim, device = %name, %sandbox, "it came back to the host while the agent was away");
                home.push(device);
            } else {
                // Perhaps its namespace can't be seen from here. Whoever needs it next looks again.
                tracing::warn!(%claim, device = %name, %sandbox, "neither in its sandbox nor on the host");
            }
        }
        if !home.is_empty() {
            self.note_home(&record.claim.uid, &home);
            self.put_right(record, &home);
        }
        for attachment in record.devices.iter().filter_map(|d| d.attachment.as_ref()) {
            self.unpin_unused(&record.pod.uid, &attachment.sandbox);
        }
        Ok(())
    }

    /// Opens and pins the namespace of an attachment if it still exists; gives the links in it.
    fn reopen(&self, attachment: &Attachment) -> Option<Vec<Link>> {
        let netns = self.seek_pod(attachment)?;
        self.pin(&attachment.sandbox, &netns);
        let listed = RouteSocket::open_in(&netns).and_then(|mut socket| link::list(&mut socket, look_deadline()));
        listed.map_err(|error| tracing::warn!(sandbox = %attachment.sandbox, %error, "its links can't be listed")).ok()
    }

    /// Compares the runtime's sandboxes with the ledger. Changes nothing; a pod that the runtime does not list may have been
    /// prepared just now, so nothing of it is pruned.
    #[must_use]
    pub fn reconcile(&self, sandboxes: &[Listed]) -> Reconciled {
        let known: BTreeSet<&SandboxId> = sandboxes.iter().map(|(_, id, _)| id).collect();
        let mut by_pod: BTreeMap<&PodUid, Vec<&Listed>> = BTreeMap::new();
        for listed in sandboxes {
            by_pod.entry(&listed.0).or_default().push(listed);
        }
        let mut result = Reconciled { attach: Vec::new(), release: Vec::new() };
        result.attach.extend(by_pod.into_iter().filter_map(|(pod, listed)| self.to_attach(pod, &listed)));
        for record in self.current(self.ledger.all()) {
            for attachment in record.devices.iter().filter_map(|d| d.attachment.as_ref()) {
                let gone = (record.pod.uid.clone(), attachment.sandbox.clone());
                if !known.contains(&attachment.sandbox) && !result.release.contains(&gone) {
                    result.release.push(gone);
                }
            }
        }
        result
    }

    /// The sandbox of a pod that lacks devices. A pod that is complete in one sandbox must not lose its devices to another; and
    /// where several are left, `CreateContainer` will tell which one lives.
    fn to_attach(&self, pod: &PodUid, listed: &[&Listed]) -> Option<(PodUid, SandboxId, PathBuf)> {
        let records = self.current(self.ledger.by_pod(pod));
        let is_in = |d: &DeviceRecord, id: &SandboxId| {
            d.phase == Phase::Attached && d.attachment.as_ref().is_some_and(|a| a.sandbox == *id)
        };
        if listed.iter().any(|(_, id, _)| records.iter().flat_map(|r| &r.devices).all(|d| is_in(d, id))) {
            return None;
        }
        let mut alive = listed.iter().filter_map(|(_, id, path)| {
            let path = path.as_ref().filter(|path| Netns::open(path).is_ok())?;
            Some((pod.clone(), id.clone(), path.clone()))
        });
        match (alive.next(), alive.next()) {
            (Some(one), None) => Some(one),
            (Some(_), Some(_)) => {
                tracing::warn!(%pod, "has several sandboxes; its devices go to the one that gets a container");
                None
            }
            (None, _) => None,
        }
    }
}
