//! What a lease brings: the address, routes and the MTU.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};

use super::LeftOut;
use crate::dhcp::{Lease, Moment, StaticRoute};
use crate::netdev::address::{FOREVER, IFA_F_PERMANENT, SCOPE_LINK};
use crate::netdev::{Address, HostState, Route};

/// `RTPROT_DHCP`, `linux/rtnetlink.h`.
const PROTO_DHCP: u8 = 16;
/// Metric of these routes, the one that systemd-networkd gives them. What the pod's own network or the claim has to the same
/// destination has less, and so goes first: the pod keeps its default route.
const METRIC: u32 = 1024;

/// The address, for as long as the lease is.
pub(super) fn address(lease: &Lease) -> Address {
    let address = Address::permanent(lease.address.into(), lease.prefix_len);
    if lease.is_forever() {
        return address;
    }
    Address {
        flags: address.flags & !IFA_F_PERMANENT,
        valid_lifetime: lease.lease_seconds,
        preferred_lifetime: lease.lease_seconds,
        ..address
    }
}

/// A planned address as it is to be added now: what is left of the lease it comes from.
pub(crate) fn address_now(planned: &Address, lease: Option<&Lease>, now: Moment) -> Address {
    match lease {
        Some(lease) if planned.ip == IpAddr::V4(lease.address) && planned.valid_lifetime != FOREVER => {
            let left = lease.seconds_left(now);
            Address { valid_lifetime: left, preferred_lifetime: left, ..planned.clone() }
        }
        _ => planned.clone(),
    }
}

/// The lease's address as it is to be added now.
pub(crate) fn leased_address(lease: &Lease, now: Moment) -> Address {
    address_now(&address(lease), Some(lease), now)
}

/// The routes. A router that is in no subnet of the link is used all the same, as the server says.
pub(crate) fn routes(lease: &Lease) -> Vec<Route> {
    let own = Ipv4Net::new(lease.address, lease.prefix_len).unwrap_or_default();
    let on_link = |router: Ipv4Addr| {
        own.contains(&router) || lease.routes.iter().any(|r| r.gateway.is_none() && r.destination.contains(&router))
    };
    let route = |route: &StaticRoute| Route {
        gateway: route.gateway.map(IpAddr::V4),
        onlink: route.gateway.is_some_and(|router| !on_link(router)),
        scope: if route.gateway.is_none() { SCOPE_LINK } else { 0 },
        metric: Some(METRIC),
        protocol: PROTO_DHCP,
        ..Route::to(IpNet::V4(route.destination))
    };
    lease.routes.iter().map(route).collect()
}

/// Whether a route came with a lease.
pub(crate) fn is_leased(route: &Route) -> bool {
    route.protocol == PROTO_DHCP
}

/// The lease's MTU, when it is not the host's and the device can have it.
pub(super) fn mtu(lease: &Lease, host: &HostState, left_out: &mut LeftOut) -> Option<u32> {
    let wanted = u32::from(lease.mtu?);
    let max = host.max_mtu.filter(|m| *m != 0).unwrap_or(u32::MAX);
    if !(host.min_mtu.unwrap_or(0)..=max).contains(&wanted) {
        left_out.add(format!("MTU {wanted} of the DHCP server: the device can't have it"));
        return None;
    }
    (wanted != host.mtu).then_some(wanted)
}
