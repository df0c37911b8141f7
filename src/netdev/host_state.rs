//! Host state: what a link was on the host before we touched it, and putting it back.

mod compare;
mod kernel_made;
mod restore;
mod restore_ethtool;
mod restore_ip;
mod sound;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::address::IFA_F_TENTATIVE;
use super::bpf::{self, Programs};
use super::ethtool::EthtoolSocket;
use super::link::{IFF_ALLMULTI, IFF_PROMISC, IFF_UP, PacketSizes};
use super::rule::{ACTION_TO_TABLE, TABLE_DEFAULT};
use super::{Address, Ethtool, LinkAddress, Neighbour, Qdisc, Route, Rule};
use super::{address, link, neighbour, qdisc, route, rule, sysctl};
use crate::netlink::{NetlinkError, RouteSocket};

pub use compare::compare;
pub use restore::{restore, restore_identity};

/// `IFF_DEBUG`, `linux/if.h`.
pub const IFF_DEBUG: u32 = 1 << 2;
/// `IFF_NOARP`, `linux/if.h`.
pub const IFF_NOARP: u32 = 1 << 7;
/// `IFF_MULTICAST`, `linux/if.h`.
pub const IFF_MULTICAST: u32 = 1 << 12;
/// `IFF_DYNAMIC`, `linux/if.h`.
pub const IFF_DYNAMIC: u32 = 1 << 15;

/// How long looking at one link's programs may take.
const LOOK: Duration = Duration::from_secs(10);

/// The flags that are recorded and given back, with their names.
const FLAGS: [(u32, &str); 7] = [
    (IFF_UP, "up"),
    (IFF_PROMISC, "promisc"),
    (IFF_ALLMULTI, "allmulti"),
    (IFF_NOARP, "noarp"),
    (IFF_MULTICAST, "multicast"),
    (IFF_DYNAMIC, "dynamic"),
    (IFF_DEBUG, "debug"),
];

/// How long reading the settings of one link may take. Some drivers ask their firmware, and RTNL may be held by others.
const ETHTOOL_LIMIT: Duration = Duration::from_secs(10);

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
    /// How large its packets may be.
    #[serde(default)]
    pub sizes: PacketSizes,
    /// `IFLA_TSO_MAX_SIZE`, bytes: to refuse a claim's sizes before the kernel does.
    #[serde(default)]
    pub tso_max_size: Option<u32>,
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
    /// Queueing disciplines that somebody chose: [`super::qdisc`]. Of their classes and filters only those on ingress and clsact are
    /// recorded, in `programs`.
    #[serde(default)]
    pub qdiscs: Vec<Qdisc>,
    /// Features, private flags, rings, channels, coalescing, flow control: what the kernel and the driver say of them.
    #[serde(default, skip_serializing_if = "Ethtool::is_empty")]
    pub ethtool: Ethtool,
    /// eBPF programs and filters: [`super::bpf`]. [`restore`] leaves them; [`bpf::give_back`] puts them back.
    #[serde(default, skip_serializing_if = "Programs::is_empty")]
    pub programs: Programs,
}

impl HostState {
    /// Of a device that is no link and has none (its index is 0), and is called `name`.
    #[must_use]
    pub fn without_link(name: &str) -> Self {
        Self {
            index: 0,
            name: name.to_owned(),
            alt_names: Vec::new(),
            alias: None,
            mtu: 0,
            min_mtu: None,
            max_mtu: None,
            address: None,
            flags: 0,
            tx_queue_len: None,
            group: 0,
            sizes: PacketSizes::default(),
            tso_max_size: None,
            master: None,
            addresses: Vec::new(),
            routes: Vec::new(),
            rules: Vec::new(),
            neighbours: Vec::new(),
            sysctls: BTreeMap::new(),
            qdiscs: Vec::new(),
            ethtool: Ethtool::default(),
            programs: Programs::default(),
        }
    }

    /// The link itself only: without addresses, routes, rules, neighbours, sysctls, queueing (and filters) and master.
    #[must_use]
    pub fn of_link_only(&self) -> Self {
        Self {
            master: None,
            addresses: Vec::new(),
            routes: Vec::new(),
            rules: Vec::new(),
            neighbours: Vec::new(),
            sysctls: BTreeMap::new(),
            qdiscs: Vec::new(),
            programs: Programs { attached: self.programs.attached.clone(), ..Programs::default() },
            ..self.clone()
        }
    }

    /// The link has another index on the host by now: next hops of its multipath routes name it.
    pub fn set_index(&mut self, index: u32) {
        let old = std::mem::replace(&mut self.index, index);
        self.routes.iter_mut().for_each(|route| *route = compare::with_index(route, old, index));
    }
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
    /// [`super::qdisc::list`].
    pub qdiscs: Vec<(u32, Qdisc)>,
    /// [`bpf::glance`] at links, by index: only for the inventory. [`Self::host_state`] looks itself.
    pub programs: BTreeMap<u32, Programs>,
}

