//! RunPodSandbox of a pod that is not ours, at the socket: a runtime with nothing in it but one blocking socket and one request
//! whose bytes are built beforehand.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dranic::nri::mux::{PLUGIN_SERVICE, RUNTIME_SERVICE};
use dranic::nri::proto;
use prost::Message as _;

use super::Samples;
use crate::runtime::SandboxSpec;
use crate::runtime::pods::PodRequest;
use crate::runtime::wire::{HEADER, Message, REQUEST, RESPONSE, Request, Response, frame};

const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";
/// Bytes of labels and annotations in the request: as many as a pod of a real cluster has.
const PADDING: usize = 1000;
/// Bytes of a frame's header.
const FRAME: usize = 8;
/// Requests before the measured ones.
const WARM_UP: usize = 200;
/// Between two requests where a node is not busy making pods.
const PAUSE: Duration = Duration::from_millis(2);

/// What a pod that is not ours costs.
#[derive(Debug, Clone, Default)]
pub struct Foreign {
    /// One request after the other.
    pub busy: Samples,
    /// With a pause between them, so that the agent sleeps and its processor too.
    pub paused: Samples,
}

/// Waits for the agent at `socket`, takes it as a plugin, and asks it `count` times, and a quarter as often with pauses. Blocks.
///
/// # Errors
/// When the agent does not come within 20 s, or answers wrongly.
pub fn measure(socket: &Path, count: usize) -> Result<Foreign> {
    let mut plugin = Plugin::accept(socket)?;
    let spec = SandboxSpec {
        id: "f".repeat(64),
        uid: "0f3b1a52-6d0c-4c55-9f0e-6f8f3a1c9b77".to_owned(),
        name: "not-ours".to_owned(),
        namespace: "default".to_owned(),
        netns_path: Some("/var/run/netns/cni-0f3b1a52-6d0c-4c55-9f0e-6f8f3a1c9b77".to_owned()),
        padding: PADDING,
        lost: None,
    };
    let payload = PodRequest { pod: spec.encode(false), container: Vec::new() }.encode_to_vec();
    let mut bytes = request("RunPodSandbox", payload);
    let mut foreign = Foreign::default();
    for _ in 0..WARM_UP {
        plugin.ask(&mut bytes)?;
    }
    for _ in 0..count {
        foreign.busy.push(plugin.ask(&mut bytes)?);
    }
    for _ in 0..count.div_ceil(4) {
        std::thread::sleep(PAUSE);
        foreign.paused.push(plugin.ask(&mut bytes)?);
    }
    Ok(foreign)
}

/// One frame with a whole request; the stream's number is filled in when it is sent.
fn request(method: &str, payload: Vec<u8>) -> Vec<u8> {
    let request = Request { service: PLUGIN.to_owned(), method: method.to_owned(), payload, timeout_nano: 2_000_000_000 };
    frame(PLUGIN_SERVICE, &Message { stream: 0, kind: REQUEST, data: request.encode_to_vec() }.encode())
}

/// The agent, as the runtime sees it.
struct Plugin {
    stream: UnixStream,
    next: u32,
    buffer: Vec<u8>,
}

impl Plugin {
    fn accept(socket: &Path) -> Result<Self> {
        let listener = UnixListener::bind(socket).with_context(|| format!("binding {}", socket.display()))?;
        listener.set_nonblocking(true)?;
        let begin = Instant::now();
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
                Err(e) => return Err(e.into()),
            }
            ensure!(begin.elapsed() < Duration::from_secs(20), "the agent did not connect to {}", socket.display());
        };
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut plugin = Self { stream, next: 1, buffer: vec![0; 64 << 10] };
        plugin.shake_hands()?;
        Ok(plugin)
    }

    fn shake_hands(&mut self) -> Result<()> {
        let (id, length) = self.frame()?;
        ensure!(id == RUNTIME_SERVICE && length > HEADER, "a frame of {length} bytes on connection {id} before registration");
        let stream = u32::from_be_bytes(self.buffer[FRAME + 4..FRAME + 8].try_into()?);
        let data = Response { status: None, payload: Vec::new() }.encode_to_vec();
        self.stream.write_all(&frame(RUNTIME_SERVICE, &Message { stream, kind: RESPONSE, data }.encode()))?;
        let configure = proto::ConfigureRequest {
            runtime_name: "containerd".to_owned(),
            runtime_version: "v2.4.2".to_owned(),
            nri_version: "v0.12.5".to_owned(),
            registration_timeout: 5000,
            request_timeout: 2000,
            config: String::new(),
        };
        self.ask(&mut request("Configure", configure.encode_to_vec()))?;
        self.ask(&mut request("Synchronize", proto::SynchronizeRequest::default().encode_to_vec()))?;
        Ok(())
    }

    /// Sends one request in one write, reads its answer, and returns how long that took.
    fn ask(&mut self, bytes: &mut [u8]) -> Result<Duration> {
        let stream = self.next;
        self.next += 2;
        bytes[FRAME + 4..FRAME + 8].copy_from_slice(&stream.to_be_bytes());
        let start = Instant::now();
        self.stream.write_all(bytes)?;
        let (id, length) = self.frame()?;
        let took = start.elapsed();
        self.check(id, length, stream)?;
        Ok(took)
    }

    /// Reads one frame into the buffer: connection and length.
    fn frame(&mut self) -> Result<(u32, usize)> {
        let mut have = 0;
        loop {
            let wanted = match have {
                0..FRAME => FRAME,
                _ => FRAME + u32::from_be_bytes(self.buffer[4..8].try_into()?) as usize,
            };
            ensure!(wanted <= self.buffer.len(), "an answer of {wanted} bytes");
            if have >= FRAME && have >= wanted {
                return Ok((u32::from_be_bytes(self.buffer[..4].try_into()?), wanted - FRAME));
            }
            match self.stream.read(&mut self.buffer[have..])? {
                0 => bail!("the agent closed the connection"),
                count => have += count,
            }
        }
    }

    /// It answered this request, and without an error.
    fn check(&self, id: u32, length: usize, stream: u32) -> Result<()> {
        let message = &self.buffer[FRAME..FRAME + length];
        ensure!(id == PLUGIN_SERVICE && length >= HEADER, "an answer of {length} bytes on connection {id}");
        ensure!(message[4..8] == stream.to_be_bytes() && message[8] == RESPONSE, "an answer to another request");
        let status = Response::decode(&message[HEADER..])?.status;
        ensure!(status.as_ref().is_none_or(|s| s.code == 0), "the agent refused: {status:?}");
        Ok(())
    }
}
