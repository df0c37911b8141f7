//! Links, moves and the monitor against the kernel, in scratch network namespaces.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use dranic::netdev::address::{self, Address};
use dranic::netdev::link::{self, Link};
use dranic::netdev::monitor::{Change, Group, Monitor};
use dranic::netdev::moves::{self, Move, Occupied, Refusal, Whereabouts};
use dranic::netlink::{NetlinkError, Request, RouteSocket};
use dranic::netns::Netns;
use dranic_testbed::fabric::links::{self, Veth, soon};
use dranic_testbed::fabric::{PodNetns, new_netns, root, with_scratch_netns};
use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};

/// A host and a pod, each with a socket, and a link `nic0` in the host.
struct Scene {
    _host: Netns,
    pod: Netns,
    from: RouteSocket,
    to: RouteSocket,
    nic: Link,
}

impl Scene {
    fn new() -> Self {
        let (host, pod) = (new_netns().unwrap(), new_netns().unwrap());
        let mut from = RouteSocket::open_in(&host).unwrap();
        let to = RouteSocket::open_in(&pod).unwrap();
        Veth { name: "nic0", peer: "cable0", ..Veth::default() }.create(&mut from).unwrap();
        let nic = links::find(&mut from, "nic0").unwrap();
        Self { _host: host, pod, from, to, nic }
    }

    /// A link that is already in the pod.
    fn in_pod(&mut self, name: &str) -> Link {
        links::create(&mut self.to, "ifb", name).unwrap();
        links::find(&mut self.to, name).unwrap()
    }

    fn to_pod(&self, name: &str) -> Move<'_> {
        Move { index: self.nic.index, target: self.pod.as_fd(), new_index: 1000, name: name.into(), mtu: None, address: None }
    }

    /// What the check says beforehand, what the kernel answers (errno), and where the link then is, under which name and MTU.
    fn play(&mut self, change: impl FnOnce(&mut Move<'_>)) -> (Result<(), Refusal>, Option<i32>, String) {
        let there = Occupied::by(&link::list(&mut self.to, soon()).unwrap());
        let pod = self.pod.try_clone().unwrap();
        let mut m = Move { target: pod.as_fd(), ..self.to_pod("gpu0") };
        change(&mut m);
        let checked = moves::check(&self.nic, &m, &there);
        let answer = moves::send(&mut self.from, std::slice::from_ref(&m), soon()).pop().unwrap();
        let errno = answer.err().map(|error| error.errno().unwrap());
        let address = m.address.as_ref();
        let where_is = moves::locate(&mut self.from, &mut self.to, &self.nic, m.new_index, address, soon()).unwrap();
        let text = match where_is {
            Whereabouts::Origin(link) => format!("host {} {}", link.name, link.mtu),
            Whereabouts::Target(link) => format!("pod {} {}", link.name, link.mtu),
            Whereabouts::Nowhere => "nowhere".into(),
        };
        (checked, errno, text)
    }
}

#[test]
fn a_move_does_everything_in_one_message() {
    if !root() {
        return;
    }
    let mut scene = Scene::new();
    let address: link::LinkAddress = "02:00:00:00:00:77".parse().unwrap();
    let (checked, errno, place) = scene.play(|m| {
        m.mtu = Some(9000);
        m.address = Some(address.clone());
    });
    assert_eq!((checked, errno, place.as_str()), (Ok(()), None, "pod gpu0 9000"));
    let moved = links::find(&mut scene.to, "gpu0").unwrap();
    assert_eq!((moved.index, moved.is_up(), moved.address), (1000, false, Some(address)));
    assert!(moved.link_netnsid.is_some(), "its peer stayed behind");
}

/// The table of what the kernel leaves behind, and that the check sees each case coming.
#[test]
fn what_the_kernel_refuses_or_does_by_half_is_seen_beforehand_and_found_afterwards() {
    if !root() {
        return;
    }
    let (exists, invalid, busy) = (Some(libc::EEXIST), Some(libc::EINVAL), Some(libc::EBUSY));
    let name_taken = |name: &str| Err(Refusal::NameTaken { name: name.into() });

    let mut scene = Scene::new();
    scene.in_pod("gpu0");
    assert_eq!(scene.play(|_| {}), (name_taken("gpu0"), exists, "pod nic0 1500".into()), "moved, not renamed");

    let mut scene = Scene::new();
    scene.in_pod("gpu0");
    scene.in_pod("nic0");
    assert_eq!(scene.play(|_| {}), (name_taken("gpu0"), exists, "host nic0 1500".into()));

    let mut scene = Scene::new();
    scene.in_pod("nic0");
    assert_eq!(scene.play(|m| m.name = "nic0".into()), (name_taken("nic0"), exists, "host nic0 1500".into()));

    let mut scene = Scene::new();
    scene.in_pod("nic0");
    assert_eq!(scene.play(|_| {}), (Ok(()), None, "pod gpu0 1500".into()), "only the old name is taken: no matter");

    let mut scene = Scene::new();
    let refusal = Err(Refusal::Mtu { mtu: 70_000, min: 68, max: 65_535 });
    assert_eq!(scene.play(|m| m.mtu = Some(70_000)), (refusal, invalid, "pod nic0 1500".into()), "moved, nothing else");

    let mut scene = Scene::new();
    let taken = scene.in_pod("ifb7").index;
    let refusal = Err(Refusal::IndexTaken { index: taken });
    assert_eq!(scene.play(|m| m.new_index = taken), (refusal, busy, "host nic0 1500".into()));

    let mut scene = Scene::new();
    let refusal = Err(Refusal::BadName { name: "r%d".into() });
    assert_eq!(scene.play(|m| m.name = "r%d".into()), (refusal, None, "pod r0 1500".into()), "the kernel fills patterns in");
}

