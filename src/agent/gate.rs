//! The socket for guards ([`crate::gate`]): each hands over a container's network namespace and waits until its pod's devices are there.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::attacher::{self, BACKGROUND_LIMIT};
use super::{Shared, sockets, standby};
use crate::attach::Engine;
use crate::gate::check;
use crate::gate::pass;
use crate::gate::protocol::{Answer, LINE_MAX, Request, line, parse_request};
use crate::names::SandboxId;
use crate::netns::{Netns, NetnsId};

/// Most guards at once. One more is turned away, and comes again.
const CONNECTIONS: usize = 1024;
/// Most attaches at once for guards: each has a thread, and the runtime's hooks need some, too.
const ATTACHES: usize = 32;
/// How long a guard may take to send its request, or to take an answer.
const TALK_LIMIT: Duration = Duration::from_secs(5);
/// Pauses between two attempts: from the first to the longest, twice as long each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Binds the socket and serves until `stop`; then removes it.
pub(super) async fn serve(shared: Arc<Shared>, stop: CancellationToken) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let path = shared.config.gate_socket.clone();
    let try_bind = || std::future::ready(sockets::bind(&path));
    let bound = standby::bind(&shared.board, &stop, try_bind, sockets::is_taken).await;
    let bound = bound.with_context(|| format!("--gate-socket {} can't be bound", path.display()))?;
    Ok(tokio::spawn(async move {
        let Some(listener) = bound else { return };
        accept(&listener, &shared, &stop).await;
        // It may be gone already.
        let _ = std::fs::remove_file(&path);
    }))
}

