//! The inventory as it is now, kept up to date by a monitor and a slow full rescan.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::rdma::RdmaSeen;
use super::sysfs::Sysfs;
use super::{Lent, Scan, ScanOptions, scan};
use crate::netdev::bpf::{self, Programs};
use crate::netdev::host_state::Snapshot;
use crate::netdev::monitor::{Group, Monitor};
use crate::netdev::{Link, Qdisc, address, link, qdisc, route};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;
use crate::rdma::{RdmaMonitor, RdmaSocket};

/// Events are followed by a look when none came for so long, …
const QUIET: Duration = Duration::from_millis(100);
/// … or so long after the first.
const AT_MOST: Duration = Duration::from_secs(2);
/// Time for the three dumps of a look. The kernel may be busy with moves under the same lock.
const DUMPS: Duration = Duration::from_secs(10);
/// First and longest pause before a monitor is opened again.
const REOPEN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// A look that found problems is taken again after so long.
const RETRY: Duration = Duration::from_secs(5);
/// How often a look is taken again at once because devices were lent or returned meanwhile.
const LOOKS: usize = 3;

/// Why the inventory could not be started.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// No events of the host's links.
    #[error("can't listen to changes of the host's links: {0}")]
    Monitor(#[source] NetlinkError),
    /// The host could not be looked at.
    #[error("can't look at the host's links: {0}")]
    Scan(String),
}

/// What to look at.
#[derive(Debug)]
pub struct InventoryConfig {
    /// The host's namespace.
    pub netns: Netns,
    /// The host's sysfs.
    pub sysfs: Sysfs,
    /// What to offer.
    pub options: ScanOptions,
    /// A look is taken that often, whatever happens; 60 s is a good choice.
    pub rescan: Duration,
}

type LentDevices = Arc<dyn Fn() -> Vec<Lent> + Send + Sync>;

/// The inventory: a task that looks at the host whenever something changes. Cheap to clone.
#[derive(Clone)]
pub struct Inventory {
    shared: Arc<Shared>,
}

struct Shared {
    config: InventoryConfig,
    lent: LentDevices,
    scans: watch::Sender<Arc<Scan>>,
    /// One look at a time, so that an older one never replaces a newer one.
    looking: Mutex<()>,
    asked: Notify,
}

impl std::fmt::Debug for Inventory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inventory").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Inventory {
    /// Takes a first look, and then keeps looking until `stop`. `lent` tells which devices pods have, as the ledger knows it; call
    /// [`Self::rescan`] when that changed without a change of links.
    ///
    /// # Errors
    /// When the host can't be listened to or looked at.
    pub async fn start(config: InventoryConfig, lent: LentDevices, stop: CancellationToken) -> Result<Self, InventoryError> {
        // Listening begins before the first look, so that nothing is missed between.
        let events = Events::open(&config).map_err(InventoryError::Monitor)?;
        let (scans, _) = watch::channel(Arc::default());
        let shared = Arc::new(Shared { config, lent, scans, looking: Mutex::default(), asked: Notify::new() });
        shared.look(None).await.map_err(InventoryError::Scan)?;
        if !shared.config.sysfs.has_rdma() {
            tracing::info!("this kernel has no RDMA (no module ib_core): NICs are offered without it");
        }
        tokio::spawn(keep_looking(Arc::clone(&shared), events, stop));
        Ok(Self { shared })
    }

    /// What the last look found.
    #[must_use]
    pub fn current(&self) -> Arc<Scan> {
        self.shared.scans.borrow().clone()
    }

    /// Tells when a look found something else than the one before.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<Scan>> {
        self.shared.scans.subscribe()
    }

    /// Asks for a look soon.
    pub fn rescan(&self) {
        self.shared.asked.notify_one();
    }

    /// Looks now: what it returns was read after the call.
    pub async fn rescan_now(&self) -> Arc<Scan> {
        self.shared.look_and_tell().await;
        self.current()
    }
}

