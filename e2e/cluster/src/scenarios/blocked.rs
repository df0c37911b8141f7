//! What many NICs cost the node and the pod: how long the runtime, which asks about one pod at a time, waits for us, and whether a pod
//! gets as many as it was promised.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::{Value, json};

use super::watched::{LIMIT, Look, Watched};
use crate::context::{Context, wait};
use crate::inspect::{self, Link};
use crate::objects::{DRIVER, devices, pod};
use crate::own_agent::OwnAgent;
use crate::tap::{Call, Tap};

/// DeviceClass of the links that are made here.
const CLASS: &str = "e2e-veths";
/// A claim has no more devices (`resource.k8s.io/v1`).
const PER_CLAIM: usize = 32;
/// What the agent may take of the runtime's time (`--hold`), and on top of it the way there and back.
const MOST_MS: f64 = 200.0 + 20.0;
/// A pod without claims, beside one with 32 NICs, against the same alone.
const MOST_RATIO: f64 = 1.5;

/// Links of kind veth on `node`, whose other ends are where no pod is: those that people measure with. They are offered for a scenario
/// only, and go with its end (`nics.sh`).
async fn veths(c: &Context, node: &str, count: usize) -> Result<()> {
    let fabric = std::fs::read_to_string(c.cluster.scratch().join("fabric/outer.pid")).context("the fabric")?;
    let target = c.cluster.init_pid(node)?;
    let all = |line: &dyn Fn(usize) -> String| (0..count).map(line).collect::<String>();
    let links =
        all(&|i| format!("link add {node}-bm{i} mtu 9000 type veth peer name bm{i} netns {target}\nlink set {node}-bm{i} up\n"));
    inspect::in_netns(fabric.trim().parse()?, &["bash", "-c", &format!("ip -batch - <<'B'\n{links}B")]).await?;
    let links = all(&|i| format!("link set bm{i} mtu 9000 up\naddr add 10.30.{i}.1/24 dev bm{i}\n"));
    inspect::in_netns(target, &["bash", "-c", &format!("ip -batch - <<'B'\n{links}B")]).await?;
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": CLASS},
        "spec": {"selectors": [{"cel": {"expression": format!(
            "device.driver == \"{DRIVER}\" && device.attributes[\"{DRIVER}\"].ifName.startsWith(\"bm\")")}}]}});
    let class: DeviceClass = serde_json::from_value(class)?;
    let classes: Api<DeviceClass> = Api::all(c.cluster.client.clone());
    classes.patch(CLASS, &PatchParams::apply("dranic-e2e").force(), &Patch::Apply(&class)).await?;
    wait(Duration::from_secs(30), &format!("{count} links are published"), || async {
        let published = c.cluster.status(node).await?.published_devices;
        ensure!(published >= count + crate::runner::RAILS as usize, "{published} devices are published");
        Ok(())
    })
    .await?;
    let one = json!({"name": "nics", "exactly": {"deviceClassName": CLASS, "count": count.min(PER_CLAIM)}});
    c.template("many", &devices(vec![one], vec![])).await.map(drop)
}

fn look(count: usize) -> Look {
    Look { links: "bm[0-9]+", address: r"10\.30\.", count }
}

/// Those links, as they are on the host.
async fn host_links(c: &Context, node: &str) -> Result<Vec<String>> {
    let links = inspect::links(c.cluster.init_pid(node)?).await?;
    let text = |l: &Link| format!("{} {} up {} mtu {} {:?}", l.ifname, l.address, l.is_up(), l.mtu, l.addresses());
    let mut all: Vec<_> = links.iter().filter(|link| link.ifname.starts_with("bm")).map(text).collect();
    all.sort();
    Ok(all)
}

/// Waits until they are as they were.
async fn all_back(c: &Context, node: &str, before: &[String]) -> Result<()> {
    wait(Duration::from_secs(60), "all links are back on the host as they were", || async {
        let now = host_links(c, node).await?;
        let missing: Vec<_> = before.iter().filter(|link| !now.contains(link)).collect();
        ensure!(missing.is_empty(), "{} of {} are not: {missing:?}", missing.len(), before.len());
        let claims = c.cluster.status(node).await?.claims.len();
        ensure!(claims == 0, "the agent still holds {claims} claims");
        Ok(())
    })
    .await
}

/// Calls `make`, which makes the pod `name`, and gives milliseconds from then until a watch shows it Running.
async fn until_running(c: &Context, name: &str, make: impl Future<Output = Result<()>>) -> Result<f64> {
    let pods: Api<Pod> = c.api();
    let params = WatchParams::default().fields(&format!("metadata.name={name}")).timeout(290);
    let mut events = pods.watch(&params, "0").await?.boxed();
    let since = Instant::now();
    make.await?;
    let watching = async {
        while let Some(event) = events.try_next().await? {
            let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else { continue };
            if pod.status.and_then(|status| status.phase).as_deref() == Some("Running") {
                return Ok(since.elapsed().as_secs_f64() * 1000.0);
            }
        }
        anyhow::bail!("the watch on {name} ended")
    };
    tokio::time::timeout(LIMIT, watching).await.with_context(|| format!("{name} does not run"))?
}

