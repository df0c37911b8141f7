use netlink_packet_core::{Emitable, Parseable};
use proptest::prelude::*;

use super::*;

fn answered(request: Request) -> NeighbourMessage {
    let RouteNetlinkMessage::NewNeighbour(message) = request.message else { panic!("{request:?}") };
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    NeighbourMessage::parse(&bytes[..]).unwrap()
}

fn any_neighbour() -> impl Strategy<Value = Neighbour> {
    let ip = prop_oneof![any::<[u8; 4]>().prop_map(IpAddr::from), any::<[u8; 16]>().prop_map(IpAddr::from)];
    let address = prop_oneof![Just(6usize), Just(20), Just(32)].prop_flat_map(|len| proptest::collection::vec(any::<u8>(), len));
    (ip, address, any::<(u8, u8, bool)>()).prop_map(|(ip, address, (flags, protocol, proxy))| Neighbour {
        ip,
        address: (!proxy).then(|| LinkAddress::new(address)),
        flags: if proxy { flags | NTF_PROXY } else { flags & !NTF_PROXY } & !NOT_KEPT,
        protocol,
    })
}

proptest! {
    #[test]
    fn round_trip(neighbour in any_neighbour(), index in 1u32..1000) {
        prop_assert_eq!(from_message(&answered(add_request(index, &neighbour))), Some((index, neighbour)));
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        if let Ok(message) = NeighbourMessage::parse(&bytes[..]) {
            let _ = from_message(&message);
        }
    }
}

#[test]
fn only_permanent_and_proxy_entries() {
    let entry = Neighbour::permanent("10.0.0.1".parse().unwrap(), "02:00:00:00:00:01".parse().unwrap());
    let mut message = answered(add_request(7, &entry));
    assert!(from_message(&message).is_some());
    for state in [NeighbourState::Reachable, NeighbourState::Stale, NeighbourState::Noarp, NeighbourState::None] {
        message.header.state = state;
        assert_eq!(from_message(&message), None, "{state}");
    }
    message.header.flags = NeighbourFlags::Proxy;
    assert!(from_message(&message).is_some_and(|(_, entry)| entry.is_proxy() && entry.address.is_none()));
    message.header.ifindex = 0;
    assert_eq!(from_message(&message), None);
}
