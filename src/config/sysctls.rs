//! The per-link sysctls that a claim may set, and the values they take.
//!
//! They change the pod's own link only. Left out: those the kernel does not let anybody write, or that do nothing; those that undo
//! the host's IPsec policy (`disable_policy`, `disable_xfrm`); segment routing; `mtu`, which is `interface.mtu`; and times that have
//! an exact form (`base_reachable_time_ms` for `base_reachable_time`).

use std::net::Ipv6Addr;

use super::{AddrGenMode, InterfaceConfig};

/// What a sysctl takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// A number from the first to the second.
    Number(i64, i64),
    /// An IPv6 address.
    Address,
}

use Takes::{Address, Number};

const SWITCH: Takes = Number(0, 1);
/// The kernel's `int`.
const INT: Takes = Number(0, i32::MAX as i64);
/// `unsigned int`.
const UNSIGNED: Takes = Number(1, u32::MAX as i64);

/// `net/ipv4/conf/<link>/` (`net/ipv4/devinet.c`).
const IPV4: &[(&str, Takes)] = &[
    ("accept_local", SWITCH),
    ("accept_redirects", SWITCH),
    ("accept_source_route", SWITCH),
    ("arp_accept", Number(0, 2)),
    ("arp_announce", Number(0, 2)),
    ("arp_evict_nocarrier", SWITCH),
    ("arp_filter", SWITCH),
    ("arp_ignore", Number(0, 8)),
    ("arp_notify", SWITCH),
    ("bc_forwarding", SWITCH),
    ("drop_gratuitous_arp", SWITCH),
    ("drop_unicast_in_l2_multicast", SWITCH),
    ("force_igmp_version", Number(0, 3)),
    ("forwarding", SWITCH),
    ("igmpv2_unsolicited_report_interval", INT),
    ("igmpv3_unsolicited_report_interval", INT),
    ("ignore_routes_with_linkdown", SWITCH),
    ("log_martians", SWITCH),
    ("medium_id", Number(-1, i32::MAX as i64)),
    ("promote_secondaries", SWITCH),
    ("proxy_arp", SWITCH),
    ("proxy_arp_pvlan", SWITCH),
    ("route_localnet", SWITCH),
    ("rp_filter", Number(0, 2)),
    ("secure_redirects", SWITCH),
    ("send_redirects", SWITCH),
    ("shared_media", SWITCH),
    ("src_valid_mark", SWITCH),
];

/// `net/ipv6/conf/<link>/` (`net/ipv6/addrconf.c`).
const IPV6: &[(&str, Takes)] = &[
    ("accept_dad", Number(0, 2)),
    ("accept_ra", Number(0, 2)),
    ("accept_ra_defrtr", SWITCH),
    ("accept_ra_from_local", SWITCH),
    ("accept_ra_min_hop_limit", Number(0, 255)),
    ("accept_ra_min_lft", INT),
    ("accept_ra_mtu", SWITCH),
    ("accept_ra_pinfo", SWITCH),
    ("accept_ra_rt_info_max_plen", Number(0, 128)),
    ("accept_ra_rt_info_min_plen", Number(0, 128)),
    ("accept_ra_rtr_pref", SWITCH),
    ("accept_redirects", SWITCH),
    ("accept_source_route", Number(-1, 1)),
    ("accept_untracked_na", Number(0, 2)),
    ("addr_gen_mode", Number(0, 3)),
    ("autoconf", SWITCH),
    ("dad_transmits", Number(0, 255)),
    ("disable_ipv6", SWITCH),
    ("drop_unicast_in_l2_multicast", SWITCH),
    ("drop_unsolicited_na", SWITCH),
    ("enhanced_dad", SWITCH),
    ("force_mld_version", Number(0, 2)),
    ("force_tllao", SWITCH),
    ("forwarding", Number(0, 2)),
    ("hop_limit", Number(1, 255)),
    ("ignore_routes_with_linkdown", SWITCH),
    ("keep_addr_on_down", Number(-1, 1)),
    ("max_addresses", INT),
    ("max_desync_factor", INT),
    ("mldv1_unsolicited_report_interval", INT),
    ("mldv2_unsolicited_report_interval", INT),
    ("ndisc_evict_nocarrier", SWITCH),
    ("ndisc_notify", SWITCH),
    ("ndisc_tclass", Number(0, 255)),
    ("optimistic_dad", SWITCH),
    ("proxy_ndp", SWITCH),
    ("ra_defrtr_metric", UNSIGNED),
    ("regen_max_retry", INT),
    ("router_probe_interval", INT),
    ("router_solicitation_delay", INT),
    ("router_solicitation_interval", INT),
    ("router_solicitation_max_interval", INT),
    ("router_solicitations", Number(-1, i32::MAX as i64)),
    ("stable_secret", Address),
    ("suppress_frag_ndisc", SWITCH),
    ("temp_prefered_lft", INT),
    ("temp_valid_lft", INT),
    ("use_oif_addrs_only", SWITCH),
    ("use_optimistic", SWITCH),
    ("use_tempaddr", Number(-1, 2)),
];

