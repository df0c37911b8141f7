//! NICs beside the devices of another driver: on the same PCI root, on the same NUMA node.
//!
//! The NICs of the test nodes have no hardware, so where they are is made up by a sysfs tree that debug builds of the agent read
//! (`src/doubles.rs`). What is real: slices, scheduler, kubelet, two drivers in one claim. Real PCI functions behind real roots come
//! with the virtual machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};

use super::disturb::slices;
use crate::context::{Context, wait};
use crate::gpu::{Driver, GPU, Gpu};
use crate::objects::{DRIVER, From, devices, pod, request};
use crate::runner::RAILS;

const ROOT: &str = "resource.kubernetes.io/pcieRoot";
const NUMA: &str = "resource.kubernetes.io/numaNode";
/// Of each node, as its agent sees it.
const TREE: &str = "run/dranic/sys";
/// For everything but the clean-up.
const LIMIT: Duration = Duration::from_secs(150);

/// Each has at most one NIC on its root and one on its NUMA node, of eight: a NIC at random is the wrong one seven times of eight.
const GPUS: [Gpu; 4] = [
    Gpu { name: "gpu-a", root: "pci0000:10", numa: 0 },
    Gpu { name: "gpu-b", root: "pci0000:90", numa: 1 },
    Gpu { name: "gpu-c", root: "pci0000:50", numa: 0 },
    Gpu { name: "gpu-d", root: "pci0000:d0", numa: 1 },
];

/// PCI root and NUMA node of the NIC of a rail. The first one has none, as a NIC without hardware.
fn place(rail: u32) -> Option<(&'static str, u32)> {
    match rail {
        0 => None,
        3 => Some(("pci0000:90", 1)),
        6 => Some(("pci0000:10", 0)),
        _ => Some(("pci0000:40", 2)),
    }
}

pub(super) async fn match_attribute(c: Context) -> Result<()> {
    let places = Places::make(&c)?;
    let driver = Driver::start(&c, &GPUS).await?;
    let result = match tokio::time::timeout(LIMIT, all_cases(&c, &driver)).await {
        Ok(result) => result,
        Err(_) => bail!("took longer than {} s", LIMIT.as_secs()),
    };
    // While the driver can still unprepare what they have.
    let cleaned = delete_pods(&c).await;
    let closed = driver.close().await;
    drop(places);
    result.and(cleaned).and(closed)?;
    poke(&c).await?;
    published(&c, |_| None).await
}

async fn all_cases(c: &Context, driver: &Driver) -> Result<()> {
    poke(c).await?;
    published(c, place).await?;
    let cases = [
        Case { name: "root-a", node: c.node(0), gpu: "gpu-a", attribute: ROOT, nic: "nic6" },
        Case { name: "root-b", node: c.node(0), gpu: "gpu-b", attribute: ROOT, nic: "nic3" },
        Case { name: "numa-a", node: c.node(1), gpu: "gpu-c", attribute: NUMA, nic: "nic6" },
        Case { name: "numa-b", node: c.node(1), gpu: "gpu-d", attribute: NUMA, nic: "nic3" },
    ];
    for case in &cases {
        case.make(c).await?;
    }
    for case in &cases {
        case.check(c, driver).await.with_context(|| case.name)?;
    }
    // On its NUMA node there is a NIC, on its root there is none.
    let nowhere = Case { name: "nowhere", node: c.node(0), gpu: "gpu-c", attribute: ROOT, nic: "" };
    nowhere.make(c).await?;
    nowhere.is_refused(c).await?;
    for case in &cases {
        let uid = case.claim(c).await?.uid().unwrap_or_default();
        c.delete_pod(case.name).await?;
        ensure!(!driver.is_prepared(&uid), "{}: the pod is gone, the claim is still prepared by {GPU}", case.name);
    }
    Ok(())
}

/// One claim with a device of each driver, and a pod for it.
struct Case<'a> {
    name: &'static str,
    node: &'a str,
    gpu: &'static str,
    /// What must be the same of both.
    attribute: &'static str,
    /// The only NIC that is right.
    nic: &'static str,
}

