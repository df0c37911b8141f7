//! RDMA device ↔ PCI function ↔ link ↔ port. Pure: from what netlink and sysfs say.
//!
//! Netlink's word of a port's link is the truth where it has one: RoCE and iWARP, with the link in the host's namespace. Else it is
//! the GUID in an IPoIB link's address, and at last that both belong to the same device.

use std::collections::{BTreeMap, BTreeSet};

use super::hardware::{HardwareId, is_representor};
use super::sysfs::{LinkFacts, RdmaFacts, RdmaPortFacts};
use super::{Attribute, Lent, RdmaPart, attributes};
use crate::names::RdmaDeviceName;
use crate::netdev::Link;
use crate::rdma::{self, Guid, NetnsMode, Protocol};

/// `ARPHRD_INFINIBAND`, `linux/if_arp.h`.
const ARPHRD_INFINIBAND: u16 = 32;
/// `RDMA_NODE_UNSPECIFIED`, `rdma/ib_verbs.h`: EFA.
const NODE_UNSPECIFIED: u8 = 7;
/// `RDMA_NODE_RNIC`.
const NODE_RNIC: u8 = 4;
/// `RDMA_NODE_IB_CA`.
const NODE_CA: u8 = 1;

/// What RDMA netlink told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RdmaSeen {
    /// Which namespaces see a device; none where it was not told.
    pub mode: Option<NetnsMode>,
    /// The devices that the host sees, with their ports.
    pub devices: Vec<(rdma::Device, Vec<rdma::Port>)>,
    /// What could not be read.
    pub problem: Option<String>,
}

/// An RDMA device by both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RdmaDevice {
    pub(super) facts: RdmaFacts,
    pub(super) protocol: Protocol,
    pub(super) node_guid: Option<Guid>,
    node_type: Option<u8>,
    /// The device that it is a part of.
    parent: Option<String>,
    /// Index of the link of each port, by number, where netlink has one.
    links: BTreeMap<u32, u32>,
}

/// A port of one of [`devices`], by its place there.
pub(super) type PortOf = (usize, u32);

/// Both views together; devices that only one of them has are taken as they are.
pub(super) fn devices(facts: Vec<RdmaFacts>, seen: &RdmaSeen) -> Vec<RdmaDevice> {
    let mut told: BTreeMap<&str, _> = seen.devices.iter().map(|told| (told.0.name.as_str(), told)).collect();
    let mut devices: Vec<RdmaDevice> = facts
        .into_iter()
        .map(|facts| {
            let told = told.remove(facts.name.as_str());
            joined(facts, told)
        })
        .collect();
    // Sysfs is the tree of another namespace, or has it in a moment.
    devices.extend(
        told.into_values().map(|told| joined(RdmaFacts { name: told.0.name.clone(), ..RdmaFacts::default() }, Some(told))),
    );
    devices
}

fn joined(mut facts: RdmaFacts, told: Option<&(rdma::Device, Vec<rdma::Port>)>) -> RdmaDevice {
    let Some((device, ports)) = told else {
        return RdmaDevice {
            protocol: spoken(&facts),
            node_guid: facts.node_guid,
            node_type: facts.node_type,
            parent: None,
            links: BTreeMap::new(),
            facts,
        };
    };
    for port in ports {
        facts.ports.entry(port.port).or_default();
    }
    // An InfiniBand port has no Ethernet link, whatever it is made of.
    let is_ib = |port: &u32| facts.ports.get(port).is_some_and(|port| port.link_layer.as_deref() == Some("InfiniBand"));
    let links = ports.iter().filter_map(|port| Some((port.port, port.link.as_ref()?.0))).filter(|(port, _)| !is_ib(port));
    RdmaDevice {
        links: links.collect(),
        protocol: device.protocol,
        node_guid: device.node_guid.or(facts.node_guid),
        node_type: Some(device.node_type),
        parent: device.parent.clone(),
        facts,
    }
}

