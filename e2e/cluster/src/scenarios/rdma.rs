//! RDMA devices, where the cluster's nodes have some. Nodes that are network namespaces of one machine usually have none, and this is
//! skipped: `make e2e-vm` covers it, on a kernel with RDMA devices that move: `tests/rdma_traffic.rs` and what else `e2e/vm/tests` lists.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::context::{Context, wait};
use crate::inspect;
use crate::objects::{CLASS, DRIVER, From, by_name, devices, pod};
use crate::runner::Skipped;

/// `rdma -j ...` in the network namespace of a process.
async fn rdma(pid: u32, what: &str) -> Result<Vec<Value>> {
    let text = inspect::in_netns(pid, &["rdma", "-j", what]).await?;
    serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).with_context(|| format!("rdma {what}: {text}"))
}

fn names(links: &[Value]) -> Vec<&str> {
    links.iter().filter_map(|link| link["ifname"].as_str()).collect()
}

/// The pod has the NIC and the RDMA device's character device; in exclusive mode the RDMA device itself, which the host then lacks.
pub(super) async fn moves(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let host = c.cluster.init_pid(&node)?;
    if !Path::new("/sys/class/infiniband").exists() {
        return Err(Skipped("this machine's kernel has no RDMA (no module ib_core); `make e2e-vm` shows it").into());
    }
    let links = rdma(host, "link").await?;
    let Some((device, nic)) = links.iter().find_map(|link| Some((link["ifname"].as_str()?, link["netdev"].as_str()?))) else {
        return Err(Skipped("the node has no RDMA device with a NIC (`rdma link`); `make e2e-vm` shows it").into());
    };
    let exclusive = rdma(host, "system").await?.first().is_some_and(|system| system["netns"] == "exclusive");
    let capable = json!({"cel": {"expression": format!("device.attributes[\"{DRIVER}\"].rdma")}});
    let request = json!({"name": "nic", "exactly": {"deviceClassName": CLASS, "selectors": [by_name(nic), capable]}});
    c.claim("rdma", &devices(vec![request], vec![])).await?;
    c.pod(&pod("rdma", Some(&node), &[From::Claim("rdma")])).await?;
    let running = c.running("rdma").await?;
    ensure!(running.nic().await?.ifname == nic, "the pod has another NIC than {nic}");
    let files =
        std::fs::read_dir(format!("/proc/{}/root/dev/infiniband", running.pid)).context("no /dev/infiniband in the pod")?;
    let files: Vec<_> = files.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    ensure!(files.iter().any(|name| name.starts_with("uverbs")), "the pod has {files:?}");
    if exclusive {
        let (inside, outside) = (rdma(running.pid, "link").await?, rdma(host, "link").await?);
        ensure!(names(&inside) == [device], "the pod has {inside:?}");
        ensure!(!names(&outside).contains(&device), "the host still has {device}");
    }
    c.delete_pod("rdma").await?;
    wait(Duration::from_secs(20), &format!("{device} is back"), || async {
        ensure!(names(&rdma(host, "link").await?).contains(&device), "it is not");
        Ok(())
    })
    .await
}
