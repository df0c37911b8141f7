//! DHCPv4 (RFC 2131): a lease for a link, its renewal, and giving it back. Nothing here knows Kubernetes.
//!
//! A link that has no address yet can't speak through the kernel's IP, and on the host it must not get one. So everything but a
//! renewal is sent, and everything is heard, on a packet socket of the link. `docs/dependencies.md` says why no crate does this.

mod client;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod lease;
mod message;
mod socket;
mod timing;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub use client::{Client, DhcpError, Identity, Port};
pub use lease::{Lease, Refused, StaticRoute};
pub use timing::{State, anew, first, retry, state};

/// A moment, by the clock that goes on over restarts of this process and while the machine sleeps, and by the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Milliseconds since the machine was booted (`CLOCK_BOOTTIME`).
    pub boot_ms: u64,
    /// Milliseconds since 1970, for people.
    pub unix_ms: u64,
}

impl Moment {
    /// Now. A clock that can't be read, which Linux does not know, counts as 0.
    #[must_use]
    pub fn now() -> Self {
        let boot = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self { boot_ms: ms(boot), unix_ms: ms(unix) }
    }
}

/// A number that nobody on the network can guess: the keys of `RandomState` come from the system.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
