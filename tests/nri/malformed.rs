//! A runtime that breaks the protocol, byte by byte, and the shape and speed of what the plugin sends.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use dranic::nri::mux;
use dranic::nri::proto;
use dranic_testbed::runtime::wire::{self, GoReader, Message, REQUEST, RESPONSE, Request, Response};
use proptest::prelude::*;
use prost::Message as _;
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};

use super::rig::{LIMIT, Session, foreign};

/// The runtime's end, by hand.
struct Raw {
    stream: UnixStream,
    reader: GoReader,
    session: Session,
    _folder: tempfile::TempDir,
}

impl Raw {
    /// Through the handshake; the next stream id is 5.
    async fn connected() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nri.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let session = Session::start(socket);
        let (stream, _) = listener.accept().await.unwrap();
        let mut raw = Self { stream, reader: GoReader::default(), session, _folder: folder };
        let registration = raw.receive(2).await;
        let answer = Message { stream: registration.stream, kind: RESPONSE, data: Vec::new() };
        wire::write_message(&mut raw.stream, 2, &answer).await.unwrap();
        assert_eq!(raw.call(1, "Configure", Vec::new()).await.status.unwrap_or_default().code, 0);
        assert_eq!(raw.call(3, "Synchronize", Vec::new()).await.status.unwrap_or_default().code, 0);
        raw.session.handler.wait_connections(true, 1).await;
        raw
    }

    async fn receive(&mut self, wanted: u32) -> Message {
        loop {
            let frame = tokio::time::timeout(LIMIT, wire::read_frame(&mut self.stream));
            let (id, payload) = frame.await.expect("an answer").expect("a connection");
            assert_eq!(id, wanted);
            if let Some(message) = self.reader.frame(&payload).unwrap().pop() {
                return message;
            }
        }
    }

    async fn call(&mut self, stream: u32, method: &str, payload: Vec<u8>) -> Response {
        wire::write_message(&mut self.stream, 1, &request(stream, method, payload)).await.unwrap();
        let answer = self.receive(1).await;
        assert_eq!((answer.stream, answer.kind), (stream, RESPONSE));
        Response::decode(&answer.data[..]).unwrap()
    }

    async fn code(&mut self, stream: u32) -> i32 {
        self.call(stream, "RunPodSandbox", foreign_pod(100)).await.status.unwrap_or_default().code
    }
}

fn request(stream: u32, method: &str, payload: Vec<u8>) -> Message {
    let service = "nri.pkg.api.v1alpha1.Plugin".to_owned();
    let request = Request { service, method: method.to_owned(), payload, timeout_nano: 2_000_000_000 };
    Message { stream, kind: REQUEST, data: request.encode_to_vec() }
}

