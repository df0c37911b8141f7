//! An attach that goes on behind the gate: the runtime is answered soon, and containers wait in the guard.

use std::time::{Duration, Instant};

use dranic::ledger::Phase;
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::links;
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::RuntimeOptions;
use nix::sys::signal::Signal;

use crate::node::{self, Before, LIMIT, PLUGIN, names, until};

/// More than fit into the hold of 200 ms: each costs 15 ms and more.
const NICS: u32 = 32;

async fn prepared(arguments: &[&str]) -> Option<(Cluster, Before, Pod, [Claim; 1])> {
    prepared_with(arguments, |_| {}).await
}

async fn prepared_with(arguments: &[&str], change: impl FnOnce(&mut Options)) -> Option<(Cluster, Before, Pod, [Claim; 1])> {
    let mut options = node::options(NICS)?;
    options.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    change(&mut options);
    let (cluster, before) = node::start_with(options).await;
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..NICS), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    Some((cluster, before, pod, claims))
}

/// How many NICs are in the pod.
fn inside(pod: &Pod) -> usize {
    pod.look().unwrap().links.iter().filter(|link| link.name.starts_with("nic")).count()
}

fn metric(cluster: &Cluster, name: &str) -> f64 {
    let (_, text) = node::get(cluster, "/metrics").unwrap();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_runtime_is_answered_before_all_is_there_and_containers_wait() {
    let Some((cluster, before, pod, claims)) = prepared(&[]).await else { return };
    let mut pod = pod;
    for attempt in 0..2 {
        cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap_or_else(|e| panic!("{e}\n{}", cluster.log()));
        let there = inside(&pod);
        assert!(there < NICS as usize, "attempt {attempt}: all were there: the hold is too long for this test to show anything");
        // One that names the claim, and brings the guard by its CDI spec, and one that does not.
        let (named, other) =
            tokio::join!(cluster.start_container(&pod, "main", &claims), cluster.start_container(&pod, "side", &[]));
        assert_eq!((named, other), (Ok(()), Ok(())), "{}", cluster.log());
        node::assert_inside(&pod, &names(0..NICS));
        if attempt == 0 {
            assert_eq!(metric(&cluster, "dranic_attach_unforeseen_total"), 1.0);
            cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
            until(LIMIT, "all are back", || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared))
                .await;
            pod = cluster.sandbox("a", &pod.uid, 1).unwrap();
        }
    }
    // The second time it was known that it takes longer than the hold.
    assert_eq!(metric(&cluster, "dranic_attach_deferred_total"), 2.0);
    assert_eq!(metric(&cluster, "dranic_attach_forecast_seconds_count"), 1.0);
    assert!(metric(&cluster, "dranic_attach_forecast_seconds_sum") > 0.2);
    assert_eq!(cluster.runtime.plugins(), [PLUGIN]);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_of_the_whole_budget_waits_for_all() {
    // Longer than the hold and than the default of a runtime, which a busy machine needs more than.
    let runtime = |socket| RuntimeOptions { request_timeout: Duration::from_secs(20), ..RuntimeOptions::new(socket) };
    let change = |options: &mut Options| options.runtime = runtime;
    let Some((cluster, before, pod, claims)) = prepared_with(&["--hold=budget"], change).await else { return };
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    node::assert_inside(&pod, &names(0..NICS));
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guard_is_added_once_and_only_while_something_is_missing() {
    let Some((cluster, before, pod, claims)) = prepared(&["--hold=0"]).await else { return };
    let guards = async |name: &str, brings: &[&str]| {
        let mut container = pod.container(name);
        container.create_runtime = brings.iter().map(|path| (*path).to_owned()).collect();
        let relay = cluster.runtime.create_container(&pod.sandbox.id, &container).await;
        assert_eq!(relay.error, None);
        let hooks = relay.adjustments.into_iter().filter_map(|a| a.hooks).flat_map(|hooks| hooks.create_runtime);
        hooks.collect::<Vec<_>>()
    };
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    let added = guards("plain", &["/opt/other"]).await;
    assert_eq!(added.len(), 1);
    let (hook, timeout) = (&added[0], added[0].timeout.as_ref().unwrap().value);
    assert!(hook.path.ends_with("/dranic-guard") && hook.args.contains(&pod.sandbox.id), "{hook:?}");
    assert!(timeout > 60, "longer than the guard's own bound: {timeout}");
    assert_eq!(guards("by-cdi", &[hook.path.as_str()]).await, []);
    cluster.start_container(&pod, "main", &[]).await.unwrap();
    // The record is written, so the container runs; the attach may be a moment from its end.
    let begin = Instant::now();
    let mut number = 0;
    while !guards(&format!("later-{number}"), &[]).await.is_empty() {
        assert!(begin.elapsed() < LIMIT, "everything is there, and a guard is still added");
        number += 1;
    }
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_behind_the_gate_is_tried_again_while_a_container_waits() {
    let Some((cluster, before, pod, claims)) = prepared(&["--hold=0"]).await else { return };
    let mut socket = dranic::netlink::RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    links::create(&mut socket, "bridge", "nic9").unwrap();
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    let mut starting = cluster.begin_container(&pod, "main", &claims).await.unwrap();
    let refused = || cluster.log().matches("\"nic9\" is taken").count();
    until(LIMIT, "it was tried twice", || refused() > 1).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), starting.started()).await.is_err(), "the container waits");
    let taken = links::find(&mut socket, "nic9").unwrap().index;
    links::delete(&mut socket, taken).unwrap();
    starting.started().await.unwrap_or_else(|e| panic!("{e}\n{}", cluster.log()));
    node::assert_inside(&pod, &names(0..NICS));
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_gives_up_says_why() {
    let Some((cluster, before, pod, claims)) = prepared(&["--hold=0", "--guard-wait=1"]).await else { return };
    let mut socket = dranic::netlink::RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    links::create(&mut socket, "bridge", "nic9").unwrap();
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    let error = cluster.start_container(&pod, "main", &claims).await.unwrap_err();
    let device = cluster.device("nic9").unwrap_or_default();
    node::assert_says(&error, &["dranic.dev", "default/a", "default/c", &device, "\"nic9\" is taken", "try again"]);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_stop_nothing_comes_whoever_asks() {
    let Some((cluster, before, pod, claims)) = prepared(&["--hold=0"]).await else { return };
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    until(LIMIT, "the attach has begun", || inside(&pod) > 1).await;
    // The agent stands still while the container's guard asks and the sandbox is stopped, so that both are before it at once.
    let agent = cluster.agent.as_ref().unwrap();
    let mut starting = cluster.begin_container(&pod, "main", &claims).await.unwrap();
    agent.signal(Signal::SIGSTOP).unwrap();
    let resumed = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        agent.signal(Signal::SIGCONT).unwrap();
    };
    let (stop, ()) = tokio::join!(cluster.runtime.stop_pod_sandbox(&pod.sandbox.id), resumed);
    assert_eq!(stop.error, None);
    let refused = starting.started().await.unwrap_err();
    node::assert_says(&refused, &["sandbox was stopped"]);
    until(LIMIT, "all are back", || inside(&pod) == 0).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    node::assert_empty(&pod);
    node::assert_phase(&cluster, NICS as usize, Phase::Prepared);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// In a container the log is a pipe to the runtime, which stands still when its disk does.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_takes_keeps_nobody_waiting() {
    let Some(mut options) = node::options(2) else { return };
    options.deaf_log = true;
    options.arguments = vec!["--log-level=trace".to_owned()];
    let (mut cluster, before) = node::start_with(options).await;
    let dropped = || metric(&cluster, "dranic_log_lines_dropped_total");
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    let begin = std::time::Instant::now();
    while dropped() < 100.0 {
        cluster.prepare(&claims).await.unwrap();
        cluster.unprepare(&claims).await.unwrap();
        assert!(begin.elapsed() < 3 * LIMIT, "the log takes everything");
    }
    cluster.prepare(&claims).await.unwrap();
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    cluster.start_container(&pod, "main", &claims).await.unwrap();
    node::assert_inside(&pod, &names(0..2));
    assert_eq!(cluster.runtime.plugins(), [PLUGIN]);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
    let (status, took) = cluster.agent.take().unwrap().terminate().unwrap();
    assert!(status.success() && took < Duration::from_secs(10), "{status} after {took:?}");
}