/// What is spoken, of a device of which sysfs alone tells.
fn spoken(facts: &RdmaFacts) -> Protocol {
    let layer = facts.ports.values().next().and_then(|port| port.link_layer.as_deref());
    match (facts.node_type, layer) {
        (Some(NODE_RNIC), _) => Protocol::Iwarp,
        (Some(NODE_CA) | None, Some("Ethernet")) => Protocol::Roce,
        (Some(NODE_CA) | None, Some("InfiniBand")) => Protocol::InfiniBand,
        _ => Protocol::Other,
    }
}

impl RdmaDevice {
    /// Whether a link with `arphrd` can be the link of `port`.
    fn fits(&self, port: &RdmaPortFacts, arphrd: u16) -> bool {
        match port.link_layer.as_deref() {
            Some("InfiniBand") => arphrd == ARPHRD_INFINIBAND,
            Some("Ethernet") => arphrd != ARPHRD_INFINIBAND,
            _ => true,
        }
    }

    /// Whether it is that of a bond of several functions (RoCE LAG: `mlx5_bond_0`), which ends with the bond.
    fn is_of_bond(&self) -> bool {
        self.facts.name.contains("_bond_")
    }

    fn port(&self, number: u32) -> RdmaPortFacts {
        self.facts.ports.get(&number).cloned().unwrap_or_default()
    }
}

/// Places of the devices that are but another device's halves for management: parts of a planar device, and those that have no verbs
/// beside one on the same function that has. With the place of that other device.
pub(super) fn companions(devices: &[RdmaDevice]) -> BTreeMap<usize, usize> {
    let main = |of: &RdmaDevice| {
        let by_name = of.parent.as_ref().and_then(|name| devices.iter().position(|d| d.facts.name == *name));
        let has_work = of.facts.has_verbs || !of.links.is_empty() || matches!(of.protocol, Protocol::Roce | Protocol::Iwarp);
        let beside = |d: &RdmaDevice| d.facts.has_verbs && d.facts.device_path == of.facts.device_path;
        by_name.or_else(|| devices.iter().position(beside).filter(|_| !has_work && of.facts.device_path.is_some()))
    };
    devices.iter().enumerate().filter_map(|(place, device)| Some((place, main(device).filter(|main| *main != place)?))).collect()
}

/// Which port belongs to which link, by the link's index.
pub(super) fn bind<'a>(
    devices: &[RdmaDevice],
    links: &[Link],
    facts: impl Fn(u32) -> Option<&'a LinkFacts>,
) -> BTreeMap<u32, PortOf> {
    let companions = companions(devices);
    let mut open: Vec<(usize, &RdmaDevice)> =
        devices.iter().enumerate().filter(|(place, _)| !companions.contains_key(place)).collect();
    open.sort_by_key(|(_, device)| (device.facts.name.len(), &device.facts.name));
    let mut bound = BTreeMap::new();
    for link in links {
        if let Some(port) = by_netlink(&open, link.index) {
            let bond = link.master.filter(|_| devices[port.0].is_of_bond());
            bound.entry(bond.unwrap_or(link.index)).or_insert(port);
        }
    }
    for link in links.iter().filter(|link| !is_representor(link) && !is_ipoib_child(link)) {
        if bound.contains_key(&link.index) {
            continue;
        }
        let taken: BTreeSet<PortOf> = bound.values().copied().collect();
        let found = by_guid(&open, link).or_else(|| by_device(&open, link, facts(link.index)?, &taken));
        let found = found.or_else(|| by_name(&open, link));
        if let Some(port) = found.filter(|port| link.master.is_none() || !devices[port.0].is_of_bond()) {
            bound.insert(link.index, port);
        }
    }
    bound
}

fn by_netlink(open: &[(usize, &RdmaDevice)], index: u32) -> Option<PortOf> {
    open.iter().find_map(|(place, device)| Some((*place, *device.links.iter().find(|(_, link)| **link == index)?.0)))
}

