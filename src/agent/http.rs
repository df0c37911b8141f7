//! `/healthz`, `/readyz` and `/metrics`.

use std::io::ErrorKind;
use std::net::SocketAddr;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::board::{Board, Role};
use super::standby;

/// Binds the address; none when `stop` came before it was free.
pub(super) async fn bind(address: SocketAddr, board: &Board, stop: &CancellationToken) -> anyhow::Result<Option<TcpListener>> {
    // Two listeners on one address (SO_REUSEPORT) would share the requests: half of the answers would be the other agent's.
    let bound = standby::bind(board, stop, || TcpListener::bind(address), |e| e.kind() == ErrorKind::AddrInUse);
    bound.await.with_context(|| format!("--http-address {address} can't be bound"))
}

/// Serves until `stop`.
pub(super) async fn serve(listener: TcpListener, board: Board, stop: CancellationToken) -> anyhow::Result<()> {
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(board);
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await.context("the HTTP server ended")
}

/// Ready: the kubelet has registered us, the runtime's NRI is synchronised, and slices are published; or on standby.
async fn ready(State(board): State<Board>) -> (StatusCode, String) {
    let missing = board.missing();
    if !missing.is_empty() {
        return (StatusCode::SERVICE_UNAVAILABLE, missing.join("\n") + "\n");
    }
    let text = match *board.role.borrow() {
        Role::Standby => "standby: another agent has the state directory; this one takes over when it ends\n",
        Role::Alone | Role::Successor => "ok\n",
    };
    (StatusCode::OK, text.to_owned())
}

async fn metrics(State(board): State<Board>) -> Result<String, StatusCode> {
    board.metrics.encode().map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}
