//! The plan: everything that must happen to one device for one pod, as typed steps, each with its undo. Pure.

use serde::{Deserialize, Serialize};

use crate::config::NetworkConfig;
use crate::names::PodLinkName;
use crate::netdev::{Address, HostState, LinkAddress, Neighbour, Route, Rule};

/// One step inside (or into) the pod's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase")]
pub enum Step {
    /// Move the link into the pod under this name.
    Move {
        /// Name in the pod.
        name: PodLinkName,
        /// MTU in the pod, when it is not the host's; bytes.
        mtu: Option<u32>,
        /// Link-layer address in the pod, when it is not the host's.
        address: Option<LinkAddress>,
    },
    /// Write a per-link sysctl (key as in [`crate::netdev::sysctl`]).
    Sysctl {
        /// `ipv6/conf/disable_ipv6`, …
        key: String,
        /// The value.
        value: String,
    },
    /// Set the link up.
    Up,
    /// Add an address.
    Address {
        /// The address.
        address: Address,
    },
    /// Add a permanent neighbour entry.
    Neighbour {
        /// The entry.
        neighbour: Neighbour,
    },
    /// Add a route by this link.
    Route {
        /// The route.
        route: Route,
    },
    /// Add a policy rule.
    Rule {
        /// The rule.
        rule: Rule,
    },
}

/// What undoes a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "undo", rename_all = "camelCase")]
pub enum Undo {
    /// Move the link back to the host under its host name; what hung on the link in the pod goes with that.
    MoveBack,
    /// Nothing: moving the link back undoes it.
    WithMove,
    /// Delete the policy rule, which would stay in the pod.
    DeleteRule {
        /// The rule.
        rule: Rule,
    },
}

impl Step {
    /// What undoes this step.
    #[must_use]
    pub fn undo(&self) -> Undo {
        match self {
            Self::Move { .. } => Undo::MoveBack,
            Self::Rule { rule } => Undo::DeleteRule { rule: rule.clone() },
            _ => Undo::WithMove,
        }
    }

    /// Name of this kind of step, for status, metrics and errors.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Move { .. } => "move",
            Self::Sysctl { .. } => "sysctl",
            Self::Up => "up",
            Self::Address { .. } => "address",
            Self::Neighbour { .. } => "neighbour",
            Self::Route { .. } => "route",
            Self::Rule { .. } => "rule",
        }
    }
}

/// The plan of one device. Steps are in the order they are carried out: move, sysctls, addresses, up, neighbours, routes (those
/// of link scope before those that need them), rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Name in the pod.
    pub pod_link: PodLinkName,
    /// In order.
    pub steps: Vec<Step>,
    /// What of the host's is not copied into the pod, and why, for people.
    #[serde(default)]
    pub left_out: Vec<String>,
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
    /// IPv6 can't work with so small an MTU.
    #[error("an IPv6 address needs an MTU of at least 1280 bytes, and the link would have {mtu}")]
    Ipv6Mtu {
        /// What it would be.
        mtu: u32,
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
    let _ = (config, host);
    todo!()
}
