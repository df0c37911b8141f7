//! Rules over `ethtool`. What the device can do is checked in prepare.

use super::{Faults, LIST_MAX};
use crate::config::{ChannelsConfig, EthtoolConfig, RingsConfig};
use crate::netdev::ethtool::NAME_MAX;

pub(super) fn check(ethtool: &EthtoolConfig, faults: &mut Faults) {
    for (path, map) in [("ethtool.features", &ethtool.features), ("ethtool.privateFlags", &ethtool.private_flags)] {
        let Some(map) = map else { continue };
        if !faults.length(path, map.len(), LIST_MAX) {
            continue;
        }
        for name in map.keys().filter(|n| n.is_empty() || n.len() > NAME_MAX || n.contains('\0')) {
            let short: String = name.chars().take(NAME_MAX).collect();
            faults.add(format!("{path}.{short}"), format!("a name has 1 to {NAME_MAX} bytes"));
        }
    }
    if let Some(rings) = &ethtool.rings {
        self::rings(rings, faults);
    }
    if let Some(channels) = &ethtool.channels {
        self::channels(channels, faults);
    }
}

fn rings(rings: &RingsConfig, faults: &mut Faults) {
    let sizes = [("rx", rings.rx), ("rxMini", rings.rx_mini), ("rxJumbo", rings.rx_jumbo), ("tx", rings.tx)];
    for (name, size) in sizes {
        if size == Some(0) {
            faults.add(format!("ethtool.rings.{name}"), "is 0; a ring has 1 descriptor or more");
        }
    }
}

/// The kernel refuses a device that could not receive, or not send. Some numbers may be the device's own: prepare knows them.
fn channels(channels: &ChannelsConfig, faults: &mut Faults) {
    if channels.combined == Some(0) && (channels.rx == Some(0) || channels.tx == Some(0)) {
        faults.add("ethtool.channels", "without combined channels both rx and tx must be 1 or more");
    }
}
