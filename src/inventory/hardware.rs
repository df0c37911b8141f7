//! Stable hardware ids, and device names made from them. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::sysfs::{LinkFacts, is_pci_address};
use crate::names::{DNS_LABEL_MAX, DeviceName};
use crate::netdev::{Link, LinkAddress};

/// What a device is, whatever it is called and wherever it is at the moment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HardwareId {
    /// A port of a PCI function.
    #[serde(rename_all = "camelCase")]
    Pci {
        /// `0000:8a:00.0`.
        address: String,
        /// Tells several links of one function apart (`dev_port` or `phys_port_name`); empty for the first or only one.
        #[serde(default)]
        port: String,
    },
    /// A device of another bus (`vmbus`, …).
    #[serde(rename_all = "camelCase")]
    Bus {
        /// Bus name.
        bus: String,
        /// Device name on that bus.
        device: String,
        /// As in `Pci`.
        #[serde(default)]
        port: String,
    },
    /// A link without hardware: its kind and the link-layer address it was found with.
    #[serde(rename_all = "camelCase")]
    Virtual {
        /// `veth`, `dummy`, …
        kind: String,
        /// None for a link without one (tun).
        address: Option<LinkAddress>,
        /// The index, where several links share kind and address, for all but the oldest; and where there is no address.
        twin: Option<u32>,
    },
}

/// Longest port or kind that goes into a name as it is, bytes. Both are at most `IFNAMSIZ` (16) in the kernel.
const PART_MAX: usize = 16;
/// Hex digits of the hash in a name that could not be made readable: 128 bits.
const HASH_DIGITS: usize = 32;

impl HardwareId {
    /// The device's name: total (every id has one), injective (two ids never share one), a DNS label, never made from a link's
    /// name. PCI functions are called as the peer calls them: `pci-0000-8a-00-0`, and further ports `pci-0000-8a-00-0-1`. Others
    /// are `bus-vmbus-<device>` and `net-dummy-020000000005`, with `-i7` for a twin. What does not fit such a pattern exactly gets
    /// what is readable of it and a hash: `…-x<32 hex digits>`.
    #[must_use]
    pub fn device_name(&self) -> DeviceName {
        // A readable name can be read back to one id only, because its parts can't contain what separates them. It must not
        // look like a hashed one.
        let readable = self.readable_name().filter(|name| !looks_hashed(name)).and_then(|name| DeviceName::new(name).ok());
        readable.unwrap_or_else(|| self.hashed_name())
    }

    fn readable_name(&self) -> Option<String> {
        let part = |text: &str| !text.is_empty() && text.len() <= PART_MAX && text.bytes().all(is_plain);
        match self {
            Self::Pci { address, port } => {
                let name = is_pci_address(address).then(|| format!("pci-{}", address.replace([':', '.'], "-")))?;
                match port.as_str() {
                    "" => Some(name),
                    port => part(port).then(|| format!("{name}-{port}")),
                }
            }
            Self::Bus { bus, device, port } => {
                let device_fits = device.bytes().all(|b| is_plain(b) || b == b'-');
                (part(bus) && device_fits && !device.is_empty() && port.is_empty()).then(|| format!("bus-{bus}-{device}"))
            }
            Self::Virtual { kind, address, twin } => {
                let mut name = part(kind).then(|| format!("net-{kind}"))?;
                if let Some(address) = address {
                    // One without bytes would look like none.
                    (!address.bytes().is_empty()).then(|| name.push('-'))?;
                    push_hex(&mut name, address.bytes());
                }
                // 'i' is no hex digit.
                twin.map_or(Ok(()), |twin| write!(name, "-i{twin}")).ok()?;
                Some(name)
            }
        }
    }

    fn hashed_name(&self) -> DeviceName {
        let (prefix, parts): (_, Vec<&str>) = match self {
            Self::Pci { address, port } => ("pci", vec![address, port]),
            Self::Bus { bus, device, port } => ("bus", vec![bus, device, port]),
            Self::Virtual { kind, .. } => ("net", vec![kind]),
        };
        let mut name = prefix.to_owned();
        for part in parts {
            let words = part.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            words.for_each(|word| name.extend(["-", &word.to_ascii_lowercase()]));
        }
        name.truncate(DNS_LABEL_MAX - HASH_DIGITS - "-x".len());
        name.truncate(name.trim_end_matches('-').len());
        name.push_str("-x");
        // JSON quotes what could run together.
        let text = serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"));
        push_hex(&mut name, &Sha256::digest(text.as_bytes())[..HASH_DIGITS / 2]);
        DeviceName::new(name).expect("lower-case letters, digits and inner hyphens, cut to length")
    }

