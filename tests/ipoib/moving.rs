//! Exclusive mode: the RDMA device moves, and its IPoIB link is made anew each time.

use dranic::attach::Step;
use dranic::attach::engine::Released;
use dranic::ledger::{Durability, Phase};
use dranic::netdev::Route;
use dranic::rdma::{NetnsMode, Protocol};

use super::*;
use crate::rig::names;

/// What a new link does not have by itself.
const RICH: [&str; 6] = [
    "ip link set ib0 mtu 2044",
    "ip link set ib0 txqueuelen 77",
    "ip link set ib0 alias rail-zero",
    "ip link property add dev ib0 altname rail0-ib",
    "ip address add 10.80.0.1/24 dev ib0",
    "ip link set ib0 up",
];

fn release(engine: &Engine, pod: &str) -> Vec<Released> {
    engine.release(&pod_ref(pod).uid, &sandbox(pod))
}

#[test]
fn it_is_found_in_the_pod_and_on_the_host_again() {
    let Some(ports) = Ports::new(NetnsMode::Exclusive, 1) else { return };
    RICH.iter().for_each(|line| run(line));
    let (before, index) = (ports.state(0), ports.link(0).index);
    let engine = ports.engine();
    let (pod, one) = ports.lent(&engine, "a", &[0], r#"{"interface": {"name": "net7"}}"#);
    let netns = pod.netns().unwrap();
    assert_eq!((names(&ports.guest.host), names(&netns)), (vec![], vec!["ibd0".to_owned()]));
    assert!(ports.find(0).is_none(), "nothing of it is on the host");
    let inside = by_name(&netns, "net7");
    assert_eq!((inside.mtu, inside.is_up(), inside.tx_queue_len), (2044, true, Some(77)));
    assert_eq!((inside.alias.as_deref(), inside.alt_names.as_slice()), (Some("rail-zero"), &["rail0-ib".to_owned()][..]));
    let seen = Snapshot::take(&mut RouteSocket::open_in(&netns).unwrap(), soon()).unwrap();
    assert!(seen.addresses.iter().any(|(at, a)| *at == inside.index && a.ip.to_string() == "10.80.0.1"), "{:?}", seen.addresses);
    let device = engine.records()[0].devices[0].clone();
    let rdma = device.rdma.as_ref().unwrap();
    assert_eq!((rdma.protocol, rdma.mode, device.phase), (Protocol::InfiniBand, NetnsMode::Exclusive, Phase::Attached));
    assert_eq!(device.attachment.as_ref().unwrap().index, inside.index);
    assert_eq!(device.plan.steps.iter().map(Step::kind).take(2).collect::<Vec<_>>(), ["rdma", "move"]);
    // Once more, and nothing is moved.
    assert_eq!(engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap().devices, 0);

    assert_eq!(release(&engine, "a"), [Released::Moved(device.share())]);
    let back = ports.link(0);
    assert_ne!(back.index, index, "it is another one");
    assert_eq!((back.name.as_str(), back.mtu, back.is_up()), ("ib0", 2044, false), "as prepare left it");
    assert_eq!((names(&ports.guest.host), engine.records()[0].devices[0].host.index), (vec!["ibd0".to_owned()], back.index));
    // And the next sandbox.
    let again = ports.guest.pod("again");
    engine.attach(&pod_ref("a").uid, &sandbox("again"), again.path(), soon()).unwrap();
    assert_eq!(by_name(&again.netns().unwrap(), "net7").mtu, 2044);
    engine.unprepare(&one.claim).unwrap();
    ports.assert_same(&before, 0);
}

#[test]
fn those_that_come_back_at_once_have_their_own_names() {
    let Some(ports) = Ports::new(NetnsMode::Exclusive, 2) else { return };
    // The kernel gives out ib0 first: each has the other's then, or its own.
    for line in ["ip link set ib0 name x", "ip link set ib1 name ib0", "ip link set x name ib1"] {
        run(line);
    }
    let before = [ports.state(0), ports.state(1)];
    assert_eq!((before[0].name.as_str(), before[1].name.as_str()), ("ib1", "ib0"));
    let engine = ports.engine();
    let (pod, one) = ports.lent(&engine, "a", &[0, 1], "");
    let netns = pod.netns().unwrap();
    for (n, before) in before.iter().enumerate() {
        let function = by_name(&netns, &before.name).parent_device.unwrap().name;
        assert_eq!(function, ports.functions[n]);
    }
    assert_eq!(release(&engine, "a").len(), 2);
    assert_eq!((ports.link(0).name.as_str(), ports.link(1).name.as_str()), ("ib1", "ib0"));
    engine.unprepare(&one.claim).unwrap();
    before.iter().enumerate().for_each(|(n, before)| ports.assert_same(before, n));
}

#[test]
fn what_came_back_with_the_end_of_the_namespace_is_put_right() {
    let Some(ports) = Ports::new(NetnsMode::Exclusive, 1) else { return };
    run("ip link set ib0 name rail0");
    RICH.iter().for_each(|line| run(&line.replace("ib0", "rail0").replace("rail0-rail0", "rail0-ib")));
    let before = ports.state(0);
    let engine = ports.engine();
    let (pod, one) = ports.lent(&engine, "a", &[0], r#"{"interface": {"name": "net7"}}"#);
    drop((engine, pod));
    assert_eq!(ports.link(0).name, "ib0", "so the kernel does it");
    let engine = ports.engine();
    engine.recover();
    let back = ports.link(0);
    assert_eq!((back.name.as_str(), back.mtu, engine.records()[0].devices[0].phase), ("rail0", 2044, Phase::Prepared));
    engine.unprepare(&one.claim).unwrap();
    ports.assert_same(&before, 0);
}

#[test]
fn an_attach_that_fails_takes_it_back() {
    let Some(ports) = Ports::new(NetnsMode::Exclusive, 1) else { return };
    RICH.iter().for_each(|line| run(line));
    let before = ports.state(0);
    let engine = ports.engine();
    let one = ports.claim("a", &[0], r#"{"interface": {"name": "net7"}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let refused = |record: &mut dranic::ledger::ClaimRecord| {
        let mut route = Route::to("192.0.2.0/24".parse().unwrap());
        route.gateway = Some("198.51.100.1".parse().unwrap());
        record.devices[0].plan.steps.push(Step::Route { route, configured: true });
    };
    engine.ledger().update(&one.claim.uid, Durability::Process, refused).unwrap();
    let pod = ports.guest.pod("a");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err().to_string();
    assert!(error.contains("192.0.2.0/24"), "{error}");
    assert_eq!((names(&ports.guest.host), names(&pod.netns().unwrap())), (vec!["ibd0".to_owned()], vec![]));
    assert_eq!((ports.link(0).name.as_str(), engine.records()[0].devices[0].phase), ("ib0", Phase::Prepared));
    engine.unprepare(&one.claim).unwrap();
    ports.assert_same(&before, 0);
}

#[test]
fn partitions_of_the_host_are_not_ended() {
    let Some(ports) = Ports::new(NetnsMode::Exclusive, 1) else { return };
    run("ip link add link ib0 name ib0.8001 type ipoib pkey 0x8001");
    let engine = ports.engine();
    let error = engine.prepare(&ports.claim("a", &[0], ""), &pod_ref("a")).unwrap_err().to_string();
    assert!(error.contains("the host's partitions ib0.8001 of ib0 would end") && error.contains("ibd0"), "{error}");
    assert!(engine.records().is_empty());
}
