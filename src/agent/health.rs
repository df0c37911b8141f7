//! Looks at the devices' links and RDMA devices, on the host and in the pods, whenever something changed there or in the ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::Shared;
use crate::attach::Engine;
use crate::dra::health::judge::{self, Links, Place, RdmaState, Seen, SeenRdma};
use crate::dra::health::{Report, Reports, State};
use crate::inventory::sysfs::Sysfs;
use crate::ledger::{ClaimRecord, Phase};
use crate::names::SandboxId;
use crate::netdev::link;
use crate::netdev::monitor::{Group, Monitor};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;
use crate::rdma::{RdmaMonitor, RdmaSocket};

/// Changes are followed by a look after so long, together with what came meanwhile.
const QUIET: Duration = Duration::from_millis(200);
/// As long as devices are on their way nothing can be said of them, and a look would take time from under their moves (the kernel
/// has one lock for both), but nobody waits longer than this for the others.
const ON_THE_WAY: Duration = Duration::from_secs(2);
/// A look at everything is taken that often although nothing is known to have changed.
const RECHECK: Duration = Duration::from_secs(60);
/// The same where there are devices without a link: no event tells the state of an InfiniBand port.
const RECHECK_PORTS: Duration = Duration::from_secs(10);
/// Time for all dumps of a look. The kernel may be busy with moves under the same lock.
const DUMPS: Duration = Duration::from_secs(10);
/// How often in a row a look is thrown away because the ledger changed during it.
const UNSETTLED: usize = 5;
/// Most namespaces that are listened to, above the pods that a node may have; the others are looked at every [`RECHECK`].
const WATCHED_MAX: usize = 512;
/// Receive buffer of a pod's monitor, bytes: what it says does not matter, and an overrun is a change as well.
const BUFFER: usize = 16 * 1024;
/// A pod may change its links as often as it likes; it is heard that often.
const HEARD: Duration = Duration::from_millis(100);

/// Starts looking, until `stop`.
pub(super) fn start(shared: Arc<Shared>, host: Netns, stop: CancellationToken) -> Reports {
    let (sender, reports) = watch::channel(None);
    let watcher = Watcher { shared, host: Arc::new(host), pods: BTreeMap::new(), changed: Arc::default(), sender };
    tokio::spawn(watcher.run(stop));
    reports
}

/// Namespaces in which something happened since the last look.
#[derive(Default)]
struct Changed {
    sandboxes: Mutex<BTreeSet<SandboxId>>,
    told: Notify,
}

