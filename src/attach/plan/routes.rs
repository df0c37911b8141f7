//! The routes that the pod gets by the link.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::addresses::IFA_F_NOPREFIXROUTE;
use super::reach::{Reach, connected, needs_gateway};
use super::{LeftOut, PlanError, addresses, dhcp};
use crate::config::{NetworkConfig, RouteConfig, RouteKind};
use crate::dhcp::Lease;
use crate::netdev::address::{SCOPE_LINK, SCOPE_UNIVERSE};
use crate::netdev::route::{PROTO_KERNEL, PROTO_RA, TABLE_LOCAL, TABLE_MAIN};
use crate::netdev::{Address, HostState, Route};

/// `RTN_UNICAST`, `linux/rtnetlink.h`.
const UNICAST: u8 = 1;
/// `RTAX_MTU` and `RTAX_ADVMSS`, `linux/rtnetlink.h`.
const RTAX_MTU: u16 = 2;
const RTAX_ADVMSS: u16 = 8;
/// `RTA_NH_ID`, `linux/rtnetlink.h`: the route uses a nexthop object.
const RTA_NH_ID: u16 = 30;
/// Metric that the kernel gives to an IPv6 route without one (`IP6_RT_PRIO_USER`), and to a connected one (`IP6_RT_PRIO_ADDRCONF`).
const IPV6_METRIC: u32 = 1024;
const IPV6_CONNECTED_METRIC: u32 = 256;
/// Most routes that are copied from the host.
const COPIED_MAX: usize = 1024;

/// What the kernel keeps one route for: destination, table, metric, type of service.
type Key = (IpNet, u32, u32, u8);

/// The routes of the pod in the order to add them, and what can be reached by them.
///
/// # Errors
/// When a configured route can't be added.
pub(super) fn of_pod(
    config: &NetworkConfig,
    host: &HostState,
    addresses: &[Address],
    lease: Option<&Lease>,
    ipv6: bool,
    left_out: &mut LeftOut,
) -> Result<(Vec<Route>, Reach), PlanError> {
    let mut pod = Pod {
        host,
        addresses,
        ipv6,
        reach: Reach::of_addresses(addresses),
        connected: addresses.iter().filter_map(connected_key).collect(),
        keys: HashSet::new(),
    };
    let configured = pod.configured(config.routes.as_deref().unwrap_or_default())?;
    let leased = lease.map(|lease| pod.leased(lease, &configured, left_out)).unwrap_or_default();
    let mut copied = if config.host_state().routes { pod.copied(left_out) } else { Vec::new() };
    left_out.cut(&mut copied, COPIED_MAX, "routes");
    // Only now is known what is reached without a gateway.
    for route in leased.iter().chain(&copied) {
        if pod.refuses_use(route).is_none() {
            pod.reach.add(route);
        }
    }

    let mut all = Vec::new();
    for (index, route) in configured {
        if let Some(reason) = pod.refuses_use(&route) {
            return Err(PlanError::Route { index, reason });
        }
        all.push(route);
    }
    for route in leased.into_iter().chain(copied) {
        match pod.refuses_use(&route) {
            Some(why) => left_out.add(format!("{}: {why}", describe(&route))),
            None => all.push(route),
        }
    }
    pod.reach.add_onlink_gateways(&all);
    Ok((in_order(all), pod.reach))
}

/// What decides which routes the pod can have.
struct Pod<'a> {
    host: &'a HostState,
    addresses: &'a [Address],
    /// Whether IPv6 works on the link in the pod.
    ipv6: bool,
    reach: Reach,
    /// Routes that the kernel makes itself from the addresses.
    connected: HashSet<Key>,
    /// Routes that are planned.
    keys: HashSet<Key>,
}

