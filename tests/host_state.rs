//! Host state on a real kernel: what is recorded, given back and compared.

#[path = "host_state/support.rs"]
mod support;

use std::time::Instant;

use dranic::netdev::host_state::{Snapshot, compare};
use dranic_testbed::fabric::{new_netns, with_scratch_netns};
use support::{Host, can_run, ip, move_link, soon};

const NOTHING: [&str; 0] = [];

#[test]
fn down_and_back() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        assert_eq!(compare(&before, &host.state()), [], "two looks at the same");
        assert_eq!((before.addresses.len(), before.neighbours.len(), before.rules.len()), (8, 4, 3), "{before:#?}");
        assert_eq!(before.routes.len(), 17, "{:#?}", before.routes);
        ip("link set nic0.7 down");
        let differences = compare(&before, &host.state());
        assert!(differences.len() > 10, "{differences:#?}");
        let report = host.restore_fully(&before);
        assert_eq!(report.respected, NOTHING);
    });
}

#[test]
fn to_a_pod_and_back() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        // As the ledger keeps it.
        let before = serde_json::from_str(&serde_json::to_string(&before).unwrap()).unwrap();
        let pod = new_netns().unwrap();
        host.lend(&pod);
        let report = host.restore_fully(&before);
        assert_eq!(report.respected, NOTHING);
    });
}

#[test]
fn routes_wait_for_their_source_address() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        ip("link set nic0.7 up\naddress add 2001:db8::1/64 dev nic0.7");
        host.wait_for_dad();
        ip("-6 route add 2001:db8:1::/48 via 2001:db8::fe src 2001:db8::1");
        let before = host.state();
        ip("link set nic0.7 down");
        host.restore_fully(&before);
    });
}

#[test]
fn a_name_taken_meanwhile_is_reported_and_the_rest_restored() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        let pod = new_netns().unwrap();
        host.lend(&pod);
        ip("link add nic0.7 type bridge");
        let report = host.restore(&before);
        assert_eq!(report.failed.len(), 1, "{report:#?}");
        assert_eq!(report.failed[0].0, "name");
        assert!(report.failed[0].1.contains("in use by link") && report.failed[0].1.contains("stays back0"), "{report:#?}");
        host.wait_for_dad();
        let after = host.state();
        let what: Vec<String> = compare(&before, &after).into_iter().map(|d| d.what).collect();
        // The rule that names the old link is not this link's as long as it has another name.
        assert_eq!(what, ["name", "rule"], "{:#?}", compare(&before, &after));
        ip("link del nic0.7");
        host.restore_fully(&before);
    });
}

#[test]
fn a_name_that_became_an_altname_of_its_own() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        let before = host.state();
        ip("link set nic0.7 name other\nlink property add dev other altname nic0.7");
        host.restore_fully(&before);
    });
}

#[test]
fn an_altname_taken_meanwhile_names_its_holder() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        ip("link property add dev nic0.7 altname rail0");
        let before = host.state();
        ip("link property del dev nic0.7 altname rail0\nlink property add dev nic1 altname rail0");
        let report = host.restore(&before);
        assert_eq!(report.failed.len(), 1, "{report:#?}");
        assert!(report.failed[0].0 == "altname rail0" && report.failed[0].1.contains("(nic1)"), "{report:#?}");
    });
}

#[test]
fn a_link_that_was_down_is_down_again() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        ip("address add 10.0.0.1/24 dev nic0.7
address add 2001:db8::1/64 dev nic0.7
neighbour add 10.0.0.9 lladdr 02:00:00:00:00:09 dev nic0.7 nud permanent");
        let before = host.state();
        assert_eq!((before.addresses.len(), before.neighbours.len(), before.routes.len()), (2, 1, 0));
        let pod = new_netns().unwrap();
        host.lend(&pod);
        ip("link set back0 up");
        let report = host.restore(&before);
        assert_eq!((&report.failed[..], &report.respected[..]), (&[][..], &[][..]));
        assert_eq!(compare(&before, &host.state()), []);
        assert_eq!(host.restore(&before).restored, NOTHING);
    });
}

