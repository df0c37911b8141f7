//! `dranic validate`.

mod files;

use std::path::PathBuf;

use clap::Args;

use super::agent::subdomain;
use super::output::{emit, emit_json};
use super::{EXIT_FAILURE, Failure, Output};
use crate::manifests::{Fault, Report, check, documents};
use crate::names::DNS_LABEL_MAX;

pub(super) use files::read;

/// End of `dranic validate --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic validate -f claim.yaml                     one file, with as many documents as it has
  dranic validate -f class.yaml claims/             together: a claim is checked on top of its class
  helm template charts/app | dranic validate -f -   standard input
  dranic validate -f . --driver-name dra.net        manifests that were written for DRANET
  dranic validate -f . -o json | jq -r '.faults[] | .path'

Each fault is FILE:LINE:COLUMN: OBJECT: PATH: what is wrong and what is allowed. Kinds without configuration are ignored.
Exit codes: 0 nothing is wrong, 1 faults were found, 64 a flag has a bad value, 66 a file can't be read.";

/// Flags of `dranic validate`.
#[derive(Debug, Args)]
pub(super) struct ValidateArgs {
    /// YAML or JSON files, folders of them (*.yaml, *.yml, *.json; not the folders in them), or - for standard input.
    #[arg(short = 'f', long = "filename", required = true, num_args = 1.., value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Driver whose configuration is checked; several with commas, or the flag again.
    #[arg(long, env = "DRANIC_DRIVER_NAME", default_value = "dranic.dev", value_delimiter = ',', value_name = "NAME")]
    driver_name: Vec<String>,

    /// Name what was ignored.
    #[arg(short, long)]
    verbose: bool,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

pub(super) fn run(args: &ValidateArgs) -> Result<(), Failure> {
    if let Some(name) = args.driver_name.iter().find(|name| subdomain(name, DNS_LABEL_MAX).is_err()) {
        let message =
            format!("--driver-name: {name:?} is not a driver's name\nFor more information, try 'dranic validate --help'.");
        return Err(Failure { code: super::EXIT_USAGE, message });
    }
    let mut read = Vec::new();
    let mut broken = Vec::new();
    for (file, text) in files::texts(&args.files)? {
        match text.and_then(|text| documents(&text)) {
            Ok(documents) => read.push((file, documents)),
            Err(error) => {
                broken.push(Fault { file, at: error.at, object: String::new(), path: String::new(), message: error.why });
            }
        }
    }
    let mut report = check(&read, &args.driver_name);
    report.faults.extend(broken);
    report.faults.sort();
    match args.output {
        Output::Json => emit_json(&report)?,
        Output::Table => emit(&text(&report, args))?,
    }
    match report.faults.len() {
        0 => Ok(()),
        1 => Err(Failure { code: EXIT_FAILURE, message: "1 fault".to_owned() }),
        n => Err(Failure { code: EXIT_FAILURE, message: format!("{n} faults") }),
    }
}

fn text(report: &Report, args: &ValidateArgs) -> String {
    let mut text: String = report.faults.iter().map(line).collect();
    if args.verbose {
        text.extend(report.ignored.iter().map(|object| format!("ignored: {object}\n")));
    }
    let Report { objects, configurations, foreign, ignored, .. } = report;
    let of_others = if *foreign > 0 { format!(", {foreign} of other drivers left alone") } else { String::new() };
    let others = if ignored.is_empty() { String::new() } else { format!("; {} objects of other kinds ignored", ignored.len()) };
    text.push_str(&format!(
        "{objects} classes, claims and templates with {configurations} configurations of {} checked{of_others}{others}\n",
        args.driver_name.join(", ")
    ));
    text
}

fn line(fault: &Fault) -> String {
    let Fault { file, at, object, path, message } = fault;
    let parts: String = [object, path].into_iter().filter(|part| !part.is_empty()).map(|part| format!("{part}: ")).collect();
    format!("{file}:{}:{}: {parts}{message}\n", at.line, at.column)
}
