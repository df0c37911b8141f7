//! A small HTTP server for scenarios in which the agent asks somebody: JSON in, JSON out, one request for each connection.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// node1's address on the nodes' own network, in which the runner is (`up.sh`).
const ADDRESS: &str = "192.168.77.1";
/// Longest body that is read, in bytes.
const BODY_MAX: usize = 1 << 20;

/// Gives the answer for a path and a body; none for 404.
type Answer = dyn Fn(&str, &Value) -> Option<Value> + Send + Sync;

/// Serves until it is dropped.
pub(crate) struct Server {
    pub(crate) url: String,
    calls: Arc<Mutex<Vec<(String, Value)>>>,
    task: JoinHandle<()>,
}

impl Server {
    /// Where agents of all nodes reach it.
    pub(crate) async fn start(answer: impl Fn(&str, &Value) -> Option<Value> + Send + Sync + 'static) -> Result<Self> {
        Self::at(ADDRESS, answer).await
    }

    async fn at(address: &str, answer: impl Fn(&str, &Value) -> Option<Value> + Send + Sync + 'static) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).await.context("a port for the webhook")?;
        let url = format!("http://{}", listener.local_addr()?);
        let calls = Arc::new(Mutex::default());
        let (answer, heard): (Arc<Answer>, _) = (Arc::new(answer), Arc::clone(&calls));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, heard) = (Arc::clone(&answer), Arc::clone(&heard));
                tokio::spawn(async move {
                    if let Err(error) = one(stream, &*answer, &heard).await {
                        println!("        webhook: {error:#}");
                    }
                });
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

async fn one(stream: TcpStream, answer: &Answer, heard: &Mutex<Vec<(String, Value)>>) -> Result<()> {
    let mut stream = BufReader::new(stream);
    let mut first = String::new();
    stream.read_line(&mut first).await?;
    let path = first.split(' ').nth(1).context("no path in the request")?.to_owned();
    let mut length = 0;
    loop {
        let mut line = String::new();
        ensure!(stream.read_line(&mut line).await? > 0, "the request broke off");
        if line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().context("Content-Length")?;
        }
    }
    ensure!(length <= BODY_MAX, "a body of {length} bytes");
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).context("a body that is not JSON")? };
    let (status, text) = match answer(&path, &body) {
        Some(value) => ("200 OK", value.to_string()),
        None => ("404 Not Found", String::new()),
    };
    heard.lock().unwrap_or_else(PoisonError::into_inner).push((path, body));
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    stream.write_all((head + &text).as_bytes()).await?;
    stream.shutdown().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    async fn ask(server: &Server, request: &str) -> String {
        let mut stream = TcpStream::connect(server.url.trim_start_matches("http://")).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn it_answers_and_remembers() {
        let echo = |path: &str, body: &Value| (path != "/none").then(|| json!({"path": path, "had": body}));
        let server = Server::at("127.0.0.1", echo).await.unwrap();
        let text = ask(&server, "POST /a HTTP/1.1\r\nHost: x\r\ncontent-length: 7\r\n\r\n{\"b\":1}").await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains(&format!("Content-Length: {}", body.len())), "{text}");
        assert_eq!(serde_json::from_str::<Value>(body).unwrap(), json!({"path": "/a", "had": {"b": 1}}));
        assert!(ask(&server, "GET /none HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 404 "));
        assert_eq!((server.asked("/a"), server.asked("/none")), (vec![json!({"b": 1})], vec![Value::Null]));
        assert_eq!(ask(&server, "POST /a HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n").await, "");
    }
}