#[test]
fn what_somebody_added_meanwhile_stays() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        ip("address add 10.0.0.1/24 dev nic0.7");
        let down = host.state();
        ip("link set nic0.7 up\nroute add 10.2.0.0/16 via 10.0.0.8");
        let up = host.state();
        let pod = new_netns().unwrap();
        host.lend(&pod);
        ip("link set back0 up
link set back0 name nic0.7
link property add dev nic0.7 altname theirs
address add 10.9.0.1/24 dev nic0.7
address add 2001:db8:9::1/64 dev nic0.7 nodad
route add 10.1.0.0/16 via 10.9.0.9
route add 10.2.0.0/16 via 10.9.0.9
neighbour add 10.9.0.8 lladdr 02:00:00:00:00:08 dev nic0.7 nud permanent");
        let report = host.restore(&up);
        assert_eq!(report.failed, []);
        let respected = report.respected.join("\n");
        for theirs in ["altname theirs", "10.9.0.1/24", "2001:db8:9::1/64", "10.1.0.0/16", "10.2.0.0/16 via 10.0.0.8", "10.9.0.8"]
        {
            assert!(respected.contains(theirs), "{theirs}: {respected}");
        }
        assert_eq!(report.respected.len(), 6, "{respected}");
        let after = host.state();
        assert_eq!(after.addresses.len(), 3, "{after:#?}");
        assert!(after.routes.iter().any(|r| r.to_string().contains("10.2.0.0/16 via 10.9.0.9")), "{after:#?}");
        // It was down before, but they use it.
        let report = host.restore(&down);
        assert!(report.respected.iter().any(|r| r.contains("stays up")), "{report:#?}");
        assert!(host.state().addresses.len() == 3 && host.state().flags & 1 == 1);
    });
}

#[test]
fn bridge_ports() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        ip("link add br0 type bridge\nlink set br0 up\nlink set nic0.7 master br0\nlink set nic0.7 up");
        let before = host.state();
        assert_eq!(before.master.as_deref(), Some("br0"));
        let pod = new_netns().unwrap();
        host.lend(&pod);
        assert_eq!(host.restore_fully(&before).respected, NOTHING);
        ip("link add br1 type bridge\nlink set nic0.7 master br1");
        let report = host.restore(&before);
        assert!(report.respected.iter().any(|r| r.contains("br1")), "{report:#?}");
        ip("link set nic0.7 nomaster\nlink del br0");
        let report = host.restore(&before);
        assert!(report.failed.len() == 1 && report.failed[0].1.contains("no link br0"), "{report:#?}");
    });
}

#[test]
fn macvlan_parents() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        ip("link add mv0 link nic0.7 type macvlan mode bridge\nlink set mv0 up\naddress add 10.0.0.1/24 dev mv0");
        host.wait_for_dad();
        let before = host.state();
        let pod = new_netns().unwrap();
        host.lend(&pod);
        assert_eq!(host.restore_fully(&before).respected, NOTHING);
    });
}

