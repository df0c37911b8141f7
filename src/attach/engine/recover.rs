//! After a start or a reconnect: the ledger says what we meant, the kernel says what is.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::Engine;
use crate::ledger::{ClaimRecord, Phase};
use crate::names::{PodUid, SandboxId};
use crate::netns::Netns;

/// What [`Engine::reconcile`] found that the caller has to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Sandboxes whose pods have devices that are not attached there: attach them.
    pub attach: Vec<(PodUid, SandboxId, PathBuf)>,
    /// Sandboxes that the runtime does not know any more: release them.
    pub release: Vec<(PodUid, SandboxId)>,
}

impl Engine {
    /// At start, before anything else: opens the namespaces of attached devices again, so that they are pinned, and repairs what
    /// came back while nobody looked. Attachments of before a reboot are void: nothing of them exists.
    pub fn recover(&self) {
        for record in self.ledger.all() {
            if record.boot_id != self.boot_id {
                tracing::info!(claim = %record.claim, "prepared before a reboot; it counts again when the kubelet prepares it");
                continue;
            }
            self.recover_claim(&record);
        }
    }

    fn recover_claim(&self, record: &Arc<ClaimRecord>) {
        for device in &record.devices {
            let Some(attachment) = &device.attachment else { continue };
            match Netns::open(&attachment.netns_path) {
                Ok(netns) if netns.id() == attachment.netns => {
                    self.pins().insert(attachment.sandbox.clone(), Arc::new(netns));
                }
                _ => {
                    let outcome = self.release(&record.pod.uid, &attachment.sandbox);
                    tracing::warn!(
                        claim = %record.claim, device = %device.device, sandbox = %attachment.sandbox, ?outcome,
                        "the sandbox's namespace ended while the agent was away"
                    );
                }
            }
        }
    }

    /// Compares the runtime's sandboxes (pod UID, sandbox id, namespace path) with the ledger. Pure but for reading the ledger; a
    /// pod that the runtime does not list may have been prepared just now, so nothing of it is pruned.
    #[must_use]
    pub fn reconcile(&self, sandboxes: &[(PodUid, SandboxId, Option<PathBuf>)]) -> Reconciled {
        let known: BTreeMap<&SandboxId, &PodUid> = sandboxes.iter().map(|(pod, id, _)| (id, pod)).collect();
        let mut result = Reconciled::default();
        for (pod, id, path) in sandboxes {
            let records = self.ledger.by_pod(pod);
            let missing = records
                .iter()
                .flat_map(|r| &r.devices)
                .any(|d| d.phase != Phase::Attached || d.attachment.as_ref().is_none_or(|a| a.sandbox != *id));
            if let (true, Some(path)) = (missing, path)
                && Netns::open(path).is_ok()
            {
                result.attach.push((pod.clone(), id.clone(), path.clone()));
            }
        }
        for record in self.ledger.all().iter().filter(|r| r.boot_id == self.boot_id) {
            for attachment in record.devices.iter().filter_map(|d| d.attachment.as_ref()) {
                let gone = (record.pod.uid.clone(), attachment.sandbox.clone());
                if !known.contains_key(&attachment.sandbox) && !result.release.contains(&gone) {
                    result.release.push(gone);
                }
            }
        }
        result
    }
}
