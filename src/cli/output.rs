//! Output formats shared by the commands.

use clap::ValueEnum;

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

/// Prints `table` with two blanks between columns and none at the line ends.
pub(super) fn print(table: &comfy_table::Table) {
    for line in table.lines() {
        println!("{}", line.trim());
    }
}
