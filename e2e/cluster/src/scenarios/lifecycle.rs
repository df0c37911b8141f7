//! Pods that come, go, fail and start again.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;
use tokio::process::Command;

use crate::cluster::{output, processes};
use crate::context::{Context, wait};
use crate::inspect;
use crate::objects::{From, IMAGE, config, container, devices, pod, request, request_link};
use crate::runner::RAILS;

pub(super) async fn shared_claim(c: Context) -> Result<()> {
    c.claim("shared", &devices(vec![request_link("nic", "nic1")], vec![])).await?;
    c.pod(&pod("first", Some(c.node(0)), &[From::Claim("shared")])).await?;
    let first = c.running("first").await?;
    c.pod(&pod("second", Some(c.node(0)), &[From::Claim("shared")])).await?;
    let refused = c.event("second", &["one pod"]).await;
    ensure!(!is_running(&c, "second").await?, "the second pod runs without a NIC");
    refused?;
    // Not only at first: the kubelet tries again.
    for _ in 0..15 {
        ensure!(!is_running(&c, "second").await?, "the second pod runs without a NIC");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    ensure!(first.nic().await?.ifname == "nic1", "the first pod has lost its NIC");
    c.delete_pod("second").await?;
    ensure!(first.nic().await?.ifname == "nic1", "the first pod has lost its NIC when the second went");
    Ok(())
}

async fn is_running(c: &Context, name: &str) -> Result<bool> {
    let status = c.api::<Pod>().get(name).await?.status.unwrap_or_default();
    let started =
        |s: k8s_openapi::api::core::v1::ContainerStatus| s.state.is_some_and(|s| s.running.is_some() || s.terminated.is_some());
    Ok(status.container_statuses.unwrap_or_default().into_iter().any(started))
}

pub(super) async fn host_network(c: Context) -> Result<()> {
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    let mut value = pod("host", None, &[From::Template("one")]);
    value["spec"]["hostNetwork"] = json!(true);
    c.pod(&value).await?;
    c.event("host", &["host's network"]).await?;
    ensure!(!is_running(&c, "host").await?, "it runs");
    c.delete_pod("host").await
}

pub(super) async fn init_and_sidecar(c: Context) -> Result<()> {
    c.template("one", &devices(vec![request("nic")], vec![config(&[], json!({"interface": {"name": "rail0"}}))])).await?;
    let mut value = pod("chain", None, &[From::Template("one")]);
    // The init container fails, and with it the pod, where the NIC is missing.
    let mut sidecar = container("sidecar");
    sidecar["restartPolicy"] = json!("Always");
    value["spec"]["initContainers"] = json!([
        {"name": "look", "image": IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", "ip link show rail0 && grep -q 1 /sys/class/net/rail0/carrier"],
         "resources": {"claims": [{"name": "c0"}]}},
        sidecar,
    ]);
    value["spec"]["restartPolicy"] = json!("Always");
    c.pod(&value).await?;
    let running = c.running("chain").await?;
    let looked = running.pod.status.as_ref().and_then(|s| s.init_container_statuses.as_ref()).context("no init status")?;
    ensure!(looked.iter().all(|s| s.name != "look" || s.restart_count == 0), "the init container needed more than one try");
    let before = running.run(&["ip", "-o", "link", "show", "rail0"]).await?;

    let id = running
        .pod
        .status
        .as_ref()
        .and_then(|s| s.container_statuses.as_ref()?.first()?.container_id.clone())
        .context("no id")?;
    let id = id.rsplit('/').next().unwrap_or_default().to_owned();
    let inside = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&id));
    let Some(pid) = processes().into_iter().filter(inside).min() else { bail!("no process of container {id}") };
    output(Command::new("kill").args(["-KILL", &pid.to_string()])).await?;
    wait(Duration::from_secs(30), "the container is started again", || async {
        let status = c.api::<Pod>().get("chain").await?.status.unwrap_or_default();
        let main = status.container_statuses.unwrap_or_default().into_iter().next().context("no status")?;
        ensure!(main.ready && main.restart_count == 1, "{main:?}");
        Ok(())
    })
    .await?;
    let after = c.running("chain").await?.run(&["ip", "-o", "link", "show", "rail0"]).await?;
    ensure!(before == after, "the NIC changed: {before} {after}");
    Ok(())
}

pub(super) async fn force_delete(c: Context) -> Result<()> {
    c.template("one", &devices(vec![request_link("nic", "nic5")], vec![])).await?;
    for _ in 0..3 {
        c.pod(&pod("forced", Some(c.node(0)), &[From::Template("one")])).await?;
        let nic = c.running("forced").await?.nic().await?;
        ensure!(nic.addresses() == ["10.20.5.1/24"], "{nic:?}");
        c.api::<Pod>().delete("forced", &DeleteParams::default().grace_period(0)).await?;
        c.pod_gone("forced").await?;
        // At once again: the kubelet may still be at the old pod, and the new one wants the same NIC.
    }
    Ok(())
}

