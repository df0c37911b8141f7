//! Prepare: everything that is slow or can fail, before there is a sandbox.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::{Engine, KernelError, LOCK_LIMIT, Observed, jobs, kept, locate, look_deadline, micros_since, now_unix_ms};
use crate::attach::plan::{self, PlanError};
use crate::crash;
use crate::dra::resolve::{ResolvedClaim, ResolvedDevice};
use crate::inventory::Device;
use crate::inventory::policy::why_needed;
use crate::ledger::{ClaimRecord, ClaimRef, DeviceRecord, Durability, LedgerError, Phase, PodRef, StepTime};
use crate::names::{DeviceName, PodLinkName};
use crate::netdev::host_state::Snapshot;
use crate::netdev::{Link, bpf, link, uplink};
use crate::netlink::{NetlinkError, RouteSocket};

/// A claim can't be prepared. Nothing was changed, or it was put back.
#[derive(Debug, thiserror::Error)]
#[error("claim {claim}: {reason}")]
pub struct PrepareError {
    /// Which claim.
    pub claim: Box<ClaimRef>,
    /// Why.
    #[source]
    pub reason: Box<PrepareReason>,
}

/// Why a claim can't be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareReason {
    /// The device is not (or no longer) on this node.
    #[error("device {device} is not on this node: {why}")]
    NoDevice {
        /// Which device.
        device: DeviceName,
        /// Gone, or withheld and why.
        why: String,
    },
    /// It is not offered by now: the host needs it, or it can't be moved.
    #[error("device {device} ({name}) is not lent: {why}; see: dranic devices")]
    Needed {
        /// Which device.
        device: DeviceName,
        /// Its name on the host.
        name: String,
        /// Why, in words.
        why: String,
    },
    /// Another claim has it.
    #[error("device {device} is still held by claim {owner}; the kubelet will ask again until that one is unprepared")]
    Held {
        /// Which device.
        device: DeviceName,
        /// The claim that has it.
        owner: String,
    },
    /// A sandbox of another pod has the claim's devices.
    #[error("pod {pod} still has the devices of this claim; the kubelet will ask again until its sandbox is stopped")]
    OtherPod {
        /// Name of that pod.
        pod: String,
    },
    /// What was recorded of the claim before could not be ended.
    #[error("its former use could not be ended: {why}")]
    NotEnded {
        /// Why.
        why: String,
    },
    /// Something else is under way for the pod, for long.
    #[error("something else is still under way for the pod; the kubelet will ask again")]
    Busy,
    /// There is no plan for it.
    #[error("request {request}, device {device}: {source}")]
    Plan {
        /// Which request.
        request: String,
        /// Which device.
        device: DeviceName,
        /// Why.
        source: PlanError,
    },
    /// Two devices of the pod would have one name.
    #[error("devices {device} and {other} would both be called {name} in the pod; set interface.name for one of them")]
    NameTwice {
        /// The second device.
        device: DeviceName,
        /// The first device.
        other: DeviceName,
        /// The name.
        name: PodLinkName,
    },
    /// The kernel or the ledger refused.
    #[error("{step}: {source}; nothing was changed")]
    Kernel {
        /// What was tried.
        step: String,
        /// Why it failed.
        source: KernelError,
    },
}

impl PrepareReason {
    /// Whether another pod has what is wanted, and may give it back by itself.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. } | Self::OtherPod { .. })
    }
}

impl Engine {
    /// Prepares `claim` for `pod`. The same claim again gives the same record and changes nothing.
    ///
    /// # Errors
    /// See [`PrepareReason`]; a retry is right for all but [`PrepareReason::Plan`] and [`PrepareReason::NameTwice`].
    pub fn prepare(&self, claim: &ResolvedClaim, pod: &PodRef) -> Result<Arc<ClaimRecord>, PrepareError> {
        self.prepare_alone(claim, pod)
            .map_err(|reason| PrepareError { claim: Box::new(claim.claim.clone()), reason: Box::new(reason) })
    }

