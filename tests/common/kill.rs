//! A pod's life on a scratch cluster, as kubelet and runtime see to it, while the agent may be killed at any moment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dranic::netdev::bpf::{read, sys};
use dranic::netdev::{HostState, Link, Neighbour, Route, Rule, link, moves, neighbour, route, rule, sysctl};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::{NicSpec, links};
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::RuntimeOptions;

use crate::bpf::{self, Bpffs};

/// How long kubelet and runtime keep trying before the test calls it stuck.
const PATIENCE: Duration = Duration::from_secs(30);
/// "index-name" of the agent's plugin.
const PLUGIN: &str = "10-dranic.dev";
const NICS: [&str; 3] = ["nic0", "nic1", "nic2"];

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A cluster, and what it was before.
pub(crate) struct Rig {
    cluster: Cluster,
    before: BTreeMap<String, HostState>,
    claims: Vec<Claim>,
    /// UID and name of the pod.
    pod: (String, String),
    attempt: u32,
    /// The namespace that the runtime has let go; only who has it open keeps it.
    ended: Option<Netns>,
    /// The agent's process, for whoever kills it; 0 while there is none.
    pid: Arc<AtomicU32>,
    bpffs: Bpffs,
    _dir: tempfile::TempDir,
}

impl Rig {
    /// A cluster with an agent that is ready and has `environment`, and a pod with two claims.
    pub(crate) async fn new(runtime: fn(PathBuf) -> RuntimeOptions, environment: &[(&str, &str)]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let script = dir.path().join("dranic");
        write_script(&script, environment)?;
        let nics = NICS.iter().zip(0..).map(|(name, n)| nic(name, n)).collect();
        let bpffs = Bpffs::mount();
        let arguments = vec!["--bpffs".to_owned(), bpffs.path().display().to_string()];
        let mut cluster = Cluster::new(Options { runtime, arguments, ..Options::new(&script, nics) })?;
        furnish(&cluster)?;
        furnish_programs(&cluster, &bpffs)?;
        let before = cluster.host_states()?;
        let rich = &before["nic0"];
        ensure!(
            rich.routes.iter().any(|r| r.table == 100)
                && rich.addresses.len() == 3
                && rich.neighbours.len() == 1
                && rich.rules.len() == 1
                && rich.alt_names.len() == 1
                && rich.programs.attached.len() == 4
                && rich.programs.filters.len() == 1,
            "the host has not what shall be given back: {rich:?}"
        );
        cluster.start_agent()?;
        let pod = ("pod-uid-train".to_owned(), "train".to_owned());
        let pid = Arc::new(AtomicU32::new(0));
        let mut rig = Self { cluster, before, claims: Vec::new(), pod, attempt: 0, ended: None, pid, bpffs, _dir: dir };
        rig.wait_ready().await?;
        rig.claims = rig.make_claims()?;
        Ok(rig)
    }

    pub(crate) fn pid(&self) -> Arc<AtomicU32> {
        self.pid.clone()
    }

    pub(crate) fn log(&self) -> String {
        self.cluster.log()
    }

    /// From prepare to unprepare.
    pub(crate) async fn live(&mut self) -> Result<()> {
        self.prepare().await.context("prepare")?;
        let pod = self.run().await.context("run")?;
        self.create(&pod).await.context("create")?;
        self.stop(pod).await.context("stop")?;
        self.unprepare().await.context("unprepare")
    }

    async fn wait_ready(&mut self) -> Result<()> {
        self.cluster.wait_ready(PATIENCE).await?;
        self.cluster.runtime.wait_plugin(PLUGIN, PATIENCE).await.map_err(anyhow::Error::msg)?;
        self.pid.store(self.cluster.agent.as_ref().map_or(0, dranic_testbed::cluster::Agent::pid), Ordering::SeqCst);
        Ok(())
    }

    /// Starts the agent again if it has ended, until one is ready.
    async fn revive(&mut self) -> Result<()> {
        let begin = Instant::now();
        loop {
            // Not to be killed once it is waited for: the number may be another's then.
            let pid = self.pid.swap(0, Ordering::SeqCst);
            if self.cluster.agent.as_mut().is_some_and(|agent| !agent.has_ended()) {
                self.pid.store(pid, Ordering::SeqCst);
                return Ok(());
            }
            self.end_namespace()?;
            self.cluster.start_agent()?;
            self.pid.store(self.cluster.agent.as_ref().map_or(0, dranic_testbed::cluster::Agent::pid), Ordering::SeqCst);
            match self.wait_ready().await {
                Ok(()) => {}
                // Killed once more.
                Err(error) => ensure!(begin.elapsed() < PATIENCE, "no agent comes up: {error:#}"),
            }
        }
    }

