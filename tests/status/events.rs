//! Events at the API server.

use std::time::Duration;

use dranic::dra::events::{Event, Events, EventsConfig, Object, run};
use dranic::ledger::{ClaimRecord, ClaimRef};
use dranic::names::ClaimUid;
use dranic_testbed::apiserver::ApiServerDouble;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::rig::{DRIVER, NODE, SOON, client, until};

struct Recorder {
    server: ApiServerDouble,
    events: Events,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Recorder {
    async fn start(change: impl FnOnce(&mut EventsConfig)) -> Self {
        let server = ApiServerDouble::start_local().unwrap();
        let (events, waiting) = Events::new();
        let mut config = EventsConfig::new(DRIVER, NODE);
        config.recount = Duration::from_millis(50);
        change(&mut config);
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(client(&server).await, config, waiting, stop.clone()));
        Self { server, events, stop, task }
    }

    async fn counts(&self, wanted: &[i64]) -> Vec<Value> {
        until(&format!("{wanted:?}"), || {
            let events = self.server.list("events");
            let mut counts: Vec<i64> = events.iter().filter_map(|e| e["count"].as_i64()).collect();
            counts.sort_unstable();
            (counts == wanted).then_some(events)
        })
        .await
    }

    async fn end(self) -> ApiServerDouble {
        self.stop.cancel();
        tokio::time::timeout(SOON, self.task).await.expect("it does not stop").unwrap();
        self.server
    }
}

fn claim(namespace: &str) -> ClaimRef {
    ClaimRef { namespace: namespace.to_owned(), name: "c".to_owned(), uid: ClaimUid::new("claim-1").unwrap() }
}

fn record() -> ClaimRecord {
    serde_json::from_value(json!({
        "claim": {"namespace": "default", "name": "c", "uid": "claim-1"}, "pod": {"name": "p", "uid": "pod-1"},
        "generation": 1, "bootId": "b", "devices": [],
    }))
    .unwrap()
}

fn of_claim(text: &str) -> Event {
    Event::warning(Object::claim(&claim("default")), "Test", text)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_has_what_describe_shows() {
    let recorder = Recorder::start(|_| {}).await;
    recorder.events.send(Event::warning(Object::pod(&record()), "AttachFailed", "ü".repeat(10_000)));
    recorder.events.send(of_claim("x"));
    let events = recorder.counts(&[1, 1]).await;
    let of = |kind: &str| events.iter().find(|e| e["involvedObject"]["kind"] == kind).unwrap();
    let pod = of("Pod");
    assert_eq!(
        pod["involvedObject"],
        json!({"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "p", "uid": "pod-1"})
    );
    assert_eq!(pod["metadata"]["namespace"], "default");
    assert_eq!(pod["source"], json!({"component": DRIVER, "host": NODE}));
    assert_eq!((&pod["reportingComponent"], &pod["reportingInstance"]), (&json!(DRIVER), &json!(NODE)));
    assert_eq!((&pod["type"], &pod["reason"]), (&json!("Warning"), &json!("AttachFailed")));
    assert!(pod["message"].as_str().unwrap().len() <= 1024);
    assert!(pod["firstTimestamp"].is_string() && pod["lastTimestamp"].is_string());
    assert_eq!(of("ResourceClaim")["involvedObject"]["apiVersion"], "resource.k8s.io/v1");
    recorder.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_event_is_one_with_a_count() {
    let recorder = Recorder::start(|_| {}).await;
    recorder.events.send(of_claim("a"));
    recorder.counts(&[1]).await;
    for _ in 0..100 {
        recorder.events.send(of_claim("a"));
    }
    recorder.events.send(of_claim("b"));
    recorder.counts(&[1, 101]).await;
    // Deleted by somebody: it is made anew.
    for event in recorder.server.list("events") {
        recorder.server.delete("events", "default", event["metadata"]["name"].as_str().unwrap());
    }
    recorder.events.send(of_claim("b"));
    recorder.counts(&[2]).await;
    recorder.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_is_bounded_and_paced_and_blocks_nobody() {
    let recorder = Recorder::start(|config| (config.burst, config.every) = (5, Duration::from_secs(3600))).await;
    recorder.server.faults().set_latency(Duration::from_millis(20));
    let begin = std::time::Instant::now();
    for n in 0..100_000 {
        recorder.events.send(of_claim(&n.to_string()));
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "sending blocks");
    recorder.counts(&[1; 5]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(recorder.server.list("events").len(), 5, "the pace is not kept");
    recorder.server.faults().set_latency(Duration::ZERO);
    // At the end everything that waits is written: no more than may wait here and in the queue.
    let server = recorder.end().await;
    let written = server.list("events").len();
    assert!(written > 100 && written <= 5 + 512, "{written}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_server_is_asked_again_and_a_refusal_is_not() {
    let recorder = Recorder::start(|config| config.refused = Duration::from_secs(3600)).await;
    recorder.server.faults().next_of("POST", 2, 503, None);
    recorder.events.send(of_claim("a"));
    recorder.counts(&[1]).await;
    // A namespace that is being deleted is no matter of permissions.
    recorder.server.terminate_namespace("ending");
    recorder.events.send(Event::warning(Object::claim(&claim("ending")), "Test", "x"));
    recorder.events.send(of_claim("b"));
    recorder.counts(&[1, 1]).await;
    recorder.server.faults().forbid("POST /events");
    recorder.events.send(of_claim("c"));
    let posts = || recorder.server.requests().iter().filter(|r| r.method == "POST").count();
    let all = until("the refusal", || (posts() == 6).then(posts)).await;
    recorder.events.send(of_claim("d"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(posts(), all);
    recorder.end().await;
}
