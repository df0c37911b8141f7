//! Looking at what is on a link.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::time::Instant;

use super::super::{Link, Qdisc};
use super::{Attached, Holder, Place, Program, Programs, filter, pins, sys, xdp};
use crate::netlink::{NetlinkError, RouteSocket};

/// What the kernel answers that has no TCX, or no bpf(2) at all: then there is nothing.
const NO_TCX: [i32; 2] = [libc::EINVAL, libc::ENOSYS];

/// Everything on `link`, whose disciplines are `qdiscs`. Call it on a thread in the link's namespace. What can't be looked at is told in
/// [`Programs::unread`].
#[must_use]
pub fn read(link: &Link, qdiscs: &[Qdisc], deadline: Instant) -> Programs {
    let mut found = look(link, qdiscs, deadline);
    add_pins(&mut found);
    found
}

/// As [`read`], but without the files that hold links.
pub(super) fn look(link: &Link, qdiscs: &[Qdisc], deadline: Instant) -> Programs {
    let mut reader = Reader { index: link.index, deadline, found: Programs::default() };
    reader.tcx(Place::TcxIngress);
    reader.tcx(Place::TcxEgress);
    reader.xdp(link.xdp);
    reader.filters(qdiscs);
    reader.names();
    reader.found
}

/// As [`read`], but without what takes a look at the whole system: XDP, and which link or file holds a program.
#[must_use]
pub fn glance(link: &Link, qdiscs: &[Qdisc], deadline: Instant) -> Programs {
    let mut reader = Reader { index: link.index, deadline, found: Programs::default() };
    reader.tcx(Place::TcxIngress);
    reader.tcx(Place::TcxEgress);
    reader.filters(qdiscs);
    reader.names();
    reader.found
}

struct Reader {
    index: u32,
    deadline: Instant,
    found: Programs,
}

impl Reader {
    fn failed(&mut self, what: &str, why: &impl Display) {
        self.found.unread.get_or_insert_with(|| format!("{what}: {why}"));
    }

    fn tcx(&mut self, place: Place) {
        let Some(attach_type) = place.tcx() else { return };
        match sys::query(self.index, attach_type) {
            Ok(found) => self.found.attached.extend(found.into_iter().map(|(id, link)| Attached {
                place,
                program: unnamed(id),
                holder: if link == 0 { Holder::Direct } else { Holder::Link { id: link, pins: Vec::new() } },
            })),
            Err(error) if error.raw_os_error().is_some_and(|errno| NO_TCX.contains(&errno)) => {}
            Err(error) => self.failed(&format!("asking for {place} programs"), &Denied(error)),
        }
    }

    fn xdp(&mut self, found: xdp::Xdp) {
        for (place, id) in found.programs() {
            let holder = match self.holder_of_xdp(place, id) {
                Ok(holder) => holder,
                Err(why) => {
                    self.failed(&format!("asking for the {place} program"), &why);
                    Holder::Unclear(why)
                }
            };
            self.found.attached.push(Attached { place, program: unnamed(id), holder });
        }
    }

    /// The network link does not tell by which link its program is there, and that one tells only an index, which other namespaces have
    /// too. It must be among those with our index and our program; several of them can't be told apart.
    fn holder_of_xdp(&self, place: Place, id: u32) -> Result<Holder, String> {
        let by_link = RouteSocket::open().and_then(|mut socket| xdp::is_by_link(&mut socket, self.index, place, self.deadline));
        if !by_link.map_err(|error: NetlinkError| error.to_string())? {
            return Ok(Holder::Direct);
        }
        let candidates = xdp_links(self.index, id).map_err(|error| Denied(error).to_string())?;
        Ok(match candidates[..] {
            [id] => Holder::Link { id, pins: Vec::new() },
            [] => Holder::Unclear("its link is not among those of the system".to_owned()),
            _ => Holder::Unclear(format!(
                "{} links of this program are on network links with index {}, in several network namespaces: which is ours can't be told",
                candidates.len(),
                self.index
            )),
        })
    }

    fn filters(&mut self, qdiscs: &[Qdisc]) {
        let parents: &[u32] =
            match qdiscs.iter().map(|qdisc| qdisc.kind.as_str()).find(|kind| ["clsact", "ingress"].contains(kind)) {
                Some("clsact") => &[filter::INGRESS, filter::EGRESS],
                Some(_) => &[filter::INGRESS],
                None => return,
            };
        let listed = RouteSocket::open().and_then(|mut socket| filter::list(&mut socket, self.index, parents, self.deadline));
        match listed {
            Ok((filters, others)) => (self.found.filters, self.found.others) = (filters, others),
            Err(error) => self.failed("listing filters", &error),
        }
    }

    /// Name and tag of each program.
    fn names(&mut self) {
        let mut denied = None;
        let attached = self.found.attached.iter_mut().map(|attached| &mut attached.program);
        for program in attached.chain(self.found.filters.iter_mut().filter_map(|filter| filter.program.as_mut())) {
            match sys::program_by_id(program.id).and_then(|fd| sys::program_info(&fd)) {
                Ok(info) => *program = named(info),
                // Gone in between.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => denied = Some(error),
            }
        }
        if let Some(error) = denied {
            self.failed("opening programs", &Denied(error));
        }
    }
}

fn add_pins(found: &mut Programs) {
    let ids: BTreeSet<u32> = found.attached.iter().filter_map(link_id).collect();
    if ids.is_empty() {
        return;
    }
    let mut pins: BTreeMap<u32, _> = pins::of_links(&ids);
    for attached in &mut found.attached {
        if let Holder::Link { id, pins: files } = &mut attached.holder {
            *files = pins.remove(id).unwrap_or_default();
        }
    }
}

fn link_id(attached: &Attached) -> Option<u32> {
    match &attached.holder {
        Holder::Link { id, .. } => Some(*id),
        Holder::Direct | Holder::Unclear(_) => None,
    }
}

fn unnamed(id: u32) -> Program {
    Program { id, name: String::new(), tag: String::new() }
}

pub(super) fn named(info: sys::ProgramInfo) -> Program {
    let tag = info.tag.iter().map(|byte| format!("{byte:02x}")).collect();
    Program { id: info.id, name: info.name, tag }
}

/// All links of the system that hold this XDP program on a network link with this index.
fn xdp_links(index: u32, program: u32) -> io::Result<Vec<u32>> {
    let (mut found, mut last) = (Vec::new(), 0);
    while let Some(id) = sys::next_link(last)? {
        last = id;
        match sys::link_by_id(id).and_then(|fd| sys::link_info(&fd)) {
            Ok(info) if (info.kind, info.index, info.program) == (sys::LINK_XDP, index, program) => found.push(id),
            // Another one, or gone in between.
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(found)
}

/// An error, with what to do about one of rights.
struct Denied(io::Error);

impl Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_right = matches!(self.0.raw_os_error(), Some(libc::EPERM | libc::EACCES));
        let hint = if is_right {
            " (the agent needs CAP_SYS_ADMIN and CAP_NET_ADMIN, and a seccomp profile that allows bpf)"
        } else {
            ""
        };
        write!(f, "{}{hint}", self.0)
    }
}
