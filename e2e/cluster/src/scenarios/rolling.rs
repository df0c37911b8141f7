//! Rolling updates of the DaemonSet while pods start and end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use futures_util::future::try_join_all;
use futures_util::{StreamExt, TryStreamExt};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::json;

use super::stream::{Random, Slot};
use crate::context::{Context, wait};
use crate::objects::DRIVER;
use crate::runner::{RAILS, Skipped};
use crate::tap::Tap;

/// Where `install.sh` puts the chart.
pub(super) const NAMESPACE: &str = "dranic";
/// In the template, so that each value is an update.
const ANNOTATION: &str = "e2e-update";
/// What the kubelet says of a start that it tries again.
const FAILURES: [&str; 2] = ["FailedCreatePodSandBox", "FailedPrepareDynamicResources"];

/// The API server's node authorizer, just after a pod was bound.
const NOT_YET: &str = "no relationship found between node";

pub(super) async fn update(c: Context) -> Result<()> {
    let sets: Api<DaemonSet> = Api::namespaced(c.cluster.client.clone(), NAMESPACE);
    if sets.get_opt("dranic").await?.is_none() {
        return Err(Skipped("the agent is no DaemonSet here (AGENT=process)").into());
    }
    let updates = if c.full { 5 } else { 2 };
    let mut slots = Vec::new();
    for index in 0..3 {
        let slot = Slot::new(&c, 0, index);
        slot.prepare(&c).await?;
        slots.extend([slot, Slot::new(&c, 1, index)]);
    }
    let over = AtomicBool::new(false);
    let updating = async {
        // In between, so that the first pods are under way.
        tokio::time::sleep(Duration::from_secs(2)).await;
        for number in 0..updates {
            roll(&c, &sets, &format!("{}-{number}", c.seed)).await.with_context(|| format!("update {number}"))?;
        }
        Ok::<_, anyhow::Error>(())
    };
    let updating = async {
        let done = updating.await;
        over.store(true, Ordering::Relaxed);
        done
    };
    let streams = try_join_all(slots.iter().map(|slot| stream(&c, slot, &over)));
    let watch = Watch::new(&c).await?;
    let pods = tokio::select! {
        done = async {
            let ((), pods) = tokio::try_join!(updating, streams)?;
            watch.sees(c.node(1)).await.map(|()| pods)
        } => done?,
        ended = watch.run() => return Err(ended),
    };
    for node in &c.cluster.nodes {
        let agents = c.cluster.agents(node)?.len();
        ensure!(agents == 1, "{agents} agents run on {node} when all is over");
    }
    let failed = failed_once(&c).await?;
    // The kubelet reads the claim itself before it asks us, and the API server may not yet know that the pod is on that node.
    let (early, others): (BTreeMap<_, _>, BTreeMap<_, _>) = failed.into_iter().partition(|(_, why)| why.contains(NOT_YET));
    c.tell(format!("{updates} updates; {} pods started, each with its NICs from its first moment", pods.iter().sum::<u32>()));
    c.tell(format!(
        "the kubelet needed another try for {} pods that the API server did not let it read yet, and for {} others",
        early.len(),
        others.len()
    ));
    others.iter().for_each(|(pod, why)| c.tell(format!("{pod} at first: {why}")));
    Ok(())
}

