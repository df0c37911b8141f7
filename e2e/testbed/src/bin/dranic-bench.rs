//! Measures the agent against the kernel's floor on this machine; `benches/README.md` says how to read it.
//!
//! The agent is the real one, as a process on a scratch node; API server, kubelet and runtime are our doubles.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use dranic_testbed::bench::attach::{self, nics};
use dranic_testbed::bench::floor::{Bed, Before, Way};
use dranic_testbed::bench::idle::{self, Idle};
use dranic_testbed::bench::report::{self, Report, Ways};
use dranic_testbed::bench::{Samples, children, foreign, gate, work};
use dranic_testbed::cluster::{Cluster, Options};
use dranic_testbed::fabric;

/// NICs of the node.
const NICS: usize = 32;
/// Links on top of one NIC.
const CHILDREN: usize = 128;

/// Measures the agent against the kernel's floor on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// Rounds of each measurement; one more comes first and does not count (not with --quick).
    #[arg(long, default_value_t = 10, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1000))]
    rounds: usize,

    /// NICs of the pods.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32], value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=32))]
    nics: Vec<usize>,

    /// For CI: short looks at what takes long. The figures are then worth little.
    #[arg(long)]
    quick: bool,

    /// Exit 1 if a goal is missed.
    #[arg(long)]
    check: bool,

    /// Where to write the figures as JSON.
    // Not a PathBuf: clap refuses an empty one, and `make` exports the variable also when it is empty.
    #[arg(long, env = "BENCH_JSON", value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    json: Option<OsString>,

    /// The `dranic` program; the one beside this program where absent.
    #[arg(long)]
    agent: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(report) if args.check && !report.missed().is_empty() => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nFAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<Report> {
    ensure!(fabric::root(), "network namespaces need root: run it with sudo");
    // Mounts are seen by this process and its children only: whatever happens, none stays.
    fabric::private_mounts()?;
    let program = match &args.agent {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("dranic"),
    };
    ensure!(program.is_file(), "{} is not there: build it with: cargo build --release --bin dranic", program.display());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(async {
        let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            result = measure(args, &program) => result,
            _ = tokio::signal::ctrl_c() => bail!("interrupted; everything the benchmark made is gone"),
            _ = term.recv() => bail!("terminated; everything the benchmark made is gone"),
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    let report = result?;
    report.print();
    if let Some(path) = args.json.as_deref().filter(|path| !path.is_empty()) {
        report::write_json(&report, Path::new(path))?;
    }
    Ok(report)
}

async fn measure(args: &Args, program: &Path) -> Result<Report> {
    let mut report = Report { rounds: args.rounds, program: std::fs::metadata(program)?.len(), ..Report::default() };
    let mut options = Options::new(program, nics(NICS));
    // All in the hook, so that it can be compared with the floor.
    options.arguments = ["--log-format=json", "--hold=budget"].map(str::to_owned).to_vec();
    let mut cluster = Cluster::new(options)?;
    // As a real API server: bookmarks are what wakes an idle agent.
    cluster.api.set_bookmark_every(Duration::from_secs(60));
    cluster.start_agent()?;
    cluster.wait_ready(Duration::from_secs(30)).await?;
    let before = cluster.host_states()?;
    let pid = cluster.agent.as_ref().context("the agent is there")?.pid();

    let (warm_up, rest, window) = if args.quick { (0, 3, 5) } else { (1, 15, 30) };
    say(format_args!("an idle agent with {NICS} devices, for {window} s"));
    tokio::time::sleep(Duration::from_secs(rest)).await;
    report.idle = idle::measure(pid, Duration::from_secs(window)).await?;

    let bed = Bed::new(nics(NICS))?;
    for count in &args.nics {
        say(format_args!("RunPodSandbox with {count} NICs against the floor, {} rounds", args.rounds));
        report.attach.push(attach::measure(&cluster, &bed, *count, warm_up, args.rounds).await?);
    }
    // In a short look the large ones are left out: they take most of the time.
    let largest = if args.quick { 8 } else { NICS };
    for count in args.nics.iter().filter(|count| (2..=largest).contains(*count)) {
        say(format_args!("{count} moves by one socket and by several"));
        report.ways.push(ways(&bed, *count, args.rounds.div_ceil(2))?);
    }
    report.after = Idle::default();
    idle::memory(pid, &mut report.after)?;
    let differences = Cluster::differences(&before, &cluster.host_states()?);
    ensure!(differences.is_empty(), "the host is not as before: {differences:?}");

    say(format_args!("{} NICs with routes, rules and neighbours against the floor, {} rounds", work::NICS, args.rounds));
    work::furnish(&cluster.node)?;
    report.work = work::measure(&cluster, &bed, args.rounds).await?;
    drop(bed);

    let large: Vec<usize> = args.nics.iter().copied().filter(|count| (2..=largest).contains(count)).collect();
    say(format_args!("holds of {} ms", gate::HOLDS.join(", ")));
    report.gate = gate::measure(&mut cluster, &large, args.rounds.div_ceil(2)).await?;

    say(format_args!("{CHILDREN} macvlan links in one pod, {} rounds", args.rounds.div_ceil(2)));
    let rounds = args.rounds.div_ceil(2);
    report.children = tokio::task::spawn_blocking(move || children::measure(CHILDREN, rounds)).await??;

    say("RunPodSandbox of a pod that is not ours");
    cluster.runtime.stop(true).await;
    let (socket, requests) = (cluster.path("nri.sock"), if args.quick { 2000 } else { 10_000 });
    report.foreign = tokio::task::spawn_blocking(move || foreign::measure(&socket, requests)).await??;
    let (status, _) = cluster.agent.take().context("the agent is there")?.terminate()?;
    ensure!(status.success(), "the agent ended with {status}\n{}", cluster.log());
    Ok(report)
}

/// The moves alone, sent in several ways, in turns.
fn ways(bed: &Bed, nics: usize, rounds: usize) -> Result<Ways> {
    let all = [
        ("one socket, one by one", Way::OneByOne),
        ("one socket, all in one call", Way::OneCall),
        ("2 threads with a socket each", Way::Threads(2)),
        ("8 threads with a socket each", Way::Threads(8)),
    ];
    let mut samples = vec![Samples::default(); all.len()];
    for round in 0..=rounds {
        for turn in 0..all.len() {
            let which = (round + turn) % all.len();
            let took = bed.run(nics, Before::Down, all[which].1)?;
            if round > 0 {
                samples[which].push(took);
            }
        }
    }
    Ok(Ways { nics, ways: all.iter().map(|(name, _)| (*name).to_owned()).zip(samples).collect() })
}

fn say(what: impl std::fmt::Display) {
    eprintln!("measuring: {what}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `make bench` without BENCH_JSON.
    #[test]
    fn a_file_for_json_may_be_empty() {
        assert_eq!(Args::try_parse_from(["dranic-bench", "--json", ""]).unwrap().json.as_deref(), Some("".as_ref()));
    }
}
