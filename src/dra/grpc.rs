//! The sockets the kubelet talks to: registration, and DRA v1 and v1beta1 with the health of devices.
//!
//! [`serve`] binds the DRA socket first, then the registration socket, because the kubelet calls as soon as it sees the latter. Both
//! are put back when their files vanish. Every connection's user is checked, every call bounded, every claim answered.

mod calls;
mod paths;
mod presence;
mod registration;
mod service;
mod socket;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{debug, error, info, warn};

use self::calls::Calls;
use self::paths::Paths;
use self::registration::Registrar;
use self::socket::Socket;
use super::proto::registration::registration_server::RegistrationServer;
use super::proto::{health_v1, health_v1alpha1, v1, v1beta1};
use super::{ClaimHandler, authority, health};

/// How long running calls may take after stop.
pub const DRAIN_MAX: Duration = Duration::from_secs(8);
/// How long connections may take to close after that.
const CLOSE_MAX: Duration = Duration::from_secs(1);
/// Connections accepted but not yet taken by the server.
const BACKLOG: usize = 16;
/// Calls of one connection that may run at once.
const STREAMS_MAX: u32 = 64;
/// Bytes in each direction between the authority filter and the registration server.
const PIPE: usize = 64 * 1024;

/// Where the sockets are, and for whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketConfig {
    /// The kubelet's folder, `/var/lib/kubelet`; it must have the same path for the kubelet and for us.
    pub kubelet_root: PathBuf,
    /// The driver name, a DNS subdomain.
    pub driver: String,
    /// The UID of our pod, when two instances may run at once during a rolling update.
    pub instance: Option<String>,
}

/// What the kubelet says of this driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registration {
    /// Nothing yet, or our socket had vanished and the kubelet will come again.
    Waiting,
    /// The kubelet took us.
    Registered,
    /// The kubelet refused us, and why; it tries again.
    Refused(String),
}

