//! Attaches under way, one for each sandbox: whoever wants one that runs already joins it.
//!
//! Several ask for the same one: the runtime's hook for the sandbox, those for its containers, the guard in a container, the look after
//! a reconnect. None of them owns it: one that goes away leaves it running, and what it moves is in the ledger.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use super::reports::Reports;
use crate::attach::{Attach, AttachError, AttachTimes, Engine};
use crate::names::{PodUid, SandboxId};
use crate::netns::Netns;
use crate::telemetry::Metrics;

/// Longest an attach may go on that nobody of the runtime waits for.
pub(super) const BACKGROUND_LIMIT: Duration = Duration::from_secs(60);

/// What is to be attached where.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) pod: PodUid,
    pub(super) sandbox: SandboxId,
    /// Path of its network namespace.
    pub(super) path: PathBuf,
    /// The namespace itself, where somebody brought it.
    pub(super) netns: Option<Arc<Netns>>,
    /// Everything is taken back then.
    pub(super) deadline: Instant,
    /// Until then the runtime waits for it.
    pub(super) held_until: Instant,
}

/// How an attach ended.
pub(super) type Outcome = Result<(), Arc<AttachError>>;

/// An attach that was begun or joined.
#[derive(Debug)]
pub(super) struct Attaching(watch::Receiver<Option<Outcome>>);

impl Attaching {
    /// Waits for its end.
    pub(super) async fn done(mut self) -> Outcome {
        match self.0.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Ok(())),
            // Its thread is gone: it panicked, or the agent ends. The next one looks at the kernel.
            Err(_) => Err(Arc::new(AttachError::Broken)),
        }
    }
}

/// Begins attaches, and knows those under way.
pub(crate) struct Attacher {
    engine: Arc<Engine>,
    metrics: Arc<Metrics>,
    reports: Arc<Reports>,
    background: TaskTracker,
    running: Mutex<HashMap<SandboxId, watch::Receiver<Option<Outcome>>>>,
    /// Sandboxes that the runtime asked about when it made them.
    announced: Mutex<HashSet<SandboxId>>,
}

impl Attacher {
    pub(super) fn new(engine: Arc<Engine>, metrics: Arc<Metrics>, reports: Arc<Reports>, background: TaskTracker) -> Arc<Self> {
        Arc::new(Self { engine, metrics, reports, background, running: Mutex::default(), announced: Mutex::default() })
    }

    /// Begins the attach, or joins the one into the same sandbox that runs.
    pub(super) fn attach(self: &Arc<Self>, wanted: Wanted) -> Attaching {
        let mut running = self.running();
        if let Some(receiver) = running.get(&wanted.sandbox) {
            return Attaching(receiver.clone());
        }
        let (sender, receiver) = watch::channel(None);
        running.insert(wanted.sandbox.clone(), receiver.clone());
        drop(running);
        let this = self.clone();
        self.background.spawn_blocking(move || {
            let entry = Entry(&this, &wanted.sandbox);
            let outcome = this.work(&wanted);
            // First, so that who asks after this answer begins another one.
            drop(entry);
            sender.send_replace(Some(outcome));
        });
        Attaching(receiver)
    }

    /// The attach into this sandbox, if one is under way.
    pub(super) fn running_in(&self, sandbox: &SandboxId) -> Option<Attaching> {
        self.running().get(sandbox).cloned().map(Attaching)
    }

    /// The runtime asks about a sandbox that it makes: what is attached to it is not late.
    pub(super) fn announce(&self, sandbox: &SandboxId) {
        self.announced().insert(sandbox.clone());
    }

    /// The sandbox ends.
    pub(super) fn forget(&self, sandbox: &SandboxId) {
        self.announced().remove(sandbox);
    }

    /// Forgets sandboxes that the runtime has not any more: it does not tell the end of those it made before it started again.
    pub(super) fn keep(&self, known: &HashSet<SandboxId>) {
        self.announced().retain(|sandbox| known.contains(sandbox));
    }

    fn work(&self, wanted: &Wanted) -> Outcome {
        let &Wanted { ref pod, ref sandbox, ref path, ref netns, deadline, held_until } = wanted;
        let start = Instant::now();
        let result = self.engine.attach_as(&Attach { pod, sandbox, path, netns: netns.clone(), deadline, held_until });
        match &result {
            Ok(times) if times.devices == 0 => {}
            Ok(times) => {
                self.metrics.observe_attach(times.total, true);
                self.metrics.observe_forecast(times.forecast, times.total);
                log_attached(pod, sandbox, times);
                if !self.announced().contains(sandbox) {
                    tracing::warn!(%pod, %sandbox, devices = times.devices, "attached late: its sandbox was missed");
                    self.reports.attached_late(&self.engine, pod, times.devices);
                }
            }
            Err(error) => {
                self.metrics.observe_attach(start.elapsed(), false);
                tracing::warn!(%pod, %sandbox, %error, "not attached");
                self.reports.attach_failed(&self.engine, pod, error);
            }
        }
        result.map(drop).map_err(Arc::new)
    }

    fn announced(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<SandboxId, watch::Receiver<Option<Outcome>>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attach in the list; it goes when the work ends, in whatever way.
struct Entry<'a>(&'a Attacher, &'a SandboxId);

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.0.running().remove(self.1);
    }
}

/// Where the time went, in microseconds: what an operator asks first when pods start slowly.
fn log_attached(pod: &PodUid, sandbox: &SandboxId, times: &AttachTimes) {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    tracing::info!(
        %pod,
        %sandbox,
        devices = times.devices,
        forecast_ms = times.forecast.map(|forecast| us(forecast) / 1000),
        total_us = us(times.total),
        open_us = us(times.open),
        look_us = us(times.look),
        intent_us = us(times.intent),
        moves_us = us(times.moves.iter().map(|(_, time)| *time).sum()),
        configure_us = us(times.configure),
        rdma_us = us(times.rdma.iter().map(|(_, time)| *time).sum()),
        rdma_rest_us = us(times.rdma_rest),
        verify_us = us(times.verify),
        record_us = us(times.record),
        "attached"
    );
}