impl Shared {
    /// Looks and publishes. The first look (`previous` is none) fails when the host can't be read; later ones keep what was.
    async fn look(self: &Arc<Self>, previous: Option<Arc<Scan>>) -> Result<(), String> {
        let shared = Arc::clone(self);
        let is_first = previous.is_none();
        let work = move || look(&shared.config, &shared.lent, previous.as_deref());
        let (scan, problem) = tokio::task::spawn_blocking(work).await.map_err(|e| format!("the look itself failed: {e}"))?;
        match problem {
            Some(problem) if is_first => return Err(problem),
            _ => {}
        }
        let scan = Arc::new(scan);
        self.scans.send_if_modified(|current| {
            let is_new = **current != *scan;
            if is_new {
                *current = scan;
            }
            is_new
        });
        Ok(())
    }

    async fn look_and_tell(self: &Arc<Self>) {
        let _one_at_a_time = self.looking.lock().await;
        let before = self.scans.borrow().clone();
        if let Err(error) = self.look(Some(Arc::clone(&before))).await {
            tracing::error!(error, "inventory");
        }
        let now = self.scans.borrow().clone();
        for problem in now.problems.iter().filter(|problem| !before.problems.contains(problem)) {
            tracing::warn!(problem, "inventory: some links could not be looked at");
        }
    }
}

/// One look at the calling thread's host, with nothing lent: for the command line.
///
/// # Errors
/// When links, addresses or routes can't be read.
pub fn once(sysfs: &Sysfs, options: ScanOptions) -> Result<Scan, String> {
    let netns = Netns::current().map_err(|error| error.to_string())?;
    let snapshot =
        dump(&netns, options).map_err(|error| format!("can't read the host's links, addresses and routes: {error}"))?;
    let rdma = rdma(&netns, sysfs);
    Ok(scan::build(Ok((&snapshot, &rdma)), sysfs, options, &[], None))
}

/// One look, and why it failed, if it did.
fn look(config: &InventoryConfig, lent: &LentDevices, previous: Option<&Scan>) -> (Scan, Option<String>) {
    let mut before = lent();
    let mut attempt = 1;
    loop {
        let snapshot = dump(&config.netns, config.options)
            .map_err(|error| format!("can't read the host's links, addresses and routes: {error}"));
        let rdma = rdma(&config.netns, &config.sysfs);
        let after = lent();
        let is_settled = before == after || attempt == LOOKS;
        // A device may go out or come back while we look. One that was lent at either time is not new.
        let since: Vec<_> = before.into_iter().filter(|lent| !after.iter().any(|other| other.name == lent.name)).collect();
        if is_settled {
            let all: Vec<_> = after.into_iter().chain(since).collect();
            let problem = snapshot.as_ref().err().cloned();
            let seen = snapshot.as_ref().map(|snapshot| (snapshot, &rdma)).map_err(Clone::clone);
            return (scan::build(seen, &config.sysfs, config.options, &all, previous), problem);
        }
        before = after;
        attempt += 1;
    }
}

fn dump(netns: &Netns, options: ScanOptions) -> Result<Snapshot, NetlinkError> {
    let mut socket = RouteSocket::open_in(netns)?;
    let deadline = std::time::Instant::now() + DUMPS;
    let (links, qdiscs) = (link::list(&mut socket, deadline)?, qdisc::list(&mut socket, deadline)?);
    Ok(Snapshot {
        addresses: address::list(&mut socket, deadline)?,
        routes: route::list(&mut socket, deadline)?,
        programs: netns.run(|| programs(&links, &qdiscs, options, deadline))?,
        links,
        ..Snapshot::default()
    })
}

