//! The double itself: what each failure of a plugin does to the request and to the plugin, by failure policy.

use std::time::Duration;

use dranic::nri::proto::FailurePolicy;
use dranic_testbed::runtime::scripted::{Behaviour, ScriptedPlugin};
use dranic_testbed::runtime::{Relay, RuntimeDouble, RuntimeOptions, What};

use super::rig::{LIMIT, ours};

const TIMEOUT: Duration = Duration::from_millis(250);

/// One RunPodSandbox to a plugin that behaves so; the outcome, and whether the plugin is still there.
async fn outcome(honours_policy: bool, policy: Option<FailurePolicy>, behaviour: Behaviour) -> (Relay, bool) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let options = RuntimeOptions { honours_policy, request_timeout: TIMEOUT, ..RuntimeOptions::new(&socket) };
    let double = RuntimeDouble::start(options).unwrap();
    let _plugin = ScriptedPlugin::connect(&socket, "50", "odd", policy, behaviour).await.unwrap();
    double.wait_plugin("50-odd", LIMIT).await.unwrap();
    let relayed = double.run_pod_sandbox(&ours("a")).await;
    (relayed, !double.plugins().is_empty())
}

fn policies() -> [Option<FailurePolicy>; 5] {
    let policy = |fail_request, keep_connected| Some(FailurePolicy { fail_request, keep_connected });
    [None, policy(false, false), policy(true, false), policy(false, true), policy(true, true)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_loss_and_nonsense_follow_the_policy() {
    for policy in policies() {
        let FailurePolicy { fail_request, keep_connected } = policy.unwrap_or_default();
        for behaviour in [Behaviour::Silence, Behaviour::Close, Behaviour::WrongType] {
            let (relayed, kept) = outcome(true, policy, behaviour.clone()).await;
            let case = format!("{policy:?}, {behaviour:?}: {relayed:?}");
            assert_eq!(relayed.error.is_some(), fail_request, "{case}");
            assert_eq!(kept, keep_connected && behaviour == Behaviour::Silence, "{case}");
            if let Some(error) = relayed.error {
                assert!(error.starts_with("plugin 50-odd failed to handle RunPodSandbox request: "), "{error}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_explicit_error_fails_the_request_and_keeps_the_plugin() {
    for honours_policy in [false, true] {
        for policy in policies() {
            let (relayed, kept) = outcome(honours_policy, policy, Behaviour::Refuse(4, "no".to_owned())).await;
            assert_eq!((relayed.error.as_deref(), kept), (Some("rpc error: code = DeadlineExceeded desc = no"), true));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_runtime_drops_a_silent_plugin_and_goes_on() {
    let (relayed, kept) = outcome(false, policies()[4], Behaviour::Silence).await;
    assert_eq!((relayed.error, kept), (None, false));
    assert!(relayed.elapsed >= TIMEOUT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_harms_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let options = RuntimeOptions { request_timeout: TIMEOUT, ..RuntimeOptions::new(&socket) };
    let double = RuntimeDouble::start(options).unwrap();
    let late = Behaviour::AnswerAfter(TIMEOUT + TIMEOUT / 2);
    let _plugin = ScriptedPlugin::connect(&socket, "50", "late", policies()[4], late).await.unwrap();
    double.wait_plugin("50-late", LIMIT).await.unwrap();
    assert!(double.relay_stop(&ours("a")).await.error.unwrap().contains("context deadline exceeded"));
    double.log().wait(0, LIMIT, |event| event.what == What::LateAnswer).await.unwrap();
    assert_eq!(double.plugins(), ["50-late"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_method_is_tried_as_state_change() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let double = RuntimeDouble::start(RuntimeOptions::new(&socket)).unwrap();
    let missing = Behaviour::Refuse(12, "no such method".to_owned());
    let _plugin = ScriptedPlugin::connect(&socket, "50", "old", None, missing).await.unwrap();
    double.wait_plugin("50-old", LIMIT).await.unwrap();
    for _ in 0..2 {
        assert!(double.relay_stop(&ours("a")).await.error.is_some());
    }
    let events = double.log().all();
    let asked =
        events.iter().filter_map(|event| if let What::Request { method, .. } = &event.what { Some(&method[..]) } else { None });
    assert_eq!(asked.collect::<Vec<_>>(), ["StopPodSandbox", "StateChange", "StateChange", "StateChange"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_go_one_at_a_time_in_the_order_of_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let double = RuntimeDouble::start(RuntimeOptions::new(&socket)).unwrap();
    let late = Behaviour::AnswerAfter(Duration::from_millis(100));
    let _second = ScriptedPlugin::connect(&socket, "20", "b", None, late.clone()).await.unwrap();
    double.wait_plugin("20-b", LIMIT).await.unwrap();
    let _first = ScriptedPlugin::connect(&socket, "10", "a", None, late).await.unwrap();
    double.wait_plugin("10-a", LIMIT).await.unwrap();
    let start = std::time::Instant::now();
    let (pod, other) = (ours("a"), ours("b"));
    let (one, two) = tokio::join!(double.run_pod_sandbox(&pod), double.run_pod_sandbox(&other));
    assert_eq!((one.asked, two.asked), (vec!["10-a".to_owned(), "20-b".to_owned()], vec!["10-a".to_owned(), "20-b".to_owned()]));
    assert!(start.elapsed() >= Duration::from_millis(400));
}
