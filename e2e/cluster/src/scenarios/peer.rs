//! What DRANET's own end-to-end suite covers, with its manifests' shapes (a DeviceClass without configuration, CEL on `dra.net`
//! attributes, one template and a Deployment or pod). Where it makes a dummy link, here it is a macvlan: the kernels of test machines
//! have no dummy links.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::disturb::slices;
use crate::context::{Context, Running, wait};
use crate::inspect;
use crate::objects::{DRIVER, From, IMAGE, by_name, config, devices, pod, request_link};

const PEER_CLASS: &str = "e2e-multinic";

/// A link of the node, made by `lines` of `ip -batch` after itself; the runner removes it after the scenario.
pub(super) async fn host_link(c: &Context, node: &str, name: &str, lines: &[&str]) -> Result<()> {
    let mut batch = format!("link add {name} link port7 type macvlan mode bridge\n");
    for line in lines {
        batch += &line.replace("DEV", name);
        batch.push('\n');
    }
    c.cluster.shell(node, &format!("ip -batch - <<'B'\n{batch}B")).await?;
    wait(Duration::from_secs(20), &format!("{name} is published"), || async { attributes(c, node, name).await.map(drop) }).await
}

/// Attributes of the device that is called `name` on the host.
pub(super) async fn attributes(c: &Context, node: &str, name: &str) -> Result<BTreeMap<String, Value>> {
    for slice in slices(c, node).await? {
        for device in slice.spec.devices.unwrap_or_default() {
            let attributes = device.attributes.unwrap_or_default();
            if attributes.get(&format!("{DRIVER}/ifName")).and_then(|a| a.string.as_deref()) == Some(name) {
                return attributes.into_iter().map(|(key, value)| Ok((key, serde_json::to_value(value)?))).collect();
            }
        }
    }
    bail!("no device of {node} has ifName {name}")
}

/// A request for the node's link `name`, of the peer's class: everything of the driver.
pub(super) async fn request_peer(c: &Context, name: &str) -> Result<Value> {
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": PEER_CLASS},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == \"{DRIVER}\"")}}]}});
    let classes: Api<DeviceClass> = Api::all(c.cluster.client.clone());
    let class: DeviceClass = serde_json::from_value(class)?;
    classes.patch(PEER_CLASS, &PatchParams::apply("dranic-e2e").force(), &Patch::Apply(&class)).await?;
    Ok(json!({"name": "req", "exactly": {"deviceClassName": PEER_CLASS, "selectors": [by_name(name)]}}))
}

/// A pod with the node's link `name`, configured by `parameters`.
pub(super) async fn with_link(c: &Context, node: &str, name: &str, parameters: Option<Value>) -> Result<Running> {
    let configs = parameters.map(|p| config(&[], p)).into_iter().collect();
    c.claim(&format!("claim-{}", name.replace('_', "-")), &devices(vec![request_peer(c, name).await?], configs)).await?;
    let pod_name = format!("pod-{}", name.replace('_', "-"));
    c.pod(&pod(&pod_name, Some(node), &[From::Claim(&format!("claim-{}", name.replace('_', "-")))])).await?;
    c.running(&pod_name).await
}

pub(super) async fn address(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    let parameters = json!({"interface": {"name": "eth99", "addresses": ["169.254.169.13/24"]}});
    let nic = with_link(&c, c.node(1), "dummy0", Some(parameters)).await?.nic().await?;
    ensure!(nic.ifname == "eth99" && nic.addresses() == ["169.254.169.13/24"], "{nic:?}");
    Ok(())
}

pub(super) async fn odd_name(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "mlx5_6", &["link set DEV up"]).await?;
    let parameters = json!({"interface": {"name": "eth99", "addresses": ["169.254.169.13/24"]}});
    let nic = with_link(&c, c.node(1), "mlx5_6", Some(parameters)).await?.nic().await?;
    ensure!(nic.ifname == "eth99" && nic.addresses() == ["169.254.169.13/24"], "{nic:?}");
    Ok(())
}

/// A Deployment of one pod with the template's claim.
async fn deploy(c: &Context, name: &str, template: &str, node: &str) -> Result<()> {
    let mut one = pod(name, Some(node), &[From::Template(template)]);
    one["metadata"]["labels"] = json!({"app": name});
    let value = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": name}},
                 "template": {"metadata": {"labels": {"app": name}}, "spec": one["spec"]}}});
    c.api::<Deployment>().create(&PostParams::default(), &serde_json::from_value(value)?).await?;
    Ok(())
}

