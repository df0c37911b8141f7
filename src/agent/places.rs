//! What only one agent of a node can have at a time, beside the ledger: the HTTP address, and the sockets of `dranic status` and of guards.

use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// How long leaving may take.
const LIMIT: Duration = Duration::from_millis(500);

/// The tasks that serve them.
pub(super) struct Places {
    stop: CancellationToken,
    http: JoinSet<anyhow::Result<()>>,
    sockets: Vec<JoinHandle<()>>,
}

impl Places {
    pub(super) fn new(stop: &CancellationToken) -> Self {
        Self { stop: stop.child_token(), http: JoinSet::new(), sockets: Vec::new() }
    }

    /// Tells those who serve to leave.
    pub(super) fn stop(&self) -> CancellationToken {
        self.stop.clone()
    }

    pub(super) fn http(&mut self, serves: impl Future<Output = anyhow::Result<()>> + Send + 'static) {
        self.http.spawn(serves);
    }

    pub(super) fn take(&mut self, socket: JoinHandle<()>) {
        self.sockets.push(socket);
    }

    /// Waits until HTTP ends before it is told to, and says why.
    pub(super) async fn broken(&mut self) -> anyhow::Error {
        match self.http.join_next().await {
            Some(Ok(Err(error))) => error,
            Some(other) => anyhow::anyhow!("the HTTP server ended: {other:?}"),
            None => std::future::pending().await,
        }
    }

    /// Leaves them all. Does nothing the second time.
    pub(super) async fn leave(&mut self) {
        self.stop.cancel();
        let all = async {
            while self.http.join_next().await.is_some() {}
            for socket in self.sockets.drain(..) {
                let _ = socket.await;
            }
        };
        let _ = tokio::time::timeout(LIMIT, all).await;
    }
}
