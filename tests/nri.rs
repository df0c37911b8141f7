//! The NRI leg against a double of the runtime's side: handshake, hooks, deadlines, reconnect.

#[path = "nri/malformed.rs"]
mod malformed;
#[path = "nri/policies.rs"]
mod policies;
#[path = "nri/reconnect.rs"]
mod reconnect;
#[path = "nri/rig.rs"]
mod rig;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dranic::nri::{Adjustment, OciHook, RequestTime};
use dranic_testbed::runtime::{ContainerSpec, Failure, Fault, RuntimeOptions, SandboxSpec, What};
use rig::{LIMIT, PLUGIN, Rig, Seen, Step, foreign, ours};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configure_is_answered_before_registration_is() {
    let rig = Rig::ready(|options| RuntimeOptions { configure_first: true, register_delay: ms(100), ..options }).await;
    let events: Vec<_> = rig.double.log().all().into_iter().map(|event| event.what).collect();
    let place = |wanted: &dyn Fn(&What) -> bool| events.iter().position(wanted).unwrap();
    assert!(place(&|what| matches!(what, What::Configured(_))) < place(&|what| *what == What::Registered));
    assert_eq!(rig.handler.wait_connections(true, 1).await, ["containerd v2.4.2 (NRI v0.12.5)"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_and_failure_policy_are_exact_on_the_wire() {
    let rig = Rig::ready(|options| options).await;
    let answer = vec![0x10, 0x0f, 0x1a, 4, 8, 1, 16, 1];
    let events = rig.double.log().all();
    assert!(events.iter().any(|event| event.what == What::Configured(answer.clone())), "{events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_to_the_registration_is_waited_for() {
    // Longer than the limit of five seconds that plugins in Go have.
    let rig = Rig::ready(|options| RuntimeOptions { register_delay: ms(5200), ..options }).await;
    let connected = rig.double.log().all().iter().filter(|event| event.what == What::Connected).count();
    assert_eq!(connected, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hooks_get_their_sandbox_and_container() {
    for old in [false, true] {
        let rig = Rig::ready(|options| if old { RuntimeOptions::old(options.socket) } else { options }).await;
        let (pod, double) = (ours("a"), &rig.double);
        assert_eq!(double.run_pod_sandbox(&pod).await.result(), Ok(()));
        let cdi_devices = vec!["dra.net/nic=a".to_owned()];
        let create_runtime = vec!["/opt/cdi-hook".to_owned()];
        let container = ContainerSpec {
            id: "c".into(),
            name: "main".into(),
            cdi_devices: cdi_devices.clone(),
            create_runtime: create_runtime.clone(),
            ..ContainerSpec::default()
        };
        let gate = OciHook { path: "/opt/gate".into(), args: vec!["gate".into(), "--pod".into()], timeout: 65 };
        *rig.handler.adjustment.lock().unwrap() = Adjustment { create_runtime: vec![gate], ..Adjustment::default() };
        let relay = double.create_container("a", &container).await;
        let adjusted = relay.adjustments[0].hooks.as_ref().unwrap();
        assert_eq!((adjusted.create_runtime[0].path.as_str(), adjusted.create_runtime[0].args.len()), ("/opt/gate", 2));
        assert_eq!(relay.result(), Ok(()));
        assert_eq!(double.stop_pod_sandbox("a").await.result(), Ok(()));
        assert_eq!(double.remove_pod_sandbox("a").await.result(), Ok(()));

        let seen = rig.handler.seen();
        let begun: Vec<_> =
            seen.iter().filter_map(|seen| if let Seen::Begin(hook, s, _) = seen { Some((*hook, s)) } else { None }).collect();
        assert_eq!(begun.iter().map(|(hook, _)| *hook).collect::<Vec<_>>(), ["run", "create", "stop", "remove"], "old: {old}");
        for (_, sandbox) in begun {
            assert_eq!((&sandbox.id, &sandbox.uid, &sandbox.name), (&pod.id, &pod.uid, &pod.name));
            assert_eq!((&sandbox.namespace, &sandbox.netns), (&pod.namespace, &pod.netns_path));
        }
        let (id, sandbox, name) = ("c".into(), "a".into(), "main".into());
        let expected = dranic::nri::Container { id, sandbox, name, env: Vec::new(), cdi_devices, create_runtime, state: 0 };
        assert!(seen.contains(&Seen::Container(expected)));
        let by_event =
            double.log().all().iter().any(|e| matches!(&e.what, What::Request { method, .. } if method == "StateChange"));
        assert_eq!(by_event, old);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_no_interest_are_fine() {
    let rig = Rig::ready(|options| options).await;
    for event in [0u8, 4, 9, 15, 99] {
        assert_eq!(rig.double.raw_call(PLUGIN, "StateChange", vec![8, event]).await, Ok(Vec::new()), "event {event}");
    }
    for method in ["PostCreateContainer", "UpdatePodSandbox", "ValidateContainerAdjustment", "Shutdown"] {
        assert_eq!(rig.double.raw_call(PLUGIN, method, Vec::new()).await, Ok(Vec::new()), "{method}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_others_reach_no_hook() {
    let rig = Rig::ready(|options| options).await;
    rig.handler.set(Step::Fail("must not be called"));
    let pod = foreign("f");
    let container = ContainerSpec { id: "c".into(), ..ContainerSpec::default() };
    assert_eq!(rig.double.run_pod_sandbox(&pod).await.result(), Ok(()));
    assert_eq!(rig.double.create_container("f", &container).await.result(), Ok(()));
    assert_eq!(rig.double.stop_pod_sandbox("f").await.result(), Ok(()));
    assert_eq!(rig.double.remove_pod_sandbox("f").await.result(), Ok(()));
    assert_eq!(rig.handler.asked.load(Ordering::Relaxed), 4);
    assert!(!rig.handler.seen().iter().any(|seen| matches!(seen, Seen::Begin(..))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_of_a_refusal_reaches_the_runtime_and_cleanup_never_fails() {
    let rig = Rig::ready(|options| options).await;
    for (step, code, text) in [
        (Step::Fail("claim x: device y: gone"), "FailedPrecondition", "claim x: device y: gone"),
        (Step::Panic, "Internal", "panicked"),
    ] {
        rig.handler.set(step);
        let error = rig.double.run_pod_sandbox(&ours("a")).await.error.unwrap();
        assert!(error.starts_with(&format!("rpc error: code = {code} ")) && error.contains(text), "{error}");
        assert_eq!(rig.double.relay_stop(&ours("a")).await.result(), Ok(()));
        assert_eq!(rig.double.relay_remove(&ours("a")).await.result(), Ok(()));
    }
    assert_eq!(rig.double.plugins(), [PLUGIN]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_knows_its_deadline_whatever_configure_said() {
    for tells_timeouts in [false, true] {
        let rig = Rig::ready(|options| RuntimeOptions { tells_timeouts, request_timeout: ms(1000), ..options }).await;
        let before = Instant::now();
        assert_eq!(rig.double.run_pod_sandbox(&ours("a")).await.result(), Ok(()));
        let after = Instant::now();
        let seen = rig.handler.seen();
        let RequestTime { arrival, deadline } =
            seen.iter().find_map(|seen| if let Seen::Begin(_, _, time) = seen { Some(*time) } else { None }).unwrap();
        assert!(before <= arrival && arrival <= after);
        // 1000 ms, less 150 for the answer and 20 for the hook's own words.
        assert!(deadline > before + ms(800) && deadline <= after + ms(830), "{:?}", deadline - before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_work_is_refused_before_the_deadline_and_goes_on() {
    const TIMES: usize = 20;
    let rig = Rig::ready(|options| RuntimeOptions { honours_policy: false, request_timeout: ms(300), ..options }).await;
    for number in 0..TIMES {
        rig.handler.set(Step::Work(ms(400)));
        let pod = ours(&number.to_string());
        let relayed = tokio::join!(rig.double.run_pod_sandbox(&pod), async {
            rig.handler.wait("run", |seen| seen.iter().filter(|s| matches!(s, Seen::Begin("run", ..))).count() > number).await;
            // Stop and Remove, which follow at once, are quick.
            rig.handler.set(Step::Succeed);
        });
        let error = relayed.0.error.expect("the work takes longer than the request may");
        assert!(error.starts_with("rpc error: code = Aborted ") && error.contains("still running"), "{error}");
        assert!(error.contains("dranic") && error.contains(&format!("pod-{number}")), "{error}");
        // Half of 300 ms is the margin here.
        assert!(relayed.0.elapsed >= ms(140) && relayed.0.elapsed < ms(300), "{:?}", relayed.0.elapsed);
    }
    assert_eq!(rig.double.plugins(), [PLUGIN], "never dropped");
    rig.handler.wait("the end of all runs", |_| rig.handler.ended("run") == TIMES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_cleanup_is_answered_in_time_without_an_error() {
    let rig = Rig::ready(|options| RuntimeOptions { request_timeout: ms(300), ..options }).await;
    rig.handler.set(Step::Work(ms(500)));
    for relayed in [rig.double.relay_stop(&ours("a")).await, rig.double.relay_remove(&ours("a")).await] {
        assert_eq!(relayed.error, None);
        assert!(relayed.elapsed < ms(300), "{:?}", relayed.elapsed);
    }
    rig.handler.wait("the end of both", |_| rig.handler.ended("stop") + rig.handler.ended("remove") == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_comes_while_run_still_works() {
    let rig = Rig::ready(|options| RuntimeOptions { request_timeout: ms(300), ..options }).await;
    rig.handler.set(Step::Work(ms(450)));
    assert!(rig.double.run_pod_sandbox(&ours("a")).await.error.is_some());
    let seen = rig.handler.wait("stop", |seen| seen.iter().any(|s| matches!(s, Seen::Begin("stop", ..)))).await;
    let place = |wanted: &dyn Fn(&Seen) -> bool| seen.iter().position(wanted);
    let stop = place(&|seen| matches!(seen, Seen::Begin("stop", ..))).unwrap();
    assert!(place(&|seen| matches!(seen, Seen::End("run", _))).is_none_or(|end| end > stop), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_requests_are_fine() {
    let rig = Rig::ready(|options| options).await;
    let pod = ours("a");
    for _ in 0..2 {
        assert_eq!(rig.double.run_pod_sandbox(&pod).await.result(), Ok(()));
    }
    for _ in 0..2 {
        assert_eq!(rig.double.relay_remove(&pod).await.result(), Ok(()));
        assert_eq!(rig.double.relay_stop(&pod).await.result(), Ok(()));
    }
    assert_eq!(rig.handler.ended("run") + rig.handler.ended("stop") + rig.handler.ended("remove"), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_synchronize_comes_in_parts_and_arrives_whole() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        RuntimeOptions { request_timeout: Duration::from_secs(10), ..RuntimeOptions::new(folder.path().join("nri.sock")) };
    let (socket, double) = (options.socket.clone(), dranic_testbed::runtime::RuntimeDouble::start(options).unwrap());
    for number in 0..600 {
        let id = format!("{number:03}");
        let container = ContainerSpec { id: format!("c-{id}"), name: "main".into(), ..ContainerSpec::default() };
        double.add_pod(SandboxSpec { padding: 20_000, ..ours(&id) }, vec![container]);
    }
    let session = rig::Session::start(socket);
    double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    let parts =
        |wanted| double.log().all().iter().filter(|e| matches!(e.what, What::SyncPart { more, .. } if more == wanted)).count();
    assert!(parts(true) >= 2, "{} parts before the last", parts(true));
    assert_eq!(parts(false), 1);
    let seen = session.handler.seen();
    let lists: Vec<_> =
        seen.iter().filter_map(|seen| if let Seen::Synchronize(pods, all) = seen { Some((pods, all)) } else { None }).collect();
    let [(pods, containers)] = lists[..] else { panic!("{} lists", lists.len()) };
    assert_eq!(
        pods.iter().map(|pod| pod.id.clone()).collect::<Vec<_>>(),
        (0..600).map(|n| format!("{n:03}")).collect::<Vec<_>>()
    );
    assert_eq!(containers.len(), 600);
    assert!(containers.iter().all(|container| container.id == format!("c-{}", container.sandbox) && container.state == 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_under_way_is_answered_before_the_session_stops() {
    let rig = Rig::ready(|options| options).await;
    rig.handler.set(Step::Work(ms(300)));
    let pod = ours("a");
    let (relayed, ()) = tokio::join!(rig.double.run_pod_sandbox(&pod), async {
        rig.handler.wait("run", |seen| seen.iter().any(|s| matches!(s, Seen::Begin("run", ..)))).await;
        rig.session.stopped().await;
    });
    assert_eq!(relayed.result(), Ok(()));
    assert_eq!(rig.handler.ended("run"), 1);
    assert_eq!(rig.handler.wait_connections(false, 1).await, ["the agent stops"]);
    let gone = |event: &dranic_testbed::runtime::Event| matches!(event.what, What::Gone(_));
    rig.double.log().wait(0, LIMIT, gone).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_registration_is_told_and_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let double = dranic_testbed::runtime::RuntimeDouble::start(RuntimeOptions::new(&socket)).unwrap();
    double.next_handshake(Fault::Refuse("no room for you".to_owned())).await;
    let session = rig::Session::start(socket);
    double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    let reasons = session.handler.wait_connections(false, 1).await;
    assert_eq!(reasons, ["the runtime refused plugin 10-dranic: no room for you"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_refused_and_the_connection_stays() {
    let rig = Rig::ready(|options| options).await;
    for method in ["Configure", "Synchronize", "RunPodSandbox", "CreateContainer", "StateChange", "StopContainer"] {
        match rig.double.raw_call(PLUGIN, method, vec![0x0a, 200, 1, 2]).await {
            Err(Failure::Explicit(3, _)) => {}
            other => panic!("{method}: {other:?}"),
        }
    }
    match rig.double.raw_call(PLUGIN, "NoSuchMethod", Vec::new()).await {
        Err(Failure::Explicit(12, _)) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.double.run_pod_sandbox(&ours("a")).await.result(), Ok(()));
}
