//! What the peer can configure of a NIC beyond names, addresses and routes; with its suite's values where those differ from what a
//! link has by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::peer::{attributes, host_link, with_link};
use crate::context::{Context, Running, wait};
use crate::inspect;
use crate::objects::{From, config, devices, pod, request_link};
use crate::runner::Skipped;

/// What `kernel.py` says of a link of the pod.
async fn in_pod<T: serde::de::DeserializeOwned>(c: &Context, running: &Running, verb: &str, link: &str) -> Result<T> {
    let text = running.run(&["python3", &c.cluster.script_path("kernel.py"), verb, link]).await?;
    serde_json::from_str(&text).with_context(|| format!("kernel.py {verb} {link}: {text}"))
}

/// The same on the node.
async fn on_node<T: serde::de::DeserializeOwned>(c: &Context, node: &str, verb: &str, link: &str) -> Result<T> {
    let pid = c.cluster.init_pid(node)?;
    let text = inspect::in_netns(pid, &["python3", &c.cluster.script_path("kernel.py"), verb, link]).await?;
    serde_json::from_str(&text).with_context(|| format!("kernel.py {verb} {link}: {text}"))
}

pub(super) async fn arp(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    let interface = json!({"name": "dranet-arp", "addresses": ["169.254.169.13/24"], "arpIgnore": 1, "arpAnnounce": 2});
    let running = with_link(&c, c.node(1), "dummy0", Some(json!({"interface": interface}))).await?;
    for (sysctl, want) in [("arp_ignore", "1"), ("arp_announce", "2")] {
        let found = running.run(&["cat", &format!("/proc/sys/net/ipv4/conf/dranet-arp/{sysctl}")]).await?;
        ensure!(found.trim() == want, "{sysctl} is {}", found.trim());
    }
    Ok(())
}

/// The node's dummy0 as an ifb link, whose segmentation and receive offloads can be changed (those of a macvlan can't); its LRO is off
/// for good.
async fn changeable_link(c: &Context) -> Result<()> {
    c.cluster.shell(c.node(1), "ip link add dummy0 type ifb; ip link set dummy0 up").await?;
    wait(Duration::from_secs(20), "dummy0 is published", || async { attributes(c, c.node(1), "dummy0").await.map(drop) }).await
}

/// The kernel's names that `tcp-segmentation-offload`, `generic-receive-offload` and `large-receive-offload` stand for.
const FEATURES: [&str; 3] = ["tx-tcp-segmentation", "rx-gro", "rx-lro"];

async fn three_features(c: &Context, running: &Running, link: &str, want: [bool; 3]) -> Result<()> {
    let features: BTreeMap<String, bool> = in_pod(c, running, "features", link).await?;
    let found = FEATURES.map(|name| features.get(name).copied());
    ensure!(found == want.map(Some), "{FEATURES:?} are {found:?}");
    Ok(())
}

/// The link-layer address, which the peer's scenario sets too, is in `peer-07-mtu-mac`: that of an ifb can't be changed.
pub(super) async fn ethtool(c: Context) -> Result<()> {
    changeable_link(&c).await?;
    let before: BTreeMap<String, bool> = on_node(&c, c.node(1), "features", "dummy0").await?;
    ensure!(FEATURES.map(|name| before[name]) == [true, true, false], "the link's own features are others: {before:?}");
    let parameters = json!({
        "interface": {"name": "dranet0", "addresses": ["169.254.169.14/24"], "mtu": 4321},
        "ethtool": {"features": {
            "tcp-segmentation-offload": false, "generic-receive-offload": false, "large-receive-offload": false}},
    });
    let running = with_link(&c, c.node(1), "dummy0", Some(parameters)).await?;
    three_features(&c, &running, "dranet0", [false, false, false]).await?;
    c.delete_pod("pod-dummy0").await?;
    given_back(&c, "features", &before).await
}

