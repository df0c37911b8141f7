//! A tap between a node's runtime and its NRI plugins: how long each request takes as the runtime sees it, and a hand on single
//! requests, so that a scenario can do something at exactly that moment.
//!
//! The runtime's socket is moved aside (a bound Unix socket may be renamed), the tap listens in its place and passes every frame on as
//! it came, so neither side needs any setting. A line of JSON for each request goes to the node's logs, `nri-tap.log`.

mod wire;

use std::collections::HashMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};

use crate::cluster::Cluster;
use crate::context::{Context, wait};
use wire::{CallId, FRAME_HEADER, FRAME_MAX, Message, Messages, Request};

/// An agent that was killed is back at the runtime within this: the kubelet's back-off and its start.
const THROUGH: Duration = Duration::from_secs(40);

/// A request that was answered, or never will be.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Call {
    /// When it ended, milliseconds since 1970.
    t: u64,
    pub(crate) method: String,
    /// `namespace/name`.
    pub(crate) pod: String,
    pub(crate) sandbox: String,
    /// Name of the container, or of the plugin that registers.
    pub(crate) name: String,
    /// Which of the connections, from 1.
    pub(crate) connection: usize,
    /// From the last byte of the request to the last byte of the answer.
    pub(crate) ms: f64,
    pub(crate) error: Option<String>,
    /// The connection ended before an answer.
    pub(crate) lost: bool,
}

#[derive(Debug)]
struct Shared {
    log: File,
    calls: Vec<Call>,
    catches: Vec<Catch>,
    connections: usize,
}

#[derive(Debug)]
struct Catch {
    method: String,
    pod: String,
    arrived: oneshot::Sender<()>,
    go: oneshot::Receiver<()>,
}

/// A request that is held back as soon as it comes. It goes on when this is dropped.
#[derive(Debug)]
pub(crate) struct Caught {
    what: String,
    arrived: oneshot::Receiver<()>,
    _go: oneshot::Sender<()>,
}

impl Caught {
    /// Waits for the request.
    pub(crate) async fn arrived(&mut self, limit: Duration) -> Result<()> {
        let arrived = tokio::time::timeout(limit, &mut self.arrived).await;
        arrived.with_context(|| format!("the runtime did not ask {} within {} s", self.what, limit.as_secs()))??;
        Ok(())
    }
}

/// The tap on one node. Dropped, it puts the runtime's socket back.
#[derive(Debug)]
pub(crate) struct Tap {
    socket: PathBuf,
    inode: u64,
    shared: Arc<Mutex<Shared>>,
    accepting: JoinHandle<()>,
}

/// Where the runtime's socket is while the tap has its place.
fn aside(socket: &Path) -> PathBuf {
    socket.with_extension("sock.runtime")
}

fn socket(cluster: &Cluster, node: &str) -> PathBuf {
    cluster.scratch().join(node).join("root/run/nri/nri.sock")
}

/// Puts the runtime's socket back, where a runner that was killed has left its tap.
pub(crate) fn mend(cluster: &Cluster, node: &str) {
    let socket = socket(cluster, node);
    if aside(&socket).exists() {
        let serves = std::os::unix::net::UnixStream::connect(&socket).is_ok();
        // A runtime that has started again since has a new socket.
        let _ = if serves { std::fs::remove_file(aside(&socket)) } else { std::fs::rename(aside(&socket), &socket) };
    }
}

impl Tap {
    /// Puts a tap on `node`. The agent is killed, so that it comes back through the tap, and it is ready afterwards.
    pub(crate) async fn put(c: &Context, node: &str) -> Result<Self> {
        let tap = Self::listen(&c.cluster, node)?;
        c.cluster.kill_agent(node).await?;
        wait(THROUGH, "the agent comes through the tap", || async {
            let there = tap.calls("Synchronize", "").iter().any(|call| call.error.is_none() && !call.lost);
            ensure!(there, "no plugin has synchronised");
            Ok(())
        })
        .await?;
        c.agent_ready(node).await?;
        Ok(tap)
    }

    fn listen(cluster: &Cluster, node: &str) -> Result<Self> {
        mend(cluster, node);
        Self::at(socket(cluster, node), &cluster.log(node, "nri-tap"))
    }

