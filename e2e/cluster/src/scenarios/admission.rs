//! The policy that refuses configuration of a wrong form when an object is made: CEL that a real API server compiles and runs.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::context::{Context, wait};
use crate::objects::{DRIVER, claim, config, devices, request, template};

const POLICY: &str = include_str!("../../../../manifests/optional/config-policy.yaml");

/// Parameters, and a part of what is said of them; nothing where they are taken.
fn cases() -> Vec<(Value, &'static str)> {
    let rules = vec![json!({"table": 100, "priority": 5}); 256];
    vec![
        (json!({}), ""),
        (json!({"interface": null, "routes": null}), ""),
        (json!({"interface": {"name": "rail0", "mtu": 9000, "addresses": ["10.0.0.5/24", "fd00::5/64"], "dhcp": false}}), ""),
        (
            json!({"interface": {"hardwareAddr": "02:00:00:00:00:05", "type": "vlan", "vlan": {"id": 7, "protocol": "802.1ad"}}}),
            "",
        ),
        (json!({"interface": {"sysctls": {"ipv4/conf/rp_filter": 0, "ipv4/conf/arp_notify": "1"}}}), ""),
        (
            json!({"routes": [{"destination": "0.0.0.0/0", "gateway": "10.0.0.1", "table": 4_294_967_295_u32}], "rules": rules}),
            "",
        ),
        (json!({"ethtool": {"features": {"tso": true}, "rings": {"rx": 4096}}, "hostState": {"routes": "ignore"}}), ""),
        (json!({"interface": {"mtu": 67}}), "interface.mtu must be a whole number from 68"),
        (json!({"interface": {"mtu": "9000"}}), "interface.mtu must be a whole number"),
        (json!({"interface": {"mtu": 9000.5}}), "interface.mtu must be a whole number"),
        (json!({"interface": {"mtus": 9000}}), "interface has an unknown field"),
        (json!({"interface": ["rail0"]}), "interface must be an object"),
        (json!({"interface": {"name": "sixteen-bytes-xx"}}), "interface.name must be text of 1 to 15 characters"),
        (json!({"interface": {"addresses": ["10.0.0.5"]}}), "interface.addresses must be a list"),
        (json!({"interface": {"hardwareAddr": "02:00"}}), "interface.hardwareAddr must be text"),
        (json!({"interface": {"type": "bridge"}}), "interface.type must be one of passthrough, macvlan, ipvlan, vlan"),
        (json!({"interface": {"vrf": {"table": 7}}}), "interface.vrf.name is required"),
        (json!({"interface": {"sysctls": {"ipv4/conf/rp_filter": [0]}}}), "interface.sysctls must be an object"),
        (json!({"neighbours": []}), "opaque.parameters has an unknown field"),
        (json!({"routes": {"destination": "10.0.0.0/8"}}), "routes must be a list"),
        (json!({"routes": [7]}), "routes must be a list"),
        (json!({"routes": [{}, {"metrics": 5}]}), "routes[] has an unknown field"),
        (json!({"rules": [{"priority": 32768}]}), "rules[].priority must be a whole number from 0 to 32767"),
        (json!({"ethtool": {"features": {"tso": 1}}}), "ethtool.features must be an object"),
        (json!({"vf": {"vlan": 4095}}), "vf.vlan must be a whole number from 0 to 4094"),
        (json!({"rdma": {"netnsMode": "private"}}), "rdma.netnsMode must be one of shared, exclusive"),
        (json!({"rdma": {"limits": {"hcaHandles": -1}}}), "rdma.limits.hcaHandles must be a whole number from 0 to 2147483647"),
        (json!({"rdma": {"charDevices": ["uverbs"]}}), "rdma.charDevices must be a list"),
        (json!(7), "opaque.parameters"),
    ]
}

pub(super) async fn config_policy(c: Context) -> Result<()> {
    let file = c.cluster.scratch().join("config-policy.yaml");
    std::fs::write(&file, POLICY.replace("'dranic.dev'", &format!("'{DRIVER}'"))).context("writing the policy")?;
    let kubectl = |verb: &str| format!("kubectl {verb} -f {}", file.display());
    c.cluster.shell(c.node(0), &kubectl("apply")).await?;
    let outcome = tokio::time::timeout(Duration::from_secs(80), judge(&c)).await;
    c.cluster.shell(c.node(0), &kubectl("delete --ignore-not-found")).await?;
    outcome.context("it took too long")?
}

async fn judge(c: &Context) -> Result<()> {
    let bad = json!({"interface": {"mtu": 1}});
    wait(Duration::from_secs(30), "the policy is in force", || async { refused(c, &bad, "interface.mtu").await }).await?;
    let cases = cases();
    for (parameters, words) in &cases {
        if words.is_empty() { taken(c, parameters).await? } else { refused(c, parameters, words).await? }
    }
    // Of others nothing is asked.
    let foreign = json!({"opaque": {"driver": "other.example.com", "parameters": bad}});
    try_claim(c, vec![foreign]).await?.context("configuration of another driver was refused")?;
    // The largest that the API takes is within what CEL may cost.
    let routes = vec![json!({"metric": 100}); 256];
    let most = vec![config(&[], json!({"routes": routes, "rules": vec![json!({"table": 1}); 200]})); 32];
    try_claim(c, most).await?.context("the largest claim was refused")?;
    c.tell(format!("{} cases of a claim, a template and a class each", cases.len()));
    Ok(())
}

/// What the API server says to a claim.
async fn try_claim(c: &Context, entries: Vec<Value>) -> Result<Result<()>> {
    let spec = devices(vec![request("nic")], entries);
    attempt(&c.api::<ResourceClaim>(), claim("tried", &spec)).await
}

/// What it says to a claim, a template and a class with these parameters.
async fn each(c: &Context, parameters: &Value) -> Result<Vec<(&'static str, Result<()>)>> {
    let entry = config(&[], parameters.clone());
    let spec = devices(vec![request("nic")], vec![entry.clone()]);
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "e2e-tried"},
        "spec": {"config": [entry]}});
    let classes: Api<DeviceClass> = Api::all(Client::clone(&c.cluster.client));
    Ok(vec![
        ("claim", try_claim(c, vec![entry]).await?),
        ("template", attempt(&c.api::<ResourceClaimTemplate>(), template("tried", &spec)).await?),
        ("class", attempt(&classes, class).await?),
    ])
}

async fn taken(c: &Context, parameters: &Value) -> Result<()> {
    for (kind, outcome) in each(c, parameters).await? {
        outcome.with_context(|| format!("a {kind} with {parameters} was refused"))?;
    }
    Ok(())
}

async fn refused(c: &Context, parameters: &Value, words: &str) -> Result<()> {
    for (kind, outcome) in each(c, parameters).await? {
        match outcome {
            Ok(()) => bail!("a {kind} with {parameters} was taken"),
            Err(error) => {
                let said = error.to_string();
                ensure!(said.contains(words), "a {kind} with {parameters}: {said}");
            }
        }
    }
    Ok(())
}

/// Makes an object on trial: nothing of it is kept. The outer error is another one than a refusal.
async fn attempt<K>(api: &Api<K>, object: Value) -> Result<Result<()>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
{
    let object: K = serde_json::from_value(object)?;
    let trial = PostParams { dry_run: true, ..PostParams::default() };
    match api.create(&trial, &object).await {
        Ok(_) => Ok(Ok(())),
        Err(kube::Error::Api(status)) => Ok(Err(anyhow::anyhow!(status.message.clone()))),
        Err(error) => Err(error.into()),
    }
}
