//! Carries plans out and undoes them, and keeps the ledger true. Everything here blocks: call it on threads that may.

mod adopt;
mod attach;
mod configure;
mod create;
mod ended;
mod foretell;
mod home;
mod ipoib;
mod jobs;
mod kept;
mod lease;
pub(crate) mod locate;
mod lost;
mod note;
mod observe;
mod pods;
mod prepare;
mod rdma;
mod rdma_home;
mod rdma_in;
mod recover;
mod refusal;
mod release;
mod reserve;
mod restore;
mod returned;
mod settings;
mod taken;
mod tend;
mod there;
mod turns;
mod usable;
mod vf;
mod vrf;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::attach::forecast::Forecast;
use crate::inventory::sysfs::Sysfs;
use crate::inventory::{Lent, Scan};
use crate::ledger::{ClaimRecord, DeviceRecord, Ledger, LedgerError, Phase};
use crate::names::{PodUid, SandboxId};
use crate::netdev::bpf::TakeOffError;
use crate::netlink::NetlinkError;
use crate::netns::{Netns, NetnsError};
use turns::Pace;

pub use attach::{Attach, AttachError, AttachTimes};
pub use lost::Lost;
pub use observe::{Look, Observation, Observed, Observer, Seen};
pub use pods::PodGuard;
pub(crate) use rdma::preview_rdma;
pub use recover::{Listed, Reconciled};
pub use refusal::{PrepareError, PrepareReason};
pub use release::Released;
pub use tend::{HeldLease, LeaseNews, Tended};
pub use usable::{Opener, RdmaInPod, RdmaState};

/// How long prepare and unprepare wait for another operation of the pod: the kubelet gives them 45 s, and asks again.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// How long a single look at the kernel may take. Generous: RTNL may be held by others for seconds.
const LOOK: Duration = Duration::from_secs(10);

/// Where the engine learns which devices this node has.
pub trait DeviceSource: Send + Sync + 'static {
    /// What is known now.
    fn current(&self) -> Arc<Scan>;
    /// Looks again, now. Blocks.
    fn rescan(&self) -> Arc<Scan>;
}

/// Prepares, attaches, releases and unprepares devices of this node.
#[derive(Debug)]
pub struct Engine {
    ledger: Arc<Ledger>,
    host: Netns,
    boot_id: String,
    source: SourceBox,
    /// Which claim has, or is about to have, which device.
    reserved: Mutex<reserve::Reserved>,
    /// One at a time for each pod.
    pods: pods::Pods,
    /// Namespaces held open from attach to release, so that an orderly return is possible after the runtime unlinked the path.
    pins: Mutex<HashMap<SandboxId, Arc<Netns>>>,
    turns: turns::Turns,
    forecast: Mutex<Forecast>,
    ended: ended::Ended,
    /// How long a DHCP server is waited for.
    dhcp_timeout: Duration,
    /// Held while a virtual function is looked at and set.
    vfs: Mutex<()>,
    /// Held from reading RDMA devices to recording who has them.
    rdma_plans: Mutex<()>,
    /// RDMA devices of one card move one after the other.
    cards: rdma_in::Cards,
    /// Where virtual functions are told from others.
    sysfs: Sysfs,
    observer: observe::ObserverBox,
    kept: kept::Kept,
}

/// A [`DeviceSource`] that can be printed.
struct SourceBox(Arc<dyn DeviceSource>);

impl std::fmt::Debug for SourceBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DeviceSource")
    }
}

impl Engine {
    /// An engine over `ledger` for the namespace `host`. Call [`Engine::recover`] before anything else. Records of before a reboot
    /// hold no device: nothing of them is true any more.
    #[must_use]
    pub fn new(ledger: Arc<Ledger>, host: Netns, boot_id: String, source: Arc<dyn DeviceSource>) -> Self {
        let mut reserved = reserve::Reserved::default();
        for record in ledger.all().iter().filter(|record| record.boot_id == boot_id) {
            record.devices.iter().for_each(|device| reserved.add(device.share(), device.child().copied(), &record.claim.uid));
        }
        Self {
            ledger,
            host,
            boot_id,
            source: SourceBox(source),
            reserved: Mutex::new(reserved),
            pods: pods::Pods::default(),
            pins: Mutex::default(),
            turns: turns::Turns::default(),
            forecast: Mutex::default(),
            ended: ended::Ended::default(),
            dhcp_timeout: lease::DHCP_TIMEOUT,
            vfs: Mutex::default(),
            rdma_plans: Mutex::default(),
            cards: rdma_in::Cards::default(),
            sysfs: Sysfs::new("/sys"),
            observer: observe::ObserverBox::default(),
            kept: kept::Kept::default(),
        }
    }

