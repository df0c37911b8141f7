//! What the kubelet's calls do: fetch, resolve, prepare; unprepare.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedRwLockWriteGuard, RwLock};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::cdi::Specs;
use super::metadata::Metadata;
use crate::dra::resolve::{self, ResolvedClaim, ResolvedDevice};
use crate::dra::{ClaimError, ClaimHandler, PreparedDevice, api, peer};
use crate::ledger::{ClaimRecord, ClaimRef, PodRef};

/// How long the API server may take: the kubelet gives 45 s for the whole call.
const FETCH_LIMIT: Duration = Duration::from_secs(20);

/// How long prepare waits for the runtime's NRI: what a restart of ours or of the runtime takes. A kubelet (1.37) tries a refused
/// prepare again only after its `syncFrequency`, 60 to 90 s.
const NRI_LIMIT: Duration = Duration::from_secs(5);

/// While a device is waited for, it is looked at that often, beside each change of the ledger.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Who does what the kubelet asks for.
#[derive(Debug)]
pub(super) enum Mode {
    /// This agent.
    Own,
    /// The one that takes over; by its DRA socket.
    Successor(PathBuf),
    /// Another one, which can't be asked yet.
    Nobody,
}

pub(super) struct Claims {
    shared: Arc<Shared>,
    mode: Arc<RwLock<Mode>>,
    client: kube::Client,
    specs: Arc<Specs>,
    metadata: Arc<Metadata>,
    /// No call may wait any longer.
    stop: CancellationToken,
}

impl Claims {
    pub(super) fn new(
        shared: Arc<Shared>,
        client: kube::Client,
        (specs, metadata): (Arc<Specs>, Arc<Metadata>),
        stop: CancellationToken,
    ) -> Self {
        Self { shared, client, specs, metadata, mode: Arc::new(RwLock::new(Mode::Own)), stop }
    }

    /// Waits for the calls that run, and lets later ones wait until this is dropped.
    pub(super) async fn pause(&self) -> OwnedRwLockWriteGuard<Mode> {
        self.mode.clone().write_owned().await
    }

    /// A pod must not get as far as a sandbox while the runtime would not ask us about it.
    async fn wait_for_nri(&self, claim: &ClaimRef) -> Result<(), ClaimError> {
        if !self.shared.config.nri {
            return Ok(());
        }
        let mut nri = self.shared.nri.subscribe();
        tokio::select! {
            biased;
            Ok(_) = nri.wait_for(|state| state.connected) => return Ok(()),
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(NRI_LIMIT) => {}
        }
        Err(ClaimError(format!(
            "claim {claim}: not prepared, since the container runtime's NRI is not connected ({}): {}; is NRI on in the \
             runtime's configuration? The kubelet will try again",
            self.shared.config.nri_socket.display(),
            nri.borrow().detail
        )))
    }

    async fn prepare_claim(&self, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        self.wait_for_nri(claim).await?;
        let fetched = api::fetch_claim(&self.client, &claim.namespace, &claim.name, tokio::time::Instant::now() + FETCH_LIMIT)
            .await
            .map_err(|e| ClaimError(format!("claim {claim}: {e}")))?;
        let resolved = resolve::resolve(claim, &fetched.claim, &fetched.raw, &self.shared.config.driver_name)
            .map_err(|e| ClaimError(e.to_string()))?;
        let Some(pod) = resolved.pod.clone() else {
            return Err(ClaimError(format!("claim {claim} is not reserved for a pod yet; the kubelet will try again")));
        };
        // Admin access looks at a device that may be in use: nothing of it is touched.
        let (watched, wanted): (Vec<ResolvedDevice>, Vec<ResolvedDevice>) =
            resolved.devices.iter().cloned().partition(|d| d.admin_access);
        let mut devices: Vec<PreparedDevice> = watched.iter().map(untouched).collect();
        if wanted.is_empty() {
            return Ok(devices);
        }
        let wanted = ResolvedClaim { devices: wanted, ..resolved };
        let record = self.prepare_when_free(Arc::new(wanted), Arc::new(pod)).await?;
        self.tell_runtime(&record).await.map_err(|e| ClaimError(format!("claim {claim}: {e}")))?;
        devices.extend(answer(&record));
        Ok(devices)
    }

    /// Writes what the runtime reads when it makes a container. Where containers can't be given what they need, nothing stays prepared:
    /// the kubelet asks again, and until then the devices are free.
    async fn tell_runtime(&self, record: &Arc<ClaimRecord>) -> Result<(), String> {
        if let Err(why) = self.specs.check(record) {
            let is_in_use = record.devices.iter().any(|device| device.attachment.is_some());
            if !is_in_use && let Err(undo) = self.unprepare_claim(&record.claim).await {
                return Err(format!("{why}; and taking all back failed: {undo}"));
            }
            return Err(why);
        }
        self.metadata.write(record)?;
        self.specs.write(record)
    }