impl Changed {
    fn note(&self, sandbox: SandboxId) {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner).insert(sandbox);
        self.told.notify_one();
    }

    fn take(&self) -> BTreeSet<SandboxId> {
        std::mem::take(&mut *self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One sandbox with attached devices. While it is here the namespace can't end, so it goes as soon as a release begins.
struct Pod {
    netns: Arc<Netns>,
    /// Of all records with devices in it: another sum means other devices.
    generations: u64,
    /// As last seen; none when it has to be looked at.
    seen: Option<Place>,
    /// RDMA devices moved into it.
    has_rdma: bool,
    /// None where it can't be listened to.
    listener: Option<AbortOnDropHandle<()>>,
}

struct Watcher {
    shared: Arc<Shared>,
    host: Arc<Netns>,
    pods: BTreeMap<SandboxId, Pod>,
    changed: Arc<Changed>,
    sender: watch::Sender<Option<Arc<Report>>>,
}

impl Watcher {
    async fn run(mut self, stop: CancellationToken) {
        let mut scans = self.shared.inventory.subscribe();
        let mut writes = self.shared.engine.ledger().subscribe();
        let mut unsettled = 0;
        let mut recheck = Instant::now() + self.recheck();
        loop {
            scans.mark_unchanged();
            writes.mark_unchanged();
            self.follow();
            let is_last_try = unsettled == UNSETTLED;
            let is_settled = tokio::select! {
                () = stop.cancelled() => return,
                is_settled = self.look(is_last_try) => is_settled,
            };
            unsettled = if is_settled || is_last_try { 0 } else { unsettled + 1 };
            let changed = self.changed.clone();
            tokio::select! {
                () = stop.cancelled() => return,
                () = std::future::ready(()), if unsettled > 0 => {}
                Ok(()) = scans.changed() => {}
                Ok(()) = writes.changed() => {}
                () = changed.told.notified() => {}
                () = sleep_until(recheck) => {
                    recheck = Instant::now() + self.recheck();
                    self.forget();
                }
            }
            let (begin, quiet) = (Instant::now(), sleep(QUIET));
            tokio::pin!(quiet);
            loop {
                // Namespaces that devices have left are let go at once.
                let on_the_way = self.follow();
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = &mut quiet => {
                        if !on_the_way || begin.elapsed() > ON_THE_WAY {
                            break;
                        }
                        quiet.as_mut().reset(Instant::now() + QUIET);
                    }
                    Ok(()) = writes.changed() => {}
                }
            }
        }
    }

    /// Listens to the sandboxes that have attached devices, and to no other. Tells whether devices are on their way.
    fn follow(&mut self) -> bool {
        let records = current(&self.shared.engine);
        let wanted = sandboxes(&records);
        self.pods.retain(|sandbox, _| wanted.contains_key(sandbox));
        for (sandbox, (generations, has_rdma)) in wanted {
            match self.pods.get_mut(&sandbox) {
                Some(pod) if pod.has_rdma == has_rdma && pod.generations == generations => {}
                Some(pod) if pod.has_rdma == has_rdma => (pod.generations, pod.seen) = (generations, None),
                _ => {
                    let Some(netns) = self.shared.engine.netns_of(&sandbox) else { continue };
                    let listener = self.listen(&sandbox, &netns, has_rdma);
                    self.pods.insert(sandbox, Pod { netns, generations, seen: None, has_rdma, listener });
                }
            }
        }
        for sandbox in self.changed.take() {
            if let Some(pod) = self.pods.get_mut(&sandbox) {
                pod.seen = None;
            }
        }
        records.iter().flat_map(|r| &r.devices).any(|d| matches!(d.phase, Phase::Attaching | Phase::Releasing))
    }

    /// Everything is to be looked at anew, and listened to where that failed.
    fn forget(&mut self) {
        self.pods.retain(|_, pod| pod.listener.as_ref().is_some_and(|listener| !listener.is_finished()));
        self.pods.values_mut().for_each(|pod| pod.seen = None);
    }

    /// How long until all is looked at again.
    fn recheck(&self) -> Duration {
        let is_linkless = self.shared.inventory.current().devices.iter().any(|device| device.is_rdma_only);
        if is_linkless { RECHECK_PORTS } else { RECHECK }
    }

    fn listen(&self, sandbox: &SandboxId, netns: &Netns, has_rdma: bool) -> Option<AbortOnDropHandle<()>> {
        if self.pods.len() >= WATCHED_MAX {
            return None;
        }
        let rdma = has_rdma.then(|| RdmaMonitor::open(netns, true)).transpose();
        let opened = Monitor::with_receive_buffer(netns, &[Group::Link], BUFFER).and_then(|links| Ok((links, rdma?)));
        let (links, rdma) = opened.inspect_err(|error| warn(sandbox, error)).ok()?;
        Some(AbortOnDropHandle::new(tokio::spawn(hear(links, rdma, sandbox.clone(), self.changed.clone()))))
    }

    /// Looks at what has to be looked at, and tells. False when the ledger changed meanwhile: then what was seen is not told, unless
    /// it is the last try.
    async fn look(&mut self, is_last_try: bool) -> bool {
        let stale = self.pods.iter().filter(|(_, pod)| pod.seen.is_none());
        let stale: Vec<_> = stale.map(|(sandbox, pod)| (sandbox.clone(), pod.netns.clone(), pod.has_rdma)).collect();
        let (shared, host) = (self.shared.clone(), self.host.clone());
        let seen = tokio::task::spawn_blocking(move || {
            let records = current(&shared.engine);
            let deadline = std::time::Instant::now() + DUMPS;
            // Without records the inventory's look at the host is all that counts.
            let links = if records.is_empty() { Ok(Arc::default()) } else { list(&host, deadline) };
            let has_rdma = Sysfs::new(&shared.config.sysfs).has_rdma();
            let on_host = Place { links, rdma: rdma_in(&host, has_rdma, deadline) };
            let look = |(sandbox, netns, has_rdma): (SandboxId, Arc<Netns>, bool)| {
                (sandbox, Place { links: list(&netns, deadline), rdma: rdma_in(&netns, has_rdma, deadline) })
            };
            let in_pods: Vec<_> = stale.into_iter().map(look).collect();
            let is_settled = records == current(&shared.engine);
            (records, on_host, in_pods, is_settled)
        });
        let (records, host, in_pods, is_settled) = match seen.await {
            Ok(seen) => seen,
            Err(error) => {
                tracing::error!(%error, "looking at the health of devices ended badly");
                return true;
            }
        };
        for (sandbox, place) in in_pods {
            if let Some(pod) = self.pods.get_mut(&sandbox) {
                pod.seen = Some(place);
            }
        }
        if is_settled || is_last_try {
            let seen = self.pods.iter().filter_map(|(sandbox, pod)| Some((sandbox.clone(), pod.seen.clone()?)));
            self.tell(&records, &Links { host, pods: seen.collect() });
        }
        is_settled
    }

    fn tell(&self, records: &[Arc<ClaimRecord>], links: &Links) {
        let scan = self.shared.inventory.current();
        let devices = judge::all(&self.shared.config.node_name, &scan, records.iter().map(|r| &**r), links);
        let unhealthy = devices.iter().filter(|d| d.state == State::Unhealthy).count();
        self.shared.metrics.unhealthy_devices.set(i64::try_from(unhealthy).unwrap_or(i64::MAX));
        let report = Arc::new(Report { devices, at: SystemTime::now() });
        self.sender.send_if_modified(|last| {
            let changes = log_changes(last.as_deref(), &report);
            *last = Some(report);
            changes
        });
    }
}

/// The sandboxes with attached devices: the sum of their records' generations, and whether RDMA devices moved into them.
fn sandboxes(records: &[Arc<ClaimRecord>]) -> BTreeMap<SandboxId, (u64, bool)> {
    let mut sandboxes = BTreeMap::<SandboxId, (u64, bool)>::new();
    for record in records {
        let mut own = BTreeMap::<&SandboxId, bool>::new();
        for device in record.devices.iter().filter(|device| device.phase == Phase::Attached) {
            if let Some(attachment) = &device.attachment {
                *own.entry(&attachment.sandbox).or_default() |= device.moving_rdma().is_some();
            }
        }
        for (sandbox, has_rdma) in own {
            let of_all = sandboxes.entry(sandbox.clone()).or_default();
            *of_all = (of_all.0 + record.generation, of_all.1 | has_rdma);
        }
    }
    sandboxes
}

/// Notes what happens in a sandbox until it can't be listened to any more.
async fn hear(mut links: Monitor, mut rdma: Option<RdmaMonitor>, sandbox: SandboxId, changed: Arc<Changed>) {
    loop {
        let heard = match &mut rdma {
            None => links.changed().await.map(drop),
            Some(rdma) => tokio::select! {
                heard = links.changed() => heard.map(drop),
                heard = rdma.changed() => heard,
            },
        };
        if let Err(error) = heard {
            warn(&sandbox, &error);
            changed.note(sandbox);
            return;
        }
        changed.note(sandbox.clone());
        sleep(HEARD).await;
    }
}

fn warn(sandbox: &SandboxId, error: &NetlinkError) {
    tracing::warn!(%sandbox, %error, "can't listen to the pod's links and RDMA devices; they are looked at every minute");
}

/// Records of this boot.
fn current(engine: &Engine) -> Vec<Arc<ClaimRecord>> {
    let mut records = engine.records();
    records.retain(|record| record.boot_id == engine.boot_id());
    records
}

fn list(netns: &Netns, deadline: std::time::Instant) -> Seen {
    let links = RouteSocket::open_in(netns).and_then(|mut socket| link::list(&mut socket, deadline));
    links.map(Arc::new).map_err(|error| error.to_string())
}

/// RDMA devices that `netns` sees; none where it need not be asked.
fn rdma_in(netns: &Netns, has_rdma: bool, deadline: std::time::Instant) -> SeenRdma {
    let read = || {
        let Some(mut socket) = RdmaSocket::open_in(netns)? else { return Ok(Vec::new()) };
        let mut states = Vec::new();
        for device in socket.devices(deadline)? {
            let ports = socket.ports(device.index, deadline)?.into_iter().map(|port| (port.port, port.state)).collect();
            states.push(RdmaState { device, ports });
        }
        Ok(states)
    };
    let states = if has_rdma { read() } else { Ok(Vec::new()) };
    states.map(Arc::new).map_err(|error: NetlinkError| error.to_string())
}

/// Logs what became of devices, and tells whether anything did.
fn log_changes(before: Option<&Report>, now: &Report) -> bool {
    let Some(before) = before else { return true };
    let known: BTreeMap<_, _> = before.devices.iter().map(|d| (&d.device, d)).collect();
    for device in &now.devices {
        let was = known.get(&device.device).map(|d| d.state);
        match (was, device.state) {
            (was, State::Unhealthy) if was != Some(State::Unhealthy) => {
                tracing::warn!(device = %device.device, why = device.message, "unhealthy");
            }
            (Some(State::Unhealthy), _) => {
                tracing::info!(device = %device.device, state = ?device.state, "not unhealthy any more")
            }
            _ => {}
        }
    }
    before.devices != now.devices
}
