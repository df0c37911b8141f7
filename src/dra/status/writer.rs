//! Sees to it that the API server has what is to be said of each claim: one task, one entry for each claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::content::{self, Transitions};
use super::send;
use crate::attach::engine::Look;
use crate::dra::api::{ApiError, Backoff};
use crate::dra::events::{Event, Events, Object};
use crate::ledger::ClaimRef;
use crate::names::ClaimUid;

/// How many claims are written at once.
const AT_ONCE: usize = 4;

/// What is recorded of a claim and what the kernel has of it; none when it is not recorded any more. May block.
pub type Source = Arc<dyn Fn(&ClaimUid) -> Option<Look> + Send + Sync>;

/// Who writes, and how often.
#[derive(Debug, Clone)]
pub struct StatusConfig {
    /// Driver name; also the field manager.
    pub driver: String,
    /// How long a change waits for the next one: prepare and attach, stop and unprepare follow each other closely.
    pub settle: Duration,
    /// How often attached devices are looked at again: addresses come and go, devices are unplugged.
    pub look_again: Duration,
    /// How long a claim waits after the server refused it (403, 422): that does not pass by itself.
    pub refused: Duration,
}

impl StatusConfig {
    /// For `driver`, with the times that suit a cluster.
    #[must_use]
    pub fn new(driver: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            settle: Duration::from_millis(150),
            look_again: Duration::from_secs(30),
            refused: Duration::from_secs(300),
        }
    }
}

/// Claims of which something may be new. Cheap to share. Never blocks; a claim that is in it already is in it once.
#[derive(Debug, Clone, Default)]
pub struct Queue(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    changed: Mutex<BTreeMap<ClaimUid, ClaimRef>>,
    news: Notify,
}

impl Queue {
    /// Something may be new of `claim`.
    pub fn changed(&self, claim: &ClaimRef) {
        self.lock().insert(claim.uid.clone(), claim.clone());
        self.0.news.notify_one();
    }

    fn take(&self) -> BTreeMap<ClaimUid, ClaimRef> {
        std::mem::take(&mut *self.lock())
    }

    // Nothing under this lock can leave it half changed.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ClaimUid, ClaimRef>> {
        self.0.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes what [`Queue`] is told until `stop`; then once more what was not written, which the caller bounds in time.
pub async fn run(client: Client, config: StatusConfig, queue: Queue, source: Source, events: Events, stop: CancellationToken) {
    let writer = Writer { client, config, source, events, told: Mutex::default() };
    let mut claims: BTreeMap<ClaimUid, Claim> = BTreeMap::new();
    let mut look_again = Instant::now() + writer.config.look_again;
    loop {
        writer.accept(&mut claims, queue.take());
        let due = claims.values().filter_map(Claim::due).min();
        let wake = due.map_or(look_again, |due| due.min(look_again));
        tokio::select! {
            () = stop.cancelled() => break,
            () = queue.0.news.notified() => continue,
            () = tokio::time::sleep_until(wake) => {}
        }
        let now = Instant::now();
        if now >= look_again {
            look_again = now + writer.config.look_again;
            claims.values_mut().filter(|c| c.attached).for_each(|claim| claim.want(now));
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = writer.write_all(&mut claims, |claim| claim.due().is_some_and(|due| due <= now)) => {}
        }
    }
    writer.accept(&mut claims, queue.take());
    writer.write_all(&mut claims, |claim| claim.wanted.is_some() && !claim.refused).await;
}

/// What is known of one claim.
struct Claim {
    claim: ClaimRef,
    /// There is something to write, from then on.
    wanted: Option<Instant>,
    /// Not before: after a failure.
    not_before: Option<Instant>,
    backoff: Backoff,
    /// The server refused it, which will last.
    refused: bool,
    /// What the server has; none before the claim was read.
    said: Option<Transitions>,
    says_anything: bool,
    /// The devices of the last apply.
    sent: Option<Value>,
    attached: bool,
    /// Nothing more is to be said of it.
    over: bool,
}

impl Claim {
    fn new(claim: ClaimRef) -> Self {
        Self {
            claim,
            wanted: None,
            not_before: None,
            backoff: Backoff::default(),
            refused: false,
            said: None,
            says_anything: false,
            sent: None,
            attached: false,
            over: false,
        }
    }

    fn want(&mut self, at: Instant) {
        self.wanted = Some(self.wanted.map_or(at, |earlier| earlier.min(at)));
    }

