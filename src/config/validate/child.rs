//! Rules over `interface.type` and the blocks that go with it.

use super::Faults;
use crate::config::{EthtoolConfig, InterfaceConfig, InterfaceKind, MacvlanMode, NetworkConfig};

/// Bit of a `P_Key` that says full membership; alone it is no partition (`__ipoib_vlan_add`, `drivers/infiniband/ulp/ipoib`).
const FULL_MEMBER: u16 = 0x8000;
/// Smallest and largest VLAN: 0 marks frames without one, and 4095 is reserved (IEEE 802.1Q; `VLAN_VID_MASK`, `linux/if_vlan.h`).
const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;

pub(super) fn check(interface: &InterfaceConfig, faults: &mut Faults) {
    let kind = interface.kind.unwrap_or_default();
    let blocks = [
        ("macvlan", InterfaceKind::Macvlan, interface.macvlan.is_some()),
        ("ipvlan", InterfaceKind::Ipvlan, interface.ipvlan.is_some()),
        ("vlan", InterfaceKind::Vlan, interface.vlan.is_some()),
        ("ipoib", InterfaceKind::Ipoib, interface.ipoib.is_some()),
    ];
    for (name, of_kind, is_set) in blocks {
        if is_set && kind != of_kind {
            faults.add(format!("interface.{name}"), format!("is for interface.type {name} only; set that, or remove this"));
        }
    }
    if kind == InterfaceKind::Vlan {
        match interface.vlan.and_then(|vlan| vlan.id) {
            None => faults.add("interface.vlan.id", "is required with interface.type vlan; 1 to 4094"),
            Some(id) if !VLANS.contains(&id) => faults.add("interface.vlan.id", format!("is {id}; must be 1 to 4094")),
            Some(_) => {}
        }
    }
    if kind == InterfaceKind::Ipoib {
        match interface.ipoib.and_then(|ipoib| ipoib.pkey) {
            None => faults.add("interface.ipoib.pkey", "is required with interface.type ipoib; 1 to 65535"),
            Some(pkey) if pkey & !FULL_MEMBER == 0 => {
                faults.add(
                    "interface.ipoib.pkey",
                    format!("is {pkey:#06x}, which is no partition; 1 to 0x7fff, with or without 0x8000"),
                );
            }
            Some(_) => {}
        }
    }
    if kind != InterfaceKind::Passthrough && interface.disable_ebpf_programs == Some(true) {
        faults.add("interface.disableEbpfPrograms", "is for a device that goes into the pod itself; this one stays on the host");
    }
    if interface.hardware_addr.is_some() {
        faults.check("interface.hardwareAddr", shares_address(interface, kind));
    }
}

/// `ethtool` and `vf` set the device, which others have as well.
pub(super) fn check_device(config: &NetworkConfig, faults: &mut Faults) {
    let is_child = config.interface.as_ref().is_some_and(|i| i.kind.unwrap_or_default() != InterfaceKind::Passthrough);
    if is_child && config.ethtool.as_ref().is_some_and(|ethtool| *ethtool != EthtoolConfig::default()) {
        faults.add("ethtool", "is for a device that goes into the pod itself (interface.type passthrough); remove it");
    }
    if is_child && config.vf.is_some() {
        faults.add("vf", "is for a device that goes into the pod itself (interface.type passthrough); remove it");
    }
}

/// Why the link can't have a link-layer address of its own; none when it can.
fn shares_address(interface: &InterfaceConfig, kind: InterfaceKind) -> Option<&'static str> {
    match kind {
        InterfaceKind::Ipvlan => Some("can't be set with interface.type ipvlan: such links have the device's; use macvlan"),
        InterfaceKind::Ipoib => Some("can't be set with interface.type ipoib: such links have the device's port"),
        InterfaceKind::Macvlan if interface.macvlan.and_then(|m| m.mode) == Some(MacvlanMode::Passthru) => {
            Some("can't be set with interface.macvlan.mode passthru: such a link has the device's; use another mode")
        }
        _ => None,
    }
}
