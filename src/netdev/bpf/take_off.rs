//! Taking programs off a link.

use std::fmt::Display;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::super::Link;
use super::{Attached, Holder, Programs, read, sys, xdp};
use crate::crash;
use crate::netlink::RouteSocket;

/// Programs could not be taken off a link.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct TakeOffError {
    /// Which.
    pub what: String,
    /// Why.
    pub why: String,
}

fn failed(what: &impl Display, why: impl Display) -> TakeOffError {
    TakeOffError { what: what.to_string(), why: why.to_string() }
}

/// Takes the programs of TCX and XDP that are recorded in `programs` off `link`; those that are off already are fine. `open` gives a
/// program by its number. Filters go with the move of the link. Call it on a thread in the link's namespace.
///
/// # Errors
/// When one can't be taken off, or one is there that is not recorded: whoever attached it just now will do so again.
pub fn take_off<'a>(
    socket: &mut RouteSocket,
    link: &Link,
    programs: &Programs,
    open: impl Fn(u32) -> Option<&'a OwnedFd>,
    deadline: Instant,
) -> Result<(), TakeOffError> {
    let now = read::look(link, &[], deadline);
    if let Some(why) = now.why_not_off() {
        return Err(failed(&"looking at eBPF programs", why));
    }
    if let Some(new) = now.attached.iter().find(|new| !programs.attached.iter().any(|known| known.is_like(new))) {
        return Err(failed(
            new,
            "somebody attached it since the link was looked at; interface.disableEbpfPrograms can't keep it off",
        ));
    }
    for attached in &now.attached {
        let program = open(attached.program.id).ok_or_else(|| failed(attached, "its program could not be opened"))?;
        take_off_one(socket, link.index, attached, program, deadline).map_err(|error| failed(attached, error))?;
        crash::point("prepare: program detached");
    }
    Ok(())
}

/// Takes programs of TCX and XDP off `link` that are not among `known`: whoever had the link attached them, and they would go with it.
/// Gives which, and what became of each. Call it on a thread in the link's namespace.
pub fn take_off_others(
    socket: &mut RouteSocket,
    link: &Link,
    known: &[Attached],
    deadline: Instant,
) -> Vec<(Attached, io::Result<()>)> {
    let others =
        read::look(link, &[], deadline).attached.into_iter().filter(|other| !known.iter().any(|known| known.is_like(other)));
    let mut take = |other: Attached| {
        let program = sys::program_by_id(other.program.id);
        let result = program.and_then(|program| take_off_one(socket, link.index, &other, &program, deadline));
        (other, result)
    };
    others.map(&mut take).collect()
}

/// One that is gone already is fine.
fn take_off_one(
    socket: &mut RouteSocket,
    index: u32,
    attached: &Attached,
    program: &OwnedFd,
    deadline: Instant,
) -> io::Result<()> {
    let result = match (&attached.holder, attached.place.tcx()) {
        (Holder::Unclear(why), _) => Err(io::Error::other(why.clone())),
        (Holder::Link { id, .. }, _) => take_off_link(index, attached, *id),
        (Holder::Direct, Some(attach_type)) => sys::detach(program, index, attach_type),
        (Holder::Direct, None) => {
            let request = xdp::detach_request(index, attached.place, program);
            socket.request(request, deadline).map_err(io::Error::other)
        }
    };
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

/// The number is the whole system's: what is behind it must be what was asked for.
fn take_off_link(index: u32, attached: &Attached, id: u32) -> io::Result<()> {
    let fd = sys::link_by_id(id)?;
    let info = sys::link_info(&fd)?;
    if (info.index, info.program) != (index, attached.program.id) {
        return Err(io::Error::from_raw_os_error(libc::ENOENT));
    }
    sys::detach_link(&fd)
}
