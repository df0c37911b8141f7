//! What the pod's link is besides its addresses and routes: properties, alternative names, sysctls.

use std::collections::BTreeMap;

use super::{PlanError, Step};
use crate::config::InterfaceConfig;
use crate::names::PodLinkName;
use crate::netdev::{HostState, LinkSettings, PacketSizes, sysctl};

/// `GRO_MAX_SIZE`, `linux/netdevice.h`, bytes.
const GRO_MAX_SIZE: u32 = 8 * 65535;
/// The sysctl that a cluster network without IPv6 sets for every link of its pods.
const DISABLE_IPV6: &str = "ipv6/conf/disable_ipv6";
/// IPv6 may be missing on the link: then it does not forward, and is off.
const IPV6_FORWARDING: &str = "ipv6/conf/forwarding";

/// Properties, then names. `mtu`: where the link's way in does not set it, bytes.
///
/// # Errors
/// When the device can't be what is asked for.
pub(super) fn of_link(
    interface: &InterfaceConfig,
    host: &HostState,
    pod_link: &PodLinkName,
    mtu: Option<u32>,
) -> Result<Vec<Step>, PlanError> {
    let settings = LinkSettings {
        mtu,
        sizes: sizes(interface, host)?,
        tx_queue_len: interface.tx_queue_len,
        alias: interface.alias.clone(),
        group: interface.group,
        promisc: interface.promisc,
        allmulti: interface.allmulti,
    };
    let mut steps = Vec::new();
    if !settings.is_empty() {
        steps.push(Step::Link { settings });
    }
    steps.extend(alt_names(interface, host, pod_link)?);
    Ok(steps)
}

fn sizes(interface: &InterfaceConfig, host: &HostState) -> Result<PacketSizes, PlanError> {
    let wanted = PacketSizes {
        gso: interface.gso_max_size,
        gro: interface.gro_max_size,
        gso_ipv4: interface.gso_ipv4_max_size,
        gro_ipv4: interface.gro_ipv4_max_size,
    };
    let largest_gso = host.tso_max_size.unwrap_or(u32::MAX);
    let largest = [largest_gso, GRO_MAX_SIZE, largest_gso, GRO_MAX_SIZE];
    for (((field, wanted), (_, now)), max) in wanted.named().into_iter().zip(host.sizes.named()).zip(largest) {
        let Some(wanted) = wanted else { continue };
        if now.is_none() {
            return Err(PlanError::NoSize { field });
        }
        if wanted > max {
            return Err(PlanError::Size { field, wanted, max });
        }
    }
    Ok(wanted)
}

/// Those that do not come along anyway.
fn alt_names(interface: &InterfaceConfig, host: &HostState, pod_link: &PodLinkName) -> Result<Vec<Step>, PlanError> {
    let wanted = interface.alt_names.iter().flatten();
    if let Some(name) = wanted.clone().find(|name| *name == pod_link.as_str()) {
        return Err(PlanError::AltName { name: name.clone() });
    }
    Ok(wanted.filter(|name| !host.alt_names.contains(name)).map(|name| Step::AltName { name: name.clone() }).collect())
}

/// IPv6 on (if it has to work) or off first; then a secret and forwarding, which change what others mean.
pub(super) fn sysctls(interface: &InterfaceConfig, ipv6: bool) -> Vec<Step> {
    let mut all: BTreeMap<String, (String, bool)> = BTreeMap::new();
    if ipv6 {
        all.insert(DISABLE_IPV6.to_owned(), ("0".to_owned(), false));
    }
    for set in interface.field_sysctls() {
        let may_lack = set.key == IPV6_FORWARDING || (set.key == DISABLE_IPV6 && set.value == "1");
        all.insert(set.key.to_owned(), (set.value, may_lack));
    }
    for (key, value) in interface.sysctls.iter().flatten() {
        all.insert(key.clone(), (value.clone(), key == DISABLE_IPV6 && value == "1"));
    }
    let mut steps: Vec<_> = all.into_iter().collect();
    steps.sort_by_cached_key(|(key, _)| (key != DISABLE_IPV6, sysctl::order(key), key.clone()));
    steps.into_iter().map(|(key, (value, may_lack))| Step::Sysctl { key, value, may_lack }).collect()
}
