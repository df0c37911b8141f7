//! Putting back the addresses, neighbours and routes of a link.

use std::time::{Duration, Instant};

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE};

use super::super::address::IFA_F_TENTATIVE;
use super::super::{Address, Neighbour, NextHop, Route, address, neighbour, route};
use super::compare::{address_key, same_address, same_route, with_index};
use super::kernel_made;
use super::restore::{Foreign, Restorer};
use crate::crash;
use crate::netlink::{NetlinkError, Request};

/// How long routes wait for duplicate address detection of their source address: one probe and a random delay of a second, with
/// some room (`net/ipv6/addrconf.c`; measured 1.2 to 1.8 s).
const DAD_TIME: Duration = Duration::from_secs(3);
/// How often it is looked at.
const DAD_POLL: Duration = Duration::from_millis(50);

impl Restorer<'_> {
    /// Addresses, then what needs them.
    pub(super) fn ip(&mut self) {
        self.addresses();
        crash::point("restore: addresses");
        self.neighbours();
        crash::point("restore: neighbours");
        self.routes();
        crash::point("restore: routes");
    }

    /// What is there now and was not recorded, nor made by the kernel: somebody gave it to the link meanwhile. It stays.
    pub(super) fn find_foreign(&mut self) {
        let index = Some(self.link.index);
        let addresses = address::list_of(self.socket, index, self.deadline).unwrap_or_default();
        let neighbours = neighbour::list_of(self.socket, index, self.deadline).unwrap_or_default();
        let routes = route::list_of(self.socket, index, self.deadline).unwrap_or_default();
        let mac = self.link.address.as_ref();
        let is_foreign = |a: &Address| !kernel_made::is_kernels(a, mac) && !self.is_recorded(a);
        let is_ours = |n: &Neighbour| self.state.neighbours.iter().any(|recorded| same_entry(n, recorded));
        // Connected routes come and go with their addresses, those of router advertisements by themselves.
        let is_theirs = |r: &Route| {
            let automatic = (r.protocol == route::PROTO_KERNEL && r.gateway.is_none()) || r.protocol == route::PROTO_RA;
            !automatic && !self.state.routes.iter().any(|recorded| recorded.same_key(r))
        };
        self.foreign = Foreign {
            addresses: addresses.into_iter().map(|(_, a)| a).filter(is_foreign).collect(),
            neighbours: neighbours.into_iter().map(|(_, n)| n).filter(|n| !is_ours(n)).collect(),
            routes: routes.into_iter().map(|(_, r)| r).filter(is_theirs).collect(),
        };
        let respected = &mut self.report.respected;
        respected.extend(self.foreign.addresses.iter().map(|a| format!("address {a} was added meanwhile")));
        respected.extend(self.foreign.neighbours.iter().map(|n| format!("neighbour {n} was added meanwhile")));
        respected.extend(self.foreign.routes.iter().map(|r| format!("route {r} was added meanwhile")));
    }

    pub(super) fn is_recorded(&self, address: &Address) -> bool {
        self.state.addresses.iter().any(|recorded| address_key(recorded) == address_key(address))
    }

    fn addresses(&mut self) {
        let now = match address::list_of(self.socket, Some(self.link.index), self.deadline) {
            Ok(now) => now.into_iter().map(|(_, address)| self.named(address)).collect::<Vec<_>>(),
            Err(error) => return self.failed("addresses", error),
        };
        let mut missing = Vec::new();
        for wanted in &self.state.addresses {
            match now.iter().find(|there| address_key(there) == address_key(wanted)) {
                None => missing.push(wanted.clone()),
                Some(there) if same_address(wanted, there) => {}
                Some(there) => self.report.respected.push(format!("address {wanted} is now {there}")),
            }
        }
        let is_there = |address: &Address| now.iter().any(|there| address_key(there) == address_key(address));
        missing.extend(self.foreign.addresses.iter().filter(|address| !is_there(address)).cloned());
        // The kernel lists IPv4 addresses as they came, and IPv6 ones the newest first.
        let (mut ordered, mut v6): (Vec<_>, Vec<_>) = missing.into_iter().partition(|address| address.ip.is_ipv4());
        v6.reverse();
        ordered.append(&mut v6);
        let requests = ordered.iter().map(|address| address::add_request(self.link.index, address)).collect();
        let results = self.socket.pipeline(requests, self.deadline);
        for (address, result) in ordered.iter().zip(results) {
            self.done(&format!("address {}", address_key(address)), format!("address {address}"), result);
        }
    }

    /// As it would be recorded: without the default label.
    fn named(&self, mut address: Address) -> Address {
        address.label = address.label.filter(|label| *label != self.link.name);
        address
    }

    fn neighbours(&mut self) {
        let now = match neighbour::list_of(self.socket, Some(self.link.index), self.deadline) {
            Ok(now) => now.into_iter().map(|(_, entry)| entry).collect::<Vec<_>>(),
            Err(error) => return self.failed("neighbours", error),
        };
        let mut missing = Vec::new();
        for wanted in &self.state.neighbours {
            match now.iter().find(|there| same_entry(there, wanted)) {
                None => missing.push(wanted.clone()),
                Some(there) if there == wanted => {}
                Some(there) => self.report.respected.push(format!("neighbour {wanted} is now {there}")),
            }
        }
        let is_there = |entry: &Neighbour| now.iter().any(|there| same_entry(there, entry));
        missing.extend(self.foreign.neighbours.iter().filter(|entry| !is_there(entry)).cloned());
        let requests = missing.iter().map(|entry| neighbour::add_request(self.link.index, entry)).collect();
        let results = self.socket.pipeline(requests, self.deadline);
        for (entry, result) in missing.iter().zip(results) {
            self.done(&format!("neighbour {}", entry.ip), format!("neighbour {entry}"), result);
        }
    }

    fn routes(&mut self) {
        let now = match route::list_of(self.socket, Some(self.link.index), self.deadline) {
            Ok(now) => now.into_iter().map(|(_, route)| route).collect::<Vec<_>>(),
            Err(error) => return self.failed("routes", error),
        };
        let wanted: Vec<Route> =
            self.state.routes.iter().map(|route| with_index(route, self.state.index, self.link.index)).collect();
        let mut missing = Vec::new();
        for route in &wanted {
            if now.iter().any(|there| same_route(route, there)) {
                continue;
            }
            let is_another = |there: &&Route| there.same_key(route) && !wanted.iter().any(|w| same_route(w, there));
            match now.iter().find(is_another) {
                Some(there) if !self.is_part(there, route) => {
                    self.report.respected.push(format!("route {route} is now {there}"));
                }
                _ => missing.push(route.clone()),
            }
        }
        let is_there = |route: &Route| now.iter().any(|there| there.same_key(route));
        missing.extend(self.foreign.routes.iter().filter(|route| !is_there(route)).cloned());
        self.add_routes(missing);
    }

    /// Whether `there` is `wanted` with some next hops missing: what the kernel leaves of a multipath route when one of its links
    /// goes away.
    fn is_part(&self, there: &Route, wanted: &Route) -> bool {
        if wanted.next_hops.is_empty() {
            return false;
        }
        let alone = |route: &Route| Route {
            next_hops: Vec::new(),
            gateway: None,
            onlink: false,
            metric: Some(route.metric.unwrap_or(0)),
            ..route.without_expiry()
        };
        let hops = match &there.next_hops[..] {
            // A single one is shown as a plain route; over which link is not known here.
            [] => {
                let is_one = |hop: &NextHop| hop.gateway == there.gateway && hop.onlink == there.onlink;
                return alone(there) == alone(wanted) && wanted.next_hops.iter().any(is_one);
            }
            hops => hops,
        };
        alone(there) == alone(wanted) && hops.iter().all(|hop| wanted.next_hops.contains(hop))
    }

    /// Routes that others need (without a gateway) first; then again those that failed, until nothing changes any more.
    fn add_routes(&mut self, mut missing: Vec<Route>) {
        missing.sort_by_key(|route| (route.gateway.is_some() || !route.next_hops.is_empty(), route.source.is_some()));
        let give_up = (Instant::now() + DAD_TIME).min(self.deadline);
        let mut last = false;
        loop {
            let before = missing.len();
            let requests = missing.iter().map(|route| route::add_request(self.link.index, route, false)).collect();
            let results = self.socket.pipeline(requests, self.deadline);
            let mut errors = Vec::new();
            for (route, result) in std::mem::take(&mut missing).into_iter().zip(results) {
                match result {
                    Err(error) if error.errno() == Some(libc::EEXIST) => self.beside_another(route),
                    Err(error) => {
                        missing.push(route);
                        errors.push(error);
                    }
                    Ok(()) => self.report.restored.push(format!("route {route}")),
                }
            }
            if missing.is_empty() {
                return;
            }
            if missing.len() == before {
                if last || Instant::now() >= give_up {
                    return self.routes_failed(&missing, errors);
                }
                // The check may have ended after the kernel refused and before it was looked for: once more.
                last = !self.waits_for_dad(&missing);
                if !last {
                    std::thread::sleep(DAD_POLL);
                }
            }
        }
    }

    fn routes_failed(&mut self, routes: &[Route], errors: Vec<NetlinkError>) {
        for (route, error) in routes.iter().zip(errors) {
            self.failed(&format!("route {} table {}", route.destination, route.table), format!("{error} (as it was: {route})"));
        }
    }

    /// Whether one of them names a source address that is still being checked.
    fn waits_for_dad(&mut self, routes: &[Route]) -> bool {
        let Ok(now) = address::list_of(self.socket, Some(self.link.index), self.deadline) else { return false };
        let checked = |route: &Route| {
            now.iter().any(|(_, address)| Some(address.ip) == route.source && address.flags & IFA_F_TENTATIVE != 0)
        };
        routes.iter().any(checked)
    }

    /// A route of this key is there, by another link. What is left of this very route is completed. Two on-link routes (and any
    /// two of IPv4) can stand side by side, as they could before. Otherwise it is somebody's, and stays.
    fn beside_another(&mut self, route: Route) {
        let what = format!("route {} table {}", route.destination, route.table);
        let there = match route::list(self.socket, self.deadline) {
            Ok(all) => all.into_iter().map(|(_, there)| there).filter(|there| there.same_key(&route)).collect::<Vec<_>>(),
            Err(error) => return self.failed(&what, error),
        };
        let request = if there.iter().any(|there| self.is_part(there, &route)) {
            route::add_request(self.link.index, &route, true)
        } else if !route.next_hops.is_empty() || (route.is_ipv6() && route.gateway.is_some()) {
            let there = there.first().map_or_else(String::new, |there| format!(": {there}"));
            return self.report.respected.push(format!("{what} was replaced meanwhile{there}"));
        } else {
            let append = if route.is_ipv6() { 0 } else { NLM_F_APPEND };
            Request { flags: NLM_F_CREATE | append, ..route::add_request(self.link.index, &route, false) }
        };
        let result = self.socket.request(request, self.deadline);
        self.done(&what, format!("route {route}"), result);
    }
}

fn same_entry(a: &Neighbour, b: &Neighbour) -> bool {
    a.ip == b.ip && a.is_proxy() == b.is_proxy()
}
