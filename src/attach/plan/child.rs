//! Links that are made on top of a device: what the configuration asks for, and what the device has to be for it. Pure.

use sha2::{Digest, Sha256};

use crate::config::{InterfaceConfig, InterfaceKind, NetworkConfig};
use crate::names::{ClaimUid, DeviceName, LINK_NAME_MAX, PodLinkName};
use crate::netdev::{Child, HostState, Link, LinkAddress, MacvlanMode};

/// Length of an Ethernet address (`ETH_ALEN`, `linux/if_ether.h`), bytes.
const ETHERNET: usize = 6;
/// Length of an IPoIB address (`INFINIBAND_ALEN`, `linux/if_infiniband.h`), bytes.
const INFINIBAND: usize = 20;

/// Longest alias that is made here, bytes: less than the kernel's 255 (`IFALIASZ`, `linux/if.h`).
const ALIAS_MAX: usize = 250;

/// Why nothing can be made on top of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The allocation shares it, the configuration moves it.
    #[error(
        "this is a share of the device, and the device itself can't go into the pod: set macvlan, ipvlan, vlan or ipoib in the \
         configuration of the class or the claim, or ask for a device that is not shared"
    )]
    Whole,
    /// macvlan and VLANs are Ethernet's.
    #[error("the device is no Ethernet device, and macvlan and vlan need one")]
    NotEthernet,
    /// Partitions are InfiniBand's.
    #[error("the device is no IPoIB link, and ipoib needs one")]
    NotInfiniBand,
    /// The same address twice on a wire.
    #[error("interface.hardwareAddr is the device's own, and a macvlan link needs another one")]
    OwnAddress,
}

/// What the configuration asks for; none where the device itself goes into the pod.
#[must_use]
pub(crate) fn of(interface: &InterfaceConfig) -> Option<Child> {
    match interface.kind.unwrap_or_default() {
        InterfaceKind::Passthrough => None,
        InterfaceKind::Macvlan => {
            Some(Child::Macvlan { mode: interface.macvlan.and_then(|macvlan| macvlan.mode).unwrap_or_default() })
        }
        InterfaceKind::Ipvlan => {
            let ipvlan = interface.ipvlan.unwrap_or_default();
            Some(Child::Ipvlan { mode: ipvlan.mode.unwrap_or_default(), flag: ipvlan.flag.unwrap_or_default() })
        }
        InterfaceKind::Vlan => {
            let vlan = interface.vlan.unwrap_or_default();
            // Validation has seen that there is one; the kernel refuses 0 with a tag of its own, so nothing else can come of it.
            Some(Child::Vlan { id: vlan.id.unwrap_or_default(), protocol: vlan.protocol.unwrap_or_default() })
        }
        InterfaceKind::Ipoib => {
            let ipoib = interface.ipoib.unwrap_or_default();
            // As with a VLAN: 0 is refused by validation, and by the kernel.
            Some(Child::Ipoib { pkey: ipoib.pkey.unwrap_or_default(), mode: ipoib.mode.unwrap_or_default() })
        }
    }
}

/// As [`of`], for what is allocated as a share of a device, or not.
///
/// # Errors
/// When a share would have to be moved.
pub(crate) fn of_share(config: &NetworkConfig, is_share: bool) -> Result<Option<Child>, Unfit> {
    match config.interface.as_ref().and_then(of) {
        None if is_share => Err(Unfit::Whole),
        child => Ok(child),
    }
}

/// Whether such links are made on top of what the device is.
pub(super) fn check_layer(child: &Child, host: &HostState) -> Result<(), Unfit> {
    let length = host.address.as_ref().map_or(0, |own| own.bytes().len());
    match child {
        Child::Macvlan { .. } | Child::Vlan { .. } if length != ETHERNET => Err(Unfit::NotEthernet),
        Child::Ipoib { .. } if length != INFINIBAND => Err(Unfit::NotInfiniBand),
        _ => Ok(()),
    }
}

