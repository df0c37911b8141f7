//! Every difference between two host states, in words.

use std::collections::BTreeSet;
use std::fmt::Display;

use super::super::address::{FOREVER, IFA_F_DEPRECATED, IFA_F_OPTIMISTIC, IFA_F_TENTATIVE};
use super::super::bpf::Programs;
use super::super::{Address, LinkAddress, Route, ethtool};
use super::{Difference, FLAGS, HostState};

/// Every difference between two host states of one link. Its index, the tentative flag and the running-down of life times are
/// no difference.
#[must_use]
pub fn compare(before: &HostState, after: &HostState) -> Vec<Difference> {
    let mut found = Vec::new();
    link(before, after, &mut found);
    addresses(before, after, &mut found);
    routes(before, after, &mut found);
    let rule = |list: &[super::Rule]| list.iter().map(|r| ("rule".to_owned(), r.to_string())).collect::<Vec<_>>();
    lists(rule(&before.rules), rule(&after.rules), &mut found);
    let neighbour = |state: &HostState| {
        let one =
            |n: &super::Neighbour| (format!("neighbour {}{}", n.ip, if n.is_proxy() { " proxy" } else { "" }), n.to_string());
        state.neighbours.iter().map(one).collect::<Vec<_>>()
    };
    lists(neighbour(before), neighbour(after), &mut found);
    let sysctl = |state: &HostState| state.sysctls.iter().map(|(k, v)| (format!("sysctl {k}"), v.clone())).collect::<Vec<_>>();
    lists(sysctl(before), sysctl(after), &mut found);
    let qdisc =
        |state: &HostState| state.qdiscs.iter().map(|q| (format!("qdisc {:x}", q.parent), q.to_string())).collect::<Vec<_>>();
    lists(qdisc(before), qdisc(after), &mut found);
    let settings = ethtool::differences(&before.ethtool, &after.ethtool).into_iter();
    found.extend(settings.map(|s| Difference { what: s.what, before: s.before, after: s.after }));
    programs(&before.programs, &after.programs, &mut found);
    found
}

/// By what they are and where: a program that was attached again by a new link in the same file is as it was.
fn programs(before: &Programs, after: &Programs, found: &mut Vec<Difference>) {
    let filters = |programs: &Programs| programs.filters.iter().map(|f| ("filter".to_owned(), f.to_string())).collect::<Vec<_>>();
    lists(filters(before), filters(after), found);
    let others = |programs: &Programs| programs.others.iter().map(|o| ("filter".to_owned(), o.clone())).collect::<Vec<_>>();
    lists(others(before), others(after), found);
    let attached =
        |programs: &Programs| programs.attached.iter().map(|a| (a.place.to_string(), a.to_string())).collect::<Vec<_>>();
    lists(attached(before), attached(after), found);
    let order = |these: &Programs, others: &Programs| {
        let both = these.attached.iter().filter(|this| others.attached.iter().any(|other| other.is_like(this)));
        both.map(|a| format!("{} {}", a.place, a.program)).collect::<Vec<_>>().join(", ")
    };
    note(found, "program order", order(before, after), order(after, before));
}

fn note(found: &mut Vec<Difference>, what: impl Into<String>, before: String, after: String) {
    if before != after {
        found.push(Difference { what: what.into(), before, after });
    }
}

fn text<T: Display>(value: Option<&T>) -> String {
    value.map_or_else(String::new, T::to_string)
}

fn link(before: &HostState, after: &HostState, found: &mut Vec<Difference>) {
    note(found, "name", before.name.clone(), after.name.clone());
    let alt_name = |state: &HostState| state.alt_names.iter().map(|n| (format!("altname {n}"), n.clone())).collect::<Vec<_>>();
    lists(alt_name(before), alt_name(after), found);
    note(found, "alias", text(before.alias.as_ref()), text(after.alias.as_ref()));
    note(found, "mtu", before.mtu.to_string(), after.mtu.to_string());
    if !same_link_address(before.address.as_ref(), after.address.as_ref()) {
        note(found, "link-layer address", text(before.address.as_ref()), text(after.address.as_ref()));
    }
    for (bit, name) in FLAGS {
        let word = |state: &HostState| if state.flags & bit != 0 { "on".to_owned() } else { "off".to_owned() };
        note(found, name, word(before), word(after));
    }
    note(found, "txqueuelen", text(before.tx_queue_len.as_ref()), text(after.tx_queue_len.as_ref()));
    note(found, "group", before.group.to_string(), after.group.to_string());
    for ((name, before), (_, after)) in before.sizes.named().into_iter().zip(after.sizes.named()) {
        // None: recorded by an earlier version.
        if before.is_some() {
            note(found, name, text(before.as_ref()), text(after.as_ref()));
        }
    }
    note(found, "master", text(before.master.as_ref()), text(after.master.as_ref()));
}

