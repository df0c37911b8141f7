//! Carries what happens to devices to the status of claims and to events.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::attach::engine::{LeaseNews, Look, Lost, Observation, Observed, Seen};
use crate::attach::{AttachError, Engine, Released};
use crate::dra::events::{self, Event, Events, EventsConfig, Object, Waiting};
use crate::dra::status::{self, Queue, Source, StatusConfig};
use crate::inventory::HardwareId;
use crate::ledger::{ClaimRecord, ClaimRef, Share};
use crate::names::{ClaimUid, PodUid};

/// How long what was not written yet may take at the end.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Where reports go. Nothing here blocks.
pub(crate) struct Reports {
    status: Queue,
    events: Events,
    /// Devices of which it was said that they are gone.
    gone: Mutex<Devices>,
    /// Devices of which it was said that they are out of sight.
    lost: Mutex<Devices>,
}

/// Devices of claims.
type Devices = BTreeSet<(ClaimUid, Share)>;

fn locked(devices: &Mutex<Devices>) -> MutexGuard<'_, Devices> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reports {
    /// Reports, and the events that wait for a client.
    pub(super) fn new() -> (Arc<Self>, Waiting) {
        let (events, waiting) = Events::new();
        (Arc::new(Self { status: Queue::default(), events, gone: Mutex::default(), lost: Mutex::default() }), waiting)
    }

    /// What the engine tells.
    pub(super) fn observe(&self, observation: &Observation) {
        let record = &observation.record;
        self.status.changed(&record.claim);
        match &observation.what {
            Observed::Prepared | Observed::Attached | Observed::AttachFailed(_) | Observed::Missed | Observed::Rdma(_) => {}
            Observed::Released(outcomes) => outcomes.iter().for_each(|outcome| self.released(record, outcome)),
            Observed::Held(text) => self.events.send(Event::warning(Object::pod(record), "NamespaceHeld", text)),
            Observed::Restored(device, failed) => self.not_restored(record, device, failed),
            Observed::Lease(device, news) => self.lease(record, device, news),
            Observed::Forgotten => locked(&self.gone).retain(|(claim, _)| *claim != record.claim.uid),
        }
    }

    /// The kubelet's own event is on the pod; this one is on the claim.
    pub(super) fn prepare_failed(&self, claim: &ClaimRef, error: &str) {
        self.events.send(Event::warning(Object::claim(claim), "ClaimPrepareFailed", error));
    }

    /// A pod did not get its devices.
    pub(super) fn attach_failed(&self, engine: &Engine, pod: &PodUid, error: &AttachError) {
        let reason = if matches!(error, AttachError::HostNetwork) { "HostNetworkPod" } else { "AttachFailed" };
        self.on_pod(engine, pod, reason, &error.to_string());
    }

    /// A pod got its devices later than when its sandbox was made.
    pub(super) fn attached_late(&self, engine: &Engine, pod: &PodUid, devices: usize) {
        let text = format!(
            "{devices} devices were attached after the pod's sandbox was made: the agent was not connected to the runtime then, or \
             their claim was not prepared yet. Containers that were started before did not see them"
        );
        self.on_pod(engine, pod, "AttachedLate", &text);
    }

    /// Containers of a pod were started without its devices.
    pub(super) fn sandbox_missed(&self, engine: &Engine, pod: &PodUid, why: &str) {
        self.on_pod(engine, pod, "SandboxMissed", why);
    }

    /// Such a pod can't be evicted.
    pub(super) fn not_evicted(&self, record: &ClaimRecord, why: &str) {
        let text = format!("its containers run without its NICs, and it can't be evicted: {why}; delete it");
        self.events.send(Event::warning(Object::pod(record), "NotEvicted", text));
    }

    fn on_pod(&self, engine: &Engine, pod: &PodUid, reason: &'static str, text: &str) {
        if let Some(record) = engine.ledger().by_pod(pod).first() {
            self.events.send(Event::warning(Object::pod(record), reason, text));
        }
    }

    fn released(&self, record: &ClaimRecord, outcome: &Released) {
        match outcome {
            Released::Moved(_) | Released::AtHome(_) | Released::Deleted(_) => {}
            Released::Stuck(device, why) => {
                let text = format!("claim {}, device {device} could not be taken back from the pod: {why}", record.claim);
                self.events.send(Event::warning(Object::pod(record), "DeviceStuck", text));
            }
            // Hardware comes back to the host some time after its namespace ended; unprepare waits for it, and says if it does not.
            Released::Gone(device) if has_hardware(record, device) => {}
            Released::Gone(device) => self.is_gone(record, device),
        }
    }

    /// Said once of each device of a claim.
    fn is_gone(&self, record: &ClaimRecord, device: &Share) {
        if !locked(&self.gone).insert((record.claim.uid.clone(), device.clone())) {
            return;
        }
        let host = record.devices.iter().find(|d| d.share() == *device).map_or("unknown", |d| d.host.name.as_str());
        let text = format!("claim {}: device {device} ({host} on the host) is gone; was it unplugged?", record.claim);
        self.events.send(Event::warning(Object::pod(record), "DeviceGone", &text));
        self.events.send(Event::warning(Object::claim(&record.claim), "DeviceGone", &text));
    }

    /// What is out of sight now: said once of each device, until it is seen again.
    pub(super) fn lost(&self, lost: &[Lost]) {
        let key = |lost: &Lost| (lost.record.claim.uid.clone(), lost.device.clone());
        let known = std::mem::replace(&mut *locked(&self.lost), lost.iter().map(key).collect());
        for Lost { record, device } in lost.iter().filter(|lost| !known.contains(&key(lost))) {
            let text = format!(
                "claim {}, device {device}: it is neither on the host nor in a network namespace that can be found. Something keeps the \
                 pod's namespace alive (look for it with lsns -t net on the node); the kernel returns the device when that ends",
                record.claim
            );
            self.events.send(Event::warning(Object::pod(record), "DeviceLost", &text));
            self.events.send(Event::warning(Object::claim(&record.claim), "DeviceLost", &text));
        }
    }

    fn not_restored(&self, record: &ClaimRecord, device: &Share, failed: &[(String, String)]) {
        let host = record.devices.iter().find(|d| d.share() == *device).map_or("unknown", |d| d.host.name.as_str());
        let failed: Vec<String> = failed.iter().take(16).map(|(what, why)| format!("{what}: {why}")).collect();
        let text = format!("device {device} ({host}) is on the host again, but not all as it was: {}", failed.join("; "));
        self.events.send(Event::warning(Object::claim(&record.claim), "HostStateNotRestored", text));
    }

    /// A device's address by DHCP is another one, or none. That it is there again is in the status.
    fn lease(&self, record: &ClaimRecord, device: &Share, news: &LeaseNews) {
        let (reason, text) = match news {
            LeaseNews::Lost(why) => ("LeaseLost", format!("the address is taken out of the pod: {why}")),
            LeaseNews::Changed(what) => ("LeaseChanged", format!("the DHCP server lent {what}")),
            LeaseNews::Back(_) => return,
        };
        let text = format!("claim {}, device {device}: {text}", record.claim);
        self.events.send(Event::warning(Object::pod(record), reason, &text));
        self.events.send(Event::warning(Object::claim(&record.claim), reason, &text));
    }

    /// An RDMA device in a pod can't be used for longer than usual.
    pub(super) fn rdma_not_usable(&self, engine: &Engine, claim: &ClaimUid, device: &Share, why: &str) {
        if let Some(record) = engine.ledger().get(claim) {
            let text = format!("claim {}, device {device}: its RDMA device can't be used: {why}", record.claim);
            self.events.send(Event::warning(Object::pod(&record), "RdmaNotUsable", text));
        }
    }

    /// What the status of a claim is made from.
    fn look(&self, engine: &Engine, claim: &ClaimUid) -> Option<Look> {
        let look = engine.look(claim)?;
        for (device, _) in look.seen.iter().filter(|(_, seen)| **seen == Seen::Missing) {
            self.is_gone(&look.record, device);
        }
        Some(look)
    }
}

