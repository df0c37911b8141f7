//! Pods that can't have what their claims ask for.

use std::net::IpAddr;

use dranic::ledger::Phase;
use dranic::netdev::address::{self, Address};
use dranic::netlink::RouteSocket;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::Pod;
use dranic_testbed::fabric::links::{self, soon};

use crate::node::{self, DRIVER, LIMIT, PLUGIN, assert_says, names, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_on_the_hosts_network() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let mut pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    // Runtimes give no path, an empty one, or the host's own namespace.
    let host = format!("/proc/{}/ns/net", cluster.agent.as_ref().unwrap().pid());
    for (attempt, path) in [None, Some(String::new()), Some(host)].into_iter().enumerate() {
        pod.sandbox.netns_path = path.clone();
        pod.sandbox.id = format!("refused-{attempt}");
        let error = cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error.expect("it must not run without its NICs");
        assert_says(&error, &["pod default/a", "host's network", "remove hostNetwork or the claim"]);
        pod.sandbox.id = format!("missed-{attempt}");
        cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
        let error = cluster.runtime.create_container(&pod.sandbox.id, &pod.container("main")).await.error.unwrap();
        assert_says(&error, &["pod default/a", "host's network", "remove hostNetwork or the claim"]);
    }
    node::assert_phase(&cluster, 2, Phase::Prepared);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
}

