//! The API server as this driver uses it: a client with bounded time and size, and errors that say what to do.

mod error;
mod request;

use std::path::Path;
use std::time::Duration;

use axum::http::header::{HeaderValue, USER_AGENT};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::params::GetParams;
use kube::{Client, Config, Resource};
use tokio::time::Instant;
use tower::util::MapFutureLayer;

pub use error::ApiError;
pub(crate) use request::{Backoff, Call, call, open};

/// How long a connection to the API server may take to come up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an answer may take to begin, a watch's too.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection may be silent. Longer than a watch lives (`dra::publisher` asks for 290 s).
const SILENCE_TIMEOUT: Duration = Duration::from_secs(310);
/// Largest object we read, in bytes: twice the 1.5 MiB that etcd stores by default.
pub const OBJECT_MAX: usize = 3 << 20;
/// How long one try of [`fetch_claim`] may take, so that a stuck connection leaves time for another.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// A claim as the API server has it.
#[derive(Debug, Clone, PartialEq)]
pub struct FetchedClaim {
    /// Decoded.
    pub claim: ResourceClaim,
    /// The JSON text as it was sent: the decoded form has lost keys that stand twice.
    pub raw: String,
}

/// A client from the file at `kubeconfig`, else from the pod's service account. Nothing is sent yet. Requests are not retried
/// by the client itself.
///
/// # Errors
/// [`ApiError::Config`] when the file or the service account can't be used.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ApiError> {
    let config = match kubeconfig {
        Some(path) => from_file(path).await,
        None => Config::incluster().map_err(|e| e.to_string()),
    };
    let source = kubeconfig.map_or_else(|| "the pod's service account".to_owned(), |p| p.display().to_string());
    let refuse = |cause: String| ApiError::Config { source_name: source.clone(), cause };
    let mut config = config.map_err(refuse)?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(ANSWER_TIMEOUT);
    config.read_timeout = Some(SILENCE_TIMEOUT);
    config.reset_reader_on_write = true;
    // Its waits are not bounded by anything we know; each caller has its own deadline.
    config.default_retry = false;
    let agent = HeaderValue::from_static(concat!("dranic/", env!("CARGO_PKG_VERSION")));
    config.headers.push((USER_AGENT, agent));
    let builder = ClientBuilder::try_from(config).map_err(|e| refuse(e.to_string()))?;
    let limit = MapFutureLayer::new(|answer| async {
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(answer) => answer,
            Err(late) => Err(late.into()),
        }
    });
    Ok(builder.with_layer(&limit).build())
}

async fn from_file(path: &Path) -> Result<Config, String> {
    let file = Kubeconfig::read_from(path).map_err(|e| error::chain(&e))?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(|e| error::chain(&e))
}

/// Reads the claim `name` of `namespace`. Trouble that may pass (429, 5xx, no connection) is tried again until `deadline`.
///
/// # Errors
/// See [`ApiError`]; the last trouble where time ran out.
pub async fn fetch_claim(client: &Client, namespace: &str, name: &str, deadline: Instant) -> Result<FetchedClaim, ApiError> {
    let what = Call::new("get", "resource.k8s.io", "resourceclaims", format!("{namespace}/{name}"));
    path_part(&what, namespace)?;
    path_part(&what, name)?;
    let base = ResourceClaim::url_path(&(), Some(namespace));
    let mut backoff = Backoff::default();
    loop {
        let began = Instant::now();
        let left = deadline.saturating_duration_since(began);
        let error = match get(client, &what, &base, name, left.min(TRY_TIMEOUT)).await {
            Ok(raw) => {
                return match serde_json::from_str(&raw) {
                    Ok(claim) => Ok(FetchedClaim { claim, raw }),
                    Err(e) => Err(what.other(format!("the answer is not a ResourceClaim: {e}"))),
                };
            }
            Err(error) => error,
        };
        let wait = backoff.fail(error.retry_after());
        if !error.is_transient() || Instant::now() + wait >= deadline {
            return Err(error);
        }
        tokio::time::sleep(wait).await;
    }
}

/// The UID of the Node `name`.
///
/// # Errors
/// See [`ApiError`].
pub async fn node_uid(client: &Client, name: &str) -> Result<String, ApiError> {
    let what = Call::new("get", "", "nodes", name.to_owned());
    path_part(&what, name)?;
    let raw = get(client, &what, &Node::url_path(&(), None), name, ANSWER_TIMEOUT).await?;
    let node: Node = serde_json::from_str(&raw).map_err(|e| what.other(format!("the answer is not a Node: {e}")))?;
    node.metadata.uid.ok_or_else(|| what.other("the Node has no UID".to_owned()))
}

async fn get(client: &Client, what: &Call, base: &str, name: &str, limit: Duration) -> Result<String, ApiError> {
    let request = kube::core::Request::new(base).get(name, &GetParams::default());
    let request = request.map_err(|e| what.other(e.to_string()))?;
    match tokio::time::timeout(limit, call(client, what, request, OBJECT_MAX)).await {
        Ok(answer) => answer,
        Err(_) => Err(what.unreachable(format!("no answer in {:.1} s", limit.as_secs_f64()))),
    }
}

/// Refuses what would change the path of a request: names of objects are DNS subdomains.
fn path_part(what: &Call, part: &str) -> Result<(), ApiError> {
    let fits = !part.is_empty() && part.len() <= 253 && !part.starts_with('.');
    if fits && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.') {
        return Ok(());
    }
    let shown: String = part.chars().take(64).collect();
    Err(what.other(format!("{shown:?} is not a name of an object (1 to 253 of a-z, 0-9, '-' and '.')")))
}
