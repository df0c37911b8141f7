//! The end of an agent for which another one waits: the node goes from one to the other without a moment in which the kubelet has no
//! driver to ask. A kubelet (1.37) that finds none tries again only after 60 to 90 s.
//!
//! The places that both need go first (HTTP, `dranic status`, the guards' socket, NRI), then the ledger. The DRA socket stays until the
//! other agent is registered with the kubelet, and calls that come to it go there.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::OwnedRwLockWriteGuard;

use super::Shared;
use super::claims::{Claims, Mode};
use super::status::{REGISTERED, Status};
use crate::dra::peer;

/// How long the other agent may take to be registered: some 100 ms, and up to a second of the kubelet's.
const LIMIT: Duration = Duration::from_secs(3);
/// How long calls of the kubelet that run may take to end.
const CALLS: Duration = Duration::from_secs(5);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// Lets calls of the kubelet wait, once those that run have ended.
///
/// # Errors
/// When one takes too long.
pub(super) async fn pause(claims: &Claims) -> anyhow::Result<OwnedRwLockWriteGuard<Mode>> {
    tokio::time::timeout(CALLS, claims.pause()).await.context("a call of the kubelet still runs")
}

/// Hands the ledger over, and waits until the other agent works. Nobody may write to the ledger any more.
///
/// # Errors
/// Why the other agent does not work yet: it will when this one is gone.
pub(super) async fn hand_over(shared: &Shared, mut mode: OwnedRwLockWriteGuard<Mode>, endpoint: &Path) -> anyhow::Result<()> {
    let begin = Instant::now();
    // From here on nothing is this agent's to do, also where the other one does not come.
    *mode = Mode::Nobody;
    shared.engine.ledger().hand_over();
    let other = until("it has no DRA socket", || peer::find(endpoint)).await?;
    *mode = Mode::Successor(other);
    drop(mode);
    until("the kubelet has not registered it", || is_registered(&shared.config.status_socket)).await?;
    tracing::info!(took = ?begin.elapsed(), "handed over");
    Ok(())
}

async fn until<T, F: Future<Output = Option<T>>>(what: &str, look: impl Fn() -> F) -> anyhow::Result<T> {
    let begin = Instant::now();
    loop {
        if let Some(found) = look().await {
            return Ok(found);
        }
        ensure!(begin.elapsed() < LIMIT, "the agent that takes over is not there after {LIMIT:?}: {what}");
        tokio::time::sleep(LOOK).await;
    }
}

/// By what it says itself. Our own socket is gone by now.
async fn is_registered(socket: &Path) -> Option<()> {
    (status(socket).await.ok()?.kubelet == REGISTERED).then_some(())
}

async fn status(socket: &Path) -> anyhow::Result<Status> {
    let read = async {
        let mut bytes = Vec::new();
        UnixStream::connect(socket).await?.read_to_end(&mut bytes).await?;
        anyhow::Ok(bytes)
    };
    let bytes = tokio::time::timeout(LIMIT, read).await.context("no answer")??;
    Ok(serde_json::from_slice(&bytes)?)
}