/// `net/{ipv4,ipv6}/neigh/<link>/` (`net/core/neighbour.c`).
const NEIGH: &[(&str, Takes)] = &[
    ("anycast_delay", INT),
    ("app_solicit", INT),
    ("base_reachable_time_ms", INT),
    ("delay_first_probe_time", INT),
    ("gc_stale_time", INT),
    ("interval_probe_time_ms", Number(1, i32::MAX as i64)),
    ("locktime", INT),
    ("mcast_resolicit", INT),
    ("mcast_solicit", INT),
    ("proxy_delay", INT),
    ("proxy_qlen", INT),
    ("retrans_time_ms", INT),
    ("ucast_solicit", INT),
    ("unres_qlen_bytes", INT),
];

/// Folders as in [`crate::netdev::sysctl`], with what is allowed there.
const FOLDERS: [(&str, &[(&str, Takes)]); 4] =
    [("ipv4/conf", IPV4), ("ipv6/conf", IPV6), ("ipv4/neigh", NEIGH), ("ipv6/neigh", NEIGH)];

/// Longest part of a foreign key in an error, characters.
const SHOWN: usize = 64;

/// Why `key` can't be set to `value`; none when it can.
pub(super) fn refuses(key: &str, value: &str) -> Option<String> {
    let Some((folder, name)) = key.rsplit_once('/') else {
        return Some(format!("is not a key; write one as in ipv4/conf/rp_filter, below {}", folders()));
    };
    let Some((_, names)) = FOLDERS.iter().find(|(allowed, _)| *allowed == folder) else {
        let folder: String = folder.chars().take(SHOWN).collect();
        return Some(format!("{folder:?} is not a folder of per-link sysctls; they are {}", folders()));
    };
    match names.iter().find(|(allowed, _)| *allowed == name) {
        Some((_, takes)) => takes.refuses(value),
        None => Some(format!("may not be set; in {folder} may {}", list(names))),
    }
}

fn folders() -> String {
    FOLDERS.map(|(folder, _)| folder).join(", ")
}

fn list(names: &[(&str, Takes)]) -> String {
    names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

impl Takes {
    fn refuses(self, value: &str) -> Option<String> {
        let shown: String = value.chars().take(SHOWN).collect();
        match self {
            Number(least, most) => {
                let digits = value.strip_prefix('-').unwrap_or(value);
                let is_plain = !digits.is_empty() && digits.len() <= 10 && digits.bytes().all(|b| b.is_ascii_digit());
                let number = value.parse::<i64>().ok().filter(|_| is_plain);
                let fits = number.is_some_and(|n| (least..=most).contains(&n));
                (!fits).then(|| format!("is {shown:?}; must be a number from {least} to {most}"))
            }
            Address => value.parse::<Ipv6Addr>().is_err().then(|| format!("is {shown:?}; must be an IPv6 address")),
        }
    }
}

impl AddrGenMode {
    /// `IN6_ADDR_GEN_MODE_*`, `linux/if_link.h`.
    #[must_use]
    pub const fn value(self) -> u32 {
        match self {
            Self::Eui64 => 0,
            Self::None => 1,
            Self::StablePrivacy => 2,
            Self::Random => 3,
        }
    }
}

/// One sysctl that a field of `interface` sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldSysctl {
    /// Path of the field, for example `interface.arpIgnore`.
    pub field: &'static str,
    /// As in [`crate::netdev::sysctl`].
    pub key: &'static str,
    /// The value.
    pub value: String,
}

