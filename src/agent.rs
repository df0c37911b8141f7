//! Starts the legs in order, stops them in order; nothing else.

mod attacher;
mod board;
mod cdi;
mod claims;
mod gate;
mod guard;
mod health;
mod hooks;
mod http;
mod missed;
mod reports;
mod sockets;
mod standby;
pub mod status;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attach::Engine;
use crate::attach::engine::{DeviceSource, lent};
use crate::doubles;
use crate::dra::publisher::{PublishStatus, PublisherConfig};
use crate::dra::{api, grpc, publisher};
use crate::gate::GuardUse;
use crate::inventory::sysfs::Sysfs;
use crate::inventory::watch::{Inventory, InventoryConfig};
use crate::inventory::{Scan, ScanOptions};
use crate::ledger::{Ledger, LedgerError, Quarantined};
use crate::names::{PodUid, SandboxId};
use crate::netdev::sysctl;
use crate::netns::Netns;
use crate::nri::OciHook;
use crate::nri::session::{self, Margin, SessionConfig};
use crate::telemetry::Metrics;

pub use hooks::NriState;
pub use missed::OnMissedSandbox;

use board::{Board, Role};

/// What to do when an attach outlasts the runtime's budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOverrun {
    /// Let it go on; no container of the pod is let through before it is complete.
    Defer,
    /// Fail the sandbox and take everything back.
    Fail,
}

/// How long the runtime is kept waiting for a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// At most so long.
    For(Duration),
    /// As long as its deadline allows.
    Budget,
}

/// Everything the agent was told, checked.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Name of this node in the API.
    pub node_name: String,
    /// Driver name.
    pub driver_name: String,
    /// Kubeconfig; in-cluster where absent.
    pub kubeconfig: Option<PathBuf>,
    /// The kubelet's root folder.
    pub kubelet_root: PathBuf,
    /// UID of this agent's pod.
    pub instance: Option<String>,
    /// The runtime's NRI socket.
    pub nri_socket: PathBuf,
    /// Whether the runtime's NRI is used.
    pub nri: bool,
    /// Two digits.
    pub nri_index: String,
    /// Time left for an answer.
    pub nri_margin: Margin,
    /// Folder of the ledger.
    pub state_dir: PathBuf,
    /// Folder of CDI specs.
    pub cdi_dir: PathBuf,
    /// Socket of `dranic status`.
    pub status_socket: PathBuf,
    /// Socket for guards.
    pub gate_socket: PathBuf,
    /// Where the guard is put on the host; none for no guard.
    pub guard_dir: Option<PathBuf>,
    /// The guard to put there; the one beside this program where absent.
    pub guard_program: Option<PathBuf>,
    /// How long the guard holds a container back.
    pub guard_wait: Duration,
    /// Address of health and metrics.
    pub http_address: SocketAddr,
    /// What to do at the deadline; none: what the guard allows.
    pub on_overrun: Option<OnOverrun>,
    /// How long the runtime waits before an attach goes on behind the gate.
    pub hold: Hold,
    /// What to do about pods that run without their NICs.
    pub on_missed_sandbox: OnMissedSandbox,
    /// What is offered.
    pub offer: ScanOptions,
    /// Time between full rescans.
    pub rescan: Duration,
    /// How long prepare waits for a device that another pod still has.
    pub wait_for_device: Duration,
    /// Where the runtime mounts network namespaces of pods.
    pub netns_dir: PathBuf,
    /// `/proc/sys/net`, or a mount of it that can be written.
    pub sysctl_dir: PathBuf,
    /// Root of sysfs.
    pub sysfs: PathBuf,
}

impl AgentConfig {
    /// What the kubelet's leg has to know.
    #[must_use]
    pub fn kubelet_sockets(&self) -> grpc::SocketConfig {
        grpc::SocketConfig {
            kubelet_root: self.kubelet_root.clone(),
            driver: self.driver_name.clone(),
            instance: self.instance.clone(),
        }
    }
}

/// How long running calls and attaches may take after SIGTERM. With what follows it stays under 10 s.
const STOP_LIMIT: Duration = Duration::from_millis(7500);

/// Without the runtime's NRI the guard is all there is, and it can't be used.
#[derive(Debug, thiserror::Error)]
#[error("--nri=off needs the guard, which can't be used: {0}")]
pub struct NeedsGuard(String);

