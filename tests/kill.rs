//! `kill -9` of the agent at any moment, then a restart, leads to the same end state as without it.
//!
//! First between any two steps: the agent (a debug build) ends itself at a named point, each point of a pod's life in its turn, as a
//! first life without a kill has told them. Then from outside, at random moments: `DRANIC_KILL_SEED=<seed>` repeats the moments of a
//! run, `DRANIC_KILL_ROUNDS=<n>` takes more of them.

#[path = "common/bpf.rs"]
mod bpf;
#[path = "common/kill.rs"]
mod kill;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dranic_testbed::runtime::RuntimeOptions;
use kill::Rig;

/// How many clusters live at once.
const AT_ONCE: usize = 4;
/// Rounds of kills at random moments.
const ROUNDS: u64 = 20;

fn wait<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(work);
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Does all the work, some at once; gives the texts of what failed.
fn each<T: Send>(work: Vec<T>, one: impl Fn(&T) -> Result<()> + Sync) -> Vec<String> {
    let (queue, failed) = (Mutex::new(VecDeque::from(work)), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(item) = { queue.lock().unwrap().pop_front() } {
                    if let Err(error) = one(&item) {
                        failed.lock().unwrap().push(format!("{error:#}"));
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap()
}

fn new_runtime(socket: PathBuf) -> RuntimeOptions {
    RuntimeOptions::new(socket)
}

/// Goes on without a plugin that vanished in the middle of a request.
fn old_runtime(socket: PathBuf) -> RuntimeOptions {
    RuntimeOptions::old(socket)
}

async fn whole_life(rig: &mut Rig) -> Result<()> {
    rig.live().await?;
    rig.at_end().await.context("at the end")
}

/// Where to kill.
struct Step {
    point: String,
    n: usize,
    runtime: fn(PathBuf) -> RuntimeOptions,
}

/// The points of a life without a kill, in order.
fn points() -> Result<Vec<String>> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("points");
    let text = file.to_str().context("a path")?.to_owned();
    wait(async {
        let mut rig = Rig::new(new_runtime, &[("DRANIC_TEST_POINTS", &text)]).await?;
        let lived = whole_life(&mut rig).await;
        lived.with_context(|| format!("without a kill; the agent's log:\n{}", rig.log()))
    })?;
    Ok(std::fs::read_to_string(file)?.lines().map(str::to_owned).collect())
}

fn killed_at(step: &Step) -> Result<()> {
    let at = format!("{}:{}", step.point, step.n);
    wait(async {
        let mut rig = Rig::new(step.runtime, &[("DRANIC_TEST_KILL_AT", &at)]).await?;
        let lived = whole_life(&mut rig).await;
        let lived = lived.and_then(|()| {
            ensure!(rig.log().matches("the agent runs").count() > 1, "the agent was never killed");
            Ok(())
        });
        lived.with_context(|| format!("killed at {at:?}; the agent's log:\n{}", rig.log()))
    })
}

#[test]
fn killed_between_any_two_steps() {
    if !dranic_testbed::fabric::root() {
        return;
    }
    if !cfg!(debug_assertions) {
        println!("skipped: a release build has no points to be killed at");
        return;
    }
    let begin = Instant::now();
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut steps = Vec::new();
    for point in points().unwrap_or_else(|error| panic!("{error:#}")) {
        let n = counts.entry(point.clone()).or_default();
        *n += 1;
        if point.starts_with("attach") {
            steps.push(Step { point: point.clone(), n: *n, runtime: old_runtime });
        }
        steps.push(Step { point, n: *n, runtime: new_runtime });
    }
    for leg in ["prepare: ", "attach: ", "release: ", "unprepare: ", "restore: "] {
        assert!(counts.keys().any(|point| point.starts_with(leg)), "no point of {leg:?} among {counts:?}");
    }
    let (count, first) = (steps.len(), begin.elapsed());
    let failed = each(steps, killed_at);
    println!("{count} kills at {} points, {:?} (the life without a kill took {first:?})", counts.len(), begin.elapsed());
    println!("{:?}", counts.iter().collect::<BTreeMap<_, _>>());
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n\n"));
}

/// One round: up to three kills, each some time after the one before: the later ones often hit the recovery from the first.
struct Round {
    after: Vec<Duration>,
}

fn killed_after(round: &Round) -> Result<()> {
    let text = format!("{:?}", round.after);
    wait(async {
        let mut rig = Rig::new(new_runtime, &[]).await?;
        let (pid, after) = (rig.pid(), round.after.clone());
        let killer = tokio::spawn(async move {
            for pause in after {
                tokio::time::sleep(pause).await;
                let pid = pid.load(Ordering::SeqCst);
                if let Ok(pid) = i32::try_from(pid)
                    && pid > 0
                {
                    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
                }
            }
        });
        let lived = rig.live().await;
        killer.abort();
        let _ = killer.await;
        let lived = match lived {
            Ok(()) => rig.at_end().await.context("at the end"),
            Err(error) => Err(error),
        };
        lived.with_context(|| format!("killed after {text}; the agent's log:\n{}", rig.log()))
    })
}

/// Enough chance for choosing moments (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

#[test]
fn killed_at_random_moments() {
    if !dranic_testbed::fabric::root() {
        return;
    }
    let given = |name| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let seed = given("DRANIC_KILL_SEED").unwrap_or_else(|| RandomState::new().hash_one(()));
    let count = given("DRANIC_KILL_ROUNDS").unwrap_or(ROUNDS);
    println!("DRANIC_KILL_SEED={seed} DRANIC_KILL_ROUNDS={count}");
    let mut random = Random(seed);
    let mut pauses = || (0..=random.below(3)).map(|_| Duration::from_micros(random.below(500_000))).collect();
    let rounds = (0..count).map(|_| Round { after: pauses() }).collect();
    let begin = Instant::now();
    let failed = each(rounds, killed_after);
    println!("{count} rounds, {:?}", begin.elapsed());
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n\n"));
}