#[test]
fn altnames_clash_too() {
    if !root() {
        return;
    }
    let exists = Some(libc::EEXIST);
    let mut scene = Scene::new();
    let taken = scene.in_pod("ifb7").index;
    links::add_alt_name(&mut scene.to, taken, "gpu0").unwrap();
    let refusal = Err(Refusal::NameTaken { name: "gpu0".into() });
    assert_eq!(scene.play(|_| {}), (refusal, exists, "pod nic0 1500".into()));

    let mut scene = Scene::new();
    scene.in_pod("enp5s0");
    links::add_alt_name(&mut scene.from, scene.nic.index, "enp5s0").unwrap();
    scene.nic = links::find(&mut scene.from, "nic0").unwrap();
    let refusal = Err(Refusal::AltNameTaken { name: "enp5s0".into() });
    assert_eq!(scene.play(|_| {}), (refusal, exists, "host nic0 1500".into()));

    let mut scene = Scene::new();
    links::add_alt_name(&mut scene.from, scene.nic.index, "gpu0").unwrap();
    scene.nic = links::find(&mut scene.from, "nic0").unwrap();
    let refusal = Err(Refusal::OwnAltName { name: "gpu0".into() });
    let (checked, errno, place) = scene.play(|_| {});
    assert_eq!((checked, errno), (refusal, exists));
    assert_eq!(place, "pod nic0 1500");
}

#[test]
fn a_link_that_is_gone_is_nowhere_and_another_at_its_index_is_not_taken_for_it() {
    if !root() {
        return;
    }
    let mut scene = Scene::new();
    links::delete(&mut scene.from, scene.nic.index).unwrap();
    let locate = |scene: &mut Scene| moves::locate(&mut scene.from, &mut scene.to, &scene.nic, 1000, None, soon()).unwrap();
    assert_eq!(locate(&mut scene), Whereabouts::Nowhere);
    let mut scene = Scene::new();
    Veth { name: "nic9", peer: "cable9", ..Veth::default() }.create(&mut scene.to).unwrap();
    let other = links::find(&mut scene.to, "nic9").unwrap().index;
    let found = moves::locate(&mut scene.from, &mut scene.to, &scene.nic, other, None, soon()).unwrap();
    assert_eq!(found, Whereabouts::Origin(Box::new(scene.nic.clone())));
}

#[test]
fn moves_stop_at_the_deadline_and_say_which_were_not_sent() {
    if !root() {
        return;
    }
    let mut scene = Scene::new();
    let mut nics = vec![scene.nic.clone()];
    for i in 1..8 {
        let (name, peer) = (format!("nic{i}"), format!("cable{i}"));
        Veth { name: &name, peer: &peer, ..Veth::default() }.create(&mut scene.from).unwrap();
        nics.push(links::find(&mut scene.from, &name).unwrap());
    }
    let mut taken = BTreeSet::from([1]);
    let mut all = Vec::new();
    for nic in &nics {
        let new_index = moves::pick_index(&taken, nic.index);
        taken.insert(new_index);
        all.push(Move {
            index: nic.index,
            target: scene.pod.as_fd(),
            new_index,
            name: nic.name.clone(),
            mtu: None,
            address: None,
        });
    }
    let start = Instant::now();
    let answers = moves::send(&mut scene.from, &all, start + Duration::from_millis(5));
    let took = start.elapsed();
    let sent = answers.iter().take_while(|answer| answer.is_ok()).count();
    println!("{sent} of 8 moves in {took:?}");
    assert!(sent < 8, "a move of less than a millisecond? {answers:?}");
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(i < sent, answer.is_ok());
        assert!(i < sent || matches!(answer, Err(NetlinkError::NotSent)), "{answer:?}");
        let found = moves::locate(&mut scene.from, &mut scene.to, &nics[i], all[i].new_index, None, soon()).unwrap();
        assert_eq!(i < sent, matches!(found, Whereabouts::Target(_)), "{found:?}");
        assert_eq!(i < sent, !matches!(found, Whereabouts::Origin(_)), "{found:?}");
    }
    let start = Instant::now();
    assert!(moves::send(&mut scene.from, &all[sent..], soon()).iter().all(Result::is_ok));
    println!("{} moves in {:?}", 8 - sent, start.elapsed());
}

