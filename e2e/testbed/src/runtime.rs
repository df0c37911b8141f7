//! A double of the container runtime's side of NRI: what containerd does with its plugins, without containers.
//!
//! It accepts plugins one after another, registers, configures and synchronises them, and then relays requests strictly one at a
//! time, as Go writes and reads them ([`wire`]), with the failure policies of NRI 0.12.4 and the habits of older versions. It makes
//! no network namespaces: a [`SandboxSpec`] carries the path of one.

mod caller;
mod connection;
mod handshake;
mod log;
pub(crate) mod pods;
mod relay;
pub mod scripted;
pub mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dranic::nri::proto;
use tokio::net::UnixListener;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;

pub use caller::Caller;
use connection::Connection;
pub use connection::Failure;
pub use handshake::Fault;
pub use log::{Event, Log, What};
use pods::PodRequest;
pub use pods::{ContainerSpec, SandboxSpec};
use relay::relay;
pub use relay::{Kind, Relay};

/// Which runtime to be.
#[derive(Debug, Clone)]
pub struct RuntimeOptions {
    /// The NRI socket.
    pub socket: PathBuf,
    /// Pod events as RPCs of their own (NRI 0.12 and later), or as `StateChange` (before).
    pub dedicated_rpcs: bool,
    /// Whether the plugins' failure policies count, and plugins are not blamed when the runtime's own time is over (NRI 0.12.4 and
    /// later).
    pub honours_policy: bool,
    /// Events that a plugin may subscribe to; any other bit ends its connection.
    pub valid_events: i32,
    /// Whether a plugin's name may have certain characters only, or just must not be empty.
    pub checks_names: bool,
    /// For one request to one plugin.
    pub request_timeout: Duration,
    /// From the connection to RegisterPlugin.
    pub registration_timeout: Duration,
    /// Whether Configure tells these two; the oldest versions do not.
    pub tells_timeouts: bool,
    /// "containerd".
    pub runtime_name: String,
    /// "v2.4.2".
    pub runtime_version: String,
    /// "v0.12.5"; empty before NRI 0.12.
    pub nri_version: String,
    /// Time between RegisterPlugin and its answer.
    pub register_delay: Duration,
    /// Configure before RegisterPlugin is answered; both orders are seen in the field.
    pub configure_first: bool,
    /// Largest message of Synchronize before it is split, in bytes.
    pub message_limit: usize,
    /// After a restart Stop and Remove of older pods are not relayed, as in containerd.
    pub forgets_old_pods: bool,
}

impl RuntimeOptions {
    /// The newest runtime with its default settings.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            dedicated_rpcs: true,
            honours_policy: true,
            valid_events: 0x3fff,
            checks_names: true,
            request_timeout: Duration::from_secs(2),
            registration_timeout: Duration::from_secs(5),
            tells_timeouts: true,
            runtime_name: "containerd".to_owned(),
            runtime_version: "v2.4.2".to_owned(),
            nri_version: "v0.12.5".to_owned(),
            register_delay: Duration::ZERO,
            configure_first: false,
            message_limit: wire::MAX_DATA,
            forgets_old_pods: true,
        }
    }

    /// A runtime with NRI 0.8 (containerd 2.0 and 2.1): `StateChange`, no failure policy.
    pub fn old(socket: impl Into<PathBuf>) -> Self {
        Self {
            dedicated_rpcs: false,
            honours_policy: false,
            valid_events: 0x07ff,
            checks_names: false,
            nri_version: String::new(),
            runtime_version: "v2.1.9".to_owned(),
            ..Self::new(socket)
        }
    }

    /// CRI-O up to 1.36 (NRI 0.11): an old runtime that remembers its pods over a restart and tells their Stop. The other thing
    /// that is CRI-O's, Stop when the namespace is gone, is for the test to do: the double makes no namespaces.
    pub fn crio(socket: impl Into<PathBuf>) -> Self {
        Self {
            runtime_name: "cri-o".to_owned(),
            runtime_version: "1.36.3".to_owned(),
            valid_events: 0x3fff,
            checks_names: true,
            forgets_old_pods: false,
            ..Self::old(socket)
        }
    }
}

