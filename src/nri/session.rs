//! Connect, register, serve, and again when the connection ends.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use ttrpc::Request;
use ttrpc::r#async::transport::Socket;
use ttrpc::r#async::{Client, Server};

pub use super::dispatch::Margin;
use super::dispatch::{Dispatcher, Progress, serve};
use super::mux::{self, Trunk};
use super::{SandboxHandler, proto};

/// Service we call.
const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The protocol this was written against; runtimes only log it.
const NRI_VERSION: &str = "v0.12.5";
/// For RegisterPlugin, and from there to Configure. Long: the runtime takes plugins one by one, and a silent one before us costs its
/// registration timeout of 5 s. A lost connection ends the wait at once.
const REGISTER_LIMIT: Duration = Duration::from_secs(30);
/// For hooks under way when we are told to stop; longer than any usual request timeout.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// For the last bytes to leave after that.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// While nobody listens: for how long since the runtime was there (or since we began), and how often it is tried then. A try is one
/// system call that fails at once, and pods that a runtime makes after a restart and before we are back are made without us.
const ABSENT: [(Duration, Duration); 3] = [
    (Duration::from_secs(30), Duration::from_millis(20)),
    (Duration::from_secs(300), Duration::from_millis(200)),
    (Duration::MAX, Duration::from_millis(800)),
];

/// A name or index no runtime accepts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Empty, or with a character that is not allowed.
    #[error("NRI plugin name {0:?}: use one or more of letters, digits, '_', '.', '+' and '-'")]
    Name(String),
    /// Not two digits.
    #[error("NRI plugin index {0:?}: use two digits, \"00\" to \"99\"")]
    Index(String),
}

/// How to connect and as whom.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    socket: PathBuf,
    plugin_name: String,
    plugin_index: String,
    margin: Margin,
    executor: Handle,
}

impl SessionConfig {
    /// A session at `socket` (usually `/var/run/nri/nri.sock`) as plugin `plugin_index`-`plugin_name`. Hooks run on `executor`,
    /// which may be another runtime than the one that runs the session.
    ///
    /// # Errors
    /// If a runtime would refuse the name or the index.
    pub fn new(
        socket: impl Into<PathBuf>,
        plugin_name: &str,
        plugin_index: &str,
        margin: Margin,
        executor: Handle,
    ) -> Result<Self, ConfigError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c);
        if plugin_name.is_empty() || !plugin_name.chars().all(allowed) {
            return Err(ConfigError::Name(plugin_name.to_owned()));
        }
        if plugin_index.len() != 2 || !plugin_index.bytes().all(|b| b.is_ascii_digit()) {
            return Err(ConfigError::Index(plugin_index.to_owned()));
        }
        let (plugin_name, plugin_index) = (plugin_name.to_owned(), plugin_index.to_owned());
        Ok(Self { socket: socket.into(), plugin_name, plugin_index, margin, executor })
    }
}

/// Why a connection, or the attempt, ended.
#[derive(Debug)]
enum End {
    /// We were told to stop.
    Stopped,
    /// Nobody listens at the socket.
    Absent(String),
    /// It ended before Synchronize was done.
    Failed(String),
    /// It was up and is gone.
    Lost(String),
}

/// Keeps a session with the runtime until `stop`, for ever if need be: a runtime that is away, restarts or refuses is tried again.
/// `handler.connection` tells when the connection is up and why it is not. Returns when hooks under way at `stop` were answered.
pub async fn run<H: SandboxHandler>(config: SessionConfig, handler: Arc<H>, stop: CancellationToken) {
    let mut delay = Backoff::default();
    let mut told = String::new();
    let mut gone = Instant::now();
    loop {
        let end = tokio::select! {
            connected = UnixStream::connect(&config.socket) => match connected {
                Ok(stream) => connection(&config, &handler, &stop, stream).await,
                Err(error) => not_connected(&config, &error),
            },
            () = stop.cancelled() => End::Stopped,
        };
        let (reason, pause) = match end {
            End::Stopped => return handler.connection(false, "the agent stops"),
            End::Absent(reason) => (reason, absent(gone.elapsed())),
            End::Failed(reason) => (reason, delay.next()),
            End::Lost(reason) => {
                delay = Backoff::default();
                gone = Instant::now();
                told.clear();
                (reason, delay.next())
            }
        };
        if reason != told {
            tracing::warn!(%reason, "not connected to the container runtime; trying again");
            handler.connection(false, &reason);
            told = reason;
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = stop.cancelled() => {}
        }
    }
}

fn not_connected(config: &SessionConfig, error: &io::Error) -> End {
    let reason = format!("connect to {}: {error}; is the runtime running with NRI enabled?", config.socket.display());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => End::Absent(reason),
        _ => End::Failed(reason),
    }
}

