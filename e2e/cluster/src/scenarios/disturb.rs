//! Parts that start again under pods that run.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, ListParams};

use crate::context::{Context, wait};
use crate::objects::{DRIVER, From, devices, pod, request};

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
