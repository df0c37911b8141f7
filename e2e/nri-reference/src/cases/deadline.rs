//! Work that is longer than the time there is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dranic_testbed::runtime::scripted::{Behaviour, Script};
use dranic_testbed::runtime::{Caller, Kind, SandboxSpec};
use futures_util::future::join_all;

use super::{Case, Cost, matrix};
use crate::lab::{Lab, ms, named, ours};
use crate::room::{NAME, Seen};

/// The time for work that takes longer: as little as leaves the usual margin of 150 ms.
const BUDGET: u64 = 400;
/// A runtime asks one at a time: so that it does not take minutes, several nodes at once, and so many requests on each.
const NODES: usize = 4;
const REQUESTS: usize = 250;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("budget-follows-request", "each request's own time counts, not what Configure said", |lab| {
            Box::pin(follows_request(lab))
        }),
        Case::new("runtime-deadline", "the runtime's own deadline is shorter: we refuse before it", |lab| {
            Box::pin(runtime_deadline(lab))
        }),
        Case::new("slow-create", "a CreateContainer that takes too long is refused", |lab| Box::pin(slow_create(lab))),
        Case::new("slow-stop", "Stop and Remove that take too long are answered in time, without an error", |lab| {
            Box::pin(slow_stop(lab))
        }),
        Case::new("stop-in-run", "Stop of a pod whose refused Run still works; then the same pod again", |lab| {
            Box::pin(stop_in_run(lab))
        }),
        Case::new("late-answer", "an answer after a kept timeout harms nothing", |lab| Box::pin(late_answer(lab)))
            .only(|side| side.version.policies),
        Case::new("late-after-cancel", "an answer after the runtime gave up harms nothing", |lab| {
            Box::pin(late_after_cancel(lab))
        }),
        Case::new("slow-run-1000", "1,000 requests of more work than time: 1,000 refusals, no timeout", |lab| {
            Box::pin(slow_run(lab))
        })
        .cost(Cost::Long),
    ]
}

fn is_refused(error: Option<&str>) -> Result<()> {
    let error = error.context("it went on")?;
    ensure!(error.starts_with("rpc error: code = Aborted desc = dranic: ") && error.contains("still running"), "{error}");
    Ok(())
}

async fn follows_request(lab: &mut Lab) -> Result<String> {
    lab.start(|settings| settings.request_timeout = ms(60_000)).await?;
    lab.open()?;
    lab.has(&[NAME]).await?;
    lab.timeout(ms(400)).await?;
    let done = lab.relay(Kind::Run, &named("a", "slow-3000")).await?;
    is_refused(done.error.as_deref())?;
    ensure!(done.elapsed < ms(400), "{:?}", done.elapsed);
    lab.has(&[NAME]).await?;
    Ok(format!("refused after {} of 400 ms", done.elapsed.as_millis()))
}

async fn runtime_deadline(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let caller = Caller { deadline: Some(ms(400)), cancel: None };
    let done = lab.ask(Kind::Run, &named("a", "slow-3000"), caller).await?;
    is_refused(done.error.as_deref())?;
    ensure!(done.elapsed < ms(400), "{:?}", done.elapsed);
    lab.has(&[NAME]).await?;
    Ok(format!("refused after {} of 400 ms", done.elapsed.as_millis()))
}

async fn slow_create(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    lab.timeout(ms(400)).await?;
    let done = lab.relay(Kind::Create, &named("a", "slow-3000")).await?;
    is_refused(done.error.as_deref())?;
    lab.has(&[NAME]).await?;
    Ok(String::new())
}

async fn slow_stop(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    lab.timeout(ms(400)).await?;
    for kind in [Kind::Stop, Kind::Remove] {
        let done = lab.fine(kind, &named("a", "slow-700")).await?;
        ensure!(done.elapsed < ms(400), "{:?}", done.elapsed);
    }
    lab.handler()?.wait("the end of both", |seen| ended(seen, "stop") + ended(seen, "remove") == 2).await?;
    lab.has(&[NAME]).await?;
    Ok(String::new())
}

fn ended(seen: &[Seen], hook: &str) -> usize {
    seen.iter().filter(|seen| matches!(seen, Seen::End(ended, _) if *ended == hook)).count()
}

