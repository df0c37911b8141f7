//! What the kubelet is told by the whole agent.

use std::time::{Duration, Instant};

use dranic::netdev::link;
use dranic::netlink::RouteSocket;
use dranic_testbed::cluster::{Cluster, NODE, Pod};
use dranic_testbed::fabric::links;
use dranic_testbed::kubelet::Claim;
use dranic_testbed::kubelet::health::HealthStatus;

use crate::node::{self, DRIVER, LIMIT, assert_says, names, until};

/// The message with which `device` has this health, and how long that took.
async fn wait(cluster: &Cluster, device: &str, wanted: HealthStatus) -> (String, Duration) {
    let begin = Instant::now();
    let message = cluster.kubelet.wait_health(DRIVER, (NODE, device), wanted, LIMIT).await;
    (message.unwrap_or_else(|error| panic!("{error:#}\n{}", cluster.log())), begin.elapsed())
}

async fn running(cluster: &Cluster, name: &str, nics: &[String]) -> (Pod, Claim) {
    let pod = cluster.pod(name).unwrap();
    let claim = cluster.claim(name, &pod, nics, &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    node::run(cluster, &pod).await;
    (pod, claim)
}

/// In the pod, as somebody with CAP_NET_ADMIN there.
fn in_pod(pod: &Pod, name: &str, act: impl FnOnce(&mut RouteSocket, u32)) {
    let mut socket = RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    let index = links::find(&mut socket, name).unwrap().index;
    act(&mut socket, index);
}

fn fds(cluster: &Cluster) -> usize {
    let pid = cluster.agent.as_ref().unwrap().pid();
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_to_links_in_a_pod_is_told() {
    let Some((cluster, _)) = node::start(3).await else { return };
    let devices: Vec<String> = names(0..3).iter().map(|nic| cluster.device(nic).unwrap()).collect();
    wait(&cluster, &devices[2], HealthStatus::Healthy).await;
    let before = fds(&cluster);
    let (pod, claim) = running(&cluster, "a", &names(0..2)).await;
    wait(&cluster, &devices[0], HealthStatus::Healthy).await;

    for _ in 0..2 {
        cluster.plug("nic0", false).unwrap();
        let (message, after) = wait(&cluster, &devices[0], HealthStatus::Unhealthy).await;
        assert_says(&message, &["link down", "nic0", "in the pod"]);
        println!("a pulled cable is told after {after:?}");
        assert!(after < Duration::from_secs(5), "{after:?}");
        cluster.plug("nic0", true).unwrap();
        wait(&cluster, &devices[0], HealthStatus::Healthy).await;
    }
    in_pod(&pod, "nic1", |socket, index| link::set_up(socket, index, false, links::soon()).unwrap());
    let (message, _) = wait(&cluster, &devices[1], HealthStatus::Unhealthy).await;
    assert_says(&message, &["link down", "nic1", "administratively down"]);
    in_pod(&pod, "nic1", |socket, index| links::delete(socket, index).unwrap());
    let gone = || cluster.kubelet.health(DRIVER, NODE, &devices[1]).1.contains("device gone");
    until(LIMIT, "the device is gone", gone).await;
    assert_eq!(cluster.kubelet.health(DRIVER, NODE, &devices[0]).0, HealthStatus::Healthy);
    let metrics = node::get(&cluster, "/metrics").unwrap().1;
    assert_says(&metrics, &["dranic_unhealthy_devices 1"]);

    node::end(&cluster, &pod, &[claim]).await;
    wait(&cluster, &devices[0], HealthStatus::Healthy).await;
    until(LIMIT, "nothing of the pod is held open", || fds(&cluster) <= before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_on_the_host_and_an_agent_that_comes_back() {
    let Some((mut cluster, _)) = node::start(3).await else { return };
    let devices: Vec<String> = names(0..3).iter().map(|nic| cluster.device(nic).unwrap()).collect();
    cluster.plug("nic2", false).unwrap();
    assert_says(&wait(&cluster, &devices[2], HealthStatus::Unhealthy).await.0, &["link down", "nic2", "on the host"]);

    // Prepared: down, because we took it down.
    let waiting = cluster.pod("waiting").unwrap();
    let claim = cluster.claim("waiting", &waiting, &names(0..1), &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1000)).await;
    assert_eq!(cluster.kubelet.health(DRIVER, NODE, &devices[0]), (HealthStatus::Healthy, String::new()));
    node::unplug(&cluster, "nic0");
    assert_says(&wait(&cluster, &devices[0], HealthStatus::Unhealthy).await.0, &["device gone", "nic0"]);

    let (pod, other) = running(&cluster, "a", &names(1..2)).await;
    wait(&cluster, &devices[1], HealthStatus::Healthy).await;
    cluster.kill_agent().unwrap();
    cluster.plug("nic1", false).unwrap();
    cluster.start_agent().unwrap();
    // The kubelet opens a stream again at the new registration.
    assert_says(&wait(&cluster, &devices[1], HealthStatus::Unhealthy).await.0, &["link down", "nic1", "in the pod"]);
    cluster.plug("nic1", true).unwrap();
    wait(&cluster, &devices[1], HealthStatus::Healthy).await;
    node::end(&cluster, &pod, &[other]).await;
    cluster.unprepare(&[claim]).await.unwrap();
}
