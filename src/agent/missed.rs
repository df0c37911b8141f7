//! Sandboxes that were made while no plugin of ours was connected.

use std::sync::Arc;
use std::time::Instant;

use clap::ValueEnum;
use tokio::sync::oneshot;

use super::Shared;
use super::attacher::{BACKGROUND_LIMIT, Wanted};
use crate::attach::engine::Listed;
use crate::ledger::{ClaimRecord, Missed};
use crate::names::{PodUid, SandboxId};
use crate::nri::Container;

/// What to do about a pod whose containers run already without its NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnMissedSandbox {
    /// Bring the NICs into the running pod.
    Attach,
    /// Evict the pod, so that its controller makes another one.
    Evict,
    /// Only say so, by an event and the claim's status.
    Event,
}

/// `CONTAINER_RUNNING` of NRI's `ContainerState`.
const RUNNING: i32 = 3;

/// After the runtime has told what it has: gives back what is in sandboxes that it does not know, says so to `released`, and sees to the
/// sandboxes that were missed.
pub(super) async fn catch_up(
    shared: Arc<Shared>,
    listed: Vec<Listed>,
    containers: Vec<Container>,
    released: oneshot::Sender<()>,
) {
    let engine = shared.engine.clone();
    let looked = tokio::task::spawn_blocking(move || {
        let todo = engine.reconcile(&listed);
        for (pod, sandbox) in todo.release {
            let released = engine.release(&pod, &sandbox);
            tracing::info!(%pod, %sandbox, ?released, "the runtime does not know this sandbox any more");
        }
        todo.attach
    });
    let missed = looked.await.unwrap_or_default();
    // Nobody waits any more when the answer was due.
    let _ = released.send(());
    for (pod, sandbox, path) in missed {
        let of_it = containers.iter().filter(|c| c.sandbox == sandbox.as_str() && c.state == RUNNING);
        let running: Vec<&str> = of_it.map(|c| c.name.as_str()).collect();
        if !running.is_empty() && !is_to_be_attached(&shared, &pod, &sandbox, &running) {
            continue;
        }
        let now = Instant::now();
        // All at once: one that takes long must not keep the others waiting. How it ends is logged and told there.
        let wanted = Wanted { pod, sandbox, path, netns: None, deadline: now + BACKGROUND_LIMIT, held_until: now };
        drop(shared.attacher.attach(wanted));
    }
}

/// Has the pod evicted, or says why that can't be.
async fn evict(shared: &Shared, record: &ClaimRecord) {
    let (namespace, pod) = (&record.claim.namespace, &record.pod);
    match crate::dra::evict::evict(&shared.client, namespace, &pod.name, &pod.uid, &shared.stop).await {
        Ok(()) => tracing::info!(%namespace, pod = %pod.name, "evicted: its containers ran without its NICs"),
        Err(error) => {
            tracing::error!(%namespace, pod = %pod.name, %error, "not evicted");
            shared.reports.not_evicted(record, &error.to_string());
        }
    }
}

/// Says what is wrong, and whether the NICs are to come late.
fn is_to_be_attached(shared: &Arc<Shared>, pod: &PodUid, sandbox: &SandboxId, running: &[&str]) -> bool {
    let policy = shared.config.on_missed_sandbox;
    tracing::error!(%pod, %sandbox, ?running, ?policy, "containers run without the NICs of their pod");
    let then = match policy {
        OnMissedSandbox::Attach => "their NICs are attached now",
        OnMissedSandbox::Evict => "the pod is evicted",
        OnMissedSandbox::Event => "their NICs stay on the host",
    };
    let why = format!(
        "containers {} were started without the NICs of the pod's claims, since the agent was not connected to the runtime; {then}",
        running.join(", ")
    );
    shared.reports.sandbox_missed(&shared.engine, pod, &why);
    shared.engine.note_missed(pod, &Missed { sandbox: sandbox.clone(), why });
    let record = shared.engine.ledger().by_pod(pod).into_iter().next();
    if let (OnMissedSandbox::Evict, Some(record)) = (policy, record) {
        let shared = shared.clone();
        shared.background.clone().spawn(async move { evict(&shared, &record).await });
    }
    policy == OnMissedSandbox::Attach
}
