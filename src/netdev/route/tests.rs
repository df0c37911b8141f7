use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, Emitable, Parseable};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use proptest::prelude::*;

use super::super::raw;
use super::*;
use crate::netlink::Request;

fn answered(request: Request) -> RouteMessage {
    let RouteNetlinkMessage::NewRoute(message) = request.message else { panic!("{request:?}") };
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    RouteMessage::parse(&bytes[..]).unwrap()
}

fn hex(attributes: &[(u16, Vec<u8>)]) -> String {
    raw::to_hex(attributes.iter().map(|(kind, value)| (*kind, raw::bytes(&DefaultNla::new(*kind, value.clone())))).collect())
}

/// Attributes that our fields don't name: realm, mark, preference, encapsulations with known and unknown parts (the type is
/// after it, as the kernel sends it), time to live, a congestion algorithm, and one that nobody knows.
fn any_other() -> impl Strategy<Value = String> {
    const NESTED: u16 = 0x8000;
    let encap = |parts: &[(u16, Vec<u8>)], kind: u8| {
        let value: Vec<u8> = parts.iter().flat_map(|(k, v)| raw::bytes(&DefaultNla::new(*k, v.clone()))).collect();
        vec![(21u16, vec![kind, 0]), (22 | NESTED, value)]
    };
    prop_oneof![
        Just(vec![]),
        Just(vec![(20u16, vec![1])]),
        Just(vec![(11, vec![1, 0, 2, 0]), (16, vec![9, 0, 0, 0]), (23, vec![9, 0, 0, 0]), (99, vec![1, 2, 3])]),
        Just(encap(&[(1, vec![0, 0, 0, 0, 0, 0, 0, 9]), (2, vec![10, 0, 0, 1]), (4, vec![3]), (6, vec![0, 4])], 2)),
        // Unknown parts, on which the library would panic.
        Just(encap(&[(2, vec![10, 0, 0, 1]), (60, vec![1, 2, 3, 4, 5])], 2)),
        Just(encap(&[(60, vec![1, 2, 3, 4, 5])], 4)),
        Just(encap(&[(60, vec![1])], 10)),
        Just(encap(&[(1, vec![0, 0x06, 0x41, 0x40])], 1)),
        Just(encap(&[(1, vec![1, 2, 3])], 6)),
    ]
    .prop_map(|attributes| {
        // Sorted by type, where the nested flag does not count.
        let all = attributes.into_iter().map(|(k, v)| (k & !NESTED, raw::bytes(&DefaultNla::new(k, v))));
        raw::to_hex(all.collect())
    })
}

fn any_ip(ipv6: bool) -> BoxedStrategy<IpAddr> {
    if ipv6 { any::<[u8; 16]>().prop_map(IpAddr::from).boxed() } else { any::<[u8; 4]>().prop_map(IpAddr::from).boxed() }
}

fn any_net(ipv6: bool) -> BoxedStrategy<IpNet> {
    (any_ip(ipv6), 0..=if ipv6 { 128u8 } else { 32 }).prop_map(|(ip, len)| IpNet::new(ip, len).unwrap().trunc()).boxed()
}

fn any_hop() -> impl Strategy<Value = NextHop> {
    let gateway = proptest::option::of(any::<bool>().prop_flat_map(any_ip));
    let other = prop_oneof![Just(String::new()), Just(hex(&[(11, vec![1, 0, 2, 0])]))];
    (1u32..100, gateway, 1u16..=256, any::<bool>(), other).prop_map(|(index, gateway, weight, onlink, other)| NextHop {
        index,
        gateway,
        weight,
        onlink,
        other,
    })
}

fn any_route() -> impl Strategy<Value = Route> {
    any::<bool>().prop_flat_map(|ipv6| {
        let ips = (proptest::option::of(any::<bool>().prop_flat_map(any_ip)), proptest::option::of(any_ip(ipv6)));
        let from = if ipv6 { proptest::option::of(any_net(true)).boxed() } else { Just(None).boxed() };
        let from = from.prop_map(|net: Option<IpNet>| net.filter(|net| net.prefix_len() > 0));
        let numbers = (any::<u32>(), any::<Option<u32>>(), any::<(u8, u8, bool)>(), 1u8..5, 0u8..=255);
        let metrics = proptest::collection::btree_map(1u16..16, any::<u32>(), 0..4);
        let hops = proptest::collection::vec(any_hop(), 0..3);
        (any_net(ipv6), ips, from, numbers, metrics, hops, any_other()).prop_map(
            |(destination, ips, from, n, metrics, hops, other)| {
                let (table, metric, (scope, protocol, onlink), kind, tos) = n;
                let mut route = Route::to(destination);
                (route.gateway, route.source, route.from) = (ips.0, ips.1, from);
                (route.table, route.metric, route.scope, route.protocol) = (table, metric, scope, protocol);
                (route.onlink, route.kind, route.tos) = (onlink, kind, tos);
                (route.metrics, route.next_hops, route.other) = (metrics.into_iter().collect(), hops, other);
                if !route.next_hops.is_empty() {
                    route.gateway = None;
                }
                route
            },
        )
    })
}

