//! A scratch cluster of one node: NICs on a fabric, doubles of API server and kubelet, and `dranic agent` as a real process: a
//! [`Site`]. [`Cluster`] adds the double of the runtime, [`RealCluster`] a real containerd. Everything goes when it is dropped.

mod agent;
mod container;
mod disturb;
mod pod;
mod real;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dranic::agent::status::Status;
use dranic::netdev::host_state::{self, Snapshot};
use dranic::netdev::{Difference, HostState};

use crate::apiserver::{ApiServerDouble, ClaimConfig, claim_json};
use crate::fabric::{Fabric, NicSpec, Node, PodDir};
use crate::kubelet::{Claim, KubeletDouble};
use crate::runtime::{RuntimeDouble, RuntimeOptions};

pub use agent::Agent;
pub use container::Starting;
pub use pod::Pod;
pub use real::RealCluster;

/// Name of the node.
pub const NODE: &str = "node-1";

/// What the cluster shall be.
pub struct Options {
    /// The `dranic` program.
    pub program: PathBuf,
    /// Driver name.
    pub driver: String,
    /// The node's NICs.
    pub nics: Vec<NicSpec>,
    /// More arguments for the agent.
    pub arguments: Vec<String>,
    /// Nobody takes what the agent logs.
    pub deaf_log: bool,
    /// The runtime, for the socket it is given; a [`RealCluster`] has its own.
    pub runtime: fn(PathBuf) -> RuntimeOptions,
}

impl Options {
    /// A cluster with `nics` and the defaults of a new runtime.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, nics: Vec<NicSpec>) -> Self {
        Self {
            program: program.into(),
            driver: "dranic.dev".to_owned(),
            nics,
            arguments: Vec::new(),
            deaf_log: false,
            runtime: |socket| RuntimeOptions::new(socket),
        }
    }
}

/// A node with NICs, its kubelet and API server, and the agent; all but the runtime.
pub struct Site {
    /// The agent; none while it is stopped.
    pub agent: Option<Agent>,
    /// API server.
    pub api: ApiServerDouble,
    /// Kubelet.
    pub kubelet: KubeletDouble,
    /// The node.
    pub node: Node,
    /// What its NICs are connected to.
    pub fabric: Fabric,
    options: Options,
    /// The runtime's NRI socket, as the agent finds it.
    nri_socket: PathBuf,
    dir: PathBuf,
}

/// A [`Site`] with the double of the runtime.
pub struct Cluster {
    site: Site,
    /// Container runtime.
    pub runtime: RuntimeDouble,
    /// Pods' namespaces.
    pub pods: PodDir,
    _dir: tempfile::TempDir,
}

impl Deref for Cluster {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

impl DerefMut for Cluster {
    fn deref_mut(&mut self) -> &mut Site {
        &mut self.site
    }
}

impl Cluster {
    /// Makes node, NICs and doubles; starts no agent yet.
    ///
    /// # Errors
    /// When something can't be made, for example without root.
    pub fn new(options: Options) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("dranic-").tempdir().context("a folder for the cluster")?;
        let socket = dir.path().join("nri.sock");
        let runtime = (options.runtime)(socket.clone());
        let site = Site::new(options, Node::new()?, dir.path(), socket)?;
        let pods = PodDir::new(&site.path("netns"))?;
        Ok(Self { site, runtime: RuntimeDouble::start(runtime)?, pods, _dir: dir })
    }

    /// [`Self::new`], with an agent that is ready.
    ///
    /// # Errors
    /// When something can't be made, or the agent is not ready within 20 s.
    pub async fn start(options: Options) -> Result<Self> {
        let mut cluster = Self::new(options)?;
        cluster.start_agent()?;
        cluster.wait_ready(Duration::from_secs(20)).await?;
        Ok(cluster)
    }

    /// [`Site::claim_for`] a pod of this cluster.
    ///
    /// # Errors
    /// When a NIC is not published.
    pub fn claim(&self, name: &str, pod: &Pod, nics: &[String], configs: &[ClaimConfig]) -> Result<Claim> {
        self.claim_for(name, (&pod.name, &pod.uid), nics, configs)
    }

    /// Every difference between two looks at the host, by NIC.
    #[must_use]
    pub fn differences(before: &BTreeMap<String, HostState>, after: &BTreeMap<String, HostState>) -> Vec<(String, Difference)> {
        let mut all = Vec::new();
        for (name, state) in before {
            match after.get(name) {
                Some(now) => all.extend(host_state::compare(state, now).into_iter().map(|d| (name.clone(), d))),
                None => all.push((
                    name.clone(),
                    Difference { what: "link".to_owned(), before: "on the host".to_owned(), after: String::new() },
                )),
            }
        }
        all
    }
}

impl Site {
    /// Makes NICs in `node` and the doubles; `dir` has the same path in the node. Starts no agent yet.
    ///
    /// # Errors
    /// When something can't be made, for example without root.
    pub fn new(options: Options, node: Node, dir: &Path, nri_socket: PathBuf) -> Result<Self> {
        let fabric = Fabric::new()?;
        for nic in &options.nics {
            fabric.add_nic(&node, nic)?;
        }
        std::fs::create_dir_all(dir)?;
        let listener = node.netns().run(|| TcpListener::bind("127.0.0.1:0"))?.context("a socket for the API server")?;
        let api = ApiServerDouble::start(listener)?;
        api.add_node(NODE);
        api.write_kubeconfig(&dir.join("kubeconfig"))?;
        let kubelet = KubeletDouble::start(&dir.join("kubelet"))?;
        Ok(Self { agent: None, api, kubelet, node, fabric, options, nri_socket, dir: dir.to_owned() })
    }