async fn accept(listener: &UnixListener, shared: &Arc<Shared>, stop: &CancellationToken) {
    let gate = Arc::new(Gate {
        shared: shared.clone(),
        connections: Arc::new(Semaphore::new(CONNECTIONS)),
        attaches: Semaphore::new(ATTACHES),
    });
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let Ok(permit) = gate.connections.clone().try_acquire_owned() else { continue };
                let (gate, stop) = (gate.clone(), stop.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = gate.serve(stream) => {}
                        // It comes to the next agent.
                        () = stop.cancelled() => {}
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "gate socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

struct Gate {
    shared: Arc<Shared>,
    connections: Arc<Semaphore>,
    attaches: Semaphore,
}

/// What a guard wants, checked as far as that does not change.
struct Wanted {
    request: Request,
    netns: Arc<Netns>,
    /// For the record.
    path: PathBuf,
}

/// What can be done for it now.
enum Now {
    Attach(SandboxId),
    Wait(String),
    Never(String),
}

impl Gate {
    /// From the request to the last answer. Dropped when the agent stops.
    async fn serve(&self, mut stream: UnixStream) {
        if !sockets::is_root(&stream) {
            return;
        }
        let received = tokio::time::timeout(TALK_LIMIT, receive(&stream)).await;
        // Who sends nothing, or goes away, is told nothing.
        let Ok(Ok((bytes, fds))) = received else { return };
        let waiting = &self.shared.metrics.guards_waiting;
        waiting.inc();
        let answer = match self.read(&bytes, fds).await {
            Ok(wanted) => self.work(&mut stream, &wanted).await,
            Err(why) => Some(Answer::Refused { why, is_final: true }),
        };
        waiting.dec();
        if let Some(answer) = answer {
            send(&mut stream, &answer).await;
        }
    }

    async fn read(&self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Wanted, String> {
        let request = parse_request(bytes)?;
        let fd = <[OwnedFd; 1]>::try_from(fds).map_err(|fds| format!("{} descriptors came along, not one", fds.len()))?;
        let dir = self.shared.config.netns_dir.clone();
        let opened = self.blocking(move || {
            let [fd] = fd;
            let netns = Netns::from_fd(fd).map_err(|e| e.to_string())?;
            if Netns::current().map_err(|e| e.to_string())?.id() == netns.id() {
                return Err(crate::attach::AttachError::HostNetwork.to_string());
            }
            let path = path_for_record(netns.id(), &request.netns_path, &dir);
            Ok(Wanted { request, netns: Arc::new(netns), path })
        });
        opened.await?
    }

    /// Tries until everything is there or the guard is gone; none then.
    async fn work(&self, stream: &mut UnixStream, wanted: &Wanted) -> Option<Answer> {
        let (mut pause, mut told) = (PAUSE.0, false);
        loop {
            let why = match self.now(wanted).await {
                Ok(Now::Never(why)) => return Some(Answer::Refused { why, is_final: true }),
                Ok(Now::Wait(why)) | Err(why) => why,
                Ok(Now::Attach(sandbox)) => {
                    // Once: later the error of the last attempt says more.
                    let begun = || Answer::Working { why: "the agent is attaching them".to_owned() };
                    if !std::mem::replace(&mut told, true) && !send(stream, &begun()).await {
                        return None;
                    }
                    let attached = tokio::select! {
                        attached = self.attach(wanted, sandbox) => attached,
                        // The attach goes on, to its end or its roll-back.
                        () = gone(stream) => return None,
                    };
                    match attached {
                        Ok(()) => return Some(Answer::Attached),
                        Err(error) if error.is_final() => {
                            return Some(Answer::Refused { why: error.to_string(), is_final: true });
                        }
                        Err(error) => error.to_string(),
                    }
                }
            };
            if !send(stream, &Answer::Working { why }).await {
                return None;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = gone(stream) => return None,
            }
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    async fn now(&self, wanted: &Wanted) -> Result<Now, String> {
        let (engine, request, netns) = (self.shared.engine.clone(), wanted.request.clone(), wanted.netns.id());
        self.blocking(move || now(&engine, &request, netns)).await
    }

    async fn attach(&self, wanted: &Wanted, sandbox: SandboxId) -> attacher::Outcome {
        // Who joins needs no thread: all containers of a pod wait for one attach, and must not keep other pods' guards from theirs.
        if let Some(running) = self.shared.attacher.running_in(&sandbox) {
            return running.done().await;
        }
        let _permit = self.attaches.acquire().await;
        attach(&self.shared, wanted, sandbox).await
    }

    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
        tokio::task::spawn_blocking(work).await.map_err(|panic| format!("it ended badly: {panic}"))
    }
}

/// Attaches everything of the pod in the namespace. Dropping this does not stop it.
async fn attach(shared: &Arc<Shared>, wanted: &Wanted, sandbox: SandboxId) -> attacher::Outcome {
    let (pod, path, netns) = (wanted.request.pod.clone(), wanted.path.clone(), Some(wanted.netns.clone()));
    let now = Instant::now();
    let order = attacher::Wanted { pod, sandbox, path, netns, deadline: now + BACKGROUND_LIMIT, held_until: now };
    if shared.config.nri {
        return shared.attacher.attach(order).done().await;
    }
    // Nobody else brings it, so it is not late.
    let sandbox = order.sandbox.clone();
    shared.attacher.announce(&sandbox);
    let outcome = shared.attacher.attach(order).done().await;
    shared.attacher.forget(&sandbox);
    outcome
}

/// Compares a request with the ledger.
fn now(engine: &Engine, request: &Request, netns: NetnsId) -> Now {
    let records = engine.ledger().by_pod(&request.pod);
    if records.is_empty() {
        return Now::Never(format!("nothing is prepared on this node for the pod with UID {}", request.pod));
    }
    for claim in &request.claims {
        if let Err(why) = check::admit(claim, engine.ledger().get(claim).as_deref(), &request.pod) {
            return Now::Never(why);
        }
    }
    if let Some(old) = records.iter().find(|record| record.boot_id != engine.boot_id()) {
        return Now::Never(format!("claim {} was prepared before the node was rebooted", old.claim));
    }
    let mut sandbox = request.sandbox.clone();
    for attachment in records.iter().flat_map(|record| &record.devices).filter_map(|device| device.attachment.as_ref()) {
        if attachment.netns == netns {
            // The runtime's own id, where the guard was not told it.
            sandbox = attachment.sandbox.clone();
        } else if Netns::open(&attachment.netns_path).is_ok_and(|other| other.id() == attachment.netns) {
            return Now::Wait(format!(
                "its NICs are in another sandbox of the pod, {}, which has not ended yet",
                attachment.sandbox
            ));
        }
    }
    Now::Attach(sandbox)
}

/// A path by which an agent that is started anew finds the namespace: below `/proc` it ends with a process, and is another one for
/// an agent in a container.
fn path_for_record(netns: NetnsId, given: &Path, dir: &Path) -> PathBuf {
    let leads = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == (netns.dev, netns.ino))
    };
    if !given.starts_with("/proc") && leads(given) {
        return given.to_owned();
    }
    let mounted = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).find(|path| leads(path));
    mounted.unwrap_or_else(|| given.to_owned())
}

/// One line, and the descriptors that came with it.
async fn receive(stream: &UnixStream) -> std::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut bytes, mut fds) = (Vec::new(), Vec::new());
    let mut buffer = [0; 4096];
    loop {
        let count = stream.async_io(Interest::READABLE, || pass::receive(stream, &mut buffer, &mut fds)).await?;
        bytes.extend_from_slice(&buffer[..count]);
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        // What is too long is refused by the one who reads it.
        if bytes.ends_with(b"\n") || bytes.len() > LINE_MAX || fds.len() > 1 {
            return Ok((bytes, fds));
        }
    }
}

/// Whether it was taken.
async fn send(stream: &mut UnixStream, answer: &Answer) -> bool {
    matches!(tokio::time::timeout(TALK_LIMIT, stream.write_all(&line(answer))).await, Ok(Ok(())))
}

/// Returns when the guard has gone away, or says something more, which it must not.
async fn gone(stream: &UnixStream) {
    let mut buffer = [0; 16];
    loop {
        if stream.readable().await.is_err() {
            return;
        }
        match stream.try_read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}