#[test]
fn links_are_found_by_index_name_and_altname() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        let mac = "02:00:00:00:00:05".parse().unwrap();
        Veth { name: "nic0", peer: "cable0", mac: Some(&mac), mtu: Some(4000), ..Veth::default() }.create(&mut socket).unwrap();
        links::create(&mut socket, "bridge", "rail0").unwrap();
        let (nic, bridge) = (links::find(&mut socket, "nic0").unwrap(), links::find(&mut socket, "rail0").unwrap());
        links::add_alt_name(&mut socket, nic.index, "a-name-of-more-than-fifteen-bytes").unwrap();
        links::set_master(&mut socket, nic.index, bridge.index).unwrap();
        links::up(&mut socket, "nic0").unwrap();

        let found = link::by_name(&mut socket, "a-name-of-more-than-fifteen-bytes", soon()).unwrap().unwrap();
        assert_eq!(link::by_index(&mut socket, nic.index, soon()).unwrap().unwrap(), found);
        assert!(link::list(&mut socket, soon()).unwrap().contains(&found), "one link and the dump say the same");
        assert_eq!(found.alt_names, ["a-name-of-more-than-fifteen-bytes"]);
        assert_eq!((found.name.as_str(), found.kind.as_deref(), found.arphrd, found.mtu), ("nic0", Some("veth"), 1, 4000));
        assert_eq!((found.min_mtu, found.max_mtu), (Some(68), Some(65_535)));
        assert_eq!((found.address, found.master), (Some(mac), Some(bridge.index)));
        let peer = links::find(&mut socket, "cable0").unwrap();
        assert_eq!((found.parent, found.link_netnsid), (Some(peer.index), None));
        assert_eq!((found.oper_state.as_str(), nic.oper_state.as_str()), ("lowerlayerdown", "down"));

        link::set_up(&mut socket, nic.index, false, soon()).unwrap();
        assert!(!links::find(&mut socket, "nic0").unwrap().is_up());
        for name in ["", "nosuch", "a-name-of-more-than-fifteen-bytes-not-there", &"x".repeat(500)] {
            assert_eq!(link::by_name(&mut socket, name, soon()).unwrap(), None);
        }
        for index in [0, 999_999, u32::MAX] {
            assert_eq!(link::by_index(&mut socket, index, soon()).unwrap(), None);
        }
        assert!(links::find(&mut socket, "lo").unwrap().is_loopback());
    });
}

#[test]
fn a_name_that_is_not_utf8_hides_no_link() {
    if !root() {
        return;
    }
    with_scratch_netns(|_| {
        let mut socket = RouteSocket::open().unwrap();
        Veth { name: "nic0", peer: "cable0", ..Veth::default() }.create(&mut socket).unwrap();
        let index = links::find(&mut socket, "nic0").unwrap().index;
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes.push(LinkAttribute::Other(DefaultNla::new(3, b"n\xff\xfec\0".to_vec())));
        socket.request(Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }, soon()).unwrap();
        let names: Vec<_> = link::list(&mut socket, soon()).unwrap().into_iter().map(|link| link.name).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        assert!(names.contains(&"n\u{fffd}\u{fffd}c".to_owned()), "{names:?}");
    });
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/thread-self/fd").unwrap().count()
}

#[test]
fn file_descriptors_do_not_leak() {
    if !root() {
        return;
    }
    let cycles = || {
        // A table of our own: the other tests of this process open and close all the time.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES).unwrap();
        let mut scene = Scene::new();
        let pod_path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&scene.pod.as_fd()));
        let pod_path = pod_path.replace("self", "thread-self");
        let before = open_fds();
        for round in 0..200 {
            let pod = Netns::open(std::path::Path::new(&pod_path)).unwrap();
            let mut to = RouteSocket::open_in(&pod).unwrap();
            let taken = Occupied::by(&link::list(&mut to, soon()).unwrap());
            moves::check(&scene.nic, &Move { target: pod.as_fd(), ..scene.to_pod("gpu0") }, &taken).unwrap();
            let locate = |from: &mut RouteSocket, to: &mut RouteSocket, nic: &Link| {
                moves::locate(from, to, nic, 1000, None, soon()).unwrap()
            };
            if round % 20 == 0 {
                assert_eq!(scene.play(|_| {}).2, "pod gpu0 1500");
                assert!(matches!(locate(&mut scene.from, &mut to, &scene.nic), Whereabouts::Target(_)));
                let home = scene._host.try_clone().unwrap();
                let back = Move {
                    index: 1000,
                    target: home.as_fd(),
                    new_index: scene.nic.index,
                    name: "nic0".into(),
                    mtu: None,
                    address: None,
                };
                moves::send(&mut to, &[back], soon()).pop().unwrap().unwrap();
            }
            assert_eq!(locate(&mut scene.from, &mut to, &scene.nic), Whereabouts::Origin(Box::new(scene.nic.clone())));
        }
        (before, open_fds())
    };
    let (before, after) = std::thread::scope(|scope| scope.spawn(cycles).join().unwrap());
    assert_eq!(before, after);
}