/// An update of the DaemonSet, with a tap on node1: no more than one of two instances takes a sandbox, and where the runtime has nobody to
/// ask between them, no container runs before its NICs are there either.
pub(super) async fn overlap(c: Context) -> Result<()> {
    let sets: Api<DaemonSet> = Api::namespaced(c.cluster.client.clone(), NAMESPACE);
    if sets.get_opt("dranic").await?.is_none() {
        return Err(Skipped("the agent is no DaemonSet here (AGENT=process)").into());
    }
    let node = c.node(0).to_owned();
    let slots: Vec<_> = (0..3).map(|index| Slot::new(&c, 0, index)).collect();
    for slot in &slots {
        slot.prepare(&c).await?;
    }
    let tap = Tap::put(&c, &node).await?;
    let over = AtomicBool::new(false);
    let most = AtomicUsize::new(0);
    let updating = async {
        // The tap has killed an agent.
        c.cluster.agents_settle().await?;
        let done = roll(&c, &sets, &format!("overlap-{}", c.seed)).await;
        over.store(true, Ordering::Relaxed);
        done
    };
    let looking = async {
        while !over.load(Ordering::Relaxed) {
            most.fetch_max(c.cluster.agents(&node)?.len(), Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    };
    let streams = try_join_all(slots.iter().map(|slot| stream(&c, slot, &over)));
    let ((), (), pods) = tokio::try_join!(updating, looking, streams)?;
    let most = most.into_inner();
    ensure!(most == 2, "{most} agents at most on {node} during the update: no two have overlapped");
    let asked = tap.all(|call| call.method == "RunPodSandbox" && call.pod.starts_with(&format!("{}/", c.namespace)));
    let answered: Vec<_> = asked.iter().filter(|call| call.error.is_none() && !call.lost).map(|call| &call.sandbox).collect();
    let sandboxes: BTreeSet<_> = answered.iter().collect();
    ensure!(sandboxes.len() == answered.len(), "two instances were asked about the same sandbox, and both took it");
    let started: u32 = pods.iter().sum();
    let connections: BTreeSet<_> = asked.iter().map(|call| call.connection).collect();
    c.tell(format!(
        "{started} pods started while {most} agents overlapped, none without its NICs; the runtime asked about {} of their sandboxes, \
         over {} connections, and a guard had the rest attached",
        sandboxes.len(),
        connections.len()
    ));
    tap.away(&c, &node).await
}

/// Pods one after the other until all is over; gives their number.
async fn stream(c: &Context, slot: &Slot, over: &AtomicBool) -> Result<u32> {
    let node = slot.node.trim_start_matches("node").parse()?;
    let mut random = Random::new(c.seed, &[slot.index.into(), node]);
    for number in 0.. {
        let up = slot.start(c, &format!("{}-{}-{number}", slot.node, slot.index)).await?;
        if let Some(seen) = &up.early {
            bail!("{} ran before its NICs were there; it saw {seen}", up.name);
        }
        ensure!(up.restarts == 0, "the container of {} was started {} times", up.name, up.restarts + 1);
        let last = over.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(random.below(1000))).await;
        slot.still(c, &up).await?;
        let lost = slot.end(c, &up.name).await?;
        ensure!(lost.is_empty(), "{lost:?} died with the namespace of {}", up.name);
        if last {
            return Ok(number + 1);
        }
    }
    unreachable!("the numbers do not end")
}

/// One update of the DaemonSet, to its end.
async fn roll(c: &Context, sets: &Api<DaemonSet>, value: &str) -> Result<()> {
    let patch = json!({"spec": {"template": {"metadata": {"annotations": {ANNOTATION: value}}}}});
    let set = sets.patch("dranic", &PatchParams::default(), &Patch::Merge(patch)).await?;
    let strategy = &set.spec.update_strategy;
    let surge = strategy.as_ref().and_then(|s| s.rolling_update.as_ref()?.max_surge.as_ref());
    ensure!(surge.is_some(), "the DaemonSet has no maxSurge: {strategy:?}");
    let agents: Api<Pod> = Api::namespaced(c.cluster.client.clone(), NAMESPACE);
    wait(Duration::from_secs(120), "every node has its new agent and no other", || async {
        let pods = agents.list(&ListParams::default().labels("app.kubernetes.io/name=dranic")).await?.items;
        let new = pods.iter().filter(|pod| pod.annotations().get(ANNOTATION).is_some_and(|found| found == value)).count();
        ensure!(new == c.cluster.nodes.len() && pods.len() == new, "{new} new of {} agents", pods.len());
        let status = sets.get("dranic").await?.status.unwrap_or_default();
        ensure!(status.number_available == Some(i32::try_from(new)?), "{:?} are available", status.number_available);
        Ok(())
    })
    .await?;
    for node in &c.cluster.nodes {
        c.agent_ready(node).await?;
    }
    Ok(())
}

/// Pods for which the kubelet needed more than one try, and what it said. None of that may be ours to prevent.
async fn failed_once(c: &Context) -> Result<BTreeMap<String, String>> {
    let events: Api<Event> = c.api();
    let failed = events.list(&ListParams::default()).await?.items.into_iter();
    let failed = failed.filter(|event| event.reason.as_deref().is_some_and(|reason| FAILURES.contains(&reason)));
    Ok(failed.map(|event| (event.involved_object.name.unwrap_or_default(), event.message.unwrap_or_default())).collect())
}

/// A watch on the slices of our driver.
struct Watch<'a> {
    c: &'a Context,
    version: String,
    state: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    slices: BTreeMap<String, ResourceSlice>,
    changes: usize,
}

