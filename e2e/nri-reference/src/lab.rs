//! One case's world: a runtime side, our room behind a tap, and other plugins; all in a folder of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dranic_testbed::cluster::{Cluster, Options};
use dranic_testbed::fabric::{self, NicSpec};
use dranic_testbed::runtime::scripted::{Script, ScriptedPlugin};
use dranic_testbed::runtime::{Caller, ContainerSpec, Kind, SandboxSpec};
use tempfile::TempDir;

use crate::room::{NAME, Room, Scripted};
use crate::side::{Done, Runtime, Settings, Side};
use crate::tap::{Call, Cut, Tap};

/// What the runtime calls the agent.
pub(crate) const AGENT: &str = "10-dranic.dev";

/// Why a case can't run on this machine.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) String);

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

/// For what happens by itself, on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

pub(crate) struct Lab {
    pub(crate) side: Side,
    folder: TempDir,
    runtime: Option<Runtime>,
    pub(crate) tap: Option<Tap>,
    pub(crate) room: Option<Room>,
    pub(crate) cluster: Option<Cluster>,
}

impl Lab {
    pub(crate) fn new(side: &Side) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("nri-reference-").tempdir()?;
        Ok(Self { side: side.clone(), folder, runtime: None, tap: None, room: None, cluster: None })
    }

    /// Where the reference logs.
    pub(crate) fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("nri.sock")
    }

    /// Starts the runtime side.
    pub(crate) async fn start(&mut self, change: impl FnOnce(&mut Settings)) -> Result<()> {
        let mut settings = Settings::new(self.socket());
        change(&mut settings);
        self.runtime = Some(Runtime::start(&self.side, settings, &self.log()).await?);
        Ok(())
    }

    /// Starts our room, behind the tap, and does not wait for it.
    pub(crate) fn open(&mut self) -> Result<()> {
        self.open_cut(Vec::new())
    }

    /// The same, and its first connections are cut so.
    pub(crate) fn open_cut(&mut self, cuts: Vec<Cut>) -> Result<()> {
        let tapped = self.folder.path().join("tap.sock");
        self.tap = Some(Tap::start(&tapped, self.socket(), cuts)?);
        self.room = Some(Room::start(tapped)?);
        Ok(())
    }

    /// Starts our room with nothing between it and the runtime.
    pub(crate) fn open_untapped(&mut self) -> Result<()> {
        self.room = Some(Room::start(self.socket())?);
        Ok(())
    }

    /// Starts the runtime side with its defaults, and our room; waits until it is connected.
    pub(crate) async fn connected(&mut self) -> Result<()> {
        self.start(|_| ()).await?;
        self.open()?;
        self.has(&[NAME]).await
    }

    /// Starts the runtime side and a scratch node with `nics` NICs and the real agent on it, behind the tap; waits until it is ready.
    ///
    /// # Errors
    /// Also [`Skipped`] where the machine can't have one.
    pub(crate) async fn agent(&mut self, nics: u32, arguments: &[&str]) -> Result<()> {
        let program = std::env::current_exe()?.with_file_name("dranic");
        if !fabric::root() {
            bail!(Skipped("needs root for network namespaces".to_owned()));
        }
        if !program.is_file() {
            bail!(Skipped(format!("{} is not there: cargo build --bin dranic", program.display())));
        }
        self.start(|_| ()).await?;
        let mut options = Options::new(program, (0..nics).map(nic).collect());
        options.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let mut cluster = Cluster::new(options)?;
        // Where its own double of the runtime was is the tap now.
        cluster.runtime.stop(true).await;
        self.tap = Some(Tap::start(&cluster.path("nri.sock"), self.socket(), Vec::new())?);
        cluster.start_agent()?;
        cluster.wait_ready(LIMIT * 2).await?;
        self.cluster = Some(cluster);
        self.has(&[AGENT]).await
    }

    pub(crate) fn cluster(&self) -> Result<&Cluster> {
        self.cluster.as_ref().context("no cluster was made")
    }

    pub(crate) fn cluster_mut(&mut self) -> Result<&mut Cluster> {
        self.cluster.as_mut().context("no cluster was made")
    }

    /// Connects another plugin and waits until it gets requests.
    pub(crate) async fn plugin(&self, script: Script) -> Result<ScriptedPlugin> {
        let name = format!("{}-{}", script.index, script.name);
        let plugin = self.stranger(script).await?;
        self.until(&format!("{name} is connected"), |plugins| plugins.contains(&name)).await?;
        Ok(plugin)
    }

    /// Connects another plugin and does not wait for what becomes of it.
    pub(crate) async fn stranger(&self, script: Script) -> Result<ScriptedPlugin> {
        Ok(ScriptedPlugin::start(&self.socket(), script).await?)
    }

    /// A bare connection to the runtime.
    pub(crate) async fn socket_only(&self) -> Result<tokio::net::UnixStream> {
        Ok(tokio::net::UnixStream::connect(self.socket()).await?)
    }

    /// Waits until exactly these plugins get requests.
    pub(crate) async fn has(&self, wanted: &[&str]) -> Result<()> {
        self.until(&format!("{wanted:?} get requests"), |plugins| plugins == wanted).await
    }

    async fn until(&self, what: &str, wanted: impl Fn(&[String]) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let plugins = self.runtime()?.plugins().await?;
            if wanted(&plugins) {
                return Ok(());
            }
            if start.elapsed() > LIMIT {
                bail!("{what}: not within {LIMIT:?}; there are {plugins:?}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn runtime(&self) -> Result<&Runtime> {
        self.runtime.as_ref().context("no runtime was started")
    }

    pub(crate) fn tap(&self) -> Result<&Tap> {
        self.tap.as_ref().context("no tap was started")
    }

    /// The calls of this kind that the tap has heard; up to NRI 0.11 those of all pod events, since they are of one kind there.
    pub(crate) fn calls(&self, kind: Kind) -> Result<Vec<Call>> {
        let by_event = kind != Kind::Create && !self.side.version.dedicated;
        Ok(self.tap()?.calls_of(if by_event { "StateChange" } else { kind.method() }))
    }

    pub(crate) fn handler(&self) -> Result<&Scripted> {
        Ok(&*self.room.as_ref().context("no room was started")?.handler)
    }

    /// A request within the runtime's own limits; `kind` Create is for a container called "main".
    pub(crate) async fn ask(&self, kind: Kind, pod: &SandboxSpec, caller: Caller) -> Result<Done> {
        let main = container("main");
        self.runtime()?.relay(kind, pod, (kind == Kind::Create).then_some(&main), caller).await
    }

    /// A request without such limits.
    pub(crate) async fn relay(&self, kind: Kind, pod: &SandboxSpec) -> Result<Done> {
        self.ask(kind, pod, Caller::default()).await
    }

    /// A request that must go on.
    pub(crate) async fn fine(&self, kind: Kind, pod: &SandboxSpec) -> Result<Done> {
        let done = self.relay(kind, pod).await?;
        ensure!(done.error.is_none(), "{} of {}: {}", kind.method(), pod.id, done.error.unwrap_or_default());
        Ok(done)
    }

    /// A request that must fail; gives its text.
    pub(crate) async fn fails(&self, kind: Kind, pod: &SandboxSpec) -> Result<String> {
        let done = self.relay(kind, pod).await?;
        done.error.with_context(|| format!("{} of {} went on", kind.method(), pod.id))
    }

    /// The request timeout from now on.
    pub(crate) async fn timeout(&self, limit: Duration) -> Result<()> {
        self.runtime()?.set_request_timeout(limit).await
    }
}

/// NIC `n` is called `nic<n>`; it is up and has an address.
fn nic(n: u32) -> NicSpec {
    let addresses = format!("10.0.{n}.1/24").parse().into_iter().collect();
    NicSpec { name: format!("nic{n}"), rail: n % 8, up: true, addresses, ..NicSpec::default() }
}

/// Waits until something is so.
pub(crate) async fn eventually(what: &str, is_so: impl Fn() -> bool) -> Result<()> {
    let start = Instant::now();
    while !is_so() {
        ensure!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// A pod of ours whose name is its id; see [`Scripted`] for what names mean.
pub(crate) fn ours(id: &str) -> SandboxSpec {
    named(id, id)
}

/// A pod of ours with this id and name.
pub(crate) fn named(id: &str, name: &str) -> SandboxSpec {
    SandboxSpec {
        id: id.to_owned(),
        uid: format!("ours-{id}"),
        name: name.to_owned(),
        namespace: "default".to_owned(),
        netns_path: Some(format!("/run/netns/{id}")),
        ..SandboxSpec::default()
    }
}

/// A container.
pub(crate) fn container(name: &str) -> ContainerSpec {
    ContainerSpec { id: format!("c-{name}"), name: name.to_owned(), ..ContainerSpec::default() }
}

pub(crate) const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}
