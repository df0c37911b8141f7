//! What can be reached by the link without a gateway, as the kernel sees it when it checks the gateway of a new route.
//!
//! It looks for the gateway in the new route's table, then as it would route a packet (main, default). There it takes routes
//! without a gateway only: for IPv4 those of link scope.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::addresses::IFA_F_NOPREFIXROUTE;
use crate::netdev::address::SCOPE_LINK;
use crate::netdev::route::TABLE_MAIN;
use crate::netdev::{Address, Route};

/// `RT_TABLE_DEFAULT`, `linux/rtnetlink.h`.
const TABLE_DEFAULT: u32 = 253;

/// The pod's own addresses on the link and the subnets without a gateway, by table.
#[derive(Debug, Default)]
pub(super) struct Reach {
    own: HashSet<IpAddr>,
    subnets: HashSet<(u32, IpNet)>,
    onlink_gateways: HashSet<IpAddr>,
}

impl Reach {
    /// By the addresses' connected routes.
    pub(super) fn of_addresses(addresses: &[Address]) -> Self {
        Self {
            own: addresses.iter().map(|a| a.ip).collect(),
            subnets: addresses.iter().filter_map(connected).map(|net| (TABLE_MAIN, net)).collect(),
            onlink_gateways: HashSet::new(),
        }
    }

    /// Takes `route` into account, if it serves.
    pub(super) fn add(&mut self, route: &Route) {
        if route.is_dead_end() {
            return;
        }
        let ipv6 = route.destination.addr().is_ipv6();
        if !needs_gateway(route) && route.next_hops.is_empty() && (ipv6 || route.scope >= SCOPE_LINK) {
            self.subnets.insert((route.table, route.destination));
        }
    }

    /// Takes into account the gateways that the kernel uses unchecked (`RTNH_F_ONLINK`).
    pub(super) fn add_onlink_gateways(&mut self, routes: &[Route]) {
        for route in routes {
            let hops = route.next_hops.iter().filter(|hop| hop.onlink).filter_map(|hop| hop.gateway);
            self.onlink_gateways.extend(route.gateway.filter(|_| route.onlink).into_iter().chain(hops));
        }
    }

    /// Whether the link has this address in the pod.
    pub(super) fn is_own(&self, ip: IpAddr) -> bool {
        self.own.contains(&ip)
    }

    /// Why the kernel would refuse `gateway` for a route in `table`; none when it would not.
    pub(super) fn refuses_gateway(&self, gateway: IpAddr, table: u32) -> Option<String> {
        match gateway {
            // IPv4 takes an own address as "no gateway", an old custom; IPv6 refuses it.
            IpAddr::V4(_) if self.is_own(gateway) => None,
            IpAddr::V6(_) if self.is_own(gateway) => Some(format!("its gateway {gateway} is the pod's own address")),
            IpAddr::V6(ip) if ip.is_unicast_link_local() => None,
            _ if self.covers(gateway, |t| t == table || t == TABLE_MAIN || t == TABLE_DEFAULT) => None,
            _ => Some(format!(
                "its gateway {gateway} is neither in a subnet of the pod's addresses on this link nor behind a route of link scope"
            )),
        }
    }

    /// Whether packets to `ip` can go straight to it by this link.
    pub(super) fn neighbour(&self, ip: IpAddr) -> bool {
        let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        link_local || self.onlink_gateways.contains(&ip) || self.covers(ip, |_| true)
    }

    fn covers(&self, ip: IpAddr, table: impl Fn(u32) -> bool) -> bool {
        self.subnets.iter().any(|(t, net)| table(*t) && net.contains(&ip))
    }
}

/// The subnet for which the kernel makes a connected route; none where it makes none.
pub(super) fn connected(address: &Address) -> Option<IpNet> {
    if address.flags & IFA_F_NOPREFIXROUTE != 0 {
        return None;
    }
    let net = IpNet::new(address.peer.unwrap_or(address.ip), address.prefix_len).ok()?.trunc();
    (address.peer.is_some() || net.prefix_len() < net.max_prefix_len()).then_some(net)
}

/// Whether the route, or one of its next hops, has a gateway.
pub(super) fn needs_gateway(route: &Route) -> bool {
    route.gateway.is_some() || route.next_hops.iter().any(|hop| hop.gateway.is_some())
}
