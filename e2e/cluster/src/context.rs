//! What a scenario has: its own namespace, and short words for what every scenario does.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod, ServiceAccount};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::inspect::{self, Link};

/// Between two looks at something that changes.
const LOOK: Duration = Duration::from_millis(100);

/// One scenario's view of the cluster.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) cluster: Cluster,
    pub(crate) namespace: String,
    /// Full numbers of rounds.
    pub(crate) full: bool,
    /// Seed of what is random.
    pub(crate) seed: u64,
    /// What the scenario found out, for its line in the result.
    pub(crate) told: Arc<Mutex<Vec<String>>>,
    /// Numbers, by their names: for programs.
    pub(crate) figures: Arc<Mutex<BTreeMap<String, f64>>>,
}

/// Asks `look` again and again until it gives something.
///
/// # Errors
/// When it has not after `limit`; with what it said last.
pub(crate) async fn wait<T, F>(limit: Duration, what: &str, mut look: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let end = Instant::now() + limit;
    loop {
        match look().await {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > end => return Err(error.context(format!("waited {} s: {what}", limit.as_secs()))),
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    }
}

impl Context {
    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.cluster.client.clone(), &self.namespace)
    }

    /// Adds to the scenario's line in the result: numbers, and what was accepted although it is not as it should be.
    pub(crate) fn tell(&self, text: String) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    /// Adds a number to the scenario's result. Its name ends with its unit.
    pub(crate) fn figure(&self, name: &str, value: f64) {
        // Microseconds are enough of milliseconds, and milliseconds of seconds.
        let rounded = (value * 1000.0).round() / 1000.0;
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), rounded);
    }

    pub(crate) fn node(&self, index: usize) -> &str {
        &self.cluster.nodes[index]
    }

    /// Makes the namespace, with the labels, and waits for its service account: before that it takes no pods.
    pub(crate) async fn open(&self, labels: Value) -> Result<()> {
        self.namespace_gone().await.context("what an earlier run has left")?;
        let namespaces: Api<Namespace> = Api::all(self.cluster.client.clone());
        let value = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": labels}});
        namespaces.create(&PostParams::default(), &serde_json::from_value(value)?).await?;
        let accounts: Api<ServiceAccount> = self.api();
        // After kills of the API server the controllers' watches start late: client-go lets a reflector wait up to 30 s, and with its
        // jitter twice that (`NewReflector`'s backoff).
        wait(Duration::from_secs(120), "the namespace's service account", || async { Ok(accounts.get("default").await?) })
            .await?;
        Ok(())
    }

    /// Deletes the namespace with all that is in it, and waits until its pods are gone. The rest (claims, service accounts) goes while
    /// the next scenario runs: it takes the namespace controller five more seconds.
    pub(crate) async fn leave(&self) -> Result<()> {
        self.delete_namespace().await?;
        let pods: Api<Pod> = self.api();
        // The namespace controller would do it too, one kind after the other.
        pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        wait(Duration::from_secs(60), "the namespace's pods are gone", || async {
            let left: Vec<_> = pods.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect();
            ensure!(left.is_empty(), "still there: {left:?}");
            Ok(())
        })
        .await
    }

    /// Deletes the namespace, unless it is on its way already.
    pub(crate) async fn delete_namespace(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.cluster.client.clone());
        match namespaces.delete(&self.namespace, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            other => other.map(drop).context("deleting the namespace"),
        }
    }

    /// Waits until the API has the namespace no more.
    pub(crate) async fn namespace_gone(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.cluster.client.clone());
        wait(Duration::from_secs(60), &format!("namespace {} is gone", self.namespace), || async {
            ensure!(namespaces.get_opt(&self.namespace).await?.is_none(), "it is still there");
            Ok(())
        })
        .await
    }

    async fn create<K>(&self, value: &Value) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
    {
        let object: K = serde_json::from_value(value.clone())?;
        let kind = K::kind(&()).into_owned();
        let name = object.name_any();
        self.api::<K>().create(&PostParams::default(), &object).await.with_context(|| format!("creating {kind} {name}"))
    }

    pub(crate) async fn pod(&self, value: &Value) -> Result<Pod> {
        self.create(value).await
    }

    pub(crate) async fn claim(&self, name: &str, spec: &Value) -> Result<ResourceClaim> {
        self.create(&crate::objects::claim(name, spec)).await
    }

    pub(crate) async fn template(&self, name: &str, spec: &Value) -> Result<ResourceClaimTemplate> {
        self.create(&crate::objects::template(name, spec)).await
    }

    /// Waits until all containers of the pod run and are ready.
    pub(crate) async fn running(&self, name: &str) -> Result<Running> {
        self.running_within(name, Duration::from_secs(40)).await
    }

    pub(crate) async fn running_within(&self, name: &str, limit: Duration) -> Result<Running> {
        let pods: Api<Pod> = self.api();
        let pod = wait(limit, &format!("pod {name} runs"), || async {
            let pod = pods.get(name).await?;
            let status = pod.status.clone().unwrap_or_default();
            let containers = status.container_statuses.unwrap_or_default();
            ensure!(
                status.phase.as_deref() == Some("Running") && !containers.is_empty() && containers.iter().all(|c| c.ready),
                "phase {}",
                status.phase.unwrap_or_default()
            );
            Ok(pod)
        })
        .await;
        let pod = match pod {
            Ok(pod) => pod,
            Err(error) => bail!("{error:#}; its events: {}", self.events(name).await?.join(" | ")),
        };
        let uid = pod.uid().context("a pod without UID")?;
        let pid = inspect::process_of_pod(&uid).with_context(|| format!("pod {name} runs, but has no process"))?;
        Ok(Running { pod, pid })
    }

    /// Deletes the pod and waits until the API has it no more.
    pub(crate) async fn delete_pod(&self, name: &str) -> Result<()> {
        self.api::<Pod>().delete(name, &DeleteParams::default()).await?;
        self.pod_gone(name).await
    }

    pub(crate) async fn pod_gone(&self, name: &str) -> Result<()> {
        self.pod_gone_within(name, Duration::from_secs(60)).await
    }

    pub(crate) async fn pod_gone_within(&self, name: &str, limit: Duration) -> Result<()> {
        let pods: Api<Pod> = self.api();
        wait(limit, &format!("pod {name} is gone"), || async {
            ensure!(pods.get_opt(name).await?.is_none(), "it is still there");
            Ok(())
        })
        .await
    }

    /// `reason: message` of the events on an object of this name, oldest first.
    pub(crate) async fn events(&self, name: &str) -> Result<Vec<String>> {
        let events: Api<Event> = self.api();
        let found = events.list(&ListParams::default().fields(&format!("involvedObject.name={name}"))).await?;
        let text = |event: &Event| {
            let reason = event.reason.clone().unwrap_or_default();
            format!("{reason}: {}", event.message.clone().unwrap_or_default())
        };
        Ok(found.items.iter().map(text).collect())
    }

    /// Waits for an event on the object with all of `parts` in it.
    pub(crate) async fn event(&self, name: &str, parts: &[&str]) -> Result<String> {
        wait(Duration::from_secs(30), &format!("an event on {name} with {parts:?}"), || async {
            let events = self.events(name).await?;
            let hit = events.iter().find(|text| parts.iter().all(|part| text.contains(part)));
            hit.cloned().with_context(|| format!("events are {events:?}"))
        })
        .await
    }

    /// Takes the agent from `node`, in order.
    pub(crate) async fn agent_leaves(&self, node: &str) -> Result<()> {
        self.cluster.move_agent(node, false).await?;
        wait(Duration::from_secs(40), &format!("the agent has left {node}"), || async {
            ensure!(self.cluster.agents(node)?.is_empty(), "an agent still runs on {node}");
            Ok(())
        })
        .await
    }

    /// Starts it again, and waits until it is ready.
    pub(crate) async fn agent_returns(&self, node: &str) -> Result<()> {
        self.cluster.move_agent(node, true).await?;
        self.agent_ready(node).await
    }

    pub(crate) async fn agent_ready(&self, node: &str) -> Result<()> {
        wait(Duration::from_secs(40), &format!("the agent of {node} is ready"), || async {
            let status = self.cluster.status(node).await?;
            ensure!(
                status.nri_connected && status.kubelet == "registered" && status.published_devices > 0,
                "NRI {}, kubelet {}, {} devices published",
                status.nri,
                status.kubelet,
                status.published_devices
            );
            Ok(())
        })
        .await
    }
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) pod: Pod,
    /// One of its processes, as this machine numbers them.
    pub(crate) pid: u32,
}