/// The first four bytes of an IPoIB address are a queue pair number, which the kernel chooses.
pub(super) fn same_link_address(a: Option<&LinkAddress>, b: Option<&LinkAddress>) -> bool {
    match (a.map(LinkAddress::bytes), b.map(LinkAddress::bytes)) {
        (Some(a), Some(b)) if a.len() == 20 && b.len() == 20 => a[4..] == b[4..],
        (a, b) => a == b,
    }
}

/// Name and text of each item on both sides: those only on one side, and those whose text differs. Equal pairs cancel out, also
/// where a name occurs several times.
fn lists(before: Vec<(String, String)>, mut after: Vec<(String, String)>, found: &mut Vec<Difference>) {
    let mut left = Vec::new();
    for item in before {
        match after.iter().position(|other| *other == item) {
            Some(at) => drop(after.remove(at)),
            None => left.push(item),
        }
    }
    for (what, text) in left {
        let at = after.iter().position(|(name, _)| *name == what);
        let now = at.map_or_else(String::new, |at| after.remove(at).1);
        note(found, what, text, now);
    }
    for (what, text) in after {
        note(found, what, String::new(), text);
    }
}

/// What tells addresses of one link apart.
pub(super) fn address_key(address: &Address) -> String {
    match address.peer {
        Some(peer) => format!("{} peer {peer}/{}", address.ip, address.prefix_len),
        None => format!("{}/{}", address.ip, address.prefix_len),
    }
}

/// Whether `after` is `before`, perhaps some time later.
pub(super) fn same_address(before: &Address, after: &Address) -> bool {
    ran_down(before.valid_lifetime, after.valid_lifetime)
        && ran_down(before.preferred_lifetime, after.preferred_lifetime)
        && timeless(before) == timeless(after)
}

fn ran_down(before: u32, after: u32) -> bool {
    if before == FOREVER { after == FOREVER } else { after <= before }
}

fn timeless(address: &Address) -> Address {
    let mut same = address.clone();
    same.flags &= !(IFA_F_TENTATIVE | IFA_F_OPTIMISTIC);
    if same.preferred_lifetime != FOREVER {
        same.flags &= !IFA_F_DEPRECATED;
    }
    (same.valid_lifetime, same.preferred_lifetime) = (FOREVER, FOREVER);
    same
}

fn addresses(before: &HostState, after: &HostState, found: &mut Vec<Difference>) {
    let keyed =
        |state: &HostState| state.addresses.iter().map(|a| (format!("address {}", address_key(a)), a.to_string())).collect();
    let (left, mut right): (Vec<_>, Vec<(String, String)>) = (keyed(before), keyed(after));
    // Where only time has passed, the text of before stands for both.
    for address in &before.addresses {
        if let Some(at) = after.addresses.iter().position(|other| same_address(address, other)) {
            right[at].1 = address.to_string();
        }
    }
    lists(left, right, found);
    let common: BTreeSet<String> = after.addresses.iter().map(address_key).collect();
    let both = &common & &before.addresses.iter().map(address_key).collect();
    let order = |state: &HostState| {
        let keys: Vec<String> = state.addresses.iter().map(address_key).filter(|key| both.contains(key)).collect();
        keys.join(", ")
    };
    note(found, "address order", order(before), order(after));
}

/// Whether two routes are the same, perhaps some time later. Next hops must already name the same links by the same indices.
pub(super) fn same_route(before: &Route, after: &Route) -> bool {
    let later = match (before.expires(), after.expires()) {
        (None, None) => true,
        (Some(before), Some(after)) => after <= before,
        _ => false,
    };
    later && before.without_expiry() == after.without_expiry()
}

/// A route whose next hops over the link with index `from` are over `to`.
pub(super) fn with_index(route: &Route, from: u32, to: u32) -> Route {
    let mut route = route.clone();
    for hop in route.next_hops.iter_mut().filter(|hop| hop.index == from) {
        hop.index = to;
    }
    route
}

fn routes(before: &HostState, after: &HostState, found: &mut Vec<Difference>) {
    let name = |route: &Route| {
        let metric = route.metric.map_or_else(String::new, |m| format!(" metric {m}"));
        format!("route {} table {}{metric}", route.destination, route.table)
    };
    let keyed = |routes: &[Route]| routes.iter().map(|r| (name(r), r.to_string())).collect::<Vec<_>>();
    let now: Vec<Route> = after.routes.iter().map(|r| with_index(r, after.index, before.index)).collect();
    let mut right = keyed(&now);
    for route in &before.routes {
        if let Some(at) = now.iter().position(|other| same_route(route, other)) {
            right[at].1 = route.to_string();
        }
    }
    lists(keyed(&before.routes), right, found);
}
