//! The netlink socket against the kernel, in scratch network namespaces.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dranic::netdev::link::{self, Link};
use dranic::netlink::{Message, NLM_F_DUMP, NLM_F_REQUEST, NetlinkError, Request, RouteSocket, Socket, decode};
use dranic::netns::Netns;
use dranic_testbed::fabric::links::{self, Veth, soon};
use dranic_testbed::fabric::{new_netns, root, with_scratch_netns};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage};

fn veth(socket: &mut RouteSocket, name: &str, peer: &str) -> u32 {
    Veth { name, peer, ..Veth::default() }.create(socket).unwrap();
    links::find(socket, name).unwrap().index
}

fn set_mtu(index: u32, mtu: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::Mtu(mtu));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// 10.0.x.y/32 for the `n`th address.
fn add_address(index: u32, n: u16) -> Request {
    let [high, low] = n.to_be_bytes();
    let address = std::net::Ipv4Addr::new(10, 0, high, low).into();
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.family = netlink_packet_route::AddressFamily::Inet;
    message.header.prefix_len = 32;
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    Request { message: RouteNetlinkMessage::NewAddress(message), flags: 0x600 } // CREATE | EXCL
}

#[test]
fn the_kernels_own_words_are_in_the_error() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        let index = veth(&mut socket, "a", "b");
        let error = socket.request(set_mtu(index, 70_000), soon()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL));
        assert_eq!(error.to_string(), "Invalid argument (os error 22): mtu greater than device maximum");
        assert!(socket.request(set_mtu(index, 9000), soon()).is_ok());
        assert_eq!(links::find(&mut socket, "a").unwrap().mtu, 9000);
    });
}

#[test]
fn answers_of_a_pipeline_come_in_order_and_a_refusal_stops_nothing() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        let index = veth(&mut socket, "a", "b");
        let mut requests: Vec<_> = (0..500).map(|n| add_address(index, n)).collect();
        requests[77] = add_address(index, 76);
        requests[200] = add_address(9999, 1000);
        requests[499] = set_mtu(index, 1);
        let answers = socket.pipeline(requests, soon());
        let refused: Vec<_> = answers.iter().enumerate().filter_map(|(i, a)| a.as_ref().err().map(|e| (i, e.errno()))).collect();
        assert_eq!(refused, [(77, Some(libc::EEXIST)), (200, Some(libc::ENODEV)), (499, Some(libc::EINVAL))]);
        assert_eq!(answers.len(), 500);
        let all = socket.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()), soon()).unwrap();
        let ours = all.iter().filter(|m| matches!(m, RouteNetlinkMessage::NewAddress(m) if m.header.index == index)).count();
        assert_eq!(ours, 497);
    });
}

#[test]
fn acknowledgements_never_overflow_the_receive_buffer() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        let index = veth(&mut socket, "a", "b");
        let requests = (0..5000).map(|n| set_mtu(index, 1000 + n % 2)).collect();
        assert!(socket.pipeline(requests, soon()).iter().all(Result::is_ok));
    });
}

#[test]
fn after_the_deadline_nothing_is_sent() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        let index = veth(&mut socket, "a", "b");
        let past = Instant::now();
        let answers = socket.pipeline(vec![set_mtu(index, 1400), set_mtu(index, 1401)], past);
        assert!(matches!(&answers[..], [Err(NetlinkError::NotSent), Err(NetlinkError::NotSent)]), "{answers:?}");
        assert!(matches!(socket.request(set_mtu(index, 1400), past), Err(NetlinkError::NotSent)));
        assert!(matches!(link::list(&mut socket, past), Err(NetlinkError::NotSent)));
        assert!(matches!(link::by_index(&mut socket, index, past), Err(NetlinkError::NotSent)));
        assert_eq!(links::find(&mut socket, "a").unwrap().mtu, 1500);
    });
}

#[test]
fn a_reply_that_never_comes_is_waited_for_until_the_deadline() {
    if !root() {
        return;
    }
    let mut socket = Socket::open(0).unwrap();
    // The kernel says nothing to an NLMSG_NOOP that asks for no acknowledgement.
    let silent = Message { kind: decode::NLMSG_NOOP, flags: 0, payload: Vec::new() };
    let start = Instant::now();
    let error = socket.get(&silent, start + Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, NetlinkError::Timeout), "{error}");
    assert!((50..1000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
}

#[test]
fn a_dump_given_up_half_way_does_not_disturb_the_next_calls() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        for i in 0..100 {
            veth(&mut socket, &format!("a{i}"), &format!("b{i}"));
        }
        let mut given_up = 0;
        for micros in (0..2000).step_by(5) {
            match link::list(&mut socket, Instant::now() + Duration::from_micros(micros)) {
                Err(NetlinkError::Timeout) => given_up += 1,
                Err(NetlinkError::NotSent) => {}
                other => assert_eq!(other.unwrap().len(), 201),
            }
            if given_up % 2 == 1 {
                assert_eq!(links::find(&mut socket, "b7").unwrap().name, "b7", "the late parts of the dump are skipped");
            }
        }
        assert!(given_up > 0, "no dump was given up: the test tests nothing");
        assert_eq!(link::list(&mut socket, soon()).unwrap().len(), 201);
    });
}