    /// Takes the place of `socket`.
    fn at(socket: PathBuf, log: &Path) -> Result<Self> {
        let log = File::options().create(true).append(true).open(log).with_context(|| format!("{}", log.display()))?;
        std::fs::rename(&socket, aside(&socket)).with_context(|| format!("{}", socket.display()))?;
        let listener = match UnixListener::bind(&socket) {
            Ok(listener) => listener,
            Err(error) => {
                std::fs::rename(aside(&socket), &socket).ok();
                return Err(error).with_context(|| format!("{}", socket.display()));
            }
        };
        let inode = std::fs::metadata(&socket)?.ino();
        let shared = Arc::new(Mutex::new(Shared { log, calls: Vec::new(), catches: Vec::new(), connections: 0 }));
        let accepting = tokio::spawn(accept(listener, aside(&socket), Arc::clone(&shared)));
        Ok(Self { socket, inode, shared, accepting })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests of this name about `pod` (`namespace/name`; none for those that are about no pod) so far, in the order they ended.
    pub(crate) fn calls(&self, method: &str, pod: &str) -> Vec<Call> {
        self.all(|call| call.method == method && call.pod == pod)
    }

    /// Requests so far that are `wanted`, in the order they ended.
    pub(crate) fn all(&self, wanted: impl Fn(&Call) -> bool) -> Vec<Call> {
        self.shared().calls.iter().filter(|call| wanted(call)).cloned().collect()
    }

    /// Waits for the first request of this name about `pod` to end.
    pub(crate) async fn first(&self, method: &str, pod: &str) -> Result<Call> {
        wait(Duration::from_secs(30), &format!("{method} of {pod} ends"), || async {
            self.calls(method, pod).into_iter().next().context("not yet")
        })
        .await
    }

    /// Holds the next request of this name about `pod` back.
    pub(crate) fn catch(&self, method: &str, pod: &str) -> Caught {
        let (come, arrived) = oneshot::channel();
        let (go, gone) = oneshot::channel();
        let catch = Catch { method: method.to_owned(), pod: pod.to_owned(), arrived: come, go: gone };
        self.shared().catches.push(catch);
        Caught { what: format!("{method} of {pod}"), arrived, _go: go }
    }

    /// Takes the tap away and waits until the agent is connected to the runtime itself.
    pub(crate) async fn away(self, c: &Context, node: &str) -> Result<()> {
        drop(self);
        // Until the agent has seen the end of its connection, it takes itself for connected.
        tokio::time::sleep(Duration::from_millis(200)).await;
        c.agent_ready(node).await
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.accepting.abort();
        let ours = std::fs::metadata(&self.socket).is_ok_and(|found| found.ino() == self.inode);
        // A runtime that has started again meanwhile has made a socket of its own.
        let aside = aside(&self.socket);
        let _ = if ours { std::fs::rename(aside, &self.socket) } else { std::fs::remove_file(aside) };
    }
}

async fn accept(listener: UnixListener, runtime: PathBuf, shared: Arc<Mutex<Shared>>) {
    // Ends with this.
    let mut sessions = JoinSet::new();
    while let Ok((plugin, _)) = listener.accept().await {
        sessions.spawn(session(plugin, runtime.clone(), Arc::clone(&shared)));
    }
}

async fn session(plugin: UnixStream, runtime: PathBuf, shared: Arc<Mutex<Shared>>) {
    let Ok(runtime) = UnixStream::connect(runtime).await else { return };
    let connection = {
        let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.connections += 1;
        shared.connections
    };
    let session = Session { shared, connection, asked: Mutex::default() };
    let (from_plugin, to_plugin) = plugin.into_split();
    let (from_runtime, to_runtime) = runtime.into_split();
    tokio::select! {
        () = session.pump(from_plugin, to_runtime) => {}
        () = session.pump(from_runtime, to_plugin) => {}
    }
}

/// The connection of one plugin.
#[derive(Debug)]
struct Session {
    shared: Arc<Mutex<Shared>>,
    connection: usize,
    asked: Mutex<HashMap<CallId, (Request, Instant)>>,
}

impl Session {
    /// Passes frames on until one side has had enough.
    async fn pump(&self, mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
        let mut messages = Messages::default();
        let mut bytes = vec![0; FRAME_HEADER];
        loop {
            let mut header = [0; FRAME_HEADER];
            if from.read_exact(&mut header).await.is_err() {
                return;
            }
            let (connection, length) = wire::frame(header);
            if length > FRAME_MAX {
                return;
            }
            bytes.resize(FRAME_HEADER + length, 0);
            bytes[..FRAME_HEADER].copy_from_slice(&header);
            if from.read_exact(&mut bytes[FRAME_HEADER..]).await.is_err() {
                return;
            }
            for message in messages.add(connection, &bytes[FRAME_HEADER..]) {
                self.note(message).await;
            }
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    }

    async fn note(&self, message: Message) {
        match message {
            Message::Request(id, request) => {
                let catch = self.catch(&request);
                self.asked().insert(id, (request, Instant::now()));
                if let Some(Catch { arrived, go, .. }) = catch {
                    // An error is a hand that has let go: of no matter.
                    arrived.send(()).ok();
                    go.await.ok();
                }
            }
            Message::Answer(id, error) => {
                let asked = self.asked().remove(&id);
                if let Some((request, since)) = asked {
                    self.tell(request, since, error, false);
                }
            }
        }
    }

    fn catch(&self, request: &Request) -> Option<Catch> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let index = shared.catches.iter().position(|catch| catch.method == request.method && catch.pod == request.pod)?;
        Some(shared.catches.remove(index))
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<CallId, (Request, Instant)>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, request: Request, since: Instant, error: Option<String>, lost: bool) {
        let Request { method, pod, sandbox, name } = request;
        let ms = since.elapsed().as_secs_f64() * 1000.0;
        let t = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX));
        let call = Call { t, method, pod, sandbox, name, connection: self.connection, ms, error, lost };
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(line) = serde_json::to_string(&call) {
            // A log that can't be written must not hide what is measured.
            let _ = writeln!(shared.log, "{line}");
        }
        shared.calls.push(call);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let left = std::mem::take(&mut *self.asked());
        for (request, since) in left.into_values() {
            self.tell(request, since, None, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame with one message about pod `space/name`; an answer without data.
    fn bytes(kind: u8) -> Vec<u8> {
        let request = b"\x12\x0dRunPodSandbox\x1a\x0f\x0a\x0d\x12\x04name\x22\x05space";
        let data: &[u8] = if kind == 1 { request } else { &[] };
        let length = u8::try_from(data.len()).unwrap();
        [&[0, 0, 0, 1, 0, 0, 0, length + 10, 0, 0, 0, length, 0, 0, 0, 1, kind, 0][..], data].concat()
    }

    struct Ends {
        _folder: Folder,
        tap: Tap,
        plugin: UnixStream,
        runtime: UnixStream,
        listener: UnixListener,
    }

    /// Goes with what is in it.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    async fn ends(name: &str) -> Ends {
        let folder = Folder(std::env::temp_dir().join(format!("dranic-tap-{name}-{}", std::process::id())));
        std::fs::create_dir_all(&folder.0).unwrap();
        let socket = folder.0.join("nri.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let tap = Tap::at(socket.clone(), &folder.0.join("log")).unwrap();
        let plugin = UnixStream::connect(&socket).await.unwrap();
        let (runtime, _) = listener.accept().await.unwrap();
        Ends { _folder: folder, tap, plugin, runtime, listener }
    }

    async fn pass(from: &mut UnixStream, to: &mut UnixStream, sent: &[u8]) {
        from.write_all(sent).await.unwrap();
        let mut got = vec![0; sent.len()];
        to.read_exact(&mut got).await.unwrap();
        assert_eq!(got, sent);
    }

    #[tokio::test]
    async fn a_request_is_timed_and_passed_on_as_it_came() {
        let Ends { tap, mut plugin, mut runtime, _folder, .. } = ends("times").await;
        pass(&mut runtime, &mut plugin, &bytes(1)).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert!(tap.calls("RunPodSandbox", "space/name").is_empty());
        pass(&mut plugin, &mut runtime, &bytes(2)).await;
        let call = tap.first("RunPodSandbox", "space/name").await.unwrap();
        assert!(call.ms >= 30.0 && call.error.is_none() && !call.lost, "{call:?}");
        let line: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(_folder.0.join("log")).unwrap()).unwrap();
        assert_eq!(line["method"], "RunPodSandbox");
    }

    #[tokio::test]
    async fn a_caught_request_waits_and_an_unanswered_one_is_lost() {
        let Ends { tap, mut plugin, mut runtime, _folder, .. } = ends("catch").await;
        let mut caught = tap.catch("RunPodSandbox", "space/name");
        runtime.write_all(&bytes(1)).await.unwrap();
        caught.arrived(Duration::from_secs(5)).await.unwrap();
        let mut byte = [0];
        let early = tokio::time::timeout(Duration::from_millis(50), plugin.read(&mut byte)).await;
        assert!(early.is_err(), "it was passed on");
        drop(caught);
        plugin.read_exact(&mut vec![0; bytes(1).len()]).await.unwrap();
        drop(plugin);
        assert!(tap.first("RunPodSandbox", "space/name").await.unwrap().lost);
        assert_eq!(runtime.read(&mut byte).await.unwrap(), 0, "the runtime does not see the end");
    }

    #[tokio::test]
    async fn the_socket_is_the_runtimes_again() {
        let Ends { tap, mut plugin, listener, _folder, .. } = ends("away").await;
        let socket = tap.socket.clone();
        drop(tap);
        assert_eq!(plugin.read(&mut [0]).await.unwrap(), 0, "the plugin does not see the end");
        let again = UnixStream::connect(&socket);
        tokio::time::timeout(Duration::from_secs(5), async { tokio::try_join!(again, listener.accept()) })
            .await
            .unwrap()
            .unwrap();
        assert!(!aside(&socket).exists());
    }

    #[tokio::test]
    async fn a_new_socket_of_the_runtime_stays() {
        let Ends { tap, _folder, .. } = ends("restart").await;
        let socket = tap.socket.clone();
        std::fs::remove_file(&socket).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        drop(tap);
        let again = UnixStream::connect(&socket);
        tokio::time::timeout(Duration::from_secs(5), async { tokio::try_join!(again, listener.accept()) })
            .await
            .unwrap()
            .unwrap();
        assert!(!aside(&socket).exists());
    }
}
