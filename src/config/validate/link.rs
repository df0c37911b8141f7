//! Rules over what `interface` sets of the link itself: queue, names, IPv6.

use std::collections::HashSet;

use super::interface::bad_name;
use super::{Faults, SIZE_MAX};
use crate::config::{InterfaceConfig, NetworkConfig};

/// Longest queue, packets. Kernels set 1000; some queueing disciplines allocate the whole queue, for each transmit queue.
const TX_QUEUE_MAX: u32 = 100_000;
/// `IFALIASZ` - 1, `linux/if.h`, bytes.
const ALIAS_MAX: usize = 255;
/// `ALTIFNAMSIZ` - 1, `linux/if.h`, bytes.
const ALT_NAME_MAX: usize = 127;
/// Most elements of `interface.altNames`.
const ALT_NAMES_MAX: usize = 16;

pub(super) fn check(interface: &InterfaceConfig, faults: &mut Faults) {
    if let Some(len) = interface.tx_queue_len.filter(|len| *len > TX_QUEUE_MAX) {
        faults.add("interface.txQueueLen", format!("is {len}; must be 0 to {TX_QUEUE_MAX} packets"));
    }
    if let Some(group) = interface.group.filter(|group| *group > SIZE_MAX) {
        faults.add("interface.group", format!("is {group}; must be 0 to {SIZE_MAX}"));
    }
    if let Some(alias) = &interface.alias {
        faults.check("interface.alias", bad_alias(alias));
    }
    alt_names(interface, faults);
    if interface.ipv6.as_ref().and_then(|ipv6| ipv6.accept_ra).is_some_and(|v| v > 2) {
        faults.add("interface.ipv6.acceptRA", "must be 0, 1 or 2");
    }
}

fn bad_alias(alias: &str) -> Option<String> {
    if alias.len() > ALIAS_MAX {
        return Some(format!("has {} bytes; at most {ALIAS_MAX} are allowed", alias.len()));
    }
    alias.contains(char::is_control).then(|| "must not contain control characters".to_owned())
}

fn alt_names(interface: &InterfaceConfig, faults: &mut Faults) {
    let names = interface.alt_names.as_deref().unwrap_or_default();
    if !faults.length("interface.altNames", names.len(), ALT_NAMES_MAX) {
        return;
    }
    let mut seen = HashSet::new();
    for (i, name) in names.iter().enumerate() {
        let path = format!("interface.altNames[{i}]");
        faults.check(&path, bad_alt_name(name).or_else(|| bad_name(name)));
        if interface.name.as_ref().is_some_and(|own| own.as_str() == name) {
            faults.add(&path, format!("{name} is interface.name already"));
        }
        if interface.vrf.as_ref().is_some_and(|vrf| vrf.name == *name) {
            faults.add(&path, format!("{name} is the name of the VRF"));
        }
        if !seen.insert(name) {
            faults.add(&path, format!("{name} is in the list twice"));
        }
    }
}

/// As for a name, but longer.
fn bad_alt_name(name: &str) -> Option<String> {
    if name.is_empty() || name.len() > ALT_NAME_MAX {
        return Some(format!("must have 1 to {ALT_NAME_MAX} bytes"));
    }
    let bad = |c: char| matches!(c, '/' | ':') || c.is_whitespace() || c.is_control();
    (name.contains(bad) || name == "." || name == "..")
        .then(|| "must not contain '/', ':', white space or control characters, and not be '.' or '..'".to_owned())
}

/// What needs IPv6 on a link that shall have none.
pub(super) fn without_ipv6(config: &NetworkConfig, faults: &mut Faults) {
    let Some(interface) = config.interface.as_ref().filter(|i| i.ipv6_enabled() == Some(false)) else { return };
    let why = "needs IPv6, which interface.ipv6.enabled (or sysctl disable_ipv6) turns off on the link; remove one of them";
    let addresses = interface.addresses.iter().flatten().map(|net| net.addr().is_ipv6());
    let routes = config.routes.iter().flatten().map(|r| r.destination.is_some_and(|d| d.addr().is_ipv6()));
    let neighbors = config.neighbors.iter().flatten().map(|n| n.destination.is_some_and(|ip| ip.is_ipv6()));
    let mut report = |list: &str, is_v6: &mut dyn Iterator<Item = bool>| {
        is_v6.enumerate().filter(|(_, v6)| *v6).for_each(|(i, _)| faults.add(format!("{list}[{i}]"), why));
    };
    report("interface.addresses", &mut addresses.into_iter());
    report("routes", &mut routes.into_iter());
    report("neighbors", &mut neighbors.into_iter());
}
