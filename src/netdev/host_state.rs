//! Host state: what a link was on the host before we touched it, and putting it back.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Address, LinkAddress, Neighbour, Route, Rule};
use crate::netlink::{NetlinkError, RouteSocket};

/// Everything of a link that is lost or changed by lending it to a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostState {
    /// Index on the host.
    pub index: u32,
    /// Name on the host.
    pub name: String,
    /// Alternative names.
    #[serde(default)]
    pub alt_names: Vec<String>,
    /// `IFLA_IFALIAS`.
    #[serde(default)]
    pub alias: Option<String>,
    /// Bytes.
    pub mtu: u32,
    /// `IFLA_MIN_MTU`, bytes: to refuse a claim's MTU before the kernel does.
    #[serde(default)]
    pub min_mtu: Option<u32>,
    /// `IFLA_MAX_MTU`, bytes.
    #[serde(default)]
    pub max_mtu: Option<u32>,
    /// Link-layer address in use.
    #[serde(default)]
    pub address: Option<LinkAddress>,
    /// `IFF_UP`, `IFF_PROMISC`, `IFF_ALLMULTI`, `IFF_NOARP`, `IFF_MULTICAST`, `IFF_DYNAMIC` and `IFF_DEBUG` of `ifi_flags`.
    pub flags: u32,
    /// `IFLA_TXQLEN`, packets.
    #[serde(default)]
    pub tx_queue_len: Option<u32>,
    /// `IFLA_GROUP`.
    #[serde(default)]
    pub group: u32,
    /// Name of the link it is enslaved to.
    #[serde(default)]
    pub master: Option<String>,
    /// In the order the kernel lists them (the first of a subnet is its primary one).
    pub addresses: Vec<Address>,
    /// Routes of every table but `local` that leave by this link.
    pub routes: Vec<Route>,
    /// Rules that look up a table (other than main, default and local) in which this link has a route, or that name this link.
    /// They stay on the host; they are here for the pod's copy.
    pub rules: Vec<Rule>,
    /// Permanent neighbour entries.
    pub neighbours: Vec<Neighbour>,
    /// Per-link sysctls: [`super::sysctl::read_all`].
    pub sysctls: BTreeMap<String, String>,
}

/// One thing that is not as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Which property, for example `mtu`, `address 10.0.0.1/24`, `sysctl ipv4/conf/arp_ignore`.
    pub what: String,
    /// What it was; empty when it was not there.
    pub before: String,
    /// What it is; empty when it is not there.
    pub after: String,
}

/// What a restore did and what it could not do.
#[derive(Debug, Default)]
pub struct RestoreReport {
    /// What was put back.
    pub restored: Vec<String>,
    /// What could not be put back, and why.
    pub failed: Vec<(String, String)>,
    /// What was changed by somebody else meanwhile and was left as it is.
    pub respected: Vec<String>,
}

/// The dumps of one namespace from which the host state of many links is taken: made once for all devices of a claim.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// [`super::link::list`].
    pub links: Vec<super::Link>,
    /// [`super::address::list`].
    pub addresses: Vec<(u32, Address)>,
    /// [`super::route::list`].
    pub routes: Vec<(Vec<u32>, Route)>,
    /// [`super::rule::list`].
    pub rules: Vec<Rule>,
    /// [`super::neighbour::list`].
    pub neighbours: Vec<(u32, Neighbour)>,
}

impl Snapshot {
    /// Dumps everything.
    ///
    /// # Errors
    /// As [`RouteSocket::dump`].
    pub fn take(socket: &mut RouteSocket, deadline: Instant) -> Result<Self, NetlinkError> {
        let _ = (socket, deadline);
        todo!()
    }

    /// The host state of the link with `index`; none when there is no such link. Reads the link's sysctls, so call it on a
    /// thread in the snapshot's namespace. IPv6 link-local addresses that the kernel made itself are left out: it makes them
    /// again when the link comes up. So are kernel-made routes that adding the addresses brings back.
    #[must_use]
    pub fn host_state(&self, index: u32) -> Option<HostState> {
        let _ = index;
        todo!()
    }
}

/// Puts the link with `index`, which is on the host already, back to `state`: name first, then altnames, MTU, MAC, flags,
/// sysctls, master, up or down, addresses, routes, neighbours. Goes on after a failure; doing it twice changes nothing.
/// Call it on a thread in the host's namespace.
pub fn restore(socket: &mut RouteSocket, index: u32, state: &HostState, deadline: Instant) -> RestoreReport {
    let _ = (socket, index, state, deadline);
    todo!()
}

/// Every difference between two host states of one link. The tentative flag and the running-down of life times are no
/// difference.
#[must_use]
pub fn compare(before: &HostState, after: &HostState) -> Vec<Difference> {
    let _ = (before, after);
    todo!()
}
