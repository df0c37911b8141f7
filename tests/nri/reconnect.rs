//! The session comes back, whatever the runtime does.

use std::time::{Duration, Instant};

use dranic_testbed::runtime::{Fault, RuntimeDouble, RuntimeOptions, What};

use super::rig::{LIMIT, PLUGIN, Rig, Seen, Session, Step, ours};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_in_the_handshake_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let double = RuntimeDouble::start(RuntimeOptions::new(&socket)).unwrap();
    for fault in [Fault::CloseBeforeAnswer, Fault::CloseBeforeConfigure, Fault::CloseBeforeSynchronize] {
        double.next_handshake(fault).await;
    }
    let session = Session::start(socket);
    double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    let events = double.log().all();
    let times: Vec<Instant> = events.iter().filter(|event| event.what == What::Connected).map(|event| event.at).collect();
    assert_eq!(times.len(), 4);
    // 100, 200 and 400 ms, each shortened by up to a quarter; the rest is for a busy machine.
    for (pair, least) in times.windows(2).zip([75, 150, 300]) {
        let pause = pair[1] - pair[0];
        assert!(pause >= Duration::from_millis(least) && pause < Duration::from_millis(least + 1000), "{pause:?}");
    }
    assert!(session.handler.seen().iter().filter(|seen| matches!(seen, Seen::Connection(false, _))).count() >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_runtime_dies_refuses_vanishes_and_comes_back() {
    let rig = Rig::ready(|options| options).await;
    assert_eq!(rig.double.run_pod_sandbox(&ours("old")).await.result(), Ok(()));
    rig.double.stop(false).await;
    let reasons = rig.handler.wait_connections(false, 2).await;
    assert_eq!(reasons[0], "the runtime closed the connection");
    assert!(reasons[1].contains("refused"), "{reasons:?}");
    std::fs::remove_file(rig.folder.path().join("nri.sock")).unwrap();
    let reasons = rig.handler.wait_connections(false, 3).await;
    assert!(reasons[2].contains("No such file"), "{reasons:?}");

    let back = Instant::now();
    rig.double.up().unwrap();
    rig.double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    assert!(back.elapsed() < Duration::from_millis(1200), "{:?}", back.elapsed());
    rig.handler.wait_connections(true, 2).await;
    let seen = rig.handler.seen();
    let last = seen.iter().rev().find_map(|seen| if let Seen::Synchronize(pods, _) = seen { Some(pods) } else { None });
    assert_eq!(last.unwrap().iter().map(|pod| &pod.id[..]).collect::<Vec<_>>(), ["old"]);
    // The runtime tells nothing about pods from before its restart.
    let relayed = rig.double.stop_pod_sandbox("old").await;
    assert!(relayed.asked.is_empty() && relayed.error.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_outlives_its_connection() {
    let rig = Rig::ready(|options| options).await;
    rig.handler.set(Step::Work(Duration::from_millis(400)));
    let pod = ours("a");
    let (relayed, ()) = tokio::join!(rig.double.run_pod_sandbox(&pod), async {
        rig.handler.wait("run", |seen| seen.iter().any(|seen| matches!(seen, Seen::Begin("run", ..)))).await;
        rig.double.restart().await.unwrap();
    });
    assert!(relayed.error.unwrap().contains("failed to handle RunPodSandbox request"));
    rig.double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    rig.handler.wait("the end of the run", |_| rig.handler.ended("run") == 1).await;
    rig.handler.wait_connections(true, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_stops_while_nobody_listens() {
    let folder = tempfile::tempdir().unwrap();
    let session = Session::start(folder.path().join("nri.sock"));
    session.handler.wait_connections(false, 1).await;
    let handler = session.handler.clone();
    session.stopped().await;
    assert_eq!(handler.wait_connections(false, 2).await[1], "the agent stops");
}