/// What the legs share.
pub(crate) struct Shared {
    pub(crate) config: AgentConfig,
    pub(crate) engine: Arc<Engine>,
    pub(crate) inventory: Arc<Inventory>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) nri: watch::Sender<NriState>,
    pub(crate) registration: watch::Sender<grpc::Registration>,
    pub(crate) published: watch::Sender<PublishStatus>,
    /// The four before it, and what this agent is to another one.
    pub(crate) board: Board,
    pub(crate) reports: Arc<reports::Reports>,
    pub(crate) attacher: Arc<attacher::Attacher>,
    /// What to do at the deadline.
    pub(crate) on_overrun: OnOverrun,
    pub(crate) client: kube::Client,
    /// The agent is told to stop.
    pub(crate) stop: CancellationToken,
    /// What holds containers back, where it can be used.
    pub(crate) guard: Option<GuardUse>,
    /// Where it is, or why it can't be used.
    pub(crate) guard_detail: String,
    /// Work that outlives the call that began it.
    pub(crate) background: TaskTracker,
}

impl Shared {
    /// What holds a container of the pod back until everything is in place in this sandbox; none where the guard can't be used.
    pub(crate) fn guard_hook(&self, pod: &PodUid, sandbox: &SandboxId) -> Option<OciHook> {
        let hook = self.guard.as_ref()?.hook(&[], Some((pod, sandbox)));
        let timeout = i64::try_from(hook.timeout.as_secs()).unwrap_or(i64::MAX);
        Some(OciHook { path: hook.path.to_string_lossy().into_owned(), args: hook.args, timeout })
    }
}

/// Makes a runtime and runs the agent in it until SIGTERM or SIGINT.
///
/// # Errors
/// When it can't start.
pub fn run_blocking(config: AgentConfig) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .thread_name("dranic")
        .build()
        .context("can't start the runtime's threads")?;
    let result = runtime.block_on(run(config));
    // A thread that hangs in the kernel must not keep the process from ending.
    runtime.shutdown_timeout(Duration::from_millis(500));
    result
}

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// When it can't start; each error names the flag or the file.
pub async fn run(config: AgentConfig) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let stop = CancellationToken::new();
    sysctl::use_root(&config.sysctl_dir).with_context(|| {
        let dir = config.sysctl_dir.display();
        format!("--sysctl-dir {dir} can't be used (in a container, mount the host's /proc/sys/net somewhere and name that)")
    })?;
    let client = api::client(config.kubeconfig.as_deref()).await?;
    let board = Board::new(config.nri);
    let mut http = JoinSet::new();
    let Some(opened) = open(&config, &board, &mut signals, &mut http, &stop).await? else { return Ok(()) };
    let (reports, waiting) = reports::Reports::new();
    let shared = Arc::new(start(config, opened, board, reports, client.clone(), &stop).await?);
    let status = sockets::serve_status(shared.clone(), stop.clone()).await?;
    let reporting = reports::Reporting::start(&client, &shared, waiting);
    let gate_stop = stop.child_token();
    let gate = gate::serve(shared.clone(), gate_stop.clone()).await?;
    let result = serve(&shared, client, &mut signals, &mut http, (&stop, &gate_stop)).await;
    reporting.stop().await;
    stop.cancel();
    // They remove what they bound; also when the other legs could not start.
    let _ = tokio::time::timeout(Duration::from_millis(500), async { tokio::join!(http.join_all(), status, gate) }).await;
    if result.is_ok() {
        tracing::info!("stopped");
    }
    result
}

/// The ledger, as soon as no other agent has it, and HTTP, which answers meanwhile. None when we were told to stop before.
async fn open(
    config: &AgentConfig,
    board: &Board,
    signals: &mut Signals,
    http: &mut JoinSet<anyhow::Result<()>>,
    stop: &CancellationToken,
) -> anyhow::Result<Option<(Ledger, Vec<Quarantined>)>> {
    let address = config.http_address;
    let opened = match Ledger::open(&config.state_dir) {
        Err(LedgerError::InUse(_)) => None,
        opened => Some(opened?),
    };
    if opened.is_some() {
        if let Some(listener) = http::bind(address, board, stop).await? {
            http.spawn(http::serve(listener, board.clone(), stop.clone()));
        }
        return Ok(opened);
    }
    board.set_role(Role::Standby);
    let (for_http, stop) = (board.clone(), stop.clone());
    http.spawn(async move {
        match http::bind(address, &for_http, &stop).await? {
            Some(listener) => http::serve(listener, for_http, stop).await,
            None => Ok(()),
        }
    });
    standby::wait(config, board, signals).await
}

