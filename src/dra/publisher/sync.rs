//! What we know of the server's slices, and the writes that bring them to what is wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::core::Request;
use kube::core::params::{DeleteParams, PostParams, Preconditions};
use kube::{Client, Resource};
use tokio::time::Instant;

use super::compare::{dropped, same};
use super::follow::{Event, Listed, Selector, list};
use super::pace::Bucket;
use super::{Changes, PublishStatus, PublisherConfig, Target, plan, split};
use crate::dra::api::{ApiError, Backoff, Call, OBJECT_MAX, call, node_uid};

/// Rounds of writes at once, and how often one more.
const BURST: u32 = 5;
const EVERY: Duration = Duration::from_secs(2);
/// After something changed on the server: more changes are likely to follow (the kubelet deletes slices one by one).
const SETTLE: Duration = Duration::from_millis(100);
/// After a write all slices are listed again, in case an event got lost; and from time to time without one.
const RESYNC_WRITTEN: Duration = Duration::from_secs(30);
const RESYNC: Duration = Duration::from_secs(600);
/// Most devices that are left out because the server refused them; beyond, the whole slice waits.
const REFUSED_MAX: usize = 256;

/// Knows the slices of this node and writes them.
pub(super) struct Publisher {
    client: Client,
    selector: Selector,
    target: Target,
    /// As the inventory has them.
    wanted: Vec<Device>,
    /// Left out: the device as it was refused, and why.
    refused: Vec<(Device, String)>,
    /// What was sent, and what the server made of it.
    stored: Vec<(Vec<Device>, Vec<Device>)>,
    /// The server's slices by name; none before the first list.
    slices: Option<BTreeMap<String, ResourceSlice>>,
    changes: Bucket,
    repairs: Bucket,
    backoff: Backoff,
    /// No write before this.
    not_before: Option<Instant>,
    due: Option<Instant>,
    resync: Instant,
    /// Our last write.
    written: Option<Instant>,
    write_error: Option<ApiError>,
    follow_error: Option<ApiError>,
    dropped: BTreeSet<String>,
    status: PublishStatus,
}

/// How a round without an error went.
enum Round {
    /// Everything was tried.
    Done,
    /// There is something to write, but not yet.
    Waits,
}

impl Publisher {
    pub(super) fn new(client: Client, config: PublisherConfig, wanted: &[Device]) -> Self {
        Self {
            client,
            selector: Selector::new(&config),
            target: Target { driver: config.driver, node_name: config.node_name, node_uid: String::new() },
            wanted: wanted.to_vec(),
            refused: Vec::new(),
            stored: Vec::new(),
            slices: None,
            changes: Bucket::new(BURST, EVERY),
            repairs: Bucket::new(BURST, EVERY),
            backoff: Backoff::default(),
            not_before: None,
            due: None,
            resync: Instant::now() + RESYNC,
            written: None,
            write_error: None,
            follow_error: None,
            dropped: BTreeSet::new(),
            status: PublishStatus::default(),
        }
    }

    pub(super) fn status(&self) -> &PublishStatus {
        &self.status
    }

    /// When [`Self::sync`] shall be called.
    pub(super) fn due(&self) -> Option<Instant> {
        self.slices.as_ref()?;
        let due = self.due.map_or(self.resync, |due| due.min(self.resync));
        Some(self.not_before.map_or(due, |limit| due.max(limit)))
    }

    /// The inventory has changed.
    pub(super) fn want(&mut self, wanted: &[Device], now: Instant) {
        self.wanted = wanted.to_vec();
        self.refused.retain(|(device, _)| self.wanted.contains(device));
        if matches!(self.write_error, Some(ApiError::Invalid { .. })) {
            // What the server refused may be gone.
            self.not_before = None;
        }
        self.soon(now);
    }

    /// Something was seen on the server.
    pub(super) fn observe(&mut self, event: Event, now: Instant) {
        match event {
            Event::Listed(listed) => {
                self.listed(listed);
                // The server may be another one now: let it show again what it drops and what it refuses.
                self.stored.clear();
                self.refused.clear();
                self.follow_error = None;
                self.soon(now);
            }
            Event::Applied(slice) => {
                if self.learn(*slice) {
                    self.soon(now + SETTLE);
                }
            }
            Event::Deleted(slice) => {
                let name = slice.metadata.name.as_deref().unwrap_or_default();
                if self.slices.as_mut().is_some_and(|known| known.remove(name).is_some()) {
                    // A slice is also deleted when its Node was made anew: then the UID is another one.
                    self.target.node_uid.clear();
                    self.soon(now + SETTLE);
                }
            }
            Event::Trouble(error) => self.follow_error = Some(error),
            Event::Works => self.follow_error = None,
        }
        self.report();
    }