/// containerd that was killed between starting a sandbox and writing down its specification goes on with the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_the_runtime_has_lost() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let (mut pod, other) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let address = |pod: &Pod, last: u8| {
        let ip = IpAddr::from([10, 244, 0, last]);
        let mut socket = RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
        let eth0 = links::find(&mut socket, "eth0").unwrap().index;
        let request = address::add_request(eth0, &Address::permanent(ip, 24));
        assert!(socket.pipeline(vec![request], soon()).iter().all(Result::is_ok));
    };
    for pod in [&pod, &other] {
        pod.netns.add_eth0(cluster.node.netns(), &format!("cni-{}", pod.name)).unwrap();
    }
    address(&pod, 7);
    address(&other, 8);
    cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());

    // Of nobody, and of both.
    address(&pod, 9);
    address(&other, 9);
    for ips in [vec![], vec!["10.244.0.1"], vec!["nonsense"], vec!["10.244.0.9"]] {
        pod.sandbox.lost = Some(ips.into_iter().map(str::to_owned).collect());
        cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
        let error = cluster.runtime.create_container(&pod.sandbox.id, &pod.container("main")).await.error.unwrap();
        assert_says(&error, &["pod default/a", "does not know the network namespace", "delete the pod"]);
    }
    node::assert_phase(&cluster, 2, Phase::Prepared);
    pod.sandbox.lost = Some(vec!["10.244.0.7".to_owned()]);
    cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
    assert_eq!(cluster.start_container(&pod, "main", &[]).await, Ok(()));
    node::assert_phase(&cluster, 2, Phase::Attached);
    assert!(names(0..2).iter().all(|nic| pod.links_up().unwrap().contains(nic)), "{:?}", pod.links_up());
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_none() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let mut pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let good = pod.sandbox.netns_path.clone();
    let file = cluster.path("kubeconfig").display().to_string();
    let paths = ["/does/not/exist", "relative", "/dev/null", "/proc/self/ns/mnt", &file, &"x".repeat(100_000), "a\0b"];
    for (attempt, path) in paths.into_iter().enumerate() {
        pod.sandbox.netns_path = Some(path.to_owned());
        pod.sandbox.id = format!("refused-{attempt}");
        let error = cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error.expect("it must not run without its NICs");
        assert_says(&error, &["pod default/a", "namespace"]);
        assert!(error.len() < 5000, "{} bytes of error", error.len());
    }
    pod.sandbox.netns_path = good;
    pod.sandbox.id = "good".to_owned();
    node::run(&cluster, &pod).await;
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_taken_in_the_pod() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let config =
        ClaimConfig { requests: vec!["r1".into()], ..ClaimConfig::from_claim(DRIVER, r#"{"interface": {"name": "eth0"}}"#) };
    let claims = [cluster.claim("c", &pod, &names(0..2), &[config]).unwrap()];
    let device = cluster.device("nic1").unwrap();
    cluster.prepare(&claims).await.unwrap();
    pod.netns.add_eth0(cluster.node.netns(), "cni0").unwrap();
    let ours = pod.look().unwrap().links;
    let error = cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error.expect("eth0 is taken");
    assert_says(
        &error,
        &["pod default/a", "claim default/c", &device, "\"eth0\" is taken", "nothing was moved", "interface.name"],
    );
    let names_of = |links: Vec<dranic::netdev::Link>| links.into_iter().map(|l| l.name).collect::<Vec<_>>();
    assert_eq!(names_of(pod.look().unwrap().links), names_of(ours));
    let status = cluster.status().unwrap();
    assert!(node::devices(&status).iter().all(|d| d.last_error.as_ref().is_some_and(|e| e.contains("eth0"))), "{status:#?}");
    cluster.unprepare(&claims).await.unwrap();
    let mut socket = cluster.node.socket().unwrap();
    let peer = dranic_testbed::fabric::links::find(&mut socket, "cni0").unwrap().index;
    dranic_testbed::fabric::links::delete(&mut socket, peer).unwrap();
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_gone_after_prepare() {
    let Some(mut options) = node::options(3) else { return };
    options.arguments = vec!["--guard-wait=1".to_owned()];
    let (cluster, mut before) = node::start_with(options).await;
    let mut pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..3), &[]).unwrap()];
    let device = cluster.device("nic1").unwrap();
    cluster.prepare(&claims).await.unwrap();
    node::unplug(&cluster, "nic1");
    before.remove("nic1");
    let error = cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error.expect("nic1 is gone");
    assert_says(&error, &["pod default/a", "claim default/c", &device, "nic1", "is gone", "dranic status"]);
    node::assert_empty(&pod);
    // Also where the runtime missed that, no container starts.
    pod.sandbox.id = "missed".to_owned();
    cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
    let error = cluster.start_container(&pod, "main", &[]).await.expect_err("nic1 is gone");
    assert_says(&error, &["default/c", &device, "is gone"]);
    node::assert_empty(&pod);
    assert_eq!(cluster.runtime.plugins(), [PLUGIN]);
    cluster.unprepare(&claims).await.unwrap();
    until(LIMIT, "it is not published any more", || !node::published(&cluster).contains_key(&device)).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_gone_while_the_pod_has_it() {
    let Some((cluster, mut before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let netns = pod.netns.netns().unwrap();
    let mut socket = dranic::netlink::RouteSocket::open_in(&netns).unwrap();
    let index = dranic_testbed::fabric::links::find(&mut socket, "nic0").unwrap().index;
    dranic_testbed::fabric::links::delete(&mut socket, index).unwrap();
    before.remove("nic0");
    // The pod must go all the same, with what is left of it.
    node::end(&cluster, &pod, &claims).await;
    until(LIMIT, "it is not published any more", || node::published(&cluster).len() == 1).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_meddles_with_its_nics() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    // It renames one to the other's host name, takes it down and gives it another MTU and address.
    let netns = pod.netns.netns().unwrap();
    let mut socket = dranic::netlink::RouteSocket::open_in(&netns).unwrap();
    for (from, to) in [("nic0", "evil"), ("nic1", "nic0")] {
        let index = dranic_testbed::fabric::links::find(&mut socket, from).unwrap().index;
        dranic::netdev::link::set_up(&mut socket, index, false, dranic_testbed::fabric::links::soon()).unwrap();
        let mut message = netlink_packet_route::link::LinkMessage::default();
        message.header.index = index;
        message.attributes.push(netlink_packet_route::link::LinkAttribute::IfName(to.to_owned()));
        message.attributes.push(netlink_packet_route::link::LinkAttribute::Mtu(1280));
        let message = netlink_packet_route::RouteNetlinkMessage::NewLink(message);
        socket.request(dranic::netlink::Request { message, flags: 0 }, dranic_testbed::fabric::links::soon()).unwrap();
        dranic_testbed::fabric::links::add_address(&mut socket, index, "203.0.113.5/24".parse().unwrap()).unwrap();
    }
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

/// What the claim's CDI spec gives to each container that uses the claim.
fn marks(cluster: &dranic_testbed::cluster::Cluster) -> Vec<String> {
    let folder = cluster.path("cdi");
    let specs = node::files(&folder);
    let text = std::fs::read_to_string(folder.join(&specs[0])).unwrap();
    let spec: serde_json::Value = serde_json::from_str(&text).unwrap();
    let env = spec["devices"][0]["containerEdits"]["env"].as_array().unwrap();
    env.iter().map(|v| v.as_str().unwrap().to_owned()).collect()
}

/// The kubelet does not prepare a claim again for a second pod on the node: all we see of that pod are its containers.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_brings_another_pods_claim() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let (pod, other) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let env = marks(&cluster);
    assert!(!env.is_empty());
    let with = |mut container: dranic_testbed::runtime::ContainerSpec| {
        container.env = [vec!["PATH=/bin".to_owned()], env.clone()].concat();
        container
    };
    cluster.runtime.create_container(&pod.sandbox.id, &with(pod.container("second"))).await.result().unwrap();

    cluster.runtime.run_pod_sandbox(&other.sandbox).await.result().unwrap();
    cluster.runtime.create_container(&other.sandbox.id, &other.container("plain")).await.result().unwrap();
    let error = cluster.runtime.create_container(&other.sandbox.id, &with(other.container("main"))).await.error.unwrap();
    assert_says(&error, &[DRIVER, "claim default/c", "pod default/a", "ResourceClaimTemplate"]);

    node::end(&cluster, &pod, &claims).await;
    assert_eq!(node::files(&cluster.path("cdi")), Vec::<String>::new(), "the spec goes with the claim");
    let error = cluster.runtime.create_container(&other.sandbox.id, &with(other.container("late"))).await.error.unwrap();
    assert_says(&error, &["claim default/c", "not prepared on this node"]);
    node::assert_nothing_done(&cluster, &before).await;
}
