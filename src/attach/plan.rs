//! The plan: everything that must happen to one device for one pod, as typed steps, each with its undo. Pure.

mod addresses;
pub(crate) mod child;
pub(crate) mod dhcp;
mod ethtool;
mod left_out;
mod neighbours;
pub(crate) mod rdma;
mod reach;
mod routes;
mod rules;
mod settings;
mod step;
#[cfg(test)]
mod tests;
pub(super) mod vf;
mod vrf;

use serde::{Deserialize, Serialize};

use crate::config::{InterfaceConfig, NetworkConfig, Restore};
use crate::dhcp::Lease;
use crate::names::PodLinkName;
use crate::netdev::{Address, Child, HostState, LinkAddress, Route};
use left_out::LeftOut;

pub use step::{Step, Undo};

/// Least MTU of IPv6, bytes (`IPV6_MIN_MTU`, `linux/ipv6.h`): below it the kernel turns IPv6 off on the link.
const MTU_MIN_IPV6: u32 = 1280;

/// The plan of one device. Steps are in the order they are carried out: virtual function and programs off (both in prepare), move
/// (or create), sysctls, `ethtool` settings, VRF (which would drop IPv6 addresses), properties, altnames, addresses, up, neighbours,
/// routes (those of link scope before those that need them), rules. IPv6 addresses with an end come right after up: the kernel makes
/// no connected route for one that was added to a link that is down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Name in the pod. Of a device without link: what there is of the RDMA device's name in so many bytes, for people.
    pub pod_link: PodLinkName,
    /// In order.
    pub steps: Vec<Step>,
    /// What of the host's is not copied into the pod, and why, for people.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// How much is given back after the pod.
    #[serde(default)]
    pub restore: Restore,
}

impl Plan {
    /// What is made on top of the device; none where the device itself goes into the pod.
    #[must_use]
    pub fn child(&self) -> Option<&Child> {
        self.steps.iter().find_map(|step| match step {
            Step::Create { child, .. } => Some(child),
            _ => None,
        })
    }
}

/// Why there can be no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The host's link name can't be the pod's.
    #[error("{0}; set interface.name in the claim's configuration")]
    Name(#[from] crate::names::NameError),
    /// The device can't have this MTU.
    #[error("interface.mtu {wanted} is outside of what the device takes ({min} to {max} bytes)")]
    Mtu {
        /// As configured.
        wanted: u32,
        /// The device's least.
        min: u32,
        /// The device's largest.
        max: u32,
    },
    /// The configured link-layer address has another length than the device's.
    #[error("interface.hardwareAddr {wanted} has {} bytes, the device's addresses have {len}", wanted.bytes().len())]
    HardwareAddress {
        /// As configured.
        wanted: LinkAddress,
        /// The device's length in bytes.
        len: usize,
    },
    /// Which eBPF programs are on the link can't be told, or they can't be taken off.
    #[error("interface.disableEbpfPrograms: {why}")]
    Programs {
        /// Why.
        why: String,
    },
    /// Nothing can be made on top of such a device.
    #[error("interface.type: {0}")]
    Child(#[from] child::Unfit),
    /// IPv6 can't work with so small an MTU.
    #[error("an IPv6 address needs an MTU of at least 1280 bytes, and the link would have {mtu}")]
    Ipv6Mtu {
        /// What it would be.
        mtu: u32,
    },
    /// The device can't have packets of this size.
    #[error("interface.{field} {wanted} is more than what the device takes ({max} bytes)")]
    Size {
        /// Which one.
        field: &'static str,
        /// As configured, bytes.
        wanted: u32,
        /// The largest, bytes.
        max: u32,
    },
    /// The kernel is older than this property.
    #[error("interface.{field}: the node's kernel does not know this property; remove it")]
    NoSize {
        /// Which one.
        field: &'static str,
    },
    /// A configured altname is the name itself.
    #[error("interface.altNames: {name:?} is the link's own name in the pod already; remove it")]
    AltName {
        /// The name.
        name: String,
    },
    /// The VRF would have the link's own name.
    #[error("interface.vrf.name: {name:?} is the link's own name in the pod; set interface.name or choose another name")]
    VrfName {
        /// The name.
        name: String,
    },
    /// A setting of `ethtool` that the device does not have, or can't be given.
    #[error("{path}: {reason}")]
    Ethtool {
        /// JSON path from the parameters' root.
        path: String,
        /// Why, and what the device has.
        reason: String,
    },
    /// A configured route can't be reached by the addresses it would have.
    #[error("routes[{index}]: {reason}")]
    Route {
        /// Which of `routes`.
        index: usize,
        /// Why.
        reason: String,
    },
}

/// Plans one device. `config` has been validated and merged.
///
/// # Errors
/// When the device can't be what the configuration asks for.
pub fn plan(config: &NetworkConfig, host: &HostState) -> Result<Plan, PlanError> {
    plan_with(config, host, None)
}

/// As [`plan`], with the lease that was got where the configuration asks for DHCP. What is configured goes before what the lease says.
///
/// # Errors
/// As [`plan`].
pub fn plan_with(config: &NetworkConfig, host: &HostState, lease: Option<&Lease>) -> Result<Plan, PlanError> {
    let none = InterfaceConfig::default();
    let interface = config.interface.as_ref().unwrap_or(&none);
    let pod_link = match &interface.name {
        Some(name) => name.clone(),
        None => PodLinkName::new(host.name.as_str())?,
    };
    let mut left_out = LeftOut::default();
    let mut mtu = match lease.filter(|_| interface.mtu.is_none()) {
        Some(lease) => dhcp::mtu(lease, host, &mut left_out),
        None => mtu(interface, host)?,
    };
    let child = child::of(interface);
    child.as_ref().map_or(Ok(()), |child| child::check_layer(child, host))?;
    let address = hardware_address(interface, host)?;
    let settings = ethtool::of_pod(config, host)?;

    let vrf = vrf::of_pod(interface, &pod_link)?;
    let flat = vrf.as_ref().map(|_| vrf::in_one_table(config, host, &mut left_out));
    let (config, host) = flat.as_ref().map_or((config, host), |(config, host)| (config, host));
    let addresses = addresses::of_pod(interface, host, lease, config.host_state().addresses, &mut left_out);
    let ipv6 = wants_ipv6(config, &addresses);
    if ipv6 && mtu.unwrap_or(host.mtu) < MTU_MIN_IPV6 {
        return Err(PlanError::Ipv6Mtu { mtu: mtu.unwrap_or(host.mtu) });
    }
    let (routes, reach) = routes::of_pod(config, host, &addresses, lease, ipv6, &mut left_out)?;
    let neighbours = neighbours::of_pod(config, host, &reach, ipv6, &mut left_out);
    let rules = rules::of_pod(config, host, &pod_link, &addresses, &routes, &mut left_out);

    let (early, late): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|a| !addresses::needs_link_up(a));
    let mut late_mtu = None;
    let mut steps = Vec::from_iter(programs_off(interface, host)?);
    steps.push(match child {
        None => Step::Move { name: pod_link.clone(), mtu, address },
        Some(child) => {
            child::check_address(&child, address.as_ref())?;
            // The kernel makes a partition with the MTU that its port can have, whatever it is asked (`ipoib_ndo_init`).
            if matches!(child, Child::Ipoib { .. }) {
                late_mtu = Some(mtu.take().unwrap_or(host.mtu));
            }
            Step::Create { child, name: pod_link.clone(), mtu, address }
        }
    });
    let table = vrf.as_ref().map(|(_, table)| *table);
    steps.extend(settings::sysctls(interface, ipv6));
    steps.extend(settings.into_iter().map(|change| Step::Ethtool { change }));
    steps.extend(vrf.map(|(name, table)| Step::Vrf { name, table }));
    steps.extend(settings::of_link(interface, host, &pod_link, late_mtu)?);
    steps.extend(early.into_iter().map(|address| Step::Address { address }));
    steps.push(Step::Up);
    steps.extend(late.into_iter().map(|address| Step::Address { address }));
    steps.extend(neighbours.into_iter().map(|neighbour| Step::Neighbour { neighbour }));
    let configured = routes::configured_in(config);
    steps.extend(routes.into_iter().map(|route| {
        let (configured, table) = (configured.contains(&route), table.unwrap_or(route.table));
        Step::Route { configured, route: Route { table, ..route } }
    }));
    steps.extend(rules.into_iter().map(|rule| Step::Rule { rule }));
    Ok(Plan { pod_link, steps, left_out: left_out.into_lines(), restore: config.restore.unwrap_or_default() })
}

