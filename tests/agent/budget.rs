//! An attach that does not fit into the runtime's time.

use std::path::PathBuf;
use std::time::Duration;

use dranic::ledger::Phase;
use dranic_testbed::cluster::{Cluster, Pod};
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::{RuntimeDouble, RuntimeOptions, What};

use crate::node::{self, LIMIT, PLUGIN, names, until};

/// Moving 32 NICs costs 500 ms and more: each waits for RCU grace periods of the kernel.
const NICS: u32 = 32;
const SHORT: Duration = Duration::from_millis(300);

/// As many as need more than [`PATIENT`], which leaves a busy machine more time for an answer than [`SHORT`].
const MANY: u32 = 48;
const PATIENT: Duration = Duration::from_millis(500);

fn impatient(socket: PathBuf) -> RuntimeOptions {
    RuntimeOptions { request_timeout: SHORT, ..RuntimeOptions::new(socket) }
}

fn patient(socket: PathBuf) -> RuntimeOptions {
    RuntimeOptions { request_timeout: PATIENT, ..RuntimeOptions::new(socket) }
}

/// Two claims for [`MANY`] NICs: one may have 32.
fn halves(cluster: &Cluster, pod: &Pod) -> [Claim; 2] {
    let half = |name: &str, nics| cluster.claim(name, pod, &names(nics), &[]).unwrap();
    [half("c", 0..MANY / 2), half("d", MANY / 2..MANY)]
}

#[tokio::test(flavor = "multi_thread")]
async fn fail_takes_everything_back_and_answers_before_the_deadline() {
    let Some(mut options) = node::options(NICS) else { return };
    options.runtime = impatient;
    options.arguments = vec!["--on-overrun=fail".to_owned()];
    let (mut cluster, before) = node::start_with(options).await;
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..NICS), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    let error = relay.error.expect("32 NICs in 300 ms");
    // Ours, not the runtime's time-out.
    node::assert_says(&error, &["rpc error", "dranic.dev", "pod default/a", "taken back", "kubelet will try again"]);
    assert!(relay.elapsed < SHORT, "answered after {:?}", relay.elapsed);
    assert_eq!(cluster.runtime.plugins(), [PLUGIN], "the plugin is kept");
    assert!(!cluster.runtime.log().all().iter().any(|e| matches!(e.what, What::Gone(_))), "it was never dropped");
    until(LIMIT, "all NICs are back", || node::devices(&cluster.status().unwrap()).iter().all(|d| d.phase == Phase::Prepared))
        .await;
    node::assert_empty(&pod);
    assert_eq!(cluster.host_states().unwrap().len(), NICS as usize);
    let errors: Vec<_> = node::devices(&cluster.status().unwrap()).iter().filter_map(|d| d.last_error.clone()).collect();
    assert!(errors.len() == NICS as usize && errors[0].contains("time for this request ran out"), "{errors:?}");

    // By what was learned the next one is known to fail, and no NIC is touched for it. On a busy machine the first may have ended before it
    // had moved one, and taught nothing.
    let last_error = || node::devices(&cluster.status().unwrap())[0].last_error.clone().unwrap_or_default();
    let mut again = cluster.sandbox("a", &pod.uid, 1).unwrap();
    for attempt in 2..6 {
        let relay = cluster.runtime.run_pod_sandbox(&again.sandbox).await;
        assert!(relay.error.is_some(), "32 NICs in 300 ms");
        // Told a moment after the answer.
        tokio::time::sleep(Duration::from_millis(500)).await;
        if last_error().contains("takes about") {
            break;
        }
        again = cluster.sandbox("a", &pod.uid, attempt).unwrap();
    }
    node::assert_says(&last_error(), &["takes about", "nothing was moved", "plugin_request_timeout", "--on-overrun=defer"]);
    node::assert_empty(&again);

    // The operator raises the runtime's time-out.
    cluster.runtime.stop(true).await;
    cluster.runtime = RuntimeDouble::start(RuntimeOptions {
        request_timeout: Duration::from_secs(20),
        ..RuntimeOptions::new(cluster.path("nri.sock"))
    })
    .unwrap();
    cluster.runtime.wait_plugin(PLUGIN, LIMIT).await.unwrap();
    let again = cluster.sandbox("a", &pod.uid, 9).unwrap();
    node::run(&cluster, &again).await;
    node::assert_inside(&again, &names(0..NICS));
    assert!(node::devices(&cluster.status().unwrap()).iter().all(|d| d.last_error.is_none()));
    node::end(&cluster, &again, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn defer_goes_on_behind_the_gate() {
    let Some(mut options) = node::options(MANY) else { return };
    options.runtime = patient;
    options.arguments = ["--on-overrun=defer", "--hold=budget", "--guard-dir="].map(str::to_owned).to_vec();
    let (cluster, before) = node::start_with(options).await;
    let pod = cluster.pod("a").unwrap();
    let claims = halves(&cluster, &pod);
    cluster.prepare(&claims).await.unwrap();
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    assert_eq!(relay.error, None, "{}", cluster.log());
    assert!(relay.elapsed < PATIENT, "answered after {:?}", relay.elapsed);
    let (mut refused, begin) = (0, std::time::Instant::now());
    loop {
        let relay = cluster.runtime.create_container(&pod.sandbox.id, &pod.container("main")).await;
        let Some(error) = relay.error else { break };
        node::assert_says(&error, &["container main", "claim default/", "device ", "being attached", "kubelet will try again"]);
        assert!(relay.elapsed < PATIENT, "answered after {:?}", relay.elapsed);
        refused += 1;
        assert!(begin.elapsed() < LIMIT, "never let through\n{}", cluster.log());
    }
    node::assert_inside(&pod, &names(0..MANY));
    assert!(refused > 0, "let through before the NICs can have been there");
    assert_eq!(cluster.runtime.plugins(), [PLUGIN]);
    node::end(&cluster, &pod, &claims).await;
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_during_a_deferred_attach_takes_everything_back() {
    let Some(mut options) = node::options(MANY) else { return };
    options.runtime = patient;
    options.arguments = vec!["--on-overrun=defer".to_owned()];
    let (cluster, before) = node::start_with(options).await;
    let pod = cluster.pod("a").unwrap();
    let claims = halves(&cluster, &pod);
    cluster.prepare(&claims).await.unwrap();
    cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result().unwrap();
    let stop = cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await;
    assert_eq!(stop.error, None);
    assert!(stop.elapsed < PATIENT, "{:?}", stop.elapsed);
    cluster.unprepare(&claims).await.unwrap();
    node::assert_empty(&pod);
    node::assert_as_before(&cluster, &before);
    // Nothing comes late.
    tokio::time::sleep(Duration::from_millis(500)).await;
    node::assert_empty(&pod);
}
