//! Putting a link back to its host state: the link itself. Addresses and routes are in `restore_ip`.

use std::time::Instant;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use super::super::link::{IFF_UP, LinkSettings};
use super::super::{Address, Link, Neighbour, Route, address, link, qdisc, sysctl};
use super::compare::same_link_address;
use super::sound::sound;
use super::{FLAGS, HostState, RestoreReport, recorded_flags};
use crate::crash;
use crate::netlink::{NetlinkError, Request, RouteSocket};

/// `IFLA_IFALIAS`, `linux/if_link.h`.
const IFLA_IFALIAS: u16 = 20;

/// Puts the link with `index`, which is on the host already, back to `state`: name first, then altnames, MTU, MAC, flags,
/// master, sysctls, `ethtool` settings, queueing, up or down, addresses, neighbours, routes. Goes on after a failure; doing it
/// twice changes nothing. Call it on a thread in the host's namespace.
///
/// It waits for IPv6 duplicate address detection (up to 3 s) only where a route names such an address as its source. Rules
/// stayed on the host and are left alone.
pub fn restore(socket: &mut RouteSocket, index: u32, state: &HostState, deadline: Instant) -> RestoreReport {
    let mut report = RestoreReport::default();
    let state = &sound(state, &mut report);
    match link::by_index(socket, index, deadline) {
        Ok(Some(link)) => Restorer { socket, state, link, deadline, report: &mut report, foreign: Foreign::default() }.run(),
        Ok(None) => report.failed.push(("link".into(), format!("there is no link with index {index}; is it still in a pod?"))),
        Err(error) => report.failed.push(("link".into(), error.to_string())),
    }
    report
}

/// As [`restore`], but only what the link is called and what it is by itself: name, altnames, alias, MTU, transmit queue, group,
/// link-layer address. For a link that came back to the host although the pod it was lent to still has a claim to it: it shall be found
/// under its name, and be what prepare left.
pub fn restore_identity(socket: &mut RouteSocket, index: u32, state: &HostState, deadline: Instant) -> RestoreReport {
    let mut report = RestoreReport::default();
    let state = &sound(state, &mut report);
    match link::by_index(socket, index, deadline) {
        Ok(Some(link)) => {
            let mut restorer = Restorer { socket, state, link, deadline, report: &mut report, foreign: Foreign::default() };
            restorer.name();
            restorer.alt_names();
            restorer.properties();
            restorer.link_layer_address();
        }
        Ok(None) => report.failed.push(("link".into(), format!("there is no link with index {index}"))),
        Err(error) => report.failed.push(("link".into(), error.to_string())),
    }
    report
}

/// What somebody else gave the link before it was restored. Kept because some steps (a new link-layer address, going down)
/// make the kernel drop it.
#[derive(Debug, Default)]
pub(super) struct Foreign {
    pub(super) addresses: Vec<Address>,
    pub(super) neighbours: Vec<Neighbour>,
    pub(super) routes: Vec<Route>,
}

/// One restore under way. `link` is what the link is now.
pub(super) struct Restorer<'a> {
    pub(super) socket: &'a mut RouteSocket,
    pub(super) state: &'a HostState,
    pub(super) link: Link,
    pub(super) deadline: Instant,
    pub(super) report: &'a mut RestoreReport,
    pub(super) foreign: Foreign,
}