/// The step that takes the host's eBPF programs off, where that is asked for and there are any.
fn programs_off(interface: &InterfaceConfig, host: &HostState) -> Result<Option<Step>, PlanError> {
    if interface.disable_ebpf_programs != Some(true) {
        return Ok(None);
    }
    if let Some(why) = host.programs.why_not_off() {
        return Err(PlanError::Programs { why });
    }
    let programs = host.programs.describe();
    Ok((!programs.is_empty()).then_some(Step::DetachPrograms { programs }))
}

/// The MTU to set in the pod, when it is not the host's. 0 as the device's largest means that its driver gives no limit.
fn mtu(interface: &InterfaceConfig, host: &HostState) -> Result<Option<u32>, PlanError> {
    let Some(wanted) = interface.mtu else { return Ok(None) };
    let min = host.min_mtu.unwrap_or(0);
    let max = host.max_mtu.filter(|m| *m != 0).unwrap_or(u32::MAX);
    if !(min..=max).contains(&wanted) {
        return Err(PlanError::Mtu { wanted, min, max });
    }
    Ok((wanted != host.mtu).then_some(wanted))
}

/// The link-layer address to set in the pod, when it is not the host's.
fn hardware_address(interface: &InterfaceConfig, host: &HostState) -> Result<Option<LinkAddress>, PlanError> {
    let Some(wanted) = &interface.hardware_addr else { return Ok(None) };
    let len = host.address.as_ref().map_or(0, |a| a.bytes().len());
    if wanted.bytes().len() != len {
        return Err(PlanError::HardwareAddress { wanted: wanted.clone(), len });
    }
    Ok((host.address.as_ref() != Some(wanted)).then(|| wanted.clone()))
}

/// Whether IPv6 has to work on the link in the pod.
fn wants_ipv6(config: &NetworkConfig, addresses: &[Address]) -> bool {
    if let Some(enabled) = config.interface.as_ref().and_then(InterfaceConfig::ipv6_enabled) {
        return enabled;
    }
    let routes = config.routes.iter().flatten().filter_map(|r| r.destination);
    let neighbors = config.neighbors.iter().flatten().filter_map(|n| n.destination);
    addresses.iter().map(|a| a.ip).chain(routes.map(|d| d.addr())).chain(neighbors).any(|ip| ip.is_ipv6())
}