/// One connection from its first byte to its last.
async fn connection<H: SandboxHandler>(
    config: &SessionConfig,
    handler: &Arc<H>,
    stop: &CancellationToken,
    stream: UnixStream,
) -> End {
    let (reader, writer) = stream.into_split();
    let (trunk, [plugin, runtime]) = mux::start(reader, writer, [mux::PLUGIN_SERVICE, mux::RUNTIME_SERVICE]);
    let dispatcher = Dispatcher::new(handler.clone(), config.executor.clone(), config.margin, config.plugin_name.clone());
    let progress = dispatcher.progress();
    // Served before we register: Configure may come before the answer to RegisterPlugin.
    let mut server = match serve(plugin, Arc::new(dispatcher)).await {
        Ok(server) => server,
        Err(error) => return End::Failed(format!("can't serve the NRI connection: {error}")),
    };
    // Lives as long as the connection: a logical connection that is dropped closes the whole.
    let client = Client::new(Socket::new(runtime));
    let end = tokio::select! {
        biased;
        () = stop.cancelled() => End::Stopped,
        ready = handshake(config, &client, progress) => match ready {
            Ok(peer) => serve_until_end(&**handler, &trunk, stop, &peer).await,
            Err(reason) => End::Failed(reason),
        },
        reason = trunk.closed() => End::Failed(format!("{reason}, before it had synchronised with us")),
    };
    if matches!(end, End::Stopped) {
        finish(&mut server, &trunk).await;
    }
    trunk.shut_down("closed by the agent").await;
    end
}

/// Registers and waits until the runtime has configured and synchronised us; returns its name and version.
async fn handshake(config: &SessionConfig, client: &Client, mut progress: watch::Receiver<Progress>) -> Result<String, String> {
    register(config, client).await?;
    if timeout(REGISTER_LIMIT, progress.wait_for(|progress| progress.runtime.is_some())).await.is_err() {
        return Err(format!("registered, but not configured within {REGISTER_LIMIT:?}"));
    }
    // No limit: the runtime waits here until no pod operation is under way. A lost connection ends the wait.
    match progress.wait_for(|progress| progress.synchronised).await {
        Ok(progress) => Ok(progress.runtime.clone().unwrap_or_default()),
        Err(_) => Err("the NRI service ended".to_owned()),
    }
}

async fn register(config: &SessionConfig, client: &Client) -> Result<(), String> {
    let registration = proto::RegisterPluginRequest {
        plugin_name: config.plugin_name.clone(),
        plugin_idx: config.plugin_index.clone(),
        nri_version: NRI_VERSION.to_owned(),
    };
    let mut request = Request::new();
    request.service = RUNTIME.to_owned();
    request.method = "RegisterPlugin".to_owned();
    request.timeout_nano = REGISTER_LIMIT.as_nanos() as i64;
    request.payload = registration.encode_to_vec();
    let name = format!("{}-{}", config.plugin_index, config.plugin_name);
    match client.request(request).await {
        Ok(_) => Ok(()),
        Err(ttrpc::Error::RpcStatus(status)) => Err(format!("the runtime refused plugin {name}: {}", status.message)),
        Err(error) => Err(format!("registration of plugin {name} failed: {error}")),
    }
}

async fn serve_until_end<H: SandboxHandler>(handler: &H, trunk: &Trunk, stop: &CancellationToken, peer: &str) -> End {
    tracing::info!(runtime = %peer, "connected to the container runtime");
    handler.connection(true, peer);
    tokio::select! {
        biased;
        reason = trunk.closed() => End::Lost(reason),
        () = stop.cancelled() => End::Stopped,
    }
}

/// Takes no more requests, lets those under way be answered, and sees their bytes out.
async fn finish(server: &mut Server, trunk: &Trunk) {
    if timeout(STOP_LIMIT, server.disconnect()).await.is_err() {
        tracing::warn!("hooks were still running when the NRI connection was closed");
    }
    let _ = timeout(FLUSH_LIMIT, trunk.closed()).await;
}

/// Until the next try, when nobody has listened for so long.
fn absent(since: Duration) -> Duration {
    ABSENT.iter().find(|(until, _)| since < *until).map_or(LONGEST_DELAY, |(_, delay)| *delay)
}

/// Delays between attempts that a runtime refused: doubling, shortened by up to a quarter so that the nodes of a cluster do not move in
/// step.
#[derive(Debug)]
struct Backoff {
    delay: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { delay: FIRST_DELAY }
    }
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let delay = self.delay;
        self.delay = (delay * 2).min(LONGEST_DELAY);
        // Each RandomState has other keys; that is all the randomness needed here.
        let random = RandomState::new().hash_one(()) % 256;
        delay - delay / 4 * random as u32 / 256
    }
}

#[cfg(test)]
mod tests;
