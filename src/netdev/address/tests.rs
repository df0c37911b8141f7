use netlink_packet_core::{Emitable, Parseable};
use proptest::prelude::*;

use super::*;

/// What the kernel would answer: the request's bytes, read again.
fn answered(request: Request) -> AddressMessage {
    let RouteNetlinkMessage::NewAddress(message) = request.message else { panic!("{request:?}") };
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    AddressMessage::parse(&bytes[..]).unwrap()
}

fn any_address() -> impl Strategy<Value = Address> {
    let v4 = (any::<[u8; 4]>(), 0u8..=32, "[a-z]{1,8}(:[a-z0-9]{1,6})?").prop_map(|(ip, len, label)| {
        let mut address = Address::permanent(IpAddr::from(ip), len);
        address.label = Some(label);
        address.broadcast = Some(Ipv4Addr::from(ip));
        address
    });
    let v6 = (any::<[u8; 16]>(), 0u8..=128).prop_map(|(ip, len)| Address::permanent(IpAddr::from(ip), len));
    let rest = (any::<u32>(), any::<(u32, u32)>(), any::<Option<u32>>(), any::<Option<u8>>(), any::<u8>(), any::<bool>());
    (prop_oneof![v4, v6], rest).prop_map(|(mut address, (flags, life, metric, proto, scope, peer))| {
        address.flags = flags & SETTABLE;
        (address.valid_lifetime, address.preferred_lifetime) = life;
        (address.metric, address.proto, address.scope) = (metric, proto, scope);
        address.peer = match (address.ip, peer) {
            (_, false) => None,
            (IpAddr::V4(ip), true) => Some(IpAddr::V4(Ipv4Addr::from_bits(ip.to_bits() ^ 1))),
            (IpAddr::V6(ip), true) => Some(IpAddr::V6((ip.to_bits() ^ 1).into())),
        };
        address
    })
}

proptest! {
    #[test]
    fn round_trip(address in any_address(), index in 1u32..1000) {
        prop_assert_eq!(from_message(&answered(add_request(index, &address))), Some((index, address)));
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        if let Ok(message) = AddressMessage::parse(&bytes[..]) {
            let _ = from_message(&message);
        }
    }
}

#[test]
fn asks_only_for_flags_that_can_be_set() {
    let mut address = Address::permanent("2001:db8::1".parse().unwrap(), 64);
    address.flags = IFA_F_TENTATIVE | IFA_F_DADFAILED | IFA_F_DEPRECATED | IFA_F_SECONDARY | IFA_F_NODAD | IFA_F_NOPREFIXROUTE;
    let (_, read) = from_message(&answered(add_request(1, &address))).unwrap();
    assert_eq!(read.flags, IFA_F_NODAD | IFA_F_NOPREFIXROUTE);
}

#[test]
fn refuses_what_is_no_address() {
    let mut message = AddressMessage::default();
    assert_eq!(from_message(&message), None);
    message.attributes.push(AddressAttribute::Local("10.0.0.1".parse().unwrap()));
    message.header.family = AddressFamily::Inet6;
    assert_eq!(from_message(&message), None, "of another family");
    message.header.family = AddressFamily::Inet;
    message.header.prefix_len = 33;
    assert_eq!(from_message(&message), None, "prefix too long");
}

#[test]
fn in_words() {
    let mut address = Address::permanent("10.0.0.1".parse().unwrap(), 24);
    address.label = Some("eth0:1".into());
    address.valid_lifetime = 600;
    assert_eq!(address.to_string(), "10.0.0.1/24 label eth0:1 valid 600s flags 0x80");
}
