use netlink_packet_core::{DefaultNla, Emitable, Parseable};
use proptest::prelude::*;

use super::*;

fn answered(request: Request) -> RuleMessage {
    let RouteNetlinkMessage::NewRule(message) = request.message else { panic!("{request:?}") };
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    RuleMessage::parse(&bytes[..]).unwrap()
}

fn any_net(ipv6: bool) -> BoxedStrategy<Option<IpNet>> {
    let v4 = (any::<[u8; 4]>(), 1u8..=32).prop_map(|(ip, len)| IpNet::new(IpAddr::from(ip), len).unwrap().trunc());
    let v6 = (any::<[u8; 16]>(), 1u8..=128).prop_map(|(ip, len)| IpNet::new(IpAddr::from(ip), len).unwrap().trunc());
    if ipv6 { proptest::option::of(v6).boxed() } else { proptest::option::of(v4).boxed() }
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let name = || proptest::option::of("[a-z0-9.]{1,15}");
    // fwmark, realm, tunnel id, suppress, mask, l3mdev, uid range, protocol, ports, and one that nobody knows.
    let other = prop_oneof![
        Just(vec![]),
        Just(vec![(10u16, vec![1, 0, 0, 0]), (16, vec![0xff, 0, 0, 0])]),
        Just(vec![(11, vec![1, 0, 2, 0]), (12, vec![0, 0, 0, 0, 0, 0, 0, 9]), (14, vec![8, 0, 0, 0])]),
        Just(vec![(20, vec![1, 0, 0, 0, 9, 0, 0, 0]), (22, vec![6]), (23, vec![1, 0, 2, 0]), (24, vec![1, 0, 2, 0])]),
        Just(vec![(13, vec![7, 0, 0, 0]), (19, vec![1]), (77, vec![1, 2, 3])]),
    ];
    any::<bool>().prop_flat_map(move |ipv6| {
        let nets = (any_net(ipv6), any_net(ipv6));
        let numbers =
            (any::<Option<u32>>(), any::<u32>(), prop_oneof![Just(1u8), Just(6), Just(7), Just(8)], any::<(u8, u8, bool)>());
        (nets, numbers, name(), name(), other.clone()).prop_map(move |((source, destination), n, input, output, other)| {
            let (priority, table, action, (protocol, tos, invert)) = n;
            let hex = raw::to_hex(other.into_iter().map(|(k, v)| (k, raw::bytes(&DefaultNla::new(k, v)))).collect());
            let mut rule = Rule::to_table(ipv6, table);
            (rule.priority, rule.source, rule.destination, rule.action) = (priority, source, destination, action);
            (rule.protocol, rule.tos, rule.invert) = (protocol, tos, invert);
            (rule.input_link, rule.output_link, rule.other) = (input, output, hex);
            rule
        })
    })
}

proptest! {
    #[test]
    fn round_trip(rule in any_rule()) {
        prop_assert_eq!(from_message(&answered(add_request(&rule))), Some(rule));
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..160)) {
        if let Ok(message) = RuleMessage::parse(&bytes[..]) {
            let _ = from_message(&message);
        }
    }
}

#[test]
fn the_usual_suppression_is_nothing() {
    let mut message = answered(add_request(&Rule::to_table(false, 100)));
    message.attributes.push(RuleAttribute::SuppressPrefixLen(u32::MAX));
    assert_eq!(from_message(&message).unwrap().other, "");
    message.attributes.push(RuleAttribute::SuppressPrefixLen(0));
    assert_eq!(from_message(&message).unwrap().other, "08000e0000000000");
}

#[test]
fn in_words() {
    let mut rule = Rule::to_table(false, 100);
    rule.priority = Some(7);
    rule.source = Some("10.0.0.0/8".parse().unwrap());
    assert_eq!(rule.to_string(), "7: from 10.0.0.0/8 lookup 100");
}