    fn prepare_alone(&self, claim: &ResolvedClaim, pod: &PodRef) -> Result<Arc<ClaimRecord>, PrepareReason> {
        self.end_other_use(claim, pod)?;
        let _guard = self.pods.lock(&pod.uid, Instant::now() + LOCK_LIMIT).ok_or(PrepareReason::Busy)?;
        match self.ledger.get(&claim.claim.uid) {
            // A prepare that was killed may have left links up.
            Some(record) if self.is_this(&record, claim, pod) => self.take_down(&record).map_err(|(step, e)| kernel(step, e)),
            Some(_) => Err(PrepareReason::Busy),
            None => {
                self.reserve(claim)?;
                crash::point("prepare: reserved");
                let prepared = self.prepare_reserved(claim, pod);
                if self.ledger.get(&claim.claim.uid).is_none() {
                    self.unreserve(&claim.claim.uid);
                }
                prepared
            }
        }
    }

    /// Whether `record` is what is asked for.
    fn is_this(&self, record: &ClaimRecord, claim: &ResolvedClaim, pod: &PodRef) -> bool {
        let (wanted, recorded) = (claim.devices.iter().map(|d| &d.device), record.devices.iter().map(|d| &d.device));
        record.boot_id == self.boot_id
            && record.pod.uid == pod.uid
            && wanted.collect::<BTreeSet<_>>() == recorded.collect::<BTreeSet<_>>()
    }

    /// A claim can outlive its pod. What is recorded for another pod, of before a reboot, or for other devices, ends first: a pod
    /// that is not the record's would get no device.
    fn end_other_use(&self, claim: &ResolvedClaim, pod: &PodRef) -> Result<(), PrepareReason> {
        let Some(record) = self.ledger.get(&claim.claim.uid).filter(|record| !self.is_this(record, claim, pod)) else {
            return Ok(());
        };
        let is_in_use = record.boot_id == self.boot_id && record.devices.iter().any(|d| d.attachment.is_some());
        if is_in_use {
            return Err(PrepareReason::OtherPod { pod: record.pod.name.clone() });
        }
        self.unprepare(&record.claim).map_err(|why| PrepareReason::NotEnded { why })
    }

    fn prepare_reserved(&self, claim: &ResolvedClaim, pod: &PodRef) -> Result<Arc<ClaimRecord>, PrepareReason> {
        let devices = self.find_devices(claim)?;
        let records = self.plan_devices(pod, &devices)?;
        let record = ClaimRecord {
            claim: claim.claim.clone(),
            pod: pod.clone(),
            generation: 0,
            boot_id: self.boot_id.clone(),
            missed: None,
            devices: records,
        };
        crash::point("prepare: planned");
        let record = self.ledger.put(record, Durability::Disk).map_err(|e| kernel("writing the ledger", KernelError::from(e)))?;
        crash::point("prepare: recorded");
        let record = self.take_down(&record).map_err(|(step, error)| {
            self.put_back(&record);
            kernel(step, error)
        })?;
        self.observe(&record, Observed::Prepared);
        Ok(record)
    }

    /// Reserves every device of the claim, or none.
    fn reserve(&self, claim: &ResolvedClaim) -> Result<(), PrepareReason> {
        let mut reserved = self.reserved();
        for device in &claim.devices {
            if let Some(owner) = reserved.get(&device.device).filter(|uid| **uid != claim.claim.uid) {
                let owner =
                    self.ledger.get(owner).map_or_else(|| owner.to_string(), |r| format!("{} of pod {}", r.claim, r.pod.name));
                return Err(PrepareReason::Held { device: device.device.clone(), owner });
            }
        }
        for device in &claim.devices {
            reserved.insert(device.device.clone(), claim.claim.uid.clone());
        }
        Ok(())
    }

    pub(super) fn unreserve(&self, claim: &crate::names::ClaimUid) {
        self.reserved().retain(|_, owner| owner != claim);
    }