impl Snapshot {
    /// Dumps everything.
    ///
    /// # Errors
    /// As [`RouteSocket::dump`].
    pub fn take(socket: &mut RouteSocket, deadline: Instant) -> Result<Self, NetlinkError> {
        Ok(Self {
            links: link::list(socket, deadline)?,
            addresses: address::list(socket, deadline)?,
            routes: route::list(socket, deadline)?,
            rules: rule::list(socket, deadline)?,
            neighbours: neighbour::list(socket, deadline)?,
            qdiscs: qdisc::list(socket, deadline)?,
            programs: BTreeMap::new(),
        })
    }

    /// The host state of the link with `index`; none when there is no such link. Reads the link's sysctls, programs and settings of
    /// `ethtool`, so call it on a thread in the snapshot's namespace. IPv6 link-local addresses that the kernel made itself are left out: it makes them
    /// again when the link comes up. So are kernel-made routes that adding the addresses brings back, and temporary (privacy)
    /// addresses, which come and go.
    #[must_use]
    pub fn host_state(&self, index: u32) -> Option<HostState> {
        let link = self.links.iter().find(|link| link.index == index)?;
        let sysctls = sysctl::read_all(&link.name).unwrap_or_else(|error| {
            tracing::warn!(link = link.name, %error, "its sysctls can't be read and will not be given back");
            BTreeMap::new()
        });
        let (routes, rules) = self.routes_and_rules(index, &link.name);
        let qdiscs = of_link(&self.qdiscs, index);
        Some(HostState {
            index,
            name: link.name.clone(),
            alt_names: link.alt_names.clone(),
            alias: link.alias.clone().filter(|alias| !alias.is_empty()),
            mtu: link.mtu,
            min_mtu: link.min_mtu,
            max_mtu: link.max_mtu,
            address: link.address.clone(),
            flags: recorded_flags(link.flags),
            tx_queue_len: link.tx_queue_len,
            group: link.group,
            sizes: link.sizes,
            tso_max_size: link.tso_max_size,
            master: link.master.and_then(|m| self.links.iter().find(|l| l.index == m)).map(|l| l.name.clone()),
            addresses: kept_addresses(link, &self.addresses, &sysctls),
            routes,
            rules,
            neighbours: sorted(of_link(&self.neighbours, index)),
            sysctls,
            ethtool: ethtool_settings(index).unwrap_or_else(|error| {
                tracing::warn!(link = link.name, %error, "its ethtool settings can't be read and will not be given back");
                Ethtool::default()
            }),
            programs: bpf::read(link, &qdiscs, Instant::now() + LOOK),
            qdiscs,
        })
    }

    fn routes_and_rules(&self, index: u32, name: &str) -> (Vec<Route>, Vec<Rule>) {
        let addresses: Vec<&Address> = self.addresses.iter().filter(|(i, _)| *i == index).map(|(_, a)| a).collect();
        let by_link = || self.routes.iter().filter(|(links, _)| links.contains(&index)).map(|(_, route)| route);
        let ordinary = [0, TABLE_DEFAULT, route::TABLE_MAIN, route::TABLE_LOCAL];
        let tables: BTreeSet<u32> = by_link().map(|r| r.table).filter(|t| !ordinary.contains(t)).collect();
        let names_it = |link: &Option<String>| link.as_deref() == Some(name);
        let rules = self.rules.iter().filter(|rule| {
            (rule.action == ACTION_TO_TABLE && tables.contains(&rule.table))
                || names_it(&rule.input_link)
                || names_it(&rule.output_link)
        });
        let routes = by_link().filter(|route| !kernel_made::comes_back(route, &addresses));
        (routes.cloned().collect(), rules.cloned().collect())
    }
}

/// What the kernel says of a link of this thread's namespace; nothing where it does not speak of such settings.
fn ethtool_settings(index: u32) -> Result<Ethtool, NetlinkError> {
    let deadline = Instant::now() + ETHTOOL_LIMIT;
    match EthtoolSocket::open(deadline)? {
        Some(mut socket) => socket.read(index, deadline),
        None => Ok(Ethtool::default()),
    }
}

/// The flags of [`FLAGS`] in `flags`.
fn recorded_flags(flags: u32) -> u32 {
    flags & FLAGS.iter().fold(0, |mask, (bit, _)| mask | bit)
}

/// What of a link's addresses is recorded, in the kernel's order.
fn kept_addresses(link: &super::Link, all: &[(u32, Address)], sysctls: &BTreeMap<String, String>) -> Vec<Address> {
    let eui64 = sysctls.get("ipv6/conf/addr_gen_mode").is_none_or(|mode| mode == "0");
    of_link(all, link.index)
        .into_iter()
        .filter(|address| !kernel_made::is_kernels(address, link.address.as_ref().filter(|_| eui64)))
        .map(|mut address| {
            address.flags &= !IFA_F_TENTATIVE;
            // The default: it follows the link's name.
            address.label = address.label.filter(|label| *label != link.name);
            address
        })
        .collect()
}

fn of_link<T: Clone>(all: &[(u32, T)], index: u32) -> Vec<T> {
    all.iter().filter(|(i, _)| *i == index).map(|(_, item)| item.clone()).collect()
}

fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort();
    list
}