    /// Prepares; a device that another pod still has is waited for, since that pod is mostly about to end: one that was deleted by
    /// force is gone from the API, and its devices are allocated anew, before its containers have ended.
    async fn prepare_when_free(&self, claim: Arc<ResolvedClaim>, pod: Arc<PodRef>) -> Result<Arc<ClaimRecord>, ClaimError> {
        let end = tokio::time::Instant::now() + self.shared.config.wait_for_device;
        let mut writes = self.shared.engine.ledger().subscribe();
        let mut told = false;
        loop {
            writes.mark_unchanged();
            let (engine, wanted, of) = (self.shared.engine.clone(), claim.clone(), pod.clone());
            let error = match tokio::task::spawn_blocking(move || engine.prepare(&wanted, &of)).await {
                Ok(Ok(record)) => return Ok(record),
                Ok(Err(error)) => error,
                Err(panic) => return Err(ClaimError(format!("claim {}: prepare ended badly: {panic}", claim.claim))),
            };
            if !error.reason.is_held() {
                return Err(ClaimError(error.to_string()));
            }
            if !std::mem::replace(&mut told, true) {
                tracing::info!(claim = %claim.claim, limit = ?self.shared.config.wait_for_device, why = %error, "waiting");
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(ClaimError(error.to_string())),
                () = tokio::time::sleep_until(end) => return Err(ClaimError(error.to_string())),
                Ok(()) = writes.changed() => {}
                // A reservation goes without a write.
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        }
    }

    async fn unprepare_claim(&self, claim: &ClaimRef) -> Result<(), ClaimError> {
        let (shared, wanted) = (self.shared.clone(), claim.clone());
        let done = tokio::task::spawn_blocking(move || shared.engine.unprepare(&wanted)).await;
        self.shared.inventory.rescan();
        match done {
            Ok(Ok(())) => {
                let removed = self.specs.remove(&claim.uid).and_then(|()| self.metadata.remove(&claim.uid));
                removed.map_err(|e| ClaimError(format!("claim {claim}: {e}")))
            }
            Ok(Err(error)) => Err(ClaimError(error)),
            Err(panic) => Err(ClaimError(format!("claim {claim}: unprepare ended badly: {panic}"))),
        }
    }
}

impl ClaimHandler for Claims {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        let start = Instant::now();
        let mut result = match &*self.mode.read().await {
            Mode::Own => self.prepare_claim(&claim).await,
            Mode::Successor(socket) => return peer::prepare(socket, &claim).await,
            Mode::Nobody => return Err(nobody(&claim)),
        };
        // One that waited for something was cut short, because this agent is to end: perhaps another one has more time.
        if result.is_err()
            && self.stop.is_cancelled()
            && let Mode::Successor(socket) = &*self.mode.read().await
        {
            result = peer::prepare(socket, &claim).await;
        }
        self.shared.metrics.observe_prepare(start.elapsed(), result.is_ok());
        match &result {
            Ok(devices) => tracing::info!(%claim, devices = devices.len(), total = ?start.elapsed(), "prepared"),
            Err(error) => {
                tracing::warn!(%claim, %error, "not prepared");
                self.shared.reports.prepare_failed(&claim, &error.0);
            }
        }
        result
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), ClaimError> {
        let start = Instant::now();
        let result = match &*self.mode.read().await {
            Mode::Own => self.unprepare_claim(&claim).await,
            Mode::Successor(socket) => return peer::unprepare(socket, &claim).await,
            Mode::Nobody => return Err(nobody(&claim)),
        };
        self.shared.metrics.observe_unprepare(start.elapsed(), result.is_ok());
        match &result {
            Ok(()) => tracing::info!(%claim, total = ?start.elapsed(), "unprepared"),
            Err(error) => tracing::error!(%claim, %error, "not unprepared"),
        }
        result
    }
}

fn nobody(claim: &ClaimRef) -> ClaimError {
    ClaimError(format!("claim {claim}: another agent takes this node over and is not ready yet; the kubelet will try again"))
}

fn untouched(device: &ResolvedDevice) -> PreparedDevice {
    PreparedDevice {
        request_names: vec![device.request.clone()],
        pool: device.pool.clone(),
        device: device.device.clone(),
        cdi_device_ids: Vec::new(),
        share_id: device.share_id.clone(),
    }
}

fn answer(record: &ClaimRecord) -> impl Iterator<Item = PreparedDevice> {
    record.devices.iter().map(|device| PreparedDevice {
        request_names: vec![device.request.clone()],
        pool: device.pool.clone(),
        device: device.device.clone(),
        cdi_device_ids: vec![Specs::device(&record.claim.uid, &device.share())],
        share_id: device.share_id.clone(),
    })
}
