//! What the double saw, with times, and waiting for it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    /// When.
    pub at: Instant,
    /// "index-name" of the plugin; empty before it registered.
    pub plugin: String,
    /// What.
    pub what: What,
}

/// Kinds of events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A plugin connected.
    Connected,
    /// It registered.
    Registered,
    /// Its registration was refused.
    Refused(String),
    /// Its answer to Configure, undecoded.
    Configured(Vec<u8>),
    /// One part of Synchronize was answered.
    SyncPart {
        /// Pods in this part.
        pods: usize,
        /// Containers in this part.
        containers: usize,
        /// Whether more followed.
        more: bool,
    },
    /// It is in the list and gets requests.
    Ready,
    /// A request was sent to it.
    Request {
        /// Method as sent: `StateChange` where that was used.
        method: String,
        /// Id of the pod sandbox.
        sandbox: String,
    },
    /// The request's end, as the runtime saw it.
    Answer {
        /// Method as sent.
        method: String,
        /// From sending to the answer, or to giving up.
        elapsed: Duration,
        /// The error, if any.
        error: Option<String>,
    },
    /// An answer nobody waited for any more.
    LateAnswer,
    /// It is no longer connected, and why.
    Gone(String),
}

/// The list of events.
#[derive(Debug, Default)]
pub struct Log {
    events: Mutex<Vec<Event>>,
    length: watch::Sender<usize>,
}

impl Log {
    pub(super) fn add(&self, plugin: &str, what: What) {
        let length = {
            let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            events.push(Event { at: Instant::now(), plugin: plugin.to_owned(), what });
            events.len()
        };
        self.length.send_replace(length);
    }

    /// All events so far.
    pub fn all(&self) -> Vec<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for the first event from number `from` on for which `wanted` holds.
    ///
    /// # Errors
    /// After `limit`, with all events in the text.
    pub async fn wait(&self, from: usize, limit: Duration, wanted: impl Fn(&Event) -> bool) -> Result<Event, String> {
        let mut length = self.length.subscribe();
        let found = async {
            loop {
                let hit = self.all().into_iter().skip(from).find(|event| wanted(event));
                match hit {
                    Some(event) => return event,
                    // The sender is ours and alive.
                    None => drop(length.changed().await),
                }
            }
        };
        let found = tokio::time::timeout(limit, found).await;
        found.map_err(|_| format!("not seen within {limit:?}; events: {:#?}", self.all()))
    }
}
