//! Which links the host needs: those of its default routes, and everything below or above them. Pure.

use std::collections::{BTreeMap, BTreeSet};

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
    /// It is below or above (or a sibling below the same master as) a link that the host needs.
    RelatedTo {
        /// Index of that link.
        index: u32,
        /// How: `master`, `port`, `lower`, `upper`.
        how: &'static str,
    },
}

/// The links that the host needs, by index, each with the first reason found.
///
/// Default routes of every table and family count, multipath included, also those of a router advertisement. From such a link
/// the relation goes both ways over `master` and over `parent` (when the parent is in the same namespace) until nothing new is
/// found: bond, bridge, team, vlan, macvlan parents and children, masters and slaves.
#[must_use]
pub fn needed(links: &[Link], routes: &[(Vec<u32>, Route)]) -> BTreeMap<u32, Needed> {
    let _ = (links, routes, BTreeSet::<u32>::new());
    todo!()
}