/// The host's link is as it was.
async fn given_back<T>(c: &Context, verb: &str, before: &BTreeMap<String, T>) -> Result<()>
where
    T: serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    wait(Duration::from_secs(20), &format!("dummy0 has its {verb} back"), || async {
        let after: BTreeMap<String, T> = on_node(c, c.node(1), verb, "dummy0").await?;
        ensure!(after == *before, "before {before:?}, after {after:?}");
        Ok(())
    })
    .await
}

/// The peer asks for sizes of 65536, TSO and GRO, which every link has by itself: so other sizes, and features that were turned off.
pub(super) async fn big_tcp(c: Context) -> Result<()> {
    changeable_link(&c).await?;
    on_node::<Value>(&c, c.node(1), "off", "dummy0").await?;
    let before: BTreeMap<String, u32> = on_node(&c, c.node(1), "sizes", "dummy0").await?;
    ensure!(before.len() == 4, "the kernel does not tell all sizes: {before:?}");
    let want: BTreeMap<String, u32> = serde_json::from_value(
        json!({"gsoMaxSize": 40000, "groMaxSize": 41000, "gsoIPv4MaxSize": 42000, "groIPv4MaxSize": 43000}),
    )?;
    let mut interface = json!({"name": "dranet0", "addresses": ["169.254.169.14/24"], "mtu": 8896});
    for (name, size) in &want {
        interface[name] = json!(size);
    }
    let parameters = json!({"interface": interface, "ethtool": {"features": {
        "tcp-segmentation-offload": true, "generic-receive-offload": true, "large-receive-offload": false}}});
    let running = with_link(&c, c.node(1), "dummy0", Some(parameters)).await?;
    let found: BTreeMap<String, u32> = in_pod(&c, &running, "sizes", "dranet0").await?;
    ensure!(found == want, "{found:?}");
    let nic = running.nic().await?;
    ensure!(nic.mtu == 8896, "{nic:?}");
    three_features(&c, &running, "dranet0", [true, true, false]).await?;
    c.delete_pod("pod-dummy0").await?;
    given_back(&c, "sizes", &before).await
}

/// A program called `handle_ingress`, pinned as this file for the time of a scenario.
const PIN: &str = "/sys/fs/bpf/e2e";

/// Attaches it to the node's dummy0 by `line`. The file may go once it is attached; with the link, the program goes. No event says that
/// a program was attached, so as in the peer's suite the link goes down and up: that is one.
async fn attach(c: &Context, line: &str) -> Result<()> {
    let script = c.cluster.script_path("kernel.py");
    let line = line.replace("KERNEL", &script);
    let seen = "ip link set dummy0 down; ip link set dummy0 up";
    let line = format!("rm -f {PIN}; python3 {script} load {PIN} handle_ingress; {line}; rm -f {PIN}; {seen}");
    c.cluster.shell(c.node(1), &line).await.map(drop)
}

const TC: &str =
    "tc qdisc add dev dummy0 clsact; tc filter add dev dummy0 ingress bpf direct-action object-pinned /sys/fs/bpf/e2e";
const TCX: &str = "python3 KERNEL tcx-attach dummy0 /sys/fs/bpf/e2e";

/// Name of the BPF filter on the node's dummy0, as tc shows it.
async fn filter_name(c: &Context) -> Result<String> {
    let text = c.cluster.shell(c.node(1), "tc -json filter show dev dummy0 ingress").await?;
    let filters: Vec<Value> = serde_json::from_str(&text)?;
    let name = filters.iter().find_map(|filter| filter["options"]["bpf_name"].as_str());
    name.map(str::to_owned).with_context(|| format!("no BPF filter: {text}"))
}

/// Waits until the device's attributes have `ebpf` and the list `key`.
async fn told(c: &Context, key: &str, names: &str) -> Result<()> {
    wait(Duration::from_secs(20), &format!("{key} is {names}"), || async {
        let found = attributes(c, c.node(1), "dummy0").await?;
        let list = found.get(&format!("dra.net/{key}")).and_then(|a| a["string"].as_str());
        let ebpf = found.get("dra.net/ebpf").and_then(|a| a["bool"].as_bool());
        ensure!(ebpf == Some(true) && list == Some(names), "ebpf {ebpf:?}, {key} {list:?}");
        Ok(())
    })
    .await
}

