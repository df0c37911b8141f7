//! Devices that came back to the host by themselves: the kernel returns hardware when its namespace ends, down and under the name it had
//! in the pod.

use std::sync::Arc;
use std::time::Instant;

use super::there::There;
use super::{Engine, KernelError, LOOK, Observed, Released, home, locate, look_deadline};
use crate::ledger::{ClaimRecord, DeviceRecord};
use crate::names::DeviceName;
use crate::netdev::{Link, host_state, link, moves};
use crate::netlink::RouteSocket;

impl Engine {
    /// Whether a device is recorded as in a namespace that is not there any more (or can't be seen from here). Opens no socket and
    /// asks the kernel for no link.
    #[must_use]
    pub fn may_have_returned(&self) -> bool {
        self.current(self.ledger.all()).iter().any(|record| record.devices.iter().any(|device| self.is_orphan(device)))
    }

    /// Looks on the host for devices whose namespace is gone, notes that they are there, and gives them back what they are called
    /// there and what they are by themselves ([`host_state::restore_identity`]). They stay prepared; a new sandbox of the pod gets
    /// them, or unprepare restores the rest. Returns which came back.
    pub fn repair_returned(&self) -> Vec<DeviceName> {
        let mut repaired = Vec::new();
        for record in self.current(self.ledger.all()) {
            if !record.devices.iter().any(|device| self.is_orphan(device)) {
                continue;
            }
            // Whoever works on the pod now looks for its devices by itself.
            let Some(_guard) = self.pods.lock(&record.pod.uid, Instant::now()) else { continue };
            match self.repair_claim(&record) {
                Ok(devices) => repaired.extend(devices),
                Err(error) => tracing::warn!(claim = %record.claim, %error, "its devices could not be looked for on the host"),
            }
        }
        repaired
    }

    fn repair_claim(&self, record: &Arc<ClaimRecord>) -> Result<Vec<DeviceName>, KernelError> {
        // It may have changed before we had the lock.
        let Some(record) = self.ledger.get(&record.claim.uid) else { return Ok(Vec::new()) };
        let there = There::look(&self.host, &record.devices)?;
        let is_back = |device: &&DeviceRecord| self.is_orphan(device) && there.is_home_of(device);
        let back: Vec<&DeviceRecord> = record.devices.iter().filter(is_back).collect();
        if back.is_empty() {
            return Ok(Vec::new());
        }
        // What was made on top of a device ended with the namespace; the device never left. Nor did one without a link that does not
        // move.
        let stayed = |device: &&DeviceRecord| !device.has_link() && device.moving_rdma().is_none();
        let (ended, returned): (Vec<&DeviceRecord>, Vec<&DeviceRecord>) =
            back.iter().partition(|device| device.child().is_some() || stayed(device));
        for device in &returned {
            tracing::warn!(claim = %record.claim, device = %device.device, "its namespace is gone, the kernel returned it");
        }
        for device in &ended {
            tracing::warn!(claim = %record.claim, device = %device.share(), "its namespace is gone, with what it had of the device");
        }
        self.note_home(&record.claim.uid, &back);
        self.put_right(&record, &returned);
        let outcomes = returned.iter().map(|d| Released::AtHome(d.share())).chain(
            ended.iter().map(|d| if d.child().is_some() { Released::Deleted(d.share()) } else { Released::Stayed(d.share()) }),
        );
        self.observe_claim(&record.claim.uid, &Observed::Released(outcomes.collect()));
        Ok(returned.iter().map(|device| device.device.clone()).collect())
    }

    fn is_orphan(&self, device: &DeviceRecord) -> bool {
        device.attachment.as_ref().is_some_and(|attachment| self.open_pod(attachment).is_none())
    }

    /// Gives devices that are on the host their names and properties there, as prepare left them. What can't be is logged: unprepare
    /// tries again, and tells.
    pub(super) fn put_right(&self, record: &ClaimRecord, devices: &[&DeviceRecord]) {
        self.name_rdma(record, devices);
        let work = || -> Result<(), KernelError> {
            let mut socket = RouteSocket::open()?;
            for device in devices.iter().filter(|device| device.has_link()) {
                let links = link::list(&mut socket, look_deadline())?;
                let Some(found) = locate::find(device, device.host.index, &links) else { continue };
                home::remove_alt_names(&mut socket, device, found);
                self.make_way(&mut socket, &device.host.name, &links);
                let report = host_state::restore_identity(&mut socket, found.index, &device.host, Instant::now() + LOOK);
                for (what, why) in &report.failed {
                    tracing::warn!(claim = %record.claim, device = %device.device, what, why, "not restored yet");
                }
                tracing::info!(
                    claim = %record.claim, device = %device.device, found = found.name, link = device.host.name,
                    restored = ?report.restored, "it is on the host under its name again"
                );
            }
            Ok(())
        };
        if let Err(error) = self.host.run(work).map_err(KernelError::from).and_then(|result| result) {
            tracing::warn!(claim = %record.claim, %error, "devices that came back keep the pod's names until unprepare");
        }
    }

    /// Two devices can come back under each other's names: the one that has the name `wanted`, but is to have another, steps aside. Its
    /// own repair names it.
    fn make_way(&self, socket: &mut RouteSocket, wanted: &str, links: &[Link]) {
        let Some(holder) = links.iter().find(|link| link.name == wanted) else { return };
        let records = self.current(self.ledger.all());
        let is_holder = |device: &DeviceRecord| {
            let moved = device.child().is_none() && device.host.name != wanted;
            moved && locate::find(device, device.host.index, links).is_some_and(|l| l.index == holder.index)
        };
        if !records.iter().any(|record| record.devices.iter().any(is_holder)) {
            return;
        }
        let names = moves::Occupied::by(links).names;
        let aside = home::free_name(&names);
        tracing::info!(link = wanted, aside, "another device that came back has the name; it steps aside");
        if let Err(error) = socket.request(link::name_request(holder.index, &aside), look_deadline()) {
            tracing::warn!(link = wanted, %error, "it could not be renamed");
        }
    }
}
