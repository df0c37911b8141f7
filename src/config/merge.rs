//! One configuration on top of another.

use std::collections::BTreeMap;

use super::{EthtoolConfig, InterfaceConfig, NetworkConfig, VrfConfig};

impl NetworkConfig {
    /// `over` on top of `self`, field by field: what `over` names wins; a list that `over` names replaces the whole list; maps
    /// (`ethtool`) are merged key by key.
    #[must_use]
    pub fn merged_with(self, over: Self) -> Self {
        Self {
            profile: over.profile.or(self.profile),
            interface: both(self.interface, over.interface, interface),
            routes: over.routes.or(self.routes),
            rules: over.rules.or(self.rules),
            neighbors: over.neighbors.or(self.neighbors),
            ethtool: both(self.ethtool, over.ethtool, |base, over| EthtoolConfig {
                features: both(base.features, over.features, map),
                private_flags: both(base.private_flags, over.private_flags, map),
            }),
        }
    }
}

fn both<T>(base: Option<T>, over: Option<T>, merge: impl FnOnce(T, T) -> T) -> Option<T> {
    match (base, over) {
        (Some(base), Some(over)) => Some(merge(base, over)),
        (base, over) => over.or(base),
    }
}

fn map(mut base: BTreeMap<String, bool>, over: BTreeMap<String, bool>) -> BTreeMap<String, bool> {
    base.extend(over);
    base
}

fn interface(base: InterfaceConfig, over: InterfaceConfig) -> InterfaceConfig {
    InterfaceConfig {
        name: over.name.or(base.name),
        addresses: over.addresses.or(base.addresses),
        dhcp: over.dhcp.or(base.dhcp),
        mtu: over.mtu.or(base.mtu),
        hardware_addr: over.hardware_addr.or(base.hardware_addr),
        gso_max_size: over.gso_max_size.or(base.gso_max_size),
        gro_max_size: over.gro_max_size.or(base.gro_max_size),
        gso_ipv4_max_size: over.gso_ipv4_max_size.or(base.gso_ipv4_max_size),
        gro_ipv4_max_size: over.gro_ipv4_max_size.or(base.gro_ipv4_max_size),
        disable_ebpf_programs: over.disable_ebpf_programs.or(base.disable_ebpf_programs),
        forwarding: over.forwarding.or(base.forwarding),
        arp_ignore: over.arp_ignore.or(base.arp_ignore),
        arp_announce: over.arp_announce.or(base.arp_announce),
        vrf: both(base.vrf, over.vrf, |base, over| VrfConfig { name: over.name, table: over.table.or(base.table) }),
    }
}
