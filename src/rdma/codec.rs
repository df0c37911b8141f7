//! Messages of the kernel's RDMA netlink. Pure; nothing here panics, whatever the bytes are.

use super::{Device, Guid, NetnsMode, Port, Protocol, Resources};
use crate::netlink::{Message, NetlinkError, decode, encode};

/// `RDMA_NL_NLDEV`: the client that speaks of devices; in the upper bits of a message's type (`RDMA_NL_GET_TYPE`).
const NLDEV: u16 = 5 << 10;

/// `RDMA_NLDEV_CMD_*`.
pub(super) mod command {
    pub(in super::super) const GET: u16 = 1;
    pub(in super::super) const SET: u16 = 2;
    pub(in super::super) const PORT_GET: u16 = 5;
    pub(in super::super) const SYS_GET: u16 = 6;
    pub(in super::super) const RES_GET: u16 = 9;
}

/// `RDMA_NLDEV_ATTR_*`.
pub(super) mod attr {
    pub(in super::super) const DEV_INDEX: u16 = 1;
    pub(in super::super) const DEV_NAME: u16 = 2;
    pub(in super::super) const PORT_INDEX: u16 = 3;
    pub(in super::super) const FW_VERSION: u16 = 5;
    pub(in super::super) const NODE_GUID: u16 = 6;
    pub(in super::super) const SUBNET_PREFIX: u16 = 8;
    pub(in super::super) const LID: u16 = 9;
    pub(in super::super) const PORT_STATE: u16 = 12;
    pub(in super::super) const DEV_NODE_TYPE: u16 = 14;
    pub(in super::super) const RES_SUMMARY: u16 = 15;
    pub(in super::super) const RES_SUMMARY_ENTRY: u16 = 16;
    pub(in super::super) const RES_SUMMARY_ENTRY_NAME: u16 = 17;
    pub(in super::super) const RES_SUMMARY_ENTRY_CURR: u16 = 18;
    pub(in super::super) const NDEV_INDEX: u16 = 50;
    pub(in super::super) const NDEV_NAME: u16 = 51;
    /// `RDMA_NLDEV_SYS_ATTR_NETNS_MODE`.
    pub(in super::super) const NETNS_MODE: u16 = 66;
    pub(in super::super) const DEV_PROTOCOL: u16 = 67;
    /// `RDMA_NLDEV_NET_NS_FD`.
    pub(in super::super) const NET_NS_FD: u16 = 68;
    pub(in super::super) const PARENT_NAME: u16 = 100;
}

/// `enum rdma_node_type`: `RDMA_NODE_RNIC`.
const NODE_RNIC: u8 = 4;

/// A message without attributes.
pub(super) fn bare(command: u16) -> Message {
    Message { kind: NLDEV | command, flags: 0, payload: Vec::new() }
}

/// A message about the device with `index`.
pub(super) fn of_device(command: u16, index: u32) -> Message {
    let mut message = bare(command);
    encode::attribute(&mut message.payload, attr::DEV_INDEX, &index.to_ne_bytes());
    message
}

/// Moves the device into the namespace that the descriptor `fd` of this process is.
pub(super) fn set_netns(index: u32, fd: i32) -> Message {
    let mut message = of_device(command::SET, index);
    encode::attribute(&mut message.payload, attr::NET_NS_FD, &fd.to_ne_bytes());
    message
}

/// Renames the device.
pub(super) fn set_name(index: u32, name: &str) -> Message {
    let mut message = of_device(command::SET, index);
    encode::attribute(&mut message.payload, attr::DEV_NAME, &[name.as_bytes(), &[0]].concat());
    message
}

/// The mode of a `SYS_GET` reply.
pub(super) fn netns_mode(reply: &Message) -> Result<NetnsMode, NetlinkError> {
    match decode::find(&reply.payload, attr::NETNS_MODE).and_then(|value| value.first().copied()) {
        Some(0) => Ok(NetnsMode::Exclusive),
        Some(1) => Ok(NetnsMode::Shared),
        other => Err(NetlinkError::Protocol(format!("RDMA netns mode {other:?}"))),
    }
}

