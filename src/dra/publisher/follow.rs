//! Lists and watches this node's slices, and keeps at it whatever the server does.

use std::time::Duration;

use axum::body::BodyDataStream;
use futures_util::StreamExt;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::core::params::{ListParams, WatchParams};
use kube::core::{Request, WatchEvent};
use kube::{Client, Resource};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::PublisherConfig;
use crate::dra::api::{ApiError, Backoff, Call, OBJECT_MAX, call, open};

/// How long the server shall keep a watch.
const WATCH_SECONDS: u32 = 290;
/// How long a watch may be silent before it is opened anew: servers send a bookmark each minute.
const SILENCE: Duration = Duration::from_secs(90);
/// A watch that ends sooner than this is counted as a failure, so that we never spin.
const SHORT: Duration = Duration::from_secs(1);
/// Largest list we read, in bytes.
const LIST_MAX: usize = 32 << 20;

/// What was seen on the server.
#[derive(Debug)]
pub(super) enum Event {
    /// All slices, as of a resource version.
    Listed(Listed),
    /// A slice was added or changed.
    Applied(Box<ResourceSlice>),
    /// A slice was deleted.
    Deleted(Box<ResourceSlice>),
    /// Listing or watching fails; it is tried again.
    Trouble(ApiError),
    /// It works again.
    Works,
}

/// All slices, as of a resource version.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    /// The list's resource version is in here.
    pub(super) metadata: ListMeta,
    /// The slices.
    #[serde(default)]
    pub(super) items: Vec<ResourceSlice>,
    /// When it was asked for.
    #[serde(skip)]
    pub(super) asked: Option<Instant>,
}

/// Which slices are ours.
#[derive(Debug, Clone)]
pub(super) struct Selector(String);

impl Selector {
    pub(super) fn new(config: &PublisherConfig) -> Self {
        Self(format!("spec.driver={},spec.nodeName={}", config.driver, config.node_name))
    }

    fn call(&self, verb: &'static str) -> Call {
        Call::new(verb, "resource.k8s.io", "resourceslices", format!("({})", self.0))
    }
}

/// Lists our slices.
///
/// # Errors
/// See [`ApiError`].
pub(super) async fn list(client: &Client, selector: &Selector) -> Result<Listed, ApiError> {
    let what = selector.call("list");
    let request = Request::new(ResourceSlice::url_path(&(), None)).list(&ListParams::default().fields(&selector.0));
    let asked = Some(Instant::now());
    let text = call(client, &what, request.map_err(|e| what.other(e.to_string()))?, LIST_MAX).await?;
    let listed: Listed =
        serde_json::from_str(&text).map_err(|e| what.other(format!("the answer is not a ResourceSliceList: {e}")))?;
    match listed.metadata.resource_version {
        Some(_) => Ok(Listed { asked, ..listed }),
        None => Err(what.other("the list has no resource version to watch from".to_owned())),
    }
}

/// Sends what happens to our slices to `events`, until its receiver is gone.
pub(super) async fn follow(client: Client, selector: Selector, events: mpsc::Sender<Event>) {
    let mut backoff = Backoff::default();
    let mut version: Option<String> = None;
    while !events.is_closed() {
        let outcome = match version.take() {
            None => list(&client, &selector).await.map(|listed| {
                version.clone_from(&listed.metadata.resource_version);
                Event::Listed(listed)
            }),
            Some(mut from) => {
                let began = Instant::now();
                let outcome = watch(&client, &selector, &mut from, &events).await;
                // Only a watch that lasted shows that all is well: a list alone may succeed for ever before watches that fail.
                if began.elapsed() > SHORT && outcome.is_ok() {
                    backoff.reset();
                }
                if keeps_version(outcome.as_ref().err(), &backoff) {
                    version = Some(from);
                }
                outcome.map(|()| Event::Works)
            }
        };
        let error = match outcome {
            Ok(event) => {
                let _ = events.send(event).await;
                continue;
            }
            Err(error) => error,
        };
        let wait = backoff.fail(error.retry_after());
        // A version that is gone is an everyday matter.
        if !matches!(error, ApiError::Gone { .. }) {
            tracing::warn!(%error, wait_ms = wait.as_millis(), "ResourceSlices can't be followed");
            let _ = events.send(Event::Trouble(error)).await;
        }
        tokio::time::sleep(wait).await;
    }
}

