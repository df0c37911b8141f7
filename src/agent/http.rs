//! `/healthz`, `/readyz` and `/metrics`.

use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::dra::grpc::Registration;

/// Binds the address and serves until `stop`.
pub(super) async fn serve(shared: Arc<Shared>, stop: CancellationToken) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let address = shared.config.http_address;
    let listener =
        tokio::net::TcpListener::bind(address).await.with_context(|| format!("--http-address {address} can't be bound"))?;
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(shared);
    Ok(tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
        if let Err(error) = served {
            tracing::error!(%error, "the HTTP server ended");
        }
    }))
}

/// Ready: the kubelet has registered us, the runtime's NRI is synchronised, and slices are published.
async fn ready(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let mut missing = Vec::new();
    match &*shared.registration.borrow() {
        Registration::Registered => {}
        Registration::Waiting => missing.push("the kubelet has not registered the driver yet".to_owned()),
        Registration::Refused(why) => missing.push(format!("the kubelet refused the driver: {why}")),
    }
    let nri = shared.nri.borrow().clone();
    if !nri.connected {
        missing.push(format!("NRI is not connected: {}", nri.detail));
    }
    let published = shared.published.borrow().clone();
    if !published.in_sync {
        let why = published.last_error.unwrap_or_else(|| "not written yet".to_owned());
        missing.push(format!("ResourceSlices are not published: {why}"));
    }
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n")
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Result<String, StatusCode> {
    shared.metrics.encode().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}
