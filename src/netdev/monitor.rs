//! Tells when links, addresses or routes of a namespace change, without saying how: whoever listens looks again.

use crate::netlink::NetlinkError;
use crate::netns::Netns;

/// Groups a monitor can listen to (`RTNLGRP_*`, `linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// `RTNLGRP_LINK`.
    Link,
    /// `RTNLGRP_IPV4_ROUTE` and `RTNLGRP_IPV6_ROUTE`.
    Route,
    /// `RTNLGRP_IPV4_IFADDR` and `RTNLGRP_IPV6_IFADDR`.
    Address,
}

/// Why [`Monitor::changed`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// At least one message came; everything that was queued has been read.
    Events,
    /// The kernel dropped messages (`ENOBUFS`): look at everything again.
    Overrun,
}

/// A multicast subscription in one namespace.
#[derive(Debug)]
pub struct Monitor {}

impl Monitor {
    /// Subscribes, with a receive buffer of 4 MiB where the system allows it.
    ///
    /// # Errors
    /// When the socket can't be made in `netns`.
    pub fn open(netns: &Netns, groups: &[Group]) -> Result<Self, NetlinkError> {
        let _ = (netns, groups);
        todo!()
    }

    /// Waits until something changed, and drains what is queued. Safe to drop at any time (nothing is lost).
    ///
    /// # Errors
    /// When the socket fails for another reason than an overrun. Open a new monitor then.
    pub async fn changed(&mut self) -> Result<Change, NetlinkError> {
        todo!()
    }
}
