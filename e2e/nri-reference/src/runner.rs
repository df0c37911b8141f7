//! Runs cases on sides: little ones three sides at a time, heavy ones alone, those with an agent, and at last the long ones all at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use futures_util::stream::{self, StreamExt as _};

use crate::Args;
use crate::cases::{self, Case, Cost};
use crate::lab::{Lab, Skipped};
use crate::side::{Side, VERSIONS};
use crate::table::{Outcome, Table};

/// For any case; the longest takes a minute and sleeps most of it.
const LIMIT: Duration = Duration::from_secs(180);
/// Lines of the reference's log that are shown of a failed case.
const LOG_LINES: usize = 12;

/// Runs what `args` choose. Prints a line for each case on each side, then a table and the sum.
///
/// # Errors
/// If nothing was chosen, or the results can't be written.
pub(crate) async fn run(args: &Args) -> Result<bool> {
    let chosen = |names: &[String], name: &str| names.is_empty() || names.iter().any(|wanted| name.contains(wanted.as_str()));
    let cases: Vec<Case> = cases::all().into_iter().filter(|case| chosen(&args.only, &case.name)).collect();
    let sides: Vec<Side> = sides(args).into_iter().filter(|side| chosen(&args.side, &side.name())).collect();
    ensure!(!cases.is_empty() && !sides.is_empty(), "no such case or side: --list names the cases");
    let mut table = Table::new(sides.iter().map(Side::name).collect());
    let cases = Arc::new(cases);
    for (cost, at_once) in [(Cost::Little, 3), (Cost::Heavy, 1), (Cost::Node, 3), (Cost::Long, sides.len())] {
        let jobs = sides.iter().map(|side| {
            let (cases, side) = (cases.clone(), side.clone());
            tokio::task::spawn_blocking(move || alone(on_one_side(&cases, &side, cost)))
        });
        let mut done = stream::iter(jobs).buffer_unordered(at_once);
        while let Some(rows) = done.next().await {
            rows??.into_iter().for_each(|(name, side, outcome, took)| table.add(&name, &side, outcome, took));
        }
    }
    if let Some(file) = &args.json {
        table.write(file)?;
    }
    let order: Vec<&str> = cases.iter().map(|case| &*case.name).collect();
    table.print(&order);
    Ok(table.failed() == 0)
}

fn sides(args: &Args) -> Vec<Side> {
    let reference = |version: &crate::side::Version| Side {
        version: *version,
        program: Some(args.reference.clone().unwrap_or_default().join(format!("nri-{}", version.number))),
    };
    let double = |version: &crate::side::Version| Side { version: *version, program: None };
    VERSIONS.iter().map(reference).chain(VERSIONS.iter().map(double)).collect()
}

type Row = (String, String, Outcome, Duration);

/// On threads of its own: what one side's cases do in a blocking way, with netlink and namespaces, keeps nobody else from answering.
fn alone<T>(work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    Ok(done)
}

async fn on_one_side(cases: &[Case], side: &Side, cost: Cost) -> Vec<Row> {
    let mut rows = Vec::new();
    for case in cases.iter().filter(|case| case.cost == cost && (case.on)(side)) {
        let begin = Instant::now();
        let outcome = match side.missing() {
            Some(why) => Outcome::Skipped(why),
            None => one(case, side).await,
        };
        let (name, side, took) = (case.name.clone(), side.name(), begin.elapsed());
        println!("{}", outcome.line(&name, &side, took));
        rows.push((name, side, outcome, took));
    }
    rows
}

async fn one(case: &Case, side: &Side) -> Outcome {
    let mut lab = match Lab::new(side) {
        Ok(lab) => lab,
        Err(error) => return Outcome::Failed(format!("{error:#}")),
    };
    let result = tokio::time::timeout(LIMIT, (case.body)(&mut lab)).await;
    let result = result.unwrap_or_else(|_| Err(anyhow!("took longer than {} s", LIMIT.as_secs())));
    // Whatever the case was about, some things may never be seen.
    let objection = lab.tap.as_ref().and_then(|tap| tap.objection());
    match (result, objection) {
        (Ok(note), None) => Outcome::Passed(note),
        (Ok(_), Some(objection)) => Outcome::Failed(objection),
        (Err(error), _) if error.is::<Skipped>() => Outcome::Skipped(error.to_string()),
        (Err(error), _) => Outcome::Failed(format!("{error:#}{}", log(&lab))),
    }
}

/// The end of the reference's log, indented.
fn log(lab: &Lab) -> String {
    let text = std::fs::read_to_string(lab.log()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].iter().map(|line| format!("\n        {line}")).collect()
}
