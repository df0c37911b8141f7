//! VRFs in the pod. Where the kernel has none, that is what the test looks at.

use dranic::attach::AttachError;
use dranic::netdev::{Link, Route, link, route};
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric::{PodNetns, new_netns};

use super::{Lent, deadline, soon};
use crate::common::{World, claim, pod_ref, sandbox};

/// Whether the kernel can make VRFs; if not, a line says so.
fn can_run() -> bool {
    if !dranic_testbed::fabric::root() {
        println!("skipped: needs root for network namespaces");
        return false;
    }
    let known = kernel_has_vrf();
    if !known {
        println!("skipped: this machine's kernel has no VRF links (CONFIG_NET_VRF)");
    }
    known
}

fn kernel_has_vrf() -> bool {
    let netns = new_netns().unwrap();
    let mut socket = RouteSocket::open_in(&netns).unwrap();
    socket.request(link::vrf_request(9, "blue", 9), deadline()).is_ok()
}

fn vrf_in(world: &World, pod: &PodNetns, name: &str) -> Option<Link> {
    world.pod_links(pod).into_iter().find(|l| l.name == name)
}

/// Destination and table of the routes by any link but `lo` that are not the kernel's local ones.
fn tables(world: &World, pod: &PodNetns) -> Vec<(String, u32)> {
    let routes = world.pod_snapshot(pod).routes;
    let shown = |r: &Route| !r.destination.addr().is_multicast() && r.kind == 1 && !r.destination.to_string().starts_with("fe80");
    let mut all: Vec<_> = routes.iter().filter(|(_, r)| shown(r)).map(|(_, r)| (r.destination.to_string(), r.table)).collect();
    all.sort();
    all
}

#[test]
fn a_kernel_without_vrfs_is_named_and_everything_comes_back() {
    let parameters = r#"{"interface": {"name": "rail0", "vrf": {"name": "blue"}}}"#;
    let Some(lent) = Lent::prepared(parameters, |_| ()) else { return };
    if kernel_has_vrf() {
        return println!("skipped: this machine's kernel has VRF links");
    }
    let error = lent.attach().unwrap_err();
    assert!(matches!(error, AttachError::Step { .. }), "{error}");
    assert!(error.to_string().contains("interface.vrf: the node's kernel has no VRF links"), "{error}");
    lent.ends_as_it_began();
}

