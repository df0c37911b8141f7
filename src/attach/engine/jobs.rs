//! The work of an attach: which link goes where, checked before anything is touched, and looked at afterwards.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::attach::{AttachError, Target, kernel};
use super::lease::no_address;
use super::there::There;
use super::vrf::{Place, Planned};
use super::{locate, look_deadline};
use crate::attach::Step;
use crate::dhcp::Moment;
use crate::ledger::{ClaimRecord, DeviceRecord};
use crate::names::ClaimUid;
use crate::netdev::{Link, child, link, moves};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;

/// One device on its way in.
pub(super) struct Job {
    pub(super) claim: ClaimUid,
    pub(super) claim_text: String,
    /// The device is in here: a record holds hundreds of sysctls, too many to copy in the runtime's time.
    record: Arc<ClaimRecord>,
    /// Which of the record's devices.
    position: usize,
    /// Index on the host, now.
    host_index: u32,
    /// Index in the pod.
    pub(super) index: u32,
    /// Its altnames on the host, now.
    pub(super) alt_names: Vec<String>,
    /// The VRF it goes into.
    pub(super) vrf: Option<Place>,
    /// Index of its RDMA device, now.
    pub(super) rdma: Option<u32>,
    /// That is in the pod already.
    pub(super) rdma_inside: bool,
    /// Its link, where it has one, is in the pod by now.
    pub(super) inside: bool,
}

impl Job {
    /// The device, as it was recorded before the attach.
    pub(super) fn device(&self) -> &DeviceRecord {
        &self.record.devices[self.position]
    }

    /// The message that moves it in.
    pub(super) fn move_in<'a>(&self, netns: &'a Netns) -> moves::Move<'a> {
        let values = self.device().plan.steps.iter().find_map(|step| match step {
            Step::Move { mtu, address, .. } => Some((*mtu, address.clone())),
            _ => None,
        });
        let (mtu, address) = values.unwrap_or_default();
        let name = self.device().plan.pod_link.as_str().to_owned();
        moves::Move { index: self.host_index, target: netns.as_fd(), new_index: self.index, name, mtu, address }
    }

    /// The message that makes it, where it is a link on top of the device.
    pub(super) fn create<'a>(&self, netns: &'a Netns) -> Option<child::Create<'a>> {
        let &Self { host_index: parent, index, .. } = self;
        self.device().plan.steps.iter().find_map(|step| match step {
            Step::Create { child, name, mtu, address } => {
                let (name, address) = (name.as_str().to_owned(), address.clone());
                Some(child::Create { child: *child, parent, target: netns.as_fd(), index, name, mtu: *mtu, address })
            }
            _ => None,
        })
    }

    /// Whether its RDMA device moves.
    pub(super) fn moves_rdma(&self) -> bool {
        self.device().moving_rdma().is_some()
    }

    /// Name of its RDMA device, on the host; for people.
    pub(super) fn rdma_name(&self) -> &str {
        self.device().rdma.as_ref().map_or("", |rdma| rdma.name.as_str())
    }

    pub(super) fn failed(&self, step: String, why: String) -> AttachError {
        AttachError::Step { claim: self.claim_text.clone(), device: self.device().device.clone(), step, why }
    }

    /// Whether what is planned of its address holds by now.
    pub(super) fn check_lease(&self) -> Result<(), AttachError> {
        let no_lease = |why| AttachError::NoLease { claim: self.claim_text.clone(), device: self.device().device.clone(), why };
        no_address(self.device(), Moment::now()).map_or(Ok(()), |why| Err(no_lease(why)))
    }

    pub(super) fn gone(&self) -> AttachError {
        let name = self.device().host.name.clone();
        AttachError::Gone { claim: self.claim_text.clone(), device: self.device().device.clone(), name }
    }
}

