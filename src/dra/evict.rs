//! Evicting a pod through the API: its disruption budget counts, its controller makes another one.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::core::Request;
use kube::core::params::{DeleteParams, Preconditions};
use kube::core::subresource::EvictParams;
use kube::{Client, Resource};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::dra::api::{ApiError, Backoff, Call, OBJECT_MAX, call};
use crate::names::PodUid;

/// How long it is tried: a disruption budget may not allow it yet (429), the API server may be away.
const LIMIT: Duration = Duration::from_secs(600);

/// Evicts the pod, if it is still the one with this UID. One that is gone is success.
///
/// # Errors
/// The last refusal when time ran out, or `stop` came.
pub async fn evict(client: &Client, namespace: &str, name: &str, uid: &PodUid, stop: &CancellationToken) -> Result<(), ApiError> {
    let what = Call::new("create", "", "pods/eviction", format!("{namespace}/{name}"));
    let (end, mut backoff) = (Instant::now() + LIMIT, Backoff::default());
    loop {
        let error = match call(client, &what, request(&what, namespace, name, uid)?, OBJECT_MAX).await {
            // Gone, or another pod has the name by now.
            Ok(_) | Err(ApiError::NotFound { .. } | ApiError::Conflict { .. }) => return Ok(()),
            Err(error) => error,
        };
        let wait = match &error {
            ApiError::Busy { retry_after, .. } => backoff.fail(*retry_after),
            ApiError::Unreachable { .. } => backoff.fail(None),
            _ => return Err(error),
        };
        if Instant::now() + wait > end {
            return Err(error);
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = stop.cancelled() => return Err(error),
        }
    }
}

fn request(what: &Call, namespace: &str, name: &str, uid: &PodUid) -> Result<axum::http::Request<Vec<u8>>, ApiError> {
    let preconditions = Preconditions { uid: Some(uid.to_string()), ..Preconditions::default() };
    let delete_options = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    let params = EvictParams { delete_options: Some(delete_options), ..EvictParams::default() };
    Request::new(Pod::url_path(&(), Some(namespace))).evict(name, &params).map_err(|e| what.other(e.to_string()))
}
