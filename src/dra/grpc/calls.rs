//! What is done for a call, whatever its protocol version.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use futures_util::future::join_all;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tracing::{info, warn};

use crate::dra::{ClaimError, ClaimHandler, PreparedDevice};
use crate::ledger::ClaimRef;
use crate::names::ClaimUid;

/// Most claims of one call that are handled. A pod has at most 32 (`PodResourceClaimsMaxSize` of the API), and a call is for one pod.
const CLAIMS_MAX: usize = 64;
/// Most claims of one call that are answered one by one; the answer to more would itself be too large.
const ANSWERS_MAX: usize = 1024;
/// Longest error text, in characters; it becomes a pod event.
const ERROR_MAX: usize = 4096;
/// Longest name and namespace, in characters: RFC 1123 subdomain.
const NAME_MAX: usize = 253;

/// A claim as the kubelet names it, not yet checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WireClaim {
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) name: String,
}

/// By UID, for every claim of the request: the result, or the text for the user.
pub(super) type Answers<T> = BTreeMap<String, Result<T, String>>;

/// The calls of all connections.
pub(super) struct Calls<H> {
    handler: Arc<H>,
    locks: ClaimLocks,
    /// Calls under way, and work of calls that the kubelet has given up.
    running: TaskTracker,
    stopping: AtomicBool,
}

impl<H: ClaimHandler> Calls<H> {
    pub(super) fn new(handler: Arc<H>) -> Self {
        Self { handler, locks: ClaimLocks::default(), running: TaskTracker::new(), stopping: AtomicBool::new(false) }
    }

    /// Refuses prepares from now on and waits for what runs.
    pub(super) async fn drain(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.running.close();
        self.running.wait().await;
    }

    /// How many claims and calls are still under way.
    pub(super) fn running(&self) -> usize {
        self.running.len()
    }

    /// Prepares the claims, several at once.
    pub(super) async fn prepare(&self, claims: Vec<WireClaim>) -> Result<Answers<Vec<PreparedDevice>>, Status> {
        // Counted before the flag is read, so that `drain` sees this call or this call sees the flag.
        let _running = self.running.token();
        if self.stopping.load(Ordering::SeqCst) {
            return Err(Status::unavailable("this agent is stopping; the kubelet will retry"));
        }
        self.for_each("prepare", claims, |handler, claim| async move { handler.prepare(claim).await }).await
    }

    /// Unprepares the claims, several at once; also while stopping.
    pub(super) async fn unprepare(&self, claims: Vec<WireClaim>) -> Result<Answers<()>, Status> {
        let _running = self.running.token();
        self.for_each("unprepare", claims, |handler, claim| async move { handler.unprepare(claim).await }).await
    }

    async fn for_each<T, F, R>(&self, verb: &'static str, claims: Vec<WireClaim>, run: F) -> Result<Answers<T>, Status>
    where
        F: Fn(Arc<H>, ClaimRef) -> R,
        R: Future<Output = Result<T, ClaimError>> + Send + 'static,
        T: Send + 'static,
    {
        let (work, refused) = sort(verb, claims)?;
        let tasks = work.into_values().map(|claim| async {
            let uid = claim.uid.to_string();
            (uid, self.one(verb, claim.clone(), run(self.handler.clone(), claim)).await)
        });
        let mut answers: Answers<T> = join_all(tasks).await.into_iter().collect();
        answers.extend(refused.into_iter().map(|(uid, why)| (uid, Err(why))));
        Ok(answers)
    }

    /// Runs the handler for one claim, one call at a time, and to its end even when the kubelet's deadline has passed: work that is
    /// cut off half way would leave its repair to the next call. A panic ends this claim only.
    async fn one<T, R>(&self, verb: &'static str, claim: ClaimRef, run: R) -> Result<T, String>
    where
        R: Future<Output = Result<T, ClaimError>> + Send + 'static,
        T: Send + 'static,
    {
        let turn = self.locks.of(&claim.uid).lock_owned().await;
        let logged = claim.clone();
        let task = self.running.spawn(async move {
            let _turn = turn;
            let start = Instant::now();
            let result = run.await;
            let ms = start.elapsed().as_millis();
            match &result {
                Ok(_) => info!(claim = %logged, verb, ms, "done"),
                Err(err) => warn!(claim = %logged, verb, ms, %err, "failed"),
            }
            result
        });
        let text = match task.await {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(ClaimError(text))) if text.is_empty() => {
                format!("{verb} of claim {claim} failed without a reason; see the agent's log")
            }
            Ok(Err(ClaimError(text))) => text,
            Err(err) => {
                let text =
                    format!("{verb} of claim {claim} panicked: {}; this is a bug, the kubelet will retry", panic_text(err));
                tracing::error!("{text}");
                text
            }
        };
        Err(text.chars().take(ERROR_MAX).collect())
    }
}

fn panic_text(err: tokio::task::JoinError) -> String {
    let Ok(panic) = err.try_into_panic() else { return "the task was cancelled".into() };
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast_ref::<&str>().copied().unwrap_or("no text").to_owned(),
    }
}

