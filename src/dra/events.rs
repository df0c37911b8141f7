//! Events on pods and claims: what a user must know and would not find elsewhere. Best effort, never in anybody's way.
//!
//! They are of core/v1, which `kubectl describe` shows for pods and claims alike. The same event of the same object within five
//! minutes is one object with a count.

mod series;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::jiff::Timestamp;
use kube::core::Request;
use kube::core::params::{Patch, PatchParams, PostParams};
use kube::{Client, Resource};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::dra::api::{ApiError, Call, OBJECT_MAX, call};
use crate::dra::publisher::pace::Bucket;
use crate::ledger::{ClaimRecord, ClaimRef};
use series::{Series, Write};

/// Most events that wait; further ones are dropped, and counted in the log.
pub const WAITING_MAX: usize = 256;
/// Longest message, in bytes: what `events.k8s.io` allows.
pub const MESSAGE_MAX: usize = 1024;
/// How long one request may take.
const LIMIT: Duration = Duration::from_secs(5);

/// What an event is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Object {
    api_version: &'static str,
    kind: &'static str,
    namespace: String,
    name: String,
    uid: String,
}

impl Object {
    /// A claim.
    #[must_use]
    pub fn claim(claim: &ClaimRef) -> Self {
        let (namespace, name) = (claim.namespace.clone(), claim.name.clone());
        Self { api_version: "resource.k8s.io/v1", kind: "ResourceClaim", namespace, name, uid: claim.uid.to_string() }
    }

    /// The pod that a claim is reserved for: it is in the claim's namespace.
    #[must_use]
    pub fn pod(record: &ClaimRecord) -> Self {
        let (namespace, name) = (record.claim.namespace.clone(), record.pod.name.clone());
        Self { api_version: "v1", kind: "Pod", namespace, name, uid: record.pod.uid.to_string() }
    }
}

/// Something that happened. All are warnings: what goes well is in the status of the claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Event {
    object: Object,
    reason: &'static str,
    message: String,
}

impl Event {
    /// A warning. `reason` is in `CamelCase`; of a long message the end is cut off.
    #[must_use]
    pub fn warning(object: Object, reason: &'static str, message: impl AsRef<str>) -> Self {
        Self { object, reason, message: super::status::content::cut(message.as_ref(), MESSAGE_MAX) }
    }
}

/// Where events go. Cheap to share; never blocks.
#[derive(Debug, Clone)]
pub struct Events {
    sender: mpsc::Sender<Event>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// Both ends: [`run`] takes the second.
    #[must_use]
    pub fn new() -> (Self, Waiting) {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        (Self { sender, dropped: dropped.clone() }, Waiting { receiver, dropped })
    }