#[test]
fn each_change_is_seen_and_undone() {
    // What is broken, and the differences that must be seen.
    let breaks: [(&str, &[&str]); 20] = [
        ("link set nic0.7 mtu 7999", &["mtu"]),
        // The kernel forgets its neighbours with it.
        ("link set nic0.7 address 02:00:00:00:0a:02", &["link-layer address", "neighbour 10.50.0.9", "neighbour 2001:db8:50::9"]),
        ("link set nic0.7 alias other", &["alias"]),
        ("link set nic0.7 txqueuelen 3", &["txqueuelen"]),
        ("link set nic0.7 group 6", &["group"]),
        ("link set nic0.7 promisc off", &["promisc"]),
        ("link set nic0.7 allmulticast on", &["allmulti"]),
        ("link set nic0.7 arp off", &["noarp", "neighbour 10.50.0.9", "neighbour 2001:db8:50::9"]),
        ("link set nic0.7 multicast off", &["multicast"]),
        ("link property del dev nic0.7 altname rail0-pci0000", &["altname rail0-pci0000"]),
        // One in the middle would come back at the end of its kind: that is no reason to take the others away.
        ("address del 10.60.0.1/24 dev nic0.7", &["address 10.60.0.1/24", "route 10.60.0.0/24 table 254 metric 100"]),
        ("address del 10.50.0.2/24 dev nic0.7", &["address 10.50.0.2/24"]),
        ("address del fe80::77/64 dev nic0.7", &["address fe80::77/64"]),
        ("route del 172.16.0.0/12 via 10.50.0.253 metric 60 table 100", &["route 172.16.0.0/12 table 100 metric 60"]),
        ("route del 172.19.2.0/24 tos 0x10", &["route 172.19.2.0/24 table 254"]),
        ("route del 172.16.0.0/12 via 10.50.0.252 metric 50", &["route 172.16.0.0/12 table 254 metric 50"]),
        ("-6 route del 2001:db8:60::/48", &["route 2001:db8:60::/48 table 254 metric 33"]),
        ("neighbour del 2001:db8:50::9 dev nic0.7", &["neighbour 2001:db8:50::9"]),
        ("neighbour del proxy 10.50.0.77 dev nic0.7", &["neighbour 10.50.0.77 proxy"]),
        ("route del 172.18.0.0/16", &["route 172.18.0.0/16 table 254"]),
    ];
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let before = host.state();
        for (line, wanted) in breaks {
            ip(line);
            let found: Vec<String> = compare(&before, &host.state()).into_iter().map(|d| d.what).collect();
            assert_eq!(found, wanted, "{line}");
            let report = host.restore_fully(&before);
            assert_eq!(report.respected, NOTHING, "{line}");
        }
        support::tc("qdisc del dev nic0.7 parent 1:1 handle 2:");
        assert_eq!(compare(&before, &host.state()).len(), 1);
        host.restore_fully(&before);
        support::tc("qdisc del dev nic0.7 root");
        assert_eq!(compare(&before, &host.state()).len(), 2);
        host.restore_fully(&before);
        for key in ["ipv4/conf/arp_announce", "ipv6/conf/hop_limit", "ipv6/neigh/mcast_solicit"] {
            dranic::netdev::sysctl::write(support::NIC, key, "2").unwrap();
            let found: Vec<String> = compare(&before, &host.state()).into_iter().map(|d| d.what).collect();
            assert_eq!(found, [format!("sysctl {key}")]);
            host.restore_fully(&before);
        }
    });
}

#[test]
fn two_nics_of_one_route_come_back_in_any_order() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let first = host.state();
        let snapshot = Snapshot::take(&mut host.socket, soon()).unwrap();
        let other = snapshot.links.iter().find(|l| l.name == "nic1").unwrap().index;
        let second = snapshot.host_state(other).unwrap();
        let pod = new_netns().unwrap();
        ip("link set nic1 down");
        move_link("nic1", &pod, "nic1");
        host.lend(&pod);
        let report = host.restore(&first);
        let failed: Vec<&str> = report.failed.iter().map(|(what, _)| what.as_str()).collect();
        assert_eq!(failed, ["route 172.18.0.0/16 table 254", "route 2001:db8:61::/48 table 254"], "{report:#?}");
        let home = dranic::netns::Netns::current().unwrap();
        pod.run(|| move_link("nic1", &home, "nic1")).unwrap();
        let report = dranic::netdev::host_state::restore(&mut host.socket, other, &second, soon());
        assert_eq!(report.failed, []);
        host.wait_for_dad();
        let after = Snapshot::take(&mut host.socket, soon()).unwrap();
        assert_eq!(compare(&second, &after.host_state(other).unwrap()), []);
        assert_eq!(compare(&first, &host.state()), []);
    });
}

#[test]
fn no_such_link() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::plain();
        let before = host.state();
        host.index = 999_999;
        let report = host.restore(&before);
        assert!(report.failed.len() == 1 && report.failed[0].1.contains("999999"), "{report:#?}");
    });
}

/// Prepare has 45 s for everything, restore happens while the pod's sandbox goes: both must be short. The bounds are wide because
/// the machine is shared; the numbers printed are what counts.
#[test]
fn is_fast() {
    if !can_run() {
        return;
    }
    with_scratch_netns(|_| {
        let mut host = Host::rich();
        let started = Instant::now();
        let snapshot = Snapshot::take(&mut host.socket, soon()).unwrap();
        let taken = started.elapsed();
        let before = snapshot.host_state(host.index).unwrap();
        let read = started.elapsed() - taken;
        ip("link set nic0.7 down");
        let started = Instant::now();
        let report = host.restore(&before);
        let restored = started.elapsed();
        let started = Instant::now();
        host.restore(&before);
        println!(
            "snapshot {taken:?}, state {read:?}, restore {restored:?} ({} things), again {:?}",
            report.restored.len(),
            started.elapsed()
        );
        assert!(restored.as_millis() < 1500, "{restored:?}");
    });
}
