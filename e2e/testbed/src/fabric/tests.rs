use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::*;

const LONG: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(300);

fn nic(name: &str, rail: u32, addresses: &[&str]) -> NicSpec {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    NicSpec { name: name.into(), rail, addresses, up: true, ..NicSpec::default() }
}

fn pinged(node: &Node, source: &str, target: &str, timeout: Duration) -> io::Result<Duration> {
    ping(node.netns(), source.parse().unwrap(), target.parse().unwrap(), timeout)
}

fn mounted(path: &Path) -> bool {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!(" {} ", path.display()))
}

#[test]
fn nodes_reach_each_other_over_their_rail_and_no_other() {
    if !root() {
        return;
    }
    let fabric = Fabric::new().unwrap();
    let (a, b) = (Node::new().unwrap(), Node::new().unwrap());
    fabric.add_nic(&a, &nic("eth0", 0, &["10.0.0.1/24", "fd00::1/64"])).unwrap();
    fabric.add_nic(&b, &nic("eth0", 0, &["10.0.0.2/24", "fd00::2/64"])).unwrap();
    fabric.add_nic(&a, &nic("eth1", 1, &["10.0.1.1/24"])).unwrap();
    fabric.add_nic(&b, &nic("eth1", 2, &["10.0.1.2/24"])).unwrap();
    fabric.add_address(1, "10.0.1.9/24".parse().unwrap()).unwrap();
    println!("first echo took {:?}", pinged(&a, "10.0.0.1", "10.0.0.2", LONG).unwrap());
    println!("the second {:?}", pinged(&a, "10.0.0.1", "10.0.0.2", LONG).unwrap());
    pinged(&b, "fd00::2", "fd00::1", LONG).unwrap();
    pinged(&a, "10.0.1.1", "10.0.1.9", LONG).unwrap();
    let error = pinged(&a, "10.0.1.1", "10.0.1.2", SHORT).unwrap_err();
    assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::HostUnreachable), "{error}");
    pinged(&a, "10.0.0.99", "10.0.0.2", SHORT).unwrap_err();
}

#[test]
fn a_nic_is_as_asked_for() {
    if !root() {
        return;
    }
    let (fabric, node) = (Fabric::new().unwrap(), Node::new().unwrap());
    let mac: LinkAddress = "02:00:00:00:00:05".parse().unwrap();
    let spec = NicSpec { mac: Some(mac.clone()), mtu: Some(9000), up: false, ..nic("nic5", 3, &[]) };
    let made = fabric.add_nic(&node, &spec).unwrap();
    assert_eq!((made.link.name.as_str(), made.link.mtu, made.link.is_up()), ("nic5", 9000, false));
    assert_eq!(made.link.address, Some(mac));
    assert!(made.link.link_netnsid.is_some(), "the other end is in the fabric");
    let mut socket = RouteSocket::open_in(fabric.netns()).unwrap();
    let bridge = links::find(&mut socket, "rail3").unwrap();
    assert_eq!(bridge.index, made.bridge);
    assert!(fabric.add_nic(&node, &spec).unwrap_err().to_string().contains("nic5"));
}

#[test]
fn a_program_on_a_node_sees_the_nodes_links_in_sys() {
    if !root() {
        return;
    }
    let (fabric, node) = (Fabric::new().unwrap(), Node::new().unwrap());
    fabric.add_nic(&node, &nic("nic0", 0, &[])).unwrap();
    let mut command = Command::new("ls");
    let child = NodeCommand::spawn(&node, command.arg("/sys/class/net").stdout(Stdio::piped())).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "lo\nnic0\n");
    let seen = NodeCommand::run(&node, || Path::new("/sys/class/net/nic0").exists()).unwrap();
    assert!(seen && !Path::new("/sys/class/net/nic0").exists(), "and nobody else sees them");
}

#[test]
fn a_pod_made_later_is_seen_on_a_node_that_runs_and_vanishes_there_too() {
    if !root() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let pods = PodDir::new(&temp.path().join("netns")).unwrap();
    let node = Node::new().unwrap();
    let path = pods.path().join("pod-1");
    let (told, tell) = (mpsc::channel(), mpsc::channel());
    std::thread::scope(|scope| {
        let (ask, answer) = (&told.0, tell.1);
        let (questions, answers) = (told.1, tell.0);
        let (node, path) = (&node, &path);
        scope.spawn(move || {
            NodeCommand::run(node, || {
                for () in questions {
                    answers.send(Netns::open(path).map(|netns| netns.id()).ok()).unwrap();
                }
            })
            .unwrap();
        });
        let look = || {
            ask.send(()).unwrap();
            answer.recv_timeout(LONG).unwrap()
        };
        assert_eq!(look(), None);
        let pod = pods.pod("pod-1").unwrap();
        assert_eq!(look(), Some(pod.netns().unwrap().id()));
        drop(pod);
        assert_eq!(look(), None);
        drop(told.0);
    });
}

#[test]
fn a_pod_has_lo_and_an_eth0() {
    if !root() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let pods = PodDir::new(&temp.path().join("netns")).unwrap();
    let node = Node::new().unwrap();
    let mut pod = pods.pod("pod-1").unwrap();
    pod.add_eth0(node.netns(), "veth1").unwrap();
    let id = pod.netns().unwrap().id();
    pod.forget();
    let netns = pod.netns().unwrap();
    assert_eq!(netns.id(), id, "the file keeps it");
    let mut socket = RouteSocket::open_in(&netns).unwrap();
    for name in ["lo", "eth0"] {
        assert!(links::find(&mut socket, name).unwrap().is_up());
    }
    assert!(pods.pod("pod-1").unwrap_err().to_string().contains("pod-1"), "a pod's file is made once");
    assert!(Netns::open(pod.path()).is_ok(), "and the failed second try harms nothing");
}

#[test]
fn nothing_is_left_even_after_a_panic() {
    if !root() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("netns");
    let work = || {
        let pods = PodDir::new(&dir).unwrap();
        let pod = pods.pod("pod-1").unwrap();
        assert!(mounted(pods.path()) && mounted(pod.path()));
        panic!("as tests do");
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_err();
    assert!(!mounted(&dir) && !dir.exists());
}

#[test]
fn a_panic_in_a_scratch_namespace_is_passed_on() {
    if !root() {
        return;
    }
    let outside = Netns::current().unwrap().id();
    let inside = with_scratch_netns(|netns| (netns.id(), Netns::current().unwrap().id()));
    assert!(inside.0 == inside.1 && inside.0 != outside);
    let panic = catch_unwind(|| with_scratch_netns(|_| panic!("as tests do"))).unwrap_err();
    assert_eq!(*panic.downcast_ref::<&str>().unwrap(), "as tests do");
}
