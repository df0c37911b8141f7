//! Shared mode: IPoIB links move as others do, and partitions are made on top of them.

use dranic::attach::engine::Released;
use dranic::ledger::Phase;
use dranic::netdev::child::{self, Child, IpoibMode};
use dranic::rdma::NetnsMode;

use super::*;
use crate::rig::names;

const PARTITION: &str =
    r#"{"interface": {"type": "ipoib", "ipoib": {"pkey": 32769}, "addresses": ["10.81.0.5/24"], "mtu": 2000}}"#;

#[test]
fn the_link_moves_alone() {
    let Some(ports) = Ports::new(NetnsMode::Shared, 1) else { return };
    for line in ["ip link set ib0 mtu 2044", "ip address add 10.80.0.1/24 dev ib0", "ip link set ib0 up"] {
        run(line);
    }
    let (before, address) = (ports.state(0), ports.link(0).address);
    let engine = ports.engine();
    let (pod, one) = ports.lent(&engine, "a", &[0], r#"{"interface": {"name": "net7"}}"#);
    let inside = by_name(&pod.netns().unwrap(), "net7");
    assert_eq!((inside.mtu, inside.is_up(), &inside.address), (2044, true, &address), "the same one");
    assert_eq!(names(&ports.guest.host), ["ibd0"]);
    engine.unprepare(&one.claim).unwrap();
    ports.assert_same(&before, 0);
}

/// Shares of port 0, with these parameters.
fn share(ports: &Ports, name: &str, parameters: &str) -> ResolvedClaim {
    let mut claim = ports.claim(name, &[0], parameters);
    for device in &mut claim.devices {
        device.device = DeviceName::new(format!("share-{}", device.device)).unwrap();
        device.share_id = Some(name.to_owned());
    }
    claim
}

/// A pod with a partition of port 0.
fn partition(ports: &Ports, engine: &Engine, name: &str, parameters: &str) -> (PodNetns, ResolvedClaim) {
    let one = share(ports, name, parameters);
    engine.prepare(&one, &pod_ref(name)).unwrap();
    let pod = ports.guest.pod(name);
    engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
    (pod, one)
}

fn what(netns: &Netns, name: &str) -> Option<Child> {
    let index = by_name(netns, name).index;
    child::read(&mut RouteSocket::open_in(netns).unwrap(), index, soon()).unwrap()
}

#[test]
fn two_pods_have_a_partition_each() {
    let Some(ports) = Ports::new(NetnsMode::Shared, 1) else { return };
    run("ip link set ib0 up");
    let before = ports.state(0);
    let engine = ports.engine();
    let (first, one) = partition(&ports, &engine, "a", PARTITION);
    let connected = r#"{"interface": {"type": "ipoib", "ipoib": {"pkey": 1, "mode": "connected"}, "name": "net9"}}"#;
    let (second, two) = partition(&ports, &engine, "b", connected);
    let netns = first.netns().unwrap();
    let inside = by_name(&netns, "ib0");
    assert_eq!((inside.mtu, inside.is_up(), inside.parent), (2000, true, Some(ports.link(0).index)));
    assert_eq!(what(&netns, "ib0"), Some(Child::Ipoib { pkey: 0x8001, mode: IpoibMode::Datagram }));
    let netns = second.netns().unwrap();
    assert_eq!(what(&netns, "net9"), Some(Child::Ipoib { pkey: 0x8001, mode: IpoibMode::Connected }));
    assert_eq!(by_name(&netns, "net9").mtu, before.mtu, "as the device below it");
    let released = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(matches!(released[..], [Released::Deleted(_)]), "{released:?}");
    engine.unprepare(&one.claim).unwrap();
    engine.unprepare(&two.claim).unwrap();
    assert_eq!((links(&netns).len(), links(&first.netns().unwrap()).len()), (1, 1), "lo");
    ports.assert_same(&before, 0);
}

/// Others that stand on the port, on the host.
fn on_host(ports: &Ports) -> Vec<String> {
    let port = ports.link(0).index;
    let above = ports.guest.links().into_iter().filter(|link| link.parent == Some(port) && link.index != port);
    above.map(|link| link.name).collect()
}

#[test]
fn one_that_the_kernel_returned_is_deleted() {
    let Some(ports) = Ports::new(NetnsMode::Shared, 1) else { return };
    run("ip link set ib0 up");
    run("ip link add link ib0 name net9 type ipoib pkey 0x8001");
    let engine = ports.engine();
    let named = PARTITION.replace(r#""mtu": 2000"#, r#""name": "net9""#);
    let (pod, one) = partition(&ports, &engine, "a", &named);
    drop((engine, pod));
    wait_for("both on the host", || Some(on_host(&ports)).filter(|names| names.len() == 2));
    let engine = ports.engine();
    engine.recover();
    assert_eq!((on_host(&ports), engine.records()[0].devices[0].phase), (vec!["net9".to_owned()], Phase::Prepared));
    // Where nobody looked before it is given back.
    let again = ports.guest.pod("again");
    engine.attach(&pod_ref("a").uid, &sandbox("again"), again.path(), soon()).unwrap();
    drop((engine, again));
    wait_for("both on the host", || Some(on_host(&ports)).filter(|names| names.len() == 2));
    let engine = ports.engine();
    engine.unprepare(&one.claim).unwrap();
    assert_eq!(on_host(&ports), ["net9"]);
}

#[test]
fn a_partition_that_can_not_be_is_refused() {
    let Some(ports) = Ports::new(NetnsMode::Shared, 1) else { return };
    run("ip link set ib0 up");
    let engine = ports.engine();
    let refusal = |pkey: u16| {
        let parameters = format!(r#"{{"interface": {{"type": "ipoib", "ipoib": {{"pkey": {pkey}}}}}}}"#);
        engine.prepare(&share(&ports, "a", &parameters), &pod_ref("a")).unwrap_err().to_string()
    };
    let missing = refusal(0x8003);
    assert!(missing.contains("interface.ipoib.pkey: port 1 of RDMA device ibd0 is not in partition 0x8003"), "{missing}");
    assert!(missing.contains("0xffff, 0x8001, 0x0002"), "{missing}");
    let limited = refusal(0x8002);
    assert!(limited.contains("is a limited member of partition 0x8002"), "{limited}");
    let macvlan = engine.prepare(&share(&ports, "a", r#"{"interface": {"type": "macvlan"}}"#), &pod_ref("a")).unwrap_err();
    assert!(macvlan.to_string().contains("no Ethernet device"), "{macvlan}");
    assert!(engine.records().is_empty());
}
