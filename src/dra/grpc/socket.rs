//! One listening socket: bound with care, watched, put back when its file vanishes, removed at the end.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::ServeError;
use super::presence::Presence;

/// How often the file is looked for where its folder can't be watched, or it could not be put back. The kubelet un-registers a
/// driver within 1 s after its socket vanished and deletes its slices 30 s later; a look is one `lstat`.
const RECHECK: Duration = Duration::from_secs(1);
/// How often although the folder is watched: a mount over it, or a folder above that is moved, is no event.
const SLOW_RECHECK: Duration = Duration::from_secs(60);
/// How long a connect to a file in our place may take before the file counts as alive.
const PROBE: Duration = Duration::from_secs(1);
/// Pause after accept failed (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket and its file.
pub(super) struct Socket {
    path: PathBuf,
    /// Device and inode of the file. While we listen the kernel holds the inode, so nobody else can get its number.
    file: (u64, u64),
    listener: UnixListener,
}

impl Socket {
    /// Makes the folder (0750) if it is missing, removes a stale socket, binds, and lets only root call (0600).
    pub(super) async fn bind(path: &Path) -> Result<Self, ServeError> {
        let failed = |step: &'static str| move |source| ServeError::Socket { step, path: path.to_owned(), source };
        if let Some(dir) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o750).create(dir).map_err(failed("make the folder of"))?;
        }
        remove_stale(path).await?;
        let listener = UnixListener::bind(path).map_err(failed("bind"))?;
        // Whoever connects before this line is still refused by the check of the peer's uid.
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed("set the mode of"))?;
        let meta = fs::symlink_metadata(path).map_err(failed("look at"))?;
        Ok(Self { path: path.to_owned(), file: (meta.dev(), meta.ino()), listener })
    }

    /// Whether the file is still there, and ours.
    fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == self.file)
    }

    /// Removes the file if it is ours, and stops listening.
    pub(super) fn remove(self) {
        if self.is_in_place()
            && let Err(err) = fs::remove_file(&self.path)
        {
            warn!(path = %self.path.display(), %err, "could not remove our socket");
        }
    }
}

/// Removes a socket that a dead process of ours left at `path`.
async fn remove_stale(path: &Path) -> Result<(), ServeError> {
    let in_the_way = |reason: String| ServeError::InTheWay { path: path.to_owned(), reason };
    let failed = |step: &'static str| move |source| ServeError::Socket { step, path: path.to_owned(), source };
    let meta = match fs::symlink_metadata(path) {
        Err(err) if err.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(failed("look at"))?,
    };
    if !meta.file_type().is_socket() {
        return Err(in_the_way("it is not a socket; remove it".into()));
    }
    if meta.uid() != geteuid().as_raw() {
        return Err(in_the_way(format!("it belongs to uid {}, not to us; remove it", meta.uid())));
    }
    match timeout(PROBE, UnixStream::connect(path)).await {
        // Nobody listens, or the file has just gone.
        Ok(Err(err)) if matches!(err.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => {}
        Ok(Ok(live)) => {
            let pid = live.peer_cred().ok().and_then(|cred| cred.pid()).filter(|pid| *pid > 0);
            let who = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
            return Err(in_the_way(format!("{who} listens there; stop it, or give each instance its pod UID")));
        }
        Ok(Err(err)) => return Err(in_the_way(format!("it could not be probed: {err}"))),
        Err(_) => return Err(in_the_way("its listener does not accept connections".into())),
    }
    info!(path = %path.display(), "removing a stale socket");
    match fs::remove_file(path) {
        Err(err) if err.kind() != io::ErrorKind::NotFound => Err(failed("remove the stale")(err)),
        _ => Ok(()),
    }
}

/// Accepts until `stop`, hands each trusted connection through `wrap` to `connections`, and puts the file back when it vanishes.
///
/// Calls `lost` when the file was found missing. Returns the socket, still bound.
pub(super) async fn keep<C>(
    mut socket: Socket,
    connections: mpsc::Sender<C>,
    wrap: impl Fn(UnixStream) -> C,
    lost: impl Fn(),
    stop: CancellationToken,
) -> Socket {
    let mut folder = watch_folder(&socket.path);
    // The first look comes after the watch began, so that nothing is missed between.
    let mut next_look = Instant::now();
    let mut missing = false;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return socket,
            () = change_or(&mut folder, next_look) => {
                if socket.is_in_place() {
                    missing = false;
                    next_look = Instant::now() + if folder.is_some() { SLOW_RECHECK } else { RECHECK };
                    continue;
                }
                if !missing {
                    lost();
                }
                socket = put_back(socket, missing).await;
                // The folder may have been made anew, too.
                folder = watch_folder(&socket.path);
                missing = true;
                next_look = Instant::now() + RECHECK;
            }
            accepted = socket.listener.accept() => match accepted {
                Ok((stream, _)) if is_trusted(&stream, &socket.path) => {
                    // Fails only when the server has ended; then the connection is closed, as it is dropped.
                    let _ = connections.send(wrap(stream)).await;
                }
                Ok(_) => {}
                Err(err) => {
                    error!(path = %socket.path.display(), %err, "accept failed");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

/// None where it can't be watched: then it is looked at more often.
fn watch_folder(path: &Path) -> Option<Presence> {
    let watched = Presence::watch(path.parent()?);
    watched.inspect_err(|err| debug!(path = %path.display(), %err, "can't watch the folder of our socket")).ok()
}

/// Waits for a change in the folder, or until `next_look`. A watch that broke is given up.
async fn change_or(folder: &mut Option<Presence>, next_look: Instant) {
    let changed = async {
        match folder.as_ref() {
            Some(presence) => presence.changed().await,
            None => std::future::pending().await,
        }
    };
    if let Ok(Err(err)) = timeout_at(next_look, changed).await {
        debug!(%err, "the watch on the folder of our socket broke");
        *folder = None;
    }
}

/// Binds again. When that fails the old listener stays, the next look tries again, and `quiet` says that it was logged already.
async fn put_back(socket: Socket, quiet: bool) -> Socket {
    let path = socket.path.display();
    match Socket::bind(&socket.path).await {
        Ok(new) => {
            warn!(%path, "our socket had vanished; it is back");
            return new;
        }
        Err(err) if quiet => debug!(%path, %err, "our socket can still not be put back"),
        Err(err) => error!(%path, %err, "our socket has vanished and can't be put back; trying again every second"),
    }
    socket
}

/// Only root, or whoever we run as, may call.
fn is_trusted(stream: &UnixStream, path: &Path) -> bool {
    match stream.peer_cred() {
        Ok(cred) if cred.uid() == 0 || cred.uid() == geteuid().as_raw() => true,
        Ok(cred) => {
            warn!(path = %path.display(), uid = cred.uid(), pid = cred.pid(), "closed a connection: only root may call");
            false
        }
        Err(err) => {
            warn!(path = %path.display(), %err, "closed a connection: its user is unknown");
            false
        }
    }
}
