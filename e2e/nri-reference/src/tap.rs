//! Stands between plugin and runtime, hands every frame on as it is, and keeps what was said. It can cut the connection at any message.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dranic_testbed::runtime::wire::{self, HEADER, REQUEST, Request, Response};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Connection on which the runtime calls the plugin.
pub(crate) const PLUGIN: u32 = 1;
/// UNIMPLEMENTED: from NRI 0.12 on the runtime would take a request so refused for one that the plugin does not know.
const UNIMPLEMENTED: i32 = 12;

/// A request, and its answer once there is one.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// Which connection, counted from 0, in the order in which they were made.
    pub(crate) connection: usize,
    /// [`PLUGIN`], or 2 for calls of the plugin to the runtime.
    pub(crate) service: u32,
    stream: u32,
    pub(crate) method: String,
    at: Instant,
    /// What the caller still has.
    pub(crate) timeout_nano: i64,
    pub(crate) answer: Option<Answered>,
}

/// An answer to a call.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    at: Instant,
    /// Code of its status, 0 for OK.
    pub(crate) code: i32,
    pub(crate) payload: Vec<u8>,
    /// Length of the message's data.
    pub(crate) size: usize,
    /// Sizes of the frames in which it came.
    pub(crate) frames: Vec<usize>,
}

impl Call {
    /// Time between the answer and the caller's deadline; none without an answer, or after it.
    pub(crate) fn margin(&self) -> Option<Duration> {
        let total = Duration::from_nanos(u64::try_from(self.timeout_nano).ok()?);
        total.checked_sub(self.took()?)
    }

    /// Whether this one was sent before the other was answered.
    pub(crate) fn came_before_answer_to(&self, other: &Self) -> bool {
        other.answer.as_ref().is_none_or(|answer| self.at < answer.at)
    }

    /// From the request to its answer.
    pub(crate) fn took(&self) -> Option<Duration> {
        self.answer.as_ref().map(|answer| answer.at.saturating_duration_since(self.at))
    }
}

/// Where the connection is cut, instead of handing the message on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    Request(&'static str),
    AnswerTo(&'static str),
}

#[derive(Debug, Default)]
struct Heard {
    calls: Mutex<Vec<Call>>,
    /// One for each of the next connections.
    cuts: Mutex<Vec<Cut>>,
    /// When each connection was made.
    connections: Mutex<Vec<Instant>>,
    current: Mutex<Option<CancellationToken>>,
}

/// The running tap.
pub(crate) struct Tap {
    heard: Arc<Heard>,
    _stop: DropGuard,
}

impl Tap {
    /// Listens at `socket` and connects each plugin to `runtime`; the first connections are cut so, one each.
    pub(crate) fn start(socket: &Path, runtime: PathBuf, cuts: Vec<Cut>) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let (heard, stop) = (Arc::new(Heard { cuts: cuts.into(), ..Heard::default() }), CancellationToken::new());
        let (hearing, stopped) = (heard.clone(), stop.clone());
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = stopped.cancelled() => return,
                };
                let Ok((plugin, _)) = accepted else { return };
                // A plugin whose runtime is away is turned away.
                if let Ok(runtime) = UnixStream::connect(&runtime).await {
                    let end = stopped.child_token();
                    *locked(&hearing.current) = Some(end.clone());
                    tokio::spawn(join(hearing.clone(), plugin, runtime, end));
                }
            }
        });
        Ok(Self { heard, _stop: stop.drop_guard() })
    }

    /// Cuts the newest connection now.
    pub(crate) fn cut(&self) {
        if let Some(end) = locked(&self.heard.current).take() {
            end.cancel();
        }
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        locked(&self.heard.calls).clone()
    }

    /// The calls of one method.
    pub(crate) fn calls_of(&self, method: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.method == method).collect()
    }

    /// When each connection was made.
    pub(crate) fn connections(&self) -> Vec<Instant> {
        locked(&self.heard.connections).clone()
    }

    /// What no plugin of ours may ever do, whatever the case is about.
    pub(crate) fn objection(&self) -> Option<String> {
        self.calls().into_iter().find_map(|call| {
            let code = call.answer.as_ref().map_or(0, |answer| answer.code);
            if call.service == PLUGIN && code == UNIMPLEMENTED {
                return Some(format!("{} was answered with UNIMPLEMENTED", call.method));
            }
            (call.service != PLUGIN && call.method != "RegisterPlugin").then(|| format!("the plugin called {}", call.method))
        })
    }
}

async fn join(heard: Arc<Heard>, plugin: UnixStream, runtime: UnixStream, end: CancellationToken) {
    let cut = {
        let mut cuts = locked(&heard.cuts);
        if cuts.is_empty() { None } else { Some(cuts.remove(0)) }
    };
    let connection = {
        let mut connections = locked(&heard.connections);
        connections.push(Instant::now());
        connections.len() - 1
    };
    let ((from_plugin, to_plugin), (from_runtime, to_runtime)) = (plugin.into_split(), runtime.into_split());
    let ear = || Ear { heard: heard.clone(), connection, cut: cut.clone(), partial: Default::default() };
    tokio::select! {
        // Both directions end together, as with the socket they stand for.
        _ = pass(from_plugin, to_runtime, ear()) => {}
        _ = pass(from_runtime, to_plugin, ear()) => {}
        () = end.cancelled() => {}
    }
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut ear: Ear) -> io::Result<()> {
    loop {
        let (id, payload) = wire::read_frame(&mut from).await?;
        if ear.hear(id, &payload) {
            return Ok(());
        }
        to.write_all(&wire::frame(id, &payload)).await?;
    }
}

