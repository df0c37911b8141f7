//! Pods that come and go without end, each with two NICs of its own, while something is disturbed.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dranic::agent::status::Status;
use dranic::ledger::Phase;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;

use crate::context::{Context, Running, wait};
use crate::inspect::{self, Link};
use crate::objects::{From, config, devices, pod, request_link};

/// A pod starts and ends within this, whatever dies meanwhile. Long: a kubelet whose watches broke several times in a row (the API server
/// was killed) waits up to a minute for the next, and the API server's node authorizer may deny it the pod until then.
const LIMIT: Duration = Duration::from_secs(240);
/// The container's first act: it writes down what it sees, before anything else could be done to its NICs.
const LOOK: &str = "ip -o link >/look; ip -o address >>/look; mv /look /start; \
    trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";

/// Small numbers from a seed (Marsaglia's xorshift64, shifts 13, 7, 17): enough for choosing moments, and the same again.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    /// Another row of numbers for each `path`.
    pub(super) fn new(seed: u64, path: &[u64]) -> Self {
        // 2^64 divided by the golden ratio: neighbours get far apart.
        let mixed =
            path.iter().fold(seed, |mixed, step| (mixed ^ (step + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
        Self(mixed | 1)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A place for one pod after the other, with two NICs of a node that nobody else uses: what is missing on the host was lost here.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) node: String,
    pub(super) index: u32,
}

/// A pod that runs with all its NICs.
#[derive(Debug)]
pub(super) struct Up {
    pub(super) name: String,
    running: Running,
    /// What its container saw when it started, where that was not all.
    pub(super) early: Option<String>,
    /// How often its container was started again.
    pub(super) restarts: i32,
}

impl Slot {
    pub(super) fn new(c: &Context, node: usize, index: u32) -> Self {
        Self { node: c.node(node).to_owned(), index }
    }

    fn template(&self) -> String {
        format!("two-{}", self.index)
    }

    /// Links on the host: the first goes as it is, the second is configured.
    fn links(&self) -> [String; 2] {
        [2 * self.index, 2 * self.index + 1].map(|rail| format!("nic{rail}"))
    }

    /// Its claims' template; the same for each node.
    pub(super) async fn prepare(&self, c: &Context) -> Result<()> {
        let [plain, configured] = self.links();
        let parameters = json!({"interface": {"name": "rail0", "addresses": ["10.74.0.1/24"], "mtu": 8000}});
        let requests = vec![request_link("a", &plain), request_link("b", &configured)];
        c.template(&self.template(), &devices(requests, vec![config(&["b"], parameters)])).await.map(drop)
    }

    /// Makes the pod and waits until it runs and has its NICs.
    pub(super) async fn start(&self, c: &Context, name: &str) -> Result<Up> {
        let mut value = pod(name, Some(&self.node), &[From::Template(&self.template())]);
        value["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", LOOK]);
        let value: Pod = serde_json::from_value(value)?;
        // The API server may be dead: what fails is tried again, and it may have been done nevertheless.
        wait(LIMIT, &format!("pod {name} is created"), || async {
            match c.api::<Pod>().create(&PostParams::default(), &value).await {
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                done => Ok(done.map(drop)?),
            }
        })
        .await?;
        let running = self.running(c, name).await?;
        let early = self.seen_at_start(&running).await.with_context(|| format!("what {name} saw when it started"))?;
        wait(Duration::from_secs(20), &format!("{name} has its NICs"), || self.complete(&running)).await?;
        let containers = running.pod.status.as_ref().and_then(|s| s.container_statuses.as_ref());
        let restarts = containers.into_iter().flatten().map(|s| s.restart_count).sum();
        Ok(Up { name: name.to_owned(), running, early, restarts })
    }

    /// The pod with a process of its container. A process of the pod is not enough: where the runtime was killed, a sandbox that it
    /// never finished may still be there, with a network namespace of its own.
    async fn running(&self, c: &Context, name: &str) -> Result<Running> {
        let Running { pod, .. } = c.running_within(name, LIMIT).await?;
        let status = pod.status.as_ref().and_then(|s| s.container_statuses.as_ref()?.first()).context("no status")?;
        let id = status.container_id.as_deref().and_then(|id| id.rsplit('/').next()).context("no container")?;
        let pid = inspect::process_of_container(id).with_context(|| format!("the container of {name} has no process"))?;
        Ok(Running { pod, pid })
    }

    /// What the container saw first, if NICs were missing then.
    async fn seen_at_start(&self, running: &Running) -> Result<Option<String>> {
        let file = format!("/proc/{}/root/start", running.pid);
        let look = || async { std::fs::read_to_string(&file).with_context(|| file.clone()) };
        let text = wait(Duration::from_secs(10), "the container has looked", look).await?;
        let link = |name: &str, mtu: u32| {
            let has = |line: &str| line.contains(name) && line.contains(",UP") && line.contains(&format!(" mtu {mtu} "));
            text.lines().any(has)
        };
        let [plain, address] = [&self.links()[0], &self.plain_address()];
        let all = link(&format!(": {plain}@"), 9000)
            && link(": rail0@", 8000)
            && text.contains(&format!("inet {address} "))
            && text.contains("inet 10.74.0.1/24 ");
        Ok((!all).then_some(text))
    }

    fn plain_address(&self) -> String {
        format!("10.20.{}.{}/24", 2 * self.index, self.node.trim_start_matches("node"))
    }

    /// Both NICs are in the pod, as they must be.
    async fn complete(&self, running: &Running) -> Result<()> {
        let nics = running.nics().await?;
        let is = |name: &str, mtu: u32, address: &str| {
            nics.iter().any(|nic| nic.ifname == name && nic.is_up() && nic.mtu == mtu && nic.addresses() == [address])
        };
        let all = is(&self.links()[0], 9000, &self.plain_address()) && is("rail0", 8000, "10.74.0.1/24");
        ensure!(nics.len() == 2 && all, "{nics:?}");
        Ok(())
    }

    /// The pod still runs and has its NICs, and it is the same one.
    pub(super) async fn still(&self, c: &Context, up: &Up) -> Result<()> {
        let now = self.running(c, &up.name).await?;
        ensure!(now.pid == up.running.pid, "{} was started again", up.name);
        self.complete(&now).await.with_context(|| format!("{} has lost NICs", up.name))
    }

    /// Deletes the pod and waits until its NICs are on the host as they were. Gives the names of those that died.
    pub(super) async fn end(&self, c: &Context, name: &str) -> Result<Vec<String>> {
        wait(LIMIT, &format!("pod {name} is deleted"), || async {
            match c.api::<Pod>().delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                done => Ok(done.map(drop)?),
            }
        })
        .await?;
        c.pod_gone_within(name, LIMIT).await?;
        wait(LIMIT, &format!("the NICs of {name} are back"), || self.back(c)).await
    }

    /// A link that is missing although the agent holds none of this slot any more died with a namespace: virtual links do.
    async fn back(&self, c: &Context) -> Result<Vec<String>> {
        let status = c.cluster.status(&self.node).await?;
        ensure!(!self.held(&status), "the agent still holds them");
        let links = inspect::links(c.cluster.init_pid(&self.node)?).await?;
        let mut lost = Vec::new();
        for (name, rail) in self.links().into_iter().zip(2 * self.index..) {
            let address = format!("10.20.{rail}.{}/24", self.node.trim_start_matches("node"));
            let as_it_was = |link: &Link| link.is_up() && link.mtu == 9000 && link.addresses() == [address.as_str()];
            match links.iter().find(|link| link.ifname == name) {
                Some(link) => ensure!(as_it_was(link), "{link:?}"),
                None => lost.push(name),
            }
        }
        Ok(lost)
    }

    fn held(&self, status: &Status) -> bool {
        let mine = self.links();
        status.claims.iter().flat_map(|claim| &claim.devices).any(|device| mine.contains(&device.host_link))
    }

    /// NICs that the agent has prepared for a pod, and that are not on the host. Either their way into the sandbox has just begun, or
    /// they died with a sandbox that the runtime gave up.
    pub(super) async fn missing(&self, c: &Context) -> Result<Vec<String>> {
        let status = c.cluster.status(&self.node).await?;
        let links = inspect::links(c.cluster.init_pid(&self.node)?).await?;
        let waits = |name: &String| {
            let devices = status.claims.iter().flat_map(|claim| &claim.devices);
            devices.into_iter().any(|device| &device.host_link == name && device.phase == Phase::Prepared)
        };
        let missing = |name: &String| links.iter().all(|link| &link.ifname != name);
        Ok(self.links().into_iter().filter(|name| waits(name) && missing(name)).collect())
    }
}
