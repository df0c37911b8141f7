//! Putting devices that are on the host back to what they were.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::home::{COMES_BACK, POLL, remove_alt_names};
use super::kept::{self, Open};
use super::{Engine, KernelError, Observed, locate, look_deadline, micros_since};
use crate::config::Restore;
use crate::crash;
use crate::inventory::HardwareId;
use crate::ledger::{ClaimRecord, DeviceRecord, Share};
use crate::netdev::{Link, bpf, host_state, link};
use crate::netlink::RouteSocket;

impl Engine {
    /// Restores the host state of every device of `record` that is on the host. A property that the kernel refuses is logged by
    /// name: a route must not keep the pod from going.
    ///
    /// # Errors
    /// When the host could not be looked at, or did not answer in time: then the record must stay.
    pub(super) fn restore_devices(&self, record: &Arc<ClaimRecord>) -> Result<(), String> {
        // A function may be allowed again what its link needs.
        let vf_faults: Vec<_> = record.devices.iter().filter_map(|d| Some((d.share(), self.restore_vf(record, d)?))).collect();
        let restored = self
            .host
            .run(|| restore_here(record, &self.kept.of(&record.claim.uid)))
            .map_err(KernelError::from)
            .and_then(|result| result);
        let mut failed = restored.map_err(|error| format!("the host state could not be restored: {error}"))?;
        for (device, fault) in vf_faults {
            tracing::warn!(claim = %record.claim, %device, what = fault.0, why = fault.1, "not restored");
            match failed.iter_mut().find(|(other, _)| *other == device) {
                Some((_, faults)) => faults.push(fault),
                None => failed.push((device, vec![fault])),
            }
        }
        for (device, failed) in failed {
            self.observe(record, Observed::Restored(device, failed));
        }
        Ok(())
    }
}

/// What the kernel refused to put back of a device, and why.
type Failed = (Share, Vec<(String, String)>);

/// On a thread in the host's namespace.
fn restore_here(record: &ClaimRecord, kept: &Open) -> Result<Vec<Failed>, KernelError> {
    let mut socket = RouteSocket::open()?;
    let mut failed = Vec::new();
    let mut late = None;
    // A device with links on top stayed as it was.
    for device in record.devices.iter().filter(|device| device.child().is_none()) {
        let Some(found) = find(&mut socket, device)? else {
            tracing::warn!(claim = %record.claim, device = %device.device, "not on the host, nothing to restore");
            if !matches!(device.hardware, HardwareId::Virtual { .. }) {
                failed.push((device.share(), vec![("link".to_owned(), "not on the host; was it unplugged?".to_owned())]));
            }
            continue;
        };
        let (start, deadline) = (Instant::now(), look_deadline());
        // Where the kernel brought it back, the namespace having ended.
        remove_alt_names(&mut socket, device, &found);
        let minimal = (device.plan.restore == Restore::Minimal).then(|| device.host.of_link_only());
        let state = minimal.as_ref().unwrap_or(&device.host);
        let mut report = host_state::restore(&mut socket, found.index, state, deadline);
        let open = |id: u32| kept.get(&id).map(|program| &**program);
        bpf::give_back(&mut socket, found.index, &state.programs, kept::takes_off(device), open, deadline, &mut report);
        for (what, why) in &report.failed {
            tracing::warn!(claim = %record.claim, device = %device.device, link = %device.host.name, what, why, "not restored");
        }
        for what in &report.respected {
            tracing::info!(claim = %record.claim, device = %device.device, what, "changed by somebody else, left as it is");
        }
        tracing::info!(
            claim = %record.claim, device = %device.device, link = %device.host.name,
            restored = report.restored.len(), failed = report.failed.len(), micros = micros_since(start),
            "given back to the host"
        );
        crash::point("unprepare: restored");
        if !report.failed.is_empty() && Instant::now() >= deadline {
            late = Some(KernelError::Late(device.device.to_string()));
        }
        if !report.failed.is_empty() {
            failed.push((device.share(), report.failed));
        }
    }
    late.map_or(Ok(failed), Err)
}

fn find(socket: &mut RouteSocket, device: &DeviceRecord) -> Result<Option<Link>, KernelError> {
    // A link without hardware ended with its namespace.
    let patience = if matches!(device.hardware, HardwareId::Virtual { .. }) { Duration::ZERO } else { COMES_BACK };
    let give_up = Instant::now() + patience;
    loop {
        let links = link::list(socket, look_deadline())?;
        let found = locate::find(device, device.host.index, &links).cloned();
        if found.is_some() || Instant::now() >= give_up {
            return Ok(found);
        }
        std::thread::sleep(POLL);
    }
}
