//! Which links the host needs: those of its default routes, and everything below or above them. Pure.

use std::collections::{BTreeMap, VecDeque};

use super::{Link, Route};

/// Why a link is not offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Needed {
    /// A default route leaves by it.
    DefaultRoute {
        /// `RTA_TABLE`.
        table: u32,
        /// True for IPv6.
        ipv6: bool,
    },
    /// A default route does not say by which link it leaves (a nexthop object the kernel does not spell out), so it may be this.
    UnknownDefaultRoute {
        /// `RTA_TABLE`.
        table: u32,
        /// True for IPv6.
        ipv6: bool,
    },
    /// It is below or above (or a sibling below the same master as) a link that the host needs.
    RelatedTo {
        /// Index of that link.
        index: u32,
        /// How: `master`, `port`, `lower`, `upper`, or `peer` (the other end of a veth).
        how: &'static str,
    },
}

/// `RTN_BLACKHOLE`, `RTN_UNREACHABLE`, `RTN_PROHIBIT`, `RTN_THROW`, `linux/rtnetlink.h`: routes that lead nowhere.
const NOWHERE: std::ops::RangeInclusive<u8> = 6..=9;

/// The links that the host needs, by index, each with the first reason found.
///
/// Default routes of every table and family count, multipath included, also those of a router advertisement. From such a link
/// the relation goes both ways over `master` and over `parent` (when the parent is in the same namespace) until nothing new is
/// found: bond, bridge, team, vlan, macvlan parents and children, masters and slaves, both ends of a veth.
#[must_use]
pub fn needed(links: &[Link], routes: &[(Vec<u32>, Route)]) -> BTreeMap<u32, Needed> {
    let mut needed = BTreeMap::new();
    for (indices, route) in routes.iter().filter(|(_, route)| route.is_default() && !NOWHERE.contains(&route.kind)) {
        let (table, ipv6) = (route.table, route.destination.addr().is_ipv6());
        let hops = route.next_hops.iter().map(|hop| hop.index);
        let mut leaves_by = indices.iter().copied().chain(hops).filter(|index| *index > 0).peekable();
        if leaves_by.peek().is_none() {
            for link in links {
                needed.entry(link.index).or_insert(Needed::UnknownDefaultRoute { table, ipv6 });
            }
        }
        for index in leaves_by {
            needed.insert(index, Needed::DefaultRoute { table, ipv6 });
        }
    }
    spread(links, &mut needed);
    needed
}

/// Adds what is related to the links in `needed`, nearest first.
fn spread(links: &[Link], needed: &mut BTreeMap<u32, Needed>) {
    let neighbours = relations(links);
    let mut queue: VecDeque<u32> = needed.keys().copied().collect();
    while let Some(index) = queue.pop_front() {
        for (other, how) in neighbours.get(&index).into_iter().flatten() {
            if !needed.contains_key(other) {
                needed.insert(*other, Needed::RelatedTo { index, how });
                queue.push_back(*other);
            }
        }
    }
}

