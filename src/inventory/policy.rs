//! Which links are not offered, and why, in words. Pure.

use std::collections::BTreeMap;

use super::{ScanOptions, hardware};
use crate::netdev::Link;
use crate::netdev::uplink::Needed;

/// Links of container networks that are plain devices but not NICs, by name: what Docker, Cilium, kube-proxy, NodeLocal DNSCache,
/// Calico and Flannel make.
const RESERVED: [(&str, &str); 10] = [
    ("docker0", "Docker"),
    ("cilium_net", "Cilium"),
    ("cilium_host", "Cilium"),
    ("cilium_wg0", "Cilium"),
    ("kube-ipvs0", "kube-proxy"),
    ("nodelocaldns", "NodeLocal DNSCache"),
    ("wireguard.cali", "Calico"),
    ("wg-v6.cali", "Calico"),
    ("flannel-wg", "Flannel"),
    ("flannel-wg-v6", "Flannel"),
];

/// Kinds that the kernel does not move between namespaces.
const FIXED: [&str; 7] = ["bridge", "bond", "team", "vrf", "openvswitch", "batadv", "hsr"];

/// Kinds that carry the host's, or its container network's, traffic over other links. Some of them can't be moved either.
const TUNNELS: [&str; 16] = [
    "vxlan",
    "geneve",
    "bareudp",
    "ipip",
    "sit",
    "ip6tnl",
    "gre",
    "gretap",
    "erspan",
    "ip6gre",
    "ip6gretap",
    "ip6erspan",
    "vti",
    "vti6",
    "xfrm",
    "gtp",
];

/// What the kernel makes itself with each tunnel module.
const FALLBACK: [&str; 10] =
    ["tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0", "ip6erspan0"];

/// Why `link` is not offered; none when it is.
pub(super) fn withhold(
    link: &Link,
    needed: &BTreeMap<u32, Needed>,
    names: &BTreeMap<u32, &str>,
    options: ScanOptions,
) -> Option<String> {
    if link.is_loopback() {
        return Some("it is the loopback link".to_owned());
    }
    if let Some(reason) = needed.get(&link.index) {
        return Some(why_needed(reason, names));
    }
    if let Some((_, owner)) = RESERVED.iter().find(|(name, _)| *name == link.name) {
        return Some(format!("it belongs to {owner}"));
    }
    if FALLBACK.contains(&link.name.as_str()) {
        return Some("it is a tunnel module's fallback device, which the kernel does not move to another namespace".to_owned());
    }
    if hardware::is_representor(link) {
        return Some("it is a port of the NIC's switch that stands for another function (a representor)".to_owned());
    }
    let kind = link.kind.as_deref()?;
    if FIXED.contains(&kind) {
        return Some(format!("the kernel does not move a link of kind {kind} to another namespace"));
    }
    if TUNNELS.contains(&kind) {
        return Some(format!("it is a tunnel of kind {kind}, part of the host's or its container network's own network"));
    }
    match kind {
        "netkit" => Some("links of kind netkit are the host's ends of pods".to_owned()),
        "veth" if !options.offer_veth && link.link_netnsid.is_some() => {
            Some("it is the host's end of a veth pair whose other end is in another namespace, such as a pod's".to_owned())
        }
        "veth" if !options.offer_veth => Some("links of kind veth are not offered (--offer-veth)".to_owned()),
        _ => None,
    }
}

/// Why the host needs a link, in words.
pub(crate) fn why_needed(reason: &Needed, names: &BTreeMap<u32, &str>) -> String {
    let family = |ipv6: &bool| if *ipv6 { "IPv6" } else { "IPv4" };
    let table = |table: &u32| match table {
        254 => "main".to_owned(),
        253 => "default".to_owned(),
        255 => "local".to_owned(),
        table => table.to_string(),
    };
    match reason {
        Needed::DefaultRoute { table: t, ipv6 } => {
            format!("the host needs it: an {} default route (table {}) leaves by it", family(ipv6), table(t))
        }
        Needed::UnknownDefaultRoute { table: t, ipv6 } => format!(
            "the host may need it: an {} default route (table {}) does not say by which link it leaves",
            family(ipv6),
            table(t)
        ),
        Needed::RelatedTo { index, how } => {
            let other = names.get(index).map_or_else(|| format!("link {index}"), |name| (*name).to_owned());
            let what = match *how {
                "master" => "it is the master of",
                "port" => "it is a port of",
                "lower" => "it is below",
                "upper" => "it is on top of",
                "peer" => "it is the peer of",
                _ => "it belongs to",
            };
            format!("the host needs it: {what} {other}, which the host needs")
        }
    }
}
