//! A link in a VRF: its connected routes are in the VRF's table, and so everything else has to be.
//!
//! The rest of the planning does not know: it plans as for table main, and the routes go into the VRF's table in the end.

use super::{LeftOut, PlanError, routes, rules};
use crate::config::{InterfaceConfig, NetworkConfig, VrfConfig};
use crate::names::PodLinkName;
use crate::netdev::HostState;
use crate::netdev::route::{TABLE_LOCAL, TABLE_MAIN};

impl VrfConfig {
    /// The configured table, or DRANET's choice, so that its manifests mean the same here: 1000 to 1999 by the name (FNV-1a, 32 bits).
    #[must_use]
    pub fn table_or_default(&self) -> u32 {
        self.table.unwrap_or_else(|| fnv1a(self.name.as_bytes()) % 1000 + 1000)
    }
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Name and table of the VRF.
///
/// # Errors
/// When it would have the link's own name.
pub(super) fn of_pod(interface: &InterfaceConfig, pod_link: &PodLinkName) -> Result<Option<(PodLinkName, u32)>, PlanError> {
    let Some(config) = &interface.vrf else { return Ok(None) };
    let name = PodLinkName::new(config.name.as_str())?;
    if name == *pod_link {
        return Err(PlanError::VrfName { name: config.name.clone() });
    }
    Ok(Some((name, config.table_or_default())))
}

/// Configuration and host as they would be if there were no table but main.
pub(super) fn in_one_table(config: &NetworkConfig, host: &HostState, left_out: &mut LeftOut) -> (NetworkConfig, HostState) {
    let (mut config, mut host) = (config.clone(), host.clone());
    config.routes.iter_mut().flatten().for_each(|route| route.table = None);
    let copies = config.host_state();
    for rule in host.rules.drain(..).filter(|_| copies.rules) {
        left_out.add(format!("{}: the VRF has a rule of its own", rules::describe(&rule)));
    }
    host.routes.retain(|route| {
        let stays = route.is_default() && route.table != TABLE_LOCAL;
        if stays && copies.routes {
            left_out.add(format!("{}: the default route of a VRF has to be configured", routes::describe(route)));
        }
        !stays
    });
    // Of several to one destination the first counts.
    host.routes.sort_by_key(|route| route.table != TABLE_MAIN);
    host.routes.iter_mut().filter(|route| route.table != TABLE_LOCAL).for_each(|route| route.table = TABLE_MAIN);
    (config, host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_table_is_fnv1a_of_the_name() {
        // Test vectors of the hash's authors: http://www.isthe.com/chongo/tech/comp/fnv/
        assert_eq!([fnv1a(b""), fnv1a(b"a"), fnv1a(b"foobar")], [0x811c_9dc5, 0xe40c_292c, 0xbf9c_f968]);
        let vrf = |name: &str, table| VrfConfig { name: name.to_owned(), table };
        assert_eq!(vrf("a", None).table_or_default(), 1000 + 0xe40c_292c_u32 % 1000);
        assert_eq!(vrf("a", Some(7)).table_or_default(), 7);
    }
}
