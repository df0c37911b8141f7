//! One NIC for several pods.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::disturb::slices;
use crate::context::{Context, wait};
use crate::inspect;
use crate::objects::{DRIVER, From, config, devices, pod, request_link};
use crate::own_agent::OwnAgent;

/// A request for nic0: a share of it, or all of it.
fn request(shared: bool) -> Value {
    let mut request = request_link("nic", "nic0");
    let is = if shared { "" } else { "!" };
    let selector = json!({"cel": {"expression": format!("{is}device.attributes[\"{DRIVER}\"].shared")}});
    request["exactly"]["selectors"].as_array_mut().expect("a list").push(selector);
    request
}

pub(super) async fn shared_nic(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let agent = OwnAgent::start(&c, &node, &["--share-slots=2", "--share=nic0"], &[]).await?;
    wait(Duration::from_secs(30), "nic0 is published as one that is shared", || async {
        let slices = slices(&c, &node).await?;
        let counters = slices.iter().any(|s| s.spec.shared_counters.as_ref().is_some_and(|sets| sets.len() == 1));
        let mut devices = slices.iter().flat_map(|s| s.spec.devices.iter().flatten());
        let share = devices.find(|d| d.allow_multiple_allocations == Some(true));
        let share = share.context("no device has allowMultipleAllocations")?;
        let slots = share.capacity.iter().flatten().find(|(name, _)| name.ends_with("/slots"));
        ensure!(counters && slots.is_some_and(|(_, slots)| slots.value.0 == "2"), "counters {counters}, {share:?}");
        Ok(())
    })
    .await?;

    for (name, address) in [("first", "10.75.0.1/24"), ("second", "10.75.0.2/24"), ("third", "10.75.0.3/24")] {
        let interface = json!({"interface": {"type": "macvlan", "name": "net1", "addresses": [address]}});
        c.template(name, &devices(vec![request(true)], vec![config(&[], interface)])).await?;
    }
    for name in ["first", "second"] {
        c.pod(&pod(name, Some(&node), &[From::Template(name)])).await?;
    }
    let (first, second) = (c.running("first").await?, c.running("second").await?);
    first.ping("net1", "10.75.0.2").await?;
    second.ping("net1", "10.75.0.1").await?;
    let host = inspect::links(c.cluster.init_pid(&node)?).await?;
    let nic = host.iter().find(|link| link.ifname == "nic0").context("nic0 is not on the node any more")?;
    ensure!(nic.is_up() && nic.addresses() == ["10.20.0.1/24"], "{nic:?}");

    // The third is one too many, and the NIC as a whole is not to be had.
    c.template("whole", &devices(vec![request(false)], vec![])).await?;
    for name in ["third", "whole"] {
        c.pod(&pod(name, Some(&node), &[From::Template(name)])).await?;
        c.event(name, &["FailedScheduling", "cannot allocate all claims"]).await?;
    }
    c.delete_pod("third").await?;
    c.delete_pod("first").await?;
    ensure!(phase(&c, "whole").await? == "Pending", "the NIC as a whole was given away while a share of it is out");
    c.delete_pod("second").await?;
    let whole = c.running("whole").await?;
    ensure!(whole.nic().await?.ifname == "nic0", "{:?}", whole.nics().await?);
    // And the other way round.
    c.pod(&pod("third", Some(&node), &[From::Template("third")])).await?;
    c.event("third", &["FailedScheduling", "cannot allocate all claims"]).await?;
    c.delete_pod("whole").await?;
    c.running("third").await?.nic().await?;
    c.delete_pod("third").await?;
    agent.end(&c).await
}

async fn phase(c: &Context, name: &str) -> Result<String> {
    Ok(c.api::<Pod>().get(name).await?.status.and_then(|status| status.phase).unwrap_or_default())
}