    /// Looks at the sysfs tree `sysfs`; without it at `/sys`.
    #[must_use]
    pub fn with_sysfs(mut self, sysfs: Sysfs) -> Self {
        self.sysfs = sysfs;
        self
    }

    /// All records, for status and for the inventory.
    #[must_use]
    pub fn records(&self) -> Vec<Arc<ClaimRecord>> {
        self.ledger.all()
    }

    /// The ledger below.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// How many namespaces are held open.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.pins().len()
    }

    /// Whether a claim of this pod is prepared here. A map look-up.
    #[must_use]
    pub fn has_pod(&self, uid: &str) -> bool {
        self.ledger.has_pod(uid)
    }

    /// Keeps the sandbox's namespace open.
    fn pin(&self, sandbox: &SandboxId, netns: &Arc<Netns>) {
        self.pins().insert(sandbox.clone(), netns.clone());
    }

    /// Lets the sandbox's namespace go, unless a device of the pod may still be in it.
    fn unpin_unused(&self, pod: &PodUid, sandbox: &SandboxId) {
        let records = self.ledger.by_pod(pod);
        let mut attachments = records.iter().flat_map(|r| &r.devices).filter_map(|d| d.attachment.as_ref());
        if !attachments.any(|attachment| attachment.sandbox == *sandbox) {
            self.pins().remove(sandbox);
        }
    }

    /// Boot id of the machine: records with another one are void.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// The sandbox's namespace, while it is held open.
    #[must_use]
    pub fn netns_of(&self, sandbox: &SandboxId) -> Option<Arc<Netns>> {
        self.pins().get(sandbox).cloned()
    }

    fn reserved(&self) -> MutexGuard<'_, reserve::Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pins(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Netns>>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The devices that are lent, for the inventory: they stay published as they were. What was lent before a reboot is not.
#[must_use]
pub fn lent(ledger: &Ledger, boot_id: &str) -> Vec<Lent> {
    let records = ledger.all();
    let current = records.iter().filter(|record| record.boot_id == boot_id);
    let mut lent: Vec<Lent> = current.flat_map(|record| record.devices.iter()).map(lent_device).collect();
    lent.sort_by(|a, b| a.name.cmp(&b.name));
    lent.dedup_by(|a, b| a.name == b.name);
    lent
}

fn lent_device(device: &DeviceRecord) -> Lent {
    Lent {
        // A share has a name of its own in the slice.
        name: if device.child().is_some() { device.hardware.device_name() } else { device.device.clone() },
        hardware: device.hardware.clone(),
        attributes: device.attributes.clone(),
        index: device.host.index,
        host_name: device.host.name.clone(),
        is_rdma_only: !device.has_link(),
    }
}

/// What can go wrong on the way to or from the kernel, below claims and pods.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Netlink.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Namespaces.
    #[error(transparent)]
    Netns(#[from] NetnsError),
    /// eBPF programs.
    #[error(transparent)]
    Programs(#[from] TakeOffError),
    /// The ledger.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The kernel did not answer in time: RTNL was held by others, for too long.
    #[error("device {0}: the kernel did not answer in time")]
    Late(String),
}

fn look_deadline() -> Instant {
    Instant::now() + LOOK
}

/// Milliseconds since 1970.
fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn micros_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn phase_word(phase: Phase) -> &'static str {
    match phase {
        Phase::Prepared => "prepared, not attached yet",
        Phase::Attaching => "being attached",
        Phase::Attached => "attached",
        Phase::Releasing => "being given back",
    }
}
