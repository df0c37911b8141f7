//! The seeds of trouble: the agent slow, stopped, killed or absent, and the runtime restarted, at exactly the moment where pods of
//! other drivers run with a part of their NICs. Here no container does: each starts with all of them, by itself, once that is over.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use super::stream::Slot;
use super::watched::{Look, Watched, restarts, template};
use crate::cluster::{output, processes};
use crate::context::{Context, wait};
use crate::held::Held;
use crate::objects::{DRIVER, From, container, pod};
use crate::own_agent::OwnAgent;
use crate::runner::RAILS;
use crate::tap::{Caught, Tap};

/// The kubelet has prepared a pod and asks the runtime for its sandbox within this.
const STARTS: Duration = Duration::from_secs(40);
/// How long the agent stands still: longer than a runtime waits for an answer (2 s).
const STILL: Duration = Duration::from_secs(5);
/// How long the agent is away.
const AWAY: Duration = Duration::from_secs(10);
/// A guard that waits, as `ps` shows it.
const GUARD: &str = "dranic-guard";

/// The pod of these scenarios: all NICs of the node, as they are there.
const ALL: usize = RAILS as usize;

async fn all_nics(c: &Context) -> Result<Watched> {
    Watched::make(c, "pod", c.node(0), &["all"], Look::nics(ALL)).await
}