fn has_hardware(record: &ClaimRecord, device: &Share) -> bool {
    record.devices.iter().any(|d| d.share() == *device && !matches!(d.hardware, HardwareId::Virtual { .. }))
}

/// The tasks that write reports.
pub(super) struct Reporting {
    stop: CancellationToken,
    status: JoinHandle<()>,
    events: JoinHandle<()>,
}

impl Reporting {
    /// Starts them; everything that is recorded is written anew.
    pub(super) fn start(client: &kube::Client, shared: &Shared, waiting: Waiting) -> Self {
        let Shared { config, engine, reports, .. } = shared;
        for record in engine.records() {
            reports.status.changed(&record.claim);
        }
        let stop = CancellationToken::new();
        let source: Source = {
            let (engine, reports) = (engine.clone(), reports.clone());
            Arc::new(move |claim| reports.look(&engine, claim))
        };
        let (queue, events) = (reports.status.clone(), reports.events.clone());
        let status = status::run(client.clone(), StatusConfig::new(&config.driver_name), queue, source, events, stop.clone());
        let recorder = EventsConfig::new(&config.driver_name, &config.node_name);
        let events = events::run(client.clone(), recorder, waiting, stop.clone());
        Self { stop, status: tokio::spawn(status), events: tokio::spawn(events) }
    }

    /// Ends them, after a bounded time for what is not written yet.
    pub(super) async fn stop(&mut self) {
        self.stop.cancel();
        let (status, events) = (self.status.abort_handle(), self.events.abort_handle());
        let both = async { tokio::join!(&mut self.status, &mut self.events) };
        if tokio::time::timeout(FLUSH_LIMIT, both).await.is_err() {
            tracing::warn!("the status of some claims is not written; the next start does it");
            status.abort();
            events.abort();
        }
    }
}