impl Running {
    pub(crate) fn node(&self) -> &str {
        self.pod.spec.as_ref().and_then(|s| s.node_name.as_deref()).unwrap_or_default()
    }

    /// Links of the pod, without loopback and the cluster network's.
    pub(crate) async fn nics(&self) -> Result<Vec<Link>> {
        let links = inspect::links(self.pid).await?;
        Ok(links.into_iter().filter(|link| link.ifname != "lo" && link.ifname != "eth0").collect())
    }

    /// The one NIC of the pod.
    pub(crate) async fn nic(&self) -> Result<Link> {
        let mut nics = self.nics().await?;
        ensure!(nics.len() == 1, "the pod has {} NICs: {:?}", nics.len(), nics.iter().map(|n| &n.ifname).collect::<Vec<_>>());
        Ok(nics.remove(0))
    }

    pub(crate) async fn run(&self, program: &[&str]) -> Result<String> {
        inspect::in_netns(self.pid, program).await
    }

    /// One packet there and back, through the link.
    pub(crate) async fn ping(&self, link: &str, to: &str) -> Result<()> {
        wait(Duration::from_secs(5), &format!("{to} answers through {link}"), || async {
            self.run(&["busybox", "ping", "-c", "1", "-W", "1", "-I", link, to]).await
        })
        .await
        .map(drop)
    }
}
