//! What a NIC has lost after a pod with the other driver, property by property (its baseline was measured on a real node), and what
//! happens to the way back when somebody else changes things meanwhile: all of it is as before, and what others did is respected.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{World, claim, pod_ref, sandbox};
use dranic::attach::Engine;
use dranic::dra::resolve::ResolvedClaim;
use dranic::netdev::{HostState, link};
use dranic::netns::Netns;
use dranic_testbed::fabric::PodNetns;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Runs lines of the `ip` program in `netns`.
fn ip(netns: &Netns, lines: &str) {
    let run = || {
        let mut child = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let out = netns.run(run).unwrap();
    assert!(out.status.success(), "{lines}: {}", String::from_utf8_lossy(&out.stderr));
}

fn tc(netns: &Netns, line: &str) {
    let out = netns.run(|| Command::new("tc").args(line.split(' ')).output().unwrap()).unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
}

/// A world with one NIC that has everything the table of the baseline has; None without root or `ip`.
fn furnished() -> Option<World> {
    let world = World::new(1)?;
    if !Command::new("ip").arg("-V").output().is_ok_and(|out| out.status.success()) {
        println!("skipped: no ip program (iproute2)");
        return None;
    }
    ip(
        world.node.netns(),
        "link set nic0 mtu 8000 alias storage txqueuelen 777 group 5 promisc on
link property add dev nic0 altname enp9s0f0
address add 10.0.0.9/24 dev nic0 label nic0:b
route add 10.60.0.0/16 via 10.0.0.2 dev nic0
route add 10.61.0.0/16 via 10.0.0.2 dev nic0 table 100 metric 50
rule add from 10.0.0.0/24 lookup 100 priority 100
neighbour add 10.0.0.8 lladdr 02:00:00:00:00:08 dev nic0 nud permanent",
    );
    tc(world.node.netns(), "qdisc add dev nic0 root handle 7: pfifo limit 99");
    let sysctls = [
        ("ipv4/conf/nic0/arp_ignore", "1"),
        ("ipv4/conf/nic0/rp_filter", "2"),
        ("ipv4/conf/nic0/accept_local", "1"),
        ("ipv6/conf/nic0/accept_ra", "0"),
    ];
    let write = || sysctls.iter().try_for_each(|(key, value)| std::fs::write(format!("/proc/sys/net/{key}"), value));
    world.node.netns().run(write).unwrap().unwrap();
    world.settle();
    Some(world)
}

fn state(world: &World) -> HostState {
    world.host_states().remove("nic0").expect("nic0 is on the host")
}

/// In the pod.
fn lend(world: &World, engine: &Engine, name: &str, parameters: &str) -> (PodNetns, ResolvedClaim) {
    let all = claim(name, &world.device_names(), parameters);
    engine.prepare(&all, &pod_ref(name)).unwrap();
    let pod = world.pod(name);
    engine.attach(&pod_ref(name).uid, &sandbox(name), pod.path(), soon()).unwrap();
    (pod, all)
}

#[test]
fn each_row_of_what_the_other_driver_loses() {
    let Some(world) = furnished() else { return };
    let (engine, before) = (world.engine(), state(&world));
    let rows = [
        ("two IPv4 addresses, one with a label, one IPv6", before.addresses.len() == 3),
        ("the label", before.addresses.iter().any(|a| a.label.as_deref() == Some("nic0:b"))),
        ("routes in main and in table 100", before.routes.iter().filter(|r| r.gateway.is_some()).count() == 2),
        ("a metric", before.routes.iter().any(|r| (r.table, r.metric) == (100, Some(50)))),
        ("a rule", before.rules.iter().any(|r| r.table == 100)),
        ("a permanent neighbour", before.neighbours.len() == 1),
        ("sysctls", before.sysctls.get("ipv4/conf/rp_filter").is_some_and(|v| v == "2")),
        ("a qdisc", before.qdiscs.len() == 1),
        ("MTU", before.mtu == 8000),
        ("alias, altname, group, queue", before.alias.is_some() && before.alt_names.len() == 1 && before.group == 5),
        ("promisc", before.flags & 0x100 != 0),
    ];
    for (row, there) in rows {
        assert!(there, "{row}: {before:#?}");
    }
    let configured =
        r#"{"interface": {"name": "rail0", "mtu": 1400, "hardwareAddr": "02:00:00:00:aa:05", "addresses": ["10.50.0.1/24"]}}"#;
    for (name, parameters) in [("plain", ""), ("configured", configured)] {
        let (pod, all) = lend(&world, &engine, name, parameters);
        assert!(world.host_states().is_empty(), "it is in the pod");
        let _ = engine.release(&pod_ref(name).uid, &sandbox(name));
        drop(pod);
        engine.unprepare(&all.claim).unwrap();
        assert_eq!(dranic::netdev::host_state::compare(&before, &state(&world)), [], "{name}");
    }
}

#[test]
fn a_nic_that_the_pod_renamed_and_reconfigured_comes_back_as_it_was() {
    let Some(world) = furnished() else { return };
    let (engine, before) = (world.engine(), state(&world));
    let (pod, all) = lend(&world, &engine, "a", "");
    ip(
        &pod.netns().unwrap(),
        "link set nic0 down
link set nic0 name mine mtu 1300 address 02:00:00:00:00:99 alias theirs txqueuelen 5 group 9 allmulticast on
address flush dev mine
address add 192.0.2.9/24 dev mine
link set mine up",
    );
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&all.claim).unwrap();
    let differences = dranic::netdev::host_state::compare(&before, &state(&world));
    assert_eq!(differences, []);
}

