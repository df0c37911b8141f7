//! Prepare: everything that is slow or can fail, before there is a sandbox.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::refusal::{PrepareError, PrepareReason};
use super::{Engine, KernelError, LOCK_LIMIT, Observed, jobs, kept, locate, look_deadline, micros_since, now_unix_ms, rdma};
use crate::attach::plan::{self, child};
use crate::config::NetworkConfig;
use crate::crash;
use crate::dra::resolve::{ResolvedClaim, ResolvedDevice};
use crate::inventory::Device;
use crate::inventory::hardware::is_share_name;
use crate::inventory::policy::why_needed;
use crate::ledger::{ClaimRecord, ClaimRef, DeviceRecord, DhcpRecord, Durability, LedgerError, Phase, PodRef, Share, StepTime};
use crate::names::{DeviceName, PodLinkName};
use crate::netdev::host_state::Snapshot;
use crate::netdev::{HostState, Link, bpf, link, uplink};
use crate::netlink::{NetlinkError, RouteSocket};

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
        let prepared = match self.ledger.get(&claim.claim.uid) {
            Some(record) if self.is_this(&record, claim, pod) => self.go_on(record, claim),
            Some(_) => return Err(PrepareReason::Busy),
            None => {
                self.reserve(claim)?;
                crash::point("prepare: reserved");
                self.prepare_reserved(claim, pod)
            }
        };
        if self.ledger.get(&claim.claim.uid).is_none() {
            self.unreserve(&claim.claim.uid);
        }
        prepared
    }

    /// A prepare that was killed may have left links up, virtual functions as they were, and devices without the lease that they
    /// wait for.
    fn go_on(&self, record: Arc<ClaimRecord>, claim: &ResolvedClaim) -> Result<Arc<ClaimRecord>, PrepareReason> {
        if !record.devices.iter().any(DeviceRecord::lacks_lease) {
            return self.change_host(&record);
        }
        self.finish(record, claim)
    }

    /// What follows the first record: virtual functions (the VLAN of one decides which DHCP server it reaches), leases, and links
    /// down. Puts everything back where that fails.
    fn finish(&self, record: Arc<ClaimRecord>, claim: &ResolvedClaim) -> Result<Arc<ClaimRecord>, PrepareReason> {
        let leased = self.set_vfs(&record).and_then(|()| self.get_leases(record, claim));
        leased.and_then(|record| self.change_host(&record)).inspect_err(|_| {
            if let Some(record) = self.ledger.get(&claim.claim.uid) {
                self.put_back(&record);
            }
        })
    }

    /// Whether `record` is what is asked for.
    fn is_this(&self, record: &ClaimRecord, claim: &ResolvedClaim, pod: &PodRef) -> bool {
        let (wanted, recorded) =
            (claim.devices.iter().map(ResolvedDevice::share), record.devices.iter().map(DeviceRecord::share));
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
        let one_at_a_time = self.one_plan_of_rdma(&devices);
        let records = self.plan_devices(&claim.claim, pod, &devices)?;
        let record = ClaimRecord {
            claim: claim.claim.clone(),
            pod: pod.clone(),
            pod_claim_name: claim.pod_claim_name.clone(),
            generation: 0,
            boot_id: self.boot_id.clone(),
            missed: None,
            devices: records,
        };
        crash::point("prepare: planned");
        let record = self.ledger.put(record, Durability::Disk).map_err(|e| kernel("writing the ledger", KernelError::from(e)))?;
        drop(one_at_a_time);
        crash::point("prepare: recorded");
        let record = self.finish(record, claim)?;
        self.observe(&record, Observed::Prepared);
        Ok(record)
    }

    fn find_devices<'a>(&self, claim: &'a ResolvedClaim) -> Result<Vec<(&'a ResolvedDevice, Device)>, PrepareReason> {
        let mut scan = self.source.0.current();
        if claim.devices.iter().any(|d| scan.device(&d.device).is_none_or(|known| !is_on_host(known))) {
            scan = self.source.0.rescan();
        }
        let find = |wanted: &'a ResolvedDevice| {
            let device = || wanted.device.clone();
            match (scan.device(&wanted.device), scan.withheld(&wanted.device)) {
                (Some(found), _) if is_on_host(found) => Ok((wanted, found.clone())),
                (Some(found), _) => {
                    let what = if found.is_rdma_only { "RDMA device" } else { "link" };
                    let why = format!("it has no {what} on the host at the moment; look for it with: dranic status");
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

    fn plan_devices(
        &self,
        claim: &ClaimRef,
        pod: &PodRef,
        devices: &[(&ResolvedDevice, Device)],
    ) -> Result<Vec<DeviceRecord>, PrepareReason> {
        let snapshot = self
            .host_socket()
            .and_then(|mut socket| Ok(Snapshot::take(&mut socket, look_deadline())?))
            .map_err(|e| kernel("reading the host's links, addresses and routes", e))?;
        // The inventory may lag behind: a default route can have come by a device since it was published.
        let needed = uplink::needed(&snapshot.links, &snapshot.routes);
        let mut names: BTreeMap<PodLinkName, DeviceName> = self
            .current(self.ledger.by_pod(&pod.uid))
            .iter()
            .flat_map(|r| r.devices.iter().filter(|d| d.has_link()).map(|d| (d.plan.pod_link.clone(), d.device.clone())))
            .collect();
        let mut rdma = self.rdma_now(devices)?;
        let mut records = Vec::with_capacity(devices.len());
        for (wanted, device) in devices {
            let start = Instant::now();
            let (host, mut plan) = if device.is_rdma_only {
                let (host, mut plan) = rdma::plan_without_link(wanted, device)?;
                self.plan_vf_of((wanted, device), &host, &snapshot, &mut plan)?;
                (host, plan)
            } else {
                let index = self.same_index(&snapshot, device).ok_or_else(|| went_away(&wanted.device))?;
                if let Some(why) = needed.get(&index) {
                    return Err(PrepareReason::Needed {
                        device: wanted.device.clone(),
                        name: device.link.as_ref().map(|l| l.name.clone()).unwrap_or_default(),
                        why: why_needed(why, &snapshot.links.iter().map(|l| (l.index, l.name.as_str())).collect()),
                    });
                }
                self.plan_link(claim, (wanted, device), &snapshot, index, &mut names)?
            };
            let rdma = self.plan_rdma(pod, (wanted, device), rdma.as_mut(), &mut plan)?;
            self.check_ipoib((wanted, device), &snapshot.links, &plan, rdma.as_ref())?;
            records.push(DeviceRecord {
                request: wanted.request.clone(),
                pool: wanted.pool.clone(),
                device: wanted.device.clone(),
                share_id: wanted.share_id.clone(),
                hardware: device.hardware.clone(),
                attributes: device.attributes.clone(),
                dhcp: wants_dhcp(&wanted.config).then(DhcpRecord::default),
                rdma,
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

    /// As [`Self::plan_device`], with what its physical function says; its name is nobody else's.
    fn plan_link(
        &self,
        claim: &ClaimRef,
        (wanted, device): (&ResolvedDevice, &Device),
        snapshot: &Snapshot,
        index: u32,
        names: &mut BTreeMap<PodLinkName, DeviceName>,
    ) -> Result<(HostState, plan::Plan), PrepareReason> {
        let (host, mut plan) = self.plan_device(claim, wanted, snapshot, index, names)?;
        if plan.child().is_none() {
            self.plan_vf_of((wanted, device), &host, snapshot, &mut plan)?;
        }
        match names.insert(plan.pod_link.clone(), wanted.device.clone()) {
            Some(other) => Err(PrepareReason::NameTwice { device: wanted.device.clone(), other, name: plan.pod_link }),
            None => Ok((host, plan)),
        }
    }

    fn plan_vf_of(
        &self,
        (wanted, device): (&ResolvedDevice, &Device),
        host: &HostState,
        snapshot: &Snapshot,
        plan: &mut plan::Plan,
    ) -> Result<(), PrepareReason> {
        self.plan_vf(&wanted.config, &device.hardware, host, &snapshot.links, plan).map_err(|why| PrepareReason::Vf {
            request: wanted.request.clone(),
            device: wanted.device.clone(),
            why,
        })
    }

    /// What the link with `index` is on the host, and what shall happen to it.
    fn plan_device(
        &self,
        claim: &ClaimRef,
        wanted: &ResolvedDevice,
        snapshot: &Snapshot,
        index: u32,
        taken: &BTreeMap<PodLinkName, DeviceName>,
    ) -> Result<(HostState, plan::Plan), PrepareReason> {
        let refused = |source| PrepareReason::Plan { request: wanted.request.clone(), device: wanted.device.clone(), source };
        let share = wanted.share_id.as_deref();
        // A server without consumable capacity drops what makes a device one that is shared: then there is no share's id.
        let is_share = share.is_some() || is_share_name(&wanted.device);
        let child = child::of_share(&wanted.config, is_share).map_err(|unfit| refused(unfit.into()))?;
        let Some(child) = child else {
            let host = self.host.run(|| snapshot.host_state(index)).map_err(|e| kernel("reading sysctls", e.into()))?;
            let mut host = host.ok_or_else(|| went_away(&wanted.device))?;
            let plan = plan::plan(&before_lease(&wanted.config), &host).map_err(refused)?;
            // One that waits for a lease is planned once more.
            if !wants_dhcp(&wanted.config) {
                host.ethtool = host.ethtool.without_fixed();
            }
            return Ok((host, plan));
        };
        let parent = snapshot.links.iter().find(|link| link.index == index).ok_or_else(|| went_away(&wanted.device))?;
        if !parent.is_up() {
            return Err(PrepareReason::Down { device: wanted.device.clone(), name: parent.name.clone() });
        }
        let identity = (&claim.uid, &wanted.device, share);
        let config = child::completed(wanted.config.clone(), &child, &parent.name, identity, |name| taken.contains_key(name));
        let host = child::below(parent);
        let plan = plan::plan(&config, &host).map_err(refused)?;
        Ok((host, plan))
    }

    /// The index of the device's link, if that is still the link which the inventory saw.
    fn same_index(&self, snapshot: &Snapshot, device: &Device) -> Option<u32> {
        let seen = device.link.as_ref()?;
        snapshot.links.iter().find(|now| now.index == seen.index && locate::is_same(seen, now)).map(|now| now.index)
    }

    /// What prepare changes on the host.
    fn change_host(&self, record: &Arc<ClaimRecord>) -> Result<Arc<ClaimRecord>, PrepareReason> {
        self.set_vfs(record)?;
        self.take_down(record).map_err(|(step, error)| kernel(step, error))
    }

    /// Takes the links down that are up, of devices that are in no sandbox: closing a real NIC costs hundreds of milliseconds under
    /// RTNL, which the sandbox hook has not.
    fn take_down(&self, record: &Arc<ClaimRecord>) -> Result<Arc<ClaimRecord>, (String, KernelError)> {
        let mut socket = self.host_socket().map_err(|e| ("opening a netlink socket".to_owned(), e))?;
        self.kept.keep(record).map_err(|e| ("keeping eBPF programs".to_owned(), e.into()))?;
        let mut times = Vec::new();
        for device in record.devices.iter().filter(|d| d.attachment.is_none() && d.child().is_none() && d.has_link()) {
            let failed = |e: NetlinkError| (format!("taking {} ({}) down", device.device, device.host.name), e.into());
            let start = Instant::now();
            // One that is not there fails in the sandbox, by name.
            let found = jobs::on_host(&mut socket, device).map_err(failed)?;
            if let Some(link) = found.as_ref().filter(|link| link.is_up()) {
                link::set_up(&mut socket, link.index, false, look_deadline()).map_err(failed)?;
                times.push((device.share(), micros_since(start)));
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

    fn note_down(&self, record: &Arc<ClaimRecord>, times: &[(Share, u64)]) -> Result<Arc<ClaimRecord>, LedgerError> {
        if times.is_empty() {
            return Ok(record.clone());
        }
        let mut record = ClaimRecord::clone(record);
        for (share, micros) in times {
            for device in record.devices.iter_mut().filter(|d| d.share() == *share) {
                device.times.retain(|t| t.step != "down");
                device.times.push(StepTime { step: "down".to_owned(), micros: *micros });
            }
        }
        // The phase is the same, only times are new: no need to wait for the disk again.
        self.ledger.put(record, Durability::Process)
    }

    /// Undoes a prepare that failed half way. Where that fails too, the record stays: unprepare, or the next prepare, has to know.
    fn put_back(&self, record: &Arc<ClaimRecord>) {
        self.release_leases(record);
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

fn is_on_host(device: &Device) -> bool {
    if device.is_rdma_only { device.rdma.is_some() } else { device.link.is_some() }
}

fn went_away(device: &DeviceName) -> PrepareReason {
    PrepareReason::NoDevice { device: device.clone(), why: "it went away just now; the kubelet will ask again".to_owned() }
}

/// What can be planned before there is a lease: its address decides whether a configured gateway can be reached. The whole is planned
/// when it is there ([`Engine::get_leases`]).
fn before_lease(config: &NetworkConfig) -> Cow<'_, NetworkConfig> {
    if wants_dhcp(config) {
        Cow::Owned(NetworkConfig { routes: None, rules: None, neighbors: None, ..config.clone() })
    } else {
        Cow::Borrowed(config)
    }
}

fn wants_dhcp(config: &NetworkConfig) -> bool {
    config.interface.as_ref().is_some_and(|interface| interface.dhcp == Some(true))
}

pub(super) fn kernel(step: impl Into<String>, source: KernelError) -> PrepareReason {
    PrepareReason::Kernel { step: step.into(), source }
}