impl Restorer<'_> {
    fn run(mut self) {
        self.find_foreign();
        self.name();
        crash::point("restore: name");
        self.alt_names();
        crash::point("restore: alt names");
        self.properties();
        crash::point("restore: properties");
        self.link_layer_address();
        crash::point("restore: link layer address");
        self.flags();
        crash::point("restore: flags");
        self.master();
        crash::point("restore: master");
        self.sysctls();
        crash::point("restore: sysctls");
        self.ethtool();
        crash::point("restore: ethtool");
        self.qdiscs();
        self.admin_state();
        crash::point("restore: admin state");
        self.ip();
    }

    pub(super) fn failed(&mut self, what: &str, why: impl ToString) {
        self.report.failed.push((what.to_owned(), why.to_string()));
    }

    /// Notes how a change of `what` went.
    pub(super) fn done<E: ToString>(&mut self, what: &str, text: String, result: Result<(), E>) -> bool {
        match result {
            Ok(()) => self.report.restored.push(text),
            Err(error) => {
                self.failed(what, error);
                return false;
            }
        }
        true
    }

    fn set(&mut self, attribute: LinkAttribute) -> Result<(), NetlinkError> {
        self.socket.request(link_request(self.link.index, attribute), self.deadline)
    }

    /// As [`Self::set`]. Some kernels and drivers change names and addresses only of a link that is down: then it goes down
    /// first, and [`Self::admin_state`] brings it up again.
    fn set_down_if_busy(&mut self, attribute: LinkAttribute) -> Result<(), NetlinkError> {
        match self.set(attribute.clone()) {
            Err(error) if error.errno() == Some(libc::EBUSY) && self.link.is_up() => {
                link::set_up(self.socket, self.link.index, false, self.deadline)?;
                self.link.flags &= !IFF_UP;
                self.set(attribute)
            }
            result => result,
        }
    }

    fn name(&mut self) {
        let wanted = self.state.name.clone();
        if self.link.name == wanted {
            return;
        }
        // Nobody may take over a name that is another link's altname, but our own one can go.
        if self.link.alt_names.contains(&wanted) {
            let _ = self.socket.request(link::alt_name_request(self.link.index, &wanted, false), self.deadline);
            self.link.alt_names.retain(|name| *name != wanted);
        }
        if let Some(holder) = self.holder(&wanted) {
            let why = format!("{holder}; it stays {} until that link has another name", self.link.name);
            return self.failed("name", why);
        }
        self.drop_labelled();
        let result = self.set_down_if_busy(LinkAttribute::IfName(wanted.clone()));
        if self.done("name", format!("name {} -> {wanted}", self.link.name), result) {
            self.link.name = wanted;
        }
    }

    /// With the link's name the kernel changes the labels of all its IPv4 addresses (the first loses its own, the others get
    /// `:2`, `:3`, …). Those that are recorded are taken away before, the secondary ones first, and come back below.
    fn drop_labelled(&mut self) {
        let now = address::list_of(self.socket, Some(self.link.index), self.deadline).unwrap_or_default();
        let ours = now.iter().rev().map(|(_, address)| address).filter(|a| a.ip.is_ipv4() && self.is_recorded(a));
        let requests = ours.map(|address| address::delete_request(self.link.index, address)).collect();
        // One that can't go is only labelled wrongly.
        let _ = self.socket.pipeline(requests, self.deadline);
    }

    /// Who has the name that could not be given.
    fn holder(&mut self, name: &str) -> Option<String> {
        let holder = link::by_name(self.socket, name, self.deadline).ok()??;
        Some(format!("{name} is in use by link {} ({})", holder.index, holder.name))
    }

    fn alt_names(&mut self) {
        for name in &self.state.alt_names {
            if self.link.alt_names.contains(name) {
                continue;
            }
            let result = self.socket.request(link::alt_name_request(self.link.index, name, true), self.deadline);
            let taken = result.as_ref().is_err_and(|error| error.errno() == Some(libc::EEXIST));
            let holder = if taken { self.holder(name) } else { None };
            let result = result.map_err(|error| holder.unwrap_or_else(|| error.to_string()));
            self.done(&format!("altname {name}"), format!("altname {name}"), result);
        }
        for extra in self.link.alt_names.iter().filter(|name| !self.state.alt_names.contains(name)) {
            self.report.respected.push(format!("altname {extra} was added meanwhile"));
        }
    }

    fn properties(&mut self) {
        let (state, link) = (self.state, self.link.clone());
        let alias = link.alias.clone().filter(|alias| !alias.is_empty());
        if alias != state.alias {
            let (old, new) = (alias.unwrap_or_default(), state.alias.clone().unwrap_or_default());
            // Without the final zero: only an empty attribute removes an alias.
            let result = self.set(LinkAttribute::Other(DefaultNla::new(IFLA_IFALIAS, new.clone().into_bytes())));
            self.done("alias", format!("alias {old:?} -> {new:?}"), result);
        }
        if link.mtu != state.mtu {
            let result = self.set(LinkAttribute::Mtu(state.mtu));
            self.done("mtu", format!("mtu {} -> {}", link.mtu, state.mtu), result);
        }
        if let Some(wanted) = state.tx_queue_len.filter(|wanted| link.tx_queue_len != Some(*wanted)) {
            let result = self.set(LinkAttribute::TxQueueLen(wanted));
            self.done("txqueuelen", format!("txqueuelen {} -> {wanted}", link.tx_queue_len.unwrap_or(0)), result);
        }
        if link.group != state.group {
            let result = self.set(LinkAttribute::Group(state.group));
            self.done("group", format!("group {} -> {}", link.group, state.group), result);
        }
        self.sizes();
    }

    /// All in one message: setting one may change another. One that was not recorded is left alone.
    fn sizes(&mut self) {
        let (now, wanted) = (self.link.sizes, self.state.sizes);
        let pairs = now.named().into_iter().zip(wanted.named());
        let changed = pairs.filter(|((_, now), (_, wanted))| wanted.is_some() && wanted != now).map(|((name, _), _)| name);
        let names: Vec<&str> = changed.collect();
        if names.is_empty() {
            return;
        }
        let settings = LinkSettings { sizes: wanted, ..LinkSettings::default() };
        let result = self.socket.request(link::set_request(self.link.index, &settings), self.deadline);
        self.done(&names.join(", "), settings.words().join(", "), result);
    }

    fn link_layer_address(&mut self) {
        let Some(wanted) = &self.state.address else { return };
        if same_link_address(Some(wanted), self.link.address.as_ref()) {
            return;
        }
        let result = self.set_down_if_busy(LinkAttribute::Address(wanted.bytes().to_vec()));
        self.done("link-layer address", format!("link-layer address {wanted}"), result);
    }

    /// All but up and down.
    fn flags(&mut self) {
        let differing = (recorded_flags(self.link.flags) ^ self.state.flags) & !IFF_UP & recorded_flags(u32::MAX);
        for (bit, name) in FLAGS.into_iter().filter(|(bit, _)| differing & bit != 0) {
            let mut message = LinkMessage::default();
            message.header.index = self.link.index;
            message.header.change_mask = LinkFlags::from_bits_retain(bit);
            message.header.flags = LinkFlags::from_bits_retain(self.state.flags & bit);
            let request = Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 };
            let result = self.socket.request(request, self.deadline);
            let word = if self.state.flags & bit != 0 { "on" } else { "off" };
            self.done(name, format!("{name} {word}"), result);
        }
    }

    /// A move ends every enslavement: one that is there now was made by somebody since.
    fn master(&mut self) {
        if let Some(index) = self.link.master {
            let now = link::by_index(self.socket, index, self.deadline).ok().flatten();
            let now = now.map_or_else(|| format!("link {index}"), |link| link.name);
            if self.state.master.as_ref() != Some(&now) {
                self.report.respected.push(format!("it was enslaved to {now} meanwhile"));
            }
            return;
        }
        let Some(name) = &self.state.master else { return };
        match link::by_name(self.socket, name, self.deadline) {
            Ok(Some(master)) => {
                let result = self.set(LinkAttribute::Controller(master.index));
                self.done("master", format!("master {name}"), result);
            }
            Ok(None) => self.failed("master", format!("there is no link {name} any more")),
            Err(error) => self.failed("master", error),
        }
    }

    fn sysctls(&mut self) {
        let (written, failed) = sysctl::restore_counted(&self.link.name, &self.state.sysctls);
        self.report.restored.extend(written.into_iter().map(|key| format!("sysctl {key}")));
        for (key, error) in failed {
            self.failed(&format!("sysctl {key}"), error);
        }
    }

    fn qdiscs(&mut self) {
        let now = match qdisc::list(self.socket, self.deadline) {
            Ok(all) => super::of_link(&all, self.link.index),
            Err(error) => return self.failed("qdiscs", error),
        };
        for wanted in &self.state.qdiscs {
            match now.iter().find(|there| there.parent == wanted.parent) {
                Some(there) if there == wanted => {}
                Some(there) => self.report.respected.push(format!("qdisc {wanted} is now {there}")),
                None => {
                    let result = self.socket.request(qdisc::add_request(self.link.index, wanted), self.deadline);
                    self.done(&format!("qdisc {:x}", wanted.handle), format!("qdisc {wanted}"), result);
                }
            }
        }
        for extra in now.iter().filter(|there| !self.state.qdiscs.iter().any(|wanted| wanted.parent == there.parent)) {
            self.report.respected.push(format!("qdisc {extra} was added meanwhile"));
        }
    }

    fn admin_state(&mut self) {
        // A master may have changed it since.
        if let Ok(Some(link)) = link::by_index(self.socket, self.link.index, self.deadline) {
            self.link.flags = link.flags;
        }
        let wanted = self.state.flags & IFF_UP != 0;
        if self.link.is_up() == wanted {
            return;
        }
        if !wanted && !self.foreign.addresses.is_empty() {
            self.report.respected.push("it was set up and given addresses meanwhile: it stays up".into());
            return;
        }
        let word = if wanted { "up" } else { "down" };
        let result = link::set_up(self.socket, self.link.index, wanted, self.deadline);
        if self.done("up", word.to_owned(), result) {
            self.link.flags ^= IFF_UP;
        }
    }
}

fn link_request(index: u32, attribute: LinkAttribute) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(attribute);
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}
