//! Nobody of ours is there, or not all of us: our own pods still start, and a pod without its NICs does not go unnoticed.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};

use super::rolling::NAMESPACE;
use super::trouble::keep_away;
use super::watched::{LIMIT, Look, Watched, restarts, template};
use crate::context::{Context, wait};
use crate::held::Held;
use crate::objects::{DRIVER, pod};
use crate::own_agent::OwnAgent;
use crate::runner::{RAILS, Skipped};

const ALL: usize = RAILS as usize;

/// All agents are gone, both nodes start again (one of them as after a power cut), and only then the DaemonSet comes. With the policy that
/// makes pods require the plugin, where the API server has it.
pub(super) async fn own_pods(c: Context) -> Result<()> {
    if c.cluster.agent_is_process() {
        return Err(Skipped("the agent is no DaemonSet here (AGENT=process)").into());
    }
    // `v1` of MutatingAdmissionPolicy.
    let policy = c.cluster.client.apiserver_version().await?.minor.trim_end_matches('+').parse::<u32>()? >= 36;
    if policy {
        c.cluster.chart_values(&["requiredPlugin.policy.create=true"]).await?;
    }
    let limited = tokio::time::timeout(Duration::from_secs(200), made_anew(&c, policy));
    let done = limited.await.context("took longer than 200 s");
    // The chart's values go, whatever happens.
    if policy {
        c.cluster.chart_back().await?;
    }
    done?
}

async fn made_anew(c: &Context, policy: bool) -> Result<()> {
    let sets: Api<DaemonSet> = Api::namespaced(c.cluster.client.clone(), NAMESPACE);
    let old = sets.get("dranic").await?;
    sets.delete("dranic", &DeleteParams::foreground()).await?;
    let without = without_agents(c).await;
    // Also when that failed: other scenarios need the agents.
    let mut new = old;
    new.metadata.resource_version = None;
    new.metadata.uid = None;
    new.metadata.creation_timestamp = None;
    new.metadata.managed_fields = None;
    new.status = None;
    wait(Duration::from_secs(60), "the DaemonSet can be made again", || async {
        // As helm does it, so that it is helm's afterwards.
        Ok(sets.patch("dranic", &PatchParams::apply("helm"), &Patch::Apply(&new)).await.map(drop)?)
    })
    .await?;
    without?;
    let since = std::time::Instant::now();
    for node in &c.cluster.nodes {
        c.agent_ready(node).await.with_context(|| format!("our own pod on {node}"))?;
    }
    c.figure("own_pods_ready_s", since.elapsed().as_secs_f64());
    template(c, "all", ALL).await?;
    for node in &c.cluster.nodes {
        let pod = Watched::make(c, &format!("after-{node}"), node, &["all"], Look::nics(ALL)).await?;
        let running = pod.runs(c).await?;
        let requires = running.pod.annotations().get("required-plugins.noderesource.dev").is_some_and(|all| all.contains(DRIVER));
        ensure!(requires == policy, "the pod requires the plugin: {requires}");
        pod.goes(c).await?;
    }
    c.tell(format!("our own pods came back on nodes without any; pods with claims require the plugin by the policy: {policy}"));
    Ok(())
}

async fn without_agents(c: &Context) -> Result<()> {
    let [first, second] = [c.node(0), c.node(1)];
    wait(Duration::from_secs(60), "no agent runs", || async {
        for node in &c.cluster.nodes {
            ensure!(c.cluster.agents(node)?.is_empty(), "one runs on {node}");
        }
        Ok(())
    })
    .await?;
    c.cluster.reboot(second, "down").await?;
    c.cluster.reboot(second, "up").await?;
    for daemon in ["kubelet", "containerd"] {
        c.cluster.daemon(first, daemon, "kill").await?;
    }
    for daemon in ["containerd", "kubelet"] {
        c.cluster.daemon(first, daemon, "start").await?;
    }
    // Pods that are not ours start as well.
    for (index, node) in c.cluster.nodes.iter().enumerate() {
        let name = format!("plain{index}");
        c.pod(&pod(&name, Some(node), &[])).await?;
        c.running_within(&name, LIMIT).await?;
    }
    Ok(())
}

