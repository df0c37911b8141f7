//! What users see of a claim's devices: the claim's status, health in the pod's status.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use serde_json::json;

use crate::context::{Context, wait};
use crate::objects::{CLASS, From, config, devices, pod, request};
use crate::runner::Skipped;

async fn reported(c: &Context, claim: &str) -> Result<Vec<AllocatedDeviceStatus>> {
    Ok(c.api::<ResourceClaim>().get(claim).await?.status.unwrap_or_default().devices.unwrap_or_default())
}

/// `True` or `False`, and the reason.
fn ready(device: &AllocatedDeviceStatus) -> Option<(&str, &str)> {
    let condition = device.conditions.iter().flatten().find(|condition| condition.type_ == "Ready")?;
    Some((condition.status.as_str(), condition.reason.as_str()))
}

pub(super) async fn claim_status(c: Context) -> Result<()> {
    let requests = vec![request("a"), request("b")];
    let address = config(&["a"], json!({"interface": {"name": "rail0", "addresses": ["10.77.0.5/24"]}}));
    c.claim("told", &devices(requests, vec![address])).await?;
    c.pod(&pod("told", None, &[From::Claim("told")])).await?;
    let nics = c.running("told").await?.nics().await?;
    let status = wait(Duration::from_secs(20), "both devices are Ready in the claim's status", || async {
        let status = reported(&c, "told").await?;
        ensure!(status.len() == 2 && status.iter().all(|d| ready(d) == Some(("True", "Attached"))), "{status:?}");
        Ok(status)
    })
    .await?;
    for nic in &nics {
        let data = status.iter().filter_map(|d| d.network_data.as_ref()).find(|n| n.interface_name.as_ref() == Some(&nic.ifname));
        let data = data.with_context(|| format!("no networkData of {}: {status:?}", nic.ifname))?;
        ensure!(data.hardware_address.as_ref() == Some(&nic.address), "{data:?} {nic:?}");
        let ips = data.ips.clone().unwrap_or_default();
        ensure!(nic.addresses().iter().all(|address| ips.contains(address)), "{data:?} {nic:?}");
    }
    ensure!(status.iter().all(|device| device.data.is_some()), "no data: {status:?}");
    c.delete_pod("told").await?;
    wait(Duration::from_secs(30), "the claim's status is cleared", || async {
        let status = reported(&c, "told").await?;
        ensure!(status.is_empty(), "{status:?}");
        Ok(())
    })
    .await
}

/// Health of each device, as the pod's status has it.
async fn health(c: &Context, name: &str) -> Result<Vec<String>> {
    let status = c.api::<Pod>().get(name).await?.status.unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let resources = containers.into_iter().flat_map(|s| s.allocated_resources_status.unwrap_or_default());
    let mut all: Vec<_> = resources.flat_map(|r| r.resources.unwrap_or_default()).map(|h| h.health.unwrap_or_default()).collect();
    all.sort();
    Ok(all)
}

/// One of two devices of a claim loses its link in the pod and has it again.
pub(super) async fn link_health(c: Context) -> Result<()> {
    let version = c.cluster.client.apiserver_version().await?;
    if version.minor.parse::<u32>().context("the API server's version")? < 36 {
        bail!(Skipped("ResourceHealthStatus is off by default before Kubernetes 1.36"));
    }
    let two = json!({"name": "nics", "exactly": {"deviceClassName": CLASS, "count": 2}});
    c.template("two", &devices(vec![two], vec![])).await?;
    c.pod(&pod("sick", None, &[From::Template("two")])).await?;
    let running = c.running("sick").await?;
    let nic = running.nics().await?.remove(0).ifname;
    let expect = async |what: [&str; 2]| {
        wait(Duration::from_secs(40), &format!("the pod's status says {what:?}"), || async {
            let health = health(&c, "sick").await?;
            ensure!(health == what, "{health:?}");
            Ok(())
        })
        .await
    };
    expect(["Healthy", "Healthy"]).await?;
    running.run(&["ip", "link", "set", &nic, "down"]).await?;
    expect(["Healthy", "Unhealthy"]).await?;
    running.run(&["ip", "link", "set", &nic, "up"]).await?;
    expect(["Healthy", "Healthy"]).await
}