/// The last 8 bytes of an IPoIB link's address are the GUID of its port (RFC 4391, 9.1.1).
fn by_guid(open: &[(usize, &RdmaDevice)], link: &Link) -> Option<PortOf> {
    let guid = port_guid(link)?;
    open.iter()
        .find_map(|(place, device)| Some((*place, *device.facts.ports.iter().find(|(_, port)| port.guid == Some(guid))?.0)))
}

fn port_guid(link: &Link) -> Option<Guid> {
    let address = link.address.as_ref().filter(|address| link.arphrd == ARPHRD_INFINIBAND && address.bytes().len() == 20)?;
    Some(Guid(u64::from_be_bytes(address.bytes()[12..].try_into().ok()?))).filter(|guid| guid.0 != 0)
}

/// The port with the link's number (`dev_port` counts from 0) of a device of the same function; of one whose ports have other numbers,
/// the first that is free.
fn by_device(open: &[(usize, &RdmaDevice)], link: &Link, facts: &LinkFacts, taken: &BTreeSet<PortOf>) -> Option<PortOf> {
    let path = facts.device_path.as_ref()?;
    let same = || open.iter().filter(|(_, device)| device.facts.device_path.as_ref() == Some(path));
    let number = facts.dev_port.saturating_add(1);
    let is_free = |place: usize, device: &RdmaDevice, number: u32| {
        !taken.contains(&(place, number)) && !device.links.contains_key(&number) && device.fits(&device.port(number), link.arphrd)
    };
    let by_number = same().find(|(place, device)| {
        (device.facts.ports.is_empty() || device.facts.ports.contains_key(&number)) && is_free(*place, device, number)
    });
    if let Some((place, _)) = by_number {
        return Some((*place, number));
    }
    same().filter(|(_, device)| device.facts.ports.len() == 1).find_map(|(place, device)| {
        let number = *device.facts.ports.keys().next()?;
        is_free(*place, device, number).then_some((*place, number))
    })
}

/// Of an RDMA device without hardware, older kernels tell the name of its link alone.
fn by_name(open: &[(usize, &RdmaDevice)], link: &Link) -> Option<PortOf> {
    let over = |device: &RdmaDevice| device.facts.device_path.is_none() && device.facts.over.as_ref() == Some(&link.name);
    open.iter().find(|(_, device)| over(device)).map(|(place, _)| (*place, 1))
}

/// A link for another partition on top of an IPoIB link: the RDMA device is the lower one's.
fn is_ipoib_child(link: &Link) -> bool {
    link.kind.as_deref() == Some("ipoib") && link.parent.is_some_and(|parent| parent != 0 && parent != link.index)
}

/// Whether the link is an IPoIB one, or on top of such.
pub(super) fn is_ipoib(link: &Link) -> bool {
    link.kind.as_deref() == Some("ipoib") || link.arphrd == ARPHRD_INFINIBAND
}

/// What a DRA device gets to know; none where the RDMA device's name is none.
pub(super) fn part(devices: &[RdmaDevice], (place, port): PortOf) -> Option<RdmaPart> {
    let device = &devices[place];
    let companions = companions(devices);
    let of = companions.iter().filter(|(_, main)| **main == place).map(|(companion, _)| &devices[*companion].facts.name);
    let mut names: Vec<_> = of.filter_map(|name| RdmaDeviceName::new(name.as_str()).ok()).collect();
    names.sort();
    Some(RdmaPart {
        name: RdmaDeviceName::new(device.facts.name.as_str()).ok()?,
        port,
        protocol: device.protocol,
        node_guid: device.node_guid,
        companions: names,
    })
}

