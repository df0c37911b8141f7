//! No container runs before all NICs of its pod are there. What a container does first is write down whether they are, into a volume
//! that lives as long as its pod: so no start is missed, however short.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use tokio::process::Command;

use super::disturb::Random;
use crate::cluster::output;
use crate::context::Context;
use crate::objects::{CLASS, From, config, devices, pod, request};
use crate::runner::RAILS;

/// How long the agent is dead: longer than a runtime waits for an answer (2 s), and than the kubelet takes from prepare to containers.
const DEAD: Duration = Duration::from_secs(5);

/// A pod on `node` whose container first runs `check`, a shell condition, and writes "complete" or "missing" at each start.
async fn watched(c: &Context, name: &str, node: &str, template: &str, check: &str) -> Result<Pod> {
    let mut value = pod(name, Some(node), &[From::Template(template)]);
    let first = format!("if {check}; then echo complete; else echo missing; fi >>/seen/starts; trap 'exit 0' TERM; ");
    let main = &mut value["spec"]["containers"][0];
    main["command"] = json!(["/bin/sh", "-c", first + "while :; do sleep 3600 & wait $!; done"]);
    main["volumeMounts"] = json!([{"name": "seen", "mountPath": "/seen"}]);
    value["spec"]["volumes"] = json!([{"name": "seen", "emptyDir": {}}]);
    c.pod(&value).await
}

/// What the pod's containers found at their starts.
fn starts(c: &Context, node: &str, pod: &Pod) -> Result<Vec<String>> {
    let uid = pod.uid().context("a pod without UID")?;
    let volume = format!("root/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/seen/starts");
    let file: PathBuf = c.cluster.scratch().join(node).join(volume);
    match std::fs::read_to_string(&file) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("{}", file.display())),
    }
}

fn none_early(c: &Context, node: &str, pods: &[Pod]) -> Result<()> {
    for pod in pods {
        let starts = starts(c, node, pod)?;
        let name = pod.name_any();
        ensure!(
            starts.iter().all(|start| start == "complete"),
            "a container of {name} ran before its NICs were there: {starts:?}"
        );
    }
    Ok(())
}

/// All run in the end, with all NICs, and go.
async fn all_run(c: &Context, node: &str, pods: &[Pod]) -> Result<()> {
    for pod in pods {
        c.running_within(&pod.name_any(), Duration::from_secs(90)).await?;
        ensure!(!starts(c, node, pod)?.is_empty(), "{} runs and has written nothing", pod.name_any());
    }
    none_early(c, node, pods)?;
    c.agent_ready(node).await?;
    for pod in pods {
        c.delete_pod(&pod.name_any()).await?;
    }
    crate::runner::idle(&c.cluster, Duration::from_secs(30)).await
}

/// The agent is killed while pods start, and again whenever it has come back, for some seconds.
pub(super) async fn agent_dead(c: Context) -> Result<()> {
    let mut random = Random(c.seed | 1);
    let on = |rail: u8| json!({"interface": {"name": format!("rail{rail}"), "addresses": [format!("10.78.{rail}.1/24")]}});
    let spec = devices(vec![request("a"), request("b")], vec![config(&["a"], on(0)), config(&["b"], on(1))]);
    c.template("two", &spec).await?;
    for round in 0..if c.full { 20 } else { 4 } {
        // First the worst moment: the NICs are prepared, and the sandbox is about to be made.
        let after = (round > 0).then(|| Duration::from_millis(random.below(2500)));
        let what = after.map_or("once prepared".to_owned(), |after| format!("after {} ms", after.as_millis()));
        dead_round(&c, after).await.with_context(|| format!("round {round}, agent killed {what}"))?;
    }
    Ok(())
}

async fn dead_round(c: &Context, after: Option<Duration>) -> Result<()> {
    let node = c.node(0).to_owned();
    let mut pods = Vec::new();
    for index in 0..3 {
        let check = "ip -o addr | grep -q 'rail0 .* 10.78.0.1/24' && ip -o addr | grep -q 'rail1 .* 10.78.1.1/24'";
        pods.push(watched(c, &format!("pod{index}"), &node, "two", check).await?);
    }
    match after {
        Some(after) => tokio::time::sleep(after).await,
        None => prepared(c, &node, pods.len()).await?,
    }
    let end = Instant::now() + DEAD;
    c.cluster.kill_agent(&node).await?;
    while Instant::now() < end {
        c.cluster.kill_agent(&node).await.ok(); // it may not be back yet
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    none_early(c, &node, &pods)?;
    all_run(c, &node, &pods).await
}

/// Records in the ledger, one for each of the pods, seen as files: asking the agent takes longer.
async fn prepared(c: &Context, node: &str, count: usize) -> Result<()> {
    let folder = c.cluster.scratch().join(node).join("root/var/lib/dranic");
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let entries = std::fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
        let records = entries.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "json")).count();
        if records >= count {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{records} of {count} pods have a record in {}", folder.display());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The agent stands still in the middle of an attach until the runtime has given up.
pub(super) async fn late(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let all = json!({"name": "nics", "exactly": {"deviceClassName": CLASS, "count": RAILS}});
    c.template("all", &devices(vec![all], vec![])).await?;
    let pods =
        [watched(&c, "late", &node, "all", &format!("[ $(ip -o -4 addr | grep -c ' nic[0-7] .* 10.20.') = {RAILS} ]")).await?];
    let host = c.cluster.init_pid(&node)?;
    let end = Instant::now() + Duration::from_secs(30);
    while nics_of(host)? == RAILS as usize {
        ensure!(Instant::now() < end, "no NIC leaves {node}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let agents = c.cluster.agents(&node)?;
    signal("-STOP", &agents).await?;
    let left = nics_of(host);
    tokio::time::sleep(DEAD).await;
    signal("-CONT", &agents).await?;
    ensure!(left? > 0, "the attach was over before the agent stood still: the scenario has shown nothing");
    none_early(&c, &node, &pods)?;
    all_run(&c, &node, &pods).await
}

/// How many NICs of the rails are in the network namespace of process `pid`.
fn nics_of(pid: u32) -> Result<usize> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    Ok(text.lines().filter(|line| line.trim_start().starts_with("nic")).count())
}

async fn signal(name: &str, pids: &[u32]) -> Result<()> {
    ensure!(!pids.is_empty(), "no agent runs");
    let pids: Vec<_> = pids.iter().map(ToString::to_string).collect();
    output(Command::new("kill").arg(name).args(pids)).await.map(drop)
}
