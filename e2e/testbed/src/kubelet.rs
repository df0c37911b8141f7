//! A double of the kubelet's plugin manager and DRA client.
//!
//! It finds registration sockets, calls them with the same bytes as the real kubelet ([`h2`]), picks a version by the same rule, and
//! sends claims to the newest plugin of a driver. It watches the health of devices ([`health`]). What it leaves out: sub-folders of
//! the registry, and the 30 s after which slices are deleted.

pub mod h2;
pub mod health;
mod hpack;

use std::collections::HashMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use dranic::dra::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use dranic::dra::proto::{v1, v1beta1};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::{Channel, Endpoint};

use self::health::DriverHealth;

pub use dranic::dra::proto::v1::{Claim, Device};

/// How often the registry is looked at; the real one is told by inotify and reconciles every second.
const POLL: Duration = Duration::from_millis(50);
/// The real kubelet's time limits and first back-off.
const GET_INFO: Duration = Duration::from_secs(1);
const NOTIFY: Duration = Duration::from_secs(5);
const CLAIMS: Duration = Duration::from_secs(45);
const BACK_OFF: Duration = Duration::from_millis(500);
const BACK_OFF_MAX: Duration = Duration::from_secs(122);

/// By claim UID: the outcome or the driver's error text.
pub type Outcomes<T> = HashMap<String, Result<T, String>>;

/// What happened, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A driver was taken and told so.
    Registered {
        /// Its name.
        driver: String,
        /// Its DRA socket.
        endpoint: PathBuf,
        /// The version that will be used.
        version: String,
    },
    /// The registration socket of a driver vanished or was replaced.
    Unregistered {
        /// Its name.
        driver: String,
    },
    /// An attempt failed; it is repeated with back-off.
    Failed {
        /// The registration socket.
        socket: PathBuf,
        /// Why.
        error: String,
    },
}

/// A registered plugin.
#[derive(Clone)]
struct Plugin {
    driver: String,
    socket: PathBuf,
    endpoint: PathBuf,
    version: String,
    channel: Channel,
    /// Its health stream; it ends with the last copy of this.
    _health: Option<Arc<AbortOnDropHandle<()>>>,
}

/// A socket in the registry.
struct Seen {
    /// Inode and time of change; a new file in the same place differs.
    file: (u64, i64, i64),
    done: bool,
    next_try: Instant,
    back_off: Duration,
}

#[derive(Default)]
struct State {
    /// Oldest first.
    plugins: Vec<Plugin>,
    events: Vec<Event>,
    /// By driver.
    health: HashMap<String, DriverHealth>,
}

