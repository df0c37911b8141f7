//! Rules over `interface`.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::{ADDRESSES_MAX, Faults, SIZE_MAX, bad_link_address, not_one_host};
use crate::config::{InterfaceConfig, InterfaceKind, VrfConfig};
use crate::names::PodLinkName;

/// Least MTU of IPv4, bytes (RFC 791; `ETH_MIN_MTU`, `linux/if_ether.h`).
pub(super) const MTU_MIN: u32 = 68;
/// Least MTU of IPv6, bytes (RFC 8200; `IPV6_MIN_MTU`, `linux/ipv6.h`): below it the kernel turns IPv6 off on the link.
pub(super) const MTU_MIN_IPV6: u32 = 1280;
/// Names that the kernel refuses for a link, or has given to another one.
const RESERVED_NAMES: [&str; 3] = ["lo", "all", "default"];

pub(super) fn check(interface: &InterfaceConfig, faults: &mut Faults) {
    if let Some(name) = &interface.name {
        faults.check("interface.name", bad_name(name.as_str()));
    }
    addresses(interface, faults);
    if let Some(mtu) = interface.mtu
        && !(MTU_MIN..=SIZE_MAX).contains(&mtu)
    {
        faults.add("interface.mtu", format!("is {mtu}; must be {MTU_MIN} to {SIZE_MAX} bytes"));
    }
    if let Some(address) = &interface.hardware_addr {
        faults.check("interface.hardwareAddr", bad_link_address(address, true));
    }
    let sizes = [
        ("interface.gsoMaxSize", interface.gso_max_size),
        ("interface.groMaxSize", interface.gro_max_size),
        ("interface.gsoIPv4MaxSize", interface.gso_ipv4_max_size),
        ("interface.groIPv4MaxSize", interface.gro_ipv4_max_size),
    ];
    for (path, size) in sizes {
        if size.is_some_and(|s| s == 0 || s > SIZE_MAX) {
            faults.add(path, format!("must be 1 to {SIZE_MAX} bytes"));
        }
    }
    if interface.arp_ignore.is_some_and(|v| ![0, 1, 2, 3, 8].contains(&v)) {
        faults.add("interface.arpIgnore", "must be 0, 1, 2, 3 or 8");
    }
    if interface.arp_announce.is_some_and(|v| v > 2) {
        faults.add("interface.arpAnnounce", "must be 0, 1 or 2");
    }
    super::child::check(interface, faults);
    if let Some(config) = &interface.vrf {
        vrf(config, interface.name.as_ref(), faults);
    }
}

pub(super) fn bad_name(name: &str) -> Option<String> {
    if RESERVED_NAMES.contains(&name) {
        return Some(format!("{name:?} is reserved; choose another name"));
    }
    // The kernel would take `%d` as a place for a number, and refuses any other use.
    name.contains('%').then(|| "must not contain '%'".to_owned())
}

fn vrf(vrf: &VrfConfig, link: Option<&PodLinkName>, faults: &mut Faults) {
    match PodLinkName::new(vrf.name.as_str()) {
        Err(error) => faults.add("interface.vrf.name", error.reason),
        Ok(name) if Some(&name) == link => faults.add("interface.vrf.name", "is the same as interface.name"),
        Ok(name) => faults.check("interface.vrf.name", bad_name(name.as_str())),
    }
    if vrf.table.is_some_and(|t| t == 0 || (253..=255).contains(&t)) {
        faults.add("interface.vrf.table", "must be 1 or more, and not 253 to 255, which are the kernel's own");
    }
}

fn addresses(interface: &InterfaceConfig, faults: &mut Faults) {
    let addresses = interface.addresses.as_deref().unwrap_or_default();
    if interface.dhcp == Some(true) && !addresses.is_empty() {
        faults.add("interface.dhcp", "can't be true when interface.addresses names addresses; choose one");
    }
    if interface.dhcp == Some(true) && interface.kind.is_some_and(|kind| kind != InterfaceKind::Passthrough) {
        faults.add("interface.dhcp", "works with interface.type passthrough only; name addresses in interface.addresses");
    }
    if !faults.length("interface.addresses", addresses.len(), ADDRESSES_MAX) {
        return;
    }
    let mut seen = HashSet::new();
    for (i, net) in addresses.iter().enumerate() {
        let path = format!("interface.addresses[{i}]");
        faults.check(&path, bad_address(net));
        if !seen.insert(net.addr()) {
            faults.add(&path, format!("{} is in the list twice", net.addr()));
        }
    }
    if let Some(mtu) = interface.mtu.filter(|m| (MTU_MIN..MTU_MIN_IPV6).contains(m))
        && addresses.iter().any(|net| net.addr().is_ipv6())
    {
        faults.add("interface.mtu", format!("is {mtu}; an IPv6 address needs an MTU of at least {MTU_MIN_IPV6} bytes"));
    }
}

fn bad_address(net: &IpNet) -> Option<String> {
    let (ip, len) = (net.addr(), net.prefix_len());
    if let Some(why) = not_one_host(ip) {
        return Some(format!("{ip} {why}"));
    }
    if len == 0 {
        return Some("a prefix length of 0 would make everything a neighbour".into());
    }
    // Subnets of one or two addresses (RFC 3021, RFC 6164) have no network or broadcast address.
    if net.max_prefix_len() - len <= 1 {
        return None;
    }
    if ip == net.network() {
        return Some(format!("{net} is the subnet itself; write the link's own address in it, for example {}", example(net)));
    }
    (ip.is_ipv4() && ip == net.broadcast()).then(|| format!("{ip} is the broadcast address of its subnet"))
}

fn example(net: &IpNet) -> String {
    let host = match net.network() {
        IpAddr::V4(v4) => IpAddr::from((u32::from(v4) + 1).to_be_bytes()),
        IpAddr::V6(v6) => IpAddr::from((u128::from(v6) + 1).to_be_bytes()),
    };
    format!("{host}/{}", net.prefix_len())
}
