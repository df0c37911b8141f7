//! The kernel's bytes as a [`Link`]. Read here and not by the packet crate, because there one attribute of unknown shape, or a
//! name that is not UTF-8, costs the whole link (any bytes but `/`, NUL and blanks are a legal name), and unknown `ARPHRD_*` are lost.

use super::super::bpf::{IFLA_XDP, Xdp};
use super::{Link, LinkAddress, ParentDevice};
use crate::netlink::decode::{attributes, find, read_u16, read_u32, text};

// IFLA_*, linux/if_link.h.
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_TXQLEN: u16 = 13;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_GROUP: u16 = 27;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_PHYS_PORT_NAME: u16 = 38;
const IFLA_GSO_MAX_SIZE: u16 = 41;
const IFLA_MIN_MTU: u16 = 50;
const IFLA_MAX_MTU: u16 = 51;
const IFLA_PROP_LIST: u16 = 52;
pub(super) const IFLA_ALT_IFNAME: u16 = 53;
const IFLA_PERM_ADDRESS: u16 = 54;
const IFLA_PARENT_DEV_NAME: u16 = 56;
const IFLA_PARENT_DEV_BUS_NAME: u16 = 57;
const IFLA_GRO_MAX_SIZE: u16 = 58;
const IFLA_TSO_MAX_SIZE: u16 = 59;
const IFLA_GSO_IPV4_MAX_SIZE: u16 = 63;
const IFLA_GRO_IPV4_MAX_SIZE: u16 = 64;
/// In `IFLA_LINKINFO`.
const IFLA_INFO_KIND: u16 = 1;
/// In `IFLA_LINKINFO`; what is in it depends on the kind.
const IFLA_INFO_DATA: u16 = 2;
/// In `IFLA_INFO_DATA` of a VRF.
const IFLA_VRF_TABLE: u16 = 1;

/// `sizeof(struct ifinfomsg)`, `linux/rtnetlink.h`.
const HEADER: usize = 16;
/// `MAX_ADDR_LEN`, `linux/netdevice.h`.
const MAX_ADDRESS: usize = 32;

/// Reads the payload of an `RTM_NEWLINK`. None when it is too short or names no link.
#[must_use]
pub fn parse(payload: &[u8]) -> Option<Link> {
    let mut link = Link {
        arphrd: read_u16(payload, 2)?,
        index: read_u32(payload, 4)?,
        flags: read_u32(payload, 8)?,
        oper_state: oper_state(0).to_owned(),
        ..Link::default()
    };
    let (mut bus, mut parent_name) = (None, None);
    for (kind, value) in attributes(payload.get(HEADER..)?) {
        match kind {
            IFLA_PARENT_DEV_BUS_NAME => bus = Some(text(value)),
            IFLA_PARENT_DEV_NAME => parent_name = Some(text(value)),
            _ => take(&mut link, kind, value),
        }
    }
    link.parent_device = bus.zip(parent_name).map(|(bus, name)| ParentDevice { bus, name });
    (link.index > 0 && !link.name.is_empty()).then_some(link)
}

fn take(link: &mut Link, kind: u16, value: &[u8]) {
    match kind {
        IFLA_IFNAME => link.name = text(value),
        IFLA_IFALIAS => link.alias = Some(text(value)),
        IFLA_PHYS_PORT_NAME => link.phys_port_name = Some(text(value)),
        IFLA_LINKINFO => {
            link.kind = find(value, IFLA_INFO_KIND).map(text);
            let data = find(value, IFLA_INFO_DATA).filter(|_| link.kind.as_deref() == Some("vrf"));
            link.vrf_table = data.and_then(|data| find(data, IFLA_VRF_TABLE)).and_then(|table| read_u32(table, 0));
        }
        IFLA_GSO_MAX_SIZE => link.sizes.gso = read_u32(value, 0),
        IFLA_GRO_MAX_SIZE => link.sizes.gro = read_u32(value, 0),
        IFLA_GSO_IPV4_MAX_SIZE => link.sizes.gso_ipv4 = read_u32(value, 0),
        IFLA_GRO_IPV4_MAX_SIZE => link.sizes.gro_ipv4 = read_u32(value, 0),
        IFLA_TSO_MAX_SIZE => link.tso_max_size = read_u32(value, 0),
        IFLA_XDP => link.xdp = Xdp::parse(value),
        IFLA_PROP_LIST => {
            link.alt_names = attributes(value).filter(|(kind, _)| *kind == IFLA_ALT_IFNAME).map(|(_, name)| text(name)).collect();
        }
        IFLA_ADDRESS => link.address = address(value),
        IFLA_PERM_ADDRESS => link.perm_address = address(value),
        IFLA_OPERSTATE => link.oper_state = oper_state(value.first().copied().unwrap_or(0)).to_owned(),
        IFLA_MTU => link.mtu = read_u32(value, 0).unwrap_or(0),
        IFLA_MIN_MTU => link.min_mtu = read_u32(value, 0),
        IFLA_MAX_MTU => link.max_mtu = read_u32(value, 0),
        IFLA_TXQLEN => link.tx_queue_len = read_u32(value, 0),
        IFLA_GROUP => link.group = read_u32(value, 0).unwrap_or(0),
        IFLA_MASTER => link.master = read_u32(value, 0).filter(|index| *index > 0),
        IFLA_LINK => link.parent = read_u32(value, 0).filter(|index| *index > 0),
        IFLA_LINK_NETNSID => link.link_netnsid = read_u32(value, 0).map(u32::cast_signed),
        _ => {}
    }
}

fn address(value: &[u8]) -> Option<LinkAddress> {
    (1..=MAX_ADDRESS).contains(&value.len()).then(|| LinkAddress::new(value.to_vec()))
}

