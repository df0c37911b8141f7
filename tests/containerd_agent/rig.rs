//! What the tests of the agent under a real containerd share.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dranic::agent::status::DeviceStatus;
use dranic::ledger::Phase;
use dranic::netdev::HostState;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options, RealCluster};
use dranic_testbed::containerd::{self, Kit, NoContainerd, PodSpec};
use dranic_testbed::fabric::NicSpec;
use dranic_testbed::kubelet::Claim;

/// The agent.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_dranic");
pub(crate) const DRIVER: &str = "dranic.dev";

/// Each test is over by then, whatever hangs. A test takes some seconds on a quiet machine.
const LIMIT: Duration = Duration::from_secs(240);
/// How long the agent may take for what it does in the background.
const SOON: Duration = Duration::from_secs(20);

/// A node with `nics` NICs, a real containerd and a ready agent, and what its NICs were before.
pub(crate) struct Rig {
    pub(crate) cluster: RealCluster,
    pub(crate) before: BTreeMap<String, HostState>,
}

/// Runs `test` on a node with `nics` NICs, within the limit, and looks whether anything stays behind.
pub(crate) async fn on_node(
    nics: u32,
    runtime: containerd::Options,
    test: impl AsyncFnOnce(&mut Rig) -> Result<()>,
) -> Result<()> {
    on_node_with(nics, runtime, |_| {}, test).await
}

/// As [`on_node`], with an agent that is told something else.
pub(crate) async fn on_node_with(
    nics: u32,
    runtime: containerd::Options,
    change: impl FnOnce(&mut Options),
    test: impl AsyncFnOnce(&mut Rig) -> Result<()>,
) -> Result<()> {
    let kit = match Kit::get() {
        Ok(kit) => kit,
        Err(NoContainerd::Skip(reason)) => {
            println!("skipped: {reason}");
            return Ok(());
        }
        Err(NoContainerd::Failed(error)) => return Err(error),
    };
    let run = async {
        let mut options = Options::new(PROGRAM, (0..nics).map(nic).collect());
        change(&mut options);
        let cluster = RealCluster::start(&kit, &runtime, options).await?;
        // The agent has touched nothing by now: no claim is prepared.
        let before = cluster.host_states()?;
        ensure!(before.len() == nics as usize, "not all NICs are on the host: {before:?}");
        let mut rig = Rig { cluster, before };
        let result = test(&mut rig).await;
        if result.is_err() {
            eprintln!("the agent's log:\n{}", rig.cluster.log());
            eprintln!("containerd's log:\n{}", rig.cluster.containerd.log());
        }
        result.and_then(|()| rig.end())
    };
    tokio::time::timeout(LIMIT, run).await.with_context(|| format!("not done after {LIMIT:?}"))?
}

/// NIC `n`: jumbo frames, both IP families, up, a rail of its own.
fn nic(n: u32) -> NicSpec {
    NicSpec {
        name: format!("nic{n}"),
        rail: n,
        mtu: Some(9000),
        up: true,
        addresses: [format!("10.100.{n}.1/24"), format!("fd00:64:{:x}::1/64", n + 1)]
            .map(|a| a.parse().expect("an address"))
            .into(),
        ..NicSpec::default()
    }
}

/// Names of NICs.
pub(crate) fn nics(numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.map(|n| format!("nic{n}")).collect()
}

/// Opaque parameters of request `r<n>` of a claim.
pub(crate) fn config(n: u32, parameters: &str) -> ClaimConfig {
    ClaimConfig { requests: vec![format!("r{n}")], ..ClaimConfig::from_claim(DRIVER, parameters) }
}

/// A container on its way.
pub(crate) struct Starting(tokio::task::JoinHandle<Result<String>>);

impl Starting {
    /// Fails if it has started, or failed, within `time`.
    pub(crate) async fn still_waits(&self, time: Duration) -> Result<()> {
        tokio::time::sleep(time).await;
        ensure!(!self.0.is_finished(), "the container is not held back");
        Ok(())
    }

    /// Its id, once it runs.
    pub(crate) async fn started(self) -> Result<String> {
        self.0.await?
    }
}

impl Rig {
    /// A claim for `nics`, allocated to `pod`, prepared.
    pub(crate) async fn prepared(&self, name: &str, pod: &PodSpec, nics: &[String], configs: &[ClaimConfig]) -> Result<Claim> {
        let claim = self.cluster.claim_for(name, (&pod.name, &pod.uid), nics, configs)?;
        self.cluster.prepare(std::slice::from_ref(&claim)).await?;
        Ok(claim)
    }

    pub(crate) async fn unprepare(&self, claim: &Claim) -> Result<()> {
        self.cluster.unprepare(std::slice::from_ref(claim)).await
    }

    /// As [`Rig::run`], again and again as a kubelet does, with a new sandbox each time.
    pub(crate) async fn run_until_it_works(&self, pod: &PodSpec) -> Result<String> {
        let end = Instant::now() + SOON;
        for attempt in 0.. {
            match self.run(&PodSpec { attempt, ..pod.clone() }).await {
                Ok((sandbox, _)) => return Ok(sandbox),
                Err(error) if Instant::now() >= end => return Err(error.context(format!("{attempt} attempts"))),
                Err(error) => println!("{error:#}"),
            }
        }
        unreachable!("it returns")
    }

    /// CRI RunPodSandbox; gives its time as well.
    pub(crate) async fn run(&self, pod: &PodSpec) -> Result<(String, Duration)> {
        let begin = Instant::now();
        let sandbox =
            self.cluster.containerd.run_pod_sandbox(pod).await.with_context(|| format!("RunPodSandbox {}", pod.name))?;
        Ok((sandbox, begin.elapsed()))
    }

