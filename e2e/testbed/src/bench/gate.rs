//! What a hold costs the node and brings the pod: how long the runtime, and with it every other pod, waits for a sandbox, and how long
//! the pod's first container waits, for several holds in turns.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Samples;
use crate::cluster::Cluster;

/// Values of `--hold`.
pub const HOLDS: [&str; 4] = ["0", "100", "200", "budget"];
/// For the agent to be there again, and for NICs to be back.
const LIMIT: Duration = Duration::from_secs(30);

/// What was measured for one number of NICs and one hold.
#[derive(Debug, Clone, Default)]
pub struct Gate {
    /// NICs of the pod.
    pub nics: usize,
    /// `--hold`.
    pub hold: &'static str,
    /// RunPodSandbox as the runtime sees it, by which every other pod waits.
    pub run: Samples,
    /// From the beginning of RunPodSandbox until the pod's container may start.
    pub started: Samples,
    /// The guard of a further container, all NICs being there: from its start to its end.
    pub guard: Samples,
}

/// Measures `rounds` times each hold, with pods of `nics` NICs. The first pod of each agent does not count: it has no forecast yet.
///
/// # Errors
/// When anything goes wrong.
pub async fn measure(cluster: &mut Cluster, nics: &[usize], rounds: usize) -> Result<Vec<Gate>> {
    let mut results = Vec::new();
    for hold in HOLDS {
        if let Some(agent) = cluster.agent.take() {
            agent.terminate()?;
        }
        cluster.set_arguments(&["--log-format=json", &format!("--hold={hold}")]);
        cluster.start_agent()?;
        cluster.wait_ready(LIMIT).await?;
        for &count in nics {
            let mut gate = Gate { nics: count, hold, ..Gate::default() };
            let mut unused = Gate::default();
            for round in 0..=rounds {
                one_pod(
                    cluster,
                    count,
                    &format!("gate-{hold}-{count}-{round}"),
                    if round == 0 { &mut unused } else { &mut gate },
                )
                .await?;
            }
            results.push(gate);
        }
    }
    Ok(results)
}

async fn one_pod(cluster: &Cluster, nics: usize, name: &str, into: &mut Gate) -> Result<()> {
    let pod = cluster.pod(name)?;
    let names: Vec<String> = (0..nics).map(|n| format!("nic{n}")).collect();
    let claims = [cluster.claim(name, &pod, &names, &[])?];
    cluster.prepare(&claims).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let begin = Instant::now();
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    into.run.push(relay.elapsed);
    relay.result().map_err(anyhow::Error::msg).with_context(|| cluster.log())?;
    cluster.start_container(&pod, "main", &claims).await.map_err(anyhow::Error::msg)?;
    into.started.push(begin.elapsed());
    let inside = pod.links_up()?.len();
    ensure!(inside == nics, "{inside} of {nics} NICs are in {name}");
    into.guard.push(cluster.time_guard(&pod, &claims).await.map_err(anyhow::Error::msg)?);
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    cluster.unprepare(&claims).await?;
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    for claim in &claims {
        cluster.api.delete("resourceclaims", "default", &claim.name);
    }
    Ok(())
}