/// `IF_OPER_*`, `linux/if.h`.
fn oper_state(state: u8) -> &'static str {
    ["unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up"]
        .get(usize::from(state))
        .copied()
        .unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PacketSizes;
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn message(attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0, 0];
        bytes.extend(32u16.to_ne_bytes());
        bytes.extend(7u32.to_ne_bytes());
        bytes.extend(0x1003u32.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(attributes.concat());
        bytes
    }

    #[test]
    fn every_field_is_read() {
        let props = [attribute(IFLA_ALT_IFNAME, b"enp1s0\0"), attribute(IFLA_ALT_IFNAME, b"enx02\0")].concat();
        let nested = 0x8000;
        let bytes = message(&[
            attribute(IFLA_IFNAME, b"ib0\0"),
            attribute(IFLA_ADDRESS, &[7; 20]),
            attribute(IFLA_PERM_ADDRESS, &[8; 20]),
            attribute(IFLA_MTU, &2044u32.to_ne_bytes()),
            attribute(IFLA_MIN_MTU, &68u32.to_ne_bytes()),
            attribute(IFLA_MAX_MTU, &4092u32.to_ne_bytes()),
            attribute(IFLA_OPERSTATE, &[6]),
            attribute(IFLA_MASTER, &3u32.to_ne_bytes()),
            attribute(IFLA_LINK, &4u32.to_ne_bytes()),
            attribute(IFLA_LINK_NETNSID, &2i32.to_ne_bytes()),
            attribute(IFLA_TXQLEN, &256u32.to_ne_bytes()),
            attribute(IFLA_GROUP, &5u32.to_ne_bytes()),
            attribute(IFLA_IFALIAS, b"rail 0\0"),
            attribute(IFLA_PHYS_PORT_NAME, b"p0\0"),
            attribute(IFLA_GSO_MAX_SIZE, &1u32.to_ne_bytes()),
            attribute(IFLA_GRO_MAX_SIZE, &2u32.to_ne_bytes()),
            attribute(IFLA_GSO_IPV4_MAX_SIZE, &3u32.to_ne_bytes()),
            attribute(IFLA_GRO_IPV4_MAX_SIZE, &4u32.to_ne_bytes()),
            attribute(IFLA_TSO_MAX_SIZE, &5u32.to_ne_bytes()),
            attribute(IFLA_PARENT_DEV_NAME, b"0000:8a:00.0\0"),
            attribute(IFLA_PARENT_DEV_BUS_NAME, b"pci\0"),
            attribute(IFLA_LINKINFO | nested, &attribute(IFLA_INFO_KIND, b"ipoib\0")),
            attribute(IFLA_PROP_LIST | nested, &props),
            // IFLA_XDP_DRV_PROG_ID.
            attribute(IFLA_XDP | nested, &attribute(5, &9u32.to_ne_bytes())),
        ]);
        let want = Link {
            index: 7,
            name: "ib0".into(),
            alt_names: vec!["enp1s0".into(), "enx02".into()],
            alias: Some("rail 0".into()),
            kind: Some("ipoib".into()),
            arphrd: 32,
            flags: 0x1003,
            mtu: 2044,
            min_mtu: Some(68),
            max_mtu: Some(4092),
            address: Some(LinkAddress::new(vec![7; 20])),
            perm_address: Some(LinkAddress::new(vec![8; 20])),
            oper_state: "up".into(),
            master: Some(3),
            parent: Some(4),
            link_netnsid: Some(2),
            parent_device: Some(ParentDevice { bus: "pci".into(), name: "0000:8a:00.0".into() }),
            tx_queue_len: Some(256),
            group: 5,
            sizes: PacketSizes { gso: Some(1), gro: Some(2), gso_ipv4: Some(3), gro_ipv4: Some(4) },
            tso_max_size: Some(5),
            vrf_table: None,
            phys_port_name: Some("p0".into()),
            xdp: Xdp { native: Some(9), ..Xdp::default() },
        };
        assert_eq!(parse(&bytes), Some(want));
    }

    #[test]
    fn the_table_of_a_vrf_is_read_and_no_other_kinds_data() {
        let table = attribute(IFLA_INFO_DATA, &attribute(IFLA_VRF_TABLE, &1500u32.to_ne_bytes()));
        let of = |kind: &[u8]| {
            let info = [attribute(IFLA_INFO_KIND, kind), table.clone()].concat();
            parse(&message(&[attribute(IFLA_IFNAME, b"blue\0"), attribute(IFLA_LINKINFO, &info)])).unwrap().vrf_table
        };
        assert_eq!((of(b"vrf\0"), of(b"vxlan\0")), (Some(1500), None));
    }

    #[test]
    fn odd_values_cost_only_themselves() {
        let bytes = message(&[
            attribute(IFLA_IFNAME, b"\xffeth\0"),
            attribute(IFLA_MTU, &[1, 2]),
            attribute(IFLA_ADDRESS, &[1; 33]),
            attribute(IFLA_OPERSTATE, &[200]),
            attribute(IFLA_TXQLEN, &9u32.to_ne_bytes()),
        ]);
        let link = parse(&bytes).unwrap();
        assert_eq!((link.name.as_str(), link.mtu, link.address, link.tx_queue_len), ("\u{fffd}eth", 0, None, Some(9)));
        assert_eq!(parse(&message(&[])), None);
        assert_eq!(parse(&[0; 10]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn any_attribute_is_read_without_panic(kind in 0u16..70, value in proptest::collection::vec(any::<u8>(), 0..64)) {
            let bytes = message(&[attribute(IFLA_IFNAME, b"a"), attribute(kind, &value)]);
            prop_assert!(kind == IFLA_IFNAME || parse(&bytes).is_some());
        }
    }
}
