//! Targets `nri` (messages) and `ttrpc` (a connection in memory, from frames to the handler and back).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, duplex, split};
use ttrpc::proto::Code;

use super::dispatch::{self, Dispatcher, Margin};
use super::hook::{Call, Hook};
use super::{Adjustment, Container, HookError, OciHook, RequestTime, Sandbox, SandboxHandler, mux, proto, wire};
use crate::fuzzing::Input;

/// Beginning of the variables that the handler wants to see.
const MARK: &str = "M_";

/// Any bytes as each of the messages. What is read without decoding agrees with what is decoded.
pub(crate) fn nri(data: &[u8]) {
    same_when_written_again::<proto::ConfigureRequest>(data);
    same_when_written_again::<proto::SynchronizeRequest>(data);
    if let Ok(request) = proto::CreateContainerRequest::decode(data) {
        let uid = request.pod.as_ref().map_or("", |pod| pod.uid.as_str());
        // proto2's groups are unknown fields to a decoder; here they are refused.
        match wire::pod_uid(data, wire::POD_IN_REQUEST) {
            Ok(read) => assert_eq!(read, uid),
            Err(wire::Malformed) => assert!(has_group(data), "refused, and it is a request"),
        }
        let env = request.container.as_ref().map(|container| container.env.as_slice()).unwrap_or_default();
        let marked: Vec<&str> = env.iter().map(String::as_str).filter(|variable| variable.starts_with(MARK)).collect();
        match wire::variables(data, MARK) {
            Ok(read) => assert_eq!(read, marked),
            Err(wire::Malformed) => assert!(has_group(data), "refused, and it is a request"),
        }
        for hook in [Hook::RunPodSandbox, Hook::CreateContainer] {
            let call = Call::decode(hook, data, wire::POD_IN_REQUEST).map(|call| call.to_string());
            assert!(call.is_ok_and(|text| text.contains(uid)));
        }
    }
    if let Ok(event) = proto::StateChangeEvent::decode(data) {
        match wire::event(data) {
            Ok(read) => assert_eq!(read, event.event),
            Err(wire::Malformed) => assert!(has_group(data), "refused, and it is an event"),
        }
        let uid = event.pod.as_ref().map_or("", |pod| pod.uid.as_str());
        match wire::pod_uid(data, wire::POD_IN_STATE_CHANGE) {
            Ok(read) => assert_eq!(read, uid),
            Err(wire::Malformed) => assert!(has_group(data), "refused, and it is an event"),
        }
    }
    if wire::check(data).is_err() {
        assert!(wire::event(data).is_err() && wire::pod_uid(data, 1).is_err() && wire::variables(data, MARK).is_err());
    }
}

fn same_when_written_again<M: Message + Default + PartialEq>(data: &[u8]) {
    if let Ok(message) = M::decode(data) {
        let again = M::decode(&message.encode_to_vec()[..]);
        assert!(again.is_ok_and(|again| again == message));
    }
}

/// Whether a key of wire type 3 or 4 can be in the bytes: rather once too often.
fn has_group(data: &[u8]) -> bool {
    data.iter().any(|byte| matches!(byte & 7, 3 | 4))
}

/// The first byte chooses: bytes as they are on the socket, or well-formed requests whose contents are any bytes.
pub(crate) fn ttrpc(data: &[u8]) {
    let Some((&mode, rest)) = data.split_first() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap_or_else(|e| panic!("{e}"));
    runtime.block_on(async {
        let (near, far) = duplex(64 * 1024);
        let (reader, writer) = split(near);
        let (trunk, [plugin, _runtime]) = mux::start(reader, writer, [mux::PLUGIN_SERVICE, mux::RUNTIME_SERVICE]);
        let handler = Arc::new(Scripted);
        let executor = tokio::runtime::Handle::current();
        let dispatcher = Arc::new(Dispatcher::new(handler, executor, Margin::default(), "10-dranic".to_owned()));
        let server = dispatch::serve(plugin, dispatcher).await;
        let talk = async { if mode & 1 == 0 { raw(far, rest, usize::from(mode >> 1)).await } else { requests(far, rest).await } };
        assert!(tokio::time::timeout(Duration::from_secs(10), talk).await.is_ok(), "nothing happens any more");
        trunk.shut_down("the end").await;
        drop(server);
    });
}

/// Any bytes, then the end of the connection, which ends ours.
async fn raw(far: DuplexStream, bytes: &[u8], piece: usize) {
    let (mut answers, mut socket) = split(far);
    let writing = async {
        for piece in bytes.chunks(piece * 16 + 1) {
            // The other side may have closed at what came before.
            if socket.write_all(piece).await.is_err() {
                return;
            }
        }
        let _ = socket.shutdown().await;
    };
    let reading = async { while read_answer(&mut answers).await.is_some() {} };
    tokio::join!(writing, reading);
}

/// Between the requests of an input. With lengths, a byte more in one of them would make nonsense of all that follow.
const SEPARATOR: &[u8] = b"\xff\xfe";

