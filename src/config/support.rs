//! What this version does not carry out yet. One place, so that it shrinks as the steps come.

use super::{FieldError, NetworkConfig};

impl NetworkConfig {
    /// The fields that are set and valid, but that this version does not carry out yet, each with its path. An explicit `false`
    /// and an empty map ask for nothing and are not among them.
    #[must_use]
    pub fn not_supported_yet(&self) -> Vec<FieldError> {
        let mut fields = vec![("profile", self.profile.is_some())];
        if let Some(interface) = &self.interface {
            fields.extend([
                ("interface.dhcp", interface.dhcp == Some(true)),
                ("interface.gsoMaxSize", interface.gso_max_size.is_some()),
                ("interface.groMaxSize", interface.gro_max_size.is_some()),
                ("interface.gsoIPv4MaxSize", interface.gso_ipv4_max_size.is_some()),
                ("interface.groIPv4MaxSize", interface.gro_ipv4_max_size.is_some()),
                ("interface.disableEbpfPrograms", interface.disable_ebpf_programs == Some(true)),
                ("interface.forwarding", interface.forwarding == Some(true)),
                ("interface.arpIgnore", interface.arp_ignore.is_some()),
                ("interface.arpAnnounce", interface.arp_announce.is_some()),
                ("interface.vrf", interface.vrf.is_some()),
            ]);
        }
        if let Some(ethtool) = &self.ethtool {
            fields.extend([
                ("ethtool.features", ethtool.features.as_ref().is_some_and(|map| !map.is_empty())),
                ("ethtool.privateFlags", ethtool.private_flags.as_ref().is_some_and(|map| !map.is_empty())),
            ]);
        }
        let message = "is valid, but not supported yet by this version of the driver; remove it";
        fields.into_iter().filter(|(_, set)| *set).map(|(path, _)| FieldError::new(path, message)).collect()
    }
}
