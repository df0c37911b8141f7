//! A double of the API server: ResourceSlices, ResourceClaims, DeviceClasses, Nodes, Pods and Events over plain HTTP/1.1.
//!
//! It keeps objects as JSON with the metadata a real server sets, has its resource versions, conflicts, field selectors, watches
//! and the validation of slices, and can be told to fail. It checks no credentials: `forbid` plays RBAC.

mod apply;
mod claims;
mod faults;
mod http;
mod patch;
mod slices;
mod store;
mod watch;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::sync::oneshot;

pub use claims::{ClaimConfig, claim_json};
pub use faults::Faults;
pub use store::Key;

use store::Store;

/// A request that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logged {
    /// `GET`, …
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Query without the `?`.
    pub query: String,
    /// When it came.
    pub at: Instant,
    /// Its `User-Agent`.
    pub agent: String,
}

impl Logged {
    /// Whether it changes something.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.method != "GET"
    }
}

struct Shared {
    store: Mutex<Store>,
    faults: Faults,
    requests: Mutex<Vec<Logged>>,
    /// How often a watch that asks for them gets a bookmark.
    bookmark_every: Mutex<Duration>,
}

impl Shared {
    fn bookmark_every(&self) -> Duration {
        *self.bookmark_every.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The double. Runs on a thread of its own; ends, with all connections, when dropped.
pub struct ApiServerDouble {
    shared: Arc<Shared>,
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ApiServerDouble {
    /// Serves on `listener`, which may be in any network namespace.
    ///
    /// # Errors
    /// When the listener or a runtime can't be used.
    pub fn start(listener: TcpListener) -> Result<Self> {
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            faults: Faults::default(),
            requests: Mutex::default(),
            bookmark_every: Mutex::new(watch::BOOKMARK),
        });
        let (stop, stopped) = oneshot::channel();
        let served = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("apiserver".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    () = http::serve(listener, served) => {}
                }
            });
            runtime.shutdown_background();
        })?;
        Ok(Self { shared, address, stop: Some(stop), thread: Some(thread) })
    }

    /// Serves on a port of 127.0.0.1 in the caller's network namespace.
    ///
    /// # Errors
    /// When there is no port.
    pub fn start_local() -> Result<Self> {
        Self::start(TcpListener::bind("127.0.0.1:0").context("no port on 127.0.0.1")?)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Writes a kubeconfig for it.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write_kubeconfig(&self, path: &Path) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "double", "user": {}}],
            "contexts": [{"name": "double", "context": {"cluster": "double", "user": "double"}}],
        });
        // JSON is YAML.
        std::fs::write(path, serde_json::to_vec_pretty(&config)?).with_context(|| format!("write {}", path.display()))
    }

    /// What to do wrong.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// All requests so far.
    #[must_use]
    pub fn requests(&self) -> Vec<Logged> {
        self.shared.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The requests so far that change ResourceSlices.
    #[must_use]
    pub fn slice_writes(&self) -> Vec<Logged> {
        self.requests().into_iter().filter(|r| r.is_write() && r.path.contains("/resourceslices")).collect()
    }

    /// Forgets the requests so far.
    pub fn clear_requests(&self) {
        self.shared.requests.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// How often watches get a bookmark from now on: each minute from a real server, each 5 s from this one, so that tests see some.
    pub fn set_bookmark_every(&self, interval: Duration) {
        *self.shared.bookmark_every.lock().unwrap_or_else(PoisonError::into_inner) = interval;
    }

    /// Fields below `spec` that are dropped from slices when they are written (`devices[].taints`).
    pub fn drop_fields(&self, paths: &[&str]) {
        self.shared.store().drop_fields = paths.iter().map(|p| (*p).to_owned()).collect();
    }

    /// Refuses changes of `status.devices` as 1.36 and later do without the verb `associated-node:patch` on `resourceclaims/driver`.
    pub fn refuse_device_status(&self, refuse: bool) {
        self.shared.store().refuse_device_status = refuse;
    }

    /// From now on nothing can be created in the namespace, as while it is being deleted.
    pub fn terminate_namespace(&self, namespace: &str) {
        self.shared.store().terminating.insert(namespace.to_owned());
    }

    /// The entries of `status.devices` of a claim.
    #[must_use]
    pub fn claim_devices(&self, namespace: &str, name: &str) -> Vec<Value> {
        let claim = self.object("resourceclaims", namespace, name).unwrap_or_default();
        claim["status"]["devices"].as_array().cloned().unwrap_or_default()
    }

    /// Ends all watches, as a restart of the server does.
    pub fn drop_watches(&self) {
        self.shared.store().end_watches(false);
    }

    /// Ends all watches with 410 and forgets all resource versions before now.
    pub fn expire_watches(&self) {
        self.shared.store().end_watches(true);
    }

    /// The stored objects of a resource (`resourceslices`, `resourceclaims`, `events`, …).
    #[must_use]
    pub fn list(&self, resource: &str) -> Vec<Value> {
        self.shared.store().list(resource)
    }

    /// The stored ResourceSlices.
    #[must_use]
    pub fn slices(&self) -> Vec<Value> {
        self.list("resourceslices")
    }

    /// One stored object; `namespace` is empty for those without.
    #[must_use]
    pub fn object(&self, resource: &'static str, namespace: &str, name: &str) -> Option<Value> {
        self.shared.store().get(&Key::new(resource, namespace, name)).cloned()
    }

    /// Creates or replaces an object without validation, as another client would; gives its UID.
    ///
    /// # Panics
    /// When the object has no `metadata.name`.
    pub fn put(&self, resource: &'static str, object: Value) -> String {
        self.shared.store().put(resource, object)
    }

    /// Adds a Node; gives its UID.
    pub fn add_node(&self, name: &str) -> String {
        self.put("nodes", json!({"metadata": {"name": name}, "spec": {}, "status": {}}))
    }

    /// Adds a Pod that runs on `node`; gives its UID.
    pub fn add_pod(&self, namespace: &str, name: &str, node: &str) -> String {
        let spec = json!({"nodeName": node, "containers": []});
        self.put(
            "pods",
            json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec, "status": {"phase": "Pending"}}),
        )
    }

    /// Deletes an object; whether it was there.
    pub fn delete(&self, resource: &'static str, namespace: &str, name: &str) -> bool {
        self.shared.store().delete(&Key::new(resource, namespace, name)).is_some()
    }

    /// Deletes all ResourceSlices, as the kubelet does when it starts; how many there were.
    pub fn delete_all_slices(&self) -> usize {
        let mut store = self.shared.store();
        let keys = store.keys("resourceslices");
        keys.iter().filter(|key| store.delete(key).is_some()).count()
    }

    /// Waits until `done` says so of the slices.
    ///
    /// # Errors
    /// When it does not within `limit`; the error has the slices.
    pub async fn wait_slices(&self, limit: Duration, mut done: impl FnMut(&[Value]) -> bool) -> Result<Vec<Value>> {
        let end = Instant::now() + limit;
        loop {
            let slices = self.slices();
            if done(&slices) {
                return Ok(slices);
            }
            anyhow::ensure!(Instant::now() < end, "not so within {limit:?}: {}", Value::Array(slices));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for ApiServerDouble {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
