//! Target `rdma`: any bytes as an answer of RDMA netlink, and as an event of the kernel.

use super::codec::{self, attr, command};
use super::{Device, Protocol, monitor};
use crate::netlink::{Message, decode, encode};

pub(crate) fn rdma(data: &[u8]) {
    let message = Message { kind: codec::bare(command::GET).kind, flags: 0, payload: data.to_vec() };
    if let Ok(device) = codec::device(&message) {
        assert!(device.node_guid.is_none_or(|guid| guid.0 != 0) && !device.name.contains('\0'));
        assert_eq!(codec::device(&written(&device)).ok(), Some(device));
    }
    if let Ok(port) = codec::port(&message) {
        assert_ne!(port.lid, Some(0));
        assert_eq!(decode::find(data, attr::PORT_INDEX).and_then(|value| decode::read_u32(value, 0)), Some(port.port));
    }
    let used = codec::resources(&message);
    assert_eq!(used.is_used(), used.contexts > 0);
    let _ = codec::netns_mode(&message);
    // An event is of RDMA whatever stands before and behind it.
    let event = [data, b"\0SUBSYSTEM=infiniband\0", data].concat();
    assert!(monitor::is_of_rdma(&event));
    let _ = monitor::is_of_rdma(data);
}

/// The device as the kernel would write it.
fn written(device: &Device) -> Message {
    let mut message = codec::of_device(command::GET, device.index);
    let protocol: &[u8] = match device.protocol {
        Protocol::Roce => b"roce",
        Protocol::InfiniBand => b"ib",
        Protocol::Iwarp => b"iw",
        Protocol::Other => b"",
    };
    let mut put = |kind, value: &[u8]| encode::attribute(&mut message.payload, kind, value);
    put(attr::DEV_NAME, device.name.as_bytes());
    put(attr::PORT_INDEX, &device.ports.to_ne_bytes());
    put(attr::NODE_GUID, &device.node_guid.map_or(0, |guid| guid.0).to_ne_bytes());
    put(attr::DEV_NODE_TYPE, &[device.node_type]);
    put(attr::DEV_PROTOCOL, protocol);
    for (kind, text) in [(attr::FW_VERSION, &device.firmware), (attr::PARENT_NAME, &device.parent)] {
        if let Some(text) = text {
            put(kind, text.as_bytes());
        }
    }
    message
}