#[test]
fn two_nics_share_a_vrf_that_goes_with_the_last() {
    if !can_run() {
        return;
    }
    let world = World::new(2).unwrap();
    let mut host = world.node.socket().unwrap();
    let nic0 = link::by_name(&mut host, "nic0", deadline()).unwrap().unwrap().index;
    let mut copied = Route::to("198.18.0.0/15".parse().unwrap());
    (copied.table, copied.gateway, copied.scope) = (300, Some("10.0.0.254".parse().unwrap()), 0);
    host.request(route::add_request(nic0, &copied, false), deadline()).unwrap();
    let before = world.host_states();
    let engine = world.engine();
    let names = world.device_names();
    let vrf = r#""vrf": {"name": "blue"}"#;
    let routes = r#""routes": [{"destination": "0.0.0.0/0", "gateway": "10.0.0.254", "table": 77},
        {"destination": "fd99::/64", "gateway": "fd00:0::fe"}]"#;
    let one = claim("one", &names[..1], &format!(r#"{{"interface": {{"forwarding": true, {vrf}}}, {routes}}}"#));
    let two = claim("two", &names[1..], &format!(r#"{{"interface": {{{vrf}}}}}"#));
    engine.prepare(&one, &pod_ref("a")).unwrap();
    engine.prepare(&two, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();

    let blue = vrf_in(&world, &pod, "blue").unwrap();
    // FNV-1a of "blue", modulo 1000, by another program.
    assert_eq!((blue.kind.as_deref(), blue.vrf_table, blue.is_up()), (Some("vrf"), Some(BLUE_TABLE), true));
    for nic in ["nic0", "nic1"] {
        assert_eq!(vrf_in(&world, &pod, nic).unwrap().master, Some(blue.index), "{nic}");
    }
    let want = ["0.0.0.0/0", "10.0.0.0/24", "10.0.1.0/24", "198.18.0.0/15", "fd00:1::/64", "fd00::/64", "fd99::/64"];
    let found = tables(&world, &pod);
    assert_eq!(found, want.map(|destination| (destination.to_owned(), BLUE_TABLE)).to_vec());
    assert!(world.pod_addresses(&pod).contains(&"fd00:1::1/64".to_owned()), "enslaving took no address away");
    let accept = || ["tcp", "udp"].map(|p| std::fs::read_to_string(format!("/proc/sys/net/ipv4/{p}_l3mdev_accept")).unwrap());
    assert_eq!(pod.netns().unwrap().run(accept).unwrap(), ["1\n", "1\n"]);

    engine.unprepare(&one.claim).unwrap();
    assert!(vrf_in(&world, &pod, "blue").is_some(), "the other NIC is in it");
    engine.unprepare(&two.claim).unwrap();
    assert_eq!(vrf_in(&world, &pod, "blue"), None);
    world.assert_unchanged(&before);
}

/// 1000 + FNV-1a("blue") mod 1000.
const BLUE_TABLE: u32 = 1541;

#[test]
fn a_vrf_that_is_there_is_used_and_stays() {
    if !can_run() {
        return;
    }
    let lent = Lent::prepared(r#"{"interface": {"name": "rail0", "vrf": {"name": "blue", "table": 1500}}}"#, |_| ()).unwrap();
    let mut inside = RouteSocket::open_in(&lent.pod.netns().unwrap()).unwrap();
    inside.request(link::vrf_request(50, "blue", 1500), deadline()).unwrap();
    lent.attach().unwrap();
    assert_eq!(lent.link("rail0").master, Some(50));
    lent.engine.unprepare(&lent.claim.claim).unwrap();
    assert!(vrf_in(&lent.world, &lent.pod, "blue").is_some());
    lent.world.assert_unchanged(&lent.before);
}

#[test]
fn a_vrf_of_another_table_and_a_link_that_is_no_vrf_are_refused_before_anything_moves() {
    if !can_run() {
        return;
    }
    let lent = Lent::prepared(r#"{"interface": {"name": "rail0", "vrf": {"name": "blue", "table": 1500}}}"#, |_| ()).unwrap();
    let mut inside = RouteSocket::open_in(&lent.pod.netns().unwrap()).unwrap();
    inside.request(link::vrf_request(50, "blue", 1501), deadline()).unwrap();
    let error = lent.attach().unwrap_err().to_string();
    assert!(error.contains("a VRF of that name with table 1501"), "{error}");
    inside.request(link::delete_request(50), deadline()).unwrap();
    dranic_testbed::fabric::links::create(&mut inside, "bridge", "blue").unwrap();
    let error = lent.attach().unwrap_err().to_string();
    assert!(error.contains("another link in the pod has that name"), "{error}");
    lent.engine.unprepare(&lent.claim.claim).unwrap();
    lent.world.assert_unchanged(&lent.before);
}

#[test]
fn a_roll_back_deletes_the_vrf() {
    if !can_run() {
        return;
    }
    let lent = Lent::prepared(r#"{"interface": {"name": "rail0", "vrf": {"name": "blue", "table": 1500}}}"#, |_| ()).unwrap();
    lent.world.break_plan(&lent.engine, "nic0");
    let error = lent.attach().unwrap_err().to_string();
    assert!(error.contains("adding route"), "{error}");
    lent.ends_as_it_began();
}

#[test]
fn a_link_that_left_by_itself_leaves_no_vrf_behind() {
    if !can_run() {
        return;
    }
    let lent = Lent::new(r#"{"interface": {"name": "rail0", "vrf": {"name": "blue", "table": 1500}}}"#, |_| ()).unwrap();
    // As after a kill between the move and the deletion.
    let index = lent.before["nic0"].index;
    lent.world.carry(&lent.pod.netns().unwrap(), lent.world.node.netns(), "rail0", "rail0", index);
    assert!(vrf_in(&lent.world, &lent.pod, "blue").is_some());
    lent.ends_as_it_began();
}
