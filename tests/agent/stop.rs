//! SIGTERM: in order, within 10 s, and no pod notices.

use std::time::Duration;

use dranic::dra::proto::v1::NodePrepareResourcesRequest;
use dranic::dra::proto::v1::dra_plugin_client::DraPluginClient;
use dranic::ledger::Phase;
use dranic_testbed::cluster::{Cluster, Pod};
use dranic_testbed::kubelet::channel;
use nix::sys::signal::Signal;

use crate::node::{self, LIMIT, names, until};

/// SIGTERM; the agent ends with 0 in less than 10 s and no socket is left.
async fn terminate(cluster: &mut Cluster) {
    let agent = cluster.agent.take().unwrap();
    let (status, took) = tokio::task::spawn_blocking(move || agent.terminate()).await.unwrap().unwrap();
    assert!(status.success(), "{status}\n{}", cluster.log());
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(node::sockets(cluster), Vec::<std::path::PathBuf>::new());
}

/// Everything of the pod's namespace that a program in it could notice.
fn look(pod: &Pod) -> String {
    let seen = pod.look().unwrap();
    format!("{:#?}\n{:#?}\n{:#?}", seen.links, seen.addresses, seen.routes)
}

#[tokio::test(flavor = "multi_thread")]
async fn attached_nics_stay_and_the_next_agent_goes_on() {
    let Some((mut cluster, before)) = node::start(3).await else { return };
    assert_eq!(node::sockets(&cluster).len(), 4);
    let (attached, prepared) = (cluster.pod("attached").unwrap(), cluster.pod("prepared").unwrap());
    let claims =
        [cluster.claim("c1", &attached, &names(0..2), &[]).unwrap(), cluster.claim("c2", &prepared, &names(2..3), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &attached).await;
    let inside = look(&attached);
    let status = cluster.status().unwrap();
    let published = node::published(&cluster);

    terminate(&mut cluster).await;
    assert_eq!(look(&attached), inside);
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    assert_eq!(cluster.status().unwrap().claims, status.claims);
    assert_eq!(node::published(&cluster), published);
    assert_eq!(look(&attached), inside);
    cluster.runtime.create_container(&attached.sandbox.id, &attached.container("second")).await.result().unwrap();
    node::run(&cluster, &prepared).await;
    node::assert_inside(&prepared, &names(2..3));
    node::end(&cluster, &attached, &claims[..1]).await;
    node::end(&cluster, &prepared, &claims[1..]).await;
    node::assert_as_before(&cluster, &before);
    terminate(&mut cluster).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_end_while_the_agent_is_away_are_given_back_afterwards() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    terminate(&mut cluster).await;
    // Nobody is asked, and the namespace stays a little: another process has it open.
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    let released = || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared);
    until(LIMIT, "the sandbox that is gone is released", released).await;
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// While 32 NICs are on their way into a pod.
#[tokio::test(flavor = "multi_thread")]
async fn during_an_attach_it_is_all_or_nothing() {
    let Some((mut cluster, before)) = node::start(32).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..32), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let agent = cluster.agent.take().unwrap();
    let stop = async {
        until(LIMIT, "the attach has begun", || pod.look().unwrap().links.len() > 4).await;
        tokio::task::spawn_blocking(move || agent.terminate()).await.unwrap().unwrap()
    };
    let (relay, (status, took)) = tokio::join!(cluster.runtime.run_pod_sandbox(&pod.sandbox), stop);
    assert!(status.success() && took < Duration::from_secs(10), "{status} {took:?}\n{}", cluster.log());
    assert_eq!(node::sockets(&cluster), Vec::<std::path::PathBuf>::new());
    let inside = pod.look().unwrap().links.iter().filter(|l| !l.is_loopback()).count();
    assert!(inside == 0 || inside == 32, "{inside} of 32 NICs are in the pod");
    assert!(relay.error.is_some() || inside == 32, "RunPodSandbox succeeded with {inside} NICs");

    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    if relay.error.is_some() {
        // The runtime gave the sandbox up; the kubelet makes another.
        until(LIMIT, "all are back", || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared))
            .await;
        node::assert_empty(&pod);
        let again = cluster.sandbox("a", &pod.uid, 1).unwrap();
        node::run(&cluster, &again).await;
        node::assert_inside(&again, &names(0..32));
        node::end(&cluster, &again, &claims).await;
    } else {
        node::assert_phase(&cluster, 32, Phase::Attached);
        node::assert_inside(&pod, &names(0..32));
        node::end(&cluster, &pod, &claims).await;
    }
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_prepare_ends_and_a_new_one_is_unavailable() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims =
        [cluster.claim("slow", &pod, &names(0..1), &[]).unwrap(), cluster.claim("new", &pod, &names(1..2), &[]).unwrap()];
    let dra = cluster.path("kubelet/plugins/dranic.dev/dra.sock");
    let registration = cluster.path("kubelet/plugins_registry/dranic.dev-reg.sock");
    assert!(registration.exists());
    let mut direct = DraPluginClient::new(channel(dra));
    cluster.api.faults().set_latency(Duration::from_millis(2500));
    let agent = cluster.agent.take().unwrap();
    let stop = async {
        let asked = || cluster.api.requests().iter().any(|r| r.path.ends_with("/resourceclaims/slow"));
        until(LIMIT, "the claim is being fetched", asked).await;
        agent.signal(Signal::SIGTERM).unwrap();
        until(LIMIT, "the registration socket is gone", || !registration.exists()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        let request = NodePrepareResourcesRequest { claims: claims[1..].to_vec() };
        let status = direct.node_prepare_resources(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable, "{status:?}");
        node::assert_says(status.message(), &["stopping", "kubelet will retry"]);
        tokio::task::spawn_blocking(move || agent.terminate()).await.unwrap().unwrap()
    };
    let (prepared, (status, _)) = tokio::join!(cluster.prepare(&claims[..1]), stop);
    prepared.unwrap();
    assert!(status.success(), "{status}\n{}", cluster.log());
    cluster.api.faults().set_latency(Duration::ZERO);
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    node::assert_phase(&cluster, 1, Phase::Prepared);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn sigint_stops_it_likewise_and_a_second_agent_of_the_node_waits() {
    let Some((mut cluster, _)) = node::start(1).await else { return };
    let first = cluster.agent.take().unwrap();
    cluster.start_agent().unwrap();
    until(LIMIT, "the second agent waits", || cluster.log().contains("another agent has the state directory")).await;
    assert!(!cluster.agent.as_mut().unwrap().has_ended());
    assert_eq!(node::sockets(&cluster).len(), 4, "the first one's sockets stay");
    assert!(cluster.status().is_ok());
    cluster.agent = Some(first);
    cluster.agent.as_ref().unwrap().signal(Signal::SIGINT).unwrap();
    until(LIMIT, "the agent ends", || cluster.agent.as_mut().unwrap().has_ended()).await;
    assert_eq!(node::sockets(&cluster), Vec::<std::path::PathBuf>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_agent_waits_for_the_last_one_and_goes_on_in_its_place() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c1", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let published = node::published(&cluster);
    let first = cluster.agent.take().unwrap();
    for stopped_meanwhile in [true, false] {
        let said = cluster.log().matches("another agent has the state directory").count();
        cluster.start_agent().unwrap();
        let waits = || cluster.log().matches("another agent has the state directory").count() > said;
        until(LIMIT, "the new agent waits", waits).await;
        assert_eq!(node::sockets(&cluster).len(), 4, "the first one's");
        if stopped_meanwhile {
            let new = cluster.agent.take().unwrap();
            let (status, took) = tokio::task::spawn_blocking(move || new.terminate()).await.unwrap().unwrap();
            assert!(status.success() && took < Duration::from_secs(2), "{status} {took:?}");
            assert_eq!(node::sockets(&cluster).len(), 4, "it has removed none of them");
        }
    }
    let (status, _) = tokio::task::spawn_blocking(move || first.terminate()).await.unwrap().unwrap();
    assert!(status.success(), "{status}");
    cluster.wait_ready(LIMIT).await.unwrap();
    assert_eq!(node::published(&cluster), published, "the slices stay");
    node::run(&cluster, &pod).await;
    node::assert_phase(&cluster, 2, Phase::Attached);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}
