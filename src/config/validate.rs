//! Rules over values and across fields.

mod child;
mod ethtool;
mod interface;
mod link;
mod rdma;
mod routing;
mod sysctls;
mod vf;

use std::net::IpAddr;

use super::{FieldError, NetworkConfig};
use crate::netdev::LinkAddress;

/// Most elements of `interface.addresses`.
pub(super) const ADDRESSES_MAX: usize = 64;
/// Most elements of `routes`, `rules`, `neighbors` and the maps of `ethtool`.
pub(super) const LIST_MAX: usize = 256;
/// The kernel keeps sizes in a signed 32-bit number.
const SIZE_MAX: u32 = i32::MAX as u32;
/// Longest `profile`, in bytes: a Kubernetes object's name.
const PROFILE_MAX: usize = 253;

/// Collects what is wrong.
#[derive(Default)]
struct Faults(Vec<FieldError>);

impl Faults {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(FieldError::new(path, message));
    }

    /// Adds `message` when there is one.
    fn check(&mut self, path: impl Into<String>, message: Option<impl Into<String>>) {
        if let Some(message) = message {
            self.add(path, message);
        }
    }

    /// Checks a list's length. False when it is too long to look at its elements.
    fn length(&mut self, path: &str, len: usize, max: usize) -> bool {
        if len > max {
            self.add(path, format!("has {len} elements; at most {max} are allowed"));
        }
        len <= max
    }
}

impl NetworkConfig {
    /// Everything that is wrong with this configuration, each fault with its path. Empty: nothing is.
    #[must_use]
    pub fn validate(&self) -> Vec<FieldError> {
        let mut faults = Faults::default();
        if self.profile.as_ref().is_some_and(|p| p.is_empty() || p.len() > PROFILE_MAX) {
            faults.add("profile", format!("must have 1 to {PROFILE_MAX} bytes"));
        }
        if let Some(interface) = &self.interface {
            interface::check(interface, &mut faults);
            link::check(interface, &mut faults);
            sysctls::check(interface, &mut faults);
        }
        routing::routes(self.routes.as_deref().unwrap_or_default(), &mut faults);
        let vrf = self.interface.as_ref().is_some_and(|i| i.vrf.is_some());
        routing::rules(self.rules.as_deref().unwrap_or_default(), vrf, &mut faults);
        routing::neighbors(self.neighbors.as_deref().unwrap_or_default(), &mut faults);
        link::without_ipv6(self, &mut faults);
        if let Some(ethtool) = &self.ethtool {
            ethtool::check(ethtool, &mut faults);
        }
        child::check_device(self, &mut faults);
        if let Some(vf) = &self.vf {
            vf::check(vf, &mut faults);
        }
        if let Some(rdma) = &self.rdma {
            rdma::check(rdma, &mut faults);
        }
        faults.0
    }
}

/// Why `ip` can't be the address of one host; none when it can.
fn not_one_host(ip: IpAddr) -> Option<&'static str> {
    match ip {
        _ if ip.is_unspecified() => Some("is the unspecified address"),
        _ if ip.is_multicast() => Some("is a multicast address"),
        _ if ip.is_loopback() => Some("is a loopback address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("is the broadcast address"),
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Some("is an IPv4 address in IPv6 form; write it as IPv4"),
        _ => None,
    }
}

/// Why `address` can't be a link's; none when it can. `unicast`: a group address can't either.
fn bad_link_address(address: &LinkAddress, unicast: bool) -> Option<String> {
    let bytes = address.bytes();
    // Ethernet, EUI-64, InfiniBand. The group bit is Ethernet's.
    if ![6, 8, 20].contains(&bytes.len()) {
        return Some(format!("has {} bytes; link-layer addresses have 6, 8 or 20", bytes.len()));
    }
    if bytes.iter().all(|b| *b == 0) {
        return Some("is all zero".into());
    }
    if unicast && bytes.len() == 6 && bytes[0] & 1 == 1 {
        return Some("is a multicast address; the lowest bit of the first byte must be 0".into());
    }
    None
}