impl InterfaceConfig {
    /// What fields other than `sysctls` set.
    #[must_use]
    pub fn field_sysctls(&self) -> Vec<FieldSysctl> {
        let ipv6 = self.ipv6.unwrap_or_default();
        let number = |switch: Option<bool>| switch.map(u32::from);
        let all = [
            ("interface.ipv6.enabled", "ipv6/conf/disable_ipv6", ipv6.enabled.map(|enabled| u32::from(!enabled))),
            ("interface.arpIgnore", "ipv4/conf/arp_ignore", self.arp_ignore),
            ("interface.arpAnnounce", "ipv4/conf/arp_announce", self.arp_announce),
            ("interface.forwarding", "ipv4/conf/forwarding", number(self.forwarding)),
            ("interface.forwarding", "ipv6/conf/forwarding", number(self.forwarding)),
            ("interface.ipv6.acceptRA", "ipv6/conf/accept_ra", ipv6.accept_ra),
            ("interface.ipv6.addrGenMode", "ipv6/conf/addr_gen_mode", ipv6.addr_gen_mode.map(AddrGenMode::value)),
        ];
        let set = all.into_iter().filter_map(|(field, key, value)| Some((field, key, value?)));
        set.map(|(field, key, value)| FieldSysctl { field, key, value: value.to_string() }).collect()
    }

    /// Whether the link shall have IPv6, by `ipv6.enabled` or by `sysctls`; none where neither says so.
    #[must_use]
    pub fn ipv6_enabled(&self) -> Option<bool> {
        let by_sysctl = || self.sysctls.as_ref()?.get("ipv6/conf/disable_ipv6").map(|value| value == "0");
        self.ipv6.and_then(|ipv6| ipv6.enabled).or_else(by_sysctl)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_names_every_allowed_sysctl() {
        let text = include_str!("../../docs/configuration.md");
        for (folder, names) in FOLDERS {
            let is_of_it = |line: &&str| line.split('|').nth(1).is_some_and(|cell| cell.contains(&format!("`{folder}`")));
            let section = text.lines().find(is_of_it).unwrap_or_else(|| panic!("no line for {folder}"));
            for (name, _) in names {
                assert!(section.contains(&format!("`{name}`")), "{folder}/{name} is not in the documentation");
            }
        }
    }

    #[test]
    fn values_are_bounded() {
        for (key, value) in [
            ("ipv4/conf/rp_filter", "2"),
            ("ipv6/conf/use_tempaddr", "-1"),
            ("ipv6/conf/stable_secret", "fd00::1"),
            ("ipv6/neigh/gc_stale_time", "2147483647"),
            ("ipv6/conf/ra_defrtr_metric", "4294967295"),
        ] {
            assert_eq!(refuses(key, value), None, "{key} {value}");
        }
        for (key, value, words) in [
            ("ipv4/conf/rp_filter", "3", "must be a number from 0 to 2"),
            ("ipv4/conf/rp_filter", "", "must be a number"),
            ("ipv4/conf/rp_filter", "+1", "must be a number"),
            ("ipv4/conf/rp_filter", "1\n", "must be a number"),
            ("ipv4/conf/rp_filter", "1 1", "must be a number"),
            ("ipv4/neigh/locktime", "2147483648", "must be a number from 0 to 2147483647"),
            ("ipv4/neigh/locktime", "-1", "must be a number from 0"),
            ("ipv6/conf/stable_secret", "x", "must be an IPv6 address"),
            ("ipv4/conf/nonsense", "1", "may not be set; in ipv4/conf may accept_local, "),
            ("ipv4/conf/disable_xfrm", "1", "may not be set"),
            ("ipv4/conf/../rp_filter", "1", "is not a folder"),
            ("ipv4/tcp_mem", "1", "is not a folder of per-link sysctls"),
            ("rp_filter", "1", "is not a key"),
        ] {
            assert!(refuses(key, value).is_some_and(|why| why.contains(words)), "{key} {value}: {:?}", refuses(key, value));
        }
    }
}
