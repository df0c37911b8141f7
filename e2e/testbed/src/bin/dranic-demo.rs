//! The main job on this machine, end to end: two pods get their NICs, ping each other over every pair, and give them back.
//!
//! The agent is the real one, as a process on a scratch node; API server, kubelet and runtime are our doubles.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use dranic::netdev::HostState;
use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::{self, NicSpec, ping};
use dranic_testbed::kubelet::Claim;

/// containerd's default `plugin_request_timeout`.
const BUDGET: Duration = Duration::from_secs(2);

/// Shows two pods get their NICs and give them back, on a scratch node of this machine.
#[derive(Debug, Parser)]
struct Args {
    /// NICs of the node: an even number, half of them for each pod.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=200))]
    nics: u32,

    /// The `dranic` program; the one beside this program where absent.
    #[arg(long)]
    agent: Option<PathBuf>,
}

fn main() -> std::process::ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nFAILED: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    ensure!(args.nics.is_multiple_of(2), "--nics {}: must be even, half of them for each pod", args.nics);
    ensure!(fabric::root(), "network namespaces need root: run it with sudo");
    // Mounts are seen by this process and its children only: whatever happens, none stays.
    fabric::private_mounts()?;
    let program = match &args.agent {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("dranic"),
    };
    ensure!(program.is_file(), "{} is not there: build it with: cargo build --bin dranic", program.display());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(until_a_signal(demo(args.nics, program)));
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Runs `work`; at a signal it is dropped, and with it everything it made.
async fn until_a_signal(work: impl Future<Output = Result<()>> + Send + 'static) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut task = tokio::spawn(work);
    let what = tokio::select! {
        result = &mut task => return result?,
        _ = int.recv() => "interrupted",
        _ = term.recv() => "terminated",
    };
    task.abort();
    // An error here is the abort itself.
    let _ = task.await;
    bail!("{what}; everything the demo made is gone")
}

/// Lines of the timeline.
struct Timeline {
    begin: Instant,
    last: Instant,
}

impl Timeline {
    fn new() -> Self {
        Self { begin: Instant::now(), last: Instant::now() }
    }

    fn say(&mut self, what: impl std::fmt::Display) {
        let now = Instant::now();
        println!("{:>9}  (+{:>8})  {what}", ms(now - self.begin), ms(now - self.last));
        self.last = now;
    }

