//! Rules over `routes`, `rules` and `neighbors`.

use std::collections::HashSet;
use std::net::IpAddr;

use super::interface::{MTU_MIN, MTU_MIN_IPV6};
use super::{Faults, LIST_MAX, bad_link_address, not_one_host};
use crate::config::{NeighborConfig, RouteConfig, RouteKind, RuleConfig};
use crate::names::PodLinkName;
use crate::netdev::address::{SCOPE_LINK, SCOPE_UNIVERSE};
use crate::netdev::route::{TABLE_LOCAL, TABLE_MAIN};

/// Last priority: the rule of table `default` has it.
const PRIORITY_MAX: u32 = 32767;
/// Largest MTU of a route, bytes: the kernel cuts it to 65535 - 15 (`ip_metrics_convert`, `net/ipv4/metrics.c`).
const RTAX_MTU_MAX: u32 = 65535 - 15;
/// Largest MSS, bytes: the kernel cuts it to 65535 - 40 (as above).
const RTAX_ADVMSS_MAX: u32 = 65535 - 40;

/// The table that a route or rule with this `table` field is for.
fn table_or_main(table: Option<u32>) -> u32 {
    table.filter(|t| *t != 0).unwrap_or(TABLE_MAIN)
}

/// The metric that the kernel gives the route: for IPv6, none is 1024 (`IP6_RT_PRIO_USER`, `net/ipv6.h`).
fn metric_or_default(route: &RouteConfig) -> u32 {
    match route.metric.unwrap_or(0) {
        0 if route.destination.is_some_and(|d| d.addr().is_ipv6()) => 1024,
        metric => metric,
    }
}

pub(super) fn routes(routes: &[RouteConfig], faults: &mut Faults) {
    if !faults.length("routes", routes.len(), LIST_MAX) {
        return;
    }
    let mut seen = HashSet::new();
    for (i, route) in routes.iter().enumerate() {
        let path = format!("routes[{i}]");
        route_fields(route, &path, faults);
        // The kernel keeps one route for each destination, table and metric, whatever the gateway.
        if let Some(destination) = route.destination
            && !seen.insert((destination.trunc(), table_or_main(route.table), metric_or_default(route)))
        {
            let destination = destination.trunc();
            faults.add(
                &path,
                format!("{destination} is in the same table with the same metric twice; the kernel keeps one of them"),
            );
        }
    }
}

fn route_fields(route: &RouteConfig, path: &str, faults: &mut Faults) {
    if route.destination.is_none() {
        faults.add(format!("{path}.destination"), "is required");
    }
    if route.table == Some(TABLE_LOCAL) {
        faults.add(format!("{path}.table"), "255 (local) is the kernel's own; choose another table");
    }
    if route.kind.unwrap_or_default() == RouteKind::Unicast {
        gateway_and_source(route, path, faults);
        sizes(route, path, faults);
    } else {
        dead_end(route, path, faults);
    }
}

/// A route that leads nowhere has nothing but destination, table and metric.
fn dead_end(route: &RouteConfig, path: &str, faults: &mut Faults) {
    let set = [
        ("gateway", route.gateway.is_some()),
        ("source", route.source.is_some()),
        ("scope", route.scope.is_some_and(|scope| scope != SCOPE_UNIVERSE)),
        ("onlink", route.onlink == Some(true)),
        ("mtu", route.mtu.is_some()),
        ("advmss", route.advmss.is_some()),
    ];
    for (field, _) in set.into_iter().filter(|(_, set)| *set) {
        faults.add(format!("{path}.{field}"), "packets by a route of this type go nowhere; remove it, or the type");
    }
}

fn sizes(route: &RouteConfig, path: &str, faults: &mut Faults) {
    if let Some(mtu) = route.mtu {
        let min = if route.destination.is_some_and(|d| d.addr().is_ipv6()) { MTU_MIN_IPV6 } else { MTU_MIN };
        if !(min..=RTAX_MTU_MAX).contains(&mtu) {
            faults.add(format!("{path}.mtu"), format!("is {mtu}; must be {min} to {RTAX_MTU_MAX} bytes"));
        }
    }
    if let Some(advmss) = route.advmss.filter(|advmss| !(1..=RTAX_ADVMSS_MAX).contains(advmss)) {
        faults.add(format!("{path}.advmss"), format!("is {advmss}; must be 1 to {RTAX_ADVMSS_MAX} bytes"));
    }
}

