//! A real containerd from Debian's packages in a scratch node, driven over CRI.
//!
//! The node is a set of namespaces (mount, net, pid, uts, ipc) with production's paths inside: `/run/containerd/containerd.sock`,
//! `/run/nri/nri.sock`, `/run/cdi`, `/var/lib/kubelet`, `/var/run/netns/...`. What is made under `/run` and `/var/lib` lies in a
//! scratch folder; the rest of the file system is the host's. When the [`Containerd`] is dropped, all processes, mounts, links,
//! cgroups and files of the node are gone. When the test's process is killed, files and empty cgroups wait for the next start.

mod config;
mod cri;
mod image;
mod kit;
mod node;
mod scratch;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use dranic::netns::{Netns, NetnsError};
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

pub use cri::{Exec, PodSpec, v1};
pub use kit::{Kit, NoContainerd};
use node::Node;

use crate::fabric;

/// The image of every container: a busybox.
pub const IMAGE: &str = "dranic.test/busybox:1";
const PAUSE_IMAGE: &str = "dranic.test/pause:1";

const SOCKET: &str = "/run/containerd/containerd.sock";
/// The NRI socket, as programs of the node find it.
pub const NRI_SOCKET: &str = "/run/nri/nri.sock";

/// How long containerd may take to answer after its start; it takes some 0.3 s on a quiet machine, and over 30 s in the virtual machine
/// on a busy one.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long one CRI call may take.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// How long a program may take to end after SIGTERM.
const TERM_LIMIT: Duration = Duration::from_secs(15);

/// How containerd is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// What an NRI plugin has for one request; containerd's own default is 2 s.
    pub nri_request_timeout: Option<Duration>,
    /// What an NRI plugin has for its registration; containerd's own default is 5 s.
    pub nri_registration_timeout: Option<Duration>,
    /// containerd's log level: `debug`, `info`, `warn`, ...
    pub log_level: String,
}

impl Default for Options {
    fn default() -> Self {
        Self { nri_request_timeout: None, nri_registration_timeout: None, log_level: "info".to_owned() }
    }
}

/// A running containerd in a scratch node.
#[derive(Debug)]
pub struct Containerd {
    channel: Channel,
    node: Node,
}

impl Containerd {
    /// Starts a node with containerd in it and waits until pods can be made.
    ///
    /// # Errors
    /// When containerd does not come up; the text has the end of its log.
    pub async fn start(kit: &Kit, options: &Options) -> anyhow::Result<Self> {
        let node = Node::start(kit, |scratch| {
            let path = scratch.to_str().context("scratch folder is not UTF-8")?;
            std::fs::write(scratch.join("config.toml"), config::containerd(kit, path, options))?;
            std::fs::create_dir(scratch.join("cni"))?;
            std::fs::write(scratch.join("cni/10-pods.conflist"), config::cni())?;
            image::write(&kit.program("busybox"), &scratch.join("images.tar"), &[IMAGE, PAUSE_IMAGE])
        })?;
        let channel = connect(host_path(&node, SOCKET))?;
        let mut containerd = Self { channel, node };
        containerd.wait_ready().await?;
        containerd.import_images(kit)?;
        Ok(containerd)
    }

    /// The node's network namespace: NICs made there are the node's NICs.
    ///
    /// # Errors
    /// When the node has ended.
    pub fn netns(&self) -> Result<Netns, NetnsError> {
        Netns::open(&self.node.namespace("net"))
    }

    /// The node, for NICs and for programs that are children of the test's process ([`fabric::NodeCommand`]).
    ///
    /// # Errors
    /// When the node has ended.
    pub fn node(&self) -> anyhow::Result<fabric::Node> {
        fabric::Node::of(&self.node.namespaces())
    }