async fn plain(c: &Context, node: &str, name: &str) -> Result<f64> {
    let value: Value = pod(name, Some(node), &[]);
    until_running(c, name, async { c.pod(&value).await.map(drop) }).await
}

/// The one in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints all of one measurement; its median is a figure of the scenario.
fn put(c: &Context, name: &str, values: &[f64]) -> f64 {
    let middle = median(values);
    let all: Vec<_> = values.iter().map(|value| format!("{value:.1}")).collect();
    c.tell(format!("{name}: median {middle:.1} ({})", all.join(" ")));
    c.figure(name, middle);
    middle
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(1).collect()
}

/// The longest of a pod's requests of this name, none of which may have failed.
fn longest(calls: &[Call]) -> Result<f64> {
    let bad: Vec<_> = calls.iter().filter(|call| call.lost || call.error.is_some()).collect();
    ensure!(bad.is_empty(), "{bad:?}");
    calls.iter().map(|call| call.ms).max_by(f64::total_cmp).context("the runtime has not asked")
}

#[derive(Debug, Default)]
struct Times {
    alone: Vec<f64>,
    /// Made 150 ms after the pod with many NICs.
    beside: Vec<f64>,
    /// Made when the runtime asks about the pod with many NICs.
    within: Vec<f64>,
    many: Vec<f64>,
    run: Vec<f64>,
    stop: Vec<f64>,
}

impl Times {
    /// How many times as long as alone a pod without claims takes: beside one with many NICs, and in its hook.
    fn ratios(&self) -> [f64; 2] {
        [&self.beside, &self.within].map(|all| median(all) / median(&self.alone))
    }
}

pub(super) async fn node_not_blocked(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let agent = OwnAgent::start(&c, &node, &["--offer-veth"], &[]).await?;
    veths(&c, &node, PER_CLAIM).await?;
    let tap = Tap::put(&c, &node).await?;
    let before = host_links(&c, &node).await?;
    let mut times = Times::default();
    let load_before = load();
    // The first warms up: images, caches, the connection.
    one_round(&c, &tap, 0, &before, &mut Times::default()).await?;
    let few = if c.full { 20 } else { 5 };
    // A median of few is easily that of a machine with other work: what looks too slow is looked at three times as long, all of it, so
    // that no lucky moment ends it.
    let (mut number, mut rounds) = (0, few);
    while number < rounds {
        number += 1;
        one_round(&c, &tap, number, &before, &mut times).await.with_context(|| format!("round {number}"))?;
        if number == few && times.ratios().iter().any(|ratio| *ratio > MOST_RATIO) {
            rounds = 3 * few;
        }
    }
    c.tell(format!("milliseconds; load average {load_before} before, {} after", load()));
    put(&c, "run_pod_sandbox_32_ms", &times.run);
    put(&c, "stop_pod_sandbox_32_ms", &times.stop);
    put(&c, "created_to_running_32_ms", &times.many);
    put(&c, "created_to_running_plain_alone_ms", &times.alone);
    let ratios = times.ratios();
    for ((name, all), ratio) in [("beside", &times.beside), ("within", &times.within)].into_iter().zip(ratios) {
        put(&c, &format!("created_to_running_plain_{name}_32_ms"), all);
        c.figure(&format!("plain_{name}_32_ratio"), ratio);
    }
    c.tell(format!(
        "a pod without claims takes {ratios:.2?} times as long as alone: 150 ms after one with 32 NICs, and in its hook"
    ));
    for (name, all) in [("RunPodSandbox", &times.run), ("StopPodSandbox", &times.stop)] {
        ensure!(all.iter().all(|ms| *ms <= MOST_MS), "{name} of a pod with 32 NICs took {all:.1?} ms, of at most {MOST_MS}");
    }
    ensure!(
        ratios.iter().all(|ratio| *ratio <= MOST_RATIO),
        "a pod without claims takes {ratios:.2?} times as long as alone, of at most {MOST_RATIO}"
    );
    tap.away(&c, &node).await?;
    agent.end(&c).await
}

async fn one_round(c: &Context, tap: &Tap, number: usize, before: &[String], times: &mut Times) -> Result<()> {
    let node = c.node(0);
    let [alone, many, beside, within] = ["alone", "many", "beside", "within"].map(|name| format!("{name}-{number}"));
    times.alone.push(plain(c, node, &alone).await?);
    c.delete_pod(&alone).await?;
    let mut watched = None;
    let make = async {
        watched = Some(Watched::make(c, &many, node, &["many"], look(PER_CLAIM)).await?);
        Ok(())
    };
    let soon = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        plain(c, node, &beside).await
    };
    let mut caught = tap.catch("RunPodSandbox", &format!("{}/{many}", c.namespace));
    let then = async {
        caught.arrived(LIMIT).await?;
        drop(caught);
        plain(c, node, &within).await
    };
    let (of_many, of_beside, of_within) = tokio::try_join!(until_running(c, &many, make), soon, then)?;
    times.many.push(of_many);
    times.beside.push(of_beside);
    times.within.push(of_within);
    let watched = watched.context("no pod")?;
    watched.runs(c).await?;
    for name in [&many, &beside, &within] {
        c.delete_pod(name).await?;
    }
    all_back(c, node, before).await?;
    times.run.push(longest(&tap.calls("RunPodSandbox", &watched.full_name(c)))?);
    times.stop.push(longest(&tap.calls("StopPodSandbox", &watched.full_name(c)))?);
    Ok(())
}

