//! Per-link sysctls: `net/{ipv4,ipv6}/{conf,neigh}/<link>/*`. A move to another namespace resets them.
//!
//! `/proc/sys/net` shows the namespace of the calling *thread*: call these inside [`crate::netns::Netns::run`].

use std::collections::BTreeMap;
use std::io;

/// Reads every per-link sysctl of `link`. Keys are `ipv4/conf/arp_ignore`, `ipv6/neigh/gc_stale_time`, …: the path below
/// `net/` with the link's name left out. Those that can't be read or written are left out.
///
/// # Errors
/// When `/proc/sys/net` is not there. A family that is off (no IPv6) is no error.
pub fn read_all(link: &str) -> io::Result<BTreeMap<String, String>> {
    let _ = link;
    todo!()
}

/// Writes one sysctl, key as in [`read_all`].
///
/// # Errors
/// The system's error (`EACCES` on a read-only `/proc/sys`, `EINVAL` for a value out of range).
pub fn write(link: &str, key: &str, value: &str) -> io::Result<()> {
    let _ = (link, key, value);
    todo!()
}

/// Writes those of `wanted` whose current value differs and returns what could not be written.
pub fn restore(link: &str, wanted: &BTreeMap<String, String>) -> Vec<(String, io::Error)> {
    let _ = (link, wanted);
    todo!()
}