/// The running double; it stops when dropped, and forgets everything, like a kubelet that is restarted.
pub struct KubeletDouble {
    state: Arc<Mutex<State>>,
    changed: watch::Receiver<usize>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for KubeletDouble {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl KubeletDouble {
    /// Starts with the versions of today's kubelet. `root` is the kubelet's folder; its registry is made.
    ///
    /// # Errors
    /// When the registry can't be made.
    pub fn start(root: &Path) -> anyhow::Result<Self> {
        Self::start_with(root, &["v1.DRAPlugin", "v1beta1.DRAPlugin"])
    }

    /// Starts as a kubelet that knows only `versions`.
    ///
    /// # Errors
    /// When the registry can't be made.
    pub fn start_with(root: &Path, versions: &[&str]) -> anyhow::Result<Self> {
        let registry = root.join("plugins_registry");
        std::fs::create_dir_all(&registry)?;
        let state = Arc::<Mutex<State>>::default();
        let (sender, changed) = watch::channel(0);
        let versions = versions.iter().map(|&version| version.to_owned()).collect();
        let manager = Manager { registry, versions, state: state.clone(), changed: Arc::new(sender) };
        Ok(Self { state, changed, task: tokio::spawn(manager.run()) })
    }

    /// All events so far.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).events.clone()
    }

    /// Waits until `wanted` finds what it looks for in the events.
    ///
    /// # Errors
    /// When it does not within `limit`; the error lists the events.
    pub async fn wait<T>(&self, limit: Duration, wanted: impl Fn(&[Event]) -> Option<T>) -> anyhow::Result<T> {
        let mut changed = self.changed.clone();
        let found = async {
            loop {
                changed.borrow_and_update();
                if let Some(found) = wanted(&self.events()) {
                    return Ok(found);
                }
                changed.changed().await.context("the double has ended")?;
            }
        };
        timeout(limit, found).await.with_context(|| format!("not within {limit:?}; events: {:?}", self.events()))?
    }

    /// Waits until `driver` is registered; returns the version in use.
    ///
    /// # Errors
    /// When it is not within `limit`.
    pub async fn wait_driver(&self, driver: &str, limit: Duration) -> anyhow::Result<String> {
        let state = &self.state;
        self.wait(limit, |_| {
            let state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.plugins.iter().rfind(|plugin| plugin.driver == driver).map(|plugin| plugin.version.clone())
        })
        .await
    }

    /// NodePrepareResources to the newest plugin of `driver`. Devices come as v1 whichever version was used.
    ///
    /// # Errors
    /// When no such driver is registered, the call failed (with a [`tonic::Status`] inside), or a claim is missing in the answer.
    pub async fn prepare(&self, driver: &str, claims: &[Claim]) -> anyhow::Result<Outcomes<Vec<Device>>> {
        let plugin = self.plugin(driver).await?;
        let answers: Outcomes<Vec<Device>> = if plugin.version == "v1.DRAPlugin" {
            let mut client = v1::dra_plugin_client::DraPluginClient::new(plugin.channel);
            let message = v1::NodePrepareResourcesRequest { claims: claims.to_vec() };
            let answer = client.node_prepare_resources(with_deadline(message)).await?.into_inner();
            answer.claims.into_iter().map(|(uid, claim)| (uid, outcome(claim.devices, claim.error))).collect()
        } else {
            let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(plugin.channel);
            let message = v1beta1::NodePrepareResourcesRequest { claims: claims.iter().map(old_claim).collect() };
            let answer = client.node_prepare_resources(with_deadline(message)).await?.into_inner();
            let devices = |list: Vec<v1beta1::Device>| list.into_iter().map(new_device).collect();
            answer.claims.into_iter().map(|(uid, claim)| (uid, outcome(devices(claim.devices), claim.error))).collect()
        };
        complete("NodePrepareResources", claims, answers)
    }

    /// NodeUnprepareResources to the newest plugin of `driver`.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub async fn unprepare(&self, driver: &str, claims: &[Claim]) -> anyhow::Result<Outcomes<()>> {
        let plugin = self.plugin(driver).await?;
        let answers: Outcomes<()> = if plugin.version == "v1.DRAPlugin" {
            let mut client = v1::dra_plugin_client::DraPluginClient::new(plugin.channel);
            let message = v1::NodeUnprepareResourcesRequest { claims: claims.to_vec() };
            let answer = client.node_unprepare_resources(with_deadline(message)).await?.into_inner();
            answer.claims.into_iter().map(|(uid, claim)| (uid, outcome((), claim.error))).collect()
        } else {
            let mut client = v1beta1::dra_plugin_client::DraPluginClient::new(plugin.channel);
            let message = v1beta1::NodeUnprepareResourcesRequest { claims: claims.iter().map(old_claim).collect() };
            let answer = client.node_unprepare_resources(with_deadline(message)).await?.into_inner();
            answer.claims.into_iter().map(|(uid, claim)| (uid, outcome((), claim.error))).collect()
        };
        complete("NodeUnprepareResources", claims, answers)
    }

    /// The newest plugin that can be connected to.
    async fn plugin(&self, driver: &str) -> anyhow::Result<Plugin> {
        let mut candidates: Vec<Plugin> = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.plugins.iter().rev().filter(|plugin| plugin.driver == driver).cloned().collect()
        };
        if candidates.len() > 1 {
            for i in 0..candidates.len() {
                if UnixStream::connect(&candidates[i].endpoint).await.is_ok() {
                    return Ok(candidates.swap_remove(i));
                }
            }
        }
        candidates.into_iter().next().with_context(|| format!("DRA driver {driver} is not registered"))
    }
}

fn with_deadline<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CLAIMS);
    request
}

fn outcome<T>(value: T, error: String) -> Result<T, String> {
    if error.is_empty() { Ok(value) } else { Err(error) }
}

fn old_claim(claim: &Claim) -> v1beta1::Claim {
    v1beta1::Claim { namespace: claim.namespace.clone(), uid: claim.uid.clone(), name: claim.name.clone() }
}

fn new_device(device: v1beta1::Device) -> Device {
    Device {
        request_names: device.request_names,
        pool_name: device.pool_name,
        device_name: device.device_name,
        cdi_device_ids: device.cdi_device_ids,
        share_id: None,
    }
}

fn complete<T>(method: &str, claims: &[Claim], answers: Outcomes<T>) -> anyhow::Result<Outcomes<T>> {
    let skipped = claims.iter().filter(|claim| !answers.contains_key(&claim.uid)).count();
    ensure!(skipped == 0, "{method} skipped {skipped} ResourceClaims");
    Ok(answers)
}