/// The legs, from their start to their end in order.
async fn serve(
    shared: &Arc<Shared>,
    client: kube::Client,
    signals: &mut Signals,
    http: &mut JoinSet<anyhow::Result<()>>,
    (stop, gate_stop): (&CancellationToken, &CancellationToken),
) -> anyhow::Result<()> {
    let config = &shared.config;
    let grpc_stop = CancellationToken::new();
    let specs = Arc::new(cdi::Specs::new(&config.cdi_dir, &config.driver_name, shared.guard.clone()));
    specs.renew(shared.engine.ledger(), true);
    tokio::spawn(cdi::keep(specs.clone(), shared.engine.clone(), config.rescan, stop.clone()));
    let claims = Arc::new(claims::Claims::new(shared.clone(), client.clone(), specs, grpc_stop.clone()));
    let health = health::start(shared.clone(), Netns::current()?, stop.clone());
    let bind = || grpc::serve(config.kubelet_sockets(), claims.clone(), health.clone(), grpc_stop.clone());
    let is_taken = |error: &grpc::ServeError| matches!(error, grpc::ServeError::InTheWay { .. });
    let serving = standby::bind(&shared.board, stop, bind, is_taken)
        .await
        .with_context(|| format!("no sockets for the kubelet in --kubelet-root {}", config.kubelet_root.display()))?;
    let Some(serving) = serving else { return Ok(()) };
    let registration = tokio::spawn(forward(serving.registered.clone(), shared.clone()));
    let nri_stop = CancellationToken::new();
    let nri = match start_nri(shared.clone(), nri_stop.clone()) {
        Ok(nri) => nri,
        Err(error) => {
            grpc_stop.cancel();
            serving.stopped().await;
            return Err(error);
        }
    };
    let publisher = tokio::spawn(publish(client, shared.clone(), stop.clone()));
    tracing::info!(node = %config.node_name, driver = %config.driver_name, "the agent runs");

    let mut serving = tokio::spawn(serving.stopped());
    let broken = tokio::select! {
        signal = signals.wait() => {
            tracing::info!(signal, "stopping: no new prepares");
            None
        }
        _ = &mut serving => Some(anyhow::anyhow!("the sockets for the kubelet broke (see the log)")),
        Some(ended) = http.join_next() => Some(match ended {
            Ok(Err(error)) => error,
            other => anyhow::anyhow!("the HTTP server ended: {other:?}"),
        }),
    };
    let in_order = async {
        grpc_stop.cancel();
        if !serving.is_finished() {
            let _ = serving.await;
        }
        registration.abort();
        nri_stop.cancel();
        gate_stop.cancel();
        let nri = tokio::task::spawn_blocking(move || nri.map(std::thread::JoinHandle::join));
        shared.background.close();
        let _ = tokio::join!(shared.background.wait(), nri);
    };
    if tokio::time::timeout(STOP_LIMIT, in_order).await.is_err() {
        tracing::warn!("an attach or a call still runs; the next start goes on from the ledger");
    }
    stop.cancel();
    let _ = tokio::time::timeout(Duration::from_millis(200), publisher).await;
    broken.map_or(Ok(()), Err)
}