pub(super) async fn tc_filter(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    attach(&c, TC).await?;
    told(&c, "tcFilterNames", &filter_name(&c).await?).await
}

pub(super) async fn tcx(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    attach(&c, TCX).await?;
    told(&c, "tcxProgramNames", "handle_ingress").await
}

/// The kernel takes qdiscs and their filters from a link that moves, but not TCX programs: without the wish the pod would have one.
pub(super) async fn no_ebpf(c: Context) -> Result<()> {
    host_link(&c, c.node(1), "dummy0", &["link set DEV up"]).await?;
    attach(&c, &format!("{TC}; {TCX}")).await?;
    let programs: Value = on_node(&c, c.node(1), "tcx", "dummy0").await?;
    ensure!(programs["ingress"] == json!(["handle_ingress"]), "not attached: {programs}");
    filter_name(&c).await?;
    let interface = json!({"name": "dranet0", "addresses": ["169.254.169.14/24"], "disableEbpfPrograms": true});
    let running = with_link(&c, c.node(1), "dummy0", Some(json!({"interface": interface}))).await?;
    let programs: Value = in_pod(&c, &running, "tcx", "dranet0").await?;
    ensure!(programs == json!({"ingress": [], "egress": []}), "{programs}");
    for side in ["ingress", "egress"] {
        let filters = running.run(&["tc", "filter", "show", "dev", "dranet0", side]).await?;
        ensure!(filters.trim().is_empty(), "{filters}");
    }
    Ok(())
}

/// Two clients with a VRF each reach each other through a router pod that forwards.
pub(super) async fn vrf(c: Context) -> Result<()> {
    let address = |net: u8, host: u8| json!([format!("10.80.{net}.{host}/24")]);
    for net in [1, 2] {
        let name = format!("client{net}");
        let parameters = json!({
            "interface": {"name": "eth1", "addresses": address(net, 10), "vrf": {"name": "test-vrf", "table": 1500}},
            "routes": [{"destination": "0.0.0.0/0", "gateway": format!("10.80.{net}.1")}],
        });
        c.claim(&name, &devices(vec![request_link("nic", &format!("nic{net}"))], vec![config(&[], parameters)])).await?;
        c.pod(&pod(&name, Some(c.node(1)), &[From::Claim(&name)])).await?;
    }
    let known = c.cluster.shell(c.node(1), "unshare --net ip link add test-vrf type vrf table 1500").await;
    if known.is_err_and(|error| format!("{error:#}").contains("Unknown device type")) {
        // Then the refusal must say so.
        c.event("client1", &["interface.vrf", "kernel"]).await?;
        return Err(Skipped("this machine's kernel has no VRF (CONFIG_NET_VRF); the refusal says so").into());
    }
    let side = |net: u8| json!({"interface": {"name": format!("eth{net}"), "addresses": address(net, 1), "forwarding": true}});
    let requests = vec![request_link("one", "nic1"), request_link("two", "nic2")];
    c.claim("router", &devices(requests, vec![config(&["one"], side(1)), config(&["two"], side(2))])).await?;
    c.pod(&pod("router", Some(c.node(0)), &[From::Claim("router")])).await?;
    c.running("router").await?;
    for (net, to) in [(1, "10.80.2.10"), (2, "10.80.1.10")] {
        let client = c.running(&format!("client{net}")).await?;
        let link = client.run(&["ip", "link", "show", "dev", "eth1"]).await?;
        ensure!(link.contains("master test-vrf"), "{link}");
        let routes = client.run(&["ip", "route", "show", "table", "1500"]).await?;
        ensure!(routes.contains(&format!("default via 10.80.{net}.1")), "{routes}");
        client.ping("eth1", to).await?;
    }
    Ok(())
}
