//! The status socket: root only; who connects gets one JSON document.

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use super::status::{ClaimStatus, REGISTERED, Status};
use super::{Shared, in_use, standby};
use crate::attach::Engine;
use crate::dra::grpc::Registration;
use crate::ledger::ClaimRecord;

/// How long a reader may take.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Binds the socket and serves until `stop`; then removes it.
pub(super) async fn serve_status(shared: Arc<Shared>, stop: CancellationToken) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let path = shared.config.status_socket.clone();
    let bound = standby::bind(&shared.board, &stop, || std::future::ready(bind(&path)), is_taken).await;
    let bound = bound.with_context(|| format!("--status-socket {} can't be bound", path.display()))?;
    Ok(tokio::spawn(async move {
        let Some(listener) = bound else { return };
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(answer(stream, shared.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "status socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        // It may be gone already.
        let _ = std::fs::remove_file(&path);
    }))
}

/// Whether [`bind`] failed because somebody answers there.
pub(super) fn is_taken(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::AddrInUse
}

/// Whether root asks, or who runs the agent.
pub(super) fn is_root(stream: &UnixStream) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    matches!(stream.peer_cred().map(|c| c.uid()), Ok(uid) if uid == 0 || uid == own)
}

/// A socket for root only, in place of one where nobody answers any more.
///
/// # Errors
/// What the system says; `AddrInUse` when somebody answers there.
pub(super) fn bind(path: &Path) -> std::io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => {
            match std::os::unix::net::UnixStream::connect(path) {
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {}
                // Also one that is too busy to answer.
                _ => return Err(std::io::Error::new(ErrorKind::AddrInUse, "another agent answers there")),
            }
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(_) => return Err(std::io::Error::new(ErrorKind::AlreadyExists, "it is a file, not a socket")),
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

async fn answer(mut stream: UnixStream, shared: Arc<Shared>) {
    if !is_root(&stream) {
        return;
    }
    // The kernel is asked what is in use.
    let Ok(status) = tokio::task::spawn_blocking(move || status(&shared)).await else { return };
    let text = serde_json::to_vec(&status).unwrap_or_default();
    // A reader that went away or hangs is its own trouble.
    let _ = tokio::time::timeout(WRITE_LIMIT, stream.write_all(&text)).await;
}

fn status(shared: &Shared) -> Status {
    let nri = shared.nri.borrow().clone();
    let published = shared.published.borrow().clone();
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: shared.config.node_name.clone(),
        driver: shared.config.driver_name.clone(),
        nri_connected: nri.connected,
        nri: nri.detail,
        guard_usable: shared.guard.is_some(),
        guard: shared.guard_detail.clone(),
        kubelet: match &*shared.registration.borrow() {
            Registration::Waiting => "waiting for the kubelet".to_owned(),
            Registration::Registered => REGISTERED.to_owned(),
            Registration::Refused(why) => format!("refused: {why}"),
        },
        published_devices: published.published,
        publish_error: published.last_error,
        claims: shared.engine.records().iter().map(|record| claim(&shared.engine, record)).collect(),
        withheld: shared.inventory.current().withheld.clone(),
    }
}

fn claim(engine: &Engine, record: &ClaimRecord) -> ClaimStatus {
    let mut claim = ClaimStatus::from(record);
    for (status, device) in claim.devices.iter_mut().zip(&record.devices) {
        status.rdma_in_use = in_use::of(engine, device);
    }
    claim
}