/// Whether the link can have `address`: the one that differs from the device's own.
pub(super) fn check_address(child: &Child, address: Option<&LinkAddress>) -> Result<(), Unfit> {
    match child {
        Child::Macvlan { mode } if *mode != MacvlanMode::Passthru && address.is_none() => Err(Unfit::OwnAddress),
        _ => Ok(()),
    }
}

/// What a plan for a link on top of `parent` begins with. Addresses, routes and all else of the host's stay with the parent; its
/// MTU is the most that the link can have.
#[must_use]
pub(crate) fn below(parent: &Link) -> HostState {
    HostState {
        index: parent.index,
        mtu: parent.mtu,
        min_mtu: parent.min_mtu,
        max_mtu: Some(parent.mtu),
        address: parent.address.clone(),
        flags: parent.flags,
        sizes: parent.sizes,
        tso_max_size: parent.tso_max_size,
        ..HostState::without_link(&parent.name)
    }
}

/// The configuration with what each link of its own must have where nothing is configured: a name that is not among `taken` and, for
/// macvlan, an address that is the same each time.
#[must_use]
pub(crate) fn completed(
    mut config: NetworkConfig,
    child: &Child,
    parent: &str,
    identity: (&ClaimUid, &DeviceName, Option<&str>),
    taken: impl Fn(&PodLinkName) -> bool,
) -> NetworkConfig {
    let interface = config.interface.get_or_insert_default();
    if interface.name.is_none() {
        interface.name = free_name(parent, taken);
    }
    if matches!(child, Child::Ipoib { .. }) && interface.alias.is_none() {
        // The kernel returns it to the host when the pod's namespace ends; there it is known by this.
        let (claim, device, share) = identity;
        interface.alias =
            Some(format!("dranic {claim} {device} {}", share.unwrap_or_default()).chars().take(ALIAS_MAX).collect());
    }
    let has_own = matches!(child, Child::Macvlan { mode } if *mode != MacvlanMode::Passthru);
    if has_own && interface.hardware_addr.is_none() {
        interface.hardware_addr = Some(stable_address(identity));
    }
    config
}

/// The parent's name, or that with a number: `nic0`, `nic0-1`, `nic0-2`.
fn free_name(parent: &str, taken: impl Fn(&PodLinkName) -> bool) -> Option<PodLinkName> {
    let numbered = (1u32..).map(|number| {
        let number = format!("-{number}");
        let mut name: String = parent.to_owned();
        while name.len() + number.len() > LINK_NAME_MAX {
            name.pop();
        }
        name + &number
    });
    std::iter::once(parent.to_owned()).chain(numbered).map_while(|name| PodLinkName::new(name).ok()).find(|name| !taken(name))
}