/// Without the runtime's plugin interface, on CDI and the guard alone.
pub(super) async fn nri_off(c: Context) -> Result<()> {
    if c.cluster.agent_is_process() {
        return Err(Skipped("the agent is no DaemonSet here (AGENT=process)").into());
    }
    // An update that comes when agents have just become ready would stand still (see `rolling::overlap`), and this one needs no caution.
    c.cluster.chart_values(&["agent.nri=off", "minReadySeconds=0"]).await?;
    let limited = tokio::time::timeout(Duration::from_secs(120), without_nri(&c));
    let done = limited.await.context("took longer than 120 s");
    // The chart's values go, whatever happens.
    c.cluster.chart_back().await?;
    for node in &c.cluster.nodes {
        c.agent_ready(node).await?;
    }
    done?
}

async fn without_nri(c: &Context) -> Result<()> {
    let node = c.node(0).to_owned();
    for node in &c.cluster.nodes {
        wait(Duration::from_secs(40), &format!("the agent of {node} is ready without NRI"), || async {
            let status = c.cluster.status(node).await?;
            ensure!(!status.nri_connected, "NRI is connected: {}", status.nri);
            ensure!(status.kubelet == "registered" && status.published_devices > 0, "kubelet {}", status.kubelet);
            Ok(())
        })
        .await?;
    }
    template(c, "all", ALL).await?;
    for round in 0..2 {
        let pod = Watched::make(c, &format!("pod{round}"), &node, &["all"], Look::nics(ALL)).await?;
        pod.runs(c).await?;
        c.delete_pod(&pod.name).await?;
        crate::runner::idle(&c.cluster, Duration::from_secs(30)).await.with_context(|| format!("after pod {round}"))?;
    }
    c.tell(format!("two pods had {ALL} of {ALL} NICs since their first moment and gave them back, without NRI"));
    Ok(())
}

/// A sandbox made while no plugin was connected, and no guard in its containers: they run without NICs when we are back.
pub(super) async fn missed_sandbox(c: Context) -> Result<()> {
    template(&c, "all", ALL).await?;
    let (agent, attached) = missed(&c, "attach").await?;
    let running = wait(Duration::from_secs(30), "the NICs are attached late", || async {
        let running = c.running_within(&attached.name, Duration::ZERO).await?;
        let there = running.nics().await?.len();
        ensure!(there == ALL, "{there} of {ALL} are there");
        Ok(running)
    })
    .await?;
    ensure!(restarts(&running.pod) == 0, "the container was started again");
    c.event(&attached.name, &["AttachedLate"]).await?;
    condition(&c).await?;
    attached.goes(&c).await?;
    agent.end(&c).await?;

    let (agent, evicted) = missed(&c, "evict").await?;
    c.event(&evicted.name, &["SandboxMissed"]).await?;
    c.pod_gone_within(&evicted.name, LIMIT).await.context("the pod is not evicted")?;
    crate::runner::idle(&c.cluster, Duration::from_secs(30)).await?;
    agent.end(&c).await
}

/// A pod on node1 whose sandbox and container were made while no agent was there, and an agent with this policy afterwards.
async fn missed(c: &Context, policy: &str) -> Result<(OwnAgent, Watched)> {
    let node = c.node(0).to_owned();
    let agent = OwnAgent::start(c, &node, &["--guard-dir=", &format!("--on-missed-sandbox={policy}")], &[]).await?;
    let held = Held::put(c, &node)?;
    let pod = Watched::make(c, policy, &node, &["all"], Look::nics(ALL)).await?;
    held.reached(&pod.name).await?;
    c.cluster.kill_agent(&node).await?;
    held.release();
    let started = wait(Duration::from_secs(50), "the container has started", || async {
        ensure!(!pod.starts(c)?.is_empty(), "not yet");
        Ok(())
    });
    tokio::select! {
        done = started => done?,
        done = keep_away(c, &node, Duration::from_secs(60)) => done?,
    }
    ensure!(pod.none_early(c).is_err(), "the container has its NICs: nothing was missed");
    c.agent_ready(&node).await?;
    Ok((agent, pod))
}

/// A device of the claim says that it came late.
async fn condition(c: &Context) -> Result<()> {
    wait(Duration::from_secs(20), "the claim says that its devices came late", || async {
        let claims: Api<ResourceClaim> = c.api();
        let claims = claims.list(&ListParams::default()).await?.items;
        let devices = claims.iter().flat_map(|claim| claim.status.iter().flat_map(|s| s.devices.iter().flatten()));
        let conditions: Vec<_> = devices.flat_map(|device| device.conditions.iter().flatten()).collect();
        let late = conditions.iter().filter(|condition| condition.reason == "AttachedLate").count();
        ensure!(
            late == ALL,
            "{late} of {ALL}: {conditions:?} of {:?}",
            claims.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
        );
        Ok(())
    })
    .await
}