/// Watches the registry.
struct Manager {
    registry: PathBuf,
    versions: Vec<String>,
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<usize>>,
}

impl Manager {
    async fn run(self) {
        let mut seen: HashMap<PathBuf, Seen> = HashMap::new();
        loop {
            let found = sockets(&self.registry);
            seen.retain(|path, known| {
                let stays = found.get(path) == Some(&known.file);
                if !stays {
                    self.forget(path);
                }
                stays
            });
            for (path, file) in found {
                let new = || Seen { file, done: false, next_try: Instant::now(), back_off: BACK_OFF };
                let socket = seen.entry(path.clone()).or_insert_with(new);
                if !socket.done && Instant::now() >= socket.next_try {
                    self.try_register(&path, socket).await;
                }
            }
            sleep(POLL).await;
        }
    }

    async fn try_register(&self, path: &Path, socket: &mut Seen) {
        match self.register(path).await {
            Ok(event) => {
                socket.done = true;
                self.tell(event);
            }
            Err(err) => {
                socket.next_try = Instant::now() + socket.back_off;
                socket.back_off = (socket.back_off * 2).min(BACK_OFF_MAX);
                self.forget(path);
                self.tell(Event::Failed { socket: path.to_owned(), error: format!("{err:#}") });
            }
        }
    }

    async fn register(&self, path: &Path) -> anyhow::Result<Event> {
        let mut connection = h2::Connection::open(path).await?;
        let info: PluginInfo = connection
            .unary("/pluginregistration.Registration/GetInfo", &InfoRequest {}, GET_INFO)
            .await
            .context("failed to get plugin info using RPC GetInfo")?;
        let added = self.add(path, info);
        let error = added.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let status = RegistrationStatus { plugin_registered: added.is_ok(), error };
        let _: RegistrationStatusResponse =
            connection.unary("/pluginregistration.Registration/NotifyRegistrationStatus", &status, NOTIFY).await?;
        added
    }

    fn add(&self, path: &Path, info: PluginInfo) -> anyhow::Result<Event> {
        ensure!(info.r#type == "DRAPlugin", "no handler registered for plugin type: {}", info.r#type);
        ensure!(!info.name.is_empty(), "the plugin has no name");
        let endpoint = if info.endpoint.is_empty() { path.to_owned() } else { PathBuf::from(&info.endpoint) };
        ensure!(endpoint.is_absolute(), "endpoint {} is not absolute", endpoint.display());
        let mut offered = info.supported_versions.iter();
        let Some(version) = offered.find(|version| self.versions.contains(version)).cloned() else {
            bail!(
                "none of services supported by the plugin ({:?}) are supported by the kubelet ({:?})",
                info.supported_versions,
                self.versions
            );
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = state.plugins.iter().any(|plugin| plugin.driver == info.name && plugin.endpoint == endpoint);
        ensure!(!taken, "endpoint {} of driver {} is registered already", endpoint.display(), info.name);
        let channel = channel(endpoint.clone());
        let health = health::pick(&info.supported_versions).map(|service| {
            let stream = health::Stream::new(service, info.name.clone(), channel.clone(), &self.state, &self.changed);
            Arc::new(AbortOnDropHandle::new(tokio::spawn(stream.run())))
        });
        let event = Event::Registered { driver: info.name.clone(), endpoint: endpoint.clone(), version: version.clone() };
        state.plugins.push(Plugin { driver: info.name, socket: path.to_owned(), endpoint, version, channel, _health: health });
        Ok(event)
    }

    fn forget(&self, path: &Path) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = state.plugins.iter().position(|plugin| plugin.socket == path) {
            let driver = state.plugins.remove(at).driver;
            // As the real one does when a stream ends, also when another instance has one.
            state.health.remove(&driver);
            drop(state);
            self.tell(Event::Unregistered { driver });
        }
    }

    fn tell(&self, event: Event) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).events.push(event);
        self.changed.send_modify(|count| *count += 1);
    }
}

/// Sockets in the registry with what tells a file from its successor; names with a dot in front are ignored.
fn sockets(registry: &Path) -> HashMap<PathBuf, (u64, i64, i64)> {
    let entries = std::fs::read_dir(registry).into_iter().flatten().flatten();
    let visible = entries.filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
    visible
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .filter(|(_, meta)| meta.file_type().is_socket())
        .map(|(path, meta)| (path, (meta.ino(), meta.mtime(), meta.mtime_nsec())))
        .collect()
}

/// A client channel to the socket at `path`, with `:authority: localhost` as the kubelet uses for DRA calls.
#[must_use]
pub fn channel(path: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}
