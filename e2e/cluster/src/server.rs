//! A small HTTP server for scenarios in which the agent asks somebody: JSON in, JSON out.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// node1's address on the nodes' own network, in which the runner is (`up.sh`).
const ADDRESS: &str = "192.168.77.1";
/// Longest body that is read, in bytes.
const BODY_MAX: usize = 1 << 20;

/// Paths and bodies, as they came.
type Calls = Arc<Mutex<Vec<(String, Value)>>>;

/// Serves until it is dropped.
pub(crate) struct Server {
    pub(crate) url: String,
    calls: Calls,
    task: JoinHandle<()>,
}

impl Server {
    /// Where agents of all nodes reach it. `answer` gives the answer for a path and a body; none for 404.
    pub(crate) async fn start(answer: impl Fn(&str, &Value) -> Option<Value> + Send + Sync + 'static) -> Result<Self> {
        let listener = TcpListener::bind((ADDRESS, 0)).await.context("a port for the webhook")?;
        let url = format!("http://{}", listener.local_addr()?);
        let (answer, calls) = (Arc::new(answer), Calls::default());
        let heard = Arc::clone(&calls);
        let handle = move |uri: Uri, body: Bytes| {
            let response = respond(uri.path(), &body, &*answer, &heard);
            std::future::ready(response)
        };
        let router = Router::new().fallback(handle).layer(DefaultBodyLimit::max(BODY_MAX));
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                println!("        webhook: {error}");
            }
        });
        Ok(Self { url, calls, task })
    }

    /// Bodies of what was asked at `path`.
    pub(crate) fn asked(&self, path: &str) -> Vec<Value> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.iter().filter(|(at, _)| at == path).map(|(_, body)| body.clone()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn respond(path: &str, body: &[u8], answer: &dyn Fn(&str, &Value) -> Option<Value>, heard: &Calls) -> Response {
    let body = match body {
        [] => Value::Null,
        text => match serde_json::from_slice(text) {
            Ok(value) => value,
            Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
        },
    };
    let response = answer(path, &body).map_or_else(|| StatusCode::NOT_FOUND.into_response(), |value| Json(value).into_response());
    heard.lock().unwrap_or_else(PoisonError::into_inner).push((path.to_owned(), body));
    response
}