#[test]
fn a_socket_stays_in_the_namespace_it_was_made_in() {
    if !root() {
        return;
    }
    let netns = new_netns().unwrap();
    let mut inside = RouteSocket::open_in(&netns).unwrap();
    veth(&mut inside, "only-here", "other");
    assert_eq!(link::list(&mut inside, soon()).unwrap().len(), 3);
    let mut outside = RouteSocket::open().unwrap();
    assert_eq!(link::by_name(&mut outside, "only-here", soon()).unwrap(), None);
    let inside_again = netns.run(|| link::list(&mut RouteSocket::open().unwrap(), soon()).unwrap()).unwrap();
    assert_eq!(inside_again.len(), 3);
}

/// The ends of a veth, one dumped early and one late (the kernel goes by index), which come and go in the same moment.
const EARLY: u32 = 2;
const LATE: u32 = 5000;

/// Makes and deletes that veth in `netns` until told to stop; returns how often.
fn churn(netns: &Netns, stop: &AtomicBool) -> u32 {
    let mut socket = RouteSocket::open_in(netns).unwrap();
    let end = |index, name: &str| {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        message
    };
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut message = end(EARLY, "early");
        let peer = LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(end(LATE, "late"))));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth), peer]));
        let create = Request { message: RouteNetlinkMessage::NewLink(message), flags: 0x600 };
        socket.request(create, soon()).unwrap();
        links::delete(&mut socket, EARLY).unwrap();
        rounds += 1;
    }
    rounds
}

/// The links of a dump made without care for `NLM_F_DUMP_INTR`, and whether one of its messages had that flag.
fn careless_dump() -> (Vec<Link>, bool) {
    let mut socket = netlink_sys::Socket::new(0).unwrap();
    socket.bind_auto().unwrap();
    let mut request = 32u32.to_ne_bytes().to_vec();
    request.extend(18u16.to_ne_bytes()); // RTM_GETLINK
    request.extend((NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    request.resize(32, 0);
    socket.send(&request, 0).unwrap();
    let (mut links, mut interrupted) = (Vec::new(), false);
    loop {
        let mut buffer = Vec::with_capacity(64 << 10);
        socket.recv(&mut buffer, 0).unwrap();
        for frame in decode::frames(&buffer).map(Result::unwrap) {
            interrupted |= frame.flags & decode::NLM_F_DUMP_INTR != 0;
            if frame.kind == decode::NLMSG_DONE {
                return (links, interrupted);
            }
            links.extend(link::parse(frame.payload));
        }
    }
}

/// Whether all links that never change are there.
fn is_complete(links: &[Link]) -> bool {
    links.iter().filter(|link| link.name.starts_with(['a', 'b'])).count() == 120
}

/// Whether the links can have been there at one time.
fn is_consistent(links: &[Link]) -> bool {
    let has = |index| links.iter().any(|link| link.index == index);
    has(EARLY) == has(LATE)
}

#[test]
fn dumps_under_churn_are_complete_and_of_one_moment() {
    if !root() {
        return;
    }
    with_scratch_netns(|netns| {
        let mut socket = RouteSocket::open().unwrap();
        links::create(&mut socket, "ifb", "first").unwrap();
        for i in 0..60 {
            veth(&mut socket, &format!("a{i}"), &format!("b{i}"));
        }
        let first = links::find(&mut socket, "first").unwrap().index;
        assert_eq!(first, EARLY);
        links::delete(&mut socket, first).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let churning = scope.spawn(|| churn(netns, &stop));
            let (mut dumps, mut interrupted, mut torn) = (0, 0, 0);
            let until = soon();
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // Until we know that a careless dump would have gone wrong.
                while Instant::now() < until && (torn < 5 || dumps < 300) {
                    let found = link::list(&mut socket, soon()).unwrap();
                    assert!(is_complete(&found), "a link that never changed is missing");
                    assert!(is_consistent(&found), "the dump mixes two moments");
                    dumps += 1;
                    let (found, marked) = careless_dump();
                    interrupted += u32::from(marked);
                    torn += u32::from(!is_consistent(&found));
                }
            }));
            stop.store(true, Ordering::Relaxed);
            let rounds = churning.join().unwrap();
            println!("{dumps} dumps good in {rounds} rounds of churn; without care {interrupted} interrupted, {torn} wrong");
            checked.unwrap();
            assert!(torn > 0, "the churn disturbs no dump: the test tests nothing");
        });
    });
}
