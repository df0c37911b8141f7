//! A node that starts again, as after a power cut: what it had on its disk is there, everything else is not.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Api, DeleteParams, ListParams, LogParams};
use kube::{Resource, ResourceExt};
use serde_json::json;

use super::disturb::slices;
use crate::context::{Context, Running, wait};
use crate::inspect::Link;
use crate::objects::{From, config, devices, pod, request, request_link};
use crate::runner::RAILS;

/// Until the kubelet has everything running again. It asks for what failed every 10 s (`syncFrequency` of this cluster).
const BACK: Duration = Duration::from_secs(90);
/// The kubelet looks every 60 s for claims whose pods are gone (`reconcilePeriod`, `pkg/kubelet/cm/dra/manager.go`).
const FORGOTTEN: Duration = Duration::from_secs(100);

/// What must be the same afterwards.
type Nics = Vec<(String, Vec<String>, u32, String)>;

fn nics(mut links: Vec<Link>) -> Nics {
    links.sort_by(|a, b| a.ifname.cmp(&b.ifname));
    links.into_iter().map(|l| (l.ifname.clone(), l.addresses(), l.mtu, l.address)).collect()
}

/// Two pods that must come back, one that is deleted while the node is down, and one that is made meanwhile and wants its NIC.
pub(super) async fn reboot(c: Context) -> Result<()> {
    let node = c.node(1).to_owned();
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    let address = config(&["a"], json!({"interface": {"name": "rail0", "addresses": ["10.80.0.1/24"], "mtu": 8000}}));
    c.claim("three", &devices(vec![request("a"), request("b"), request("c")], vec![address])).await?;
    c.pod(&pod("single", Some(&node), &[From::Template("one")])).await?;
    c.pod(&pod("several", Some(&node), &[From::Claim("three")])).await?;
    c.pod(&pod("lost", Some(&node), &[From::Template("one")])).await?;
    c.pod(&pod("elsewhere", Some(c.node(0)), &[From::Template("one")])).await?;
    let mut before = Vec::new();
    for name in ["single", "several", "elsewhere"] {
        let running = c.running(name).await?;
        let nics = nics(running.nics().await?);
        ensure!(nics.len() == if name == "several" { 3 } else { 1 }, "{name}: {nics:?}");
        before.push((running, nics));
    }
    let lost = c.running("lost").await?.nic().await?.ifname;
    let boot = boot_id(&c, &node).await?;
    let held = held(&c, &node).await?;
    ensure!(held.len() == 3, "claims of the node: {held:?}");

    c.cluster.reboot(&node, "down").await?;
    let meanwhile = async {
        c.api::<Pod>().delete("lost", &DeleteParams::default().grace_period(0)).await?;
        c.pod_gone("lost").await?;
        c.claim("next", &devices(vec![request_link("nic", &lost)], vec![])).await?;
        c.pod(&pod("next", Some(&node), &[From::Claim("next")])).await
    };
    let meanwhile = meanwhile.await;
    // Also when that failed: other scenarios need the node.
    c.cluster.reboot(&node, "up").await?;
    meanwhile?;

    for (old, nics) in &before[..2] {
        came_back(&c, old, nics).await?;
    }
    let elsewhere = c.running("elsewhere").await?;
    ensure!(elsewhere.pid == before[2].0.pid, "the pod of the other node was started again");
    let next = c.running_within("next", BACK).await?.nic().await?;
    ensure!(next.ifname == lost && next.addresses() == [format!("10.20.{}.2/24", lost.replace("nic", ""))], "{next:?}");
    let events = c.events("next").await?;
    ensure!(!events.iter().any(|text| text.contains("still held")), "a record of before the reboot holds a device: {events:?}");
    ensure!(boot_id(&c, &node).await? != boot, "the node has the boot id that it had before");
    everything_is_known(&c, &node, &held).await?;
    for name in ["single", "several", "next"] {
        c.delete_pod(name).await?;
    }
    Ok(())
}