fn gateway_and_source(route: &RouteConfig, path: &str, faults: &mut Faults) {
    let link_scope = match route.scope.unwrap_or(SCOPE_UNIVERSE) {
        SCOPE_UNIVERSE => false,
        SCOPE_LINK => true,
        other => return faults.add(format!("{path}.scope"), format!("is {other}; must be 0 (universe) or 253 (link)")),
    };
    if route.onlink == Some(true) && route.gateway.is_none() {
        faults.add(format!("{path}.onlink"), "says that the gateway is on the link, and there is no gateway");
    }
    match (route.gateway, link_scope) {
        (None, false) => {
            faults.add(format!("{path}.gateway"), "is required unless scope is 253 (link)");
        }
        (Some(_), true) => {
            faults.add(format!("{path}.gateway"), "a route of scope 253 (link) has no gateway; remove one of them");
        }
        _ => {}
    }
    for (field, ip) in [("gateway", route.gateway), ("source", route.source)] {
        let Some(ip) = ip else { continue };
        let path = format!("{path}.{field}");
        if route.destination.is_some_and(|d| d.addr().is_ipv6() != ip.is_ipv6()) {
            faults.add(&path, format!("{ip} is of another family than the destination"));
        }
        faults.check(&path, not_one_host(ip).map(|why| format!("{ip} {why}")));
    }
}

pub(super) fn rules(rules: &[RuleConfig], vrf: bool, faults: &mut Faults) {
    if vrf && !rules.is_empty() {
        faults.add("rules", "can't be used with interface.vrf, which has a rule of its own; remove one of them");
    }
    if !faults.length("rules", rules.len(), LIST_MAX) {
        return;
    }
    let mut seen = HashSet::new();
    for (i, rule) in rules.iter().enumerate() {
        let path = format!("rules[{i}]");
        if let Some(priority) = rule.priority.filter(|p| *p > PRIORITY_MAX) {
            faults.add(format!("{path}.priority"), format!("is {priority}; must be 0 to {PRIORITY_MAX}"));
        }
        if let (Some(source), Some(destination)) = (rule.source, rule.destination)
            && source.addr().is_ipv6() != destination.addr().is_ipv6()
        {
            faults.add(format!("{path}.destination"), format!("{destination} is of another family than the source"));
        }
        selectors(rule, &path, faults);
        let table = Some(table_or_main(rule.table));
        let (source, destination) = (rule.source.map(|n| n.trunc()), rule.destination.map(|n| n.trunc()));
        if !seen.insert(RuleConfig { table, source, destination, ..rule.clone() }) {
            faults.add(&path, "is in the list twice");
        }
    }
}

fn selectors(rule: &RuleConfig, path: &str, faults: &mut Faults) {
    match (rule.fwmark, rule.fwmask) {
        (None, Some(_)) => faults.add(format!("{path}.fwmask"), "is the mask of fwmark, which is not there"),
        (Some(mark), Some(mask)) if mark & !mask != 0 => {
            faults
                .add(format!("{path}.fwmark"), format!("{mark:#x} has bits that fwmask {mask:#x} does not, so it never matches"));
        }
        _ => {}
    }
    for (field, name) in [("iif", &rule.iif), ("oif", &rule.oif)] {
        let Some(name) = name else { continue };
        faults.check(format!("{path}.{field}"), PodLinkName::new(name.as_str()).err().map(|e| e.reason));
    }
    let ipv6 = rule.source.or(rule.destination).is_some_and(|net| net.addr().is_ipv6());
    let longest = if ipv6 { 128 } else { 32 };
    if let Some(length) = rule.suppress_prefix_length.filter(|length| *length > longest) {
        faults.add(format!("{path}.suppressPrefixLength"), format!("is {length}; must be 0 to {longest}"));
    }
}

pub(super) fn neighbors(neighbors: &[NeighborConfig], faults: &mut Faults) {
    if !faults.length("neighbors", neighbors.len(), LIST_MAX) {
        return;
    }
    let mut seen: HashSet<IpAddr> = HashSet::new();
    for (i, neighbor) in neighbors.iter().enumerate() {
        let path = format!("neighbors[{i}].destination");
        match neighbor.destination {
            None => faults.add(&path, "is required"),
            Some(ip) => {
                faults.check(&path, not_one_host(ip).map(|why| format!("{ip} {why}")));
                if !seen.insert(ip) {
                    faults.add(&path, format!("{ip} is in the list twice"));
                }
            }
        }
        let path = format!("neighbors[{i}].hardwareAddr");
        match &neighbor.hardware_addr {
            None => faults.add(path, "is required"),
            // A group address is in use here, for example by network load balancers.
            Some(address) => faults.check(path, bad_link_address(address, false)),
        }
    }
}