/// A plugin in the list.
struct Plugin {
    /// "index-name".
    name: String,
    index: String,
    events: i32,
    policy: proto::FailurePolicy,
    state_change: AtomicBool,
    connection: Arc<Connection>,
}

#[derive(Clone)]
struct Pod {
    spec: SandboxSpec,
    containers: Vec<ContainerSpec>,
    stopped: bool,
    /// From before a restart.
    old: bool,
}

struct Inner {
    options: RuntimeOptions,
    request_timeout: Mutex<Duration>,
    log: Arc<Log>,
    /// Held during each request and during Synchronize.
    requests: AsyncMutex<()>,
    plugins: Mutex<Vec<Arc<Plugin>>>,
    pods: Mutex<BTreeMap<String, Pod>>,
    faults: AsyncMutex<VecDeque<Fault>>,
    /// Refused plugins' connections, kept open.
    refused: AsyncMutex<Vec<Arc<Connection>>>,
}

impl Inner {
    fn request_timeout(&self) -> Duration {
        *locked(&self.request_timeout)
    }

    fn plugins(&self) -> Vec<Arc<Plugin>> {
        locked(&self.plugins).clone()
    }

    fn add(self: &Arc<Self>, plugin: Plugin) {
        let plugin = Arc::new(plugin);
        {
            let mut plugins = locked(&self.plugins);
            plugins.push(plugin.clone());
            plugins.sort_by(|a, b| a.index.cmp(&b.index));
        }
        self.log.add(&plugin.name, What::Ready);
        let inner = Arc::downgrade(self);
        tokio::spawn(async move {
            plugin.connection.closed.cancelled().await;
            if let Some(inner) = inner.upgrade() {
                inner.drop_plugin(&plugin, &plugin.connection.reason()).await;
            }
        });
    }

    async fn drop_plugin(&self, plugin: &Plugin, reason: &str) {
        let was_listed = {
            let mut plugins = locked(&self.plugins);
            let before = plugins.len();
            plugins.retain(|other| !Arc::ptr_eq(&other.connection, &plugin.connection));
            plugins.len() < before
        };
        plugin.connection.close(reason).await;
        if was_listed {
            self.log.add(&plugin.name, What::Gone(reason.to_owned()));
        }
    }

    /// Pods and containers for Synchronize.
    fn objects(&self) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let pods = locked(&self.pods);
        let running = |pod: &Pod| if pod.stopped { 4 } else { 3 };
        let containers = pods
            .values()
            .flat_map(|pod| pod.containers.iter().map(move |container| container.encode(&pod.spec.id, running(pod))));
        (pods.values().map(|pod| pod.spec.encode(pod.stopped)).collect(), containers.collect())
    }
}

