//! The publisher and the API client against a double of the API server, on loopback.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dranic::dra::api::{self, ApiError};
use dranic::dra::publisher::{PublishStatus, PublisherConfig, run};
use dranic_testbed::apiserver::{ApiServerDouble, ClaimConfig, claim_json};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceTaint};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const NODE: &str = "node-1";
const DRIVER: &str = "dra.net";
/// Longer than anything here takes, also on a busy machine.
const SOON: Duration = Duration::from_secs(20);

fn device(name: &str, mtu: i64) -> Device {
    let attribute = DeviceAttribute { int: Some(mtu), ..DeviceAttribute::default() };
    Device { name: name.to_owned(), attributes: Some([("dra.net/mtu".to_owned(), attribute)].into()), ..Device::default() }
}

fn many(count: usize) -> Vec<Device> {
    (0..count).map(|i| device(&format!("d{i:04}"), 1500)).collect()
}

async fn client(server: &ApiServerDouble) -> kube::Client {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    server.write_kubeconfig(&path).unwrap();
    api::client(Some(&path)).await.unwrap()
}

/// A publisher at work.
struct Publishing {
    devices: watch::Sender<Arc<Vec<Device>>>,
    status: watch::Receiver<PublishStatus>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Publishing {
    fn start(client: kube::Client, devices: Vec<Device>) -> Self {
        let (devices, receiver) = watch::channel(Arc::new(devices));
        let (sender, status) = watch::channel(PublishStatus::default());
        let stop = CancellationToken::new();
        let config = PublisherConfig { driver: DRIVER.to_owned(), node_name: NODE.to_owned() };
        let task = tokio::spawn(run(client, config, receiver, sender, stop.clone()));
        Self { devices, status, stop, task }
    }

    fn want(&self, devices: Vec<Device>) {
        self.devices.send_replace(Arc::new(devices));
    }

    async fn until(&mut self, done: impl FnMut(&PublishStatus) -> bool) -> PublishStatus {
        let waited = tokio::time::timeout(SOON, self.status.wait_for(done)).await;
        waited.expect("the status does not come").expect("the publisher is gone").clone()
    }

    async fn in_sync(&mut self, devices: usize) -> PublishStatus {
        self.until(|s| s.in_sync && s.published == devices).await
    }

    async fn stop(self) {
        self.stop.cancel();
        tokio::time::timeout(SOON, self.task).await.expect("it does not stop").unwrap();
    }
}

async fn started(devices: Vec<Device>) -> (ApiServerDouble, Publishing) {
    let server = ApiServerDouble::start_local().unwrap();
    server.add_node(NODE);
    let count = devices.len();
    let mut publishing = Publishing::start(client(&server).await, devices);
    publishing.in_sync(count).await;
    (server, publishing)
}

fn count(slice: &Value) -> usize {
    slice["spec"]["devices"].as_array().map_or(0, Vec::len)
}

fn total(slices: &[Value]) -> usize {
    slices.iter().map(count).sum()
}

#[tokio::test]
async fn the_first_publish_is_quick_and_belongs_to_the_node() {
    let server = ApiServerDouble::start_local().unwrap();
    let uid = server.add_node(NODE);
    let client = client(&server).await;
    let began = Instant::now();
    let mut publishing = Publishing::start(client, many(32));
    let status = publishing.in_sync(32).await;
    println!("start to published, 32 devices: {:?}", began.elapsed());
    assert_eq!((status.slices, status.generation, status.last_error), (1, 1, None));
    assert!(status.last_write.is_some());
    let slice = &server.slices()[0];
    assert!(slice["metadata"]["name"].as_str().unwrap().starts_with("node-1-dra.net-"));
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], uid.as_str());
    assert_eq!(slice["spec"]["pool"]["name"], NODE);
    assert!(server.requests().iter().all(|r| r.agent.starts_with("dranic/")));
    publishing.stop().await;
    assert_eq!(server.slices().len(), 1, "the slices stay");
}

#[tokio::test]
async fn after_a_restart_slices_are_adopted_without_a_write() {
    let (server, publishing) = started(many(200)).await;
    publishing.stop().await;
    server.clear_requests();
    let mut again = Publishing::start(client(&server).await, many(200));
    again.in_sync(200).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(server.slice_writes(), []);
}