    fn soon(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    /// Takes over a list, except for what was written after it was made.
    fn listed(&mut self, listed: Listed) {
        let version = listed.metadata.resource_version.as_deref().and_then(number);
        let mut known = self.slices.take().unwrap_or_default();
        // Without a write meanwhile, a version that is newer than the list's is of another store, from before a backup came back.
        let overtaken = self.written > listed.asked;
        known.retain(|name, slice| {
            let stays = overtaken && newer(slice, version);
            if !stays && !listed.items.iter().any(|other| other.metadata.name.as_ref() == Some(name)) {
                // As for a deletion that was seen.
                self.target.node_uid.clear();
            }
            stays
        });
        for slice in listed.items.into_iter().map(lean) {
            let name = slice.metadata.name.clone().unwrap_or_default();
            if !known.get(&name).is_some_and(|ours| newer(ours, version_of(&slice))) {
                known.insert(name, slice);
            }
        }
        self.slices = Some(known);
    }

    /// Takes over one slice; false when we knew it, or a newer one.
    fn learn(&mut self, slice: ResourceSlice) -> bool {
        let (Some(known), Some(name)) = (self.slices.as_mut(), slice.metadata.name.clone()) else { return false };
        let slice = lean(slice);
        let old = known.get(&name);
        if old.is_some_and(|old| *old == slice || newer(old, version_of(&slice))) {
            return false;
        }
        known.insert(name, slice);
        true
    }

    /// Compares and writes, as far as pace and back-off allow.
    pub(super) async fn sync(&mut self) {
        let now = Instant::now();
        self.due = None;
        self.not_before = None;
        let outcome = self.round(now).await;
        match outcome {
            Ok(Round::Waits) => {}
            Ok(Round::Done) => {
                self.backoff.reset();
                self.write_error = None;
            }
            Err(error) => {
                let wait = self.backoff.fail(error.retry_after());
                tracing::warn!(%error, wait_ms = wait.as_millis(), "ResourceSlices can't be written");
                self.not_before = Some(Instant::now() + wait);
                self.soon(now);
                self.write_error = Some(error);
            }
        }
        self.report();
    }

    async fn round(&mut self, now: Instant) -> Result<Round, ApiError> {
        if now >= self.resync {
            self.resync = now + RESYNC;
            let listed = list(&self.client, &self.selector).await?;
            self.listed(listed);
        }
        if self.target.node_uid.is_empty() {
            self.target.node_uid = node_uid(&self.client, &self.target.node_name).await?;
        }
        let changes = self.changes();
        if changes.is_empty() {
            return Ok(Round::Done);
        }
        // Slices that somebody deleted are put back even where our own changes have used up the tokens.
        let wiped = self.slices.as_ref().is_some_and(BTreeMap::is_empty);
        let bucket = if wiped { &mut self.repairs } else { &mut self.changes };
        if let Err(at) = bucket.take(now) {
            self.soon(at);
            return Ok(Round::Waits);
        }
        let outcome = self.apply(changes).await;
        self.resync = Instant::now() + RESYNC_WRITTEN;
        self.soon(Instant::now());
        outcome.map(|()| Round::Done)
    }

    /// What would have to be written now.
    fn changes(&self) -> Changes {
        let existing: Vec<ResourceSlice> = self.slices.iter().flat_map(BTreeMap::values).cloned().collect();
        let offered = self.wanted.iter().filter(|d| !self.refused.iter().any(|(refused, _)| refused == *d));
        let mut wanted = split(offered.cloned().collect());
        for devices in &mut wanted {
            if let Some((_, made)) = self.stored.iter().find(|(sent, _)| sent == devices) {
                devices.clone_from(made);
            }
        }
        plan(&existing, &wanted, &self.target)
    }

    /// Makes the requests. One that is refused as invalid does not keep back the others.
    async fn apply(&mut self, changes: Changes) -> Result<(), ApiError> {
        for slice in changes.delete {
            self.delete(&slice).await?;
        }
        let mut invalid = Ok(());
        for slice in changes.update.into_iter().chain(changes.create) {
            match self.write(&slice).await {
                Err(error @ ApiError::Invalid { .. }) if self.leave_out(&slice, &error) => {}
                Err(error @ ApiError::Invalid { .. }) => invalid = Err(error),
                other => other?,
            }
        }
        invalid
    }

    async fn delete(&mut self, slice: &ResourceSlice) -> Result<(), ApiError> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let what = Call::new("delete", "resource.k8s.io", "resourceslices", name.clone());
        let exactly =
            Preconditions { uid: slice.metadata.uid.clone(), resource_version: slice.metadata.resource_version.clone() };
        let params = DeleteParams::default().preconditions(exactly);
        let request = Request::new(ResourceSlice::url_path(&(), None)).delete(&name, &params);
        match call(&self.client, &what, request.map_err(|e| what.other(e.to_string()))?, OBJECT_MAX).await {
            Ok(_) => self.written(),
            Err(ApiError::NotFound { .. }) => {}
            Err(error @ ApiError::Conflict { .. }) => return self.read_again(error).await,
            Err(error) => return Err(error),
        }
        if let Some(known) = self.slices.as_mut() {
            known.remove(&name);
        }
        Ok(())
    }