/// Four claims of 32 in one pod, on the runtime's default time-outs, three times in a row.
pub(super) async fn pod_128_nics(c: Context) -> Result<()> {
    const CLAIMS: usize = 4;
    let node = c.node(0).to_owned();
    let count = CLAIMS * PER_CLAIM;
    let agent = OwnAgent::start(&c, &node, &["--offer-veth"], &[]).await?;
    veths(&c, &node, count).await?;
    let tap = Tap::put(&c, &node).await?;
    let before = host_links(&c, &node).await?;
    ensure!(before.len() == count, "{} links", before.len());
    let (mut starts, mut ends, mut runs, mut stops) = (vec![], vec![], vec![], vec![]);
    for number in 0..if c.full { 10 } else { 3 } {
        let name = format!("pod{number}");
        let mut made = None;
        let make = async {
            made = Some(Watched::make(&c, &name, &node, &["many"; CLAIMS], look(count)).await?);
            Ok(())
        };
        starts.push(until_running(&c, &name, make).await?);
        let watched = made.context("no pod")?;
        let running = watched.runs(&c).await?;
        let nics = running.nics().await?.len();
        ensure!(nics == count, "{} has {nics} of {count} NICs", running.pod.name_any());
        let since = Instant::now();
        c.delete_pod(&name).await?;
        all_back(&c, &node, &before).await.with_context(|| format!("after pod {number}"))?;
        ends.push(since.elapsed().as_secs_f64() * 1000.0);
        runs.push(longest(&tap.calls("RunPodSandbox", &watched.full_name(&c)))?);
        stops.push(longest(&tap.calls("StopPodSandbox", &watched.full_name(&c)))?);
    }
    c.tell(format!(
        "{} pods had {count} of {count} NICs and gave {count} back; milliseconds; load average {}",
        starts.len(),
        load()
    ));
    put(&c, "created_to_running_128_ms", &starts);
    put(&c, "deleted_to_all_back_128_ms", &ends);
    put(&c, "run_pod_sandbox_128_ms", &runs);
    put(&c, "stop_pod_sandbox_128_ms", &stops);
    tap.away(&c, &node).await?;
    agent.end(&c).await
}

/// Every step of the attach is slow, as with real NICs: longer than the runtime's time for a request.
pub(super) async fn slow_handler(c: Context) -> Result<()> {
    const MOST: u32 = 64;
    let node = c.node(0).to_owned();
    let each = if c.full { 300 } else { 100 };
    let delay = format!("DRANIC_TEST_DELAY=attach: pinned=300,attach: moved={each},attach: configured=800,attach: verified=400");
    let agent = OwnAgent::start(&c, &node, &[], &[&delay]).await?;
    c.cluster.nics(&node, MOST).await?;
    let tap = Tap::put(&c, &node).await?;
    wait(Duration::from_secs(30), &format!("{MOST} NICs are published"), || async {
        let published = c.cluster.status(&node).await?.published_devices;
        ensure!(published == MOST as usize, "{published} devices are published");
        Ok(())
    })
    .await?;
    for count in [8, 16, 64] {
        let name = format!("nics-{count}");
        super::watched::template(&c, &name, count.min(PER_CLAIM)).await?;
        let templates = vec![name.as_str(); count.div_ceil(PER_CLAIM)];
        let since = Instant::now();
        let pod = Watched::make(&c, &name, &node, &templates, Look::nics(count)).await?;
        pod.runs(&c).await.with_context(|| format!("{count} NICs"))?;
        let took = since.elapsed();
        let asked = 300 + each * count as u128 + 800 + 400;
        ensure!(took.as_millis() > asked, "{count} NICs after {took:?}: the agent was not slow, so nothing was shown");
        let hook = longest(&tap.calls("RunPodSandbox", &pod.full_name(&c)))?;
        c.tell(format!(
            "{count} NICs: all there after {:.1} s; RunPodSandbox took {hook:.0} ms of the runtime's time",
            took.as_secs_f64()
        ));
        c.figure(&format!("slow_{count}_run_pod_sandbox_ms"), hook);
        pod.goes(&c).await?;
    }
    tap.away(&c, &node).await?;
    agent.end(&c).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_the_sorted_values() {
        assert!((median(&[9.0, 1.0, 5.0]) - 5.0).abs() < f64::EPSILON);
        assert!(median(&[]).is_nan());
    }
}
