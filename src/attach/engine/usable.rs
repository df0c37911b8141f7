//! Whether the RDMA devices of pods can be used there, and by which GIDs. Looked at from outside of attach and without its locks: the
//! agent does so in the background, behind the gate.

use std::sync::Arc;

use super::observe::of_link;
use super::{Engine, KernelError, Observed, locate, look_deadline, now_unix_ms};
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, Durability, Phase, RdmaRecord, RdmaUsable, Share};
use crate::names::{ClaimUid, PodUid, RdmaDeviceName, SandboxId};
use crate::netdev::{address, link};
use crate::netlink::RouteSocket;
use crate::netns::{Netns, NetnsId};
use crate::rdma::{Device, Gid, RdmaSocket, gids, ready};

/// An RDMA device in a pod.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RdmaInPod {
    /// Of which claim.
    pub claim: ClaimUid,
    /// With, or as, which device of it.
    pub share: Share,
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// In which namespace.
    pub netns: NetnsId,
}

/// What was found of an [`RdmaInPod`], and recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RdmaState {
    /// It can be used.
    Usable,
    /// It can't, and why.
    Not(String),
    /// It is not in that sandbox any more.
    Gone,
}

/// Opens a port of an RDMA device by verbs in a namespace: whether it did, or could not try; or why the device can't be opened.
pub type Opener<'a> = &'a dyn Fn(&Netns, &RdmaDeviceName, u32) -> Result<bool, String>;

impl Engine {
    /// All RDMA devices that are in pods.
    #[must_use]
    pub fn rdma_in_pods(&self) -> Vec<RdmaInPod> {
        let records = self.current(self.ledger.all());
        let of = |record: &Arc<ClaimRecord>, device: &DeviceRecord| {
            let attachment = device.attachment.as_ref().filter(|_| device.phase == Phase::Attached && device.rdma.is_some())?;
            Some(RdmaInPod {
                claim: record.claim.uid.clone(),
                share: device.share(),
                sandbox: attachment.sandbox.clone(),
                netns: attachment.netns,
            })
        };
        records.iter().flat_map(|record| record.devices.iter().filter_map(|device| of(record, device))).collect()
    }

    /// How many of them can't be used, as it was last seen.
    #[must_use]
    pub fn rdma_not_usable(&self) -> usize {
        let records = self.current(self.ledger.all());
        let attached = records.iter().flat_map(|record| &record.devices).filter(|device| device.phase == Phase::Attached);
        attached.filter_map(|device| device.rdma.as_ref()).filter(|rdma| rdma.usable.is_none() || rdma.problem.is_some()).count()
    }

    /// Whether an RDMA device that containers of the pod have to wait for can't be used yet; in words. Once it could, they start:
    /// what happens to it later is the pod's own affair, and told by status and events.
    ///
    /// # Errors
    /// One line that names claim, device and why.
    pub fn check_usable(&self, pod: &PodUid) -> Result<(), String> {
        for record in self.ledger.by_pod(pod) {
            for device in &record.devices {
                let Some(why) = device.rdma.as_ref().and_then(not_usable) else { continue };
                return Err(format!(
                    "claim {}, device {}: its RDMA device can't be used yet: {why}",
                    record.claim, device.device
                ));
            }
        }
        Ok(())
    }

    /// The namespace it is in, while it is.
    #[must_use]
    pub fn rdma_netns(&self, which: &RdmaInPod) -> Option<Arc<Netns>> {
        self.open_pod(self.rdma_of(which)?.1.attachment.as_ref()?)
    }

    /// Looks at an RDMA device in its pod and records what it can be used by, or why it can't be used. Blocks, on `open` too.
    #[must_use]
    pub fn tend_rdma(&self, which: &RdmaInPod, open: Opener<'_>) -> RdmaState {
        let Some((record, device)) = self.rdma_of(which) else { return RdmaState::Gone };
        let (Some(rdma), Some(attachment)) = (&device.rdma, &device.attachment) else { return RdmaState::Gone };
        let Some(netns) = self.open_pod(attachment) else { return RdmaState::Gone };
        let found = look(&netns, &device, rdma, attachment).and_then(|(name, gids)| {
            let is_opened = rdma.usable.as_ref().is_some_and(|usable| usable.opened);
            let opened = if is_opened && rdma.problem.is_none() { Ok(true) } else { open(&netns, &name, rdma.port) };
            opened.map(|opened| (gids, opened))
        });
        let state = found.as_ref().map_or_else(|why| RdmaState::Not(why.clone()), |_| RdmaState::Usable);
        let (usable, problem) = after(rdma, found);
        if usable == rdma.usable && problem == rdma.problem {
            return state;
        }
        if self.write_usable(which, usable, problem) {
            self.observe_claim(&record.claim.uid, &Observed::Rdma(device.share()));
            state
        } else {
            RdmaState::Gone
        }
    }

