//! `dranic doctor`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::output::{emit, emit_json, lines, table};
use super::{EXIT_FAILURE, EXIT_USAGE, Failure, Output, status};
use crate::doctor::{Finding, Host, Level, Options, examine};

/// End of `dranic doctor --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic doctor                                on the node
  kubectl debug node/NODE -it --profile=sysadmin --image=IMAGE_OF_THE_AGENT -- dranic doctor --root /host
  kubectl -n kube-system exec POD -- dranic doctor    in the agent's pod: all but the runtime's configuration
  dranic doctor -o json | jq '.findings[] | select(.level == \"error\")'

Give it the flags that the agent has, where they are not the defaults. It changes nothing.
Exit codes: 0 no error was found, 1 at least one was, 64 a flag has a bad value.";

/// Flags of `dranic doctor`.
#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Where the host's root is mounted; all paths below are the host's.
    #[arg(long, default_value = "/", value_name = "DIR")]
    root: PathBuf,

    /// Configuration of containerd.
    #[arg(long, default_value = "/etc/containerd/config.toml", value_name = "FILE")]
    containerd_config: PathBuf,

    /// Configuration of CRI-O; the files in the folder of that name with .d at its end come on top.
    #[arg(long, default_value = "/etc/crio/crio.conf", value_name = "FILE")]
    crio_config: PathBuf,

    /// The agent's driver name.
    #[arg(long, env = "DRANIC_DRIVER_NAME", default_value = "dranic.dev", value_name = "NAME")]
    driver_name: String,

    /// Whether the agent uses NRI.
    #[arg(long, env = "DRANIC_NRI", value_parser = ["on", "off"], default_value = "on", value_name = "WHETHER")]
    nri: String,

    /// The agent's NRI socket.
    #[arg(long, env = "DRANIC_NRI_SOCKET", default_value = "/var/run/nri/nri.sock", value_name = "SOCKET")]
    nri_socket: PathBuf,

    /// The agent's NRI plugin index.
    #[arg(long, env = "DRANIC_NRI_INDEX", default_value = "10", value_name = "NN")]
    nri_index: String,

    /// The agent's folder of CDI specs.
    #[arg(long, env = "DRANIC_CDI_DIR", default_value = "/var/run/cdi", value_name = "DIR")]
    cdi_dir: PathBuf,

    /// The agent's folder of the ledger.
    #[arg(long, env = "DRANIC_STATE_DIR", default_value = "/var/lib/dranic", value_name = "DIR")]
    state_dir: PathBuf,

    /// The agent's folder of the guard; empty for none.
    #[arg(long, env = "DRANIC_GUARD_DIR", default_value = "/var/lib/dranic/bin", value_name = "DIR")]
    guard_dir: String,

    /// Socket of the running agent.
    #[arg(long, env = "DRANIC_STATUS_SOCKET", default_value = "/run/dranic/dranic.sock", value_name = "SOCKET")]
    status_socket: PathBuf,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

#[derive(Serialize)]
struct Json<'a> {
    errors: usize,
    findings: &'a [Finding],
}

pub(super) fn run(args: &DoctorArgs) -> Result<(), Failure> {
    for (flag, path) in [
        ("--root", &args.root),
        ("--containerd-config", &args.containerd_config),
        ("--crio-config", &args.crio_config),
        ("--nri-socket", &args.nri_socket),
        ("--cdi-dir", &args.cdi_dir),
        ("--state-dir", &args.state_dir),
        ("--status-socket", &args.status_socket),
    ] {
        if !path.is_absolute() {
            return Err(usage(flag, path, "must be an absolute path"));
        }
    }
    if !args.root.is_dir() {
        return Err(usage("--root", &args.root, "is no folder"));
    }
    let host = Host::new(&args.root);
    let options = Options {
        containerd_config: args.containerd_config.clone(),
        crio_config: args.crio_config.clone(),
        driver_name: args.driver_name.clone(),
        nri_index: args.nri_index.clone(),
        uses_nri: args.nri == "on",
        nri_socket: args.nri_socket.clone(),
        cdi_dir: args.cdi_dir.clone(),
        state_dir: args.state_dir.clone(),
        guard_dir: Some(PathBuf::from(&args.guard_dir)).filter(|dir| !dir.as_os_str().is_empty()),
    };
    let agent = status::ask(&host.path(&args.status_socket)).map_err(|failure| failure.message);
    let findings = examine(&host, &options, &agent);
    let errors = findings.iter().filter(|finding| finding.level == Level::Error).count();
    match args.output {
        Output::Json => emit_json(&Json { errors, findings: &findings })?,
        Output::Table => emit(&text(&findings))?,
    }
    match errors {
        0 => Ok(()),
        n => Err(Failure { code: EXIT_FAILURE, message: format!("{n} of {} findings are errors", findings.len()) }),
    }
}

fn usage(flag: &str, path: &Path, why: &str) -> Failure {
    let message = format!("{flag}: {} {why}\nFor more information, try 'dranic doctor --help'.", path.display());
    Failure { code: EXIT_USAGE, message }
}

fn text(findings: &[Finding]) -> String {
    let mut rows = table(&["LEVEL", "WHAT", "FOUND"]);
    for finding in findings {
        let level = format!("{:?}", finding.level).to_lowercase();
        rows.add_row([&level, &finding.subject, &finding.found]);
    }
    let mut text = lines(&rows);
    let open: Vec<_> = findings.iter().filter(|finding| finding.level >= Level::Warning).collect();
    if !open.is_empty() {
        text.push_str("\nWhat to do:\n");
    }
    for finding in open {
        text.push_str(&format!("- {}: {}\n", finding.subject, finding.todo.as_deref().unwrap_or_default()));
    }
    text
}
