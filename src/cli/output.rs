//! Output formats shared by the commands.

use std::io::Write;

use clap::ValueEnum;

use super::{EXIT_FAILURE, Failure};

/// How a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Output {
    /// A table for people.
    #[default]
    Table,
    /// JSON for programs.
    Json,
}

/// A table without borders, as kubectl prints them.
#[must_use]
pub(super) fn table(header: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().copied());
    table
}

/// The lines of `table`, without blanks at their ends.
pub(super) fn lines(table: &comfy_table::Table) -> String {
    table.lines().map(|line| line.trim().to_owned() + "\n").collect()
}

/// Writes to standard output. That nobody reads any more (`| head`) is no failure.
///
/// # Errors
/// When it can't be written for another reason (a full disk).
pub(super) fn emit(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure { code: EXIT_FAILURE, message: format!("standard output: {e}") })
        }
        _ => Ok(()),
    }
}

/// `value` as JSON for programs, with a line end.
///
/// # Errors
/// As [`emit`].
pub(super) fn emit_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure { code: EXIT_FAILURE, message: e.to_string() })?;
    emit(&(text + "\n"))
}