/// Nobody deletes the pods but the namespace controller.
pub(super) async fn namespace_delete(c: Context) -> Result<()> {
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    for index in 0..6 {
        c.pod(&pod(&format!("pod{index}"), Some(c.node(index % 2)), &[From::Template("one")])).await?;
    }
    for index in 0..6 {
        c.running(&format!("pod{index}")).await?;
    }
    c.delete_namespace().await?;
    c.namespace_gone().await
}

/// What must not grow.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    links: usize,
    namespaces: usize,
    records: usize,
    specs: usize,
    mounts: usize,
}

async fn held(c: &Context, node: &str) -> Result<Held> {
    let count = async |line: &str| -> Result<usize> { Ok(c.cluster.shell(node, line).await?.lines().count()) };
    Ok(Held {
        links: inspect::links(c.cluster.init_pid(node)?).await?.len(),
        namespaces: count("ls /run/netns").await?,
        records: count("find /var/lib/dranic -type f").await?,
        specs: count("ls /var/run/cdi").await?,
        mounts: count("cat /proc/self/mounts").await?,
    })
}

/// Open files of each agent.
fn agent_files(c: &Context) -> Result<Vec<BTreeMap<String, usize>>> {
    let mut all = Vec::new();
    for node in &c.cluster.nodes {
        for pid in c.cluster.agents(node)? {
            all.push(inspect::open_files(pid)?);
        }
    }
    Ok(all)
}

/// No agent holds more files than at first. Some are open while it works (a dump of the kernel's tables, a connection), which ends; a
/// leak does not.
async fn as_few_files(c: &Context, before: &[BTreeMap<String, usize>]) -> Result<()> {
    wait(Duration::from_secs(60), "the agents hold no more open files than at first", || async {
        let after = agent_files(c)?;
        let sum = |files: &BTreeMap<String, usize>| files.values().sum::<usize>();
        let grown = before.iter().zip(&after).any(|(before, after)| sum(after) > sum(before) + 3);
        ensure!(!grown && before.len() == after.len(), "{before:?} before, {after:?} now");
        Ok(())
    })
    .await
}

pub(super) async fn churn(c: Context) -> Result<()> {
    const PODS: u32 = 50;
    let rounds = if c.full { 10 } else { 2 };
    for node in &c.cluster.nodes {
        c.cluster.nics(node, PODS / 2).await?;
    }
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    let mut mounted = Vec::new();
    for node in &c.cluster.nodes {
        mounted.push(volumes(&c, node).await?);
    }
    let (mut before, mut files) = (Vec::new(), Vec::new());
    // The first round warms up: connections, caches.
    for round in 0..=rounds {
        for index in 0..PODS {
            c.pod(&pod(&format!("pod{index}"), None, &[From::Template("one")])).await?;
        }
        for index in 0..PODS {
            let running = c.running_within(&format!("pod{index}"), Duration::from_secs(120)).await?;
            running.nic().await.with_context(|| format!("round {round}, pod{index}"))?;
        }
        c.api::<Pod>().delete_collection(&DeleteParams::default(), &kube::api::ListParams::default()).await?;
        for index in 0..PODS {
            c.pod_gone(&format!("pod{index}")).await?;
        }
        if round == 0 {
            (before, files) = (settled(&c, &mounted).await?, agent_files(&c)?);
        }
    }
    let after = settled(&c, &mounted).await?;
    ensure!(before == after, "something leaks: {before:?}, and {rounds} rounds later {after:?}");
    as_few_files(&c, &files).await?;
    c.tell(format!(
        "{} pods in {rounds} rounds after one to warm up: the same before and after on each node: {after:?}",
        PODS * rounds
    ));
    c.tell(format!("open files of the agents {files:?} before, {:?} after", agent_files(&c)?));
    for node in &c.cluster.nodes {
        c.cluster.nics(node, RAILS).await?;
    }
    Ok(())
}

/// Volumes of pods that are mounted on the node. The agent's own pod has one.
async fn volumes(c: &Context, node: &str) -> Result<usize> {
    Ok(c.cluster.shell(node, "grep kubernetes.io~ /proc/self/mounts || true").await?.lines().count())
}

/// What is held once the kubelets have cleaned up behind the pods.
async fn settled(c: &Context, mounted: &[usize]) -> Result<Vec<Held>> {
    for (node, mounted) in c.cluster.nodes.iter().zip(mounted.iter().copied()) {
        wait(Duration::from_secs(60), "the node has cleaned up", || async {
            ensure!(c.cluster.status(node).await?.claims.is_empty(), "claims are held");
            ensure!(c.cluster.shell(node, "ls /run/netns").await?.is_empty(), "namespaces are left");
            let left = volumes(c, node).await?;
            ensure!(left <= mounted, "{left} volumes are mounted, {mounted} were before");
            Ok(())
        })
        .await?;
    }
    let mut all = Vec::new();
    for node in &c.cluster.nodes {
        all.push(held(c, node).await?);
    }
    Ok(all)
}
