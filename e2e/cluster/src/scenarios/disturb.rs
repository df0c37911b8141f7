//! Parts that die while pods start.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::context::{Context, Running, wait};
use crate::objects::{DRIVER, From, config, devices, pod, request};

/// Small numbers from a seed (Marsaglia's xorshift64, shifts 13, 7, 17): enough for choosing moments, and the same again.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Names of the node's slices of our driver.
pub(super) async fn slices(c: &Context, node: &str) -> Result<Vec<ResourceSlice>> {
    let api: Api<ResourceSlice> = Api::all(c.cluster.client.clone());
    let filter = ListParams::default().fields(&format!("spec.nodeName={node},spec.driver={DRIVER}"));
    Ok(api.list(&filter).await?.items)
}

pub(super) async fn kubelet_restart(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    c.pod(&pod("before", Some(&node), &[From::Template("one")])).await?;
    let before = c.running("before").await?;
    let nic = before.nic().await?;
    let old: Vec<_> = slices(&c, &node).await?.iter().map(ResourceExt::name_any).collect();
    c.cluster.daemon(&node, "kubelet", "kill").await?;
    c.cluster.daemon(&node, "kubelet", "start").await?;
    // A kubelet deletes the slices of its node when it starts; new ones have new names.
    wait(Duration::from_secs(30), "the slices are back", || async {
        let new: Vec<_> = slices(&c, &node).await?.iter().map(ResourceExt::name_any).collect();
        ensure!(!new.is_empty() && new.iter().all(|name| !old.contains(name)), "{old:?} {new:?}");
        Ok(())
    })
    .await?;
    c.pod(&pod("after", Some(&node), &[From::Template("one")])).await?;
    c.running("after").await?.nic().await?;
    let still = c.running("before").await?;
    ensure!(still.pid == before.pid, "the pod was started again");
    ensure!(still.nic().await?.ifname == nic.ifname, "the pod has lost its NIC");
    Ok(())
}

pub(super) async fn kill_agent(c: Context) -> Result<()> {
    rounds(c, "agent").await
}

pub(super) async fn kill_kubelet(c: Context) -> Result<()> {
    rounds(c, "kubelet").await
}

pub(super) async fn kill_containerd(c: Context) -> Result<()> {
    rounds(c, "containerd").await
}

pub(super) async fn kill_apiserver(c: Context) -> Result<()> {
    rounds(c, "kube-apiserver").await
}

/// Pods start, `victim` dies at a random moment and is started again; every pod must get its NICs.
async fn rounds(c: Context, victim: &str) -> Result<()> {
    let mut random = Random(c.seed | 1);
    let configuration = config(&["b"], json!({"interface": {"name": "rail0", "addresses": ["10.74.0.1/24"], "mtu": 8000}}));
    c.template("two", &devices(vec![request("a"), request("b")], vec![configuration])).await?;
    for round in 0..if c.full { 10 } else { 3 } {
        let after = Duration::from_millis(random.below(2500));
        one_round(&c, victim, after)
            .await
            .with_context(|| format!("round {round}, {victim} killed after {} ms", after.as_millis()))?;
    }
    Ok(())
}

async fn one_round(c: &Context, victim: &str, after: Duration) -> Result<()> {
    const PODS: usize = 4;
    for index in 0..PODS {
        // Three on the node whose part dies, one on the other.
        let node = c.node(usize::from(index == 3));
        c.pod(&pod(&format!("pod{index}"), Some(node), &[From::Template("two")])).await?;
    }
    tokio::time::sleep(after).await;
    if victim == "agent" {
        c.cluster.kill_agent(c.node(0)).await?;
    } else {
        c.cluster.daemon(c.node(0), victim, "kill").await?;
        c.cluster.daemon(c.node(0), victim, "start").await?;
    }
    for index in 0..PODS {
        let name = format!("pod{index}");
        let running = c.running_within(&name, Duration::from_secs(90)).await?;
        if complete(&running).await.is_err() {
            // While the agent is dead, a runtime without NRI's failure policy asks nobody. The scenario `gate` is about that.
            println!("        note: {name} ran before its NICs were there ({victim} killed after {} ms)", after.as_millis());
        }
        wait(Duration::from_secs(20), &format!("{name} has its NICs"), || complete(&running)).await?;
    }
    // Virtual NICs die with a pod's namespace unless an agent takes them out before.
    c.agent_ready(c.node(0)).await?;
    for index in 0..PODS {
        c.delete_pod(&format!("pod{index}")).await?;
    }
    crate::runner::idle(&c.cluster, Duration::from_secs(30)).await
}

/// Both NICs are in the pod, and the configured one is as it must be.
async fn complete(pod: &Running) -> Result<()> {
    let nics = pod.nics().await?;
    let configured = nics.iter().find(|nic| nic.ifname == "rail0").with_context(|| format!("rail0 is missing: {nics:?}"))?;
    ensure!(nics.len() == 2, "{nics:?}");
    ensure!(configured.is_up() && configured.mtu == 8000 && configured.addresses() == ["10.74.0.1/24"], "{configured:?}");
    Ok(())
}
