//! The attributes of a device. Names are the peer's, so that selectors can be kept; where the values differ, it says so here.

use std::net::IpAddr;

use super::hardware::HardwareId;
use super::sysfs::{LinkFacts, PciFunction, RdmaFacts};
use super::{Attribute, Attributes};
use crate::netdev::bpf::{Programs, Xdp};
use crate::netdev::{Address, Link};

/// Longest text of an attribute, bytes: `DeviceAttributeMaxValueLength`, `k8s.io/api/resource/v1`.
const TEXT_MAX: usize = 64;

/// The attributes of a link, but for those of its RDMA device.
pub(super) fn of_link(link: &Link, facts: &LinkFacts, addresses: &[&Address]) -> Attributes {
    let mut attributes = Attributes::new();
    let mut set = |name: &str, value: Attribute| {
        attributes.insert(name.to_owned(), value);
    };
    set("ifName", text(&link.name));
    set("mtu", Attribute::Int(link.mtu.into()));
    set("encapsulation", text(&encapsulation(link.arphrd)));
    set("state", text(&link.oper_state));
    set("type", text(link.kind.as_deref().unwrap_or("device")));
    set("virtual", Attribute::Bool(facts.is_virtual || (facts.device_path.is_none() && link.parent_device.is_none())));
    set("rdma", Attribute::Bool(false));
    // A cut address or alias list is of no use to a selector, a cut alias is.
    let mac = link.address.as_ref().map(ToString::to_string).filter(|mac| !mac.is_empty() && mac.len() <= TEXT_MAX);
    let optional = [
        ("mac", mac),
        ("alias", link.alias.clone().filter(|alias| !alias.is_empty())),
        ("ipv4", list(addresses, IpAddr::is_ipv4)),
        ("ipv6", list(addresses, IpAddr::is_ipv6)),
    ];
    for (name, value) in optional {
        if let Some(value) = value {
            set(name, text(&value));
        }
    }
    attributes.extend(of_place(facts.pci.as_ref(), facts.numa_node));
    attributes
}

/// The attributes of an RDMA device without a link, but for those that every RDMA device has.
pub(super) fn without_link(facts: &RdmaFacts) -> Attributes {
    let mut attributes = of_place(facts.pci.as_ref(), facts.numa_node);
    attributes.insert("virtual".to_owned(), Attribute::Bool(false));
    attributes
}

/// Where the hardware is, and what it is.
fn of_place(pci: Option<&PciFunction>, numa_node: Option<u32>) -> Attributes {
    let mut attributes = pci.map(of_pci).unwrap_or_default();
    let total = pci.map_or(0, |pci| pci.sriov_total);
    attributes.insert("sriov".to_owned(), Attribute::Bool(total > 0));
    if let Some(pci) = pci.filter(|_| total > 0) {
        attributes.insert("sriovVfs".to_owned(), Attribute::Int(pci.sriov_vfs.into()));
    }
    if let Some(node) = numa_node {
        for name in ["numaNode", "resource.kubernetes.io/numaNode"] {
            attributes.insert(name.to_owned(), Attribute::Int(node.into()));
        }
    }
    attributes
}

/// Most attributes of a device: 32 with capacities (`ResourceSliceMaxAttributesAndCapacitiesPerDevice`, `k8s.io/api/resource/v1`), less
/// what a shared NIC gets besides: `shared`, `slots`, `bandwidth`.
const ATTRIBUTES_MAX: usize = 32 - 3;
/// What is left out where there are more, first to last: what others say as well, or nobody selects by.
const LEAST_USEFUL: [&str; 6] = ["rdmaLinkLayer", "tcxProgramNames", "tcFilterNames", "alias", "pciSubsystem", "rdmaRate"];

/// Leaves out what the API has no room for.
pub(super) fn fit(attributes: &mut Attributes) {
    for name in LEAST_USEFUL {
        if attributes.len() > ATTRIBUTES_MAX {
            attributes.remove(name);
        }
    }
}

/// Vendor, device and subsystem are ids (`0x15b3`), where the peer has names of a database for the first two.
fn of_pci(pci: &PciFunction) -> Attributes {
    let texts = [
        ("pciAddress", Some(&pci.address)),
        ("pciVendor", pci.vendor.as_ref()),
        ("pciDevice", pci.device.as_ref()),
        ("pciSubsystem", pci.subsystem.as_ref()),
        ("resource.kubernetes.io/pcieRoot", pci.root.as_ref()),
    ];
    let mut attributes: Attributes =
        texts.into_iter().filter_map(|(name, value)| Some((name.to_owned(), text(value?)))).collect();
    if let Some(pf) = &pci.physical_function {
        attributes.insert("isSriovVf".to_owned(), Attribute::Bool(true));
        let parent = HardwareId::Pci { address: pf.clone(), port: String::new() };
        attributes.insert("physicalFunction".to_owned(), text(parent.device_name().as_str()));
    }
    if let Some(index) = pci.vf_index {
        attributes.insert("vfIndex".to_owned(), Attribute::Int(index.into()));
    }
    attributes
}

/// `value`, cut to what an attribute may have, between two characters.
pub(super) fn text(value: &str) -> Attribute {
    let end = (0..=TEXT_MAX.min(value.len())).rev().find(|end| value.is_char_boundary(*end)).unwrap_or(0);
    Attribute::String(value[..end].to_owned())
}

