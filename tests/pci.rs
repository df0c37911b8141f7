//! Real PCI NICs through the engine: lent, configured, given back. In the virtual machine of `e2e/vm` (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{claim, pod_ref, sandbox};
use dranic::agent::returned;
use dranic::attach::Engine;
use dranic::attach::engine::{Released, Seen};
use dranic::dra::resolve::ResolvedClaim;
use dranic::ledger::Share;
use dranic::netdev::{Link, host_state, link};
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric::PodNetns;
use pci::{Guest, Nic, run, soon, wait_for};
use tokio_util::sync::CancellationToken;

/// Everything that a move loses, on the NIC called nic0.
const RICH: [&str; 25] = [
    "ip link set nic0 mtu 4000",
    "ip link set nic0 address 02:00:00:00:0a:01",
    "ip link set nic0 alias rail-zero",
    "ip link set nic0 txqueuelen 777",
    "ip link set nic0 group 5",
    "ip link set nic0 promisc on",
    "ip link property add dev nic0 altname rail0-pci altname another-name-longer-than-15-bytes",
    "sysctl -qw net.ipv4.conf.nic0.arp_ignore=1",
    "sysctl -qw net.ipv4.conf.nic0.rp_filter=2",
    "sysctl -qw net.ipv6.conf.nic0.accept_ra=0",
    "sysctl -qw net.ipv4.neigh.nic0.gc_stale_time=90",
    "tc qdisc replace dev nic0 root handle 77: pfifo limit 77",
    "ip link set nic0 up",
    "ip address add 10.50.0.1/24 broadcast 10.50.0.255 dev nic0 label nic0:rail",
    "ip address add 10.50.0.2/24 metric 77 dev nic0",
    "ip address add 10.51.0.1/24 dev nic0 valid_lft 6000 preferred_lft 5000",
    "ip address add 2001:db8:50::1/64 dev nic0",
    "ip address add 2001:db8:50::2/64 dev nic0 nodad valid_lft 6000 preferred_lft 5000",
    "ip route add 172.16.0.0/12 via 10.50.0.254 metric 50",
    "ip route add 172.16.0.0/12 via 10.50.0.253 table 100 proto 42",
    "ip route add 2001:db8:60::/48 via 2001:db8:50::fe metric 33",
    "ip rule add from 10.50.0.0/24 lookup 100 priority 1000",
    "ip neighbour add 10.50.0.9 lladdr 02:00:00:00:00:09 dev nic0 nud permanent",
    "ip neighbour add 2001:db8:50::9 lladdr 02:00:00:00:00:09 dev nic0 nud permanent",
    "ip neighbour add proxy 10.50.0.77 dev nic0",
];

#[test]
fn a_nic_with_everything_comes_back_as_it_was() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    assert_eq!((before.addresses.len(), before.neighbours.len(), before.qdiscs.len()), (5, 3, 1), "{before:#?}");
    let engine = guest.engine();
    let text =
        r#"{"interface": {"name": "pod7", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05", "addresses": ["10.20.0.5/24"]}}"#;
    let one = claim("a", &[guest.name(&nic)], text);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    assert!(!guest.link(&nic).is_up(), "prepare takes it down");
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert!(guest.find(&nic).is_none());
    let mut inside = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    let there = link::by_name(&mut inside, "pod7", soon()).unwrap().unwrap();
    assert_eq!((there.mtu, there.address.unwrap().to_string().as_str()), (1400, "02:00:00:00:aa:05"));
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 1);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