/// The running double. Dropping it closes listener and connections and, unless it was stopped, removes the socket.
pub struct RuntimeDouble {
    inner: Arc<Inner>,
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl RuntimeDouble {
    /// Starts listening. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the socket can't be made.
    pub fn start(options: RuntimeOptions) -> io::Result<Self> {
        let inner = Inner {
            request_timeout: options.request_timeout.into(),
            options,
            log: Arc::default(),
            requests: AsyncMutex::default(),
            plugins: Mutex::default(),
            pods: Mutex::default(),
            faults: AsyncMutex::default(),
            refused: AsyncMutex::default(),
        };
        let double = Self { inner: Arc::new(inner), listener: Mutex::default() };
        double.up()?;
        Ok(double)
    }

    /// For one request to one plugin, from now on.
    pub fn set_request_timeout(&self, limit: Duration) {
        *locked(&self.inner.request_timeout) = limit;
    }

    /// What happened so far.
    pub fn log(&self) -> Arc<Log> {
        self.inner.log.clone()
    }

    /// Waits until a plugin with this "index-name" gets requests.
    ///
    /// # Errors
    /// After `limit`.
    pub async fn wait_plugin(&self, name: &str, limit: Duration) -> Result<(), String> {
        let is_listed = || self.inner.plugins().iter().any(|plugin| plugin.name == name);
        let from = self.inner.log.all().len();
        if is_listed() {
            return Ok(());
        }
        self.inner.log.wait(from, limit, |event| event.plugin == name && event.what == What::Ready).await.map(drop)
    }

    /// "index-name" of the plugins in the list.
    pub fn plugins(&self) -> Vec<String> {
        self.inner.plugins().iter().map(|plugin| plugin.name.clone()).collect()
    }

    /// Connection id and size of each frame that a listed plugin has sent.
    pub fn frames(&self, name: &str) -> Vec<(u32, usize)> {
        self.inner.plugins().iter().filter(|plugin| plugin.name == name).flat_map(|p| p.connection.frames()).collect()
    }

    /// What goes wrong with the next connection; several queue up, one for each.
    pub async fn next_handshake(&self, fault: Fault) {
        self.inner.faults.lock().await.push_back(fault);
    }

    /// Puts a pod and its containers into the store without asking any plugin.
    pub fn add_pod(&self, spec: SandboxSpec, containers: Vec<ContainerSpec>) {
        let pod = Pod { spec: spec.clone(), containers, stopped: false, old: false };
        locked(&self.inner.pods).insert(spec.id, pod);
    }

    /// Takes all pods out of the store, and tells no plugin.
    pub fn clear_pods(&self) {
        locked(&self.inner.pods).clear();
    }

    /// The pods in the store.
    pub fn pods(&self) -> Vec<SandboxSpec> {
        locked(&self.inner.pods).values().map(|pod| pod.spec.clone()).collect()
    }

    /// Relays RunPodSandbox. On success the pod is stored; on failure Stop and Remove follow at once, as in containerd.
    pub async fn run_pod_sandbox(&self, spec: &SandboxSpec) -> Relay {
        let relayed = self.relay(Kind::Run, spec, None, Caller::default()).await;
        if relayed.error.is_some() {
            self.relay_as(Kind::Stop, spec, false).await;
            self.relay_as(Kind::Remove, spec, false).await;
        } else {
            self.add_pod(spec.clone(), Vec::new());
        }
        relayed
    }

    /// Relays CreateContainer for a stored pod; fails for others.
    pub async fn create_container(&self, sandbox: &str, container: &ContainerSpec) -> Relay {
        let Some(pod) = self.pod(sandbox) else { return not_found(sandbox) };
        let relayed = self.relay(Kind::Create, &pod.spec, Some(container), Caller::default()).await;
        if relayed.error.is_none()
            && let Some(pod) = locked(&self.inner.pods).get_mut(sandbox)
        {
            pod.containers.push(container.clone());
        }
        relayed
    }

    /// Relays StopPodSandbox for a stored pod, unless it is from before a restart; fails for unknown ones.
    pub async fn stop_pod_sandbox(&self, sandbox: &str) -> Relay {
        let Some(pod) = self.pod(sandbox) else { return not_found(sandbox) };
        if let Some(pod) = locked(&self.inner.pods).get_mut(sandbox) {
            pod.stopped = true;
        }
        self.tell(Kind::Stop, &pod).await
    }

    /// Relays RemovePodSandbox likewise and forgets the pod.
    pub async fn remove_pod_sandbox(&self, sandbox: &str) -> Relay {
        let Some(pod) = self.pod(sandbox) else { return not_found(sandbox) };
        locked(&self.inner.pods).remove(sandbox);
        self.tell(Kind::Remove, &pod).await
    }

    /// Relays StopPodSandbox for any pod, stored or not, again if need be.
    pub async fn relay_stop(&self, spec: &SandboxSpec) -> Relay {
        self.relay_as(Kind::Stop, spec, true).await
    }

    /// Relays RemovePodSandbox likewise.
    pub async fn relay_remove(&self, spec: &SandboxSpec) -> Relay {
        self.relay_as(Kind::Remove, spec, true).await
    }

    /// Relays a request for any pod and container, within the runtime's own limits, and does nothing else: nothing is stored, and
    /// nothing follows a failure.
    pub async fn relay(&self, kind: Kind, spec: &SandboxSpec, container: Option<&ContainerSpec>, caller: Caller) -> Relay {
        let container = container.map(|container| container.encode(&spec.id, 0)).unwrap_or_default();
        let request = PodRequest { pod: spec.encode(matches!(kind, Kind::Stop | Kind::Remove)), container };
        relay(&self.inner, kind, &spec.id, request, caller).await
    }

    async fn relay_as(&self, kind: Kind, spec: &SandboxSpec, stopped: bool) -> Relay {
        let request = PodRequest { pod: spec.encode(stopped), container: Vec::new() };
        relay(&self.inner, kind, &spec.id, request, Caller::default()).await
    }

    /// Sends bytes of the test's choice to a listed plugin as a call of `method`.
    ///
    /// # Errors
    /// How the call failed.
    pub async fn raw_call(&self, name: &str, method: &str, payload: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let plugin = self.inner.plugins().into_iter().find(|plugin| plugin.name == name);
        let plugin = plugin.ok_or_else(|| Failure::Lost("not connected".to_owned()))?;
        plugin.connection.call(method, payload, self.inner.request_timeout()).await
    }

    /// Stops as a runtime that is killed (`clean` false: the socket file stays and refuses) or told to stop (it is removed).
    pub async fn stop(&self, clean: bool) {
        let listener = locked(&self.listener).take();
        if let Some(listener) = listener {
            listener.abort();
            let _ = listener.await;
        }
        for plugin in self.inner.plugins() {
            self.inner.drop_plugin(&plugin, "the runtime stops").await;
        }
        for connection in self.inner.refused.lock().await.drain(..) {
            connection.close("the runtime stops").await;
        }
        if clean {
            let _ = std::fs::remove_file(&self.inner.options.socket);
        }
        locked(&self.inner.pods).values_mut().for_each(|pod| pod.old = true);
    }

    /// Listens again after [`stop`](Self::stop).
    ///
    /// # Errors
    /// If the socket can't be made.
    pub fn up(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.inner.options.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&self.inner.options.socket)?;
        let inner = self.inner.clone();
        let task = tokio::spawn(async move {
            // One after another, as in the runtime: a silent plugin holds up those behind it.
            while let Ok((stream, _)) = listener.accept().await {
                handshake::handshake(&inner, stream).await;
            }
        });
        *locked(&self.listener) = Some(task);
        Ok(())
    }

    /// A clean stop and a start.
    ///
    /// # Errors
    /// If the socket can't be made.
    pub async fn restart(&self) -> io::Result<()> {
        self.stop(true).await;
        self.up()
    }

    fn pod(&self, sandbox: &str) -> Option<Pod> {
        locked(&self.inner.pods).get(sandbox).cloned()
    }

    async fn tell(&self, kind: Kind, pod: &Pod) -> Relay {
        if pod.old && self.inner.options.forgets_old_pods {
            return Relay::default();
        }
        self.relay_as(kind, &pod.spec, true).await
    }
}

impl Drop for RuntimeDouble {
    fn drop(&mut self) {
        // Once stopped, the socket may be another runtime's.
        if let Some(listener) = locked(&self.listener).take() {
            listener.abort();
            let _ = std::fs::remove_file(&self.inner.options.socket);
        }
        for plugin in locked(&self.inner.plugins).drain(..) {
            plugin.connection.closed.cancel();
        }
    }
}

fn not_found(sandbox: &str) -> Relay {
    Relay { error: Some(format!("no sandbox {sandbox}")), ..Relay::default() }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