/// Two NICs trade names: each pod calls its NIC as the host calls the other one.
#[test]
fn two_pods_exchange_the_names_of_their_nics() {
    let Some(world) = World::new(2) else { return };
    let (engine, before) = (world.engine(), world.host_states());
    let names = world.device_names();
    let name_of = |device: usize| before.keys().nth(1 - device).unwrap().clone();
    let mut pods = Vec::new();
    for (n, device) in names.iter().enumerate() {
        let pod = format!("p{n}");
        let one = claim(&pod, std::slice::from_ref(device), &format!(r#"{{"interface": {{"name": "{}"}}}}"#, name_of(n)));
        engine.prepare(&one, &pod_ref(&pod)).unwrap();
        let netns = world.pod(&pod);
        engine.attach(&pod_ref(&pod).uid, &sandbox(&pod), netns.path(), soon()).unwrap();
        assert_eq!(world.pod_links(&netns).iter().filter(|l| l.name == name_of(n)).count(), 1);
        pods.push((pod, netns, one));
    }
    for (pod, _, one) in &pods {
        let _ = engine.release(&pod_ref(pod).uid, &sandbox(pod));
        engine.unprepare(&one.claim).unwrap();
    }
    world.assert_unchanged(&before);
}

/// Somebody on the host (a network manager) takes hold of a NIC that came back, before it is restored.
#[test]
fn what_somebody_on_the_host_did_with_a_returned_nic_is_respected() {
    let Some(world) = furnished() else { return };
    let (engine, before) = (world.engine(), state(&world));
    let (_pod, all) = lend(&world, &engine, "a", "");
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    ip(
        world.node.netns(),
        "link set nic0 name ens9
link set ens9 up
address add 203.0.113.5/24 dev ens9
link property add dev ens9 altname managed",
    );
    engine.unprepare(&all.claim).unwrap();
    let after = state(&world);
    let differences = dranic::netdev::host_state::compare(&before, &after);
    let whats: Vec<&str> = differences.iter().map(|d| d.what.as_str()).collect();
    // Its own are all there, and theirs too; the connected route is the kernel's.
    assert!(differences.iter().all(|d| d.before.is_empty()), "something of before is lost: {differences:#?}");
    assert!(whats.contains(&"address 203.0.113.5/24") && whats.contains(&"altname managed"), "{whats:?}");
}

/// The move would fail half way: it is refused before anything moves, by the altname's name.
#[test]
fn an_altname_that_the_pod_has_already_is_refused_by_name() {
    let Some(world) = furnished() else { return };
    let (engine, before) = (world.engine(), state(&world));
    let all = claim("a", &world.device_names(), "");
    engine.prepare(&all, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    ip(&pod.netns().unwrap(), "link add br0 type bridge\nlink property add dev br0 altname enp9s0f0");
    let error = engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap_err().to_string();
    assert!(error.contains("enp9s0f0") && error.contains("nothing was moved"), "{error}");
    engine.unprepare(&all.claim).unwrap();
    let mut socket = world.node.socket().unwrap();
    assert!(link::by_name(&mut socket, "nic0", soon()).unwrap().is_some());
    assert_eq!(dranic::netdev::host_state::compare(&before, &state(&world)), []);
}