/// Why the sockets can't be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration can't work.
    #[error("kubelet sockets: {reason}")]
    Config {
        /// What is wrong and what to do.
        reason: String,
    },
    /// Something that is not ours to remove has our place.
    #[error("{path} is in the way: {reason}")]
    InTheWay {
        /// The place.
        path: PathBuf,
        /// What is there and what to do.
        reason: String,
    },
    /// The system refused.
    #[error("could not {step} {path}: {source}")]
    Socket {
        /// What was tried.
        step: &'static str,
        /// Of which socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The sockets being served.
pub struct Serving {
    /// What the kubelet says. Every notification counts as a change, also a repeated `Registered`: it means that the kubelet was
    /// restarted, and that it has deleted this node's ResourceSlices.
    pub registered: watch::Receiver<Registration>,
    /// The DRA socket.
    pub endpoint: PathBuf,
    /// The registration socket.
    pub registration_socket: PathBuf,
    task: JoinHandle<()>,
}

impl Serving {
    /// Waits for the end: after stop, at most [`DRAIN_MAX`] and a second. Without stop only when a server broke, which is a bug.
    pub async fn stopped(self) {
        if let Err(err) = self.task.await {
            error!(%err, "the task of the kubelet's sockets failed");
        }
    }
}

/// Whether [`serve`] could use this configuration, as far as that can be told without touching anything.
///
/// # Errors
/// [`ServeError::Config`].
pub fn check(config: &SocketConfig) -> Result<(), ServeError> {
    utf8(&Paths::new(config)?.endpoint).map(drop)
}

/// Serves the kubelet until `stop`. `reports` is what it is told of the devices' health.
///
/// On stop the registration socket goes first, so that the kubelet sends new work elsewhere; then prepares are refused, running calls
/// end within [`DRAIN_MAX`], and the DRA socket goes.
///
/// # Errors
/// When the configuration can't work, when something that is not ours has the place of a socket, or the system refuses.
pub async fn serve<H: ClaimHandler>(
    config: SocketConfig,
    handler: Arc<H>,
    reports: health::Reports,
    stop: CancellationToken,
) -> Result<Serving, ServeError> {
    let paths = Paths::new(&config)?;
    let endpoint = utf8(&paths.endpoint)?;
    let dra_socket = Socket::bind(&paths.endpoint).await?;
    let registration_socket = match Socket::bind(&paths.registration).await {
        Ok(socket) => socket,
        Err(err) => {
            dra_socket.remove();
            return Err(err);
        }
    };
    info!(driver = config.driver, endpoint, registration = %paths.registration.display(), "waiting for the kubelet");
    let (state, registered) = watch::channel(Registration::Waiting);
    let registrar = Registrar { driver: config.driver, endpoint, state: state.clone() };
    let calls = Arc::new(Calls::new(handler));
    let servers = Servers {
        registration: Leg::registration(registration_socket, registrar, state),
        dra: Leg::dra(dra_socket, &calls, reports),
    };
    let task = tokio::spawn(servers.run(calls, stop));
    Ok(Serving { registered, endpoint: paths.endpoint, registration_socket: paths.registration, task })
}

fn utf8(path: &Path) -> Result<String, ServeError> {
    path.to_str().map(Into::into).ok_or_else(|| ServeError::Config { reason: format!("{} is not UTF-8", path.display()) })
}

/// One socket with its server.
struct Leg {
    /// Accepts and watches the file; ends by `closed`.
    keeper: JoinHandle<Socket>,
    closed: CancellationToken,
    /// Serves; ends by `shutdown`, then waits for its connections.
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    shutdown: CancellationToken,
}

impl Leg {
    fn registration(socket: Socket, registrar: Registrar, state: watch::Sender<Registration>) -> Self {
        let (closed, shutdown) = (CancellationToken::new(), CancellationToken::new());
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let lost = move || _ = state.send_replace(Registration::Waiting);
        let keeper = tokio::spawn(socket::keep(socket, sender, with_filter, lost, closed.clone()));
        let incoming = ReceiverStream::new(receiver).map(Ok::<_, io::Error>);
        let server = Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .add_service(RegistrationServer::new(registrar))
            .serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
        Self { keeper, closed, server: tokio::spawn(server), shutdown }
    }

    fn dra<H: ClaimHandler>(socket: Socket, calls: &Arc<Calls<H>>, reports: health::Reports) -> Self {
        let (closed, shutdown) = (CancellationToken::new(), CancellationToken::new());
        // Its streams end by `shutdown`, too: they would keep their connections open.
        let health = Arc::new(health::Service::new(reports, shutdown.clone()));
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let keeper = tokio::spawn(socket::keep(socket, sender, |stream| stream, || (), closed.clone()));
        let incoming = ReceiverStream::new(receiver).map(Ok::<_, io::Error>);
        let server = Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .add_service(v1::dra_plugin_server::DraPluginServer::from_arc(calls.clone()))
            .add_service(v1beta1::dra_plugin_server::DraPluginServer::from_arc(calls.clone()))
            .add_service(health_v1::dra_resource_health_server::DraResourceHealthServer::from_arc(health.clone()))
            .add_service(health_v1alpha1::dra_resource_health_server::DraResourceHealthServer::from_arc(health))
            .serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
        Self { keeper, closed, server: tokio::spawn(server), shutdown }
    }

    /// Stops accepting and removes the file.
    async fn remove(&mut self) {
        self.closed.cancel();
        match (&mut self.keeper).await {
            Ok(socket) => socket.remove(),
            Err(err) => error!(%err, "the task that keeps a socket failed"),
        }
    }

    /// Lets open connections finish, for [`CLOSE_MAX`].
    async fn close(mut self) {
        self.shutdown.cancel();
        // A finished one may have been awaited already, and must not be twice.
        if !self.server.is_finished() && timeout(CLOSE_MAX, &mut self.server).await.is_err() {
            self.server.abort();
        }
    }
}

/// Puts the authority filter in front of the registration server.
fn with_filter(client: UnixStream) -> tokio::io::DuplexStream {
    let (filter_side, server_side) = tokio::io::duplex(PIPE);
    tokio::spawn(async move {
        match authority::relay(client, filter_side).await {
            Err(err @ authority::FilterError::Malformed(_)) => warn!(%err, "closed a connection to the registration socket"),
            Err(err) => debug!(%err, "a connection to the registration socket ended"),
            Ok(()) => {}
        }
    });
    server_side
}

/// Both sockets.
struct Servers {
    registration: Leg,
    dra: Leg,
}

impl Servers {
    async fn run<H: ClaimHandler>(mut self, calls: Arc<Calls<H>>, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => info!("stopping: no new claims from the kubelet"),
            // These end only after `shutdown`; should one break, the agent must not go on half deaf.
            ended = ended(&mut self.registration) => error!(ended, "the registration server broke"),
            ended = ended(&mut self.dra) => error!(ended, "the DRA server broke"),
        }
        self.registration.remove().await;
        if timeout(DRAIN_MAX, calls.drain()).await.is_err() {
            warn!(running = calls.running(), "calls are still running; the kubelet will repeat them");
        }
        self.dra.remove().await;
        tokio::join!(self.registration.close(), self.dra.close());
    }
}

/// Waits for the end of a server, and says how it was.
fn ended(leg: &mut Leg) -> impl Future<Output = String> {
    (&mut leg.server).map(|result| format!("{result:?}"))
}
