//! Our NRI room with a handler that does what the pod's name says, on a thread of its own as in the agent.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use dranic::nri::session::{Margin, SessionConfig, run};
use dranic::nri::{Adjustment, Container, HookError, OciHook, RequestTime, Sandbox, SandboxHandler};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What the runtime calls it.
pub(crate) const NAME: &str = "10-dranic";
/// The hook that it adds to containers called "hooked".
pub(crate) const HOOK: &str = "/opt/dranic/guard";

/// What the handler was told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Seen {
    /// "run", "create", "stop" or "remove".
    Begin(&'static str, Sandbox),
    End(&'static str, String),
    Container(Container),
    Synchronize(Vec<Sandbox>, Vec<Container>),
    Connection(bool, String),
}

/// Pods whose UID starts with "ours" are ours. A pod called "slow-MS" takes that many milliseconds in each hook, one called
/// "fails-N" is refused with N bytes of text; all others are served at once.
#[derive(Default)]
pub(crate) struct Scripted {
    seen: Mutex<Vec<Seen>>,
    changed: watch::Sender<usize>,
}

impl Scripted {
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until what was seen fulfils a condition, and returns it.
    ///
    /// # Errors
    /// After ten seconds, with what was seen.
    pub(crate) async fn wait(&self, what: &str, wanted: impl Fn(&[Seen]) -> bool) -> Result<Vec<Seen>> {
        let mut changed = self.changed.subscribe();
        let done = changed.wait_for(|_| wanted(&self.seen()));
        let done = tokio::time::timeout(Duration::from_secs(10), done).await.is_ok();
        let tail = |seen: &[Seen]| format!("{:?}", &seen[seen.len().saturating_sub(6)..]);
        done.then(|| self.seen()).with_context(|| format!("{what} not seen; the last: {}", tail(&self.seen())))
    }

    /// The hooks that were begun, in order, with their sandboxes' ids.
    pub(crate) fn begun(&self) -> Vec<(&'static str, String)> {
        let begun = |seen| if let Seen::Begin(hook, sandbox) = seen { Some((hook, sandbox.id)) } else { None };
        self.seen().into_iter().filter_map(begun).collect()
    }

    /// How often the connection came up.
    pub(crate) fn connections(&self) -> usize {
        self.seen().iter().filter(|seen| matches!(seen, Seen::Connection(true, _))).count()
    }

    fn add(&self, seen: Seen) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push(seen);
        self.changed.send_modify(|count| *count += 1);
    }

    async fn work(&self, hook: &'static str, sandbox: Sandbox) -> Result<(), HookError> {
        let number = |prefix| sandbox.name.strip_prefix(prefix).and_then(|rest| rest.parse::<usize>().ok());
        let (slow, fails, id) = (number("slow-"), number("fails-"), sandbox.id.clone());
        self.add(Seen::Begin(hook, sandbox));
        if let Some(milliseconds) = slow {
            tokio::time::sleep(Duration::from_millis(milliseconds as u64)).await;
        }
        self.add(Seen::End(hook, id));
        fails.map_or(Ok(()), |size| Err(HookError("x".repeat(size))))
    }
}

impl SandboxHandler for Scripted {
    fn is_ours(&self, pod_uid: &str) -> bool {
        pod_uid.starts_with("ours")
    }

    async fn run_pod_sandbox(&self, sandbox: Sandbox, _: RequestTime) -> Result<(), HookError> {
        self.work("run", sandbox).await
    }

    async fn create_container(&self, sandbox: Sandbox, container: Container, _: RequestTime) -> Result<Adjustment, HookError> {
        let hooked = container.name == "hooked";
        self.add(Seen::Container(container));
        self.work("create", sandbox).await?;
        let hook = OciHook { path: HOOK.to_owned(), args: vec!["guard".to_owned()], timeout: 60 };
        Ok(Adjustment { create_runtime: if hooked { vec![hook] } else { Vec::new() }, ..Adjustment::default() })
    }

    async fn stop_pod_sandbox(&self, sandbox: Sandbox, _: RequestTime) {
        // What a refusal is for Run is nothing for Stop.
        let _ = self.work("stop", sandbox).await;
    }

    async fn remove_pod_sandbox(&self, sandbox: Sandbox, _: RequestTime) {
        let _ = self.work("remove", sandbox).await;
    }

    async fn synchronize(&self, sandboxes: Vec<Sandbox>, containers: Vec<Container>) {
        self.add(Seen::Synchronize(sandboxes, containers));
    }

    fn connection(&self, up: bool, detail: &str) {
        self.add(Seen::Connection(up, detail.to_owned()));
    }
}

/// The running room; it stops when this is dropped.
pub(crate) struct Room {
    pub(crate) handler: Arc<Scripted>,
    stop: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Room {
    /// Connects to `socket`, again and again.
    pub(crate) fn start(socket: PathBuf) -> Result<Self> {
        let (handler, stop) = (Arc::<Scripted>::default(), CancellationToken::new());
        let config = SessionConfig::new(socket, "dranic", "10", Margin::default(), Handle::current())?;
        let session = run(config, handler.clone(), stop.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::spawn(move || runtime.block_on(session));
        Ok(Self { handler, stop, thread: Some(thread) })
    }

    /// Tells it to stop and waits until it has.
    pub(crate) async fn stopped(&mut self) -> Result<()> {
        self.stop.cancel();
        let Some(thread) = self.thread.take() else { return Ok(()) };
        tokio::task::spawn_blocking(|| thread.join()).await?.ok().context("the session panicked")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
