//! No container runs before all NICs of its pod are there: the agent killed at any moment, and standing still in an attach.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::stream::Random;
use super::trouble::{keep_away, nics_of, one_has_left, signal};
use super::watched::{Look, Watched, template};
use crate::context::Context;
use crate::objects::{config, devices, request};
use crate::runner::RAILS;

/// How long the agent is dead: longer than a runtime waits for an answer (2 s), and than the kubelet takes from prepare to containers.
const DEAD: Duration = Duration::from_secs(5);

/// The agent is killed while pods start, and again whenever it has come back, for some seconds.
pub(super) async fn agent_dead(c: Context) -> Result<()> {
    let mut random = Random::new(c.seed, &[]);
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
        let look = Look { links: "rail[01]", address: r"10\.78\.[01]\.1/24", count: 2 };
        pods.push(Watched::make(c, &format!("pod{index}"), &node, &["two"], look).await?);
    }
    match after {
        Some(after) => tokio::time::sleep(after).await,
        None => prepared(c, &node, pods.len()).await?,
    }
    c.cluster.kill_agent(&node).await?;
    keep_away(c, &node, DEAD).await?;
    for pod in &pods {
        pod.none_early(c)?;
    }
    for pod in &pods {
        pod.runs(c).await?;
    }
    c.agent_ready(&node).await?;
    for pod in &pods {
        c.delete_pod(&pod.name).await?;
    }
    crate::runner::idle(&c.cluster, Duration::from_secs(30)).await
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
    template(&c, "all", RAILS as usize).await?;
    let pod = Watched::make(&c, "late", &node, &["all"], Look::nics(RAILS as usize)).await?;
    one_has_left(&c, &node).await?;
    let agents = c.cluster.agents(&node)?;
    signal("-STOP", &agents).await?;
    let left = nics_of(c.cluster.init_pid(&node)?);
    tokio::time::sleep(DEAD).await;
    signal("-CONT", &agents).await?;
    ensure!(left? > 0, "the attach was over before the agent stood still: the scenario has shown nothing");
    pod.none_early(&c)?;
    pod.runs(&c).await?;
    pod.goes(&c).await
}