impl Pod<'_> {
    /// The configured routes with their index in the configuration. One that the kernel makes itself is not needed.
    fn configured(&mut self, routes: &[RouteConfig]) -> Result<Vec<(usize, Route)>, PlanError> {
        let mut planned = Vec::new();
        for (index, config) in routes.iter().enumerate() {
            let refuse = |reason: &str| PlanError::Route { index, reason: reason.into() };
            let route = configured(config).ok_or_else(|| refuse("destination is required"))?;
            if self.connected.contains(&key(&route)) {
                let first = self.addresses.iter().find(|a| connected(a) == Some(route.destination)).map(|a| a.ip);
                if route.gateway.is_some() || route.source.is_some_and(|source| Some(source) != first) {
                    return Err(refuse("the kernel makes a route to this destination itself, from the pod's address in it"));
                }
                continue;
            }
            if !self.keys.insert(key(&route)) {
                return Err(refuse("another route has the same destination, table and metric"));
            }
            self.reach.add(&route);
            planned.push((index, route));
        }
        Ok(planned)
    }

    /// The lease's routes but those to where the claim has one of its own.
    fn leased(&mut self, lease: &Lease, configured: &[(usize, Route)], left_out: &mut LeftOut) -> Vec<Route> {
        let mut leased = Vec::new();
        for route in dhcp::routes(lease) {
            let is_configured = |(_, own): &(usize, Route)| own.destination == route.destination && own.table == route.table;
            if configured.iter().any(is_configured) {
                left_out.add(format!("{} of the DHCP server: the claim has one of its own to there", describe(&route)));
            } else if self.keys.insert(key(&route)) {
                leased.push(route);
            }
        }
        leased
    }

    /// The host's routes that make sense in the pod, whether or not the pod can use them.
    fn copied(&mut self, left_out: &mut LeftOut) -> Vec<Route> {
        let mut copied = Vec::new();
        for route in &self.host.routes {
            if self.is_silent(route) {
                continue;
            }
            match self.not_for_pod(route) {
                Some(why) => left_out.add(format!("{}: {why}", describe(route))),
                None => {
                    self.keys.insert(key(route));
                    copied.push(route.clone());
                }
            }
        }
        copied
    }

    /// Routes that nobody misses: the kernel makes them again in the pod.
    fn is_silent(&self, route: &Route) -> bool {
        let own = matches!(route.destination.addr(), IpAddr::V6(ip) if ip.is_unicast_link_local() || ip.is_multicast());
        let connected = route.protocol == PROTO_KERNEL && !self.stands_for_connected(route);
        own || connected || route.table == TABLE_LOCAL
    }

    /// A network manager may add an address without its connected route, and then that route itself, marked as the kernel's.
    fn stands_for_connected(&self, route: &Route) -> bool {
        let of_address = |a: &Address| {
            a.flags & IFA_F_NOPREFIXROUTE != 0
                && IpNet::new(a.peer.unwrap_or(a.ip), a.prefix_len).is_ok_and(|net| net.trunc() == route.destination)
        };
        !needs_gateway(route) && self.addresses.iter().any(of_address)
    }

    fn not_for_pod(&self, route: &Route) -> Option<&'static str> {
        if route.kind != UNICAST {
            return Some("it is not a unicast route");
        }
        if route.protocol == PROTO_RA {
            return Some("the kernel made it from a router advertisement, and makes one in the pod if the router says so");
        }
        if route.is_default() && route.table == TABLE_MAIN {
            return Some("the default route of the pod is the cluster network's");
        }
        if route.next_hops.iter().any(|hop| hop.index != self.host.index) {
            return Some("it has next hops by other links");
        }
        if has_attribute(&route.other, RTA_NH_ID) {
            return Some("it uses a nexthop object, which stays on the host");
        }
        if self.connected.contains(&key(route)) {
            return Some("the kernel makes a route to this destination itself, from the pod's address in it");
        }
        if self.keys.contains(&key(route)) {
            return Some("a configured or an earlier route has the same destination, table and metric");
        }
        (route.destination.addr().is_ipv6() && !self.ipv6).then_some("the pod has no IPv6 on this link")
    }

    /// Why the kernel would refuse the route in the pod; none when it would not.
    fn refuses_use(&self, route: &Route) -> Option<String> {
        if let Some(source) = route.source.filter(|s| !self.reach.is_own(*s)) {
            return Some(format!("its source {source} is not among the pod's addresses on this link"));
        }
        if let Some(source) = route.source.filter(|s| self.addresses.iter().any(|a| a.ip == *s && addresses::has_dad(a))) {
            return Some(format!(
                "its source {source} is not in use until duplicate address detection (interface.ipv6.dad) is done, and the kernel \
                 refuses the route until then"
            ));
        }
        let single = route.gateway.map(|gateway| (gateway, route.onlink));
        let hops = route.next_hops.iter().filter_map(|hop| Some((hop.gateway?, hop.onlink)));
        let mut gateways = single.into_iter().chain(hops).filter(|(_, onlink)| !onlink);
        gateways.find_map(|(gateway, _)| self.reach.refuses_gateway(gateway, route.table))
    }
}