    /// The device as it is recorded now, if it is still there.
    fn rdma_of(&self, which: &RdmaInPod) -> Option<(Arc<ClaimRecord>, DeviceRecord)> {
        let record = self.ledger.get(&which.claim).filter(|record| record.boot_id == self.boot_id)?;
        let device = record.devices.iter().find(|device| is_it(device, which))?.clone();
        Some((record, device))
    }

    /// Whether it is still there, and the ledger knows now.
    fn write_usable(&self, which: &RdmaInPod, usable: Option<RdmaUsable>, problem: Option<String>) -> bool {
        let written = self.ledger.update(&which.claim, Durability::Process, |record| {
            let device = record.devices.iter_mut().find(|device| is_it(device, which));
            let rdma = device.and_then(|device| device.rdma.as_mut());
            rdma.map(|rdma| (rdma.usable, rdma.problem) = (usable, problem)).is_some()
        });
        written.inspect_err(|error| tracing::warn!(%error, "the ledger does not know of an RDMA device")).ok().flatten()
            == Some(true)
    }
}

/// Why containers have to wait for it; none where they don't.
pub(super) fn not_usable(rdma: &RdmaRecord) -> Option<&str> {
    let waits = rdma.wait_for_port && rdma.usable.is_none();
    waits.then(|| rdma.problem.as_deref().unwrap_or("it was not looked at yet"))
}

fn is_it(device: &DeviceRecord, which: &RdmaInPod) -> bool {
    let is_there = |a: &Attachment| a.sandbox == which.sandbox && a.netns == which.netns;
    device.share() == which.share && device.phase == Phase::Attached && device.attachment.as_ref().is_some_and(is_there)
}

/// What is to be recorded. What it could be used by stays when it can't be any more: containers that are started again have been
/// let through before.
fn after(rdma: &RdmaRecord, found: Result<(Vec<Gid>, bool), String>) -> (Option<RdmaUsable>, Option<String>) {
    match found {
        Err(why) => (rdma.usable.clone(), Some(why)),
        Ok((gids, opened)) => {
            let since = rdma.usable.as_ref().filter(|_| rdma.problem.is_none()).map(|usable| usable.at_unix_ms);
            (Some(RdmaUsable { gids, opened, at_unix_ms: since.unwrap_or_else(now_unix_ms) }), None)
        }
    }
}

/// The name that the device has in the pod, and its GIDs; or why it can't be used.
fn look(
    netns: &Netns,
    device: &DeviceRecord,
    rdma: &RdmaRecord,
    attachment: &Attachment,
) -> Result<(RdmaDeviceName, Vec<Gid>), String> {
    let name = name_inside(netns, rdma)?;
    let view = gids::view(netns, &name, rdma.port).map_err(|e| e.to_string())?;
    let view = view.ok_or_else(|| format!("the pod's network namespace does not see port {} of {name}", rdma.port))?;
    let (link, addresses) = if device.has_link() { link_inside(netns, device, attachment)? } else { (None, Vec::new()) };
    let port = ready::Port {
        device: name.as_str(),
        number: rdma.port,
        protocol: rdma.protocol,
        view: &view,
        link: link.as_deref(),
        addresses: &addresses,
    };
    let gids = ready::judge(&port)?;
    Ok((name, gids))
}

/// The pod may have renamed it.
fn name_inside(netns: &Netns, rdma: &RdmaRecord) -> Result<RdmaDeviceName, String> {
    let ask = || {
        let Some(mut socket) = RdmaSocket::open_in(netns)? else { return Ok(Vec::new()) };
        socket.devices(look_deadline())
    };
    let devices = ask().map_err(|e: crate::netlink::NetlinkError| format!("asking for the RDMA devices of the pod: {e}"))?;
    let found = find(&devices, rdma).ok_or_else(|| format!("RDMA device {} is not in the pod", rdma.name))?;
    RdmaDeviceName::new(found.name.as_str()).map_err(|e| e.to_string())
}