#[tokio::test]
async fn one_changed_device_is_one_update() {
    let (server, mut publishing) = started(many(3)).await;
    server.clear_requests();
    let mut changed = many(3);
    changed[1] = device("d0001", 9000);
    publishing.want(changed);
    let written = |s: &[Value]| s.iter().any(|s| s["spec"]["devices"][1]["attributes"]["dra.net/mtu"]["int"] == 9000);
    server.wait_slices(SOON, written).await.unwrap();
    publishing.in_sync(3).await;
    let writes = server.slice_writes();
    assert_eq!(writes.len(), 1, "{writes:?}");
    assert_eq!(writes[0].method, "PUT");
}

#[tokio::test]
async fn more_devices_than_a_slice_takes_are_split_and_fewer_shrink_again() {
    let (server, mut publishing) = started(many(300)).await;
    let slices = server.slices();
    assert_eq!(slices.len(), 3);
    assert!(slices.iter().all(|s| s["spec"]["pool"]["resourceSliceCount"] == 3));
    publishing.want(many(10));
    let status = publishing.in_sync(10).await;
    assert_eq!(status.slices, 1);
    let slices = server.slices();
    assert_eq!((slices.len(), total(&slices)), (1, 10));
    publishing.want(Vec::new());
    publishing.in_sync(0).await;
    assert_eq!(server.slices().len(), 1, "an empty slice shows that the driver runs");
}

