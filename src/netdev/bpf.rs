//! eBPF programs that sit on a link: which there are, taking them off, putting them back.
//!
//! A move to another namespace takes a link's ingress and clsact disciplines away and so every filter on them; programs of TCX and XDP
//! stay on the link. Numbers of programs and links are the whole system's, but a link of a program tells only the index of its network
//! link, which another link has in another namespace: what is on a link is asked of the link.

mod filter;
mod give_back;
pub mod pins;
mod read;
pub mod sys;
mod take_off;
mod xdp;

use std::fmt;
use std::os::fd::AsFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use filter::Filter;
pub use give_back::give_back;
pub use read::{glance, read};
pub use take_off::{TakeOffError, take_off, take_off_others};
pub use xdp::{IFLA_XDP, Xdp};

/// A loaded program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its number, as long as it is loaded.
    pub id: u32,
    /// Its name, up to 15 bytes; may be empty.
    #[serde(default)]
    pub name: String,
    /// Hash of its instructions, as hex; empty when it could not be looked at.
    #[serde(default)]
    pub tag: String,
}

impl Program {
    /// Whether `program` is this one: numbers are given again, though not soon.
    #[must_use]
    pub fn is(&self, program: &impl AsFd) -> bool {
        sys::program_info(program)
            .is_ok_and(|info| info.id == self.id && (self.tag.is_empty() || read::named(info).tag == self.tag))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() { write!(f, "program {}", self.id) } else { write!(f, "{} (program {})", self.name, self.id) }
    }
}

/// Where on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Place {
    /// TCX, what comes in.
    TcxIngress,
    /// TCX, what goes out.
    TcxEgress,
    /// XDP in the driver.
    XdpNative,
    /// XDP in the kernel's own receive path (`XDP_FLAGS_SKB_MODE`).
    XdpGeneric,
    /// XDP in the NIC.
    XdpOffload,
}

impl Place {
    /// `enum bpf_attach_type` of TCX; none for XDP.
    const fn tcx(self) -> Option<u32> {
        match self {
            Self::TcxIngress => Some(sys::TCX_INGRESS),
            Self::TcxEgress => Some(sys::TCX_EGRESS),
            Self::XdpNative | Self::XdpGeneric | Self::XdpOffload => None,
        }
    }

    /// `XDP_FLAGS_*_MODE`, `linux/if_link.h`; 0 for TCX.
    const fn xdp_flags(self) -> u32 {
        match self {
            Self::TcxIngress | Self::TcxEgress => 0,
            Self::XdpGeneric => 1 << 1,
            Self::XdpNative => 1 << 2,
            Self::XdpOffload => 1 << 3,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TcxIngress => "tcx ingress",
            Self::TcxEgress => "tcx egress",
            Self::XdpNative => "xdp",
            Self::XdpGeneric => "xdp generic",
            Self::XdpOffload => "xdp offload",
        })
    }
}

/// What keeps a program on the link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Holder {
    /// Nothing but the link itself.
    Direct,
    /// A link of the program, for as long as a file or a process holds that.
    #[serde(rename_all = "camelCase")]
    Link {
        /// Its number.
        id: u32,
        /// Files of a bpffs that hold it; none: a process does.
        #[serde(default)]
        pins: Vec<PathBuf>,
    },
    /// It can't be told which, and why.
    Unclear(String),
}

/// A program of TCX or XDP on a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Where.
    pub place: Place,
    /// Which.
    pub program: Program,
    /// By what.
    pub holder: Holder,
}

impl Attached {
    /// Whether both are the same program at the same place.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.place == other.place && self.program.id == other.program.id
    }
}

impl fmt::Display for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.place, self.program)?;
        match &self.holder {
            Holder::Direct => Ok(()),
            Holder::Unclear(_) => f.write_str(" by a link"),
            Holder::Link { pins, .. } if pins.is_empty() => f.write_str(" by a link of a process"),
            Holder::Link { pins, .. } => {
                let pins: Vec<String> = pins.iter().map(|pin| pin.display().to_string()).collect();
                write!(f, " by the link {}", pins.join(", "))
            }
        }
    }
}

/// All eBPF of a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Programs {
    /// Programs of TCX and XDP; those of one place in the order in which they run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attached: Vec<Attached>,
    /// Filters with programs on the ingress or clsact discipline.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub filters: Vec<Filter>,
    /// Other filters there, which we can't make again; in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// What could not be looked at, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unread: Option<String>,
}

impl Programs {
    /// Whether there is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Everything that is not wanted on a link without eBPF, in words.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        self.attached.iter().map(ToString::to_string).chain(self.filters.iter().map(ToString::to_string)).collect()
    }

    /// The programs to be kept loaded while the link is away: those of its filters, and, where `all` are taken off, the others too.
    pub fn to_keep(&self, all: bool) -> impl Iterator<Item = &Program> {
        let attached = self.attached.iter().filter(move |_| all).map(|attached| &attached.program);
        attached.chain(self.filters.iter().filter_map(|filter| filter.program.as_ref()))
    }

    /// Why the programs can't all be taken off the link, where they can't.
    #[must_use]
    pub fn why_not_off(&self) -> Option<String> {
        let unclear = self.attached.iter().find_map(|attached| match &attached.holder {
            Holder::Unclear(why) => Some(format!("{attached}: {why}")),
            Holder::Direct | Holder::Link { .. } => None,
        });
        self.unread.clone().or(unclear)
    }
}
