//! What a run found, for people and for programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

/// How a scenario ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// It is listed as pending and passes.
    NoLongerPending,
    Failed(String),
    /// This machine or cluster can't show it, and why.
    Skipped(String),
    /// It waits for the issue of this title.
    Pending(&'static str),
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Passed | Self::NoLongerPending => "passed",
            Self::Failed(_) => "failed",
            Self::Skipped(_) => "skipped",
            Self::Pending(_) => "pending",
        }
    }

    fn why(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::NoLongerPending => "no longer pending: make it a plain scenario",
            Self::Failed(why) | Self::Skipped(why) => why,
            Self::Pending(issue) => issue,
        }
    }
}

/// One line of the table.
#[derive(Debug)]
struct Row {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
    figures: BTreeMap<String, f64>,
}

/// All scenarios of a run.
#[derive(Debug, Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    /// Adds a scenario; gives its line.
    pub(crate) fn add(&mut self, name: &'static str, outcome: Outcome, took: Duration, figures: BTreeMap<String, f64>) -> String {
        let seconds = took.as_secs_f64();
        let line = match &outcome {
            Outcome::Passed => format!("ok      {name:28} {seconds:6.1} s"),
            Outcome::NoLongerPending => format!("ok      {name:28} {seconds:6.1} s  {}", outcome.why()),
            Outcome::Failed(why) => format!("FAILED  {name:28} {seconds:6.1} s  {why}"),
            Outcome::Skipped(why) => format!("skipped: {name}: {why}"),
            Outcome::Pending(issue) => format!("pending: {name} ({issue})"),
        };
        self.0.push(Row { name, outcome, took, figures });
        line
    }

    /// Passed, failed, and skipped or pending.
    fn counts(&self) -> [usize; 3] {
        let count = |words: &[&str]| self.0.iter().filter(|row| words.contains(&row.outcome.word())).count();
        [count(&["passed"]), count(&["failed"]), count(&["skipped", "pending"])]
    }

    pub(crate) fn failed(&self) -> usize {
        self.counts()[1]
    }

    /// A table that can be pasted, and the sum as the last line.
    pub(crate) fn print(&self) {
        println!("\n| scenario | result | seconds |\n| --- | --- | ---: |");
        for row in &self.0 {
            println!("| {} | {} | {:.1} |", row.name, row.outcome.word(), row.took.as_secs_f64());
        }
        println!("\n{}", self.sum());
    }

    fn sum(&self) -> String {
        let [passed, failed, skipped] = self.counts();
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    /// Writes all of it as JSON.
    pub(crate) fn write(&self, file: &Path, seed: u64) -> Result<()> {
        let row = |row: &Row| {
            let milliseconds = u64::try_from(row.took.as_millis()).unwrap_or(u64::MAX);
            let mut value =
                json!({"name": row.name, "result": row.outcome.word(), "milliseconds": milliseconds, "why": row.outcome.why()});
            if !row.figures.is_empty() {
                value["figures"] = json!(row.figures);
            }
            value
        };
        let rows: Vec<_> = self.0.iter().map(row).collect();
        let [passed, failed, skipped] = self.counts();
        let all = json!({"seed": seed, "passed": passed, "failed": failed, "skipped": skipped, "scenarios": rows});
        std::fs::write(file, format!("{all:#}\n")).with_context(|| format!("{}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_counts_once() {
        let mut table = Table::default();
        let outcomes = [
            Outcome::Passed,
            Outcome::NoLongerPending,
            Outcome::Failed("x".into()),
            Outcome::Skipped("y".into()),
            Outcome::Pending("z"),
        ];
        // Not printed: what runs the tests counts lines that begin with "skipped:".
        let lines = outcomes
            .map(|outcome| table.add("a", outcome, Duration::from_millis(1500), BTreeMap::from([("run_ms".to_owned(), 17.5)])));
        assert_eq!(lines[3], "skipped: a: y");
        assert_eq!(table.sum(), "2 passed, 1 failed, 2 skipped");
        assert_eq!(table.failed(), 1);
        let file = std::env::temp_dir().join(format!("dranic-e2e-table-{}.json", std::process::id()));
        table.write(&file, 7).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&read["skipped"], &read["scenarios"][4]["why"]), (&json!(2), &json!("z")));
        assert_eq!(read["scenarios"][0]["milliseconds"], json!(1500));
        assert_eq!(read["scenarios"][4]["figures"]["run_ms"], json!(17.5));
    }
}
