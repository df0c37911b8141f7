//! Putting programs back on a link that is on the host again.

use std::fmt::Display;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::super::host_state::RestoreReport;
use super::super::{Qdisc, link, qdisc};
use super::{Attached, Filter, Holder, Programs, filter, pins, read, sys, xdp};
use crate::crash;
use crate::netlink::{NetlinkError, RouteSocket};

/// Puts what `programs` records back on the link with `index`, whose disciplines are back already: the filters, which the move took
/// away, and where `all` were taken off, those of TCX and XDP. `open` gives a program that was kept. Twice changes nothing. Call it on
/// a thread in the link's namespace.
pub fn give_back<'a>(
    socket: &mut RouteSocket,
    index: u32,
    programs: &Programs,
    all: bool,
    open: impl Fn(u32) -> Option<&'a OwnedFd>,
    deadline: Instant,
    report: &mut RestoreReport,
) {
    if programs.is_empty() {
        return;
    }
    let now = match look(socket, index, deadline) {
        Ok(now) => now,
        Err(error) => return report.failed.push(("eBPF programs".to_owned(), error.to_string())),
    };
    let lost: Vec<&String> = programs.others.iter().filter(|other| !now.others.contains(other)).collect();
    let mut work = Work { socket, index, now, open, deadline, report };
    for filter in &programs.filters {
        work.filter(filter);
    }
    for other in lost {
        work.failed(other, "filters of other kinds than bpf, and those with actions, are not recorded; add it again");
    }
    for attached in programs.attached.iter().filter(|_| all) {
        work.attached(attached);
    }
}

fn look(socket: &mut RouteSocket, index: u32, deadline: Instant) -> Result<Programs, NetlinkError> {
    let qdiscs: Vec<Qdisc> = qdisc::list(socket, deadline)?.into_iter().filter(|(i, _)| *i == index).map(|(_, q)| q).collect();
    let link = link::by_index(socket, index, deadline)?;
    Ok(link.map(|link| read::look(&link, &qdiscs, deadline)).unwrap_or_default())
}

/// One link whose programs are put back. `now` is what was on it when that began.
struct Work<'a, F> {
    socket: &'a mut RouteSocket,
    index: u32,
    now: Programs,
    open: F,
    deadline: Instant,
    report: &'a mut RestoreReport,
}

impl<'a, F: Fn(u32) -> Option<&'a OwnedFd>> Work<'_, F> {
    fn failed(&mut self, what: &impl Display, why: impl Display) {
        self.report.failed.push((what.to_string(), why.to_string()));
    }

    fn done(&mut self, what: &impl Display, result: Result<(), impl Display>) {
        match result {
            Ok(()) => self.report.restored.push(what.to_string()),
            Err(why) => self.failed(what, why),
        }
        crash::point("unprepare: program attached");
    }

    /// The program, which was kept.
    fn program(&mut self, what: &impl Display, id: u32) -> Option<&'a OwnedFd> {
        let found = (self.open)(id);
        if found.is_none() {
            self.failed(what, "its program is not loaded any more: the agent could not keep it (is a bpffs mounted?)");
        }
        found
    }

    fn filter(&mut self, wanted: &Filter) {
        if !wanted.is_sound() {
            return self.failed(wanted, "the record is damaged here; it was left out");
        }
        match self.now.filters.iter().find(|there| there.key() == wanted.key()) {
            Some(there) if there == wanted => return,
            Some(there) => return self.report.respected.push(format!("{wanted} is now {there}")),
            None => {}
        }
        let program = match &wanted.program {
            None => None,
            Some(program) => match self.program(wanted, program.id) {
                None => return,
                found => found,
            },
        };
        let result = self.socket.request(filter::add_request(self.index, wanted, program), self.deadline);
        self.done(wanted, result);
    }

    fn attached(&mut self, wanted: &Attached) {
        // A link that was made anew, but whose file is not in its place yet: the agent was killed there.
        if let Holder::Link { pins, .. } = &wanted.holder {
            pins.iter().for_each(|pin| self.finish(wanted, pin));
        }
        if self.now.attached.iter().any(|there| there.is_like(wanted)) {
            return;
        }
        match &wanted.holder {
            Holder::Direct => {
                let Some(program) = self.program(wanted, wanted.program.id) else { return };
                let result = match wanted.place.tcx() {
                    Some(attach_type) => sys::attach(program, self.index, attach_type).map_err(|error| error.to_string()),
                    None => {
                        let request = xdp::attach_request(self.index, wanted.place, program);
                        self.socket.request(request, self.deadline).map_err(|error| error.to_string())
                    }
                };
                self.done(wanted, result);
            }
            Holder::Link { id, pins } => self.link(wanted, *id, pins),
            Holder::Unclear(why) => self.failed(wanted, why),
        }
    }

    /// The old link serves no purpose any more: a new one takes its place in its files, unless somebody else put another one there.
    fn link(&mut self, wanted: &Attached, id: u32, pins: &[PathBuf]) {
        if pins.is_empty() {
            return self.failed(
                wanted,
                "no file holds this link, so a new one would be nobody's; the program's owner has to attach it again",
            );
        }
        let ours: Vec<&PathBuf> = pins.iter().filter(|pin| pins::link_at(pin).is_some_and(|info| info.id == id)).collect();
        if ours.is_empty() {
            return self
                .report
                .respected
                .push(format!("{wanted}: its file was taken away or replaced meanwhile; it stays detached"));
        }
        let Some(program) = self.program(wanted, wanted.program.id) else { return };
        let attach_type = wanted.place.tcx().unwrap_or(sys::XDP);
        let made = sys::create_link(program, self.index, attach_type, wanted.place.xdp_flags())
            .and_then(|link| ours.iter().try_for_each(|pin| pins::replace(&link, pin)));
        self.done(wanted, made);
    }

    fn finish(&mut self, wanted: &Attached, pin: &Path) {
        let new = pins::temporary(pin);
        let Some(info) = pins::link_at(&new) else { return };
        let is_ours = (info.index, info.program) == (self.index, wanted.program.id);
        let result: io::Result<()> = if is_ours { fs::rename(&new, pin) } else { fs::remove_file(&new) };
        if let Err(error) = result {
            self.failed(wanted, format!("{}: {error}", new.display()));
        }
    }
}
