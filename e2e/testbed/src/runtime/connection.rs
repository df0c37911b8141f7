//! One connected plugin: ttrpc client on connection 1, ttrpc server on connection 2.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prost::Message as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::log::{Log, What};
use super::wire::{self, GoReader, Message, Request, Response, Status};

/// Service of the plugin.
pub(super) const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";
/// Service of the runtime.
pub(super) const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
/// gRPC code of a missing method.
pub(super) const UNIMPLEMENTED: i32 = 12;
/// Frames kept for a test to look at.
const KEPT_FRAMES: usize = 10_000;

/// How a call of the plugin failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// It answered with a status.
    Explicit(i32, String),
    /// Its answer is no protobuf message. That is no worse than an error of its own.
    Unreadable(String),
    /// It did not answer in time.
    Timeout,
    /// The runtime gave up.
    Cancelled,
    /// The connection ended.
    Lost(String),
    /// It sent what no unary call may be answered with.
    Protocol(String),
}

/// A plugin's connection.
pub(super) struct Connection {
    /// Cancelled when the connection is closed.
    pub(super) closed: CancellationToken,
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    calls: Mutex<HashMap<u32, oneshot::Sender<Message>>>,
    next_stream: AtomicU32,
    reason: Mutex<String>,
    /// Connection id and size of each frame the plugin sent.
    frames: Mutex<Vec<(u32, usize)>>,
}

impl Connection {
    /// Starts reading; returns the plugin's own requests as they come.
    pub(super) fn start(stream: UnixStream, log: Arc<Log>) -> (Arc<Self>, mpsc::Receiver<(u32, Request)>) {
        let (reader, writer) = stream.into_split();
        let (requests, incoming) = mpsc::channel(16);
        let connection = Arc::new(Self {
            closed: CancellationToken::new(),
            writer: writer.into(),
            calls: Mutex::default(),
            next_stream: AtomicU32::new(1),
            reason: Mutex::default(),
            frames: Mutex::default(),
        });
        let reading = connection.clone();
        tokio::spawn(async move {
            let reason = tokio::select! {
                reason = reading.read(reader, requests, &log) => reason,
                () = reading.closed.cancelled() => return,
            };
            reading.close(&reason).await;
        });
        (connection, incoming)
    }

    /// Closes both directions.
    pub(super) async fn close(&self, reason: &str) {
        {
            let mut first = locked(&self.reason);
            if first.is_empty() {
                reason.clone_into(&mut first);
            }
        }
        self.closed.cancel();
        locked(&self.calls).clear();
        let mut writer = self.writer.lock().await;
        // An error means that it is closed already.
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut *writer).await;
    }

    /// Why it was closed.
    pub(super) fn reason(&self) -> String {
        locked(&self.reason).clone()
    }

    /// Connection id and size of each frame the plugin has sent so far.
    pub(super) fn frames(&self) -> Vec<(u32, usize)> {
        locked(&self.frames).clone()
    }

    async fn read(&self, mut socket: OwnedReadHalf, requests: mpsc::Sender<(u32, Request)>, log: &Log) -> String {
        let mut readers = [GoReader::default(), GoReader::default()];
        loop {
            let (id, payload) = match wire::read_frame(&mut socket).await {
                Ok(frame) => frame,
                Err(error) => return format!("ttrpc: closed ({error})"),
            };
            if locked(&self.frames).len() < KEPT_FRAMES {
                locked(&self.frames).push((id, payload.len()));
            }
            let Some(reader) = (id as usize).checked_sub(1).and_then(|index| readers.get_mut(index)) else { continue };
            let messages = match reader.frame(&payload) {
                Ok(messages) => messages,
                Err(error) => return format!("connection {id}: {error}"),
            };
            for message in messages {
                if id == 1 {
                    self.complete(message, log);
                } else if let Ok(request) = Request::decode(&message.data[..]) {
                    // Nobody takes them after the handshake: NRI's plugins may then only update containers.
                    let _ = requests.try_send((message.stream, request));
                }
            }
        }
    }

    fn complete(&self, message: Message, log: &Log) {
        match locked(&self.calls).remove(&message.stream) {
            // An error means that the call has just timed out.
            Some(waiting) => drop(waiting.send(message)),
            None => log.add("", What::LateAnswer),
        }
    }

    /// Calls a method of the plugin as Go does.
    ///
    /// # Errors
    /// All the ways such a call can fail.
    pub(super) async fn call(&self, method: &str, payload: Vec<u8>, limit: Duration) -> Result<Vec<u8>, Failure> {
        let stream = self.next_stream.fetch_add(2, Ordering::Relaxed);
        // Go sends a request whose time is over, too: with what it is late.
        let timeout_nano = if limit.is_zero() { -1 } else { i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX) };
        let request = Request { service: PLUGIN.to_owned(), method: method.to_owned(), payload, timeout_nano };
        let message = Message { stream, kind: wire::REQUEST, data: request.encode_to_vec() };
        if message.data.len() > wire::MAX_DATA {
            return Err(Failure::Explicit(8, "message exceeds the limit".to_owned()));
        }
        let (sender, answer) = oneshot::channel();
        locked(&self.calls).insert(stream, sender);
        let exchange = async {
            self.send(1, &message).await?;
            if limit.is_zero() {
                return Err(Failure::Timeout);
            }
            answer.await.map_err(|_| Failure::Lost(self.reason()))
        };
        let answer = tokio::select! {
            // An answer counts even if the connection ends right behind it.
            biased;
            answer = tokio::time::timeout(limit, exchange) => answer,
            () = self.closed.cancelled() => Ok(Err(Failure::Lost(self.reason()))),
        };
        locked(&self.calls).remove(&stream);
        match answer {
            Err(_) => Err(Failure::Timeout),
            Ok(answer) => decode(&answer?),
        }
    }

    /// Answers a request of the plugin.
    ///
    /// # Errors
    /// If the connection is gone.
    pub(super) async fn answer(&self, stream: u32, status: Option<Status>) -> Result<(), Failure> {
        let data = Response { status, payload: Vec::new() }.encode_to_vec();
        self.send(2, &Message { stream, kind: wire::RESPONSE, data }).await
    }

    async fn send(&self, id: u32, message: &Message) -> Result<(), Failure> {
        let mut writer = self.writer.lock().await;
        let sent = wire::write_message(&mut *writer, id, message).await;
        sent.map_err(|error| Failure::Lost(format!("ttrpc: closed ({error})")))
    }
}

fn decode(message: &Message) -> Result<Vec<u8>, Failure> {
    if message.kind != wire::RESPONSE {
        return Err(Failure::Protocol(format!("message type {} on a unary stream: protocol error", message.kind)));
    }
    let response = Response::decode(&message.data[..]).map_err(|error| Failure::Unreadable(format!("proto: {error}")))?;
    match response.status {
        Some(status) if status.code != 0 => Err(Failure::Explicit(status.code, status.message)),
        _ => Ok(response.payload),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
