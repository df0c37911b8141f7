//! A session with a scripted handler, on a thread of its own as in the agent, beside a double of the runtime.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dranic::nri::session::{Margin, SessionConfig, run};
use dranic::nri::{Adjustment, Container, HookError, RequestTime, Sandbox, SandboxHandler};
use dranic_testbed::runtime::{RuntimeDouble, RuntimeOptions, SandboxSpec};
use tempfile::TempDir;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Longer than anything here takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
/// The plugin's name in the runtime.
pub(crate) const PLUGIN: &str = "10-dranic";

/// What a hook does.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Succeed,
    Fail(&'static str),
    Panic,
    /// Works this long, whatever the deadline.
    Work(Duration),
}

/// What the handler was told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Seen {
    Begin(&'static str, Sandbox, RequestTime),
    End(&'static str, String),
    Container(Container),
    Synchronize(Vec<Sandbox>, Vec<Container>),
    Connection(bool, String),
}

/// Pods whose UID starts with "ours" are ours.
pub(crate) struct Scripted {
    step: Mutex<Step>,
    /// What every container gets.
    pub(crate) adjustment: Mutex<Adjustment>,
    seen: Mutex<Vec<Seen>>,
    changed: watch::Sender<usize>,
    pub(crate) asked: AtomicUsize,
}

impl Scripted {
    pub(crate) fn new() -> Arc<Self> {
        let (changed, asked) = (watch::Sender::new(0), AtomicUsize::new(0));
        Arc::new(Self { step: Mutex::new(Step::Succeed), adjustment: Mutex::default(), seen: Mutex::default(), changed, asked })
    }

    pub(crate) fn set(&self, step: Step) {
        *self.step.lock().unwrap() = step;
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Waits until what was seen fulfils a condition, and returns it.
    pub(crate) async fn wait(&self, what: &str, wanted: impl Fn(&[Seen]) -> bool) -> Vec<Seen> {
        let mut changed = self.changed.subscribe();
        let done = changed.wait_for(|_| wanted(&self.seen()));
        let done = tokio::time::timeout(LIMIT, done).await.is_ok();
        assert!(done, "{what} not seen: {:#?}", self.seen());
        self.seen()
    }

    pub(crate) async fn wait_connections(&self, up: bool, count: usize) -> Vec<String> {
        let of = |seen: &[Seen]| -> Vec<String> {
            let detail = |seen: &Seen| match seen {
                Seen::Connection(state, detail) if *state == up => Some(detail.clone()),
                _ => None,
            };
            seen.iter().filter_map(detail).collect()
        };
        of(&self.wait("connection", |seen| of(seen).len() >= count).await)
    }

    pub(crate) fn ended(&self, hook: &str) -> usize {
        self.seen().iter().filter(|seen| matches!(seen, Seen::End(ended, _) if *ended == hook)).count()
    }

    fn add(&self, seen: Seen) {
        self.seen.lock().unwrap().push(seen);
        self.changed.send_modify(|count| *count += 1);
    }

    async fn work(&self, hook: &'static str, sandbox: Sandbox, time: RequestTime) -> Result<(), HookError> {
        let id = sandbox.id.clone();
        // Read first: a test that has seen the beginning may set the next step.
        let step = self.step.lock().unwrap().clone();
        self.add(Seen::Begin(hook, sandbox, time));
        let result = match step {
            Step::Succeed => Ok(()),
            Step::Fail(text) => Err(HookError(text.to_owned())),
            Step::Panic => panic!("as the test wants"),
            Step::Work(length) => {
                tokio::time::sleep(length).await;
                Ok(())
            }
        };
        self.add(Seen::End(hook, id));
        result
    }
}

impl SandboxHandler for Scripted {
    fn is_ours(&self, pod_uid: &str) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        pod_uid.starts_with("ours")
    }

    async fn run_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) -> Result<(), HookError> {
        self.work("run", sandbox, time).await
    }

    async fn create_container(&self, sandbox: Sandbox, container: Container, time: RequestTime) -> Result<Adjustment, HookError> {
        self.add(Seen::Container(container));
        self.work("create", sandbox, time).await?;
        Ok(self.adjustment.lock().unwrap().clone())
    }

    async fn stop_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) {
        let _ = self.work("stop", sandbox, time).await;
    }

    async fn remove_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) {
        let _ = self.work("remove", sandbox, time).await;
    }

    async fn synchronize(&self, sandboxes: Vec<Sandbox>, containers: Vec<Container>) {
        self.add(Seen::Synchronize(sandboxes, containers));
    }

    fn connection(&self, up: bool, detail: &str) {
        self.add(Seen::Connection(up, detail.to_owned()));
    }
}

/// The session; it stops when this is dropped.
pub(crate) struct Session {
    pub(crate) handler: Arc<Scripted>,
    pub(crate) stop: CancellationToken,
    pub(crate) thread: Option<std::thread::JoinHandle<()>>,
}

impl Session {
    pub(crate) fn start(socket: PathBuf) -> Self {
        let (handler, stop) = (Scripted::new(), CancellationToken::new());
        let config = SessionConfig::new(socket, "dranic", "10", Margin::default(), Handle::current()).unwrap();
        let session = run(config, handler.clone(), stop.clone());
        let thread = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(session);
        });
        Self { handler, stop, thread: Some(thread) }
    }

    /// Tells it to stop and waits until it has.
    pub(crate) async fn stopped(mut self) {
        self.stop.cancel();
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Both sides, connected through a socket in a folder of their own.
pub(crate) struct Rig {
    pub(crate) double: RuntimeDouble,
    pub(crate) session: Session,
    pub(crate) handler: Arc<Scripted>,
    pub(crate) folder: TempDir,
}

impl Rig {
    /// Both sides started; the plugin need not be connected yet.
    pub(crate) fn start(change: impl FnOnce(RuntimeOptions) -> RuntimeOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nri.sock");
        let double = RuntimeDouble::start(change(RuntimeOptions::new(&socket))).unwrap();
        let session = Session::start(socket);
        let handler = session.handler.clone();
        Self { double, session, handler, folder }
    }

    /// Both sides, connected.
    pub(crate) async fn ready(change: impl FnOnce(RuntimeOptions) -> RuntimeOptions) -> Self {
        let rig = Self::start(change);
        rig.double.wait_plugin(PLUGIN, LIMIT).await.unwrap();
        rig
    }
}

/// A pod of ours with this sandbox id.
pub(crate) fn ours(id: &str) -> SandboxSpec {
    SandboxSpec {
        id: id.to_owned(),
        uid: format!("ours-{id}"),
        name: format!("pod-{id}"),
        namespace: "default".to_owned(),
        netns_path: Some(format!("/run/netns/{id}")),
        padding: 0,
        lost: None,
    }
}

/// A pod that has nothing to do with us.
pub(crate) fn foreign(id: &str) -> SandboxSpec {
    SandboxSpec { uid: format!("foreign-{id}"), ..ours(id) }
}
