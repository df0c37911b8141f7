//! Two agents of one node at a time, as in a rolling update of the DaemonSet with `maxSurge: 1`.

#[path = "common/node.rs"]
#[allow(dead_code, reason = "shared with other test programs")]
mod node;

use std::time::{Duration, Instant};

use dranic::ledger::Phase;
use dranic_testbed::cluster::Cluster;
use dranic_testbed::kubelet::Event;
use dranic_testbed::runtime::What;
use nix::sys::signal::Signal;

use crate::node::{DRIVER, LIMIT, PLUGIN, assert_says, names, until};

/// A second agent beside the present one, on standby.
async fn standby(cluster: &mut Cluster, uid: &str) -> dranic_testbed::cluster::Agent {
    let waits = |log: &str| log.matches("on standby, to take over").count();
    let before = waits(&cluster.log());
    let mut agent = cluster.start_instance(uid).unwrap();
    until(LIMIT, "it is on standby", || {
        assert!(!agent.has_ended(), "{}", cluster.log());
        waits(&cluster.log()) > before
    })
    .await;
    agent
}

fn registrations(cluster: &Cluster) -> usize {
    cluster.kubelet.events().iter().filter(|event| matches!(event, Event::Registered { .. })).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_new_agent_takes_over_when_the_old_one_ends() {
    let Some(options) = node::options(4) else { return };
    let mut cluster = Cluster::new(options).unwrap();
    let before = cluster.host_states().unwrap();
    cluster.agent = Some(cluster.start_instance("uid-0").unwrap());
    cluster.wait_ready(LIMIT).await.unwrap();
    let published = node::published(&cluster);

    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;

    for round in 1..=3 {
        let new = standby(&mut cluster, &format!("uid-{round}")).await;
        // The old one works, and answers for both.
        assert_eq!(node::get(&cluster, "/readyz").unwrap(), (200, "ok\n".to_owned()));
        node::assert_phase(&cluster, 2, Phase::Attached);
        assert_eq!((registrations(&cluster), cluster.runtime.plugins().len()), (round, 1));

        let old = cluster.agent.replace(new).unwrap();
        let gaps = hand_over(&cluster, old, round).await;
        println!("round {round}: {gaps}");
        cluster.wait_ready(LIMIT).await.unwrap();
        assert!(cluster.log().matches("taking over").count() == round, "{}", cluster.log());
        assert_eq!(node::published(&cluster), published, "slices never vanish");
        node::assert_phase(&cluster, 2, Phase::Attached);
        node::assert_inside(&pod, &names(0..2));
    }
    // What the first one attached is given back by the fourth, which also serves a new pod.
    let other = cluster.pod("b").unwrap();
    let theirs = [cluster.claim("d", &other, &names(2..4), &[]).unwrap()];
    cluster.prepare(&theirs).await.unwrap();
    node::run(&cluster, &other).await;
    node::end(&cluster, &pod, &claims).await;
    node::end(&cluster, &other, &theirs).await;
    node::assert_as_before(&cluster, &before);
    let (status, _) = cluster.agent.take().unwrap().terminate().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(node::sockets(&cluster), Vec::<std::path::PathBuf>::new());
}

/// Ends the old agent and waits for the new one; says how long each leg was without an agent.
async fn hand_over(cluster: &Cluster, old: dranic_testbed::cluster::Agent, round: usize) -> String {
    let from = cluster.runtime.log().all().len();
    let ended = tokio::task::spawn_blocking(move || {
        let result = old.terminate().unwrap();
        (result, Instant::now())
    });
    let unregistered = || cluster.kubelet.events().iter().filter(|event| matches!(event, Event::Unregistered { .. })).count();
    until(LIMIT, "the kubelet has the new one", || registrations(cluster) == round + 1).await;
    assert_eq!(unregistered(), round - 1, "the old one is there until the new one is");
    until(LIMIT, "the kubelet lost the old one", || unregistered() == round).await;
    let ((status, took), ended) = ended.await.unwrap();
    assert!(status.success(), "{status}\n{}", cluster.log());
    let log = cluster.runtime.log();
    let ready = log.wait(from, LIMIT, |event| event.plugin == PLUGIN && event.what == What::Ready).await.unwrap();
    let lost = log.wait(from, LIMIT, |event| event.plugin == PLUGIN && matches!(event.what, What::Gone(_))).await.unwrap();
    assert!(ready.at > lost.at, "one plugin at a time");
    format!(
        "old agent ended {took:?} after SIGTERM; NRI without a plugin {:?}; the new plugin was ready {:?} before the old agent ended",
        ready.at - lost.at,
        ended.saturating_duration_since(ready.at),
    )
}

/// A kubelet that finds no driver to ask makes a pod wait for a minute or more.
#[tokio::test(flavor = "multi_thread")]
async fn no_call_of_the_kubelet_fails_while_agents_change() {
    let Some(options) = node::options(4) else { return };
    let mut cluster = Cluster::new(options).unwrap();
    let before = cluster.host_states().unwrap();
    cluster.agent = Some(cluster.start_instance("uid-0").unwrap());
    cluster.wait_ready(LIMIT).await.unwrap();
    let pods: Vec<_> = (0..2).map(|n| cluster.pod(&format!("p{n}")).unwrap()).collect();
    let claims: Vec<_> =
        (0..2u32).map(|n| cluster.claim(&format!("c{n}"), &pods[n as usize], &names(2 * n..2 * n + 2), &[]).unwrap()).collect();
    for round in 1..=3 {
        let new = standby(&mut cluster, &format!("uid-{round}")).await;
        let old = cluster.agent.replace(new).unwrap();
        let ended = tokio::task::spawn_blocking(move || old.terminate().unwrap());
        let calls = |claim: dranic_testbed::kubelet::Claim| {
            let (cluster, ended) = (&cluster, &ended);
            async move {
                let mut count = 0;
                while !ended.is_finished() || count < 3 {
                    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.log()));
                    cluster.unprepare(std::slice::from_ref(&claim)).await.unwrap_or_else(|e| panic!("{e:#}\n{}", cluster.log()));
                    count += 1;
                }
                count
            }
        };
        let counts = tokio::join!(calls(claims[0].clone()), calls(claims[1].clone()));
        let (status, took) = ended.await.unwrap();
        assert!(status.success(), "{status}\n{}", cluster.log());
        println!("round {round}: {counts:?} claims prepared and unprepared; the old agent ended {took:?} after SIGTERM");
        assert_eq!(cluster.log().matches("handed over took").count(), round, "{}", cluster.log());
        cluster.wait_ready(LIMIT).await.unwrap();
    }
    node::assert_as_before(&cluster, &before);
}