impl Case<'_> {
    async fn make(&self, c: &Context) -> Result<()> {
        let selector = format!("device.attributes[\"{GPU}\"].name == \"{}\"", self.gpu);
        let gpu = json!({"name": "gpu", "exactly": {"deviceClassName": GPU, "selectors": [{"cel": {"expression": selector}}]}});
        let mut spec = devices(vec![gpu, request("nic")], vec![]);
        spec["devices"]["constraints"] = json!([{"requests": ["gpu", "nic"], "matchAttribute": self.attribute}]);
        c.claim(self.name, &spec).await?;
        c.pod(&pod(self.name, Some(self.node), &[From::Claim(self.name)])).await.map(drop)
    }

    async fn claim(&self, c: &Context) -> Result<ResourceClaim> {
        Ok(c.api::<ResourceClaim>().get(self.name).await?)
    }

    async fn check(&self, c: &Context, driver: &Driver) -> Result<()> {
        let nic = c.running(self.name).await?.nic().await?;
        ensure!(nic.ifname == self.nic && nic.is_up() && nic.mtu == 9000, "not {}: {nic:?}", self.nic);
        let claim = self.claim(c).await?;
        ensure!(driver.is_prepared(&claim.uid().unwrap_or_default()), "the claim is not prepared by {GPU}");
        let allocation = claim.status.and_then(|s| s.allocation).context("no allocation")?;
        let mut values = BTreeMap::new();
        for result in allocation.devices.and_then(|d| d.results).unwrap_or_default() {
            values
                .insert(result.driver.clone(), attribute(c, &result.driver, &result.pool, &result.device, self.attribute).await?);
        }
        let gpu = GPUS.iter().find(|gpu| gpu.name == self.gpu).context("no such device")?;
        let want = if self.attribute == ROOT { json!({"string": gpu.root}) } else { json!({"int": gpu.numa}) };
        let both = [DRIVER, GPU].map(|driver| (driver.to_owned(), want.clone()));
        ensure!(values == BTreeMap::from(both), "{} of the allocated devices: {values:?}", self.attribute);
        Ok(())
    }

    async fn is_refused(&self, c: &Context) -> Result<()> {
        c.event(self.name, &["FailedScheduling", "cannot allocate all claims"]).await?;
        for _ in 0..5 {
            let node = c.api::<Pod>().get(self.name).await?.spec.and_then(|spec| spec.node_name);
            let allocation = self.claim(c).await?.status.and_then(|status| status.allocation);
            ensure!(node.is_none() && allocation.is_none(), "{node:?} {allocation:?}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }
}

/// An attribute of a device, as its driver publishes it.
async fn attribute(c: &Context, driver: &str, pool: &str, name: &str, attribute: &str) -> Result<Value> {
    let api: Api<ResourceSlice> = Api::all(c.cluster.client.clone());
    let slices = api.list(&ListParams::default().fields(&format!("spec.driver={driver}"))).await?.items;
    let devices =
        slices.into_iter().filter(|slice| slice.spec.pool.name == pool).flat_map(|s| s.spec.devices.unwrap_or_default());
    let device = devices.into_iter().find(|device| device.name == name).with_context(|| format!("{driver} has no {name}"))?;
    let value = device.attributes.unwrap_or_default().remove(attribute);
    Ok(serde_json::to_value(value.with_context(|| format!("{name} has no {attribute}"))?)?)
}

/// Waits until the NICs of all nodes are published where `place` says.
async fn published(c: &Context, place: impl Fn(u32) -> Option<(&'static str, u32)>) -> Result<()> {
    let want: BTreeMap<_, _> =
        (0..RAILS).map(|rail| (format!("nic{rail}"), place(rail).map(|(r, n)| (r.to_owned(), n.into())))).collect();
    for node in &c.cluster.nodes {
        wait(Duration::from_secs(20), &format!("{node} publishes where its NICs are"), || async {
            let mut found = BTreeMap::new();
            for device in slices(c, node).await?.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()) {
                let mut attributes = device.attributes.unwrap_or_default();
                let mut take = |name: &str| attributes.remove(name).unwrap_or_default();
                let name = take(&format!("{DRIVER}/ifName")).string.unwrap_or_default();
                found.insert(name, take(ROOT).string.zip(take(NUMA).int));
            }
            ensure!(found == want, "{found:?}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Agents look at their hosts when something changes.
async fn poke(c: &Context) -> Result<()> {
    for node in &c.cluster.nodes {
        c.cluster.shell(node, "ip addr add 127.0.0.9/32 dev lo; ip addr del 127.0.0.9/32 dev lo").await?;
    }
    Ok(())
}

async fn delete_pods(c: &Context) -> Result<()> {
    let pods: Api<Pod> = c.api();
    pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    wait(Duration::from_secs(40), "the pods are gone", || async {
        ensure!(pods.list(&ListParams::default()).await?.items.is_empty(), "some are still there");
        Ok(())
    })
    .await
}

/// The trees of all nodes; they go when this is dropped.
struct Places(Vec<PathBuf>);

impl Drop for Places {
    fn drop(&mut self) {
        for tree in &self.0 {
            if let Err(error) = std::fs::remove_dir_all(tree) {
                println!("        cleaning up: {}: {error}", tree.display());
            }
        }
    }
}

impl Places {
    fn make(c: &Context) -> Result<Self> {
        let mut places = Self(Vec::new());
        for node in &c.cluster.nodes {
            let root = PathBuf::from(format!("/proc/{}/root", c.cluster.init_pid(node)?));
            let tree = root.join(TREE);
            let _ = std::fs::remove_dir_all(&tree); // of a run that was killed
            places.0.push(tree.clone());
            for rail in 0..RAILS {
                let Some((pci_root, numa)) = place(rail) else { continue };
                let index = root.join(format!("sys/class/net/nic{rail}/ifindex"));
                let index = std::fs::read_to_string(&index).with_context(|| format!("{}", index.display()))?;
                one_nic(&tree, rail, pci_root, numa, &index).with_context(|| format!("{}", tree.display()))?;
            }
        }
        Ok(places)
    }
}

/// A PCI function right below its root, and its link.
fn one_nic(tree: &std::path::Path, rail: u32, pci_root: &str, numa: u32, index: &str) -> std::io::Result<()> {
    use std::os::unix::fs::symlink;
    let function = format!("devices/{pci_root}/{}:{rail:02x}.0", pci_root.trim_start_matches("pci"));
    let link = tree.join(&function).join(format!("net/nic{rail}"));
    std::fs::create_dir_all(&link)?;
    std::fs::create_dir_all(tree.join("class/net"))?;
    std::fs::write(link.join("ifindex"), index)?;
    std::fs::write(tree.join(&function).join("numa_node"), format!("{numa}\n"))?;
    symlink("../../../bus/pci", tree.join(&function).join("subsystem"))?;
    symlink("../..", link.join("device"))?;
    symlink(format!("../../{function}/net/nic{rail}"), tree.join(format!("class/net/nic{rail}")))
}