    fn note(&self, what: impl std::fmt::Display) {
        println!("{:>24}{what}", "");
    }
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

/// NIC `n` of `half`: pod a's keep the host's address, pod b's get another address, name and MTU by its claim.
fn nics(half: u32) -> Vec<NicSpec> {
    let a = (0..half).map(|n| NicSpec {
        name: format!("nic{n}"),
        rail: n,
        mtu: Some(9000),
        up: true,
        addresses: vec![
            format!("10.100.{n}.1/24").parse().expect("an address"),
            format!("fd00:100:{n:x}::1/64").parse().expect("an address"),
        ],
        ..NicSpec::default()
    });
    let b = (0..half).map(|n| NicSpec {
        name: format!("nic{}", half + n),
        rail: n,
        mtu: Some(9000),
        up: true,
        addresses: vec![format!("172.16.{n}.2/24").parse().expect("an address")],
        ..NicSpec::default()
    });
    a.chain(b).collect()
}

/// What the claim of pod b says of each of its NICs.
fn configs(driver: &str, half: u32) -> Vec<ClaimConfig> {
    let mut all = vec![ClaimConfig::from_class(driver, r#"{"interface": {"mtu": 4000}}"#)];
    all.extend((0..half).map(|n| {
        let text = format!(r#"{{"interface": {{"name": "rail{n}", "addresses": ["10.100.{n}.2/24"]}}}}"#);
        ClaimConfig { requests: vec![format!("r{n}")], ..ClaimConfig::from_claim(driver, &text) }
    }));
    all
}

async fn demo(count: u32, program: PathBuf) -> Result<()> {
    let half = count / 2;
    println!("Dranic demo: one scratch node, {count} NICs, two pods with a claim for {half} NICs each\n");
    let mut time = Timeline::new();
    let mut cluster = Cluster::new(Options::new(program, nics(half)))?;
    let before = cluster.host_states()?;
    time.say(format_args!("node made: {count} veth NICs on {half} rails, MTU 9000, up, with addresses"));
    cluster.start_agent()?;
    cluster.wait_ready(Duration::from_secs(30)).await?;
    let slices = cluster.api.slices().len();
    time.say(format_args!(
        "agent ready: registered with the kubelet, NRI synchronised, {count} devices in {slices} ResourceSlice(s)"
    ));

    let (pod_a, pod_b) = (cluster.pod("pod-a")?, cluster.pod("pod-b")?);
    let names: Vec<String> = (0..count).map(|n| format!("nic{n}")).collect();
    let (for_a, for_b) = names.split_at(half as usize);
    let claims =
        [cluster.claim("claim-a", &pod_a, for_a, &[])?, cluster.claim("claim-b", &pod_b, for_b, &configs("dranic.dev", half))?];
    time.say("claims allocated: pod-a keeps the host's addresses, pod-b has names, addresses and MTU by class and claim");
    cluster.prepare(&claims).await?;
    time.say("NodePrepareResources: both claims, host state recorded, links down");
    for (pod, claim) in [&pod_a, &pod_b].into_iter().zip(&claims) {
        start(&cluster, pod, claim, &mut time).await?;
    }
    show_attached(&cluster, &mut time)?;
    ping_all(&pod_a, &pod_b, half, &mut time)?;
    for pod in [&pod_a, &pod_b] {
        let relay = cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await;
        time.say(format_args!("StopPodSandbox {}: answered in {}", pod.name, ms(relay.elapsed)));
        relay.result().map_err(anyhow::Error::msg)?;
    }
    unprepare(&cluster, &claims, &mut time).await?;
    for pod in [&pod_a, &pod_b] {
        cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    }
    drop((pod_a, pod_b));
    compare(&cluster, &before, &mut time)?;
    let agent = cluster.agent.take().context("the agent is there")?;
    let (status, took) = agent.terminate()?;
    ensure!(status.success(), "the agent ended with {status}\n{}", cluster.log());
    time.say(format_args!("agent stopped in order, exit 0 after {}", ms(took)));
    println!("\nOK: {count} NICs out and back, nothing differs.");
    Ok(())
}

async fn start(cluster: &Cluster, pod: &Pod, claim: &Claim, time: &mut Timeline) -> Result<()> {
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    let (elapsed, error) = (relay.elapsed, relay.error.clone());
    let share = 100.0 * elapsed.as_secs_f64() / BUDGET.as_secs_f64();
    time.say(format_args!("RunPodSandbox {}: {} of the runtime's {} ({share:.1} %)", pod.name, ms(elapsed), ms(BUDGET)));
    if let Some(error) = error {
        bail!("RunPodSandbox {}: {error}\n{}", pod.name, cluster.log());
    }
    let begin = Instant::now();
    let started = cluster.start_container(pod, "main", std::slice::from_ref(claim)).await;
    time.say(format_args!("container in {}: CreateContainer and the guard took {}", pod.name, ms(begin.elapsed())));
    started.map_err(anyhow::Error::msg)
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn show_attached(cluster: &Cluster, time: &mut Timeline) -> Result<()> {
    for claim in cluster.status()?.claims {
        time.note(format_args!("{} in {}:", claim.name, claim.pod));
        for device in &claim.devices {
            let steps: Vec<String> =
                device.times.iter().map(|t| format!("{} {:.1} ms", t.step, t.micros as f64 / 1000.0)).collect();
            time.note(format_args!(
                "  {:<6} as {:<7} {:?}: {}",
                device.host_link,
                device.pod_link,
                device.phase,
                steps.join(", ")
            ));
        }
    }
    Ok(())
}

fn ping_all(a: &Pod, b: &Pod, half: u32, time: &mut Timeline) -> Result<()> {
    let (from, to) = (a.netns.netns()?, b.netns.netns()?);
    let mut slowest = Duration::ZERO;
    for n in 0..half {
        let (source, target) = (format!("10.100.{n}.1").parse()?, format!("10.100.{n}.2").parse()?);
        let there =
            ping(&from, source, target, Duration::from_secs(5)).with_context(|| format!("ping pod-a to pod-b, pair {n}"))?;
        let back = ping(&to, target, source, Duration::from_secs(5)).with_context(|| format!("ping pod-b to pod-a, pair {n}"))?;
        slowest = slowest.max(there).max(back);
    }
    time.say(format_args!("ping: {half} pairs, both ways, slowest {}", ms(slowest)));
    Ok(())
}

async fn unprepare(cluster: &Cluster, claims: &[Claim], time: &mut Timeline) -> Result<()> {
    cluster.unprepare(claims).await?;
    time.say("NodeUnprepareResources: links moved back, host state restored");
    let left = cluster.status()?.claims;
    ensure!(left.is_empty(), "claims are still recorded: {left:?}");
    Ok(())
}

fn compare(cluster: &Cluster, before: &BTreeMap<String, HostState>, time: &mut Timeline) -> Result<()> {
    let differences = Cluster::differences(before, &cluster.host_states()?);
    for (nic, difference) in &differences {
        time.note(format_args!("{nic}: {} was {:?}, is {:?}", difference.what, difference.before, difference.after));
    }
    ensure!(differences.is_empty(), "{} differences on the host\n{}", differences.len(), cluster.log());
    let items: usize = before.values().map(|s| s.addresses.len() + s.routes.len() + s.sysctls.len() + 10).sum();
    time.say(format_args!("host compared: {} NICs, {items} properties, no difference", before.len()));
    Ok(())
}