/// Every request gets one answer, and none says that there is no such method.
async fn requests(far: DuplexStream, bytes: &[u8]) {
    let (mut answers, mut socket) = split(far);
    let (mut input, mut written, mut open) = (Input(bytes), Vec::new(), BTreeMap::new());
    for stream in (1..).step_by(2).take(32) {
        let mut input = Input(input.until(SEPARATOR));
        let Some(selector) = input.byte() else { break };
        let method = dispatch::METHODS[usize::from(selector) % dispatch::METHODS.len()].0;
        let timeout_nano = i64::from(input.byte().unwrap_or(0)) * 100_000_000 - 100_000_000;
        let request =
            Request { service: dispatch::SERVICE.to_owned(), method: method.to_owned(), payload: input.0.to_vec(), timeout_nano };
        open.insert(stream, method);
        written.extend(mux::fuzzing::framed(&message(stream, &request.encode_to_vec())));
    }
    let writing = async {
        assert!(socket.write_all(&written).await.is_ok(), "it was closed");
    };
    let reading = async {
        while !open.is_empty() {
            let Some((stream, data)) = read_answer(&mut answers).await else { panic!("closed with {open:?} open") };
            let method = open.remove(&stream);
            assert!(method.is_some(), "an answer on stream {stream}");
            let answer = Response::decode(&data[..]);
            let code = answer.unwrap_or_else(|error| panic!("{method:?}: {error}")).status.unwrap_or_default().code;
            assert_ne!(code, Code::UNIMPLEMENTED as i32, "{method:?}");
        }
    };
    tokio::join!(writing, reading);
}

/// A ttrpc message of type request.
fn message(stream: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &stream.to_be_bytes(), &[1, 0], data].concat()
}

/// The next message from the plugin: its stream and data. None at the end.
async fn read_answer(socket: &mut ReadHalf<DuplexStream>) -> Option<(u32, Vec<u8>)> {
    let mut message = Vec::new();
    loop {
        let id = socket.read_u32().await.ok()?;
        let length = socket.read_u32().await.ok()? as usize;
        assert!(id == mux::PLUGIN_SERVICE && (1..=mux::MAX_PAYLOAD).contains(&length), "frame of {length} bytes on {id}");
        assert!(!message.is_empty() || length <= mux::FIRST_FRAME, "first frame of {length} bytes");
        let begin = message.len();
        message.resize(begin + length, 0);
        socket.read_exact(&mut message[begin..]).await.ok()?;
        let (header, data) = message.split_first_chunk::<10>()?;
        let [a, b, c, d, e, f, g, h, kind, flags] = *header;
        if u32::from_be_bytes([a, b, c, d]) as usize == data.len() {
            assert_eq!((kind, flags), (2, 0), "not a response");
            return Some((u32::from_be_bytes([e, f, g, h]), data.to_vec()));
        }
    }
}

/// `ttrpc.Request`, as far as the runtime fills it.
#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(string, tag = "1")]
    service: String,
    #[prost(string, tag = "2")]
    method: String,
    #[prost(bytes = "vec", tag = "3")]
    payload: Vec<u8>,
    #[prost(int64, tag = "4")]
    timeout_nano: i64,
}

/// `ttrpc.Response` without its payload.
#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "1")]
    status: Option<Status>,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
}

/// Does what the pod's data say.
struct Scripted;

impl Scripted {
    fn does(sandbox: &Sandbox) -> Result<(), HookError> {
        if sandbox.name.starts_with('f') { Err(HookError(format!("{} does not work", sandbox.name))) } else { Ok(()) }
    }
}

impl SandboxHandler for Scripted {
    fn is_ours(&self, pod_uid: &str) -> bool {
        !pod_uid.is_empty()
    }

    fn marks(&self) -> &str {
        MARK
    }

    fn admit(&self, pod_uid: &str, marked: &[&str]) -> Result<(), HookError> {
        if marked.is_empty() { Ok(()) } else { Err(HookError(format!("{pod_uid} brings {}", marked.join(" ")))) }
    }

    async fn run_pod_sandbox(&self, sandbox: Sandbox, _: RequestTime) -> Result<(), HookError> {
        Self::does(&sandbox)
    }

    async fn create_container(&self, sandbox: Sandbox, container: Container, _: RequestTime) -> Result<Adjustment, HookError> {
        Self::does(&sandbox)?;
        let hooks = container.create_runtime.into_iter().map(|path| OciHook { args: vec![path.clone()], path, timeout: 1 });
        Ok(Adjustment { create_runtime: hooks.collect(), ..Adjustment::default() })
    }

    async fn stop_pod_sandbox(&self, _: Sandbox, _: RequestTime) {}

    async fn remove_pod_sandbox(&self, _: Sandbox, _: RequestTime) {}

    async fn synchronize(&self, _: Vec<Sandbox>, _: Vec<Container>) {}

    fn connection(&self, _: bool, _: &str) {}
}
