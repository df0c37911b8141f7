//! One configuration on top of another.

use std::collections::BTreeMap;

use super::{
    ChannelsConfig, CoalesceConfig, EthtoolConfig, HostStateConfig, InterfaceConfig, IpoibConfig, Ipv6Config, IpvlanConfig,
    MacvlanConfig, NetworkConfig, PauseConfig, RdmaConfig, RdmaLimits, RingsConfig, VfConfig, VlanConfig, VrfConfig,
};

/// A function that lays one value of a type over another: the `values` that it names win, `objects` are merged field by field by
/// the function named. A field that is forgotten here does not compile.
macro_rules! over {
    ($name:ident: $type:ident { values: [$($value:ident),* $(,)?], objects: [$($object:ident: $merge:expr),* $(,)?] $(,)? }) => {
        fn $name(base: $type, over: $type) -> $type {
            $type {
                $($value: over.$value.or(base.$value),)*
                $($object: both(base.$object, over.$object, $merge),)*
            }
        }
    };
}

impl NetworkConfig {
    /// `over` on top of `self`, field by field: what `over` names wins; a list that `over` names replaces the whole list; maps
    /// (`ethtool.features`, `interface.sysctls`, …) are merged key by key.
    #[must_use]
    pub fn merged_with(self, over: Self) -> Self {
        network(self, over)
    }
}

fn both<T>(base: Option<T>, over: Option<T>, merge: impl FnOnce(T, T) -> T) -> Option<T> {
    match (base, over) {
        (Some(base), Some(over)) => Some(merge(base, over)),
        (base, over) => over.or(base),
    }
}

fn map<T>(mut base: BTreeMap<String, T>, over: BTreeMap<String, T>) -> BTreeMap<String, T> {
    base.extend(over);
    base
}

over!(network: NetworkConfig {
    values: [profile, routes, rules, neighbors, restore],
    objects: [interface: interface, ethtool: ethtool, vf: vf, rdma: rdma, host_state: host_state],
});

over!(interface: InterfaceConfig {
    values: [
        name, addresses, dhcp, mtu, hardware_addr, gso_max_size, gro_max_size, gso_ipv4_max_size, gro_ipv4_max_size,
        disable_ebpf_programs, forwarding, arp_ignore, arp_announce, kind, tx_queue_len, alias, alt_names, promisc, allmulti, group,
    ],
    objects: [vrf: vrf, macvlan: macvlan, ipvlan: ipvlan, vlan: vlan, ipoib: ipoib, ipv6: ipv6, sysctls: map],
});

/// The name is required, so it is always the upper one's.
fn vrf(base: VrfConfig, over: VrfConfig) -> VrfConfig {
    VrfConfig { name: over.name, table: over.table.or(base.table) }
}

over!(macvlan: MacvlanConfig { values: [mode], objects: [] });
over!(ipvlan: IpvlanConfig { values: [mode, flag], objects: [] });
over!(vlan: VlanConfig { values: [id, protocol], objects: [] });
over!(ipoib: IpoibConfig { values: [pkey, mode], objects: [] });
over!(ipv6: Ipv6Config { values: [enabled, accept_ra, addr_gen_mode, dad], objects: [] });

over!(ethtool: EthtoolConfig {
    values: [],
    objects: [
        features: map, private_flags: map, rings: rings, channels: channels, coalesce: coalesce, pause: pause,
    ],
});
over!(rings: RingsConfig { values: [rx, rx_mini, rx_jumbo, tx], objects: [] });
over!(channels: ChannelsConfig { values: [rx, tx, other, combined], objects: [] });
over!(coalesce: CoalesceConfig {
    values: [rx_usecs, rx_frames, tx_usecs, tx_frames, adaptive_rx, adaptive_tx],
    objects: [],
});
over!(pause: PauseConfig { values: [autoneg, rx, tx], objects: [] });

over!(vf: VfConfig {
    values: [vlan, qos, proto, mac, spoof_check, trust, min_tx_rate, max_tx_rate, link_state, node_guid, port_guid],
    objects: [],
});
over!(rdma: RdmaConfig {
    values: [enabled, netns_mode, char_devices, wait_for_port],
    objects: [limits: limits],
});
over!(limits: RdmaLimits { values: [hca_handles, hca_objects], objects: [] });
over!(host_state: HostStateConfig { values: [addresses, routes, rules, neighbors], objects: [] });
