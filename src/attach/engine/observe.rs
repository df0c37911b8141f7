//! Telling somebody what happened, and what the kernel has of devices in their pods.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Engine, KernelError, LeaseNews, Released, locate, look_deadline};
use crate::ledger::{ClaimRecord, DeviceRecord, Phase, Share};
use crate::names::{ClaimUid, PodUid};
use crate::netdev::{Address, Link, address, link};
use crate::netlink::RouteSocket;
use crate::netns::{Netns, NetnsId};

/// What happened to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// It was prepared.
    Prepared,
    /// All its devices are in the pod.
    Attached,
    /// They are not, and why.
    AttachFailed(String),
    /// Containers of its pod were started without its devices.
    Missed,
    /// Devices were taken back, or not: by a stop, a roll-back, or unprepare.
    Released(Vec<Released>),
    /// Something keeps the namespace of a sandbox alive that ended: what, in words.
    Held(String),
    /// A device is on the host again, but not as it was: what, and why. Without an entry all is well.
    Restored(Share, Vec<(String, String)>),
    /// A device's address by DHCP is lost, is there again, or is another one.
    Lease(Share, LeaseNews),
    /// The RDMA device of a device can be used in the pod, can't any more, or has other GIDs.
    Rdma(Share),
    /// It was unprepared, and nothing of it is recorded any more.
    Forgotten,
}

/// An [`Observed`] and the claim it is about, as it was recorded then.
#[derive(Debug, Clone)]
pub struct Observation {
    /// The claim.
    pub record: Arc<ClaimRecord>,
    /// What happened.
    pub what: Observed,
}

/// Who is told. Called on the thread that does the work: it must return at once.
pub type Observer = Arc<dyn Fn(Observation) + Send + Sync>;

/// An [`Observer`] that can be printed.
#[derive(Default)]
pub(super) struct ObserverBox(Option<Observer>);

impl std::fmt::Debug for ObserverBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

/// What the kernel has of a device that is recorded as attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// It is in the pod.
    Here(Box<Link>, Vec<Address>),
    /// The pod's namespace does not have it.
    Missing,
    /// The pod's namespace is gone.
    NoNamespace,
    /// The kernel did not say.
    Unknown(String),
}

/// A claim, and its attached devices as the kernel has them.
#[derive(Debug, Clone)]
pub struct Look {
    /// As recorded.
    pub record: Arc<ClaimRecord>,
    /// Whether it was prepared since the machine booted; else nothing of it is true any more.
    pub this_boot: bool,
    /// An entry for each device that is recorded as attached.
    pub seen: BTreeMap<Share, Seen>,
}

/// The links of a namespace, and addresses by index of their link.
type Dump = (Vec<Link>, Vec<(u32, Address)>);

impl Engine {
    /// Tells `observer` from now on.
    #[must_use]
    pub fn with_observer(mut self, observer: Observer) -> Self {
        self.observer = ObserverBox(Some(observer));
        self
    }

    /// Records why a pod could not get its devices, where that was found out before [`Engine::attach`] was called.
    pub fn attach_failed(&self, pod: &PodUid, error: &str) {
        self.note_error(pod, error);
    }

    /// Looks at the devices of a claim in their pod; none when the claim is not recorded. Blocks on the kernel.
    #[must_use]
    pub fn look(&self, claim: &ClaimUid) -> Option<Look> {
        // A device that is moved back while we look is not missing: then the record is another one afterwards.
        let mut record = self.ledger.get(claim)?;
        for _ in 0..4 {
            let this_boot = record.boot_id == self.boot_id;
            let seen = if this_boot { self.look_inside(&record) } else { BTreeMap::new() };
            let after = self.ledger.get(claim)?;
            if after.generation == record.generation {
                return Some(Look { record, this_boot, seen });
            }
            record = after;
        }
        let unknown = |d: &DeviceRecord| (d.share(), Seen::Unknown("it is being worked on".to_owned()));
        let seen = record.devices.iter().filter(|d| d.phase == Phase::Attached).map(unknown).collect();
        Some(Look { this_boot: record.boot_id == self.boot_id, seen, record })
    }

    fn look_inside(&self, record: &ClaimRecord) -> BTreeMap<Share, Seen> {
        let mut dumps: HashMap<NetnsId, Result<Dump, Seen>> = HashMap::new();
        let mut seen = BTreeMap::new();
        for device in record.devices.iter().filter(|d| d.phase == Phase::Attached) {
            let Some(attachment) = &device.attachment else { continue };
            let dump = dumps.entry(attachment.netns).or_insert_with(|| match self.open_pod(attachment) {
                None => Err(Seen::NoNamespace),
                Some(netns) => dump(&netns).map_err(|e| Seen::Unknown(e.to_string())),
            });
            let state = match dump {
                Err(why) => why.clone(),
                Ok((links, addresses)) => match locate::in_pod(device, attachment.index, links) {
                    Some(link) => Seen::Here(Box::new(link.clone()), of_link(link, addresses)),
                    None => Seen::Missing,
                },
            };
            seen.insert(device.share(), state);
        }
        seen
    }

    pub(super) fn observe(&self, record: &Arc<ClaimRecord>, what: Observed) {
        if let Some(observer) = &self.observer.0 {
            observer(Observation { record: record.clone(), what });
        }
    }

    pub(super) fn observe_claim(&self, claim: &ClaimUid, what: &Observed) {
        if let Some(record) = self.ledger.get(claim) {
            self.observe(&record, what.clone());
        }
    }

    pub(super) fn observe_pod(&self, pod: &PodUid, what: &Observed) {
        for record in self.ledger.by_pod(pod) {
            self.observe(&record, what.clone());
        }
    }
}

fn dump(netns: &Netns) -> Result<Dump, KernelError> {
    let mut socket = RouteSocket::open_in(netns)?;
    Ok((link::list(&mut socket, look_deadline())?, address::list(&mut socket, look_deadline())?))
}

pub(super) fn of_link(link: &Link, addresses: &[(u32, Address)]) -> Vec<Address> {
    addresses.iter().filter(|(index, _)| *index == link.index).map(|(_, address)| address.clone()).collect()
}