/// By its index, if that is not another device's by now; else by its GUID.
fn find<'a>(devices: &'a [Device], rdma: &RdmaRecord) -> Option<&'a Device> {
    let is_same = |device: &&Device| rdma.node_guid.is_none() || device.node_guid == rdma.node_guid;
    let by_index = devices.iter().find(|device| device.index == rdma.index).filter(is_same);
    by_index.or_else(|| devices.iter().find(|device| rdma.node_guid.is_some() && device.node_guid == rdma.node_guid))
}

/// Name and addresses of the device's link in the pod.
fn link_inside(
    netns: &Netns,
    device: &DeviceRecord,
    attachment: &Attachment,
) -> Result<(Option<String>, Vec<address::Address>), String> {
    let dump = || {
        let mut socket = RouteSocket::open_in(netns)?;
        Ok((link::list(&mut socket, look_deadline())?, address::list(&mut socket, look_deadline())?))
    };
    let (links, addresses) = dump().map_err(|e: KernelError| format!("looking at the pod's links: {e}"))?;
    let link = locate::in_pod(device, attachment.index, &links).ok_or("its link is not in the pod any more")?;
    Ok((Some(link.name.clone()), of_link(link, &addresses)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rdma::{Guid, NetnsMode, Protocol};

    fn record() -> RdmaRecord {
        RdmaRecord {
            name: RdmaDeviceName::new("mlx5_0").unwrap(),
            index: 3,
            node_guid: Some(Guid(7)),
            port: 1,
            protocol: Protocol::Roce,
            mode: NetnsMode::Shared,
            char_devices: Vec::new(),
            companions: Vec::new(),
            limits: None,
            wait_for_port: true,
            usable: None,
            problem: None,
        }
    }

    fn device(index: u32, name: &str, guid: u64) -> Device {
        Device { index, name: name.to_owned(), node_guid: Some(Guid(guid)), ..Device::default() }
    }

    #[test]
    fn a_device_is_found_by_index_or_by_its_guid_and_never_another_one() {
        let name = |devices: &[Device]| find(devices, &record()).map(|device| device.name.clone());
        assert_eq!(name(&[device(2, "a", 9), device(3, "renamed", 7)]).as_deref(), Some("renamed"));
        assert_eq!(name(&[device(3, "other", 9), device(5, "again", 7)]).as_deref(), Some("again"));
        assert_eq!(name(&[device(3, "other", 9)]), None);
        let no_guid = RdmaRecord { node_guid: None, ..record() };
        assert_eq!(find(&[device(3, "it", 9)], &no_guid).map(|device| device.index), Some(3));
        assert_eq!(find(&[Device { index: 4, ..Device::default() }], &no_guid), None);
    }

    #[test]
    fn what_it_could_be_used_by_stays_and_its_time_begins_anew_when_it_can_again() {
        let gid = |index| Gid { index, gid: "::ffff:10.0.0.5".parse().unwrap(), kind: ready::ROCE_V2.to_owned(), link: None };
        let mut rdma = record();
        assert_eq!(not_usable(&rdma), Some("it was not looked at yet"));
        (rdma.usable, rdma.problem) = after(&rdma, Err("DOWN".to_owned()));
        assert_eq!((rdma.usable.clone(), not_usable(&rdma)), (None, Some("DOWN")));
        (rdma.usable, rdma.problem) = after(&rdma, Ok((vec![gid(3)], true)));
        rdma.usable.as_mut().unwrap().at_unix_ms = 1;
        assert_eq!((rdma.problem.clone(), not_usable(&rdma)), (None, None));
        (rdma.usable, rdma.problem) = after(&rdma, Ok((vec![gid(4)], true)));
        assert_eq!(rdma.usable, Some(RdmaUsable { gids: vec![gid(4)], opened: true, at_unix_ms: 1 }), "another GID, not anew");
        (rdma.usable, rdma.problem) = after(&rdma, Err("DOWN".to_owned()));
        assert_eq!((rdma.usable.is_some(), rdma.problem.as_deref(), not_usable(&rdma)), (true, Some("DOWN"), None));
        (rdma.usable, rdma.problem) = after(&rdma, Ok((vec![gid(4)], true)));
        assert!(rdma.usable.unwrap().at_unix_ms > 1);
        let patient = RdmaRecord { wait_for_port: false, ..record() };
        assert_eq!(not_usable(&patient), None);
    }
}