/// Attributes of a device with this port.
pub(super) fn attributes(devices: &[RdmaDevice], (place, number): PortOf, mode: Option<NetnsMode>) -> super::Attributes {
    let device = &devices[place];
    let port = device.port(number);
    let text = |value: String| Some(attributes::text(&value));
    let is_ib = device.protocol == Protocol::InfiniBand;
    let all = [
        ("rdma", Some(Attribute::Bool(true))),
        ("rdmaDevice", text(device.facts.name.clone())),
        ("rdmaPort", Some(Attribute::Int(number.into()))),
        ("rdmaProtocol", text(device.protocol.to_string())),
        ("rdmaLinkLayer", port.link_layer.as_deref().map(attributes::text)),
        ("rdmaNodeGuid", device.node_guid.map(|guid| attributes::text(&guid.to_string()))),
        ("rdmaPortGuid", port.guid.filter(|_| is_ib).map(|guid| attributes::text(&guid.to_string()))),
        ("rdmaRate", port.rate.filter(|_| port.is_active).map(|rate| Attribute::Int(rate.into()))),
        ("rdmaNetnsMode", mode.map(|mode| attributes::text(&mode.to_string()))),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Why an RDMA device over no link of the host is not offered; none where it is one without a link by nature.
pub(super) fn withhold(device: &RdmaDevice) -> Option<String> {
    let name = &device.facts.name;
    match device.protocol {
        Protocol::Roce | Protocol::Iwarp => Some(format!(
            "the RDMA device {name} speaks {}, and its link is not on the host: in a pod, or not there yet",
            device.protocol
        )),
        _ if device.facts.device.is_none() => Some(format!(
            "the RDMA device {name} is over no link, and sysfs does not show its hardware, so it can't be told from others"
        )),
        Protocol::InfiniBand => None,
        Protocol::Other if device.node_type == Some(NODE_UNSPECIFIED) => None,
        Protocol::Other => Some(format!("it is not known what the RDMA device {name} speaks, and it is over no link")),
    }
}

/// What an RDMA device without a link may be called, best first: its function alone, then with its GUID.
pub(super) fn candidates(device: &RdmaDevice) -> Vec<HardwareId> {
    let guid = device.node_guid.map(|guid| format!("{:016x}", guid.0));
    let port = device.facts.device.as_ref().filter(|(bus, _)| bus == "auxiliary").map(|(_, name)| name.clone());
    let ports = std::iter::once(port.unwrap_or_default()).chain(guid);
    match (&device.facts.pci, &device.facts.device) {
        (Some(pci), _) => ports.map(|port| HardwareId::Pci { address: pci.address.clone(), port }).collect(),
        (None, Some((bus, name))) => ports.map(|port| HardwareId::Bus { bus: bus.clone(), device: name.clone(), port }).collect(),
        (None, None) => Vec::new(),
    }
}

/// Whether it is, or belongs to, a device that is lent: the one on its function that the attributes name. One on the same function
/// with another GUID is not.
pub(super) fn is_lents(device: &RdmaDevice, lent: &Lent) -> bool {
    let same_function = match &lent.hardware {
        HardwareId::Pci { address, .. } => device.facts.pci.as_ref().is_some_and(|pci| pci.address == *address),
        HardwareId::Bus { bus, device: name, .. } => device.facts.device.as_ref().is_some_and(|d| (&d.0, &d.1) == (bus, name)),
        HardwareId::Virtual { .. } => false,
    };
    let attribute = |name: &str| match lent.attributes.get(name) {
        Some(Attribute::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let same_name = attribute("rdmaDevice") == Some(device.facts.name.as_str());
    match (attribute("rdmaNodeGuid"), device.node_guid) {
        (Some(lents), Some(own)) => lents.parse() == Ok(own) && (same_function || same_name),
        // Without hardware, its name is all there is.
        _ if device.facts.device.is_none() => same_name,
        _ => same_function,
    }
}

/// The port of the RDMA device of a lent device whose link is not on the host, where the host sees the RDMA device.
pub(super) fn of_lent(devices: &[RdmaDevice], lent: &Lent) -> Option<PortOf> {
    let wants = lent.attributes.get("rdma") == Some(&Attribute::Bool(true));
    let place = devices.iter().position(|device| wants && is_lents(device, lent))?;
    let port = match lent.attributes.get("rdmaPort") {
        Some(Attribute::Int(port)) => u32::try_from(*port).ok().filter(|port| *port > 0),
        _ => None,
    };
    Some((place, port.unwrap_or(1)))
}