/// What RDMA netlink tells. Where the kernel has no RDMA it is not asked: that would make it look for a module each time.
fn rdma(netns: &Netns, sysfs: &Sysfs) -> RdmaSeen {
    if !sysfs.has_rdma() {
        return RdmaSeen::default();
    }
    let read = || {
        let Some(mut socket) = RdmaSocket::open_in(netns)? else { return Ok(RdmaSeen::default()) };
        let deadline = std::time::Instant::now() + DUMPS;
        let mode = match socket.netns_mode(deadline) {
            // A kernel before 5.2 has no modes.
            Err(error) if matches!(error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => None,
            mode => Some(mode?),
        };
        let devices = socket.devices(deadline)?;
        let ports = devices.into_iter().map(|device| Ok((socket.ports(device.index, deadline)?, device)));
        let devices = ports.map(|both| both.map(|(ports, device)| (device, ports))).collect::<Result<_, NetlinkError>>()?;
        Ok(RdmaSeen { mode, devices, problem: None })
    };
    read().unwrap_or_else(|error: NetlinkError| RdmaSeen {
        problem: Some(format!("can't read RDMA devices by netlink ({error}); sysfs alone tells of them")),
        ..RdmaSeen::default()
    })
}

/// eBPF of each link that may be offered: a node has hundreds of veths, which are pods', with programs of the cluster network.
fn programs(
    links: &[Link],
    qdiscs: &[(u32, Qdisc)],
    options: ScanOptions,
    deadline: std::time::Instant,
) -> BTreeMap<u32, Programs> {
    let wanted = links.iter().filter(|link| options.offer_veth || link.kind.as_deref() != Some("veth"));
    let of_link = |link: &Link| {
        let qdiscs: Vec<Qdisc> = qdiscs.iter().filter(|(index, _)| *index == link.index).map(|(_, q)| q.clone()).collect();
        (link.index, bpf::glance(link, &qdiscs, deadline))
    };
    wanted.map(of_link).collect()
}

/// Monitors that are opened again when they fail.
struct Events {
    /// Of links, and of RDMA devices.
    monitors: Option<(Monitor, RdmaMonitor)>,
    pause: Duration,
    reopen_at: Instant,
}

fn open_monitors(config: &InventoryConfig) -> Result<(Monitor, RdmaMonitor), NetlinkError> {
    let monitor = Monitor::open(&config.netns, &[Group::Link, Group::Address, Group::Route])?;
    Ok((monitor, RdmaMonitor::open(&config.netns, config.sysfs.has_rdma())?))
}

impl Events {
    fn open(config: &InventoryConfig) -> Result<Self, NetlinkError> {
        Ok(Self { monitors: Some(open_monitors(config)?), pause: REOPEN.0, reopen_at: Instant::now() })
    }

    /// Waits for a change, or for the monitors to work again (what happened meanwhile is unknown).
    async fn next(&mut self, config: &InventoryConfig) {
        loop {
            let Some((links, rdma)) = &mut self.monitors else {
                sleep_until(self.reopen_at).await;
                match open_monitors(config) {
                    Ok(monitors) => {
                        self.monitors = Some(monitors);
                        return;
                    }
                    Err(error) => self.failed(&error),
                }
                continue;
            };
            let changed = tokio::select! {
                changed = links.changed() => changed.map(drop),
                changed = rdma.changed() => changed,
            };
            if !rdma.is_complete() && config.sysfs.has_rdma() {
                // The kernel's modules were loaded meanwhile.
                if let Ok(complete) = RdmaMonitor::open(&config.netns, true) {
                    *rdma = complete;
                }
            }
            match changed {
                Ok(()) => {
                    self.pause = REOPEN.0;
                    return;
                }
                Err(error) => self.failed(&error),
            }
        }
    }

    fn failed(&mut self, error: &NetlinkError) {
        tracing::warn!(%error, pause = ?self.pause, "inventory: can't listen to changes of links and RDMA devices; trying again");
        self.monitors = None;
        self.reopen_at = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(REOPEN.1);
    }
}

async fn keep_looking(shared: Arc<Shared>, mut events: Events, stop: CancellationToken) {
    let config = &shared.config;
    let mut next_rescan = Instant::now() + config.rescan;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = shared.asked.notified() => {}
            () = sleep_until(next_rescan) => {}
            () = events.next(config) => {
                let latest = Instant::now() + AT_MOST;
                let quiet = async { while timeout(QUIET, events.next(config)).await.is_ok() {} };
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = sleep_until(latest) => {}
                    () = quiet => {}
                }
            }
        }
        shared.look_and_tell().await;
        let has_problems = !shared.scans.borrow().problems.is_empty();
        next_rescan = Instant::now() + if has_problems { config.rescan.min(RETRY) } else { config.rescan };
    }
}