impl<'a> Watch<'a> {
    fn filter() -> String {
        format!("spec.driver={DRIVER}")
    }

    async fn new(c: &'a Context) -> Result<Self> {
        let api: Api<ResourceSlice> = Api::all(c.cluster.client.clone());
        let list = api.list(&ListParams::default().fields(&Self::filter())).await?;
        let version = list.metadata.resource_version.clone().context("a list without version")?;
        let slices = list.items.into_iter().map(|slice| (slice.name_any(), slice)).collect();
        all_there(c, &slices)?;
        Ok(Self { c, version, state: Mutex::new(Seen { slices, changes: 0 }) })
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at each change: at no moment a node may have fewer devices than NICs. Returns only when that is so, or the watch ends.
    async fn run(&self) -> anyhow::Error {
        self.look().await.err().unwrap_or_else(|| anyhow!("the watch on slices ended"))
    }

    /// The watch is alive: it sees one more NIC on `node`. The runner takes that away again.
    async fn sees(&self, node: &str) -> Result<()> {
        let before = self.seen().changes;
        self.c.cluster.nics(node, RAILS + 1).await?;
        wait(Duration::from_secs(20), "the watch on slices sees another NIC", || async {
            ensure!(self.seen().changes > before, "nothing changed");
            Ok(())
        })
        .await
    }

    async fn look(&self) -> Result<()> {
        let api: Api<ResourceSlice> = Api::all(self.c.cluster.client.clone());
        // One request for the whole time, so that no change is missed. It is the longest that the client allows.
        let params = WatchParams::default().fields(&Self::filter()).timeout(294);
        let mut events = api.watch(&params, &self.version).await?.boxed();
        while let Some(event) = events.try_next().await? {
            let mut seen = self.seen();
            match event {
                WatchEvent::Added(slice) | WatchEvent::Modified(slice) => drop(seen.slices.insert(slice.name_any(), slice)),
                WatchEvent::Deleted(slice) => drop(seen.slices.remove(&slice.name_any())),
                WatchEvent::Bookmark(_) => continue,
                WatchEvent::Error(error) => bail!("the watch on slices ended: {error}"),
            }
            seen.changes += 1;
            all_there(self.c, &seen.slices)?;
        }
        Ok(())
    }
}

/// Each node has all its NICs in slices.
fn all_there(c: &Context, slices: &BTreeMap<String, ResourceSlice>) -> Result<()> {
    for node in &c.cluster.nodes {
        let mine = slices.values().filter(|slice| slice.spec.node_name.as_ref() == Some(node));
        let devices: usize = mine.map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).sum();
        ensure!(devices >= RAILS as usize, "for a moment {node} had {devices} devices in its slices");
    }
    Ok(())
}
