//! Rules over `routes`, `rules` and `neighbors`.

use std::collections::HashSet;
use std::net::IpAddr;

use super::{Faults, LIST_MAX, bad_link_address, not_one_host};
use crate::config::{NeighborConfig, RouteConfig, RuleConfig};
use crate::netdev::address::{SCOPE_LINK, SCOPE_UNIVERSE};
use crate::netdev::route::{TABLE_LOCAL, TABLE_MAIN};

/// Last priority: the rule of table `default` has it.
const PRIORITY_MAX: u32 = 32767;

/// The table that a route or rule with this `table` field is for.
fn table_or_main(table: Option<u32>) -> u32 {
    table.filter(|t| *t != 0).unwrap_or(TABLE_MAIN)
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
            && !seen.insert((destination.trunc(), table_or_main(route.table)))
        {
            faults.add(&path, format!("{} is in the same table twice; the kernel keeps one of them", destination.trunc()));
        }
    }
}

fn route_fields(route: &RouteConfig, path: &str, faults: &mut Faults) {
    let link_scope = match route.scope.unwrap_or(SCOPE_UNIVERSE) {
        SCOPE_UNIVERSE => false,
        SCOPE_LINK => true,
        other => return faults.add(format!("{path}.scope"), format!("is {other}; must be 0 (universe) or 253 (link)")),
    };
    if route.destination.is_none() {
        faults.add(format!("{path}.destination"), "is required");
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
    if route.table == Some(TABLE_LOCAL) {
        faults.add(format!("{path}.table"), "255 (local) is the kernel's own; choose another table");
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
        let key = (rule.priority, rule.source.map(|n| n.trunc()), rule.destination.map(|n| n.trunc()), table_or_main(rule.table));
        if !seen.insert(key) {
            faults.add(&path, "is in the list twice");
        }
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