async fn start(
    config: AgentConfig,
    (ledger, bad): (Ledger, Vec<Quarantined>),
    board: Board,
    reports: Arc<reports::Reports>,
    client: kube::Client,
    stop: &CancellationToken,
) -> anyhow::Result<Shared> {
    let boot_id = doubles::boot_id().context("can't read the boot id")?;
    for file in bad {
        tracing::error!(path = %file.path.display(), reason = %file.reason, "a record can't be read and does not count");
    }
    let ledger = Arc::new(ledger);
    let host = Netns::current()?;
    let inventory = Inventory::start(
        InventoryConfig {
            netns: host.try_clone()?,
            sysfs: Sysfs::new(&config.sysfs).with_places(doubles::places()),
            options: config.offer,
            rescan: config.rescan,
        },
        {
            let (ledger, boot_id) = (ledger.clone(), boot_id.clone());
            Arc::new(move || lent(&ledger, &boot_id))
        },
        stop.clone(),
    )
    .await?;
    let inventory = Arc::new(inventory);
    let source = Arc::new(Source { inventory: inventory.clone(), runtime: tokio::runtime::Handle::current() });
    let observer = reports.clone();
    let engine = Engine::new(ledger, host, boot_id, source).with_observer(Arc::new(move |o| observer.observe(&o)));
    let engine = Arc::new(engine);
    {
        let engine = engine.clone();
        tokio::task::spawn_blocking(move || engine.recover()).await.context("recovery failed")?;
    }
    let background = TaskTracker::new();
    let attacher = attacher::Attacher::new(engine.clone(), board.metrics.clone(), reports.clone(), background.clone());
    let (config, guard) = tokio::task::spawn_blocking(|| {
        let guard = guard::install(&config);
        (config, guard)
    })
    .await?;
    let (guard, guard_detail) = match guard {
        Ok(guard) => {
            tracing::info!(program = %guard.program.display(), "the guard is installed");
            let detail = guard.program.display().to_string();
            (Some(guard), detail)
        }
        Err(why) if !config.nri => return Err(NeedsGuard(why).into()),
        Err(why) => {
            tracing::warn!(
                why,
                "no guard: a container whose sandbox was missed is held back only while the runtime asks this agent"
            );
            (None, why)
        }
    };
    board.metrics.guard_usable.set(i64::from(guard.is_some()));
    let by_guard = if guard.is_some() { OnOverrun::Defer } else { OnOverrun::Fail };
    Ok(Shared {
        on_overrun: config.on_overrun.unwrap_or(by_guard),
        guard,
        guard_detail,
        metrics: board.metrics.clone(),
        attacher,
        engine,
        inventory,
        nri: board.nri.clone(),
        registration: board.registration.clone(),
        published: board.published.clone(),
        board,
        reports,
        client,
        stop: stop.clone(),
        background,
        config,
    })
}

struct Source {
    inventory: Arc<Inventory>,
    runtime: tokio::runtime::Handle,
}

impl DeviceSource for Source {
    fn current(&self) -> Arc<Scan> {
        self.inventory.current()
    }

    fn rescan(&self) -> Arc<Scan> {
        self.runtime.block_on(self.inventory.rescan_now())
    }
}

/// The NRI leg has a thread and a runtime of its own: every pod of the node waits for its answers, and one thread answers
/// without waking others.
fn start_nri(shared: Arc<Shared>, stop: CancellationToken) -> anyhow::Result<Option<std::thread::JoinHandle<()>>> {
    if !shared.config.nri {
        shared.nri.send_replace(NriState { connected: false, detail: "off (--nri=off)".to_owned() });
        return Ok(None);
    }
    let config = SessionConfig::new(
        shared.config.nri_socket.clone(),
        &shared.config.driver_name,
        &shared.config.nri_index,
        shared.config.nri_margin,
        tokio::runtime::Handle::current(),
    )?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start the NRI leg")?;
    let hooks = Arc::new(hooks::Hooks::new(shared));
    let thread = std::thread::Builder::new()
        .name("dranic-nri".to_owned())
        .spawn(move || runtime.block_on(session::run(config, hooks, stop)))
        .context("can't start the NRI leg's thread")?;
    Ok(Some(thread))
}

async fn forward(mut from: watch::Receiver<grpc::Registration>, shared: Arc<Shared>) {
    loop {
        let state = from.borrow_and_update().clone();
        shared.registration.send_replace(state);
        if from.changed().await.is_err() {
            return;
        }
    }
}

async fn publish(client: kube::Client, shared: Arc<Shared>, stop: CancellationToken) {
    let driver = shared.config.driver_name.clone();
    let (devices, receiver) = watch::channel(Arc::new(Vec::new()));
    let mut scans = shared.inventory.subscribe();
    let config = PublisherConfig { driver: driver.clone(), node_name: shared.config.node_name.clone() };
    let convert = async {
        loop {
            let scan = scans.borrow_and_update().clone();
            let (all, refused) = publisher::devices(&scan, &driver);
            for why in refused {
                tracing::warn!(why, "not published");
            }
            shared.metrics.devices.set(i64::try_from(all.len()).unwrap_or(i64::MAX));
            devices.send_replace(Arc::new(all));
            if scans.changed().await.is_err() {
                return;
            }
        }
    };
    // The first list is there before the publisher looks: it must not publish an empty one.
    tokio::pin!(convert);
    tokio::select! {
        biased;
        () = &mut convert => {}
        () = publisher::run(client, config, receiver, shared.published.clone(), stop) => {}
    }
}

struct Signals {
    term: tokio::signal::unix::Signal,
    int: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}
