//! How long the runtime itself waits for a request: it has its own deadline (the kubelet's), and may be told to give up.

use std::time::{Duration, Instant};

/// The runtime's own limits for one request over all plugins, from its begin; none by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caller {
    /// The request's time is over.
    pub deadline: Option<Duration>,
    /// The request is cancelled. The plugins are not told.
    pub cancel: Option<Duration>,
}

impl Caller {
    /// The limits of a request that begins now.
    pub(super) fn begun(self) -> Patience {
        let now = Instant::now();
        Patience { deadline: self.deadline.map(|time| now + time), cancel: self.cancel.map(|time| now + time) }
    }
}

/// The limits of a request under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    deadline: Option<Instant>,
    cancel: Option<Instant>,
}

impl Patience {
    /// What a plugin has of its own `limit`.
    pub(super) fn left(self, limit: Duration) -> Duration {
        self.deadline.map_or(limit, |deadline| limit.min(deadline.saturating_duration_since(Instant::now())))
    }

    /// Whether the runtime has given up.
    pub(super) fn is_over(self) -> bool {
        [self.deadline, self.cancel].into_iter().flatten().any(|end| end <= Instant::now())
    }

    /// Ends when the request is cancelled.
    pub(super) async fn cancelled(self) {
        match self.cancel {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    }
}
