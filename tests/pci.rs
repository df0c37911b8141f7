//! Real PCI NICs through the engine: lent, configured, given back. In the virtual machine of `e2e/vm` (`make e2e-vm`).

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use common::{claim, pod_ref, sandbox};
use dranic::netdev::link;
use dranic::netlink::RouteSocket;
use pci::{Guest, run, soon};

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

/// Takes back what [`RICH`] leaves beside the NIC.
const POOR: &str = "ip rule del from 10.50.0.0/24 lookup 100 priority 1000";

#[test]
fn a_nic_with_everything_comes_back_as_it_was() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    RICH.iter().for_each(|line| run(line));
    let before = guest.state(&nic);
    assert_eq!((before.addresses.len(), before.neighbours.len(), before.qdiscs.len()), (5, 3, 1), "{before:#?}");
    let engine = guest.engine();
    let text =
        r#"{"interface": {"name": "eth7", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05", "addresses": ["10.20.0.5/24"]}}"#;
    let one = claim("a", &[guest.name(&nic)], text);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    assert!(!guest.link(&nic).is_up(), "prepare takes it down");
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    assert!(guest.find(&nic).is_none());
    let mut inside = RouteSocket::open_in(&pod.netns().unwrap()).unwrap();
    let there = link::by_name(&mut inside, "eth7", soon()).unwrap().unwrap();
    assert_eq!((there.mtu, there.address.unwrap().to_string().as_str()), (1400, "02:00:00:00:aa:05"));
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 1);
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
    run(POOR);
}

#[test]
fn a_port_of_a_bridge_is_one_again() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    for line in ["ip link add br7 type bridge", "ip link set br7 up", "ip link set nic0 master br7", "ip link set nic0 up"] {
        run(line);
    }
    let before = guest.state(&nic);
    assert_eq!(before.master.as_deref(), Some("br7"));
    let engine = guest.engine();
    let one = claim("a", &[guest.name(&nic)], "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
    run("ip link del br7");
}