/// For each link those next to it, and what they are to it.
fn relations(links: &[Link]) -> BTreeMap<u32, Vec<(u32, &'static str)>> {
    let mut relations: BTreeMap<u32, Vec<(u32, &'static str)>> = BTreeMap::new();
    for link in links {
        if let Some(master) = link.master {
            relations.entry(link.index).or_default().push((master, "master"));
            relations.entry(master).or_default().push((link.index, "port"));
        }
        // With an nsid the parent's index is one of another namespace, where it may be any link's.
        if let Some(parent) = link.parent.filter(|parent| link.link_netnsid.is_none() && *parent != link.index) {
            let (lower, upper) = if link.kind.as_deref() == Some("veth") { ("peer", "peer") } else { ("lower", "upper") };
            relations.entry(link.index).or_default().push((parent, lower));
            relations.entry(parent).or_default().push((link.index, upper));
        }
    }
    relations
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::NextHop;

    fn link(index: u32, kind: &str) -> Link {
        let kind = (!kind.is_empty()).then(|| kind.to_owned());
        Link { index, name: format!("l{index}"), kind, ..Link::default() }
    }

    fn below(master: u32, link: Link) -> Link {
        Link { master: Some(master), ..link }
    }

    fn on(parent: u32, link: Link) -> Link {
        Link { parent: Some(parent), ..link }
    }

    fn default_by(index: u32) -> (Vec<u32>, Route) {
        (vec![index], Route::to("0.0.0.0/0".parse().unwrap()))
    }

    fn indices(links: &[Link], routes: &[(Vec<u32>, Route)]) -> Vec<u32> {
        needed(links, routes).into_keys().collect()
    }

    #[test]
    fn a_bond_of_two_with_a_vlan_that_has_the_route() {
        let links =
            [link(1, ""), below(4, link(2, "")), below(4, link(3, "")), link(4, "bond"), on(4, link(5, "vlan")), link(6, "")];
        let needed = needed(&links, &[default_by(5)]);
        assert_eq!(needed.keys().copied().collect::<Vec<_>>(), [2, 3, 4, 5]);
        assert_eq!(needed[&5], Needed::DefaultRoute { table: 254, ipv6: false });
        assert_eq!(needed[&4], Needed::RelatedTo { index: 5, how: "lower" });
        assert_eq!(needed[&2], Needed::RelatedTo { index: 4, how: "port" });
    }

    #[test]
    fn a_bridge_with_an_uplink_and_a_team_below_it() {
        let links = [link(2, "bridge"), below(2, link(3, "team")), below(3, link(4, "")), below(2, link(5, "veth")), link(6, "")];
        assert_eq!(indices(&links, &[default_by(2)]), [2, 3, 4, 5]);
        assert_eq!(indices(&links, &[default_by(4)]), [2, 3, 4, 5], "from below, too");
    }

    #[test]
    fn macvlan_children_and_what_stands_above_them() {
        let links = [link(2, ""), on(2, link(3, "macvlan")), on(3, link(4, "vlan")), link(5, "")];
        assert_eq!(indices(&links, &[default_by(2)]), [2, 3, 4]);
        assert_eq!(needed(&links, &[default_by(2)])[&3], Needed::RelatedTo { index: 2, how: "upper" });
    }

    #[test]
    fn a_parent_in_another_namespace_is_not_followed() {
        // Index 5 there is another link than our 5.
        let away = Link { link_netnsid: Some(0), ..on(5, link(2, "veth")) };
        assert_eq!(indices(&[away, link(5, "")], &[default_by(2)]), [2]);
    }

    #[test]
    fn the_other_end_of_a_veth_and_the_bridge_it_is_in() {
        let links =
            [on(3, link(2, "veth")), below(4, on(2, link(3, "veth"))), link(4, "bridge"), below(4, link(5, "")), link(6, "")];
        let needed = needed(&links, &[default_by(2)]);
        assert_eq!(needed.keys().copied().collect::<Vec<_>>(), [2, 3, 4, 5]);
        assert_eq!(needed[&3], Needed::RelatedTo { index: 2, how: "peer" });
    }

    #[test]
    fn every_table_family_and_next_hop_counts() {
        let v6 = Route { table: 1000, protocol: 9, ..Route::to("::/0".parse().unwrap()) };
        let hop = |index| NextHop::by(index, None);
        let multipath = Route { next_hops: vec![hop(4), hop(5)], table: 7, ..Route::to("0.0.0.0/0".parse().unwrap()) };
        let links: Vec<_> = (1..8).map(|index| link(index, "")).collect();
        let found = needed(&links, &[(vec![3], v6), (vec![], multipath)]);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!(found[&3], Needed::DefaultRoute { table: 1000, ipv6: true });
    }

    #[test]
    fn other_routes_and_those_that_lead_nowhere_need_no_link() {
        let subnet = Route::to("10.0.0.0/8".parse().unwrap());
        let dead = |kind, indices| (indices, Route { kind, ..Route::to("::/0".parse().unwrap()) });
        let routes = [(vec![2], subnet), dead(6, vec![1]), dead(7, vec![]), dead(8, vec![]), dead(9, vec![])];
        assert_eq!(indices(&[link(1, ""), link(2, "")], &routes), [0u32; 0]);
    }

    #[test]
    fn a_default_route_without_a_link_makes_all_suspect() {
        let unknown = (vec![], Route::to("0.0.0.0/0".parse().unwrap()));
        let found = needed(&[link(2, ""), link(3, "")], &[unknown, default_by(3)]);
        assert_eq!(found[&2], Needed::UnknownDefaultRoute { table: 254, ipv6: false });
        assert_eq!(found[&3], Needed::DefaultRoute { table: 254, ipv6: false });
    }

    #[test]
    fn circles_and_missing_links_end() {
        let links = [below(3, on(3, link(2, ""))), below(2, on(2, link(3, ""))), on(4, link(4, "")), on(99, link(5, "vlan"))];
        assert_eq!(indices(&links, &[default_by(2), default_by(42)]), [2, 3, 42]);
        assert_eq!(indices(&links, &[default_by(5)]), [5, 99]);
    }
}
