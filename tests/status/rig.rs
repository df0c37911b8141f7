//! A writer of claim status over looks that the test makes up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dranic::attach::engine::{Look, Seen};
use dranic::dra::api;
use dranic::dra::events::{self, Events, EventsConfig};
use dranic::dra::status::{Queue, StatusConfig, run};
use dranic::ledger::{ClaimRecord, ClaimRef, Share};
use dranic::names::ClaimUid;
use dranic::netdev::{Address, Link};
use dranic_testbed::apiserver::ApiServerDouble;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const DRIVER: &str = "dra.net";
pub(crate) const NODE: &str = "node-1";
/// Longer than anything here takes on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(20);

pub(crate) async fn client(server: &ApiServerDouble) -> kube::Client {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    server.write_kubeconfig(&path).unwrap();
    api::client(Some(&path)).await.unwrap()
}

/// Waits until `done` gives something.
pub(crate) async fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = done() {
            return found;
        }
        assert!(begin.elapsed() < SOON, "not so within {SOON:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

type Looks = Arc<Mutex<HashMap<ClaimUid, Look>>>;

/// A writer at work.
pub(crate) struct Rig {
    pub(crate) server: ApiServerDouble,
    pub(crate) queue: Queue,
    looks: Looks,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        Self::over(ApiServerDouble::start_local().unwrap(), Looks::default()).await
    }

    async fn over(server: ApiServerDouble, looks: Looks) -> Self {
        Self::with(server, looks, |_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut StatusConfig)) -> Self {
        Self::with(ApiServerDouble::start_local().unwrap(), Looks::default(), change).await
    }

    async fn with(server: ApiServerDouble, looks: Looks, change: impl FnOnce(&mut StatusConfig)) -> Self {
        let (events, waiting) = Events::new();
        let stop = CancellationToken::new();
        let queue = Queue::default();
        let mut config = StatusConfig::new(DRIVER);
        (config.settle, config.look_again) = (Duration::from_millis(10), Duration::from_secs(3600));
        change(&mut config);
        let source = {
            let looks = looks.clone();
            Arc::new(move |uid: &ClaimUid| looks.lock().unwrap().get(uid).cloned())
        };
        let client = client(&server).await;
        let status = run(client.clone(), config, queue.clone(), source, events, stop.clone());
        let recorder = events::run(client, EventsConfig::new(DRIVER, NODE), waiting, stop.clone());
        let tasks = vec![tokio::spawn(status), tokio::spawn(recorder)];
        Self { server, queue, looks, stop, tasks }
    }

    /// The agent starts anew: nothing is remembered, everything that is recorded is looked at.
    pub(crate) async fn restart(self) -> Self {
        let (server, looks) = (self.end().await, Looks::default());
        Self::over(server, looks).await
    }

    /// SIGTERM.
    pub(crate) async fn end(self) -> ApiServerDouble {
        self.stop.cancel();
        for task in self.tasks {
            tokio::time::timeout(SOON, task).await.expect("it does not stop").unwrap();
        }
        self.server
    }

    /// A claim for `count` devices, allocated.
    pub(crate) fn claim(&self, name: &str, count: usize) -> ClaimRef {
        let results: Vec<Value> = (0..count)
            .map(|n| json!({"request": "nic", "driver": DRIVER, "pool": NODE, "device": format!("pci-{n}")}))
            .chain([json!({"request": "gpu", "driver": "gpu.example", "pool": NODE, "device": "gpu-0"})])
            .collect();
        let uid = self.server.create_claim(json!({
            "metadata": {"namespace": "default", "name": name}, "spec": {"devices": {"requests": []}},
            "status": {"allocation": {"devices": {"results": results}}},
        }));
        ClaimRef { namespace: "default".to_owned(), name: name.to_owned(), uid: ClaimUid::new(uid).unwrap() }
    }

    /// From now on this is what there is of the claim's devices; says that something changed.
    pub(crate) fn set(&self, claim: &ClaimRef, count: usize, phase: &str, more: &Value) {
        let device = |n: usize| {
            let mut device = json!({
                "request": "nic", "pool": NODE, "device": format!("pci-{n}"), "hardware": {"pci": {"address": "0000:8a:00.0"}},
                "attributes": {}, "host": {
                    "index": 7, "name": format!("eth{n}"), "mtu": 9000, "flags": 4099,
                    "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
                },
                "plan": {"podLink": format!("rail{n}"), "steps": []}, "phase": phase, "sinceUnixMs": 1_700_000_000_000_u64,
            });
            for (key, value) in more.as_object().unwrap() {
                device[key] = value.clone();
            }
            device
        };
        let record: ClaimRecord = serde_json::from_value(json!({
            "claim": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid.as_str()},
            "pod": {"name": "p", "uid": "pod-1"}, "generation": 1, "bootId": "boot-1",
            "devices": (0..count).map(device).collect::<Vec<_>>(),
        }))
        .unwrap();
        let seen = if phase == "attached" { attached(&record, "10.0.0.5/24") } else { BTreeMap::new() };
        let look = Look { record: Arc::new(record), this_boot: true, seen };
        self.looks.lock().unwrap().insert(claim.uid.clone(), look);
        self.queue.changed(claim);
    }

    /// The kernel has something else of the claim's devices; tells nobody.
    pub(crate) fn set_seen(&self, claim: &ClaimRef, seen: impl Fn(&ClaimRecord) -> BTreeMap<Share, Seen>) {
        let mut looks = self.looks.lock().unwrap();
        let look = looks.get_mut(&claim.uid).unwrap();
        look.seen = seen(&look.record);
    }

    pub(crate) fn forget(&self, claim: &ClaimRef) {
        self.looks.lock().unwrap().remove(&claim.uid);
        self.queue.changed(claim);
    }

    /// (device, status, reason) of our entries.
    pub(crate) fn said(&self, claim: &str) -> Vec<(String, String, String)> {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let devices = self.server.claim_devices("default", claim);
        let ours = devices.iter().filter(|d| d["driver"] == DRIVER);
        ours.map(|d| (text(&d["device"]), text(&d["conditions"][0]["status"]), text(&d["conditions"][0]["reason"]))).collect()
    }

    /// Waits until all `count` devices say so.
    pub(crate) async fn until_said(&self, claim: &str, count: usize, reason: &str) {
        until(&format!("{count} times {reason}"), || {
            let said = self.said(claim);
            (said.len() == count && said.iter().all(|s| s.2 == reason)).then_some(())
        })
        .await;
    }

    pub(crate) fn patches(&self) -> usize {
        self.server.requests().iter().filter(|r| r.method == "PATCH" && r.path.ends_with("/status")).count()
    }

    /// Waits until the server was asked for nothing for a while.
    pub(crate) async fn quiet(&self) -> usize {
        let mut before = usize::MAX;
        loop {
            let now = self.server.requests().len();
            if now == before {
                return now;
            }
            before = now;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }
}

/// Every device is in the pod, with one address.
pub(crate) fn attached(record: &ClaimRecord, address: &str) -> BTreeMap<Share, Seen> {
    let (ip, prefix) = address.split_once('/').unwrap();
    let address = Address::permanent(ip.parse().unwrap(), prefix.parse().unwrap());
    let link = |name: &str| Box::new(Link { name: name.to_owned(), ..Link::default() });
    let here = |d: &dranic::ledger::DeviceRecord| Seen::Here(link(d.plan.pod_link.as_str()), vec![address.clone()]);
    record.devices.iter().map(|d| (d.share(), here(d))).collect()
}