async fn stop_in_run(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    lab.timeout(ms(400)).await?;
    is_refused(lab.relay(Kind::Run, &named("a", "slow-1000")).await?.error.as_deref())?;
    // What the runtime does next, at once; the pod's name is another, so that Stop itself is quick.
    let again = named("a", "again");
    let done = lab.fine(Kind::Stop, &again).await?;
    ensure!(done.elapsed < ms(400), "{:?}", done.elapsed);
    lab.fine(Kind::Remove, &again).await?;
    ensure!(ended(&lab.handler()?.seen(), "run") == 0, "Run had ended before its Stop");
    // The same pod in a new sandbox, while the old Run still works.
    let renewed = SandboxSpec { id: "a2".to_owned(), ..again };
    lab.fine(Kind::Run, &renewed).await?;
    let begun = lab.handler()?.begun();
    let ids: Vec<_> = begun.iter().map(|(hook, id)| (*hook, &**id)).collect();
    ensure!(ids == [("run", "a"), ("stop", "a"), ("remove", "a"), ("run", "a2")], "{ids:?}");
    Ok(String::new())
}

async fn late_answer(lab: &mut Lab) -> Result<String> {
    late(lab, Caller::default(), "context deadline exceeded").await
}

async fn late_after_cancel(lab: &mut Lab) -> Result<String> {
    late(lab, Caller { deadline: None, cancel: Some(ms(100)) }, "context canceled").await
}

async fn late(lab: &mut Lab, caller: Caller, text: &str) -> Result<String> {
    lab.start(|_| ()).await?;
    let plugin = lab.plugin(Script::new("50", "late", matrix::BOTH, Behaviour::AnswerAfter(ms(300)))).await?;
    lab.timeout(ms(if caller.cancel.is_some() { 2000 } else { 200 })).await?;
    let done = lab.ask(Kind::Stop, &ours("a"), caller).await?;
    ensure!(done.error.as_deref().is_some_and(|error| error.contains(text)), "{done:?}");
    tokio::time::sleep(ms(400)).await;
    lab.timeout(ms(2000)).await?;
    lab.fine(Kind::Stop, &ours("a")).await?;
    ensure!(plugin.asked().len() == 2, "{:?}", plugin.asked());
    Ok(String::new())
}

/// Watches how long a thread of this machine waits for its turn: what is longer than the margin fails any plugin.
struct Stalls(Arc<AtomicU64>);

impl Stalls {
    fn watch() -> Self {
        let longest = Arc::new(AtomicU64::new(0));
        let seen = Arc::downgrade(&longest);
        std::thread::spawn(move || {
            while let Some(longest) = seen.upgrade() {
                let begin = Instant::now();
                std::thread::sleep(ms(5));
                let late = begin.elapsed().saturating_sub(ms(5));
                longest.fetch_max(u64::try_from(late.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        });
        Self(longest)
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

async fn slow_run(lab: &mut Lab) -> Result<String> {
    let stalls = Stalls::watch();
    let mut nodes: Vec<Lab> = (1..NODES).map(|_| Lab::new(&lab.side)).collect::<Result<_>>()?;
    let all = nodes.iter_mut().chain(std::iter::once(lab)).map(|node| slow_runs(node, &stalls));
    let mut margins = Vec::new();
    for node in join_all(all).await {
        margins.extend(node?);
    }
    margins.sort_unstable();
    ensure!(margins.len() == NODES * REQUESTS, "{} requests", margins.len());
    let (count, least, middle) = (margins.len(), margins[0].as_millis(), margins[margins.len() / 2].as_millis());
    Ok(format!("{count} refusals before {BUDGET} ms; least margin {least} ms, median {middle} ms"))
}

/// The requests of one node, and the time that was left after each answer.
async fn slow_runs(lab: &mut Lab, stalls: &Stalls) -> Result<Vec<Duration>> {
    lab.connected().await?;
    lab.timeout(ms(BUDGET)).await?;
    for number in 0..REQUESTS {
        let done = lab.relay(Kind::Run, &named(&number.to_string(), "slow-1000")).await?;
        let case =
            || format!("request {number}, after {:?} (a thread waited up to {:?} for its turn)", done.elapsed, stalls.longest());
        is_refused(done.error.as_deref()).with_context(case)?;
        ensure!(done.elapsed < ms(BUDGET), "{}", case());
    }
    lab.has(&[NAME]).await?;
    ensure!(lab.tap()?.connections().len() == 1, "dropped in between");
    if let Some(objection) = lab.tap()?.objection() {
        bail!(objection);
    }
    let margins: Option<_> = lab.calls(Kind::Run)?.iter().map(crate::tap::Call::margin).collect();
    margins.context("an answer after its deadline")
}