/// An address for a share of a device: unicast, and of those that no vendor has (`eth_random_addr` of the kernel marks its own so).
fn stable_address((claim, device, share): (&ClaimUid, &DeviceName, Option<&str>)) -> LinkAddress {
    let digest = Sha256::digest(format!("{claim}\0{device}\0{}", share.unwrap_or_default()));
    let mut bytes = digest[..ETHERNET].to_vec();
    bytes[0] = bytes[0] & 0xfe | 0x02;
    LinkAddress::new(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attach::plan::{PlanError, Step, Undo, plan};

    fn parent() -> Link {
        let address = LinkAddress::new(vec![2, 0, 0, 0, 0, 1]);
        Link {
            index: 7,
            name: "nic0".into(),
            mtu: 9000,
            min_mtu: Some(68),
            max_mtu: Some(65535),
            address: Some(address),
            ..Link::default()
        }
    }

    fn planned(text: &str, parent: &Link, share: &str) -> Result<crate::attach::Plan, PlanError> {
        let config = crate::config::parse(text).unwrap();
        let child = of_share(&config, true)?;
        let (claim, device) = (ClaimUid::new("c").unwrap(), DeviceName::new("d").unwrap());
        let identity = (&claim, &device, Some(share));
        let config = completed(config, &child.unwrap(), &parent.name, identity, |name| name.as_str() == "nic0-1");
        plan(&config, &below(parent))
    }

    fn address(text: &str, share: &str) -> Option<LinkAddress> {
        match &planned(text, &parent(), share).unwrap().steps[0] {
            Step::Create { address, .. } => address.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_child_is_made_and_deleted_instead_of_moved() {
        let plan = planned(r#"{"interface":{"type":"macvlan","mtu":1400,"addresses":["10.0.0.5/24"]}}"#, &parent(), "s").unwrap();
        assert!(matches!(&plan.steps[0], Step::Create { mtu: Some(1400), .. }), "{:?}", plan.steps);
        assert_eq!(plan.steps[0].undo(), Undo::DeleteLink);
        assert_eq!(plan.pod_link.as_str(), "nic0");
        assert_eq!(plan.steps[0].describe(), "making a macvlan (mode bridge) link in the pod as nic0, with an MTU of 1400 bytes");
        assert!(!plan.steps.iter().any(|step| matches!(step, Step::Move { .. })));
    }

    #[test]
    fn each_share_has_an_address_that_stays() {
        let macvlan = r#"{"interface":{"type":"macvlan"}}"#;
        let first = address(macvlan, "a").unwrap();
        assert_eq!(first.bytes()[0] & 3, 2, "locally administered, unicast");
        assert_eq!(address(macvlan, "a").unwrap(), first);
        assert_ne!(address(macvlan, "b").unwrap(), first);
        let own = r#"{"interface":{"type":"macvlan","hardwareAddr":"02:00:00:00:00:09"}}"#;
        assert_eq!(address(own, "a").unwrap().to_string(), "02:00:00:00:00:09");
        for kernels in [
            r#"{"interface":{"type":"ipvlan"}}"#,
            r#"{"interface":{"type":"vlan","vlan":{"id":5}}}"#,
            r#"{"interface":{"type":"macvlan","macvlan":{"mode":"passthru"}}}"#,
        ] {
            assert_eq!(address(kernels, "a"), None);
        }
    }

    #[test]
    fn what_a_device_can_not_carry_is_refused_by_name() {
        let refused = |text: &str, parent: &Link| planned(text, parent, "s").unwrap_err().to_string();
        assert!(refused(r#"{"interface":{"type":"ipvlan","mtu":9001}}"#, &parent()).contains("68 to 9000 bytes"));
        let infiniband = Link { address: Some(LinkAddress::new(vec![1; 20])), ..parent() };
        assert!(refused(r#"{"interface":{"type":"vlan","vlan":{"id":5}}}"#, &infiniband).contains("no Ethernet device"));
        let ipoib = r#"{"interface":{"type":"ipoib","ipoib":{"pkey":32769}}}"#;
        assert!(refused(ipoib, &parent()).contains("no IPoIB link"));
        assert!(refused(r#"{"interface":{"type":"macvlan"}}"#, &infiniband).contains("no Ethernet device"));
        let plan = planned(ipoib, &infiniband, "s").unwrap();
        let words = "making a ipoib (pkey 0x8001, mode datagram) link in the pod as nic0";
        assert_eq!(plan.steps[0].describe(), words);
        let Some(Step::Link { settings }) = plan.steps.iter().find(|step| step.kind() == "link") else { panic!("{plan:?}") };
        assert_eq!((settings.mtu, settings.alias.as_deref()), (Some(9000), Some("dranic c d s")));
        let same = r#"{"interface":{"type":"macvlan","hardwareAddr":"02:00:00:00:00:01"}}"#;
        assert!(refused(same, &parent()).contains("needs another one"));
        assert!(refused(r#"{"interface":{"mtu":1400}}"#, &parent()).contains("share of the device"));
    }

    #[test]
    fn names_are_numbered_and_fit() {
        let name = |parent: &str, taken: &[&str]| free_name(parent, |name| taken.contains(&name.as_str())).unwrap();
        assert_eq!(name("nic0", &[]).as_str(), "nic0");
        assert_eq!(name("nic0", &["nic0", "nic0-1"]).as_str(), "nic0-2");
        assert_eq!(name("fifteen-letters", &["fifteen-letters"]).as_str(), "fifteen-lette-1");
        assert_eq!(free_name("a b", |_| false), None, "the plan says why");
    }
}