/// Between the two agents the devices are nobody's: the one that has given the ledger away must touch nothing of it any more.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_whose_successor_hangs_does_nothing_more_itself() {
    let Some(options) = node::options(2) else { return };
    let mut cluster = Cluster::new(options).unwrap();
    let before = cluster.host_states().unwrap();
    cluster.agent = Some(cluster.start_instance("uid-0").unwrap());
    cluster.wait_ready(LIMIT).await.unwrap();
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let new = standby(&mut cluster, "uid-1").await;
    new.signal(Signal::SIGSTOP).unwrap();
    let old = cluster.agent.replace(new).unwrap();
    old.signal(Signal::SIGTERM).unwrap();
    until(LIMIT, "the ledger is given away", || cluster.log().contains("handing it over")).await;
    // It waits until the old agent has given up, and is refused then.
    let error = format!("{:#}", cluster.unprepare(&claims).await.unwrap_err());
    assert_says(&error, &["default/c", "another agent takes this node over", "kubelet will try again"]);
    node::assert_inside(&pod, &names(0..2));
    let ended = tokio::task::spawn_blocking(move || old.terminate().unwrap());
    assert!(ended.await.unwrap().0.success(), "{}", cluster.log());
    assert_says(&cluster.log(), &["not handed over in order"]);
    cluster.agent.as_ref().unwrap().signal(Signal::SIGCONT).unwrap();
    until(LIMIT, "the new one works", || cluster.runtime.plugins() == [PLUGIN] && registrations(&cluster) == 2).await;
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_told_to_stop_ends_at_once_and_touches_nothing() {
    let Some((mut cluster, _)) = node::start(1).await else { return };
    let sockets = node::sockets(&cluster);
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut agent = standby(&mut cluster, "uid-2").await;
        let begin = Instant::now();
        agent.signal(signal).unwrap();
        until(LIMIT, "it ends", || agent.has_ended()).await;
        assert!(begin.elapsed() < Duration::from_millis(1500), "{:?}", begin.elapsed());
    }
    let agent = standby(&mut cluster, "uid-3").await;
    let (status, took) = agent.terminate().unwrap();
    assert!(status.success(), "{status}");
    println!("a standby ends {took:?} after SIGTERM");
    assert_says(&cluster.log(), &["stopped while on standby"]);
    assert_eq!(node::sockets(&cluster), sockets);
    cluster.wait_ready(LIMIT).await.unwrap();
    assert_eq!(registrations(&cluster), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_from_an_agent_that_is_killed_also_under_the_same_names() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    // No --instance: both have the same socket names.
    let old = cluster.agent.take().unwrap();
    cluster.start_agent().unwrap();
    until(LIMIT, "it is on standby", || cluster.log().contains("on standby, to take over")).await;
    let begin = Instant::now();
    old.kill().unwrap();
    until(LIMIT, "it has taken over", || registrations(&cluster) == 2 && cluster.runtime.plugins() == [PLUGIN]).await;
    println!("an agent that is killed is replaced after {:?}", begin.elapsed());
    cluster.wait_ready(LIMIT).await.unwrap();
    until(LIMIT, "its own HTTP answers", || node::get(&cluster, "/readyz").is_ok_and(|(code, _)| code == 200)).await;
    assert_says(&node::get(&cluster, "/metrics").unwrap().1, &["dranic_standby 0"]);
    node::assert_phase(&cluster, 2, Phase::Attached);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_has_the_http_address_says_what_it_is() {
    let Some(options) = node::options(1) else { return };
    let mut cluster = Cluster::new(options).unwrap();
    let folder = cluster.path("state");
    std::fs::create_dir_all(&folder).unwrap();
    // Somebody has the folder: the test itself.
    let (held, _) = dranic::ledger::Ledger::open(&folder).unwrap();
    cluster.start_agent().unwrap();
    until(LIMIT, "it is on standby", || cluster.log().contains("on standby, to take over")).await;
    until(LIMIT, "it answers", || node::get(&cluster, "/healthz").is_ok_and(|(code, _)| code == 200)).await;
    let (code, text) = node::get(&cluster, "/readyz").unwrap();
    assert_eq!(code, 200, "else a DaemonSet would never end the old one");
    assert_says(&text, &["standby: another agent has the state directory"]);
    assert_says(&node::get(&cluster, "/metrics").unwrap().1, &["dranic_standby 1"]);
    assert!(cluster.status().is_err(), "it has no status to show");
    let begin = Instant::now();
    drop(held);
    until(LIMIT, "it has taken over", || registrations(&cluster) == 1 && cluster.runtime.plugins() == [PLUGIN]).await;
    println!("from the free state directory to kubelet and NRI: {:?}", begin.elapsed());
    cluster.wait_ready(LIMIT).await.unwrap();
    assert_says(&node::get(&cluster, "/metrics").unwrap().1, &["dranic_standby 0"]);
    assert_eq!(cluster.kubelet.wait_driver(DRIVER, LIMIT).await.unwrap(), "v1.DRAPlugin");
}