/// Work to do by UID, and refusals by the UID as it was sent.
type Sorted = (BTreeMap<ClaimUid, ClaimRef>, BTreeMap<String, String>);

/// Checks the claims of one call. Each has a place in one of the two maps; repeats of one claim have one.
fn sort(verb: &str, claims: Vec<WireClaim>) -> Result<Sorted, Status> {
    let count = claims.len();
    if count > ANSWERS_MAX {
        return Err(Status::invalid_argument(format!("{count} claims in one call; {CLAIMS_MAX} are the most")));
    }
    let (mut work, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for wire in claims {
        let shown = format!("claim {}/{} ({})", cut(&wire.namespace), cut(&wire.name), cut(&wire.uid));
        let uid = wire.uid.clone();
        let claim = match check(wire) {
            Ok(claim) => claim,
            Err(why) => {
                refused.insert(uid, format!("{verb} of {shown}: {why}"));
                continue;
            }
        };
        match work.get(&claim.uid) {
            Some(first) if *first == claim => {}
            Some(first) => {
                let why = format!("{verb} of {shown}: the same call names claim {first} with this UID");
                work.remove(&claim.uid);
                refused.insert(uid, why);
            }
            None if refused.contains_key(&uid) => {}
            None if work.len() == CLAIMS_MAX => {
                let why = format!(
                    "{verb} of {shown}: the call has {count} claims and {CLAIMS_MAX} are handled at once; the kubelet will retry"
                );
                refused.insert(uid, why);
            }
            None => _ = work.insert(claim.uid.clone(), claim),
        }
    }
    for (uid, why) in &refused {
        warn!(uid = cut(uid), "{why}");
    }
    Ok((work, refused))
}

fn check(wire: WireClaim) -> Result<ClaimRef, String> {
    let uid = ClaimUid::new(wire.uid).map_err(|err| err.to_string())?;
    for (kind, value) in [("namespace", &wire.namespace), ("name", &wire.name)] {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
        if value.is_empty() || value.len() > NAME_MAX || !value.bytes().all(allowed) || value.starts_with('.') {
            return Err(format!("{kind} {:?} must have 1 to 253 characters a-z, 0-9, '-' and '.'", cut(value)));
        }
    }
    Ok(ClaimRef { namespace: wire.namespace, name: wire.name, uid })
}

/// At most 64 characters of something that may be huge, for a text.
fn cut(value: &str) -> String {
    value.chars().take(64).flat_map(char::escape_debug).collect()
}

/// One lock for each claim that is being worked on.
#[derive(Default)]
struct ClaimLocks(Mutex<HashMap<ClaimUid, Weak<tokio::sync::Mutex<()>>>>);

impl ClaimLocks {
    fn of(&self, uid: &ClaimUid) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(uid).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(uid.clone(), Arc::downgrade(&lock));
        lock
    }
}
