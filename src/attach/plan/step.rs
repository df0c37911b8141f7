//! Steps of a plan, and what undoes them.

use serde::{Deserialize, Serialize};

use crate::names::{PodLinkName, RdmaDeviceName};
use crate::netdev::ethtool::Change;
use crate::netdev::vf::VfSettings;
use crate::netdev::{Address, Child, LinkAddress, LinkSettings, Neighbour, Route, Rule};
use crate::rdma::{CharDeviceKind, NetnsMode};

/// One step inside (or into) the pod's namespace, or in prepare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "camelCase")]
pub enum Step {
    /// In prepare: set what the physical function says of this virtual one.
    #[serde(rename_all = "camelCase")]
    Vf {
        /// PCI address of the physical function.
        pf: String,
        /// Number of the virtual one.
        index: u32,
        /// What is to be set.
        wanted: VfSettings,
        /// What each of these was.
        before: VfSettings,
    },
    /// Take the host's eBPF programs off the link. Prepare does that, when the link is down and still on the host.
    DetachPrograms {
        /// Which, in words.
        programs: Vec<String>,
    },
    /// Move the link into the pod under this name.
    Move {
        /// Name in the pod.
        name: PodLinkName,
        /// MTU in the pod, when it is not the host's; bytes.
        mtu: Option<u32>,
        /// Link-layer address in the pod, when it is not the host's.
        address: Option<LinkAddress>,
    },
    /// Give the pod the RDMA device: in exclusive mode it moves, after the link; in either mode containers get character devices.
    #[serde(rename_all = "camelCase")]
    Rdma {
        /// Its name on the host.
        device: RdmaDeviceName,
        /// The node's mode.
        mode: NetnsMode,
        /// What containers get.
        char_devices: Vec<CharDeviceKind>,
    },
    /// Make a link on top of the device, in the pod. The device stays on the host, as it is.
    Create {
        /// What it is.
        child: Child,
        /// Name in the pod.
        name: PodLinkName,
        /// MTU, when it is not the device's; bytes.
        mtu: Option<u32>,
        /// Link-layer address, when it is not for the kernel to choose.
        address: Option<LinkAddress>,
    },
    /// Enslave the link to a VRF, which is made if it is not there.
    Vrf {
        /// Name of the VRF.
        name: PodLinkName,
        /// Its table.
        table: u32,
    },
    /// Set properties of the link.
    Link {
        /// What is set; the rest stays as it is on the host.
        settings: LinkSettings,
    },
    /// Give the link another name beside its own.
    AltName {
        /// The name.
        name: String,
    },
    /// Write a per-link sysctl (key as in [`crate::netdev::sysctl`]).
    Sysctl {
        /// `ipv6/conf/disable_ipv6`, …
        key: String,
        /// The value.
        value: String,
        /// It is no fault when the link has none of this name, because it has no IPv6.
        #[serde(default)]
        may_lack: bool,
    },
    /// Change settings of `ethtool`. Before the link goes up: a driver may restart a device that is up.
    Ethtool {
        /// What to change, in one request.
        change: Change,
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
        /// The route. Next hops of a multipath route all leave by this link; they carry its index on the host, see
        /// [`Step::by_link`].
        route: Route,
        /// Whether the claim asks for it; else it came along from the host, and the pod may do without.
        #[serde(default)]
        configured: bool,
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
    /// Set the virtual function as it was, where nobody else has changed it meanwhile.
    #[serde(rename_all = "camelCase")]
    RestoreVf {
        /// PCI address of the physical function.
        pf: String,
        /// Number of the virtual one.
        index: u32,
        /// What it was.
        before: VfSettings,
    },
    /// Attach the programs again, once the link is on the host: those that are attached directly, and those whose link is held by a file,
    /// by a new link in that file.
    AttachPrograms,
    /// Move the link back to the host under its host name; what hung on the link in the pod goes with that.
    MoveBack,
    /// Delete the link in the pod.
    DeleteLink,
    /// Nothing: moving the link back, or deleting it, undoes it.
    WithMove,
    /// Take the name away before the link moves back: the host has other names for it, or for another link.
    RemoveAltName {
        /// The name.
        name: String,
    },
    /// Delete the VRF, if it was made for this pod and no link is left in it; the link itself leaves it by moving back.
    LeaveVrf {
        /// Name of the VRF.
        name: PodLinkName,
    },
    /// Move the RDMA device back to the host, under its name there, before the link.
    MoveRdmaBack {
        /// Its name on the host.
        device: RdmaDeviceName,
    },
    /// Nothing: the character devices end with the containers.
    WithContainers,
    /// Moving the link back does not undo it: the host state is restored afterwards ([`crate::netdev::host_state::restore`]).
    Restore,
    /// Delete the policy rule, which would stay in the pod.
    DeleteRule {
        /// The rule.
        rule: Rule,
    },
    /// Delete the route, which leaves by no link and would stay in the pod.
    DeleteRoute {
        /// The route.
        route: Route,
    },
}

impl Undo {
    /// This undo in words.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::RestoreVf { pf, index, before } => {
                format!("setting virtual function {index} of {pf} as it was: {}", vf_words(before))
            }
            Self::RemoveAltName { name } => format!("taking altname {name} away"),
            Self::LeaveVrf { name } => format!("deleting VRF {name} when the last link has left it, if it was made for this pod"),
            Self::AttachPrograms => "attaching its eBPF programs again, once it is on the host".to_owned(),
            Self::MoveRdmaBack { device } => format!("moving RDMA device {device} back to the host, before the link"),
            Self::WithContainers => "nothing: it ends with the containers".to_owned(),
            Self::MoveBack => "moving it back to the host, under its name there".to_owned(),
            Self::DeleteLink => "deleting the link in the pod".to_owned(),
            Self::WithMove => "nothing: it goes when the link is moved back".to_owned(),
            Self::Restore => "restoring what the device had on the host, after it is moved back".to_owned(),
            Self::DeleteRule { rule } => format!("deleting rule{} of the pod", rule_words(rule)),
            Self::DeleteRoute { route } => format!("deleting route {} of the pod in table {}", route.destination, route.table),
        }
    }
}