/// Whether a watch that ended like this may go on from where it was. Not after a server that stayed away: it may come back with
/// another store, which knows nothing of our versions, and a watch from one of them would be silent for ever.
fn keeps_version(error: Option<&ApiError>, backoff: &Backoff) -> bool {
    match error {
        Some(ApiError::Unreachable { .. }) => backoff.failures() == 0,
        Some(error) => error.is_transient(),
        None => true,
    }
}

/// One watch from `version` on, which moves along. Ends well when the server, or silence, ends it after a while.
async fn watch(client: &Client, selector: &Selector, version: &mut String, events: &mpsc::Sender<Event>) -> Result<(), ApiError> {
    let what = selector.call("watch");
    let params = WatchParams::default().fields(&selector.0).timeout(WATCH_SECONDS);
    let request = Request::new(ResourceSlice::url_path(&(), None)).watch(&params, version);
    let began = Instant::now();
    let mut lines = Lines::new(open(client, &what, request.map_err(|e| what.other(e.to_string()))?).await?);
    let _ = events.send(Event::Works).await;
    let end = began + Duration::from_secs(u64::from(WATCH_SECONDS) + 5);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let line = match tokio::time::timeout(SILENCE.min(left), lines.next(&what)).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) if began.elapsed() < SHORT => return Err(what.unreachable("the watch ended at once".to_owned())),
            Ok(Ok(None)) | Err(_) => return Ok(()),
            Ok(Err(error)) => return Err(error),
        };
        let event = serde_json::from_slice(&line).map_err(|e| what.other(format!("an event is not one: {e}")))?;
        let (seen, event) = match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => (version_of(&slice), Event::Applied(Box::new(slice))),
            WatchEvent::Deleted(slice) => (version_of(&slice), Event::Deleted(Box::new(slice))),
            WatchEvent::Bookmark(mark) => {
                *version = mark.metadata.resource_version;
                continue;
            }
            WatchEvent::Error(status) => return Err(what.refusal(status.code, None, &status.message)),
        };
        if let Some(seen) = seen {
            *version = seen;
        }
        if events.send(event).await.is_err() {
            return Ok(());
        }
    }
}

fn version_of(slice: &ResourceSlice) -> Option<String> {
    slice.metadata.resource_version.clone()
}

/// The lines of a body, each at most [`OBJECT_MAX`] and a little.
struct Lines {
    body: BodyDataStream,
    bytes: Vec<u8>,
}

impl Lines {
    fn new(body: BodyDataStream) -> Self {
        Self { body, bytes: Vec::new() }
    }

    /// The next line without its end; none at the end of the body. Loses nothing when it is dropped early.
    async fn next(&mut self, what: &Call) -> Result<Option<Vec<u8>>, ApiError> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.bytes[searched..].iter().position(|b| *b == b'\n') {
                let rest = self.bytes.split_off(searched + at + 1);
                let line = std::mem::replace(&mut self.bytes, rest);
                return Ok(Some(line));
            }
            searched = self.bytes.len();
            if searched > OBJECT_MAX + 1024 {
                return Err(what.other(format!("an event has more than {OBJECT_MAX} bytes; it is refused")));
            }
            match self.body.next().await {
                Some(Ok(chunk)) => self.bytes.extend_from_slice(&chunk),
                // A connection that breaks off is how many watches end.
                Some(Err(_)) | None => return Ok(None),
            }
        }
    }
}