#[tokio::test]
async fn slices_that_the_kubelet_deletes_are_back_within_a_second() {
    let (server, mut publishing) = started(many(300)).await;
    for _ in 0..3 {
        let began = Instant::now();
        assert_eq!(server.delete_all_slices(), 3);
        let back = server.wait_slices(SOON, |s| total(s) == 300).await.unwrap();
        let took = began.elapsed();
        println!("back after a wipe: {took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(back.len(), 3);
        publishing.in_sync(300).await;
    }
    // One that somebody edits is put right too.
    let mut edited = server.slices().remove(0);
    edited["spec"]["skipNodeOperations"] = serde_json::json!(["*"]);
    server.put("resourceslices", edited);
    server.wait_slices(SOON, |s| s.iter().all(|s| s["spec"]["skipNodeOperations"].is_null())).await.unwrap();
}

#[tokio::test]
async fn a_node_made_anew_owns_the_slices_that_are_made_anew() {
    let (server, _publishing) = started(many(1)).await;
    assert!(server.delete("nodes", "", NODE));
    let uid = server.add_node(NODE);
    server.delete_all_slices();
    let slices = server.wait_slices(SOON, |s| total(s) == 1).await.unwrap();
    assert_eq!(slices[0]["metadata"]["ownerReferences"][0]["uid"], uid.as_str());
}

#[tokio::test]
async fn without_an_inventory_the_last_devices_stay_published() {
    let (server, mut publishing) = started(many(2)).await;
    let (other, _) = watch::channel(Arc::new(Vec::new()));
    drop(std::mem::replace(&mut publishing.devices, other));
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.clear_requests();
    server.delete_all_slices();
    server.wait_slices(SOON, |s| total(s) == 2).await.unwrap();
    publishing.in_sync(2).await;
    assert!(server.requests().len() < 10, "{:?}", server.requests());
}

#[tokio::test]
async fn a_conflict_is_read_again_and_written() {
    let (server, mut publishing) = started(many(2)).await;
    server.faults().next_of("PUT", 1, 409, None);
    publishing.want(many(3));
    publishing.in_sync(3).await;
    assert_eq!(total(&server.slices()), 3);
}

#[tokio::test]
async fn expired_and_dropped_watches_are_taken_up_again() {
    let (server, mut publishing) = started(many(2)).await;
    for round in 0..2 {
        if round == 0 {
            server.expire_watches()
        } else {
            server.drop_watches()
        }
        // What happens before the next watch is not lost.
        server.delete_all_slices();
        server.wait_slices(SOON, |s| total(s) == 2).await.unwrap();
        publishing.in_sync(2).await;
    }
    assert!(server.requests().len() < 40, "{} requests", server.requests().len());
}

#[tokio::test]
async fn retry_after_is_kept() {
    let (server, mut publishing) = started(many(2)).await;
    server.clear_requests();
    server.faults().next_of("PUT", 1, 429, Some(2));
    publishing.want(many(3));
    let status = publishing.until(|s| s.last_error.is_some()).await;
    assert!(status.last_error.unwrap().contains("429"));
    assert!(!status.in_sync);
    publishing.in_sync(3).await;
    let writes = server.slice_writes();
    assert_eq!(writes.len(), 2);
    let waited = writes[1].at - writes[0].at;
    assert!(waited >= Duration::from_secs(2) && waited < Duration::from_secs(8), "{waited:?}");
}

#[tokio::test]
async fn a_failing_server_is_asked_ever_less_often() {
    let (server, mut publishing) = started(many(2)).await;
    server.clear_requests();
    server.faults().next_of("PUT", 4, 503, None);
    publishing.want(many(3));
    tokio::time::timeout(Duration::from_secs(15), publishing.status.wait_for(|s| s.in_sync && s.published == 3))
        .await
        .unwrap()
        .unwrap();
    let writes = server.slice_writes();
    assert_eq!(writes.len(), 5);
    let waits: Vec<Duration> = writes.windows(2).map(|w| w[1].at - w[0].at).collect();
    assert!(waits[0] >= Duration::from_millis(180) && waits[3] >= Duration::from_millis(1400), "{waits:?}");
}

#[tokio::test]
async fn a_dropped_field_is_reported_and_not_written_for_ever() {
    let server = ApiServerDouble::start_local().unwrap();
    server.add_node(NODE);
    server.drop_fields(&["devices[].taints"]);
    let taint = DeviceTaint { key: "k".to_owned(), value: None, effect: "NoSchedule".to_owned(), time_added: None };
    let tainted = Device { taints: Some(vec![taint]), ..device("a", 1500) };
    let mut publishing = Publishing::start(client(&server).await, vec![tainted.clone()]);
    let status = publishing.in_sync(1).await;
    assert_eq!(status.dropped_fields, ["devices[].taints"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.slice_writes().len(), 1);
    publishing.want(vec![tainted, device("b", 1)]);
    publishing.in_sync(2).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(server.slice_writes().len(), 2);
}

#[tokio::test]
async fn many_changes_are_few_writes() {
    let (server, mut publishing) = started(many(2)).await;
    server.clear_requests();
    for mtu in 0..20 {
        publishing.want(vec![device("a", mtu)]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let last = |s: &PublishStatus| s.in_sync && s.published == 1;
    publishing.until(last).await;
    let newest = |s: &[Value]| s[0]["spec"]["devices"][0]["attributes"]["dra.net/mtu"]["int"] == 19;
    server.wait_slices(SOON, newest).await.unwrap();
    let writes = server.slice_writes().len();
    assert!(writes <= 7, "{writes} writes");
}

#[tokio::test]
async fn a_device_that_the_server_refuses_does_not_keep_back_the_others() {
    let mut devices = many(3);
    devices.push(device("Not A Label", 1500));
    let server = ApiServerDouble::start_local().unwrap();
    server.add_node(NODE);
    let mut publishing = Publishing::start(client(&server).await, devices.clone());
    let status = publishing.in_sync(3).await;
    assert_eq!(status.refused.len(), 1);
    assert!(status.refused[0].contains("Not A Label"), "{:?}", status.refused);
    // It is tried again when it is another one.
    devices[3] = device("a-label", 1500);
    publishing.want(devices);
    assert_eq!(publishing.in_sync(4).await.refused, Vec::<String>::new());
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    ApiServerDouble::start(listener).unwrap().write_kubeconfig(&path).unwrap();
    let mut publishing = Publishing::start(api::client(Some(&path)).await.unwrap(), many(2));
    let status = publishing.until(|s| s.last_error.is_some()).await;
    assert!(status.last_error.unwrap().contains("can't be reached"));
    let server = ApiServerDouble::start(TcpListener::bind(address).unwrap()).unwrap();
    server.add_node(NODE);
    assert_eq!(publishing.in_sync(2).await.last_error, None);
}

#[tokio::test]
async fn a_missing_rule_is_named() {
    let server = ApiServerDouble::start_local().unwrap();
    server.add_node(NODE);
    server.faults().forbid("POST /resourceslices");
    let mut publishing = Publishing::start(client(&server).await, many(1));
    let status = publishing.until(|s| s.last_error.is_some()).await;
    let text = status.last_error.unwrap();
    assert!(text.contains(r#"resources ["resourceslices"], verbs ["create"]"#), "{text}");
    server.faults().allow("POST /resourceslices");
    publishing.in_sync(1).await;
}

fn in_a(second: u64) -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_secs(second)
}

#[tokio::test]
async fn a_claim_is_fetched_as_it_was_sent() {
    let server = ApiServerDouble::start_local().unwrap();
    let client = client(&server).await;
    let config = ClaimConfig::from_claim(DRIVER, r#"{"interface":{"mtu":1500,"mtu":9000}}"#);
    let uid = server.create_claim(claim_json("ns", "c", "rdma", &["nic"], std::slice::from_ref(&config)));
    server.allocate("ns", "c", DRIVER, NODE, &[("nic", &["d0"])], ("pod", "pod-uid"), &[config]).unwrap();
    let fetched = api::fetch_claim(&client, "ns", "c", in_a(5)).await.unwrap();
    assert_eq!(fetched.claim.metadata.uid.as_deref(), Some(uid.as_str()));
    assert_eq!(fetched.raw.matches(r#""mtu":1500,"mtu":9000"#).count(), 2, "{}", fetched.raw);
    let status = fetched.claim.status.unwrap();
    let devices = status.allocation.unwrap().devices.unwrap();
    assert_eq!(devices.results.unwrap()[0].device, "d0");
    assert_eq!(devices.config.unwrap()[0].source, "FromClaim");
    assert_eq!(status.reserved_for.unwrap()[0].uid, "pod-uid");
}

#[tokio::test]
async fn trouble_that_passes_is_waited_out_within_the_deadline() {
    let server = ApiServerDouble::start_local().unwrap();
    server.create_claim(claim_json("ns", "c", "rdma", &["nic"], &[]));
    let client = client(&server).await;
    server.faults().next(2, 500, None);
    api::fetch_claim(&client, "ns", "c", in_a(5)).await.unwrap();
    server.faults().next(1, 429, Some(60));
    let began = Instant::now();
    let error = api::fetch_claim(&client, "ns", "c", in_a(5)).await.unwrap_err();
    assert!(matches!(error, ApiError::Busy { status: 429, .. }) && began.elapsed() < Duration::from_secs(1), "{error}");
    server.faults().set_latency(Duration::from_secs(3));
    let error = api::fetch_claim(&client, "ns", "c", in_a(1)).await.unwrap_err();
    assert!(matches!(error, ApiError::Unreachable { .. }) && began.elapsed() < Duration::from_secs(3), "{error}");
    server.faults().set_latency(Duration::ZERO);
}

#[tokio::test]
async fn lasting_trouble_is_told_at_once() {
    let server = ApiServerDouble::start_local().unwrap();
    let client = client(&server).await;
    let error = api::fetch_claim(&client, "ns", "none", in_a(5)).await.unwrap_err();
    assert!(matches!(error, ApiError::NotFound { .. }) && error.to_string().contains("ns/none"), "{error}");
    for bad in ["../x", "a/b", "a?b", "", "A", "a b", "a%2f"] {
        let error = api::fetch_claim(&client, "ns", bad, in_a(5)).await.unwrap_err();
        assert!(matches!(error, ApiError::Other { .. }), "{bad:?}: {error}");
    }
    assert_eq!(server.requests().len(), 1, "a bad name is not sent");
    server.faults().forbid("GET /resourceclaims/");
    let error = api::fetch_claim(&client, "ns", "c", in_a(5)).await.unwrap_err();
    assert!(matches!(&error, ApiError::Forbidden { rule, .. } if rule.contains("resourceclaims")), "{error}");
    server.create_claim_text(r#"{"metadata":{"namespace":"ns","name":"odd"},"spec":[]}"#).unwrap();
    server.faults().allow("GET /resourceclaims/");
    let error = api::fetch_claim(&client, "ns", "odd", in_a(5)).await.unwrap_err();
    assert!(error.to_string().contains("not a ResourceClaim"), "{error}");
    let huge = format!(r#"{{"metadata":{{"namespace":"ns","name":"huge"}},"x":"{}"}}"#, "x".repeat(4 << 20));
    server.create_claim_text(&huge).unwrap();
    let error = api::fetch_claim(&client, "ns", "huge", in_a(5)).await.unwrap_err();
    assert!(error.to_string().contains("more than 3145728 bytes"), "{error}");
    assert!(api::node_uid(&client, NODE).await.is_err());
    let uid = server.add_node(NODE);
    assert_eq!(api::node_uid(&client, NODE).await.unwrap(), uid);
}

#[tokio::test]
async fn a_bad_kubeconfig_names_the_file_and_the_flag() {
    let Err(error) = api::client(Some(Path::new("/nonexistent/kubeconfig"))).await else { panic!("a client without a file") };
    let text = error.to_string();
    assert!(text.contains("/nonexistent/kubeconfig") && text.contains("--kubeconfig"), "{text}");
}