    fn find_devices<'a>(&self, claim: &'a ResolvedClaim) -> Result<Vec<(&'a ResolvedDevice, Device)>, PrepareReason> {
        let mut scan = self.source.0.current();
        if claim.devices.iter().any(|d| scan.device(&d.device).is_none_or(|known| known.link.is_none())) {
            scan = self.source.0.rescan();
        }
        let find = |wanted: &'a ResolvedDevice| {
            let device = || wanted.device.clone();
            match (scan.device(&wanted.device), scan.withheld(&wanted.device)) {
                (Some(found), _) if found.link.is_some() => Ok((wanted, found.clone())),
                (Some(_), _) => {
                    let why = "it has no link on the host at the moment; look for it with: dranic status".to_owned();
                    Err(PrepareReason::NoDevice { device: device(), why })
                }
                (None, Some(link)) => {
                    Err(PrepareReason::Needed { device: device(), name: link.link.clone(), why: link.reason.clone() })
                }
                (None, None) => {
                    let why = "was it unplugged? See: dranic devices".to_owned();
                    Err(PrepareReason::NoDevice { device: device(), why })
                }
            }
        };
        claim.devices.iter().map(find).collect()
    }

    fn plan_devices(&self, pod: &PodRef, devices: &[(&ResolvedDevice, Device)]) -> Result<Vec<DeviceRecord>, PrepareReason> {
        let snapshot = self
            .host_socket()
            .and_then(|mut socket| Ok(Snapshot::take(&mut socket, look_deadline())?))
            .map_err(|e| kernel("reading the host's links, addresses and routes", e))?;
        // The inventory may lag behind: a default route can have come by a device since it was published.
        let needed = uplink::needed(&snapshot.links, &snapshot.routes);
        let mut names: BTreeMap<PodLinkName, DeviceName> = self
            .current(self.ledger.by_pod(&pod.uid))
            .iter()
            .flat_map(|r| r.devices.iter().map(|d| (d.plan.pod_link.clone(), d.device.clone())))
            .collect();
        let mut records = Vec::with_capacity(devices.len());
        for (wanted, device) in devices {
            let start = Instant::now();
            let index = self.same_index(&snapshot, device).ok_or_else(|| went_away(&wanted.device))?;
            if let Some(why) = needed.get(&index) {
                return Err(PrepareReason::Needed {
                    device: wanted.device.clone(),
                    name: device.link.as_ref().map(|l| l.name.clone()).unwrap_or_default(),
                    why: why_needed(why, &snapshot.links.iter().map(|l| (l.index, l.name.as_str())).collect()),
                });
            }
            let host = self.host.run(|| snapshot.host_state(index)).map_err(|e| kernel("reading sysctls", e.into()))?;
            let mut host = host.ok_or_else(|| went_away(&wanted.device))?;
            let plan = plan::plan(&wanted.config, &host).map_err(|source| PrepareReason::Plan {
                request: wanted.request.clone(),
                device: wanted.device.clone(),
                source,
            })?;
            host.ethtool = host.ethtool.without_fixed();
            if let Some(other) = names.insert(plan.pod_link.clone(), wanted.device.clone()) {
                return Err(PrepareReason::NameTwice { device: wanted.device.clone(), other, name: plan.pod_link });
            }
            records.push(DeviceRecord {
                request: wanted.request.clone(),
                pool: wanted.pool.clone(),
                device: wanted.device.clone(),
                share_id: wanted.share_id.clone(),
                hardware: device.hardware.clone(),
                attributes: device.attributes.clone(),
                host,
                plan,
                phase: Phase::Prepared,
                attachment: None,
                times: vec![StepTime { step: "capture".to_owned(), micros: micros_since(start) }],
                last_error: None,
                since_unix_ms: now_unix_ms(),
            });
        }
        Ok(records)
    }

    /// The index of the device's link, if that is still the link which the inventory saw.
    fn same_index(&self, snapshot: &Snapshot, device: &Device) -> Option<u32> {
        let seen = device.link.as_ref()?;
        snapshot.links.iter().find(|now| now.index == seen.index && locate::is_same(seen, now)).map(|now| now.index)
    }

    /// Takes the links down that are up, of devices that are in no sandbox: closing a real NIC costs hundreds of milliseconds under
    /// RTNL, which the sandbox hook has not.
    fn take_down(&self, record: &Arc<ClaimRecord>) -> Result<Arc<ClaimRecord>, (String, KernelError)> {
        let mut socket = self.host_socket().map_err(|e| ("opening a netlink socket".to_owned(), e))?;
        self.kept.keep(record).map_err(|e| ("keeping eBPF programs".to_owned(), e.into()))?;
        let mut times = Vec::new();
        for device in record.devices.iter().filter(|d| d.attachment.is_none()) {
            let failed = |e: NetlinkError| (format!("taking {} ({}) down", device.device, device.host.name), e.into());
            let start = Instant::now();
            // One that is not there fails in the sandbox, by name.
            let found = jobs::on_host(&mut socket, device).map_err(failed)?;
            if let Some(link) = found.as_ref().filter(|link| link.is_up()) {
                link::set_up(&mut socket, link.index, false, look_deadline()).map_err(failed)?;
                times.push((device.device.clone(), micros_since(start)));
                crash::point("prepare: link down");
            }
            if let Some(link) = found.filter(|_| kept::takes_off(device)) {
                let failed = |e| (format!("taking eBPF programs off {} ({})", device.device, device.host.name), e);
                self.take_off(record, device, &link).map_err(failed)?;
            }
        }
        self.note_down(record, &times).map_err(|e| ("writing the ledger".to_owned(), e.into()))
    }

    /// Takes the host's programs off a link on the host.
    fn take_off(&self, record: &ClaimRecord, device: &DeviceRecord, link: &Link) -> Result<(), KernelError> {
        let kept = self.kept.of(&record.claim.uid);
        let open = |id: u32| kept.get(&id).map(|program| &**program);
        let work =
            || bpf::take_off(&mut RouteSocket::open()?, link, &device.host.programs, open, look_deadline()).map_err(Into::into);
        self.host.run(work)?
    }

    fn note_down(&self, record: &Arc<ClaimRecord>, times: &[(DeviceName, u64)]) -> Result<Arc<ClaimRecord>, LedgerError> {
        if times.is_empty() {
            return Ok(record.clone());
        }
        let mut record = ClaimRecord::clone(record);
        for (name, micros) in times {
            for device in record.devices.iter_mut().filter(|d| d.device == *name) {
                device.times.retain(|t| t.step != "down");
                device.times.push(StepTime { step: "down".to_owned(), micros: *micros });
            }
        }
        // The phase is the same, only times are new: no need to wait for the disk again.
        self.ledger.put(record, Durability::Process)
    }

    /// Undoes a prepare that failed half way. Where that fails too, the record stays: unprepare, or the next prepare, has to know.
    fn put_back(&self, record: &Arc<ClaimRecord>) {
        if let Err(error) = self.restore_devices(record) {
            tracing::warn!(claim = %record.claim, %error, "the record of a failed prepare stays");
        } else if let Err(error) = self.ledger.remove(&record.claim.uid) {
            tracing::warn!(claim = %record.claim, %error, "the record of a failed prepare stays; unprepare will remove it");
        } else {
            self.kept.let_go(&record.claim.uid);
        }
    }

    /// Drops a record and its reservations.
    pub(super) fn forget(&self, record: &ClaimRecord) -> Result<(), KernelError> {
        self.ledger.remove(&record.claim.uid)?;
        self.kept.let_go(&record.claim.uid);
        self.unreserve(&record.claim.uid);
        Ok(())
    }

    /// A socket in the host's namespace.
    pub(super) fn host_socket(&self) -> Result<RouteSocket, KernelError> {
        Ok(RouteSocket::open_in(&self.host)?)
    }
}

fn went_away(device: &DeviceName) -> PrepareReason {
    PrepareReason::NoDevice { device: device.clone(), why: "it went away just now; the kubelet will ask again".to_owned() }
}

fn kernel(step: impl Into<String>, source: KernelError) -> PrepareReason {
    PrepareReason::Kernel { step: step.into(), source }
}