proptest! {
    #[test]
    fn round_trip(route in any_route(), index in 1u32..1000) {
        let mut message = answered(add_request(index, &route, false));
        // The kernel shows an expiry in another attribute than it takes.
        if let Some(seconds) = route.expires() {
            message.attributes.push(RouteAttribute::CacheInfo(cache_info(seconds * 100)));
        }
        let (links, read) = from_message(&message).unwrap();
        if !route.is_ipv6() && route.expires().is_some() {
            prop_assert_eq!(read, route.without_expiry());
        } else {
            prop_assert_eq!(&read, &route);
            let mut wanted: Vec<u32> = route.next_hops.iter().map(|hop| hop.index).collect();
            wanted.sort_unstable();
            wanted.dedup();
            prop_assert_eq!(links, if wanted.is_empty() { vec![index] } else { wanted });
        }
    }

    #[test]
    fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200), family in prop_oneof![Just(2u8), Just(10)]) {
        let bytes: Vec<u8> = std::iter::once(family).chain(bytes).collect();
        if let Ok(message) = RouteMessage::parse(&bytes[..]) {
            let _ = from_message(&message);
        }
    }
}

fn cache_info(expires: u32) -> netlink_packet_route::route::RouteCacheInfo {
    let mut bytes = [0; 32];
    bytes[8..12].copy_from_slice(&expires.to_ne_bytes());
    netlink_packet_route::route::RouteCacheInfo::parse(&bytes).unwrap()
}

#[test]
fn a_congestion_algorithm_is_kept_with_all_metrics() {
    let mut route = Route::to("10.0.0.0/8".parse().unwrap());
    // A text of four bytes, which looks like a number.
    let metrics: Vec<u8> = [(2u16, vec![0xdc, 5, 0, 0]), (16, b"bbr\0".to_vec())]
        .iter()
        .flat_map(|(k, v)| raw::bytes(&DefaultNla::new(*k, v.clone())))
        .collect();
    route.other = hex(&[(8, metrics)]);
    let (_, read) = from_message(&answered(add_request(3, &route, false))).unwrap();
    assert_eq!(read, route);
}

#[test]
fn dead_ends_leave_by_no_link() {
    for kind in 6..=9 {
        let mut route = Route::to("10.0.0.0/8".parse().unwrap());
        route.kind = kind;
        assert_eq!(from_message(&answered(add_request(3, &route, false))).unwrap(), (vec![], route));
    }
}

#[test]
fn one_hundred_next_hops() {
    let mut route = Route::to("10.0.0.0/8".parse().unwrap());
    route.next_hops = (1..=100).map(|i| NextHop::by(i, Some(IpAddr::from([10, 0, 0, 1])))).collect();
    assert_eq!(from_message(&answered(add_request(3, &route, false))).unwrap().1, route);
}

#[test]
fn keys() {
    let route = Route::to("10.0.0.0/8".parse().unwrap());
    let zero = Route { metric: Some(0), gateway: Some(IpAddr::from([10, 0, 0, 1])), ..route.clone() };
    assert!(route.same_key(&zero));
    assert!(!route.same_key(&Route { metric: Some(1), ..route.clone() }));
    assert!(!route.same_key(&Route { tos: 4, ..route.clone() }));
}

#[test]
fn in_words() {
    let mut route = Route::to("10.0.0.0/8".parse().unwrap());
    route.gateway = Some(IpAddr::from([192, 0, 2, 1]));
    (route.table, route.metric) = (100, Some(50));
    assert_eq!(route.to_string(), "10.0.0.0/8 via 192.0.2.1 metric 50 table 100 proto 4 scope 0");
}