fn on_runtime(work: impl AsyncFnOnce(Netns) + Send) {
    with_scratch_netns(|netns| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(work(netns.try_clone().unwrap()));
    });
}

const SHORT: Duration = Duration::from_millis(30);

#[test]
fn the_monitor_tells_of_what_it_listens_to_and_of_nothing_else() {
    if !root() {
        return;
    }
    on_runtime(async |netns| {
        let mut monitor = Monitor::open(&netns, &[Group::Link]).unwrap();
        let mut addresses = Monitor::open(&netns, &[Group::Address, Group::Route]).unwrap();
        let mut socket = RouteSocket::open().unwrap();
        assert!(tokio::time::timeout(SHORT, monitor.changed()).await.is_err(), "nothing happened yet");

        links::create(&mut socket, "ifb", "x0").unwrap();
        assert_eq!(monitor.changed().await.unwrap(), Change::Events);
        assert!(tokio::time::timeout(SHORT, monitor.changed()).await.is_err(), "all that was queued has been read");
        assert!(tokio::time::timeout(SHORT, addresses.changed()).await.is_err(), "a link is no address");

        let index = links::find(&mut socket, "x0").unwrap().index;
        links::add_address(&mut socket, index, "10.1.2.3/24".parse().unwrap()).unwrap();
        assert_eq!(addresses.changed().await.unwrap(), Change::Events);
        // What comes while nobody waits is told to the next who does.
        links::delete(&mut socket, index).unwrap();
        assert_eq!(monitor.changed().await.unwrap(), Change::Events);
    });
}

#[test]
fn a_monitor_that_was_too_slow_says_so_and_goes_on() {
    if !root() {
        return;
    }
    on_runtime(async |netns| {
        let mut monitor = Monitor::with_receive_buffer(&netns, &[Group::Link], 1).unwrap();
        let mut socket = RouteSocket::open().unwrap();
        for i in 0..20 {
            links::create(&mut socket, "ifb", &format!("x{i}")).unwrap();
        }
        assert_eq!(monitor.changed().await.unwrap(), Change::Overrun);
        assert!(tokio::time::timeout(SHORT, monitor.changed()).await.is_err());
        let index = links::find(&mut socket, "x7").unwrap().index;
        link::set_up(&mut socket, index, true, soon()).unwrap();
        assert_eq!(monitor.changed().await.unwrap(), Change::Events);
    });
}

#[test]
fn a_monitor_needs_a_runtime() {
    if !root() {
        return;
    }
    assert!(matches!(Monitor::open(&Netns::current().unwrap(), &[Group::Link]), Err(NetlinkError::Io(_))));
}

#[test]
fn a_namespace_is_found_by_its_address() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("no-namespace"), "").unwrap();
    let pods = ["a", "b", "c"].map(|name| PodNetns::new(dir.path(), name).unwrap());
    let ip = |last: u8| IpAddr::from([10, 9, 8, last]);
    // Two have an address of their own, and another that both have.
    for (pod, last) in pods.iter().zip([1, 2]) {
        let mut socket = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
        links::create(&mut socket, "ifb", "eth0").unwrap();
        let index = links::find(&mut socket, "eth0").unwrap().index;
        let requests = Vec::from([ip(last), ip(9)].map(|ip| address::add_request(index, &Address::permanent(ip, 24))));
        assert!(socket.pipeline(requests, soon()).iter().all(Result::is_ok));
    }
    let find = |ips: &[IpAddr]| address::namespace_with(dir.path(), ips, soon());
    assert_eq!(find(&[ip(1)]).as_deref(), Some(pods[0].path()));
    assert_eq!(find(&[ip(3), ip(2)]).as_deref(), Some(pods[1].path()));
    assert_eq!(find(&[ip(9)]), None, "two have it");
    assert_eq!(find(&[ip(3)]), None);
    assert_eq!(find(&[]), None);
}