/// A message that has not come whole, and the sizes of its frames.
type Partial = (Vec<u8>, Vec<usize>);

/// One direction of one connection.
struct Ear {
    heard: Arc<Heard>,
    connection: usize,
    cut: Option<Cut>,
    /// By logical connection.
    partial: [Partial; 2],
}

impl Ear {
    /// Whether the connection is to be cut before this frame.
    fn hear(&mut self, id: u32, payload: &[u8]) -> bool {
        let Some((bytes, frames)) = (id as usize).checked_sub(1).and_then(|index| self.partial.get_mut(index)) else {
            return false;
        };
        bytes.extend(payload);
        frames.push(payload.len());
        let mut messages = Vec::new();
        while let Some(length) = bytes.first_chunk::<4>().map(|length| HEADER + u32::from_be_bytes(*length) as usize)
            && bytes.len() >= length
        {
            messages.push((bytes.drain(..length).collect::<Vec<u8>>(), std::mem::take(frames)));
        }
        messages.into_iter().any(|(message, frames)| self.message(id, &message, frames))
    }

    fn message(&self, id: u32, bytes: &[u8], frames: Vec<usize>) -> bool {
        let (header, data) = bytes.split_at(HEADER);
        let stream = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let at = Instant::now();
        let mut calls = locked(&self.heard.calls);
        if header[8] == REQUEST {
            let Ok(Request { method, timeout_nano, .. }) = Request::decode(data) else { return false };
            let cut = matches!(&self.cut, Some(Cut::Request(wanted)) if *wanted == method);
            let connection = self.connection;
            calls.push(Call { connection, service: id, stream, method, at, timeout_nano, answer: None });
            return cut;
        }
        let Some(call) =
            calls.iter_mut().rev().find(|call| (call.connection, call.service, call.stream) == (self.connection, id, stream))
        else {
            return false;
        };
        let Response { status, payload } = Response::decode(data).unwrap_or_default();
        call.answer = Some(Answered { at, code: status.unwrap_or_default().code, payload, size: data.len(), frames });
        matches!(&self.cut, Some(Cut::AnswerTo(wanted)) if *wanted == call.method)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use dranic_testbed::runtime::wire::{Message, RESPONSE, Status};

    use super::*;

    /// A plugin's end and the runtime's end, with the tap between.
    async fn ends() -> (Tap, UnixStream, UnixStream, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let (near, far) = (folder.path().join("tap"), folder.path().join("runtime"));
        let listener = UnixListener::bind(&far).unwrap();
        let tap = Tap::start(&near, far, Vec::new()).unwrap();
        let plugin = UnixStream::connect(&near).await.unwrap();
        (tap, plugin, listener.accept().await.unwrap().0, folder)
    }

    async fn pass_on(from: &mut UnixStream, to: &mut UnixStream, id: u32, message: &Message) {
        wire::write_message(from, id, message).await.unwrap();
        assert_eq!(wire::read_frame(to).await.unwrap(), (id, message.encode()), "handed on as it was");
    }

    fn request(method: &str) -> Message {
        let request = Request { method: method.to_owned(), timeout_nano: 2_000_000_000, ..Request::default() };
        Message { stream: 1, kind: REQUEST, data: request.encode_to_vec() }
    }

    fn answer(code: i32) -> Message {
        let response = Response { status: Some(Status { code, message: String::new() }), payload: Vec::new() };
        Message { stream: 1, kind: RESPONSE, data: response.encode_to_vec() }
    }

    #[tokio::test]
    async fn status_12_is_objected_to_and_other_refusals_are_not() {
        for (code, objected) in [(0, false), (10, false), (UNIMPLEMENTED, true)] {
            let (tap, mut plugin, mut runtime, _folder) = ends().await;
            pass_on(&mut runtime, &mut plugin, 1, &request("RunPodSandbox")).await;
            assert_eq!(tap.calls()[0].margin(), None, "not answered yet");
            pass_on(&mut plugin, &mut runtime, 1, &answer(code)).await;
            assert_eq!(tap.objection().is_some(), objected, "status {code}");
            assert!(tap.calls()[0].margin().is_some_and(|margin| margin > Duration::from_secs(1)));
        }
    }

    #[tokio::test]
    async fn a_plugin_may_register_and_call_nothing_else() {
        let (tap, mut plugin, mut runtime, _folder) = ends().await;
        pass_on(&mut plugin, &mut runtime, 2, &request("RegisterPlugin")).await;
        // The runtime's own refusals are its own.
        pass_on(&mut runtime, &mut plugin, 2, &answer(UNIMPLEMENTED)).await;
        assert_eq!(tap.objection(), None);
        pass_on(&mut plugin, &mut runtime, 2, &request("UpdateContainers")).await;
        assert_eq!(tap.objection().as_deref(), Some("the plugin called UpdateContainers"));
    }
}
