//! One look at the host: links, routes, sysfs → devices.

use super::sysfs::Sysfs;
use super::{Lent, Scan};
use crate::netdev::host_state::Snapshot;

/// Builds the devices of this node from what was read.
///
/// `snapshot` is an error text where links, addresses or routes could not be read: then `previous` is what stays, nothing new is
/// offered, and the text is in [`Scan::problems`]. `lent` devices are always there, with the attributes they had.
#[must_use]
pub fn build(snapshot: Result<&Snapshot, String>, sysfs: &Sysfs, lent: &[Lent], previous: Option<&Scan>) -> Scan {
    let _ = (snapshot, sysfs, lent, previous);
    todo!()
}