/// Lends nic0, which these lines make a port of `master`, and looks at it afterwards.
fn assert_port_again(master: &str, lines: &[&str]) {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    lines.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    assert_eq!(before.master.as_deref(), Some(master));
    let engine = guest.engine();
    let one = claim("a", &[guest.name(&nic)], "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert!(guest.find(&nic).is_none());
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn a_port_of_a_bridge_is_one_again() {
    let lines = ["ip link add br7 type bridge", "ip link set br7 up", "ip link set nic0 master br7", "ip link set nic0 up"];
    assert_port_again("br7", &lines);
}

#[test]
fn a_port_of_a_bond_is_one_again() {
    let lines = ["ip link add bond7 type bond mode active-backup", "ip link set nic0 master bond7", "ip link set bond7 up"];
    assert_port_again("bond7", &lines);
}

#[test]
fn a_link_of_a_vrf_with_its_routes_is_one_again() {
    let lines = [
        "ip link add red7 type vrf table 777",
        "ip link set red7 up",
        "ip link set nic0 master red7",
        "ip link set nic0 up",
        "ip address add 10.9.0.1/24 dev nic0",
        "ip address add 2001:db8:9::1/64 dev nic0 nodad",
        "ip route add 10.90.0.0/16 via 10.9.0.254 table 777",
    ];
    assert_port_again("red7", &lines);
}

const CHANGED: &str = r#"{"interface": {"name": "pod7", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05",
    "altNames": ["gpu-nic-0"], "gsoMaxSize": 30000, "txQueueLen": 5, "alias": "", "promisc": false, "group": 9}}"#;

/// A pod that has the NIC.
fn lent(guest: &Guest, engine: &Engine, nic: &Nic, name: &str, parameters: &str) -> (PodNetns, ResolvedClaim) {
    let one = claim(name, &[guest.name(nic)], parameters);
    engine.prepare(&one, &pod_ref(name)).unwrap();
    let pod = guest.pod(name);
    engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
    (pod, one)
}

fn inside(pod: &PodNetns) -> RouteSocket {
    RouteSocket::open_in(&pod.netns().unwrap()).unwrap()
}

