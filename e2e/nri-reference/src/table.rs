//! What a run found, for people and for programs.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;

/// How a case ended on one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// With a figure or a remark.
    Passed(String),
    Failed(String),
    /// It can't be had here, and why.
    Skipped(String),
}

impl Outcome {
    fn word(&self) -> &'static str {
        match self {
            Self::Passed(_) => "passed",
            Self::Failed(_) => "failed",
            Self::Skipped(_) => "skipped",
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Passed(text) | Self::Failed(text) | Self::Skipped(text) => text,
        }
    }

    /// The line of a case.
    pub(crate) fn line(&self, name: &str, side: &str, took: Duration) -> String {
        let seconds = took.as_secs_f64();
        let line = match self {
            Self::Passed(note) => format!("ok      {side:17} {name:24} {seconds:5.1} s  {note}"),
            Self::Failed(why) => format!("FAILED  {side:17} {name:24} {seconds:5.1} s  {why}"),
            Self::Skipped(why) => format!("skipped: {name} on {side}: {why}"),
        };
        line.trim_end().to_owned()
    }
}

#[derive(Debug)]
struct Row {
    name: String,
    side: String,
    outcome: Outcome,
    took: Duration,
}

/// All cases on all sides.
#[derive(Debug)]
pub(crate) struct Table {
    sides: Vec<String>,
    rows: Vec<Row>,
}

impl Table {
    /// With a column for each side.
    pub(crate) fn new(sides: Vec<String>) -> Self {
        Self { sides, rows: Vec::new() }
    }

    /// Adds a case on a side.
    pub(crate) fn add(&mut self, name: &str, side: &str, outcome: Outcome, took: Duration) {
        self.rows.push(Row { name: name.to_owned(), side: side.to_owned(), outcome, took });
    }

    fn count(&self, word: &str) -> usize {
        self.rows.iter().filter(|row| row.outcome.word() == word).count()
    }

    pub(crate) fn failed(&self) -> usize {
        self.count("failed")
    }

    /// A table that can be pasted, with the cases in this order, and the sum as the last line.
    pub(crate) fn print(&self, order: &[&str]) {
        println!("\n| case | {} |\n| --- |{}", self.sides.join(" | "), " --- |".repeat(self.sides.len()));
        let cells: BTreeMap<_, _> = self.rows.iter().map(|row| ((&*row.name, &*row.side), row.outcome.word())).collect();
        for name in order {
            let cells: Vec<_> = self.sides.iter().map(|side| *cells.get(&(*name, &**side)).unwrap_or(&"")).collect();
            println!("| {name} | {} |", cells.join(" | "));
        }
        println!("\n{}", self.sum());
    }

    fn sum(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.count("passed"), self.count("failed"), self.count("skipped"))
    }

    /// Writes all of it as JSON.
    pub(crate) fn write(&self, file: &Path) -> Result<()> {
        let row = |row: &Row| {
            let milliseconds = u64::try_from(row.took.as_millis()).unwrap_or(u64::MAX);
            let (result, text) = (row.outcome.word(), row.outcome.text());
            json!({"case": row.name, "side": row.side, "result": result, "milliseconds": milliseconds, "text": text})
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        let all = json!({
            "passed": self.count("passed"), "failed": self.count("failed"), "skipped": self.count("skipped"), "cases": rows,
        });
        std::fs::write(file, format!("{all:#}\n")).with_context(|| format!("{}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_counts_once() {
        let mut table = Table::new(vec!["x".to_owned()]);
        let took = Duration::from_millis(1500);
        for (name, outcome) in
            [("a", Outcome::Passed("7 ms".into())), ("b", Outcome::Failed("n".into())), ("c", Outcome::Skipped("y".into()))]
        {
            table.add(name, "x", outcome, took);
        }
        assert_eq!((table.sum().as_str(), table.failed()), ("1 passed, 1 failed, 1 skipped", 1));
        // Not printed: what runs the tests counts lines that begin with "skipped:".
        assert_eq!(table.rows[2].outcome.line("c", "x", took), "skipped: c on x: y");
        let file = tempfile::NamedTempFile::new().unwrap();
        table.write(file.path()).unwrap();
        let read: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file.path()).unwrap()).unwrap();
        assert_eq!((&read["skipped"], &read["cases"][0]["text"]), (&json!(1), &json!("7 ms")));
        assert_eq!(read["cases"][1]["milliseconds"], json!(1500));
    }
}
