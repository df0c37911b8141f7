//! What the kubelet's calls do: fetch, resolve, prepare; unprepare.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::cdi::Specs;
use crate::dra::resolve::{self, ResolvedDevice};
use crate::dra::{ClaimError, ClaimHandler, PreparedDevice, api};
use crate::ledger::{ClaimRecord, ClaimRef};

/// How long the API server may take: the kubelet gives 45 s for the whole call.
const FETCH_LIMIT: Duration = Duration::from_secs(20);

/// How long prepare waits for the runtime's NRI: what a restart of ours or of the runtime takes. A kubelet (1.37) tries a refused
/// prepare again only after its `syncFrequency`, 60 to 90 s.
const NRI_LIMIT: Duration = Duration::from_secs(5);

pub(super) struct Claims {
    shared: Arc<Shared>,
    client: kube::Client,
    specs: Specs,
}

impl Claims {
    pub(super) fn new(shared: Arc<Shared>, client: kube::Client) -> Self {
        let specs = Specs::new(&shared.config.cdi_dir, &shared.config.driver_name);
        specs.renew(&shared.engine.records());
        Self { shared, client, specs }
    }

    /// A pod must not get as far as a sandbox while the runtime would not ask us about it.
    async fn wait_for_nri(&self, claim: &ClaimRef) -> Result<(), ClaimError> {
        let mut nri = self.shared.nri.subscribe();
        if tokio::time::timeout(NRI_LIMIT, nri.wait_for(|state| state.connected)).await.is_ok() {
            return Ok(());
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
        let shared = self.shared.clone();
        let claim_text = claim.to_string();
        let record = tokio::task::spawn_blocking(move || {
            let wanted = resolve::ResolvedClaim { devices: wanted, ..resolved };
            shared.engine.prepare(&wanted, &pod)
        })
        .await
        .map_err(|e| ClaimError(format!("claim {claim_text}: prepare ended badly: {e}")))?
        .map_err(|e| ClaimError(e.to_string()))?;
        self.specs
            .write(&record.claim, record.devices.iter().map(|d| &d.device))
            .map_err(|e| ClaimError(format!("claim {claim}: {e}")))?;
        devices.extend(answer(&record));
        Ok(devices)
    }

    async fn unprepare_claim(&self, claim: &ClaimRef) -> Result<(), ClaimError> {
        let (shared, wanted) = (self.shared.clone(), claim.clone());
        let done = tokio::task::spawn_blocking(move || shared.engine.unprepare(&wanted)).await;
        self.shared.inventory.rescan();
        match done {
            Ok(Ok(())) => self.specs.remove(&claim.uid).map_err(|e| ClaimError(format!("claim {claim}: {e}"))),
            Ok(Err(error)) => Err(ClaimError(error)),
            Err(panic) => Err(ClaimError(format!("claim {claim}: unprepare ended badly: {panic}"))),
        }
    }
}

impl ClaimHandler for Claims {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        let start = Instant::now();
        let result = self.prepare_claim(&claim).await;
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
        let result = self.unprepare_claim(&claim).await;
        self.shared.metrics.observe_unprepare(start.elapsed(), result.is_ok());
        match &result {
            Ok(()) => tracing::info!(%claim, total = ?start.elapsed(), "unprepared"),
            Err(error) => tracing::error!(%claim, %error, "not unprepared"),
        }
        result
    }
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
        cdi_device_ids: vec![Specs::device(&record.claim.uid, &device.device)],
        share_id: device.share_id.clone(),
    })
}
