//! The cluster as `up.sh` made it: nodes, daemons, agents, the API.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use dranic::agent::status::Status;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::process::Command;

/// No command that a scenario runs takes longer.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Longer than the chart's `minReadySeconds`, by what clocks of one second lose.
const SETTLED: Duration = Duration::from_secs(8);

/// For how long the pod has been ready; none if it is not.
fn ready_since(pod: &Pod) -> Option<Duration> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|c| c.type_ == "Ready" && c.status == "True")?;
    let since = ready.last_transition_time.as_ref()?.0;
    std::time::SystemTime::now().duration_since(since.into()).ok()
}

/// A running cluster.
#[derive(Clone)]
pub(crate) struct Cluster {
    scratch: PathBuf,
    scripts: PathBuf,
    pub(crate) client: Client,
    pub(crate) nodes: Vec<String>,
}

/// Runs `command` to its end.
///
/// # Errors
/// When it fails or takes longer than a minute; with what it wrote to standard error.
pub(crate) async fn output(command: &mut Command) -> Result<String> {
    let text = format!("{:?}", command.as_std());
    let done = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let done = tokio::time::timeout(COMMAND_LIMIT, done).await.with_context(|| format!("{text} takes too long"))??;
    if !done.status.success() {
        bail!("{text}: {}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

impl Cluster {
    pub(crate) async fn connect(scratch: &Path, scripts: &Path) -> Result<Self> {
        let file = scratch.join("pki/admin.kubeconfig");
        let kubeconfig =
            Kubeconfig::read_from(&file).with_context(|| format!("no cluster in {}: make cluster", scratch.display()))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let nodes: BTreeSet<String> = std::fs::read_dir(scratch)?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("node"))
            .collect();
        let client = Client::try_from(config)?;
        client.apiserver_version().await.context("the API server does not answer; is this node1's network namespace?")?;
        Ok(Self { scratch: scratch.to_owned(), scripts: scripts.to_owned(), client, nodes: nodes.into_iter().collect() })
    }

    /// A command that runs `program` inside `node`.
    pub(crate) fn inside(&self, node: &str, program: &[&str]) -> Command {
        let mut command = self.script("in.sh");
        command.arg(node).args(program);
        command
    }

    /// Runs a shell line inside `node`.
    pub(crate) async fn shell(&self, node: &str, line: &str) -> Result<String> {
        output(&mut self.inside(node, &["bash", "-ec", line])).await
    }

    /// `daemon.sh NODE NAME VERB`.
    pub(crate) async fn daemon(&self, node: &str, name: &str, verb: &str) -> Result<()> {
        output(self.script("daemon.sh").args([node, name, verb])).await.map(drop)
    }

    /// Brings the agent to `node`, or takes it away: as a process of `agent.sh`, or by the label that the DaemonSet asks for.
    pub(crate) async fn move_agent(&self, node: &str, there: bool) -> Result<()> {
        if self.scratch.join(node).join("daemons/agent").exists() {
            return self.daemon(node, "agent", if there { "start" } else { "stop" }).await;
        }
        let label = if there { "e2e-agent=yes" } else { "e2e-agent-" };
        output(&mut self.inside("node1", &["kubectl", "label", "node", node, "--overwrite", label])).await.map(drop)
    }

    /// `reboot.sh NODE VERB`: a power cut (`down`), and the node starts again (`up`).
    pub(crate) async fn reboot(&self, node: &str, verb: &str) -> Result<()> {
        output(self.script("reboot.sh").args([node, verb])).await.map(drop)
    }

    /// Whether the agents are processes of `agent.sh`, not the chart's.
    pub(crate) fn agent_is_process(&self) -> bool {
        self.scratch.join("node1/daemons/agent").exists()
    }

    /// Gives all agents these flags beside their own, none to take them away; in the same way as the agents were installed.
    pub(crate) async fn agent_flags(&self, flags: &[&str]) -> Result<()> {
        if self.agent_is_process() {
            output(self.script("agent.sh").arg("stop")).await?;
            return output(self.script("agent.sh").arg("start").env("AGENT_ARGS", flags.join(" "))).await.map(drop);
        }
        let chart = self.script_path("../../charts/dranic");
        let values = format!("agent.extraArgs={}", serde_json::to_string(flags)?);
        let upgrade =
            ["helm", "upgrade", "dranic", &chart, "--namespace", "dranic", "--reuse-values", "--wait", "--timeout", "50s"];
        output(self.inside("node1", &upgrade).args(["--set-json", &values])).await.map(drop)
    }

    /// Gives the chart these values beside those it has (`a.b=c`).
    pub(crate) async fn chart_values(&self, values: &[&str]) -> Result<()> {
        self.agents_settle().await?;
        let chart = self.script_path("../../charts/dranic");
        let upgrade =
            ["helm", "upgrade", "dranic", &chart, "--namespace", "dranic", "--reuse-values", "--wait", "--timeout", "50s"];
        output(self.inside("node1", &upgrade).args(["--set", &values.join(",")])).await.map(drop)
    }

    /// The values of before.
    pub(crate) async fn chart_back(&self) -> Result<()> {
        self.agents_settle().await?;
        let back = ["helm", "rollback", "dranic", "--namespace", "dranic", "--wait", "--timeout", "50s"];
        output(&mut self.inside("node1", &back)).await.map(drop)
    }

    /// Waits until the agents' pods have been ready for longer than the chart's `minReadySeconds` (5 s), at most 30 s. The DaemonSet
    /// controller looks once for pods that became ready within that time, when the first of them has been ready for so long: an update
    /// before that would wait for ever (seen with Kubernetes 1.37).
    pub(crate) async fn agents_settle(&self) -> Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "dranic");
        let end = tokio::time::Instant::now() + Duration::from_secs(30);
        while tokio::time::Instant::now() < end {
            let all = pods.list(&ListParams::default()).await?;
            let settled = |pod: &Pod| ready_since(pod).is_some_and(|since| since > SETTLED);
            if all.items.len() == self.nodes.len() && all.iter().all(settled) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }

    /// Brings NICs back that went with a pod's namespace.
    pub(crate) async fn nics(&self, node: &str, count: u32) -> Result<()> {
        output(self.script("nics.sh").arg(node).arg(count.to_string())).await.map(drop)
    }

    /// Makes one NIC again that died, while others are in pods.
    pub(crate) async fn nic_again(&self, node: &str, name: &str) -> Result<()> {
        output(self.script("nics.sh").args([node, "again", name.trim_start_matches("nic")])).await.map(drop)
    }

    /// The containerd that `up.sh` was asked for: `released`, `policy` or `debian`.
    pub(crate) fn containerd(&self) -> Result<String> {
        let path = std::fs::read_to_string(self.scratch.join("path")).context("the cluster's path of programs")?;
        let folders = path.trim().split(':').filter_map(|folder| folder.rsplit('/').next());
        let chosen = folders.filter_map(|name| name.strip_prefix("bin-")).next();
        chosen.map(str::to_owned).with_context(|| format!("no folder of a containerd in {path}"))
    }

    pub(crate) fn script(&self, name: &str) -> Command {
        let mut command = Command::new(self.scripts.join(name));
        command.env("DRANIC_CLUSTER", &self.scratch);
        command
    }

    /// Path of a file beside the scripts.
    pub(crate) fn script_path(&self, name: &str) -> String {
        self.scripts.join(name).display().to_string()
    }

    pub(crate) fn scratch(&self) -> &Path {
        &self.scratch
    }

    pub(crate) fn log(&self, node: &str, name: &str) -> PathBuf {
        self.scratch.join(node).join("log").join(format!("{name}.log"))
    }

    /// Process 1 of `node`, as this machine numbers it.
    pub(crate) fn init_pid(&self, node: &str) -> Result<u32> {
        let file = self.scratch.join(node).join("init.pid");
        let text = std::fs::read_to_string(&file).with_context(|| format!("{}", file.display()))?;
        text.trim().parse().with_context(|| format!("{}", file.display()))
    }

    /// What the agent of `node` says of itself.
    pub(crate) async fn status(&self, node: &str) -> Result<Status> {
        let socket = format!("/proc/{}/root/run/dranic/dranic.sock", self.init_pid(node)?);
        let read = async {
            let mut stream = tokio::net::UnixStream::connect(&socket).await?;
            let mut text = String::new();
            tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await?;
            Ok::<_, std::io::Error>(text)
        };
        let text = tokio::time::timeout(Duration::from_secs(10), read).await.context("the agent's status takes too long")??;
        serde_json::from_str(&text).context("the agent's status")
    }

    /// Processes of the agent on `node`, as this machine numbers them. Two during a rolling update. It runs in the node's network
    /// namespace, whether in a container or not.
    pub(crate) fn agents(&self, node: &str) -> Result<Vec<u32>> {
        let network = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let home = network(self.init_pid(node)?).with_context(|| format!("{node} is not up"))?;
        let is_agent = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = line.split(|b| *b == 0);
            words.next().is_some_and(|program| program.ends_with(b"dranic")) && words.next() == Some(b"agent")
        };
        Ok(processes().into_iter().filter(is_agent).filter(|pid| network(*pid).as_ref() == Some(&home)).collect())
    }

    /// Sends KILL to the agent of `node`.
    pub(crate) async fn kill_agent(&self, node: &str) -> Result<()> {
        let agents = self.agents(node)?;
        ensure!(!agents.is_empty(), "no agent runs on {node}");
        for pid in agents {
            // It may have ended by itself meanwhile.
            output(Command::new("kill").args(["-KILL", &pid.to_string()])).await.ok();
        }
        Ok(())
    }
}

/// All processes of this machine.
pub(crate) fn processes() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}
