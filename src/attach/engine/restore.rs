//! Putting devices that are on the host back to what they were.

use std::sync::Arc;
use std::time::Instant;

use super::{Engine, Observed, locate, look_deadline, micros_since};
use crate::ledger::ClaimRecord;
use crate::netdev::{host_state, link};
use crate::netlink::RouteSocket;

impl Engine {
    /// Restores the host state of every device of `record` that is on the host. What can't be put back is logged by name: a
    /// route that is refused must not keep the pod from going.
    pub(super) fn restore_devices(&self, record: &ClaimRecord) {
        let restored = self.host.run(|| self.restore_here(record));
        if let Err(error) = restored {
            tracing::error!(claim = %record.claim, %error, "the host state was not restored");
        }
    }

    /// On a thread in the host's namespace.
    fn restore_here(&self, record: &ClaimRecord) {
        let opened = RouteSocket::open().and_then(|mut socket| {
            let links = link::list(&mut socket, look_deadline())?;
            Ok((socket, links))
        });
        let (mut socket, links) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::error!(claim = %record.claim, %error, "the host state was not restored");
                return;
            }
        };
        for device in &record.devices {
            let Some(found) = locate::find(device, device.host.index, &links) else {
                tracing::warn!(claim = %record.claim, device = %device.device, "not on the host, nothing to restore");
                continue;
            };
            let start = Instant::now();
            let report = host_state::restore(&mut socket, found.index, &device.host, look_deadline());
            for (what, why) in &report.failed {
                tracing::warn!(claim = %record.claim, device = %device.device, link = %device.host.name, what, why, "not restored");
            }
            if !report.failed.is_empty() {
                let what = Observed::Restored(device.device.clone(), report.failed.clone());
                self.observe(&Arc::new(record.clone()), what);
            }
            for what in &report.respected {
                tracing::info!(claim = %record.claim, device = %device.device, what, "changed by somebody else, left as it is");
            }
            tracing::info!(
                claim = %record.claim, device = %device.device, link = %device.host.name,
                restored = report.restored.len(), failed = report.failed.len(), micros = micros_since(start),
                "given back to the host"
            );
        }
    }
}
