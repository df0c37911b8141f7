//! Rules over `rdma`.

use super::{Faults, SIZE_MAX};
use crate::config::RdmaConfig;

pub(super) fn check(rdma: &RdmaConfig, faults: &mut Faults) {
    if let Some(kinds) = &rdma.char_devices {
        for (index, kind) in kinds.iter().enumerate() {
            if kinds[..index].contains(kind) {
                faults.add(format!("rdma.charDevices[{index}]"), "stands in the list twice; remove one");
            }
        }
    }
    if let Some(limits) = &rdma.limits {
        let all = [("rdma.limits.hcaHandles", limits.hca_handles), ("rdma.limits.hcaObjects", limits.hca_objects)];
        if all.iter().all(|(_, limit)| limit.is_none()) {
            faults.add("rdma.limits", "limits nothing; give hcaHandles, hcaObjects or both, or remove it");
        }
        for (path, limit) in all {
            // The kernel reads them with `match_int`.
            if let Some(limit) = limit.filter(|limit| *limit > SIZE_MAX) {
                faults.add(path, format!("is {limit}; must be 0 to {SIZE_MAX}"));
            }
        }
    }
    if rdma.enabled == Some(false) {
        for (path, is_set) in [
            ("rdma.netnsMode", rdma.netns_mode.is_some()),
            ("rdma.charDevices", rdma.char_devices.is_some()),
            ("rdma.limits", rdma.limits.is_some()),
            ("rdma.waitForPort", rdma.wait_for_port.is_some()),
        ] {
            if is_set {
                faults.add(path, "is about the RDMA device, and rdma.enabled is false, so that the pod gets none");
            }
        }
    }
}
