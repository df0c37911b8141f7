//! What the kernel makes by itself when a link comes up or gets an address, so that nobody has to give it back.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};

use super::super::address::{IFA_F_NOPREFIXROUTE, IFA_F_SECONDARY, IFA_F_STABLE_PRIVACY, SCOPE_LINK};
use super::super::route::PROTO_KERNEL;
use super::super::{Address, LinkAddress, Route};

/// `IFAPROT_KERNEL_LL`, `linux/if_addr.h`.
const PROTO_KERNEL_LL: u8 = 3;
/// `IP6_RT_PRIO_ADDRCONF`, `linux/ipv6_route.h`: metric of a connected IPv6 route.
const ADDRCONF_METRIC: u32 = 256;
/// `RTN_UNICAST`, `linux/rtnetlink.h`.
const UNICAST: u8 = 1;

/// Whether the kernel made `address` by itself and will do so again: an IPv6 link-local one, or a temporary one. Kernels before
/// 5.18 don't say who made it; there the form tells: from a secret, or from `eui64`, the link's address (none when the link
/// makes its addresses in another way).
pub(super) fn is_kernels(address: &Address, eui64: Option<&LinkAddress>) -> bool {
    let IpAddr::V6(ip) = address.ip else { return false };
    let link_local = ip.is_unicast_link_local();
    // The bit is IFA_F_TEMPORARY here.
    address.flags & IFA_F_SECONDARY != 0
        || (link_local && address.flags & IFA_F_STABLE_PRIVACY != 0)
        || (link_local && address.proto == Some(PROTO_KERNEL_LL))
        || (link_local && address.proto.is_none() && address.prefix_len == 64 && eui64.and_then(link_local_of) == Some(ip))
}

/// The link-local address that a 6-byte link-layer address leads to (RFC 4291, appendix A).
fn link_local_of(address: &LinkAddress) -> Option<Ipv6Addr> {
    let &[a, b, c, d, e, f] = address.bytes() else { return None };
    let mut ip = [0; 16];
    ip[..2].copy_from_slice(&[0xfe, 0x80]);
    ip[8..].copy_from_slice(&[a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    Some(Ipv6Addr::from(ip))
}

/// Whether `route` is the connected route of one of the link's `addresses`, or of its link-local ones.
pub(super) fn comes_back(route: &Route, addresses: &[&Address]) -> bool {
    let connected =
        route.protocol == PROTO_KERNEL && route.kind == UNICAST && route.gateway.is_none() && route.next_hops.is_empty();
    if !connected {
        return false;
    }
    let link_local = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 64));
    if route.destination == link_local && route.metric == Some(ADDRCONF_METRIC) {
        return true;
    }
    addresses.iter().any(|address| makes(address, route))
}

fn makes(address: &Address, route: &Route) -> bool {
    let net = IpNet::new(address.peer.unwrap_or(address.ip), address.prefix_len).map(|net| net.trunc());
    if address.flags & IFA_F_NOPREFIXROUTE != 0 || net.ok() != Some(route.destination) {
        return false;
    }
    match address.ip {
        IpAddr::V4(_) => {
            let metric = |m: Option<u32>| m.unwrap_or(0);
            route.scope == SCOPE_LINK && route.source == Some(address.ip) && metric(address.metric) == metric(route.metric)
        }
        IpAddr::V6(_) => route.metric == Some(address.metric.unwrap_or(ADDRCONF_METRIC)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(ip: &str, prefix_len: u8) -> Address {
        Address::permanent(ip.parse().unwrap(), prefix_len)
    }

    fn connected(destination: &str, source: Option<&str>, metric: Option<u32>) -> Route {
        let mut route = Route::to(destination.parse().unwrap());
        route.protocol = PROTO_KERNEL;
        route.source = source.map(|s| s.parse().unwrap());
        route.metric = metric;
        route.scope = if route.is_ipv6() { 0 } else { SCOPE_LINK };
        route
    }

    #[test]
    fn link_local_addresses() {
        let mac: LinkAddress = "02:11:22:33:44:55".parse().unwrap();
        let own = address("fe80::11:22ff:fe33:4455", 64);
        assert!(is_kernels(&own, Some(&mac)));
        assert!(!is_kernels(&own, None), "addr_gen_mode is none: somebody added it");
        assert!(!is_kernels(&address("fe80::1", 64), Some(&mac)));
        assert!(!is_kernels(&address("2001:db8::1", 64), Some(&mac)));
        let by_hand = Address { proto: Some(4), ..own.clone() };
        assert!(!is_kernels(&by_hand, Some(&mac)));
        assert!(is_kernels(&Address { proto: Some(PROTO_KERNEL_LL), ..address("fe80::1", 64) }, None));
        assert!(is_kernels(&Address { flags: IFA_F_STABLE_PRIVACY, ..address("fe80::1", 64) }, None));
    }

    #[test]
    fn temporary_addresses_but_not_secondary_ones() {
        assert!(is_kernels(&Address { flags: IFA_F_SECONDARY, ..address("2001:db8::1", 64) }, None));
        assert!(!is_kernels(&Address { flags: IFA_F_SECONDARY, ..address("10.0.0.1", 24) }, None));
    }

    #[test]
    fn connected_routes() {
        let v4 = address("10.0.0.1", 24);
        let v6 = address("2001:db8::1", 64);
        let peer = Address { peer: Some("192.0.2.2".parse().unwrap()), ..address("192.0.2.1", 32) };
        let all = [&v4, &v6, &peer];
        assert!(comes_back(&connected("10.0.0.0/24", Some("10.0.0.1"), None), &all));
        assert!(comes_back(&connected("192.0.2.2/32", Some("192.0.2.1"), None), &all));
        assert!(comes_back(&connected("2001:db8::/64", None, Some(256)), &all));
        assert!(comes_back(&connected("fe80::/64", None, Some(256)), &[]));
        assert!(!comes_back(&connected("10.0.0.0/24", Some("10.0.0.1"), Some(100)), &all), "metric changed by hand");
        assert!(!comes_back(&connected("10.0.0.0/24", Some("10.0.0.9"), None), &all));
        assert!(!comes_back(&connected("10.0.1.0/24", Some("10.0.0.1"), None), &all));
        let manual = Address { flags: IFA_F_NOPREFIXROUTE, ..v4.clone() };
        assert!(!comes_back(&connected("10.0.0.0/24", Some("10.0.0.1"), None), &[&manual]), "NetworkManager's way");
        let user = Route { protocol: 4, ..connected("10.0.0.0/24", Some("10.0.0.1"), None) };
        assert!(!comes_back(&user, &all));
    }
}