/// RunPodSandbox for a pod that is not ours, with unread fields of this size.
fn foreign_pod(padding: usize) -> Vec<u8> {
    let spec = foreign("f");
    let linux = proto::LinuxNamespace { r#type: "network".into(), path: spec.netns_path.unwrap() };
    let linux = Some(proto::LinuxPodSandbox { namespaces: vec![linux] });
    let (id, name, uid, namespace) = (spec.id, spec.name, spec.uid, spec.namespace);
    let mut pod = proto::PodSandbox { id, name, uid, namespace, linux, pid: 1, ips: Vec::new() }.encode_to_vec();
    // Field 10, the IP addresses: any number of them.
    for address in std::iter::repeat_n("2001:db8:1111:2222:3333:4444:5555:6666", padding / 40) {
        pod.extend([0x52, address.len() as u8]);
        pod.extend(address.as_bytes());
    }
    let mut request = vec![0x0a];
    prost::encode_length_delimiter(pod.len(), &mut request).unwrap();
    request.extend(pod);
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_but_legal_frames_are_read() {
    let mut raw = Raw::connected().await;
    for id in [0, 3, 99, u32::MAX] {
        raw.stream.write_all(&wire::frame(id, &[1; 3000])).await.unwrap();
    }
    raw.stream.write_all(&wire::frame(1, &[])).await.unwrap();
    assert_eq!(raw.code(5).await, 0);
    // One byte of payload a frame, one byte a write.
    for byte in request(7, "RunPodSandbox", foreign_pod(0)).encode() {
        for byte in wire::frame(1, &[byte]) {
            raw.stream.write_all(&[byte]).await.unwrap();
        }
    }
    assert_eq!(raw.receive(1).await.stream, 7);
    // Two messages in one frame.
    let both = [request(9, "Shutdown", Vec::new()).encode(), request(11, "Shutdown", Vec::new()).encode()].concat();
    raw.stream.write_all(&wire::frame(1, &both)).await.unwrap();
    let mut answered = [raw.receive(1).await.stream, raw.receive(1).await.stream];
    answered.sort_unstable();
    assert_eq!(answered, [9, 11]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_messages_get_an_answer_and_the_connection_stays() {
    let mut raw = Raw::connected().await;
    assert_eq!(raw.code(6).await, 3, "an even stream id");
    assert_eq!(raw.code(5).await, 0);
    assert_eq!(raw.code(5).await, 0, "a repeated stream id is a new request");
    let garbage = Message { stream: 7, kind: REQUEST, data: vec![0x0a, 200, 1, 2] };
    wire::write_message(&mut raw.stream, 1, &garbage).await.unwrap();
    let answer = Response::decode(&raw.receive(1).await.data[..]).unwrap();
    assert_eq!(answer.status.unwrap().code, 3, "a request that is no protobuf");
    // Five MiB announced and sent, in frames as large as they may be.
    let mut bytes = (5u32 << 20).to_be_bytes().to_vec();
    bytes.extend([0, 0, 0, 9, REQUEST, 0]);
    bytes.resize(bytes.len() + (5 << 20), 0);
    for part in bytes.chunks(mux::MAX_PAYLOAD) {
        raw.stream.write_all(&wire::frame(1, part)).await.unwrap();
    }
    let answer = raw.receive(1).await;
    assert_eq!((answer.stream, Response::decode(&answer.data[..]).unwrap().status.unwrap().code), (9, 3));
    assert_eq!(raw.code(11).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_breaks_the_framing_ends_the_connection_with_its_reason() {
    let too_long = [1u32.to_be_bytes(), 0xffff_fff0u32.to_be_bytes()].concat();
    for (bytes, reason) in [
        (too_long, "the runtime announced a frame of 4294967280 bytes on connection 1, limit 4194314"),
        (vec![0, 0, 0], "the connection ended inside a frame"),
        (wire::frame(1, &[0; 50])[..30].to_vec(), "the connection ended inside a frame"),
    ] {
        let mut raw = Raw::connected().await;
        raw.stream.write_all(&bytes).await.unwrap();
        raw.stream.shutdown().await.unwrap();
        assert_eq!(raw.session.handler.wait_connections(false, 1).await[0], reason);
    }
}

/// Everything that a runtime says from the registration's answer to the end of a first request.
fn a_runtimes_words() -> Vec<u8> {
    let registered = Message { stream: 1, kind: RESPONSE, data: Vec::new() };
    let requests = [
        request(1, "Configure", vec![0x12, 1, b'r']),
        request(3, "Synchronize", Vec::new()),
        request(5, "RunPodSandbox", foreign_pod(0)),
    ];
    let mut bytes = wire::frame(2, &registered.encode());
    bytes.extend(requests.iter().flat_map(|request| wire::frame(1, &request.encode())));
    bytes
}

/// What the session says of a runtime that says so much and is gone; it must be back afterwards.
async fn said_of_a_runtime_that_ends_after(bytes: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let session = Session::start(socket);
    let (mut stream, _) = listener.accept().await.unwrap();
    // Its registration first: no runtime answers before that.
    wire::read_frame(&mut stream).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    drop(stream);
    let said = session.handler.wait_connections(false, 1).await.remove(0);
    tokio::time::timeout(LIMIT, listener.accept()).await.expect("another connection").unwrap();
    said
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_may_end_after_any_byte() {
    // Whoever reads or writes at that moment sees it first and says it in his words.
    const WORDS: [&str; 4] = ["closed the connection", "ended inside a frame", "early eof", " the runtime failed"];
    let bytes = a_runtimes_words();
    let ends: Vec<usize> = (0..=bytes.len()).collect();
    for ends in ends.chunks(24) {
        let all = ends.iter().map(|end| said_of_a_runtime_that_ends_after(&bytes[..*end]));
        for (end, said) in ends.iter().zip(futures_util::future::join_all(all).await) {
            assert!(WORDS.iter().any(|words| said.contains(words)), "after {end} of {} bytes: {said}", bytes.len());
        }
    }
}

fn answer_message(size: usize) -> Message {
    Message { stream: 1, kind: RESPONSE, data: vec![7; size] }
}

/// What a reader like Go's makes of `messages` written to a channel in pieces of `piece` bytes.
async fn through_the_mux(messages: &[Message], piece: usize) -> Result<Vec<Message>, String> {
    let (near, mut far) = UnixStream::pair().unwrap();
    let (reader, writer) = near.into_split();
    let (trunk, [mut channel]) = mux::start(reader, writer, [mux::PLUGIN_SERVICE]);
    let bytes: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
    let writing = tokio::spawn(async move {
        for piece in bytes.chunks(piece) {
            channel.write_all(piece).await.unwrap();
        }
        drop(channel);
        trunk.closed().await;
    });
    let (mut reader, mut seen) = (GoReader::default(), Vec::new());
    while let Ok((id, payload)) = wire::read_frame(&mut far).await {
        assert_eq!(id, mux::PLUGIN_SERVICE);
        let complete = reader.frame(&payload)?;
        assert!(complete.len() <= 1, "never two messages in a frame");
        seen.extend(complete);
    }
    writing.await.unwrap();
    Ok(seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn go_reads_messages_of_every_size() {
    for size in [0, 1, 4085, 4086, 4087, 4096, 8192, 1 << 20, 4 << 20] {
        let messages = [answer_message(size), answer_message(3)];
        assert_eq!(through_the_mux(&messages, 4096).await.as_deref(), Ok(&messages[..]), "{size} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn go_reads_whatever_pieces_were_written(sizes in prop::collection::vec(0usize..20_000, 1..6), piece in 1usize..9000) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let messages: Vec<_> = sizes.into_iter().map(answer_message).collect();
        let seen = runtime.block_on(through_the_mux(&messages, piece));
        prop_assert_eq!(seen, Ok(messages));
    }
}

/// Prints what a pod costs that is not ours, from the request's first byte to the answer's last, as the runtime sees it. Only a gross
/// loss fails: the machine may be busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_pod_costs_next_to_nothing() {
    const ROUNDS: u32 = 2000;
    let raw = Raw::connected().await;
    let mut stream = raw.stream.into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let measure = move || {
        let mut times: Vec<Duration> = (0..ROUNDS).map(|round| round_trip(&mut stream, 5 + 2 * round)).collect();
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        println!("foreign pod, request of 2 kB, dev build: p50 {:?}, p90 {:?}, p99 {:?}", at(50), at(90), at(99));
        at(50)
    };
    let median = tokio::task::spawn_blocking(measure).await.unwrap();
    assert!(median < Duration::from_millis(2), "{median:?}");
}

fn round_trip(stream: &mut std::os::unix::net::UnixStream, id: u32) -> Duration {
    let bytes = wire::frame(1, &request(id, "RunPodSandbox", foreign_pod(2000)).encode());
    let start = Instant::now();
    stream.write_all(&bytes).unwrap();
    let mut header = [0; 8];
    stream.read_exact(&mut header).unwrap();
    let mut answer = vec![0; u32::from_be_bytes([header[4], header[5], header[6], header[7]]) as usize];
    stream.read_exact(&mut answer).unwrap();
    let elapsed = start.elapsed();
    assert_eq!(answer[4..8], id.to_be_bytes());
    elapsed
}
