//! When a container may start, and when not.

use std::time::{Duration, Instant};

use dranic::ledger::Phase;
use dranic::netdev::link;
use dranic::netlink::RouteSocket;
use dranic_testbed::fabric::links;

use super::node::{self, LIMIT, names, until};
use super::rig::{Container, Hook};

#[tokio::test(flavor = "multi_thread")]
async fn an_attached_pod_passes_at_once_also_without_an_agent() {
    let Some((mut cluster, before)) = node::start(32).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..16), &[]).unwrap(), cluster.claim("d", &pod, &names(16..32), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    assert_eq!(cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error, None);
    let (container, hook) = (Container::of(&pod), Hook::of(&cluster, &claims[0]));
    hook.run(&cluster, &container.state(&pod)).passes(&cluster).await;
    cluster.kill_agent().unwrap();
    hook.run(&cluster, &container.state(&pod)).passes(&cluster).await;
    let times = hook.measure(&cluster, &container.state(&pod), 50);
    let [least, median, most] = [times[0], times[25], times[49]];
    println!("guard of an attached pod with 32 NICs in 2 claims, from start to end: {least:?} to {most:?}, median {median:?}");

    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    node::end(&cluster, &pod, &claims).await;
    hook.run(&cluster, &container.state(&pod)).refuses(&["UID", &claims[0].uid, "not prepared on this node"]).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missed_sandbox_heals_before_its_container_starts() {
    let Some((cluster, before)) = node::start(4).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..3), &[]).unwrap(), cluster.claim("d", &pod, &names(3..4), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    // No request of the runtime ever comes. The container names one claim, and waits for all of its pod.
    let container = Container::of(&pod);
    Hook::of(&cluster, &claims[1]).run(&cluster, &container.state(&pod)).passes(&cluster).await;
    node::assert_inside(&pod, &names(0..4));
    let status = cluster.status().unwrap();
    for device in node::devices(&status) {
        assert_eq!(device.phase, Phase::Attached);
        assert_eq!(device.sandbox.as_deref(), Some(pod.sandbox.id.as_str()));
        // Not the path of a process, which ends.
        assert_eq!(device.netns.as_deref(), pod.sandbox.netns_path.as_deref());
    }
    // Unprepare alone gives everything back.
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// A runtime that says nothing of pods: the claim's record does, and the namespace is the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_says_only_a_pid_is_enough() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let container = Container::of(&pod);
    let mut state = container.state(&pod);
    state["annotations"] = serde_json::Value::Null;
    Hook::of(&cluster, &claims[0]).run(&cluster, &state).passes(&cluster).await;
    node::assert_inside(&pod, &names(0..2));
    let sandbox = format!("netns-{}", pod.netns.netns().unwrap().id().ino);
    assert!(node::devices(&cluster.status().unwrap()).iter().all(|d| d.sandbox.as_deref() == Some(&sandbox)));
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// Whoever attaches: the guard sees it in the ledger.
#[tokio::test(flavor = "multi_thread")]
async fn an_attach_that_nobody_told_it_of_is_seen() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let mut hook = Hook::of(&cluster, &claims[0]);
    let socket = hook.args.iter().position(|arg| arg == "--socket").unwrap();
    "/nowhere/gate.sock".clone_into(&mut hook.args[socket + 1]);
    let container = Container::of(&pod);
    let mut guard = hook.run(&cluster, &container.state(&pod));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(guard.is_waiting());
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    guard.passes(&cluster).await;
    node::assert_inside(&pod, &names(0..2));
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_agent_it_waits_for_one() {
    let Some((mut cluster, before)) = node::start(4).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..4), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let hook = Hook::of(&cluster, &claims[0]);
    cluster.kill_agent().unwrap();
    let container = Container::of(&pod);
    let mut guard = hook.run(&cluster, &container.state(&pod));
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(guard.is_waiting());
    node::assert_empty(&pod);
    // As a runtime does: whose container is being made is in its list.
    cluster.runtime.add_pod(pod.sandbox.clone(), vec![]);
    cluster.start_agent().unwrap();
    guard.passes(&cluster).await;
    node::assert_inside(&pod, &names(0..4));
    cluster.wait_ready(LIMIT).await.unwrap();
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_its_bound_it_says_what_is_missing_and_why() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let hook = Hook::of(&cluster, &claims[0]).waiting(1);
    cluster.kill_agent().unwrap();
    let container = Container::of(&pod);
    let socket = cluster.path("gate.sock").display().to_string();
    let words = [
        "dranic.dev: pod default/a, container main",
        "claim default/c, device",
        "(and 1 more): it is not in the pod yet",
        &format!("no agent answers at {socket}"),
        "waited 1 s, the kubelet will try again",
        "dranic status",
    ];
    let took = hook.run(&cluster, &container.state(&pod)).refuses(&words).await;
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}");

    // An attach that fails again and again: the agent's own reason.
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    let mut inside = RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    links::Veth { name: "nic0", peer: "other", ..links::Veth::default() }.create(&mut inside).unwrap();
    hook.run(&cluster, &container.state(&pod)).refuses(&["device", "is taken in the target namespace", "nic0"]).await;
    node::assert_phase(&cluster, 2, Phase::Prepared);

    // The container is tried again, and by then the name is free.
    let mut guard = Hook::of(&cluster, &claims[0]).run(&cluster, &container.state(&pod));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(guard.is_waiting());
    let in_the_way = links::find(&mut inside, "nic0").unwrap().index;
    links::delete(&mut inside, in_the_way).unwrap();
    guard.passes(&cluster).await;
    node::assert_inside(&pod, &names(0..2));
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_never_be_is_refused_at_once() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let (pod, other) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let hook = Hook::of(&cluster, &claims[0]);
    let at_once = |took: Duration| assert!(took < Duration::from_secs(3), "{took:?}");

    let container = Container::of(&other);
    at_once(
        hook.run(&cluster, &container.state(&other)).refuses(&["claim default/c", "in pod default/a", "pod default/b"]).await,
    );
    let container = Container::of_host(&cluster);
    at_once(hook.run(&cluster, &container.state(&pod)).refuses(&["host's network", "pod default/a"]).await);
    let mut state = container.state(&pod);
    state["pid"] = 0.into();
    at_once(hook.run(&cluster, &state).refuses(&["OCI state", "pid"]).await);
    state["pid"] = i32::MAX.into();
    at_once(hook.run(&cluster, &state).refuses(&["/proc/2147483647/ns/net"]).await);
    state["annotations"] = serde_json::json!({"x": "y".repeat(2 << 20)});
    at_once(hook.run(&cluster, &state).refuses(&["OCI state", "bytes"]).await);
    node::assert_phase(&cluster, 1, Phase::Prepared);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_pod_did_to_its_nics_is_its_own_affair() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let mut inside = RouteSocket::open_in(&pod.netns.netns().unwrap()).unwrap();
    let index = link::by_name(&mut inside, "nic0", Instant::now() + LIMIT).unwrap().unwrap().index;
    link::set_up(&mut inside, index, false, Instant::now() + LIMIT).unwrap();
    let container = Container::of(&pod);
    Hook::of(&cluster, &claims[0]).run(&cluster, &container.state(&pod)).passes(&cluster).await;
    let now = link::by_index(&mut inside, index, Instant::now() + LIMIT).unwrap().unwrap();
    assert!(!now.is_up(), "nobody touched it");
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn nics_of_a_sandbox_that_lives_are_not_taken_for_the_next_one() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let mut next = cluster.sandbox("a", &pod.uid, 1).unwrap();
    next.sandbox.id = "sandbox-next".to_owned();
    let container = Container::of(&next);
    let hook = Hook::of(&cluster, &claims[0]);
    let state = container.state(&next);
    let words = ["it is in another sandbox of the pod", &pod.sandbox.id, "which has not ended yet"];
    Hook::of(&cluster, &claims[0]).waiting(1).run(&cluster, &state).refuses(&words).await;
    node::assert_inside(&pod, &names(0..2));

    let guard = hook.run(&cluster, &state);
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    drop(pod);
    guard.passes(&cluster).await;
    node::assert_inside(&next, &names(0..2));
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_is_killed_leaves_nothing_half_done() {
    let Some((cluster, before)) = node::start(32).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..32), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let container = Container::of(&pod);
    let guard = Hook::of(&cluster, &claims[0]).run(&cluster, &container.state(&pod));
    until(LIMIT, "the attach is under way", || {
        let status = cluster.status().unwrap();
        node::devices(&status).iter().any(|d| d.phase == Phase::Attaching)
    })
    .await;
    drop(guard);
    until(LIMIT, "the attach has ended", || {
        let status = cluster.status().unwrap();
        node::devices(&status).iter().all(|d| d.phase == Phase::Attached)
    })
    .await;
    node::assert_inside(&pod, &names(0..32));
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_guards_of_a_pod_are_served_by_one_attach() {
    let Some((cluster, before)) = node::start(8).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..8), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let (container, hook) = (Container::of(&pod), Hook::of(&cluster, &claims[0]));
    let begin = Instant::now();
    let guards: Vec<_> = (0..100).map(|_| hook.run(&cluster, &container.state(&pod))).collect();
    for guard in guards {
        guard.passes(&cluster).await;
    }
    println!("100 guards of one pod with 8 NICs: {:?}", begin.elapsed());
    assert_eq!(cluster.log().matches(" attached pod=").count(), 1, "{}", cluster.log());
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// Attaches for guards at once are bounded; who waits for one that is under way does not count.
#[tokio::test(flavor = "multi_thread")]
async fn many_guards_of_a_slow_pod_keep_no_other_pod_waiting() {
    let Some(mut options) = node::options(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let slow = folder.path().join("dranic");
    let script = format!("#!/bin/sh\nexec env DRANIC_TEST_DELAY='attach: configured=12000' {} \"$@\"\n", node::PROGRAM);
    std::fs::write(&slow, script).unwrap();
    std::fs::set_permissions(&slow, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    options.program = slow;
    let (cluster, before) = node::start_with(options).await;
    let pods = [cluster.pod("a").unwrap(), cluster.pod("b").unwrap()];
    let claims =
        [cluster.claim("a", &pods[0], &names(0..1), &[]).unwrap(), cluster.claim("b", &pods[1], &names(1..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let run = |n: usize, container: &Container| Hook::of(&cluster, &claims[n]).run(&cluster, &container.state(&pods[n]));
    let containers = [Container::of(&pods[0]), Container::of(&pods[1])];
    let mut guards: Vec<_> = (0..40).map(|_| run(0, &containers[0])).collect();
    let waiting = || node::get(&cluster, "/metrics").unwrap().1.contains("dranic_guards_waiting 40");
    until(LIMIT, "all of them have asked", waiting).await;
    guards.push(run(1, &containers[1]));
    until(LIMIT, "the other pod's attach has begun", || !pods[1].links_up().unwrap().is_empty()).await;
    node::assert_says(&format!("{:?}", node::devices(&cluster.status().unwrap())), &["Attaching"]);
    assert_eq!(
        cluster.log().matches(" attached pod=").count(),
        0,
        "the first pod's is over: nothing was shown\n{}",
        cluster.log()
    );
    for guard in guards {
        guard.passes(&cluster).await;
    }
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

/// No NRI at all: containers are what has NICs attached, unprepare gives them back, also after a restart of the agent.
#[tokio::test(flavor = "multi_thread")]
async fn without_nri_the_guard_is_enough() {
    let Some(mut options) = node::options(3) else { return };
    options.arguments.extend(["--nri".to_owned(), "off".to_owned()]);
    let (mut cluster, before) = node::start_with(options).await;
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..3), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let container = Container::of(&pod);
    Hook::of(&cluster, &claims[0]).run(&cluster, &container.state(&pod)).passes(&cluster).await;
    node::assert_inside(&pod, &names(0..3));
    cluster.kill_agent().unwrap();
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    node::assert_phase(&cluster, 3, Phase::Attached);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_nri_and_without_a_guard_there_is_no_agent() {
    let Some(options) = node::options(1) else { return };
    let cluster = dranic_testbed::cluster::Cluster::new(options).unwrap();
    let path = |name: &str| cluster.path(name).display().to_string();
    let (kubeconfig, kubelet, state, status) = (path("kubeconfig"), path("kubelet"), path("state"), path("status.sock"));
    let places = ["--kubeconfig", &kubeconfig, "--kubelet-root", &kubelet, "--state-dir", &state, "--status-socket", &status];
    let flags = ["agent", "--node-name", "node-1", "--nri", "off", "--guard-program", "/nowhere/dranic-guard"];
    let output = node::dranic(&cluster, &[&flags[..], &places].concat());
    assert_eq!(output.status.code(), Some(64));
    node::assert_says(&node::stderr(&output), &["--nri=off needs the guard", "/nowhere/dranic-guard"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_that_can_not_be_used_is_said_and_containers_have_no_hook() {
    let Some(mut options) = node::options(1) else { return };
    options.arguments.extend(["--guard-program", "/nowhere/dranic-guard"].map(str::to_owned));
    let (cluster, before) = node::start_with(options).await;
    let status = cluster.status().unwrap();
    assert!(!status.guard_usable && status.guard.contains("/nowhere/dranic-guard"), "{status:?}");
    assert!(node::get(&cluster, "/metrics").unwrap().1.contains("dranic_guard_usable 0"));
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let file = cluster.path("cdi").join(format!("dranic-dranic.dev-{}.json", claims[0].uid));
    assert!(!std::fs::read_to_string(file).unwrap().contains("hooks"));
    cluster.unprepare(&claims).await.unwrap();
    node::assert_as_before(&cluster, &before);
}