    /// Creates or replaces `slice`, and compares what the server made of it.
    async fn write(&mut self, slice: &ResourceSlice) -> Result<(), ApiError> {
        let name = slice.metadata.name.as_deref();
        let prefix = slice.metadata.generate_name.as_deref().unwrap_or_default();
        let verb = if name.is_some() { "update" } else { "create" };
        let what = Call::new(verb, "resource.k8s.io", "resourceslices", name.unwrap_or(prefix).to_owned());
        let body = serde_json::to_vec(slice).map_err(|e| what.other(e.to_string()))?;
        let base = Request::new(ResourceSlice::url_path(&(), None));
        let request = match name {
            Some(name) => base.replace(name, &PostParams::default(), body),
            None => base.create(&PostParams::default(), body),
        };
        match call(&self.client, &what, request.map_err(|e| what.other(e.to_string()))?, OBJECT_MAX).await {
            Ok(text) => {
                let stored = serde_json::from_str(&text);
                let stored = stored.map_err(|e| what.other(format!("the answer is not a ResourceSlice: {e}")))?;
                self.written();
                self.read_back(slice, &stored);
                self.learn(stored);
                Ok(())
            }
            Err(error @ (ApiError::Conflict { .. } | ApiError::NotFound { .. })) if name.is_some() => {
                self.read_again(error).await
            }
            Err(error) => Err(error),
        }
    }

    fn written(&mut self) {
        self.written = Some(Instant::now());
        self.status.last_write = Some(SystemTime::now());
    }

    /// What we know is out of date: lists, and ends the round with `error`, so that the next one comes after a short wait.
    async fn read_again(&mut self, error: ApiError) -> Result<(), ApiError> {
        let listed = list(&self.client, &self.selector).await?;
        self.listed(listed);
        Err(error)
    }

    /// Remembers what the server does not store as it was sent, so that it is not sent for ever, and says so once.
    fn read_back(&mut self, sent: &ResourceSlice, made: &ResourceSlice) {
        let sent = sent.spec.devices.as_deref().unwrap_or_default();
        let made = made.spec.devices.as_deref().unwrap_or_default();
        if same(sent, made) {
            return;
        }
        let fields = dropped(sent, made);
        if !fields.is_subset(&self.dropped) {
            let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
            tracing::warn!(
                fields = fields.join(", "),
                "the API server dropped fields of ResourceSlices: a feature of the cluster is off"
            );
        }
        self.dropped.extend(fields);
        // One entry for each wanted slice is enough; older ones belong to content that is gone.
        self.stored.truncate(self.wanted.len() / 32 + 8);
        self.stored.insert(0, (sent.to_vec(), made.to_vec()));
    }

    /// Leaves out the devices that `error` names by their index in `slice`; false when it names none.
    fn leave_out(&mut self, slice: &ResourceSlice, error: &ApiError) -> bool {
        let ApiError::Invalid { fields, text, .. } = error else { return false };
        let devices = slice.spec.devices.as_deref().unwrap_or_default();
        let named: BTreeSet<usize> = fields.iter().filter_map(|f| device_index(f)).filter(|at| *at < devices.len()).collect();
        if named.is_empty() || self.refused.len() + named.len() > REFUSED_MAX {
            return false;
        }
        for device in named.into_iter().map(|at| &devices[at]) {
            let Some(wanted) = self.wanted.iter().find(|d| d.name == device.name) else { continue };
            let reason = format!("device {}: left out, the API server refuses it: {text}", device.name);
            tracing::warn!("{reason}");
            self.refused.push((wanted.clone(), reason));
        }
        true
    }

    fn report(&mut self) {
        let slices = self.slices.as_ref();
        let count = |s: &ResourceSlice| s.spec.devices.as_ref().map_or(0, Vec::len);
        self.status.slices = slices.map_or(0, BTreeMap::len);
        self.status.published = slices.iter().flat_map(|s| s.values()).map(count).sum();
        self.status.generation = slices.iter().flat_map(|s| s.values()).map(|s| s.spec.pool.generation).max().unwrap_or(0);
        let error = self.write_error.as_ref().or(self.follow_error.as_ref());
        self.status.last_error = error.map(ToString::to_string);
        self.status.dropped_fields = self.dropped.iter().cloned().collect();
        self.status.refused = self.refused.iter().map(|(_, reason)| reason.clone()).collect();
        self.status.in_sync = slices.is_some() && self.write_error.is_none() && self.changes().is_empty();
    }
}

/// Without what only the server needs.
fn lean(mut slice: ResourceSlice) -> ResourceSlice {
    slice.metadata.managed_fields = None;
    slice
}

/// `spec.devices[12].attributes[…]` → 12.
fn device_index(field: &str) -> Option<usize> {
    field.strip_prefix("spec.devices[")?.split_once(']')?.0.parse().ok()
}

/// Resource versions of the API server are numbers that grow.
fn number(version: &str) -> Option<u128> {
    version.parse().ok()
}

fn version_of(slice: &ResourceSlice) -> Option<u128> {
    number(slice.metadata.resource_version.as_deref()?)
}

/// Whether `slice` is surely newer than `version`.
fn newer(slice: &ResourceSlice, version: Option<u128>) -> bool {
    matches!((version_of(slice), version), (Some(ours), Some(theirs)) if ours > theirs)
}