    /// Takes an event, or drops it where too many wait.
    pub fn send(&self, event: Event) {
        if self.sender.try_send(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Events that wait to be written.
#[derive(Debug)]
pub struct Waiting {
    receiver: mpsc::Receiver<Event>,
    dropped: Arc<AtomicU64>,
}

/// In whose name, and how often.
#[derive(Debug, Clone)]
pub struct EventsConfig {
    /// Driver name: the component.
    pub driver: String,
    /// Node name: the instance.
    pub node: String,
    /// How long the same event is counted rather than made anew.
    pub window: Duration,
    /// How often the count of one event is written at most.
    pub recount: Duration,
    /// Requests at once, and how often one more.
    pub burst: u32,
    /// See `burst`.
    pub every: Duration,
    /// How long nothing is tried after a 403.
    pub refused: Duration,
}

impl EventsConfig {
    /// With the times that suit a cluster.
    #[must_use]
    pub fn new(driver: &str, node: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            node: node.to_owned(),
            window: Duration::from_secs(300),
            recount: Duration::from_secs(10),
            burst: 25,
            every: Duration::from_secs(1),
            refused: Duration::from_secs(300),
        }
    }
}

/// Writes events until `stop`; then once more what waits, which the caller bounds in time.
pub async fn run(client: Client, config: EventsConfig, mut waiting: Waiting, stop: CancellationToken) {
    let mut bucket = Bucket::new(config.burst, config.every);
    let mut not_before: Option<Instant> = None;
    let mut series = Series::new(config.window, config.recount);
    let writer = Writer { client, config };
    loop {
        let due = series.due().map(|due| not_before.map_or(due, |limit| due.max(limit)));
        tokio::select! {
            () = stop.cancelled() => break,
            event = waiting.receiver.recv() => match event {
                Some(event) => series.add(event, Instant::now(), Timestamp::now()),
                None => break,
            },
            () = async { tokio::time::sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                match bucket.take(Instant::now()) {
                    Err(at) => not_before = Some(at),
                    Ok(()) => tokio::select! {
                        () = stop.cancelled() => break,
                        pause = writer.write_next(&mut series) => not_before = pause,
                    },
                }
            }
        }
        let dropped = waiting.dropped.swap(0, Ordering::Relaxed) + series.take_dropped();
        if dropped > 0 {
            tracing::warn!(dropped, "events were dropped, since too many waited");
        }
    }
    while let Ok(event) = waiting.receiver.try_recv() {
        series.add(event, Instant::now(), Timestamp::now());
    }
    series.hurry();
    while series.due().is_some() && writer.write_next(&mut series).await.is_none() {}
}

struct Writer {
    client: Client,
    config: EventsConfig,
}

impl Writer {
    /// Writes the event that is due first; gives until when nothing shall be tried, after a refusal.
    async fn write_next(&self, series: &mut Series) -> Option<Instant> {
        let write = series.next()?;
        let now = Instant::now();
        match self.write(&write).await {
            Ok(()) => series.written(&write, now),
            Err(ApiError::NotFound { .. }) if write.exists => series.is_lost(&write, now),
            // No event can be made in a namespace that is being deleted; all others can.
            Err(ApiError::Forbidden { text, .. }) if text.contains("being terminated") => series.give_up(&write),
            Err(error @ ApiError::Forbidden { .. }) => {
                tracing::error!(%error, "events can't be written; everything else goes on");
                series.give_up_all();
                return Some(now + self.config.refused);
            }
            Err(error) => {
                tracing::debug!(%error, "an event is not written");
                series.failed(&write, Instant::now(), error.retry_after());
            }
        }
        None
    }

    async fn write(&self, write: &Write) -> Result<(), ApiError> {
        let namespace = &write.event.object.namespace;
        let verb = if write.exists { "patch" } else { "create" };
        let what = Call::new(verb, "", "events", format!("{namespace}/{}", write.name));
        let base = Request::new(core::Event::url_path(&(), Some(namespace)));
        let request = if write.exists {
            let change = serde_json::json!({"count": write.count, "lastTimestamp": seconds(write.last)});
            base.patch(&write.name, &PatchParams::default(), &Patch::Merge(change))
        } else {
            let body = serde_json::to_vec(&self.event(write)).map_err(|e| what.other(e.to_string()))?;
            base.create(&PostParams::default(), body)
        };
        let request = request.map_err(|e| what.other(e.to_string()))?;
        match tokio::time::timeout(LIMIT, call(&self.client, &what, request, OBJECT_MAX)).await {
            Ok(answer) => answer.map(drop),
            Err(_) => Err(what.unreachable(format!("no answer in {} s", LIMIT.as_secs()))),
        }
    }

    fn event(&self, write: &Write) -> core::Event {
        let Event { object, reason, message } = &write.event;
        core::Event {
            metadata: kube::core::ObjectMeta {
                name: Some(write.name.clone()),
                namespace: Some(object.namespace.clone()),
                ..Default::default()
            },
            involved_object: core::ObjectReference {
                api_version: Some(object.api_version.to_owned()),
                kind: Some(object.kind.to_owned()),
                namespace: Some(object.namespace.clone()),
                name: Some(object.name.clone()),
                uid: Some(object.uid.clone()),
                ..Default::default()
            },
            reason: Some((*reason).to_owned()),
            message: Some(message.clone()),
            type_: Some("Warning".to_owned()),
            count: Some(write.count),
            first_timestamp: Some(seconds(write.first)),
            last_timestamp: Some(seconds(write.last)),
            source: Some(core::EventSource { component: Some(self.config.driver.clone()), host: Some(self.config.node.clone()) }),
            reporting_component: Some(self.config.driver.clone()),
            reporting_instance: Some(self.config.node.clone()),
            ..Default::default()
        }
    }
}

fn seconds(time: Timestamp) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::Time {
    k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time)
}
