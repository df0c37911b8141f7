//! Somebody outside of the cluster says what devices are and how NICs shall look: a webhook, with the peer's flags and messages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::peer::{attributes, host_link, request_peer};
use crate::context::{Context, wait};
use crate::objects::{DRIVER, From, config, devices, pod};
use crate::server::Server;

/// Runs `body` while all agents have `flags` as well.
async fn with_flags(c: &Context, flags: &[&str], body: impl Future<Output = Result<()>>) -> Result<()> {
    let help = c.cluster.shell(c.node(0), "dranic agent --help").await?;
    for flag in flags {
        let name = flag.split('=').next().unwrap_or(flag);
        ensure!(help.contains(name), "the agent has no flag {name}");
    }
    c.cluster.agent_flags(flags).await?;
    let limited = async {
        for node in &c.cluster.nodes {
            c.agent_ready(node).await?;
        }
        body.await
    };
    // The flags go, whatever happens; the scenario's own limit would not wait for that.
    let done = tokio::time::timeout(Duration::from_secs(120), limited).await;
    c.cluster.agent_flags(&[]).await?;
    done.context("took longer than 120 s")?
}

/// Addresses that are lent, by claim and device.
type Leases = Arc<Mutex<BTreeMap<String, u8>>>;

/// As whereabouts does: an address of 192.168.100.0/24 for each device of a claim, the same when it is asked again.
fn ipam(leases: &Leases, path: &str, body: &Value) -> Option<Value> {
    let mut leases = leases.lock().unwrap_or_else(PoisonError::into_inner);
    let key = format!("{} {}", body["claim_uid"], body["device"]);
    match path {
        "/health" => Some(json!({"cloudProvider": false, "profileProvider": true})),
        "/GetProfileConfig" => {
            let host = leases.get(&key).copied().or_else(|| (1..=254).find(|host| !leases.values().any(|used| used == host)))?;
            leases.insert(key, host);
            Some(json!({"interface": {"addresses": [format!("192.168.100.{host}/24")]}}))
        }
        "/ReleaseProfileConfig" => {
            leases.remove(&key);
            Some(json!({}))
        }
        _ => None,
    }
}

/// A pod on each node gets an address from the webhook, and gives it back.
pub(super) async fn whereabouts(c: Context) -> Result<()> {
    let leases = Leases::default();
    let lender = Arc::clone(&leases);
    let server = Server::start(move |path, body| ipam(&lender, path, body)).await?;
    let url = format!("--webhook-url={}", server.url);
    with_flags(&c, &[&url, "--profile-provider=webhook"], async {
        let profile = config(&[], json!({"profile": "whereabouts"}));
        let mut addresses = Vec::new();
        for index in [0, 1] {
            host_link(&c, c.node(index), "dummy0", &["link set DEV up"]).await?;
            let name = format!("pod{index}");
            c.template(&name, &devices(vec![request_peer(&c, "dummy0").await?], vec![profile.clone()])).await?;
            c.pod(&pod(&name, Some(c.node(index)), &[From::Template(&name)])).await?;
            addresses.extend(c.running(&name).await?.nic().await?.addresses());
        }
        let lent = leases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .map(|h| format!("192.168.100.{h}/24"))
            .collect::<Vec<_>>();
        addresses.sort();
        ensure!(addresses.len() == 2 && lent.len() == 2, "the pods have {addresses:?}, lent are {lent:?}");
        ensure!(addresses.iter().all(|address| lent.contains(address)), "the pods have {addresses:?}, lent are {lent:?}");
        c.delete_pod("pod0").await?;
        c.delete_pod("pod1").await?;
        wait(Duration::from_secs(30), "the addresses are given back", || async {
            let left = leases.lock().unwrap_or_else(PoisonError::into_inner).clone();
            ensure!(left.is_empty(), "{left:?}");
            Ok(())
        })
        .await
    })
    .await
}

fn says(path: &str, body: &Value) -> Option<Value> {
    match path {
        "/health" => Some(json!({"cloudProvider": true, "profileProvider": true})),
        // Here `name` is the link's name, there the device's; both are `dummy0` for a link without hardware.
        "/GetDeviceAttributes" if body["name"] == "dummy0" => Some(json!({"dra.net/webhook_attr": {"string": "python"}})),
        "/GetDeviceConfig" if body["name"] == "dummy0" => Some(json!({"interface": {"mtu": 1450}})),
        "/GetProfileConfig" => Some(json!({"interface": {"addresses": ["10.200.200.200/32"]}})),
        "/GetDeviceAttributes" | "/GetDeviceConfig" | "/ReleaseProfileConfig" => Some(json!({})),
        _ => None,
    }
}

/// An attribute from the webhook in the slice and in the claim's selector, the device's configuration, and a profile's address.
pub(super) async fn provider(c: Context) -> Result<()> {
    let server = Server::start(says).await?;
    let url = format!("--webhook-url={}", server.url);
    with_flags(&c, &[&url, "--cloud-provider-hint=webhook", "--profile-provider=webhook"], async {
        host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
        wait(Duration::from_secs(30), "the webhook's attribute is in the slice", || async {
            let found = attributes(&c, c.node(1), "dummy0").await?;
            let value = found.get(&format!("{DRIVER}/webhook_attr")).and_then(|a| a["string"].as_str());
            ensure!(value == Some("python"), "{found:?}");
            Ok(())
        })
        .await?;
        let mut request = request_peer(&c, "dummy0").await?;
        let expression = format!("device.attributes[\"{DRIVER}\"].webhook_attr == \"python\"");
        request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
        c.template("told", &devices(vec![request], vec![config(&[], json!({"profile": "any"}))])).await?;
        c.pod(&pod("told", None, &[From::Template("told")])).await?;
        let nic = c.running("told").await?.nic().await?;
        ensure!(nic.ifname == "dummy0" && nic.mtu == 1450 && nic.addresses() == ["10.200.200.200/32"], "{nic:?}");
        let profiles = server.asked("/GetProfileConfig");
        ensure!(profiles.iter().any(|body| body["config"]["profile"] == "any" && body["device"].is_string()), "{profiles:?}");
        c.delete_pod("told").await?;
        wait(Duration::from_secs(30), "the profile is released", || async {
            ensure!(!server.asked("/ReleaseProfileConfig").is_empty(), "nobody has asked for it");
            Ok(())
        })
        .await
    })
    .await
}
