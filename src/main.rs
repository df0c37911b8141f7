//! The `dranic` program: the node agent and its command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    dranic::cli::run()
}
