//! What comes along from the host, what is given back, and IPv6 on the link.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `hostState`: which of what the link has on the host comes along into the pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct HostStateConfig {
    /// Addresses; never when `interface.addresses` or `dhcp` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses: Option<Take>,
    /// Routes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routes: Option<Take>,
    /// Policy rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Take>,
    /// Permanent neighbours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbors: Option<Take>,
}

/// [`HostStateConfig`] as it counts: what comes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "four independent answers")]
pub struct Copies {
    /// Addresses.
    pub addresses: bool,
    /// Routes.
    pub routes: bool,
    /// Policy rules.
    pub rules: bool,
    /// Permanent neighbours.
    pub neighbors: bool,
}

impl super::NetworkConfig {
    /// What of the host's comes along.
    #[must_use]
    pub fn host_state(&self) -> Copies {
        let config = self.host_state.unwrap_or_default();
        let copies = |take: Option<Take>| take.unwrap_or_default() == Take::Copy;
        Copies {
            addresses: copies(config.addresses),
            routes: copies(config.routes),
            rules: copies(config.rules),
            neighbors: copies(config.neighbors),
        }
    }
}

/// One of `hostState`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Take {
    /// It comes along.
    #[default]
    Copy,
    /// It stays.
    Ignore,
}

/// `restore`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Restore {
    /// Everything that was on the host.
    #[default]
    Full,
    /// Name, altnames, MTU, link-layer address, offloads and up or down; no addresses, routes, neighbours, sysctls, queueing, master.
    Minimal,
}

/// `interface.ipv6`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Ipv6Config {
    /// `disable_ipv6`, the other way round.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// `accept_ra`: 0 no, 1 yes unless forwarding, 2 yes.
    #[serde(default, rename = "acceptRA", skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2))]
    pub accept_ra: Option<u32>,
    /// `addr_gen_mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr_gen_mode: Option<AddrGenMode>,
    /// Duplicate address detection of configured addresses; absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dad: Option<bool>,
}

/// How the kernel makes link-local addresses (`IN6_ADDR_GEN_MODE_*`, `linux/if_link.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AddrGenMode {
    /// From the link-layer address.
    #[default]
    Eui64,
    /// Not at all.
    None,
    /// From the namespace's secret.
    StablePrivacy,
    /// From a random secret.
    Random,
}
