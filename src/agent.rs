//! Starts the legs in order, stops them in order; nothing else.

mod attacher;
mod board;
mod cdi;
mod claims;
mod gate;
mod guard;
mod handover;
mod health;
mod hooks;
mod http;
mod in_use;
mod leases;
mod legs;
mod missed;
mod places;
mod reports;
pub mod returned;
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
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attach::Engine;
use crate::attach::engine::{DeviceSource, lent};
use crate::doubles;
use crate::dra::publisher::{PublishStatus, Shares};
use crate::dra::{api, grpc};
use crate::gate::GuardUse;
use crate::inventory::sysfs::Sysfs;
use crate::inventory::watch::{Inventory, InventoryConfig};
use crate::inventory::{Scan, ScanOptions};
use crate::ledger::{Ledger, LedgerError, Quarantined};
use crate::names::{PodUid, SandboxId};
use crate::netdev::sysctl;
use crate::netns::Netns;
use crate::nri::OciHook;
use crate::nri::session::Margin;
use crate::telemetry::Metrics;

pub use hooks::NriState;
pub use missed::OnMissedSandbox;

use board::{Board, Role};
use legs::Legs;
use places::Places;

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
    /// NICs that several claims may have at the same time.
    pub shares: Shares,
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
    /// How long prepare waits for a DHCP server.
    pub dhcp_timeout: Duration,
    /// Where the runtime mounts network namespaces of pods.
    pub netns_dir: PathBuf,
    /// `/proc/sys/net`, or a mount of it that can be written.
    pub sysctl_dir: PathBuf,
    /// Where the host's bpffs is.
    pub bpffs: PathBuf,
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
    let mut places = Places::new(&stop);
    let Some(opened) = open(&config, &board, &mut signals, &mut places).await? else { return Ok(()) };
    let (reports, waiting) = reports::Reports::new();
    let shared = Arc::new(start(config, opened, board, reports, client.clone(), &stop).await?);
    places.take(sockets::serve_status(shared.clone(), places.stop()).await?);
    let reporting = reports::Reporting::start(&client, &shared, waiting);
    places.take(gate::serve(shared.clone(), places.stop()).await?);
    let result = match Legs::start(&shared, client, reporting, &stop).await {
        Ok(Some(legs)) => legs.run(&mut signals, &mut places).await,
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    stop.cancel();
    // They remove what they bound; also when the legs could not start.
    places.leave().await;
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
    places: &mut Places,
) -> anyhow::Result<Option<(Ledger, Vec<Quarantined>)>> {
    let (address, stop) = (config.http_address, places.stop());
    let opened = match Ledger::open(&config.state_dir) {
        Err(LedgerError::InUse(_)) => None,
        opened => Some(opened?),
    };
    if opened.is_some() {
        if let Some(listener) = http::bind(address, board, &stop).await? {
            places.http(http::serve(listener, board.clone(), stop));
        }
        return Ok(opened);
    }
    board.set_role(Role::Standby);
    let for_http = board.clone();
    places.http(async move {
        match http::bind(address, &for_http, &stop).await? {
            Some(listener) => http::serve(listener, for_http, stop).await,
            None => Ok(()),
        }
    });
    standby::wait(config, board, signals).await
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
    let engine = Engine::new(ledger, host, boot_id, source)
        .with_bpffs(&config.bpffs, &config.driver_name)
        .with_dhcp_timeout(config.dhcp_timeout)
        .with_sysfs(Sysfs::new(&config.sysfs))
        .with_observer(Arc::new(move |o| observer.observe(&o)));
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