#[test]
fn what_the_kernel_returned_while_the_agent_was_away_is_repaired_by_the_next_one() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (pod, one) = lent(&guest, &engine, &nic, "a", CHANGED);
    drop((engine, pod));
    let back = guest.link(&nic);
    assert_eq!((back.name.as_str(), back.mtu, back.is_up()), ("pod7", 1400, false), "so the kernel does it");
    let engine = guest.engine();
    engine.recover();
    let back = guest.link(&nic);
    assert_eq!((back.name.as_str(), back.mtu, &back.address, back.is_up()), ("nic0", 4000, &before.address, false));
    assert_eq!(back.alt_names, before.alt_names);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn what_the_kernel_returns_is_repaired_within_a_second() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (pod, one) = lent(&guest, &engine, &nic, "a", CHANGED);
    // The agent is started anew and can't see the namespace, which somebody keeps alive.
    let alive = pod.netns().unwrap();
    drop((engine, pod));
    let engine = Arc::new(guest.engine());
    engine.recover();
    assert_eq!(engine.pinned(), 0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let stop = CancellationToken::new();
    runtime.spawn(returned::keep(engine.clone(), guest.host.try_clone().unwrap(), |_| (), stop.clone()));
    std::thread::sleep(Duration::from_millis(500));
    drop(alive);
    wait_for("the kernel returns it", || guest.find(&nic));
    let event = Instant::now();
    let is_right = |l: &Link| l.name == "nic0" && l.address == before.address && l.mtu == 4000 && l.alt_names == before.alt_names;
    wait_for("it is repaired", || guest.find(&nic).filter(is_right));
    assert!(event.elapsed() < Duration::from_secs(1), "{:?}", event.elapsed());
    stop.cancel();
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn two_pods_that_exchanged_the_names_of_their_nics() {
    let Some(guest) = Guest::new() else { return };
    let nics = [guest.fresh(0), guest.fresh(1)];
    for name in ["nic0", "nic1"] {
        run(&format!("ip link set {name} up"));
        run(&format!("ip address add 10.6.{}.1/24 dev {name}", &name[3..]));
    }
    let before = nics.each_ref().map(|nic| guest.state(nic));
    let engine = guest.engine();
    let (first, one) = lent(&guest, &engine, &nics[0], "a", r#"{"interface": {"name": "nic1"}}"#);
    let (second, two) = lent(&guest, &engine, &nics[1], "b", r#"{"interface": {"name": "nic0"}}"#);
    drop((engine, first, second));
    assert_eq!((guest.link(&nics[0]).name, guest.link(&nics[1]).name), ("nic1".to_owned(), "nic0".to_owned()));
    let engine = guest.engine();
    engine.recover();
    assert_eq!((guest.link(&nics[0]).name, guest.link(&nics[1]).name), ("nic0".to_owned(), "nic1".to_owned()));
    for one in [one, two] {
        engine.unprepare(&one.claim).unwrap();
    }
    for (nic, before) in nics.iter().zip(&before) {
        guest.assert_same(before, nic);
    }
}

#[test]
fn a_nic_that_the_pod_renamed_and_changed_comes_back_as_it_was() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (pod, one) = lent(&guest, &engine, &nic, "a", "");
    let lines = [
        "ip link set nic0 down",
        "ip link set nic0 name mine",
        "ip link set mine address 02:00:00:00:ff:ff mtu 1300 txqueuelen 9 promisc off allmulticast on alias other",
        "ip link property del dev mine altname rail0-pci",
        "ip link set mine up",
        "ip address add 10.99.0.1/24 dev mine",
    ];
    pod.netns().unwrap().run(|| lines.iter().for_each(|line| run(line))).unwrap();
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn a_nic_that_is_plugged_in_again_while_it_is_lent_is_the_same_one() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (pod, one) = lent(&guest, &engine, &nic, "a", CHANGED);
    nic.unplug();
    assert!(link::by_name(&mut inside(&pod), "pod7", soon()).unwrap().is_none());
    nic.plug();
    let new = guest.link(&nic);
    assert_ne!(new.name, "nic0");
    assert!(engine.look(&one.claim.uid).unwrap().seen.values().all(|seen| *seen == Seen::Missing));
    assert_eq!(
        engine.release(&pod_ref("a").uid, &sandbox("a")),
        [Released::AtHome(Share { device: guest.name(&nic), id: None })]
    );
    assert_eq!(guest.link(&nic).name, "nic0", "known by what it is");
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}

#[test]
fn a_nic_that_stays_unplugged_is_told_and_keeps_nothing() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    let engine = guest.engine();
    let (_pod, one) = lent(&guest, &engine, &nic, "a", "");
    let share = engine.records()[0].devices[0].share();
    nic.unplug();
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")), [Released::Gone(share)]);
    engine.unprepare(&one.claim).unwrap();
    assert!(engine.records().is_empty());
    assert_eq!(engine.pinned(), 0);
    nic.plug();
    guest.link(&nic);
}

#[test]
fn what_a_foreign_daemon_does_on_return_is_respected() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (pod, one) = lent(&guest, &engine, &nic, "a", "");
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    drop(pod);
    // As udev and a network manager do with a NIC that appears.
    run("ip link set nic0 name ens9");
    run("ip link set ens9 up");
    run("ip address add 10.77.0.1/24 dev ens9");
    run("ip link property add dev ens9 altname enp9s0");
    run("tc qdisc replace dev ens9 root handle 88: pfifo limit 88");
    engine.unprepare(&one.claim).unwrap();
    let end = soon();
    loop {
        let after = guest.state(&nic);
        let mut left: Vec<String> = host_state::compare(&before, &after).into_iter().map(|d| d.what).collect();
        left.sort();
        if left == ["address 10.77.0.1/24", "altname enp9s0", "qdisc ffffffff"] {
            break;
        }
        assert!(Instant::now() < end, "{:#?}", host_state::compare(&before, &after));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_name_that_is_taken_on_the_host_is_given_when_it_is_free() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    run("ip address add 10.6.0.1/24 dev nic0");
    let before = guest.state(&nic);
    let engine = guest.engine();
    let (_pod, one) = lent(&guest, &engine, &nic, "a", "");
    run("ip link add nic0 type bridge");
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 1);
    assert_eq!(guest.link(&nic).name, "dranic0");
    run("ip link del nic0");
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}