/// The pod runs in a new sandbox, with the NICs that it had.
async fn came_back(c: &Context, old: &Running, had: &Nics) -> Result<()> {
    let name = old.pod.name_any();
    let running = wait(BACK, &format!("{name} runs again"), || async {
        let pod = c.api::<Pod>().get(&name).await?;
        ensure!(container(&pod).is_some() && container(&pod) != container(&old.pod), "it is not started yet");
        c.running_within(&name, Duration::ZERO).await
    })
    .await;
    let running = match running {
        Ok(running) => running,
        Err(error) => return Err(error.context(c.events(&name).await?.join(" | "))),
    };
    ensure!(running.pod.uid() == old.pod.uid(), "{name} is another pod");
    let has = nics(running.nics().await?);
    ensure!(has == *had, "{name} had {had:?} and has {has:?}");
    ensure!(running.nics().await?.iter().all(Link::is_up), "{name}: {has:?}");
    Ok(())
}

/// Id of the pod's container.
fn container(pod: &Pod) -> Option<String> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()?.container_id.clone()
}

/// As the kubelet says it.
async fn boot_id(c: &Context, node: &str) -> Result<String> {
    let nodes: Api<Node> = Api::all(c.cluster.client.clone());
    Ok(nodes.get(node).await?.status.and_then(|s| s.node_info).context("a node without info")?.boot_id)
}

/// Slices, records and CDI specs are those of now, and the agent has told of what it found.
async fn everything_is_known(c: &Context, node: &str, before: &BTreeSet<String>) -> Result<()> {
    c.agent_ready(node).await?;
    wait(Duration::from_secs(20), "all devices are in the slices", || async {
        let count: usize = slices(c, node).await?.iter().map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).sum();
        ensure!(count == RAILS as usize, "{count} devices");
        Ok(())
    })
    .await?;
    let mut uids = BTreeSet::new();
    for claim in c.api::<ResourceClaim>().list(&ListParams::default()).await?.items {
        let elsewhere = claim.meta().owner_references.iter().flatten().any(|owner| owner.name == "elsewhere");
        if !elsewhere {
            uids.insert(claim.uid().context("a claim without UID")?);
        }
    }
    ensure!(uids.len() == 3, "claims of the node: {uids:?}");
    wait(FORGOTTEN, "the claim of the deleted pod is forgotten", || async {
        let held = held(c, node).await?;
        ensure!(held == uids, "the agent holds {held:?}, there are {uids:?}");
        let specs = c.cluster.shell(node, "ls /run/cdi").await?;
        let is_ours = |file: &str| uids.iter().any(|uid| file.contains(uid.as_str()));
        ensure!(specs.lines().count() == uids.len() && specs.lines().all(is_ours), "CDI specs: {specs}");
        Ok(())
    })
    .await?;
    let now = c.cluster.shell(node, "cat /proc/sys/kernel/random/boot_id").await?;
    let of_now = format!(
        "cd /var/lib/dranic; grep -rl --exclude-dir=metadata {} . | wc -l; find . -name '*.json' -not -path '*/metadata/*' | wc -l",
        now.trim()
    );
    let counts = c.cluster.shell(node, &of_now).await?;
    ensure!(counts.lines().all(|count| count == "3"), "records of this boot, and all: {counts}");
    let log = agent_log(c, node).await?;
    let told = |uid: &String| log.lines().any(|line| line.contains("prepared before a reboot") && line.contains(uid.as_str()));
    ensure!(before.iter().all(told), "the agent did not tell of all claims of before the reboot, {before:?}: {log}");
    Ok(())
}

/// UIDs of the claims that the agent has records of.
async fn held(c: &Context, node: &str) -> Result<BTreeSet<String>> {
    Ok(c.cluster.status(node).await?.claims.into_iter().map(|claim| claim.uid).collect())
}

/// What the agent has written since its last start.
async fn agent_log(c: &Context, node: &str) -> Result<String> {
    let file = c.cluster.log(node, "agent");
    if file.exists() {
        return Ok(std::fs::read_to_string(file)?);
    }
    let pods: Api<Pod> = Api::namespaced(c.cluster.client.clone(), "dranic");
    let found = pods.list(&ListParams::default().fields(&format!("spec.nodeName={node}"))).await?;
    let agent = found.items.first().with_context(|| format!("no pod of the agent on {node}"))?;
    Ok(pods.logs(&agent.name_any(), &LogParams::default()).await?)
}
