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
    /// (PCI address; bus device; kind and permanent address; for a representor its port name). Other ports can't be told this
    /// way, and neither can virtual links: there the caller must know the index as well.
    #[must_use]
    pub fn may_be(&self, link: &Link, pci: Option<&str>) -> bool {
        let port_fits =
            |port: &String| !(is_representor(link) || is_representor_name(port)) || link.phys_port_name.as_ref() == Some(port);
        match self {
            Self::Pci { address, port } => pci == Some(address) && port_fits(port),
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

/// Whether the link stands for a function that is elsewhere (in a guest, in a pod).
pub(crate) fn is_representor(link: &Link) -> bool {
    link.phys_port_name.as_deref().is_some_and(is_representor_name)
}

/// `pf0vf3`, `pf0sf88`, `pf0`, with `c1` in front for a controller: as the kernel's devlink makes port names.
fn is_representor_name(name: &str) -> bool {
    let name = name.strip_prefix('c').map_or(name, |rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    name.strip_prefix("pf").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// What the link itself says of its port; empty for the first or only one.
fn port_of(link: &Link, facts: &LinkFacts) -> String {
    let name = link.phys_port_name.as_deref();
    if let Some(name) = name.filter(|name| is_representor_name(name)) {
        return name.to_owned();
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
    let function = facts.pci.as_ref().and_then(|pci| pci.address.get(pci.address.len() - 1..)).unwrap_or("0");
    match name.and_then(|name| name.strip_prefix('p')) {
        Some(number) if number != "0" && number != function => format!("p{number}"),
        _ => String::new(),
    }
}

/// What the link may be called, best first. The last one has the index in it.
pub(super) fn candidates(link: &Link, facts: &LinkFacts) -> Vec<HardwareId> {
    let is_child = link.kind.as_deref() == Some("ipoib") && link.parent.is_some_and(|parent| parent != link.index);
    let ports = || [port_of(link, facts), format!("if{}", link.index)];
    let own = |bus: &str, device: &str, port| HardwareId::Bus { bus: bus.to_owned(), device: device.to_owned(), port };
    match (&facts.pci, &facts.device) {
        (Some(pci), _) if !is_child => ports().map(|port| HardwareId::Pci { address: pci.address.clone(), port }).to_vec(),
        (None, Some((bus, device))) if !is_child => ports().map(|port| own(bus, device, port)).to_vec(),
        _ => {
            let address = own_address(link).cloned();
            let id = |twin| HardwareId::Virtual { kind: kind_of(link).to_owned(), address: address.clone(), twin };
            let alone = address.as_ref().map(|_| id(None));
            alone.into_iter().chain([id(Some(link.index))]).collect()
        }
    }
}

/// Begin of the name by which shares of a device are allocated. No device is called so: see [`HardwareId::device_name`].
const SHARES: &str = "share-";

/// Whether it is a name by which shares are allocated.
pub(crate) fn is_share_name(name: &DeviceName) -> bool {
    name.as_str().starts_with(SHARES)
}

/// The name by which shares of `device` are allocated: total and injective, as device names are. Of such a name, itself.
#[must_use]
pub fn share_name(device: &DeviceName) -> DeviceName {
    let device_name = device.as_str();
    if is_share_name(device) {
        return device.clone();
    }
    DeviceName::new(format!("{SHARES}{device_name}")).unwrap_or_else(|_| {
        // Too long. A device's name does not begin with the hash's sign, so it is no other device's.
        let mut name = format!("{SHARES}x");
        push_hex(&mut name, &Sha256::digest(device_name.as_bytes())[..HASH_DIGITS / 2]);
        DeviceName::new(name).expect("lower-case letters, digits and an inner hyphen, short")
    })
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::netdev::link::ParentDevice;

    fn pci(address: &str, port: &str) -> HardwareId {
        HardwareId::Pci { address: address.to_owned(), port: port.to_owned() }
    }

    fn bus(bus: &str, device: &str, port: &str) -> HardwareId {
        HardwareId::Bus { bus: bus.to_owned(), device: device.to_owned(), port: port.to_owned() }
    }

    fn virt(kind: &str, address: Option<&[u8]>, twin: Option<u32>) -> HardwareId {
        HardwareId::Virtual { kind: kind.to_owned(), address: address.map(|a| LinkAddress::new(a.to_vec())), twin }
    }

    #[test]
    fn names_of_usual_devices_are_readable() {
        for (id, name) in [
            (pci("0000:8a:00.0", ""), "pci-0000-8a-00-0"),
            (pci("10000:e1:00.7", "1"), "pci-10000-e1-00-7-1"),
            (bus("vmbus", "000d3a5b-9f2c", ""), "bus-vmbus-000d3a5b-9f2c"),
            (virt("dummy", Some(&[2, 0, 0, 0, 0, 5]), None), "net-dummy-020000000005"),
            (virt("dummy", Some(&[2, 0, 0, 0, 0, 5]), Some(7)), "net-dummy-020000000005-i7"),
            (virt("tun", None, Some(4)), "net-tun-i4"),
        ] {
            assert_eq!(id.device_name().as_str(), name);
        }
        let odd = bus("usb", "1-2:1.0", "").device_name();
        assert!(odd.as_str().starts_with("bus-usb-1-2-1-0-x"), "{odd}");
        // What would look like a hashed name is hashed itself.
        let hashed = odd.as_str().strip_prefix("bus-usb-").unwrap();
        assert_ne!(bus("usb", hashed, "").device_name(), odd);
    }

    #[test]
    fn what_may_be_a_device_in_a_pod() {
        let link = Link { kind: Some("macvlan".to_owned()), ..Link::default() };
        let address = [2, 0, 0, 0, 0, 5];
        assert!(virt("macvlan", Some(&address), None).may_be(&link, None));
        assert!(!virt("veth", Some(&address), None).may_be(&link, None));
        let nic = Link { perm_address: Some(LinkAddress::new(address.to_vec())), ..Link::default() };
        assert!(virt("virtual", Some(&address), None).may_be(&nic, None));
        assert!(!virt("virtual", Some(&[2, 0, 0, 0, 0, 6]), None).may_be(&nic, None));
        assert!(pci("0000:8a:00.0", "").may_be(&nic, Some("0000:8a:00.0")) && !pci("0000:8a:00.0", "").may_be(&nic, None));
        let representor = Link { phys_port_name: Some("pf0vf3".to_owned()), ..Link::default() };
        assert!(!pci("0000:8a:00.0", "").may_be(&representor, Some("0000:8a:00.0")));
        assert!(pci("0000:8a:00.0", "pf0vf3").may_be(&representor, Some("0000:8a:00.0")));
        let parent = ParentDevice { bus: "vmbus".to_owned(), name: "a".to_owned() };
        let synthetic = Link { parent_device: Some(parent), ..Link::default() };
        assert!(bus("vmbus", "a", "").may_be(&synthetic, None) && !bus("vmbus", "b", "").may_be(&synthetic, None));
    }

    /// Texts that sanitising would make alike, and those that look like other parts of a name.
    fn text() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a-b.:_-]{0,4}",
            "(0000|0001|10000):0[01]:00\\.[01]",
            "(1|i7|x1|pf0vf3|p1|usb|dummy|tun|020000000005|0000-00-00-0)",
            "x[0-9a-f]{32}",
            "\\PC{0,70}",
        ]
    }

    fn id() -> impl Strategy<Value = HardwareId> {
        let address = prop_oneof![
            Just(None),
            Just(Some(vec![])),
            Just(Some(vec![2, 0, 0, 0, 0, 5])),
            proptest::collection::vec(0_u8..2, 0..33).prop_map(Some)
        ];
        let twin = proptest::option::of(0_u32..12);
        prop_oneof![
            (text(), text()).prop_map(|(address, port)| HardwareId::Pci { address, port }),
            (text(), text(), text()).prop_map(|(bus, device, port)| HardwareId::Bus { bus, device, port }),
            (text(), address, twin)
                .prop_map(|(kind, address, twin)| { HardwareId::Virtual { kind, address: address.map(LinkAddress::new), twin } }),
        ]
    }

    proptest! {
        #[test]
        fn every_id_has_a_name_and_no_two_share_one(ids in proptest::collection::btree_set(id(), 2..60)) {
            let names: BTreeSet<_> = ids.iter().map(HardwareId::device_name).collect();
            prop_assert_eq!(names.len(), ids.len());
        }

        #[test]
        fn a_readable_name_is_never_one_that_another_hashed_id_has(id in id()) {
            let name = id.device_name();
            // Feed the name back as every part of another id.
            for other in [pci(name.as_str(), ""), bus("bus", name.as_str(), ""), bus("usb", name.as_str(), ""), virt(name.as_str(), None, None)] {
                prop_assert!(other == id || other.device_name() != name);
            }
            if let Some(device) = name.as_str().strip_prefix("bus-usb-") {
                let other = bus("usb", device, "");
                prop_assert!(other == id || other.device_name() != name);
            }
        }
    }
}