    /// Whether `link`, with PCI address `pci` behind it, may be this device, judging by what does not change while a pod has it
    /// (PCI address; bus device; kind and permanent address). A port can't be told this way. For virtual links the caller must
    /// know the index as well.
    #[must_use]
    pub fn may_be(&self, link: &Link, pci: Option<&str>) -> bool {
        match self {
            Self::Pci { address, .. } => pci == Some(address),
            Self::Bus { bus, device, .. } => link.parent_device.as_ref().is_some_and(|p| (&p.bus, &p.name) == (bus, device)),
            Self::Virtual { kind, address, .. } => {
                let permanent = link.perm_address.as_ref();
                kind_of(link) == kind && link.parent_device.is_none() && permanent.is_none_or(|p| Some(p) == address.as_ref())
            }
        }
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

fn looks_hashed(name: &str) -> bool {
    let hash = name.rsplit_once("-x").map(|(_, hash)| hash);
    hash.is_some_and(|hash| hash.len() == HASH_DIGITS && hash.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn push_hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
    }
}

/// The kind that a link without hardware is called by.
pub(super) fn kind_of(link: &Link) -> &str {
    link.kind.as_deref().unwrap_or("virtual")
}

/// The permanent address, else the one in use.
pub(super) fn own_address(link: &Link) -> Option<&LinkAddress> {
    link.perm_address.as_ref().or(link.address.as_ref()).filter(|a| !a.bytes().is_empty())
}

/// Whether the link stands for a function that is elsewhere (in a guest, in a pod): `pf0vf3`, `c1pf0sf88`, `pf0`.
pub(super) fn is_representor(facts: &LinkFacts) -> bool {
    let Some(name) = &facts.phys_port_name else { return false };
    let digits_after = |text: &str| text.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
    let rest = name.strip_prefix('c').map_or_else(|| name.clone(), digits_after);
    rest.strip_prefix("pf").is_some_and(|r| r.starts_with(|c: char| c.is_ascii_digit()))
}

/// What the link itself says of its port; empty for the first or only one.
fn port_of(facts: &LinkFacts) -> String {
    if is_representor(facts) {
        return facts.phys_port_name.clone().unwrap_or_default();
    }
    if let Some((bus, device)) = &facts.device
        && bus == "auxiliary"
    {
        return device.clone();
    }
    if facts.dev_port > 0 {
        return facts.dev_port.to_string();
    }
    // `p1` on function 1 is its only port (ConnectX in switchdev mode); `p1` on function 0 is its second one.
    let function = facts.pci.as_ref().and_then(|pci| pci.address.chars().last()).unwrap_or('0');
    match facts.phys_port_name.as_deref().and_then(|name| name.strip_prefix('p')) {
        Some(number) if number != "0" && number != function.to_string() => format!("p{number}"),
        _ => String::new(),
    }
}

/// What the link may be called, best first. The last one has the index in it.
pub(super) fn candidates(link: &Link, facts: &LinkFacts) -> Vec<HardwareId> {
    let is_child = link.kind.as_deref() == Some("ipoib") && link.parent.is_some_and(|parent| parent != link.index);
    let ports = || [port_of(facts), format!("if{}", link.index)];
    let own = |bus: &str, device: &str, port| HardwareId::Bus { bus: bus.to_owned(), device: device.to_owned(), port };
    match (&facts.pci, &facts.device, &link.parent_device) {
        (Some(pci), _, _) if !is_child => {
            ports().map(|port| HardwareId::Pci { address: pci.address.clone(), port }).to_vec()
        }
        (None, Some((bus, device)), _) if !is_child => ports().map(|port| own(bus, device, port)).to_vec(),
        // Without sysfs, netlink still knows the parent (kernel 5.14 and later).
        (None, None, Some(parent)) if parent.bus == "pci" && !is_child => {
            ports().map(|port| HardwareId::Pci { address: parent.name.clone(), port }).to_vec()
        }
        (None, None, Some(parent)) if !is_child => ports().map(|port| own(&parent.bus, &parent.name, port)).to_vec(),
        _ => {
            let address = own_address(link).cloned();
            let id = |twin| HardwareId::Virtual { kind: kind_of(link).to_owned(), address: address.clone(), twin };
            let alone = address.as_ref().map(|_| id(None));
            alone.into_iter().chain([id(Some(link.index))]).collect()
        }
    }
}

/// Gives each link an id, by index. A link that had one in `previous` keeps it as long as it may still have it; the others take
/// theirs in the order of their indices. Ids in `taken` belong to devices that are elsewhere. A link that can't have any id of
/// its own is left out.
#[must_use]
pub fn assign(
    links: &[(&Link, &LinkFacts)],
    previous: &BTreeMap<u32, HardwareId>,
    taken: &BTreeSet<HardwareId>,
) -> BTreeMap<u32, HardwareId> {
    let mut taken = taken.clone();
    let mut ids = BTreeMap::new();
    let mut open: BTreeMap<u32, Vec<HardwareId>> = links.iter().map(|(l, f)| (l.index, candidates(l, f))).collect();
    open.retain(|index, candidates| {
        let kept = previous.get(index).filter(|id| candidates.contains(id));
        match kept {
            Some(id) if taken.insert(id.clone()) => ids.insert(*index, id.clone()).is_some(),
            _ => true,
        }
    });
    for (index, candidates) in open {
        if let Some(id) = candidates.into_iter().find(|id| taken.insert(id.clone())) {
            ids.insert(index, id);
        }
    }
    ids
}