/// A device of a `GET` reply.
pub(super) fn device(message: &Message) -> Result<Device, NetlinkError> {
    let mut device = Device::default();
    let mut index = None;
    let mut protocol = String::new();
    for (kind, value) in decode::attributes(&message.payload) {
        match kind {
            attr::DEV_INDEX => index = decode::read_u32(value, 0),
            attr::DEV_NAME => device.name = decode::text(value),
            attr::PORT_INDEX => device.ports = decode::read_u32(value, 0).unwrap_or(0),
            attr::FW_VERSION => device.firmware = Some(decode::text(value)).filter(|text| !text.is_empty()),
            attr::NODE_GUID => device.node_guid = read_u64(value).filter(|guid| *guid != 0).map(Guid),
            attr::DEV_NODE_TYPE => device.node_type = value.first().copied().unwrap_or(0),
            attr::DEV_PROTOCOL => protocol = decode::text(value),
            attr::PARENT_NAME => device.parent = Some(decode::text(value)),
            _ => {}
        }
    }
    device.index = index.ok_or_else(|| NetlinkError::Protocol("RDMA device without index".to_owned()))?;
    device.protocol = spoken(&protocol, device.node_type);
    Ok(device)
}

/// The kernel's words of `RDMA_NLDEV_ATTR_DEV_PROTOCOL` (`fill_dev_info`, `drivers/infiniband/core/nldev.c`).
fn spoken(protocol: &str, node_type: u8) -> Protocol {
    match protocol {
        "roce" => Protocol::Roce,
        "ib" => Protocol::InfiniBand,
        "iw" => Protocol::Iwarp,
        _ if node_type == NODE_RNIC => Protocol::Iwarp,
        _ => Protocol::Other,
    }
}

/// A port of a `PORT_GET` reply.
pub(super) fn port(message: &Message) -> Result<Port, NetlinkError> {
    let number = |kind| decode::find(&message.payload, kind).and_then(|value| decode::read_u32(value, 0));
    let lacks = |what| NetlinkError::Protocol(format!("RDMA port without {what}"));
    let state = decode::find(&message.payload, attr::PORT_STATE).and_then(|value| value.first().copied());
    let name = decode::find(&message.payload, attr::NDEV_NAME).map(decode::text);
    Ok(Port {
        device: number(attr::DEV_INDEX).ok_or_else(|| lacks("device"))?,
        port: number(attr::PORT_INDEX).ok_or_else(|| lacks("number"))?,
        state: state.unwrap_or(0).into(),
        link: number(attr::NDEV_INDEX).zip(name),
        subnet_prefix: decode::find(&message.payload, attr::SUBNET_PREFIX).and_then(read_u64),
        lid: number(attr::LID).filter(|lid| *lid != 0),
    })
}

/// The counts of a `RES_GET` reply.
pub(super) fn resources(reply: &Message) -> Resources {
    let mut resources = Resources::default();
    let summary = decode::find(&reply.payload, attr::RES_SUMMARY).unwrap_or_default();
    for (_, entry) in decode::attributes(summary).filter(|(kind, _)| *kind == attr::RES_SUMMARY_ENTRY) {
        let name = decode::find(entry, attr::RES_SUMMARY_ENTRY_NAME).map(decode::text);
        let count = decode::find(entry, attr::RES_SUMMARY_ENTRY_CURR).and_then(read_u64);
        if let Some((name, count)) = name.zip(count) {
            resources.note(&name, count);
        }
    }
    resources
}