async fn deployed(c: &Context, name: &str) -> Result<Running> {
    let pods: Api<Pod> = c.api();
    let pod = wait(Duration::from_secs(20), "the Deployment has a pod", || async {
        let found = pods.list(&ListParams::default().labels(&format!("app={name}"))).await?;
        found.items.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_none()).context("none yet")
    })
    .await?;
    c.running(&pod.name_any()).await
}

async fn undeploy(c: &Context, name: &str) -> Result<()> {
    c.api::<Deployment>().delete(name, &DeleteParams::foreground()).await?;
    let pods: Api<Pod> = c.api();
    wait(Duration::from_secs(60), "the Deployment's pods are gone", || async {
        ensure!(pods.list(&ListParams::default().labels(&format!("app={name}"))).await?.items.is_empty(), "they are still there");
        ensure!(c.api::<Deployment>().get_opt(name).await?.is_none(), "the Deployment itself is still there");
        Ok(())
    })
    .await
}

pub(super) async fn deployment(c: Context) -> Result<()> {
    // The link stays down on the host.
    host_link(&c, c.node(1), "dummy0", &["addr add 169.254.169.14/32 dev DEV"]).await?;
    c.template("phy", &devices(vec![request_peer(&c, "dummy0").await?], vec![])).await?;
    deploy(&c, "server", "phy", c.node(1)).await?;
    let nic = deployed(&c, "server").await?.nic().await?;
    ensure!(nic.ifname == "dummy0" && nic.addresses() == ["169.254.169.14/32"], "{nic:?}");
    undeploy(&c, "server").await
}

pub(super) async fn route_order(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    let parameters = json!({
        "interface": {"name": "eth99", "addresses": ["169.254.169.13/32"]},
        "routes": [{"destination": "169.254.169.0/24", "gateway": "169.254.169.1"}, {"destination": "169.254.169.1/32", "scope": 253}],
    });
    let running = with_link(&c, c.node(1), "dummy0", Some(parameters)).await?;
    let routes = running.run(&["ip", "route", "show", "dev", "eth99"]).await?;
    ensure!(
        routes.contains("169.254.169.0/24 via 169.254.169.1") && routes.contains("169.254.169.1 proto static scope link"),
        "{routes}"
    );
    Ok(())
}

pub(super) async fn metrics(c: Context) -> Result<()> {
    let value = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "metrics"},
        "spec": {"hostNetwork": true, "restartPolicy": "Never", "automountServiceAccountToken": false, "containers": [{
            "name": "main", "image": IMAGE, "imagePullPolicy": "Never",
            "command": ["/bin/sh", "-c", "wget -q -O - http://127.0.0.1:9177/metrics | grep process_start_time_seconds"]}]},
    });
    c.pod(&value).await?;
    wait(Duration::from_secs(30), "the pod finds the metric", || async {
        let phase = c.api::<Pod>().get("metrics").await?.status.and_then(|s| s.phase).unwrap_or_default();
        ensure!(phase == "Succeeded", "phase {phase}");
        Ok(())
    })
    .await
}

pub(super) async fn mtu_mac(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    let interface =
        json!({"name": "dranet0", "addresses": ["169.254.169.14/24"], "mtu": 4321, "hardwareAddr": "00:11:22:33:44:55"});
    let nic = with_link(&c, c.node(1), "dummy0", Some(json!({"interface": interface}))).await?.nic().await?;
    ensure!(
        nic.ifname == "dranet0"
            && nic.mtu == 4321
            && nic.address == "00:11:22:33:44:55"
            && nic.addresses() == ["169.254.169.14/24"],
        "{nic:?}"
    );
    Ok(())
}

