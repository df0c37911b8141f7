//! The addresses that the link has in the pod.

use std::net::IpAddr;

use super::{LeftOut, dhcp};
use crate::config::InterfaceConfig;
use crate::dhcp::Lease;
use crate::netdev::address::{FOREVER, IFA_F_NODAD, IFA_F_PERMANENT, SCOPE_UNIVERSE};
use crate::netdev::{Address, HostState};

/// `IFA_F_TEMPORARY` of IPv6 (RFC 8981), `linux/if_addr.h`. The same bit is `IFA_F_SECONDARY` in IPv4.
const IFA_F_TEMPORARY: u32 = 0x01;
/// `IFA_F_DADFAILED`, `linux/if_addr.h`: somebody else has the address.
const IFA_F_DADFAILED: u32 = 0x08;
/// `IFA_F_MANAGETEMPADDR`, `linux/if_addr.h`: the kernel sets it on what it made from a router advertisement.
const IFA_F_MANAGETEMPADDR: u32 = 0x100;
/// `IFA_F_NOPREFIXROUTE`, `linux/if_addr.h`: no connected route.
pub(super) const IFA_F_NOPREFIXROUTE: u32 = 0x200;
/// `IFA_F_MCAUTOJOIN`, `linux/if_addr.h`.
const IFA_F_MCAUTOJOIN: u32 = 0x400;
/// `IFAPROT_KERNEL_RA`, `linux/if_addr.h`.
const IFAPROT_KERNEL_RA: u8 = 2;
/// Most addresses that are copied from the host.
const COPIED_MAX: usize = 256;

/// The configured addresses, or the lease's, or the host's where none are configured. An empty list is a configuration: no addresses.
pub(super) fn of_pod(
    interface: &InterfaceConfig,
    host: &HostState,
    lease: Option<&Lease>,
    copies: bool,
    left_out: &mut LeftOut,
) -> Vec<Address> {
    if interface.dhcp == Some(true) {
        return lease.map(dhcp::address).into_iter().collect();
    }
    if let Some(configured) = &interface.addresses {
        let dad = interface.ipv6.and_then(|ipv6| ipv6.dad) == Some(true);
        let address = |net: &ipnet::IpNet| Address::permanent(net.addr(), net.prefix_len());
        return configured.iter().map(address).map(|a| if dad { a } else { without_dad(a) }).collect();
    }
    if !copies {
        return Vec::new();
    }
    let ipv6 = interface.ipv6_enabled() != Some(false);
    let mut copied: Vec<Address> = host.addresses.iter().filter_map(|address| copy(address, ipv6, left_out)).collect();
    left_out.cut(&mut copied, COPIED_MAX, "addresses");
    copied
}

/// The host's address for the pod; none when it does not come along. The label goes: it belongs to the link's host name.
fn copy(address: &Address, ipv6: bool, left_out: &mut LeftOut) -> Option<Address> {
    let text = format!("address {}/{}", address.ip, address.prefix_len);
    let link_local = matches!(address.ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    if link_local {
        // The kernel makes a new one in the pod.
        return None;
    }
    let off = (address.ip.is_ipv6() && !ipv6).then_some("the configuration turns IPv6 off on the link");
    if let Some(why) = off.or_else(|| not_for_pod(address)) {
        left_out.add(format!("{text}: {why}"));
        return None;
    }
    if address.valid_lifetime != FOREVER {
        left_out.add(format!("renewal of {text}: it ends after {} s and nobody renews it in the pod", address.valid_lifetime));
    }
    let permanent = if address.valid_lifetime == FOREVER { IFA_F_PERMANENT } else { 0 };
    let flags = address.flags & (IFA_F_NOPREFIXROUTE | IFA_F_MCAUTOJOIN) | permanent;
    Some(without_dad(Address { label: None, flags, ..address.clone() }))
}

fn not_for_pod(address: &Address) -> Option<&'static str> {
    let ipv6 = address.ip.is_ipv6();
    if address.scope != SCOPE_UNIVERSE {
        return Some("its scope is not global");
    }
    if ipv6 && address.flags & IFA_F_TEMPORARY != 0 {
        return Some("it is a temporary (privacy) address");
    }
    if ipv6 && (address.flags & IFA_F_MANAGETEMPADDR != 0 || address.proto == Some(IFAPROT_KERNEL_RA)) {
        return Some("the kernel made it from a router advertisement, and makes one in the pod if the router says so");
    }
    (ipv6 && address.flags & IFA_F_DADFAILED != 0).then_some("somebody else on the network has it (DAD failed)")
}

/// Without duplicate address detection, which takes 1 to 2 s: the host has checked the address, or the operator has given it.
fn without_dad(mut address: Address) -> Address {
    if address.ip.is_ipv6() {
        address.flags |= IFA_F_NODAD;
    }
    address
}

/// Whether the kernel asks the network for other users of the address before it is used.
pub(super) fn has_dad(address: &Address) -> bool {
    address.ip.is_ipv6() && address.flags & IFA_F_NODAD == 0
}

/// Whether the address has to be added after the link is up. When an IPv6 link comes up, the kernel makes the connected routes
/// of its permanent addresses only.
pub(super) fn needs_link_up(address: &Address) -> bool {
    address.ip.is_ipv6() && address.flags & IFA_F_PERMANENT == 0
}