/// Sends KILL to the agent of `node` whenever it is there, until `time` is over.
pub(super) async fn keep_away(c: &Context, node: &str, time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        c.cluster.kill_agent(node).await.ok(); // it may not be back yet
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

pub(super) async fn signal(name: &str, pids: &[u32]) -> Result<()> {
    ensure!(!pids.is_empty(), "no agent runs");
    let pids: Vec<_> = pids.iter().map(ToString::to_string).collect();
    output(Command::new("kill").arg(name).args(pids)).await.map(drop)
}

/// The pod runs with all NICs since its first moment, tells how long that took, and goes.
async fn well(c: &Context, pod: &Watched, since: Instant) -> Result<()> {
    let running = pod.runs(c).await?;
    let (took, again) = (since.elapsed().as_secs_f64(), restarts(&running.pod));
    let starts = pod.starts(c)?.len();
    c.tell(format!(
        "runs with {ALL} of {ALL} NICs since its first moment, {took:.1} s after it was made; {starts} starts, {again} restarts"
    ));
    c.figure("created_to_running_s", took);
    pod.goes(c).await
}

/// SIGSTOP when the runtime asks, for longer than it waits.
pub(super) async fn stopped_in_run(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    template(&c, "all", ALL).await?;
    let tap = Tap::put(&c, &node).await?;
    let mut caught = tap.catch("RunPodSandbox", &format!("{}/pod", c.namespace));
    let since = Instant::now();
    let pod = all_nics(&c).await?;
    caught.arrived(STARTS).await?;
    stand_still(&c, &node, caught).await?;
    pod.none_early(&c)?;
    well(&c, &pod, since).await?;
    told(&c, &tap, &pod);
    tap.away(&c, &node).await
}

/// The agent is stopped for a while, with the request that was caught.
async fn stand_still(c: &Context, node: &str, caught: Caught) -> Result<()> {
    let agents = c.cluster.agents(node)?;
    signal("-STOP", &agents).await?;
    drop(caught);
    tokio::time::sleep(STILL).await;
    signal("-CONT", &agents).await
}

/// What became of the runtime's questions for the pod.
fn told(c: &Context, tap: &Tap, pod: &Watched) {
    for call in tap.calls("RunPodSandbox", &pod.full_name(c)) {
        let end = match (&call.error, call.lost) {
            (_, true) => "the connection ended".to_owned(),
            (Some(error), _) => error.clone(),
            (None, false) => "answered".to_owned(),
        };
        c.tell(format!("RunPodSandbox: {:.0} ms, {end}", call.ms));
    }
}

/// First before anything is moved, then in the middle of the attach.
pub(super) async fn killed_in_run(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    template(&c, "all", ALL).await?;
    let tap = Tap::put(&c, &node).await?;
    let mut caught = tap.catch("RunPodSandbox", &format!("{}/pod", c.namespace));
    let since = Instant::now();
    let pod = all_nics(&c).await?;
    caught.arrived(STARTS).await?;
    c.cluster.kill_agent(&node).await?;
    drop(caught);
    keep_away(&c, &node, AWAY).await?;
    pod.none_early(&c)?;
    well(&c, &pod, since).await?;
    told(&c, &tap, &pod);
    tap.away(&c, &node).await?;

    let since = Instant::now();
    let pod = all_nics(&c).await?;
    one_has_left(&c, &node).await?;
    c.cluster.kill_agent(&node).await?;
    let left = nics_of(c.cluster.init_pid(&node)?)?;
    ensure!(left > 0, "the attach was over before the agent was killed: nothing was shown");
    keep_away(&c, &node, STILL).await?;
    pod.none_early(&c)?;
    tokio::select! {
        done = well(&c, &pod, since) => done.with_context(|| format!("killed when {left} of {ALL} NICs were still on the host")),
        failed = mend(&c, &node) => Err(failed),
    }
}

/// Waits until an attach has begun to move NICs.
pub(super) async fn one_has_left(c: &Context, node: &str) -> Result<()> {
    let host = c.cluster.init_pid(node)?;
    let end = Instant::now() + STARTS;
    while nics_of(host)? == ALL {
        ensure!(Instant::now() < end, "no NIC leaves {node}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// How many NICs of the rails are in the network namespace of process `pid`.
pub(super) fn nics_of(pid: u32) -> Result<usize> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    Ok(text.lines().filter(|line| line.trim_start().starts_with("nic")).count())
}

/// Makes NICs again that died with a sandbox that the runtime gave up, as one with NRI's failure policy does when the agent dies while it
/// is asked. Real ones would be back on the host. Returns only when that fails.
async fn mend(c: &Context, node: &str) -> anyhow::Error {
    let slots: Vec<_> = (0..RAILS / 2).map(|index| Slot::new(c, 0, index)).collect();
    let mut before = Vec::new();
    loop {
        let mut now = Vec::new();
        for slot in &slots {
            // An agent that does not answer now is asked again.
            now.extend(slot.missing(c).await.unwrap_or_default());
        }
        // Twice in a row: it is not just on its way into the sandbox.
        for nic in now.iter().filter(|nic| before.contains(*nic)) {
            if let Err(error) = c.cluster.nic_again(node, nic).await {
                return error;
            }
        }
        before = now;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// A pod on `node` with all NICs prepared, whose sandbox is made when it is let go; and since when it is there.
async fn held_back(c: &Context, node: &str) -> Result<(Held, Instant, Watched)> {
    template(c, "all", ALL).await?;
    let held = Held::put(c, node)?;
    let since = Instant::now();
    let pod = all_nics(c).await?;
    held.reached(&pod.name).await?;
    Ok((held, since, pod))
}

pub(super) async fn killed_before_run(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let (held, since, pod) = held_back(&c, &node).await?;
    c.cluster.kill_agent(&node).await?;
    held.release();
    keep_away(&c, &node, AWAY).await?;
    pod.none_early(&c)?;
    well(&c, &pod, since).await
}

/// The agent has left in order when the sandbox is made, and comes only when a container is being made.
pub(super) async fn absent(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let (held, since, pod) = held_back(&c, &node).await?;
    let without = async {
        c.agent_leaves(&node).await?;
        held.release();
        wait(STARTS, "the container is being made, and its guard waits", || async {
            if let Err(early) = pod.none_early(&c) {
                return Ok(Err(early));
            }
            ensure!(guards() > 0, "no guard runs");
            Ok(Ok(()))
        })
        .await??;
        tokio::time::sleep(Duration::from_secs(2)).await;
        pod.none_early(&c)
    };
    let done = without.await;
    // Also when that failed: other scenarios need the agent.
    c.agent_returns(&node).await?;
    done?;
    well(&c, &pod, since).await
}

/// Guards that run on this machine.
fn guards() -> usize {
    let is_guard = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| contains(&line, GUARD));
    processes().iter().filter(|pid| is_guard(pid)).count()
}

fn contains(line: &[u8], name: &str) -> bool {
    line.split(|b| *b == 0).next().is_some_and(|program| String::from_utf8_lossy(program).contains(name))
}

pub(super) async fn restarted_between(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let (held, since, pod) = held_back(&c, &node).await?;
    let before = c.cluster.agents(&node)?;
    c.cluster.kill_agent(&node).await?;
    wait(STARTS, "another agent is there", || async {
        let now = c.cluster.agents(&node)?;
        ensure!(!now.is_empty() && now.iter().all(|pid| !before.contains(pid)), "{before:?} {now:?}");
        Ok(())
    })
    .await?;
    c.agent_ready(&node).await?;
    held.release();
    well(&c, &pod, since).await
}

/// First between prepare and sandbox, then between sandbox and container.
pub(super) async fn runtime_restarted(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    let (held, since, pod) = held_back(&c, &node).await?;
    restart_runtime(&c, &node).await?;
    held.release();
    well(&c, &pod, since).await.context("restarted between prepare and sandbox")?;

    let tap = Tap::put(&c, &node).await?;
    let mut caught = tap.catch("CreateContainer", &format!("{}/pod", c.namespace));
    let since = Instant::now();
    let pod = all_nics(&c).await?;
    caught.arrived(STARTS).await?;
    restart_runtime(&c, &node).await?;
    drop((caught, tap));
    well(&c, &pod, since).await.context("restarted between sandbox and container")
}

async fn restart_runtime(c: &Context, node: &str) -> Result<()> {
    c.cluster.daemon(node, "containerd", "kill").await?;
    c.cluster.daemon(node, "containerd", "start").await
}

/// Only one of two containers names the claim. First the attach is slow, and goes on when the containers are made; then the agent stands
/// still until the runtime has given it up, and nobody can be asked about the other one: for that a pod must require the plugin.
pub(super) async fn not_named(c: Context) -> Result<()> {
    let node = c.node(0).to_owned();
    template(&c, "all", ALL).await?;
    let agent = OwnAgent::start(&c, &node, &[], &["DRANIC_TEST_DELAY=attach: moved=150"]).await?;
    let tap = Tap::put(&c, &node).await?;
    let since = Instant::now();
    let pod = Watched::of(&c, two_containers(&node, "pod"), &node, Look::nics(ALL)).await?;
    well(&c, &pod, since).await?;
    told(&c, &tap, &pod);
    let run = tap.first("RunPodSandbox", &pod.full_name(&c)).await?;
    ensure!(run.ms < 150.0 * f64::from(RAILS), "the attach was over when the runtime went on: nothing was shown");
    if c.cluster.containerd()? == "debian" {
        c.tell("a pod that requires the plugin: not tried, this containerd has no validator".to_owned());
    } else {
        let mut value = two_containers(&node, "requires");
        value["metadata"]["annotations"] = json!({"required-plugins.noderesource.dev": format!("[\"{DRIVER}\"]")});
        let mut caught = tap.catch("RunPodSandbox", &format!("{}/requires", c.namespace));
        let since = Instant::now();
        let pod = Watched::of(&c, value, &node, Look::nics(ALL)).await?;
        caught.arrived(STARTS).await?;
        stand_still(&c, &node, caught).await?;
        well(&c, &pod, since).await?;
        told(&c, &tap, &pod);
    }
    tap.away(&c, &node).await?;
    agent.end(&c).await
}

fn two_containers(node: &str, name: &str) -> Value {
    let mut value = pod(name, Some(node), &[From::Template("all")]);
    let named = value["spec"]["containers"][0].clone();
    // The other one comes first: nothing before it waits.
    value["spec"]["containers"] = json!([container("other"), named]);
    value
}
