//! Rules over `vf`.

use super::{Faults, bad_link_address};
use crate::config::VfConfig;

/// Largest VLAN number (IEEE 802.1Q keeps 4095 for itself; `VLAN_VID_MASK`, `linux/if_vlan.h`, less one).
const VLAN_MAX: u16 = 4094;
/// Largest priority of a tag (3 bits).
const QOS_MAX: u8 = 7;

pub(super) fn check(vf: &VfConfig, faults: &mut Faults) {
    if let Some(vlan) = vf.vlan.filter(|vlan| *vlan > VLAN_MAX) {
        faults.add("vf.vlan", format!("is {vlan}; must be 0 (no tag) to {VLAN_MAX}"));
    }
    if let Some(qos) = vf.qos.filter(|qos| *qos > QOS_MAX) {
        faults.add("vf.qos", format!("is {qos}; must be 0 to {QOS_MAX}"));
    }
    if vf.vlan == Some(0) {
        if vf.qos.is_some_and(|qos| qos > 0) {
            faults.add("vf.qos", "is the priority in a tag, and vf.vlan is 0, which is none");
        }
        if vf.proto.is_some() {
            faults.add("vf.proto", "is the protocol of a tag, and vf.vlan is 0, which is none");
        }
    }
    if let Some(mac) = &vf.mac {
        faults.check("vf.mac", bad_link_address(mac, true));
    }
    for (path, guid) in [("vf.nodeGuid", vf.node_guid), ("vf.portGuid", vf.port_guid)] {
        if guid.is_some_and(|guid| guid.0 == 0 || guid.0 == u64::MAX) {
            faults.add(path, "can't be all zero or all ones: those mean none");
        }
    }
    if let (Some(min), Some(max)) = (vf.min_tx_rate, vf.max_tx_rate)
        && max > 0
        && min > max
    {
        faults.add("vf.minTxRate", format!("is {min} Mbit/s, more than vf.maxTxRate, {max}"));
    }
}