    /// What the kernel does with the hardware in a namespace that nobody has open any more: back to the host, under the name it has.
    /// Veths would just end, so this does it for them.
    fn end_namespace(&mut self) -> Result<()> {
        let Some(ended) = self.ended.take() else { return Ok(()) };
        let mut inside = RouteSocket::open_in(&ended)?;
        let host = self.cluster.node.netns().try_clone()?;
        for link in link::list(&mut inside, soon())?.into_iter().filter(is_nic) {
            let outside = link::list(&mut RouteSocket::open_in(&host)?, soon())?;
            let name = if outside.iter().any(|l| l.name == link.name) { format!("dev{}", link.index) } else { link.name.clone() };
            let new_index = moves::pick_index(&outside.iter().map(|l| l.index).collect(), link.index);
            let back = moves::Move { index: link.index, target: host.as_fd(), new_index, name, mtu: None, address: None };
            moves::send(&mut inside, &[back], soon()).pop().context("no answer")??;
        }
        Ok(())
    }

    /// The kubelet repeats it until it succeeds.
    async fn prepare(&mut self) -> Result<()> {
        self.repeat(true).await
    }

    async fn unprepare(&mut self) -> Result<()> {
        self.repeat(false).await
    }

    async fn repeat(&mut self, is_prepare: bool) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.revive().await?;
            let result =
                if is_prepare { self.cluster.prepare(&self.claims).await } else { self.cluster.unprepare(&self.claims).await };
            match result {
                Ok(()) => return Ok(()),
                Err(error) => ensure!(begin.elapsed() < PATIENCE, "{error:#}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// A sandbox that fails is stopped and removed (by the double), and the kubelet makes another.
    async fn run(&mut self) -> Result<Pod> {
        let begin = Instant::now();
        loop {
            self.revive().await?;
            let pod = self.cluster.sandbox(&self.pod.1, &self.pod.0, self.attempt)?;
            self.attempt += 1;
            match self.cluster.runtime.run_pod_sandbox(&pod.sandbox).await.result() {
                Ok(()) => return Ok(pod),
                Err(error) => ensure!(begin.elapsed() < PATIENCE, "{error}"),
            }
            self.let_go(pod)?;
        }
    }

    /// The runtime removes the namespace's file; hardware in it comes home when nobody has it open any more.
    fn let_go(&mut self, pod: Pod) -> Result<()> {
        self.end_namespace()?;
        self.ended = Some(pod.netns.netns()?);
        drop(pod);
        Ok(())
    }

    /// The container is made again until it is let through; then everything must be there, whether an agent was asked or not.
    async fn create(&mut self, pod: &Pod) -> Result<()> {
        let begin = Instant::now();
        for n in 0.. {
            self.revive().await?;
            match self.start(pod, &format!("main-{n}")).await {
                Ok(()) => return self.is_complete(pod).context("a container was let through"),
                Err(error) => ensure!(begin.elapsed() < PATIENCE, "{error:#}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("not reached")
    }

    /// While the container's hooks wait, an agent that was killed comes back.
    async fn start(&mut self, pod: &Pod, name: &str) -> Result<()> {
        let mut starting = self.cluster.begin_container(pod, name, &self.claims).await.map_err(anyhow::Error::msg)?;
        loop {
            match tokio::time::timeout(Duration::from_millis(20), starting.started()).await {
                Ok(started) => return started.map_err(anyhow::Error::msg),
                Err(_) => self.revive().await?,
            }
        }
    }

    fn is_complete(&self, pod: &Pod) -> Result<()> {
        let seen = pod.look()?;
        let wanted: [(&str, u32, &[&str]); 3] = [
            ("rail0", 4000, &["10.100.0.2/24", "fd00:100::2/64"]),
            ("nic1", 4000, &["10.0.1.1/24", "10.0.1.2/24", "fd00:1::1/64"]),
            ("nic2", 9000, &["10.0.2.1/24", "10.0.2.2/24", "fd00:2::1/64"]),
        ];
        for (name, mtu, addresses) in wanted {
            let link = seen.links.iter().find(|l| l.name == name).with_context(|| format!("{name} is not in the pod"))?;
            ensure!(link.is_up() && link.mtu == mtu, "{name}: {link:?}");
            let there = seen.addresses.iter().filter(|(index, _)| *index == link.index);
            let there: BTreeSet<String> = there.map(|(_, a)| format!("{}/{}", a.ip, a.prefix_len)).collect();
            ensure!(addresses.iter().all(|a| there.contains(*a)), "{name} has {there:?}");
            let programs = pod.netns.netns()?.run(|| read(link, &[], soon()))?;
            ensure!(programs.is_empty(), "{name} has {programs:?}");
        }
        let nic1 = seen.links.iter().find(|l| l.name == "nic1").context("nic1")?;
        ensure!(nic1.address.as_ref().is_some_and(|a| a.to_string() == "02:00:00:00:aa:01"), "{nic1:?}");
        ensure!(seen.routes.iter().any(|(_, r)| r.table == 120 && r.destination.to_string() == "10.200.0.0/16"), "no route");
        ensure!(seen.rules.iter().any(|r| r.priority == Some(1000) && r.table == 120), "no rule");
        let outside = link::list(&mut self.cluster.node.socket()?, soon())?;
        ensure!(!outside.iter().any(is_nic), "on the host as well: {outside:?}");
        Ok(())
    }

    /// Stop and Remove never fail, and do not wait for the NICs.
    async fn stop(&mut self, pod: Pod) -> Result<()> {
        let mut result = self.cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result();
        while let Err(error) = result {
            self.lost_in_the_middle(&error).await?;
            result = self.cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result();
        }
        let mut result = self.cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result();
        while let Err(error) = result {
            self.lost_in_the_middle(&error).await?;
            result = self.cluster.runtime.relay_remove(&pod.sandbox).await.result();
        }
        self.let_go(pod)
    }

    /// The only reason for Stop and Remove to fail; the kubelet asks again.
    async fn lost_in_the_middle(&mut self, error: &str) -> Result<()> {
        // Its sockets close before the process has ended; a kernel call may have to end first.
        let begin = Instant::now();
        while self.cluster.agent.as_mut().is_some_and(|agent| !agent.has_ended()) {
            ensure!(begin.elapsed() < Duration::from_secs(5), "Stop or Remove failed: {error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.revive().await
    }

    /// As if nothing had been; nobody kills any more.
    pub(crate) async fn at_end(&mut self) -> Result<()> {
        self.revive().await?;
        let begin = Instant::now();
        while let Some(held) = self.held()? {
            ensure!(begin.elapsed() < Duration::from_secs(5), "the agent still has {held} open");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.wait_ready().await?;
        if let Some(ended) = &self.ended {
            let left = link::list(&mut RouteSocket::open_in(ended)?, soon())?;
            ensure!(!left.iter().any(is_nic), "left in the pod: {left:?}");
        }
        let differences = Cluster::differences(&self.before, &self.cluster.host_states()?);
        ensure!(differences.is_empty(), "the host is not as it was: {differences:#?}");
        let left: Vec<String> = self.bpffs.files().into_iter().filter(|file| file.contains("dranic")).collect();
        ensure!(left.is_empty(), "left in the bpffs: {left:?}");
        let claims = self.cluster.status()?.claims;
        ensure!(claims.is_empty(), "still recorded: {claims:?}");
        for entry in fs::read_dir(self.cluster.path("state"))? {
            let name = entry?.file_name();
            ensure!(name == "lock", "{} is left in the state folder", name.display());
        }
        Ok(())
    }

    /// A network namespace that the agent has open and that is not the host's.
    fn held(&self) -> Result<Option<String>> {
        let pid = self.cluster.agent.as_ref().context("no agent")?.pid();
        let own = format!("net:[{}]", self.cluster.node.netns().id().ino);
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            // Descriptors come and go meanwhile. One that was opened by a bind mount's path is called by that path.
            let Ok(target) = entry.and_then(|entry| fs::read_link(entry.path())) else { continue };
            let target = target.to_string_lossy().into_owned();
            let is_pod = target.contains("/netns/") || (target.starts_with("net:[") && target != own);
            if is_pod {
                return Ok(Some(target));
            }
        }
        Ok(None)
    }

    fn make_claims(&self) -> Result<Vec<Claim>> {
        let pod = self.cluster.pod(&self.pod.1)?;
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let rail0 = r#"{
            "interface": {"name": "rail0", "addresses": ["10.100.0.2/24", "fd00:100::2/64"], "disableEbpfPrograms": true},
            "routes": [{"destination": "10.200.0.0/16", "gateway": "10.100.0.1", "table": 120}],
            "rules": [{"priority": 1000, "source": "10.100.0.2/32", "table": 120}],
            "neighbors": [{"destination": "10.100.0.1", "hardwareAddr": "02:00:00:00:00:01"}]
        }"#;
        let rail0 = ClaimConfig { requests: vec!["r0".to_owned()], ..ClaimConfig::from_claim("dranic.dev", rail0) };
        // With its name: a virtual link is known by two of name, index and address.
        let nic1 = r#"{"interface": {"hardwareAddr": "02:00:00:00:aa:01", "altNames": ["gpu-nic-1"], "gsoMaxSize": 30000}}"#;
        let nic1 = ClaimConfig { requests: vec!["r1".to_owned()], ..ClaimConfig::from_claim("dranic.dev", nic1) };
        let class = ClaimConfig::from_class("dranic.dev", r#"{"interface": {"mtu": 4000}}"#);
        Ok(vec![
            self.cluster.claim("two", &pod, &names(&["nic0", "nic1"]), &[class, rail0, nic1])?,
            self.cluster.claim("one", &pod, &names(&["nic2"]), &[])?,
        ])
    }
}

/// The agent's program: a script, so that one start can have another environment than the next ones.
fn write_script(path: &Path, environment: &[(&str, &str)]) -> Result<()> {
    let once = path.with_extension("once");
    let exports: String = environment.iter().map(|(name, value)| format!("export {name}='{value}'\n")).collect();
    fs::write(&once, exports)?;
    let program = env!("CARGO_BIN_EXE_dranic");
    let once = once.display();
    let text = format!("#!/bin/sh\nif [ -f '{once}' ]; then . '{once}'; rm '{once}'; fi\nexec '{program}' \"$@\"\n");
    fs::write(path, text)?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}

/// eBPF of every kind on nic0, which only the kernel and, for the links, files keep.
fn furnish_programs(cluster: &Cluster, bpffs: &Bpffs) -> Result<()> {
    let index = links::find(&mut cluster.node.socket()?, "nic0")?.index;
    let filter = bpffs.pin(&bpf::load(bpf::SCHED_CLS, "filter", 0), "filter");
    let direct = [(sys::TCX_INGRESS, "first"), (sys::TCX_EGRESS, "out")];
    let by_link = [(sys::TCX_INGRESS, bpf::SCHED_CLS, "second"), (sys::XDP, bpf::XDP, "early")];
    let attach = || -> Result<()> {
        for (place, name) in direct {
            sys::attach(&bpf::load(bpf::SCHED_CLS, name, -1), index, place)?;
        }
        for (place, kind, name) in by_link {
            // XDP_FLAGS_SKB_MODE, linux/if_link.h.
            let flags = if place == sys::XDP { 1 << 1 } else { 0 };
            bpffs.pin(&sys::create_link(&bpf::load(kind, name, 2), index, place, flags)?, name);
        }
        for line in [
            "qdisc add dev nic0 clsact".to_owned(),
            format!("filter add dev nic0 egress bpf direct-action object-pinned {}", filter.display()),
        ] {
            let out = std::process::Command::new("tc").args(line.split(' ')).output()?;
            ensure!(out.status.success(), "tc {line}: {}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(())
    };
    cluster.node.netns().run(attach)??;
    Ok(fs::remove_file(filter)?)
}

fn is_nic(link: &Link) -> bool {
    link.name.starts_with("nic")
        || link.name.starts_with("rail")
        || link.name.starts_with("dranic")
        || link.name.starts_with("dev")
}

fn nic(name: &str, rail: u32) -> NicSpec {
    let addresses = [format!("10.0.{rail}.1/24"), format!("10.0.{rail}.2/24"), format!("fd00:{rail}::1/64")];
    let addresses = addresses.iter().map(|a| a.parse().expect("an address")).collect();
    NicSpec { name: name.to_owned(), rail, mtu: Some(9000), up: false, addresses, ..NicSpec::default() }
}

/// What a host's administrator has set up: the first two NICs are up, with all there is; the third is down.
fn furnish(cluster: &Cluster) -> Result<()> {
    let mut socket = cluster.node.socket()?;
    for (name, n) in NICS.iter().zip(0_u32..) {
        let index = links::find(&mut socket, name)?.index;
        let set = || {
            // Without duplicate address detection nothing has to be waited for.
            sysctl::write(name, "ipv6/conf/accept_dad", "0")?;
            sysctl::write(name, "ipv4/conf/arp_ignore", "1")?;
            sysctl::write(name, "ipv4/conf/rp_filter", "2")
        };
        cluster.node.netns().run(set)??;
        links::add_alt_name(&mut socket, index, &format!("an-altname-of-rail-{n}"))?;
        if *name == "nic2" {
            continue;
        }
        links::up(&mut socket, name)?;
        let gateway = format!("10.0.{n}.254").parse()?;
        let entry = Neighbour::permanent(gateway, "02:00:00:00:00:fe".parse()?);
        socket.request(neighbour::add_request(index, &entry), soon())?;
        let mut by_table = Route::to("10.0.0.0/8".parse()?);
        (by_table.gateway, by_table.table, by_table.metric) = (Some(gateway), 100 + n, Some(50));
        socket.request(route::add_request(index, &by_table, false), soon())?;
        let mut rule = Rule::to_table(false, 100 + n);
        (rule.priority, rule.source) = (Some(500 + n), Some(format!("10.0.{n}.1/32").parse()?));
        socket.request(rule::add_request(&rule), soon())?;
    }
    Ok(())
}