    /// A path in the cluster's folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts the agent.
    ///
    /// # Errors
    /// When the program can't be run.
    pub fn start_agent(&mut self) -> Result<()> {
        self.agent = Some(Agent::spawn(&self.options, &self.node, &self.dir, &self.nri_socket)?);
        Ok(())
    }

    /// Ends the agent at once, as a crash or the OOM killer does.
    ///
    /// # Errors
    /// When there is none.
    pub fn kill_agent(&mut self) -> Result<()> {
        self.agent.take().context("there is no agent")?.kill()
    }

    /// Waits until kubelet and runtime have the agent and every NIC is published (beside the ends of pods, if there are any).
    ///
    /// # Errors
    /// When it takes longer than `limit`, with what is missing and the agent's log.
    pub async fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        let wanted = self.options.nics.len();
        loop {
            let status = self.status();
            if let Ok(status) = &status
                && (status.nri_connected || status.nri.starts_with("off"))
                && status.kubelet == "registered"
                && status.published_devices >= wanted
                && self.kubelet.wait_driver(&self.options.driver, Duration::from_millis(1)).await.is_ok()
            {
                return Ok(());
            }
            let ended = self.agent.as_mut().is_none_or(Agent::has_ended);
            ensure!(
                begin.elapsed() < limit && !ended,
                "the agent {} after {:?}: {status:?}\n{}",
                if ended { "ended" } else { "is not ready" },
                begin.elapsed(),
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What `dranic status` would show.
    ///
    /// # Errors
    /// When no agent answers.
    pub fn status(&self) -> Result<Status> {
        agent::status(&self.path("status.sock"))
    }

    /// The agent's log, all of it, over all its starts.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("agent.log")).unwrap_or_default()
    }

    /// Name of the device that is published for the NIC `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn device(&self, name: &str) -> Result<String> {
        let key = |device: &serde_json::Value| {
            device["attributes"]["ifName"]["string"].as_str() == Some(name)
                || device["attributes"][format!("{}/ifName", self.options.driver)]["string"].as_str() == Some(name)
        };
        let slices = self.api.slices();
        let devices = slices.iter().filter_map(|s| s["spec"]["devices"].as_array()).flatten();
        let found = devices.into_iter().find(|d| key(d)).and_then(|d| d["name"].as_str());
        found.map(str::to_owned).with_context(|| format!("no device is published for {name}"))
    }

    /// Does what user and scheduler do: a claim in namespace `default`, with one request `r<n>` for each NIC, allocated and
    /// reserved for the pod with this name and UID.
    ///
    /// # Errors
    /// When a NIC is not published.
    pub fn claim_for(&self, name: &str, pod: (&str, &str), nics: &[String], configs: &[ClaimConfig]) -> Result<Claim> {
        let requests: Vec<String> = (0..nics.len()).map(|n| format!("r{n}")).collect();
        let names: Vec<&str> = requests.iter().map(String::as_str).collect();
        let uid = self.api.create_claim(claim_json("default", name, "nic", &names, configs));
        let devices: Vec<String> = nics.iter().map(|nic| self.device(nic)).collect::<Result<_>>()?;
        let devices: Vec<[&str; 1]> = devices.iter().map(|d| [d.as_str()]).collect();
        let results: Vec<(&str, &[&str])> = names.iter().copied().zip(devices.iter().map(|d| &d[..])).collect();
        self.api.allocate("default", name, &self.options.driver, NODE, &results, pod, configs)?;
        Ok(Claim { namespace: "default".to_owned(), uid, name: name.to_owned() })
    }

    /// More arguments for agents that are started from now on, instead of those before.
    pub fn set_arguments(&mut self, arguments: &[&str]) {
        self.options.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    }

    /// Prepares claims as the kubelet does; the first error, if there is one.
    ///
    /// # Errors
    /// The text that the kubelet would show.
    pub async fn prepare(&self, claims: &[Claim]) -> Result<()> {
        for (uid, outcome) in self.kubelet.prepare(&self.options.driver, claims).await? {
            outcome.map_err(|error| anyhow::anyhow!("claim {uid}: {error}"))?;
        }
        Ok(())
    }

    /// Unprepares claims.
    ///
    /// # Errors
    /// The text that the kubelet would show.
    pub async fn unprepare(&self, claims: &[Claim]) -> Result<()> {
        for (uid, outcome) in self.kubelet.unprepare(&self.options.driver, claims).await? {
            outcome.map_err(|error| anyhow::anyhow!("claim {uid}: {error}"))?;
        }
        Ok(())
    }

    /// The host state of every NIC that is on the host, by name, once no address is tentative any more.
    ///
    /// # Errors
    /// When the node can't be read, or an address stays tentative for 10 s.
    pub fn host_states(&self) -> Result<BTreeMap<String, HostState>> {
        let begin = Instant::now();
        let snapshot = loop {
            let seen = Snapshot::take(&mut self.node.socket()?, Instant::now() + Duration::from_secs(10))?;
            if !seen.addresses.iter().any(|(_, a)| a.flags & dranic::netdev::address::IFA_F_TENTATIVE != 0) {
                break seen;
            }
            ensure!(begin.elapsed() < Duration::from_secs(10), "an address stays tentative");
            std::thread::sleep(Duration::from_millis(50));
        };
        let mut states = BTreeMap::new();
        for nic in &self.options.nics {
            if let Some(link) = snapshot.links.iter().find(|l| l.name == nic.name) {
                let state = self.node.netns().run(|| snapshot.host_state(link.index))?;
                states.insert(nic.name.clone(), state.context("the NIC went away")?);
            }
        }
        Ok(states)
    }
}