    /// Creates and starts a container.
    pub(crate) async fn start(&self, sandbox: &str, pod: &PodSpec, name: &str) -> Result<String> {
        let containerd = &self.cluster.containerd;
        let container = containerd.create_container(sandbox, pod, name, &[]).await.context("CreateContainer")?;
        containerd.start_container(&container).await.context("StartContainer")?;
        Ok(container)
    }

    /// Names of the claim's CDI devices, as the kubelet hands them to the runtime with each container that uses the claim.
    pub(crate) fn cdi_devices(&self, claim: &Claim) -> Result<Vec<String>> {
        let file = self.cluster.path("cdi").join(format!("dranic-{DRIVER}-{}.json", claim.uid));
        let spec: serde_json::Value = serde_json::from_slice(&std::fs::read(file)?)?;
        let kind = spec["kind"].as_str().context("no kind")?;
        let names = spec["devices"].as_array().context("no devices")?.iter().filter_map(|device| device["name"].as_str());
        Ok(names.map(|name| format!("{kind}={name}")).collect())
    }

    /// As [`Rig::start`], of a container that uses the claim; in the background, as the kubelet does.
    pub(crate) fn start_with(&self, sandbox: &str, pod: &PodSpec, name: &str, claim: &Claim) -> Result<Starting> {
        let devices = self.cdi_devices(claim)?;
        let create = self.cluster.containerd.container_request(
            sandbox,
            pod,
            name,
            &devices.iter().map(String::as_str).collect::<Vec<_>>(),
        );
        let mut client = self.cluster.containerd.client();
        Ok(Starting(tokio::spawn(async move {
            let container = client.create_container(create).await.context("CreateContainer")?.into_inner().container_id;
            let start = containerd::v1::StartContainerRequest { container_id: container.clone() };
            client.start_container(start).await.context("StartContainer")?;
            Ok(container)
        })))
    }

    pub(crate) async fn stop(&self, sandbox: &str) -> Result<()> {
        self.cluster.containerd.stop_pod_sandbox(sandbox).await.context("StopPodSandbox")?;
        self.cluster.containerd.remove_pod_sandbox(sandbox).await.context("RemovePodSandbox")
    }

    /// What a program in a container says.
    pub(crate) async fn exec(&self, container: &str, command: &str) -> Result<String> {
        let done = self.cluster.containerd.exec_sync(container, &["sh", "-c", command]).await?;
        ensure!(done.code == 0, "{command}: {done:?}");
        Ok(done.stdout)
    }

    /// Names of the links in a container, sorted.
    pub(crate) async fn links(&self, container: &str) -> Result<Vec<String>> {
        Ok(self.exec(container, "ls /sys/class/net").await?.split_whitespace().map(str::to_owned).collect())
    }

    /// What of its links no restart may change.
    pub(crate) async fn identities(&self, container: &str) -> Result<String> {
        self.exec(container, "cd /sys/class/net; grep . */ifindex */address */mtu; ip route").await
    }

    /// The devices of a claim, as `dranic status` shows them.
    pub(crate) fn devices(&self, claim: &Claim) -> Result<Vec<DeviceStatus>> {
        let claims = self.cluster.status()?.claims;
        Ok(claims.into_iter().find(|c| c.uid == claim.uid).context("the agent does not know the claim")?.devices)
    }

    /// Waits until every device of a claim is in `phase`.
    pub(crate) async fn wait_phase(&self, claim: &Claim, phase: Phase) -> Result<Vec<DeviceStatus>> {
        self.wait(&format!("not all {phase:?}"), || {
            let devices = self.devices(claim)?;
            if devices.iter().all(|d| d.phase == phase) { Ok(devices) } else { bail!("{devices:?}") }
        })
        .await
    }

    /// Waits until the agent is connected to containerd, or is not.
    pub(crate) async fn wait_connected(&self, connected: bool) -> Result<()> {
        self.wait("the NRI connection", || {
            let status = self.cluster.status()?;
            ensure!(status.nri_connected == connected, "connected: {}, {}", status.nri_connected, status.nri);
            Ok(())
        })
        .await
    }

    async fn wait<T>(&self, what: &str, mut look: impl FnMut() -> Result<T>) -> Result<T> {
        let end = Instant::now() + SOON;
        loop {
            match look() {
                Err(error) if Instant::now() >= end => return Err(error.context(format!("{what}, after {SOON:?}"))),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                done => return done,
            }
        }
    }

    /// Fails if a NIC is not on the host as it was at the beginning.
    pub(crate) fn check_host(&self) -> Result<()> {
        let differences = Cluster::differences(&self.before, &self.cluster.host_states()?);
        ensure!(differences.is_empty(), "the host differs: {differences:#?}");
        Ok(())
    }

    /// Ends the agent as an operator would, the node after it, and looks for what is left of them.
    fn end(mut self) -> Result<()> {
        let claims = self.cluster.status()?.claims;
        ensure!(claims.is_empty(), "claims are left: {claims:?}");
        let (status, took) = self.cluster.agent.take().context("no agent")?.terminate()?;
        ensure!(status.success() && took < Duration::from_secs(10), "the agent ended with {status} after {took:?}");
        let containerd = &self.cluster.containerd;
        let (processes, scratch) = (containerd.processes(), containerd.scratch().to_owned());
        drop(self);
        let left: Vec<_> = processes.iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).collect();
        ensure!(left.is_empty() && !scratch.exists(), "left behind: {left:?}, {}", scratch.display());
        Ok(())
    }
}