pub(super) async fn count(c: Context) -> Result<()> {
    for (name, address) in [("dummy1", "addr add 169.254.171.1/32 dev DEV"), ("dummy2", "addr add 169.254.171.2/32 dev DEV")] {
        host_link(&c, c.node(1), name, &["link set DEV up", address]).await?;
    }
    let mut request = request_peer(&c, "dummy").await?;
    request["exactly"]["count"] = json!(2);
    let expression = format!("device.attributes[\"{DRIVER}\"].ifName.startsWith(\"dummy\")");
    request["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    c.template("both", &devices(vec![request], vec![])).await?;
    deploy(&c, "server", "both", c.node(1)).await?;
    let mut nics: Vec<_> =
        deployed(&c, "server").await?.nics().await?.into_iter().map(|n| (n.addresses().join(","), n.ifname)).collect();
    nics.sort();
    let want = [("169.254.171.1/32", "dummy1"), ("169.254.171.2/32", "dummy2")].map(|(a, n)| (a.to_owned(), n.to_owned()));
    ensure!(nics == want, "{nics:?}");
    undeploy(&c, "server").await
}

pub(super) async fn reuse(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy8", &["link set DEV up", "addr add 169.254.169.14/32 dev DEV"]).await?;
    c.template("phy", &devices(vec![request_peer(&c, "dummy8").await?], vec![])).await?;
    for round in 0..2 {
        deploy(&c, "server", "phy", c.node(1)).await?;
        let nic = deployed(&c, "server").await?.nic().await?;
        ensure!(nic.ifname == "dummy8" && nic.addresses() == ["169.254.169.14/32"], "round {round}: {nic:?}");
        undeploy(&c, "server").await?;
        // The peer's suite puts the address back by hand here.
        wait(Duration::from_secs(20), "dummy8 is back with its address", || async {
            let links = inspect::links(c.cluster.init_pid(c.node(1))?).await?;
            let link = links.iter().find(|link| link.ifname == "dummy8").context("dummy8 is missing")?;
            ensure!(link.is_up() && link.addresses() == ["169.254.169.14/32"], "{link:?}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Sockets of the driver that a kubelet looks at, as they are on `node`.
async fn kubelet_sockets(c: &Context, node: &str) -> Result<(Vec<String>, Vec<String>)> {
    let line = format!("cd /var/lib/kubelet; ls plugins/{DRIVER} plugins_registry 2>/dev/null || true");
    let files = c.cluster.shell(node, &line).await?;
    // With a pod's UID in the name where the agent is a DaemonSet's.
    let is_ours = |name: &&str| name.starts_with("dra") && name.ends_with(".sock");
    let (registry, plugin): (Vec<_>, Vec<_>) =
        files.lines().filter(is_ours).map(str::to_owned).partition(|name| name.ends_with("-reg.sock"));
    Ok((plugin, registry))
}

pub(super) async fn evicted(c: Context) -> Result<()> {
    for node in &c.cluster.nodes {
        let (plugin, registry) = kubelet_sockets(&c, node).await?;
        ensure!(!plugin.is_empty() && !registry.is_empty(), "{node} has {plugin:?} and {registry:?}");
    }
    let other = kubelet_sockets(&c, c.node(1)).await?;
    c.agent_leaves(c.node(0)).await?;
    let left = kubelet_sockets(&c, c.node(0)).await;
    let now = kubelet_sockets(&c, c.node(1)).await;
    // First of all: the next scenario needs it.
    c.agent_returns(c.node(0)).await?;
    let (plugin, registry) = left?;
    ensure!(plugin.is_empty() && registry.is_empty(), "left on {}: {plugin:?} {registry:?}", c.node(0));
    let now = now?;
    ensure!(now == other, "{} had {other:?} and has {now:?}", c.node(1));
    let (plugin, registry) = kubelet_sockets(&c, c.node(0)).await?;
    ensure!(!plugin.is_empty() && !registry.is_empty(), "{} has {plugin:?} and {registry:?}", c.node(0));
    // The kubelet takes it again.
    c.template("one", &devices(vec![request_link("nic", "nic1")], vec![])).await?;
    c.pod(&pod("after", Some(c.node(0)), &[From::Template("one")])).await?;
    c.running("after").await?.nic().await.map(drop)
}

pub(super) async fn forgotten_pod(c: Context) -> Result<()> {
    let node = c.node(1).to_owned();
    c.claim("nic", &devices(vec![request_link("nic", "nic2")], vec![])).await?;
    c.pod(&pod("lost", Some(&node), &[From::Claim("nic")])).await?;
    c.running("lost").await?;
    c.agent_leaves(&node).await?;
    c.api::<Pod>().delete("lost", &DeleteParams::default().grace_period(0)).await?;
    c.pod_gone("lost").await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let records = c.cluster.shell(&node, "find /var/lib/dranic -name '*.json' -not -path '*/metadata/*' | wc -l").await?;
    ensure!(records.trim() == "1", "records in the ledger of an agent that is away: {records}");
    c.agent_returns(&node).await?;
    wait(Duration::from_secs(40), "the pod is forgotten", || async {
        let held = c.cluster.status(&node).await?.claims;
        ensure!(held.is_empty(), "{held:?}");
        Ok(())
    })
    .await?;
    // Its link was a virtual one: it went with the pod's namespace.
    c.cluster.nics(&node, crate::runner::RAILS).await
}

pub(super) async fn neighbours(c: Context) -> Result<()> {
    let lines = [
        "link set DEV up",
        "addr add 10.75.0.1/24 dev DEV",
        "addr add fd00:75::1/64 dev DEV nodad",
        "neigh add 10.75.0.9 lladdr 00:11:22:33:44:55 nud permanent dev DEV",
        "neigh add fd00:75::9 lladdr 00:11:22:33:44:66 nud permanent dev DEV",
    ];
    host_link(&c, c.node(1), "dummy0", &lines).await?;
    let running = with_link(&c, c.node(1), "dummy0", Some(json!({"interface": {"name": "eth99"}}))).await?;
    let found = running.run(&["ip", "neigh", "show", "nud", "permanent", "dev", "eth99"]).await?;
    for want in ["10.75.0.9 lladdr 00:11:22:33:44:55", "fd00:75::9 lladdr 00:11:22:33:44:66"] {
        ensure!(found.contains(want), "{want} is missing: {found}");
    }
    Ok(())
}

pub(super) async fn routes_and_rules(c: Context) -> Result<()> {
    let node = c.node(1).to_owned();
    c.cluster.shell(&node, "ip rule del priority 500 2>/dev/null || true").await?;
    let lines = [
        "link set DEV up",
        "addr add 10.20.30.1/24 dev DEV",
        "route add 10.76.0.0/16 via 10.20.30.254 dev DEV table 100",
        "rule add from 10.20.30.0/24 lookup 100 priority 500",
    ];
    host_link(&c, &node, "dummy0", &lines).await?;
    let running = with_link(&c, &node, "dummy0", None).await?;
    let routes = running.run(&["ip", "route", "show", "table", "100"]).await?;
    let rules = running.run(&["ip", "rule", "show"]).await?;
    c.cluster.shell(&node, "ip rule del priority 500").await?;
    ensure!(routes.contains("10.76.0.0/16 via 10.20.30.254 dev dummy0"), "{routes}");
    ensure!(rules.contains("500:\tfrom 10.20.30.0/24 lookup 100"), "{rules}");
    Ok(())
}

pub(super) async fn ipv6_route(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up", "addr add fd00:78::5/96 dev DEV nodad"]).await?;
    let running = with_link(&c, c.node(1), "dummy0", None).await?;
    let routes = running.run(&["ip", "-6", "route", "show", "dev", "dummy0"]).await?;
    let ours: Vec<_> = routes.lines().filter(|line| line.starts_with("fd00:78::/96")).collect();
    ensure!(ours.len() == 1 && ours[0].contains("proto kernel metric 256"), "{routes}");
    Ok(())
}

/// Client 1 on nic1's rail, client 2 on nic2's, and a router pod with a NIC on both.
pub(super) async fn policy_routing(c: Context) -> Result<()> {
    let on =
        |net: u8, host: u8| json!({"interface": {"name": format!("eth{net}"), "addresses": [format!("10.79.{net}.{host}/24")]}});
    let router = |net: u8| {
        let mut parameters = on(net, 1);
        parameters["interface"]["forwarding"] = json!(true);
        parameters
    };
    let requests = vec![request_link("one", "nic1"), request_link("two", "nic2")];
    c.claim("router", &devices(requests, vec![config(&["one"], router(1)), config(&["two"], router(2))])).await?;
    c.pod(&pod("router", Some(c.node(0)), &[From::Claim("router")])).await?;
    for net in [1, 2] {
        let name = format!("client{net}");
        let mut parameters = on(net, 10);
        parameters["routes"] = json!([{"destination": "0.0.0.0/0", "gateway": format!("10.79.{net}.1"), "table": 100}]);
        parameters["rules"] = json!([{"priority": 100, "source": format!("10.79.{net}.10/32"), "table": 100}]);
        c.claim(&name, &devices(vec![request_link("nic", &format!("nic{net}"))], vec![config(&[], parameters)])).await?;
        c.pod(&pod(&name, Some(c.node(1)), &[From::Claim(&name)])).await?;
    }
    c.running("router").await?;
    let clients = [c.running("client1").await?, c.running("client2").await?];
    clients[0].ping("10.79.1.10", "10.79.2.10").await?;
    clients[1].ping("10.79.2.10", "10.79.1.10").await
}

pub(super) async fn attributes_stay(c: Context) -> Result<()> {
    let node = c.node(1).to_owned();
    host_link(&c, &node, "dummy0", &["link set DEV up", "addr add 169.254.169.15/32 dev DEV"]).await?;
    // Operational state settles after the link is up.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = attributes(&c, &node, "dummy0").await?;
    with_link(&c, &node, "dummy0", Some(json!({"interface": {"name": "eth99", "mtu": 1400}}))).await?;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let lent = attributes(&c, &node, "dummy0").await?;
    ensure!(before == lent, "before {before:?}, lent {lent:?}");
    c.agent_leaves(&node).await?;
    c.agent_returns(&node).await?;
    let later = attributes(&c, &node, "dummy0").await?;
    ensure!(before == later, "before {before:?}, after a restart of the agent {later:?}");
    Ok(())
}
