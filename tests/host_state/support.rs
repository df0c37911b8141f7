//! A scratch host with one rich NIC, made by the `ip` program so that nothing of ours is tested by itself.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dranic::netdev::host_state::Snapshot;
use dranic::netdev::host_state::compare;
use dranic::netdev::{HostState, RestoreReport, host_state, link};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use dranic_testbed::fabric;

/// The NIC: a veth, with a second one (`nic1`, for multipath routes) and both peers in a namespace of their own.
pub(crate) const NIC: &str = "nic0.7";

/// Everything that a move loses, and what it keeps.
const RICH: &str = "
link set nic0.7 mtu 8000
link set nic0.7 address 02:00:00:00:0a:01
link set nic0.7 alias rail-zero
link set nic0.7 txqueuelen 777
link set nic0.7 group 5
link set nic0.7 promisc on
link property add dev nic0.7 altname rail0-pci0000
link property add dev nic0.7 altname a-name-that-is-longer-than-fifteen-bytes
link set nic0.7 up
link set nic1 up
address add 10.50.0.1/24 broadcast 10.50.0.255 dev nic0.7 label nic0.7:rail
address add 10.51.0.1/24 dev nic0.7 valid_lft 6000 preferred_lft 5000
address add 10.50.0.2/24 dev nic0.7 metric 77
address add 192.0.2.1 peer 192.0.2.2/32 dev nic0.7
address add 10.60.0.1/24 dev nic0.7 noprefixroute
address add 10.50.1.1/24 dev nic1
address add 2001:db8:50::1/64 dev nic0.7
address add 2001:db8:50::2/64 dev nic0.7 nodad valid_lft 6000 preferred_lft 5000
address add fe80::77/64 dev nic0.7 nodad
address add 2001:db8:51::1/64 dev nic1 nodad
route add 10.60.0.0/24 dev nic0.7 proto kernel scope link src 10.60.0.1 metric 100
route add 172.16.0.0/12 via 10.50.0.254 metric 50
route add 172.16.0.0/12 via 10.50.0.253 metric 60 table 100 proto 42
route add 172.17.0.0/16 via 172.16.0.9 dev nic0.7 onlink
route add 172.18.0.0/16 nexthop via 10.50.0.254 dev nic0.7 weight 3 nexthop via 10.50.1.254 dev nic1 weight 1
route add 172.19.0.0/16 via 10.51.0.9 src 10.51.0.1 mtu 7000 advmss 6900
route add 172.19.1.0/24 via inet6 fe80::9 dev nic0.7
route add 172.19.2.0/24 via 10.50.0.254 tos 0x10
route add 172.19.3.0/24 via 10.50.0.254 congctl cubic table 4000
route add 2001:db8:60::/48 via 2001:db8:50::fe metric 33 mtu lock 7000 pref high
route add 2001:db8:61::/48 nexthop via 2001:db8:50::fe dev nic0.7 nexthop via 2001:db8:51::fe dev nic1 weight 4
route add 2001:db8:62::/48 via 2001:db8:50::fe table 100
route add 2001:db8:63::/48 via fe80::9 dev nic0.7 expires 5000
route add unreachable 172.20.0.0/16
route add 172.21.0.0/16 encap ip id 100 dst 10.50.0.5 ttl 9 via 10.50.0.254 dev nic0.7
-6 route add 2001:db8:64::/64 encap seg6 mode encap segs 2001:db8::5,2001:db8::6 dev nic0.7
nexthop add id 7 via 10.50.0.254 dev nic0.7
route add 172.22.0.0/16 nhid 7
route append 172.16.0.0/12 via 10.50.0.252 metric 50
rule add from 10.50.0.0/24 lookup 100 priority 1000
rule add fwmark 0x10/0xff not to 10.9.0.0/16 iif nic0.7 lookup 200 priority 1001
-6 rule add from 2001:db8:50::/64 tos 0x10 lookup 100 priority 1002
neighbour add 10.50.0.9 lladdr 02:00:00:00:00:09 dev nic0.7 nud permanent
neighbour add 2001:db8:50::9 lladdr 02:00:00:00:00:09 dev nic0.7 nud permanent router
neighbour add proxy 10.50.0.77 dev nic0.7
neighbour add proxy 2001:db8:50::77 dev nic0.7
";

const SYSCTLS: [(&str, &str); 9] = [
    ("ipv4/conf/arp_ignore", "1"),
    ("ipv4/conf/rp_filter", "2"),
    ("ipv4/conf/accept_local", "1"),
    ("ipv4/conf/forwarding", "1"),
    ("ipv6/conf/accept_ra", "0"),
    ("ipv6/conf/forwarding", "1"),
    ("ipv4/neigh/gc_stale_time", "90"),
    ("ipv6/neigh/gc_stale_time", "91"),
    ("ipv6/neigh/base_reachable_time_ms", "31500"),
];

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(8)
}