/// The work for every device that is not in place: links found on the host, names checked, indices chosen.
pub(super) fn jobs(
    records: &[Arc<ClaimRecord>],
    target: &Target<'_>,
    there: &There,
    host: &mut RouteSocket,
) -> Result<Vec<Job>, AttachError> {
    let links = &there.links;
    let mut occupied = moves::Occupied::by(links);
    let mut vrfs = Planned::default();
    let mut jobs = Vec::new();
    for record in records {
        for (position, device) in record.devices.iter().enumerate().filter(|(_, d)| !target.holds(d, there)) {
            let mut job = Job {
                claim: record.claim.uid.clone(),
                claim_text: record.claim.to_string(),
                record: record.clone(),
                position,
                host_index: 0,
                index: if device.has_link() { index_in_pod(&occupied, device) } else { 0 },
                alt_names: Vec::new(),
                vrf: None,
                rdma: None,
                rdma_inside: false,
                inside: false,
            };
            if !device.has_link() {
                jobs.push(job);
                continue;
            }
            let found = on_host(host, device).map_err(|e| kernel("looking for the link on the host", e))?;
            let mut link = found.ok_or_else(|| job.gone())?;
            job.host_index = link.index;
            if device.child().is_some() {
                // Its altnames stay with the parent.
                link.alt_names.clear();
            }
            job.alt_names.clone_from(&link.alt_names);
            let checked = moves::check(&link, &job.move_in(target.netns), &occupied);
            checked.and_then(|()| check_alt_names(device, &occupied)).map_err(|source| AttachError::Refused {
                claim: job.claim_text.clone(),
                device: device.device.clone(),
                source,
            })?;
            device.plan.pod_link.as_str().clone_into(&mut link.name);
            link.index = job.index;
            link.alt_names.extend(alt_names(device).cloned());
            occupied.add(&link);
            job.vrf = vrfs.place(&device.plan.steps, links, &mut occupied).map_err(|(step, why)| job.failed(step, why))?;
            jobs.push(job);
        }
    }
    Ok(jobs)
}

/// The index on the host where it is free. What is made on top of a device must have another one: where a link has the index of
/// the one below it, the kernel takes it for one without (`dev_get_iflink`).
fn index_in_pod(occupied: &moves::Occupied, device: &DeviceRecord) -> u32 {
    if device.child().is_none() {
        return moves::pick_index(&occupied.indices, device.host.index);
    }
    match moves::pick_index(&occupied.indices, 0) {
        same if same == device.host.index => moves::pick_index(&occupied.indices, same.saturating_add(1)),
        other => other,
    }
}

/// Those that the link is to get in the pod.
fn alt_names(device: &DeviceRecord) -> impl Iterator<Item = &String> {
    device.plan.steps.iter().filter_map(|step| match step {
        Step::AltName { name } => Some(name),
        _ => None,
    })
}

fn check_alt_names(device: &DeviceRecord, there: &moves::Occupied) -> Result<(), moves::Refusal> {
    match alt_names(device).find(|name| there.names.contains(*name)) {
        Some(name) => Err(moves::Refusal::NewAltNameTaken { name: name.clone() }),
        None => Ok(()),
    }
}

/// The device's link on the host: where it was, if that is still the device (one small request); else wherever it is now. The kernel
/// gives another index to a link that was plugged in again, or that came back when its namespace ended.
pub(super) fn on_host(host: &mut RouteSocket, device: &DeviceRecord) -> Result<Option<Link>, NetlinkError> {
    if !device.has_link() {
        return Ok(None);
    }
    let there = link::by_index(host, device.host.index, look_deadline())?;
    if let Some(link) = there.filter(|link| locate::is_device(device, link)) {
        return Ok(Some(link));
    }
    let links = link::list(host, look_deadline())?;
    Ok(locate::find(device, device.host.index, &links).cloned())
}

/// The move is not atomic, so look: every link is there under its name, up, and is the device it should be.
pub(super) fn verify(socket: &mut RouteSocket, jobs: &[Job]) -> Result<(), AttachError> {
    let links = link::list(socket, look_deadline()).map_err(|e| kernel("listing the pod's links", e))?;
    for job in jobs.iter().filter(|job| job.device().has_link()) {
        let wrong = match links.iter().find(|l| l.index == job.index) {
            None => Some("it is not in the pod".to_owned()),
            Some(l) if l.name != job.device().plan.pod_link.as_str() => Some(format!("it is called {} there", l.name)),
            Some(l) if locate::as_planned(job.device(), job.index, std::slice::from_ref(l)).is_none() => {
                Some("another link has its index".to_owned())
            }
            Some(l) if !l.is_up() => Some("it is down".to_owned()),
            Some(_) => None,
        };
        if let Some(why) = wrong {
            return Err(job.failed("looking for it in the pod after the move".to_owned(), why));
        }
    }
    Ok(())
}