/// eBPF of a link. The peer does not count XDP as `ebpf`.
pub(super) fn of_programs(link: &Link, programs: &Programs) -> Attributes {
    let mut filters: Vec<&str> = programs.filters.iter().map(|filter| filter.name.as_str()).collect();
    let mut tcx: Vec<&str> = programs.attached.iter().map(|attached| attached.program.name.as_str()).collect();
    let is_there = !filters.is_empty() || !programs.attached.is_empty() || link.xdp != Xdp::default();
    let mut attributes = Attributes::new();
    // Where it could not be looked at, nothing is said.
    if is_there || programs.unread.is_none() {
        attributes.insert("ebpf".to_owned(), Attribute::Bool(is_there));
    }
    for (name, names) in [("tcFilterNames", &mut filters), ("tcxProgramNames", &mut tcx)] {
        names.retain(|name| !name.is_empty());
        names.sort_unstable();
        names.dedup();
        if let Some(list) = joined(names.iter().map(ToString::to_string)) {
            attributes.insert(name.to_owned(), text(&list));
        }
    }
    attributes
}

/// Comma list, in order, of the global unicast addresses of a family, as many whole ones as an attribute may have.
fn list(addresses: &[&Address], family: fn(&IpAddr) -> bool) -> Option<String> {
    let mut global: Vec<_> =
        addresses.iter().filter(|a| family(&a.ip) && is_global_unicast(a.ip)).map(|a| (a.ip, a.prefix_len)).collect();
    global.sort();
    global.dedup();
    joined(global.into_iter().map(|(ip, prefix_len)| format!("{ip}/{prefix_len}")))
}

/// Comma list of as many whole items as an attribute may have; none without any.
fn joined(items: impl Iterator<Item = String>) -> Option<String> {
    let mut list = String::new();
    for item in items {
        let item = if list.is_empty() { item } else { format!(",{item}") };
        // A first one that is too long alone is cut by the caller.
        if !list.is_empty() && list.len() + item.len() > TEXT_MAX {
            break;
        }
        list.push_str(&item);
    }
    (!list.is_empty()).then_some(list)
}

fn is_global_unicast(ip: IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !local && !ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast()
}

/// `ARPHRD_*` (`linux/if_arp.h`) in words.
fn encapsulation(arphrd: u16) -> String {
    let known = match arphrd {
        1 => "ether",
        32 => "infiniband",
        280 => "can",
        512 => "ppp",
        768 => "ipip",
        769 => "tunnel6",
        772 => "loopback",
        776 => "sit",
        778 => "gre",
        801 => "ieee802.11",
        823 => "gre6",
        0xfffe => "none",
        other => return format!("unknown{other}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A virtual function with RDMA, eBPF, addresses and an alias.
    #[test]
    fn what_the_api_has_no_room_for_is_left_out_in_order() {
        let all = "alias ebpf encapsulation ifName ipv4 ipv6 isSriovVf mac mtu numaNode pciAddress pciDevice pciSubsystem pciVendor \
            physicalFunction rdma rdmaDevice rdmaLinkLayer rdmaNetnsMode rdmaNodeGuid rdmaPort rdmaProtocol rdmaRate \
            resource.kubernetes.io/numaNode resource.kubernetes.io/pcieRoot sriov state tcFilterNames tcxProgramNames type vfIndex virtual";
        let mut attributes: Attributes = all.split_whitespace().map(|name| (name.to_owned(), Attribute::Int(1))).collect();
        assert_eq!(attributes.len(), 32);
        fit(&mut attributes);
        let lacks: Vec<_> = all.split_whitespace().filter(|name| !attributes.contains_key(*name)).collect();
        assert_eq!(lacks, ["rdmaLinkLayer", "tcFilterNames", "tcxProgramNames"]);
        let before = attributes.clone();
        fit(&mut attributes);
        assert_eq!(attributes, before);
    }

    proptest! {
        #[test]
        fn a_text_is_cut_to_its_longest_fitting_start(value in "\\PC{0,80}") {
            let Attribute::String(cut) = text(&value) else { unreachable!() };
            prop_assert!(cut.len() <= TEXT_MAX && value.starts_with(&cut));
            if let Some(next) = value[cut.len()..].chars().next() {
                prop_assert!(cut.len() + next.len_utf8() > TEXT_MAX);
            }
        }

        #[test]
        fn a_list_has_whole_items_in_order(ips in proptest::collection::vec((any::<IpAddr>(), 0_u8..=32), 0..12)) {
            let addresses: Vec<_> = ips.iter().map(|(ip, len)| Address::permanent(*ip, *len)).collect();
            let addresses: Vec<_> = addresses.iter().collect();
            for family in [IpAddr::is_ipv4, IpAddr::is_ipv6] {
                let items: Vec<(IpAddr, u8)> = list(&addresses, family).iter().flat_map(|list| {
                    assert!(list.len() <= TEXT_MAX);
                    list.split(',').map(|item| item.split_once('/').unwrap()).collect::<Vec<_>>()
                        .into_iter().map(|(ip, len)| (ip.parse().unwrap(), len.parse().unwrap())).collect::<Vec<_>>()
                }).collect();
                prop_assert!(items.is_sorted());
                prop_assert!(items.iter().all(|item| ips.contains(item) && family(&item.0)));
                // One fits always: 39 bytes of address and 4 of length.
                prop_assert_eq!(items.is_empty(), !ips.iter().any(|(ip, _)| family(ip) && is_global_unicast(*ip)));
            }
        }
    }
}