    fn due(&self) -> Option<Instant> {
        let wanted = self.wanted?;
        Some(self.not_before.map_or(wanted, |limit| wanted.max(limit)))
    }
}

struct Writer {
    client: Client,
    config: StatusConfig,
    source: Source,
    events: Events,
    /// What was said once and shall not be said again: rules that are missing, a feature that is off.
    told: Mutex<BTreeSet<String>>,
}

impl Writer {
    fn accept(&self, claims: &mut BTreeMap<ClaimUid, Claim>, changed: BTreeMap<ClaimUid, ClaimRef>) {
        let at = Instant::now() + self.config.settle;
        for (uid, claim) in changed {
            claims.entry(uid).or_insert_with(|| Claim::new(claim)).want(at);
        }
    }

    async fn write_all(&self, claims: &mut BTreeMap<ClaimUid, Claim>, which: impl Fn(&Claim) -> bool) {
        let due = claims.values_mut().filter(|claim| which(claim));
        stream::iter(due).for_each_concurrent(AT_ONCE, |claim| self.write(claim)).await;
        claims.retain(|_, claim| !claim.over);
    }

    /// Writes one claim, or says when to try again.
    async fn write(&self, claim: &mut Claim) {
        let error = match self.try_write(claim).await {
            Ok(()) => {
                (claim.wanted, claim.not_before, claim.refused) = (None, None, false);
                claim.backoff.reset();
                return;
            }
            Err(error) => error,
        };
        claim.refused = matches!(error, ApiError::Forbidden { .. } | ApiError::Invalid { .. });
        let wait = claim.backoff.fail(error.retry_after());
        let wait = if claim.refused { wait.max(self.config.refused) } else { wait };
        claim.not_before = Some(Instant::now() + wait);
        match &error {
            ApiError::Forbidden { rule, .. } => self.tell_forbidden(&claim.claim, rule, &error),
            _ => {
                tracing::warn!(claim = %claim.claim, %error, wait_ms = wait.as_millis(), "the claim's status is not written yet")
            }
        }
    }

    async fn try_write(&self, claim: &mut Claim) -> Result<(), ApiError> {
        let driver = &self.config.driver;
        if claim.said.is_none() {
            let Some(now) = send::read(&self.client, &claim.claim).await? else {
                claim.over = true;
                return Ok(());
            };
            claim.said = Some(content::said(&now, driver));
            claim.says_anything = content::says_anything(&now, driver);
        }
        let look = self.look(&claim.claim).await?;
        let states = look.as_ref().map(content::device_states).unwrap_or_default();
        claim.attached = states.iter().any(|s| s.reason.is_ready());
        if states.is_empty() && !claim.says_anything {
            claim.over = true;
            return Ok(());
        }
        let said = claim.said.get_or_insert_default();
        let next = content::transitions(&states, said, Timestamp::now());
        let body = content::apply_body(driver, &claim.claim, &states, &next);
        if claim.sent.as_ref() == Some(&body["status"]) {
            return Ok(());
        }
        match send::apply(&self.client, driver, &claim.claim, &body).await {
            Ok(stored) => {
                claim.says_anything = content::says_anything(&stored, driver);
                if !states.is_empty() && !claim.says_anything {
                    self.tell_once(
                        "the API server drops status.devices of claims: its feature DRAResourceClaimDeviceStatus is off",
                    );
                }
                claim.over = look.is_none();
            }
            Err(ApiError::NotFound { .. }) => claim.over = true,
            // The claim may be another one by now, or not be allocated any more.
            Err(error @ (ApiError::Conflict { .. } | ApiError::Invalid { .. })) => {
                match send::read(&self.client, &claim.claim).await? {
                    Some(now) if content::is_allocated(&now, driver) => return Err(error),
                    _ => claim.over = true,
                }
            }
            Err(error) => return Err(error),
        }
        claim.said = Some(next);
        claim.sent = Some(body["status"].clone());
        Ok(())
    }

    async fn look(&self, claim: &ClaimRef) -> Result<Option<Look>, ApiError> {
        let (source, uid) = (self.source.clone(), claim.uid.clone());
        tokio::task::spawn_blocking(move || source(&uid)).await.map_err(|panic| ApiError::Other {
            what: format!("looking at the devices of claim {claim}"),
            text: format!("{panic}; this is a bug of dranic, please report it"),
        })
    }

    fn tell_forbidden(&self, claim: &ClaimRef, rule: &str, error: &ApiError) {
        if self.is_news(rule) {
            tracing::error!(%error, "the status of claims can't be written; everything else goes on");
            self.events.send(Event::warning(Object::claim(claim), "StatusForbidden", error.to_string()));
        }
    }

    fn tell_once(&self, text: &str) {
        if self.is_news(text) {
            tracing::warn!("{text}");
        }
    }

    fn is_news(&self, text: &str) -> bool {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned())
    }
}