/// Whether the test can run; says why not.
pub(crate) fn can_run() -> bool {
    let has_ip = Command::new("ip").arg("-V").output().is_ok_and(|out| out.status.success());
    if !has_ip {
        eprintln!("skipped: no ip program (iproute2)");
    }
    fabric::root() && has_ip
}

/// Runs lines of the `ip` program in the calling thread's namespace; after the others those that begin with `-6`.
pub(crate) fn ip(lines: &str) {
    let (v6, rest): (Vec<&str>, Vec<&str>) = lines.lines().partition(|line| line.starts_with("-6 "));
    for (family, lines) in [("", rest), ("-6", v6)] {
        let mut command = Command::new("ip");
        command.args((family == "-6").then_some(family)).args(["-batch", "-"]);
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines: Vec<&str> = lines.iter().map(|line| line.trim_start_matches("-6 ")).collect();
        child.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{lines:#?}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

/// Runs the `tc` program (it comes with `ip`).
pub(crate) fn tc(line: &str) {
    let out = Command::new("tc").args(line.split(' ')).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
}

/// A host as above in the calling thread's (scratch) namespace.
pub(crate) struct Host {
    pub(crate) socket: RouteSocket,
    pub(crate) index: u32,
    /// Keeps the peers alive.
    _far: Netns,
}

impl Host {
    /// Two veths without configuration, down here and up at the far end.
    pub(crate) fn plain() -> Self {
        let far = fabric::new_netns().unwrap();
        let mut socket = RouteSocket::open().unwrap();
        ip("link add nic0.7 type veth peer name far0\nlink add nic1 type veth peer name far1");
        for peer in ["far0", "far1"] {
            move_link(peer, &far, peer);
        }
        far.run(|| ip("link set far0 up\nlink set far1 up")).unwrap();
        let index = link::by_name(&mut socket, NIC, soon()).unwrap().unwrap().index;
        Self { socket, index, _far: far }
    }

    /// With everything of [`RICH`], duplicate address detection done.
    pub(crate) fn rich() -> Self {
        let mut host = Self::plain();
        for (key, value) in SYSCTLS {
            dranic::netdev::sysctl::write(NIC, key, value).unwrap();
        }
        ip(RICH);
        tc("qdisc add dev nic0.7 root handle 1: tbf rate 1gbit burst 64kb latency 50ms");
        tc("qdisc add dev nic0.7 parent 1:1 handle 2: pfifo limit 77");
        host.wait_for_dad();
        host
    }

    pub(crate) fn state(&mut self) -> HostState {
        Snapshot::take(&mut self.socket, soon()).unwrap().host_state(self.index).unwrap()
    }

    pub(crate) fn restore(&mut self, state: &HostState) -> RestoreReport {
        host_state::restore(&mut self.socket, self.index, state, soon())
    }

    /// Restores, asserts that all is as before, and that a second time does nothing.
    pub(crate) fn restore_fully(&mut self, state: &HostState) -> RestoreReport {
        let report = self.restore(state);
        assert_eq!(report.failed, [], "{:#?}", report);
        self.wait_for_dad();
        assert_eq!(compare(state, &self.state()), []);
        let again = self.restore(state);
        assert_eq!((&again.restored[..], &again.failed[..]), (&[][..], &[][..]));
        report
    }

    pub(crate) fn wait_for_dad(&mut self) {
        let tentative = |host: &mut Self| {
            let all = dranic::netdev::address::list(&mut host.socket, soon()).unwrap();
            all.iter().any(|(_, a)| a.flags & dranic::netdev::address::IFA_F_TENTATIVE != 0)
        };
        let end = soon();
        while tentative(self) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Lends the NIC to a pod that changes everything it can, and takes it back the way the agent does.
    pub(crate) fn lend(&mut self, pod: &Netns) {
        ip("link set nic0.7 down");
        move_link(NIC, pod, "eth0");
        let home = Netns::current().unwrap();
        pod.run(|| {
            ip("link set eth0 mtu 1400
link set eth0 address 02:00:00:00:ff:ff
link set eth0 alias in-the-pod
link set eth0 txqueuelen 10
link set eth0 promisc off
link set eth0 allmulticast on
link set eth0 up
address add 10.99.0.1/24 dev eth0
link set eth0 down");
            move_link("eth0", &home, "back0");
        })
        .unwrap();
        self.index = link::by_name(&mut self.socket, "back0", soon()).unwrap().unwrap().index;
    }
}

/// Moves a link of the calling thread's namespace.
pub(crate) fn move_link(name: &str, target: &Netns, new_name: &str) {
    use std::os::fd::{AsFd, AsRawFd};
    let target = target.as_fd().as_raw_fd();
    let path = format!("/proc/{}/fd/{target}", std::process::id());
    let out = Command::new("ip").args(["link", "set", name, "netns", &path, "name", new_name]).output().unwrap();
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
}