fn vf_words(settings: &VfSettings) -> String {
    settings.all().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn rule_words(rule: &Rule) -> String {
    let from = rule.source.map(|s| format!(" from {s}")).unwrap_or_default();
    let to = rule.destination.map(|d| format!(" to {d}")).unwrap_or_default();
    format!("{from}{to} lookup {}", rule.table)
}

impl Step {
    /// What undoes this step.
    #[must_use]
    pub fn undo(&self) -> Undo {
        match self {
            Self::Vf { pf, index, before, .. } => Undo::RestoreVf { pf: pf.clone(), index: *index, before: before.clone() },
            Self::DetachPrograms { .. } => Undo::AttachPrograms,
            Self::Move { .. } => Undo::MoveBack,
            Self::Rdma { device, mode: NetnsMode::Exclusive, .. } => Undo::MoveRdmaBack { device: device.clone() },
            Self::Rdma { mode: NetnsMode::Shared, .. } => Undo::WithContainers,
            Self::Create { .. } => Undo::DeleteLink,
            Self::Vrf { name, .. } => Undo::LeaveVrf { name: name.clone() },
            Self::AltName { name } => Undo::RemoveAltName { name: name.clone() },
            Self::Ethtool { .. } => Undo::Restore,
            Self::Rule { rule } => Undo::DeleteRule { rule: rule.clone() },
            Self::Route { route, .. } if route.is_dead_end() => Undo::DeleteRoute { route: route.clone() },
            _ => Undo::WithMove,
        }
    }

    /// This step for a link whose index in the pod is `index`: a move may change it, and next hops of a multipath route name it.
    #[must_use]
    pub fn by_link(mut self, index: u32) -> Self {
        if let Self::Route { route, .. } = &mut self {
            route.next_hops.iter_mut().for_each(|hop| hop.index = index);
        }
        self
    }

    /// Name of this kind of step, for status, metrics and errors.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Vf { .. } => "vf",
            Self::DetachPrograms { .. } => "detachPrograms",
            Self::Move { .. } => "move",
            Self::Rdma { .. } => "rdma",
            Self::Create { .. } => "create",
            Self::Vrf { .. } => "vrf",
            Self::Link { .. } => "link",
            Self::AltName { .. } => "altname",
            Self::Sysctl { .. } => "sysctl",
            Self::Ethtool { .. } => "ethtool",
            Self::Up => "up",
            Self::Address { .. } => "address",
            Self::Neighbour { .. } => "neighbour",
            Self::Route { .. } => "route",
            Self::Rule { .. } => "rule",
        }
    }

    /// This step in words, for errors and status.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Vf { pf, index, wanted, .. } => format!("setting virtual function {index} of {pf}: {}", vf_words(wanted)),
            Self::DetachPrograms { programs } => format!("taking off its eBPF programs: {}", programs.join("; ")),
            Self::Move { name, mtu, address } => {
                let mtu = mtu.map(|mtu| format!(", with an MTU of {mtu} bytes")).unwrap_or_default();
                let address = address.as_ref().map(|address| format!(", with address {address}")).unwrap_or_default();
                format!("moving it into the pod as {name}{mtu}{address}")
            }
            Self::Rdma { device, mode, char_devices } => {
                let kinds = char_devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                let moved = if *mode == NetnsMode::Exclusive { "moving it into the pod, and " } else { "" };
                format!("giving the pod RDMA device {device}: {moved}its character devices into containers ({kinds})")
            }
            Self::Create { child, name, mtu, .. } => {
                let mtu = mtu.map(|mtu| format!(", with an MTU of {mtu} bytes")).unwrap_or_default();
                format!("making a {child} link in the pod as {name}{mtu}")
            }
            Self::Vrf { name, table } => format!("enslaving it to VRF {name} of table {table}"),
            Self::Link { settings } => format!("setting {}", settings.words().join(", ")),
            Self::AltName { name } => format!("adding altname {name}"),
            Self::Sysctl { key, value, .. } => format!("setting sysctl {key} to {value}"),
            Self::Ethtool { change } => format!("setting {change}"),
            Self::Up => "setting it up".to_owned(),
            Self::Address { address } => format!("adding address {}/{}", address.ip, address.prefix_len),
            Self::Neighbour { neighbour } => format!("adding neighbour {}", neighbour.ip),
            Self::Route { route, .. } => {
                let via = route.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
                let metric = route.metric.map(|m| format!(" metric {m}")).unwrap_or_default();
                format!("adding route {}{via}{metric} in table {}", route.destination, route.table)
            }
            Self::Rule { rule } => format!("adding rule{}", rule_words(rule)),
        }
    }
}
