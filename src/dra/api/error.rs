//! What can go wrong with the API server, and what to do about it.

use std::error::Error;
use std::time::Duration;

/// Why a request to the API server failed. Each text names the request and the next step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// No client could be made.
    #[error(
        "no access to the API server from {source_name}: {cause}; give a readable kubeconfig with --kubeconfig, or run in a pod with a service account"
    )]
    Config {
        /// File, or the service account.
        source_name: String,
        /// Why not.
        cause: String,
    },
    /// 404.
    #[error(
        "{what}: not found ({text}); if nothing else is found either, the server may not serve resource.k8s.io/v1 (Kubernetes 1.34 or later does)"
    )]
    NotFound {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
    },
    /// 401 or 403.
    #[error("{what}: forbidden ({text}); the agent's ClusterRole needs the rule {rule}")]
    Forbidden {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
        /// The RBAC rule that allows it.
        rule: String,
    },
    /// 409: the object changed, or is there already.
    #[error("{what}: conflict ({text}); it is read again and tried again")]
    Conflict {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
    },
    /// 410: a resource version is too old.
    #[error("{what}: the resource version is gone ({text}); it is listed again")]
    Gone {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
    },
    /// 422 or 400: the server refuses the object.
    #[error("{what}: refused as invalid ({text}); correct the named field, or report a bug if you did not set it")]
    Invalid {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
        /// The fields it names.
        fields: Vec<String>,
    },
    /// 429 or 5xx.
    #[error("{what}: the API server answers {status} ({text}); it is tried again, look at the API server if it lasts")]
    Busy {
        /// Which request.
        what: String,
        /// As the server says.
        text: String,
        /// HTTP status.
        status: u16,
        /// The server's wish.
        retry_after: Option<Duration>,
    },
    /// No connection, no answer, or an answer that broke off.
    #[error(
        "{what}: the API server can't be reached ({cause}); it is tried again, check the network and --kubeconfig if it lasts"
    )]
    Unreachable {
        /// Which request.
        what: String,
        /// Why not.
        cause: String,
    },
    /// Anything else.
    #[error("{what}: {text}")]
    Other {
        /// Which request.
        what: String,
        /// What happened.
        text: String,
    },
}

impl ApiError {
    /// Whether the same request may succeed a little later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Unreachable { .. })
    }

    /// How long the server asked us to wait.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// An error with all its causes: the outermost text alone rarely says why.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