fn read_u64(value: &[u8]) -> Option<u64> {
    Some(u64::from_ne_bytes(value.get(..8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::PortState;
    use super::*;

    fn message(attributes: &[(u16, &[u8])]) -> Message {
        let mut message = bare(command::GET);
        attributes.iter().for_each(|(kind, value)| encode::attribute(&mut message.payload, *kind, value));
        message
    }

    #[test]
    fn a_device_and_a_port_are_read() {
        let guid = 0x0c42_a103_0065_5f96_u64.to_ne_bytes();
        let read = device(&message(&[
            (1, &3_u32.to_ne_bytes()),
            (2, b"mlx5_0\0"),
            (3, &2_u32.to_ne_bytes()),
            (6, &guid),
            (14, &[1]),
            (67, b"roce\0"),
            (999, b"new"),
        ]));
        let expected = Device {
            index: 3,
            name: "mlx5_0".into(),
            ports: 2,
            node_guid: Some(Guid(u64::from_ne_bytes(guid))),
            node_type: 1,
            protocol: Protocol::Roce,
            ..Device::default()
        };
        assert_eq!(read.unwrap(), expected);
        let link = [(50, &7_u32.to_ne_bytes()[..]), (51, b"eth0\0")];
        let read = port(&message(&[&[(1, &3_u32.to_ne_bytes()[..]), (3, &1_u32.to_ne_bytes()), (12, &[4])], &link[..]].concat()));
        let read = read.unwrap();
        assert_eq!((read.device, read.port, read.state, read.link), (3, 1, PortState::Active, Some((7, "eth0".into()))));
        assert!(device(&message(&[(2, b"mlx5_0\0")])).is_err() && port(&message(&[(1, &3_u32.to_ne_bytes())])).is_err());
    }

    #[test]
    fn the_mode_is_read_and_nothing_is_guessed() {
        assert_eq!(netns_mode(&message(&[(66, &[0])])).unwrap(), NetnsMode::Exclusive);
        assert_eq!(netns_mode(&message(&[(66, &[1])])).unwrap(), NetnsMode::Shared);
        assert!(netns_mode(&message(&[(66, &[2])])).is_err() && netns_mode(&message(&[])).is_err());
    }

    #[test]
    fn resources_are_read() {
        let entry = |name: &[u8], count: u64| {
            let mut bytes = Vec::new();
            encode::attribute(&mut bytes, 17, name);
            encode::attribute(&mut bytes, 18, &count.to_ne_bytes());
            bytes
        };
        let mut summary = Vec::new();
        for (name, count) in [(&b"pd\0"[..], 2), (b"cq\0", 3), (b"qp\0", 4), (b"mr\0", 5), (b"ctx\0", 1), (b"srq\0", 9)] {
            encode::attribute(&mut summary, 16 | 0x8000, &entry(name, count));
        }
        let read = resources(&message(&[(1, &3_u32.to_ne_bytes()), (15 | 0x8000, &summary)]));
        assert_eq!(read.to_string(), "1 ctx, 4 qp, 3 cq, 5 mr, 2 pd");
        assert!(read.is_used() && !resources(&message(&[])).is_used());
    }

    #[test]
    fn requests_are_what_the_header_says() {
        let moved = set_netns(3, 9);
        assert_eq!(moved.kind, 5 << 10 | 2);
        assert_eq!(
            decode::attributes(&moved.payload).map(|(kind, value)| (kind, value.to_vec())).collect::<Vec<_>>(),
            [(1, 3_u32.to_ne_bytes().to_vec()), (68, 9_i32.to_ne_bytes().to_vec())]
        );
        assert_eq!(decode::find(&set_name(3, "rail0").payload, 2), Some(&b"rail0\0"[..]));
    }

    proptest! {
        #[test]
        fn any_message_is_decoded_or_refused(payload in proptest::collection::vec(any::<u8>(), 0..200)) {
            let message = Message { kind: NLDEV, flags: 0, payload };
            let _ = (device(&message), port(&message), netns_mode(&message), resources(&message));
        }
    }
}