/// The routes that the configuration asks for, as they are planned.
pub(super) fn configured_in(config: &NetworkConfig) -> Vec<Route> {
    config.routes.iter().flatten().filter_map(configured).collect()
}

fn configured(config: &RouteConfig) -> Option<Route> {
    let metrics = [(RTAX_MTU, config.mtu), (RTAX_ADVMSS, config.advmss)];
    Some(Route {
        table: config.table.filter(|t| *t != 0).unwrap_or(TABLE_MAIN),
        gateway: config.gateway,
        source: config.source,
        metric: config.metric,
        scope: config.scope.unwrap_or(SCOPE_UNIVERSE),
        kind: kind(config.kind.unwrap_or_default()),
        onlink: config.onlink == Some(true),
        metrics: metrics.into_iter().filter_map(|(number, value)| Some((number, value?))).collect(),
        ..Route::to(config.destination?.trunc())
    })
}

/// `RTN_*`, `linux/rtnetlink.h`.
fn kind(kind: RouteKind) -> u8 {
    match kind {
        RouteKind::Unicast => UNICAST,
        RouteKind::Blackhole => 6,
        RouteKind::Unreachable => 7,
        RouteKind::Prohibit => 8,
        RouteKind::Throw => 9,
    }
}

fn key(route: &Route) -> Key {
    let metric = match (route.destination, route.metric.unwrap_or(0)) {
        (IpNet::V6(_), 0) => IPV6_METRIC,
        (_, metric) => metric,
    };
    (route.destination, route.table, metric, route.tos)
}

/// The route that the kernel makes from an address.
fn connected_key(address: &Address) -> Option<Key> {
    let net = connected(address)?;
    let default = if address.ip.is_ipv6() { IPV6_CONNECTED_METRIC } else { 0 };
    Some((net, TABLE_MAIN, address.metric.filter(|m| *m != 0).unwrap_or(default), 0))
}

/// Sorts routes so that each can be added when its turn comes: first those without a gateway. Then a route after those whose
/// gateway its destination covers, because IPv6 refuses a gateway that is itself behind one. Else as they were.
fn in_order(mut routes: Vec<Route>) -> Vec<Route> {
    let gateways: HashSet<IpAddr> = routes.iter().filter_map(|r| r.gateway).collect();
    routes.sort_by_cached_key(|route| {
        let covers = |gateway: &&IpAddr| Some(**gateway) != route.gateway && route.destination.contains(*gateway);
        if needs_gateway(route) { 1 + gateways.iter().filter(covers).count() } else { 0 }
    });
    routes
}

/// Whether the hex of netlink attributes has one of type `wanted` (`struct nlattr`: length, type, value, each one 4-aligned).
fn has_attribute(hex: &str, wanted: u16) -> bool {
    let byte = |i: usize| hex.get(2 * i..2 * i + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let number = |i: usize| Some(u16::from_ne_bytes([byte(i)?, byte(i + 1)?]));
    let mut at = 0;
    while let (Some(len), Some(kind)) = (number(at), number(at + 2)) {
        // The two highest bits of the type are flags (`NLA_TYPE_MASK`).
        if kind & 0x3fff == wanted {
            return true;
        }
        at += usize::from(len).max(4).next_multiple_of(4);
    }
    false
}

pub(super) fn describe(route: &Route) -> String {
    let via = route.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
    let hops = if route.next_hops.is_empty() { String::new() } else { format!(" by {} next hops", route.next_hops.len()) };
    let table = if route.table == TABLE_MAIN { String::new() } else { format!(" in table {}", route.table) };
    let link = if route.scope == SCOPE_LINK { " on link" } else { "" };
    format!("route {}{via}{hops}{link}{table}", route.destination)
}