    /// A command that runs `program` (an absolute path) in the node, with `/` as its working directory. Killing the child
    /// kills the program; [`Containerd::terminate`] asks it to end. It can't outlive the node.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.node.command(program.as_ref())
    }

    /// Sends SIGTERM to the program of a [`Containerd::command`] and waits for its end, 15 s at most.
    ///
    /// # Errors
    /// When it has ended before, or does not end in time; then it is killed.
    pub fn terminate(&self, program: &mut Child) -> anyhow::Result<ExitStatus> {
        node::terminate(program, TERM_LIMIT)
    }

    /// Where the test's process finds a path of the node under `/run`, `/var/run` or `/var/lib`. Other paths are the same in both.
    #[must_use]
    pub fn path(&self, in_node: &str) -> PathBuf {
        host_path(&self.node, in_node)
    }

    /// The NRI socket, as the test's process finds it. In the node it is [`NRI_SOCKET`].
    #[must_use]
    pub fn nri_socket(&self) -> PathBuf {
        self.path(NRI_SOCKET)
    }

    /// A folder for files of a test; it has the same path inside and outside of the node and vanishes with it.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.node.scratch()
    }

    /// The cgroup of all pods, relative to the root of each hierarchy.
    #[must_use]
    pub fn cgroup(&self) -> String {
        self.node.cgroup()
    }

    /// The pids, as the test's process sees them, of all processes directly in the node: containerd, its shims, programs of
    /// [`Containerd::command`]. Those in containers have pid namespaces of their own and are not among them.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.node.processes()
    }

    /// containerd's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch().join("containerd.log")).unwrap_or_default()
    }

    /// Kills containerd (SIGKILL); pods go on. It stays down until [`Containerd::restart`].
    ///
    /// # Errors
    /// When it does not run.
    pub fn kill(&self) -> anyhow::Result<()> {
        std::fs::write(self.scratch().join("hold"), "")?;
        let pid_file = self.scratch().join("containerd.pid");
        let pid = std::fs::read_to_string(&pid_file).context("containerd does not run")?;
        self.run(Path::new("/bin/sh"), &["-c", &format!("kill -KILL {pid}")])?;
        let end = Instant::now() + TERM_LIMIT;
        while pid_file.exists() {
            ensure!(Instant::now() < end, "containerd survived SIGKILL");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Starts containerd again after [`Containerd::kill`] and waits until it answers.
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        std::fs::remove_file(self.scratch().join("hold")).context("containerd was not killed")?;
        self.wait_ready().await
    }

    /// Waits until containerd answers and says that it and the pod network are ready.
    async fn wait_ready(&mut self) -> anyhow::Result<()> {
        let end = Instant::now() + START_LIMIT;
        loop {
            if self.is_ready().await {
                return Ok(());
            }
            if let Some(status) = self.node.ended()? {
                let said = std::fs::read_to_string(self.scratch().join("node.log")).unwrap_or_default();
                bail!("the node ended ({status}): {said}");
            }
            if Instant::now() >= end {
                bail!("containerd is not ready after {START_LIMIT:?}; its log ends with:\n{}", last_lines(&self.log(), 20));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn is_ready(&self) -> bool {
        let Ok(reply) = self.client().status(v1::StatusRequest::default()).await else { return false };
        let conditions = reply.into_inner().status.map(|status| status.conditions).unwrap_or_default();
        let is = |kind: &str| conditions.iter().any(|condition| condition.r#type == kind && condition.status);
        is("RuntimeReady") && is("NetworkReady")
    }

    fn import_images(&self, kit: &Kit) -> anyhow::Result<()> {
        let archive = self.scratch().join("images.tar");
        let archive = archive.to_str().context("scratch folder is not UTF-8")?;
        self.run(
            &kit.program("ctr"),
            &["--namespace", "k8s.io", "images", "import", "--local", "--snapshotter", "native", archive],
        )
    }

    /// Runs a program in the node to its end.
    fn run(&self, program: &Path, arguments: &[&str]) -> anyhow::Result<()> {
        let output = self.command(program).args(arguments).stdin(Stdio::null()).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} {arguments:?}: {}: {errors}", program.display(), output.status);
        Ok(())
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("containerd's log ends with:\n{}", last_lines(&self.log(), 20));
        }
    }
}

fn host_path(node: &Node, in_node: &str) -> PathBuf {
    let path = in_node.strip_prefix("/var").filter(|rest| rest.starts_with("/run")).unwrap_or(in_node);
    if path.starts_with("/run/") || path.starts_with("/var/lib/") {
        node.scratch().join("root").join(path.trim_start_matches('/'))
    } else {
        PathBuf::from(path)
    }
}

/// A lazy connection: the socket need not be there yet, and it reconnects after a restart of containerd.
fn connect(socket: PathBuf) -> anyhow::Result<Channel> {
    // The address is a mere form: the connector below decides where to.
    let endpoint = Endpoint::try_from("http://localhost")?.timeout(CALL_LIMIT);
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    })))
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
