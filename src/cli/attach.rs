//! `dranic attach` and `dranic release`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::output::{emit, emit_json, lines, table};
use super::{EXIT_FAILURE, EXIT_USAGE, Failure, Output};
use crate::config::NetworkConfig;
use crate::inventory::sysfs::Sysfs;
use crate::inventory::{Scan, ScanOptions, watch};
use crate::manifests::{documents, parameters};
use crate::manual::{self, Manual, Preview, Returned, find};

/// End of `dranic attach --help`.
pub(super) const ATTACH_HELP: &str = "\
Examples:
  ip netns add blue
  dranic attach --device eth3 --netns /run/netns/blue --dry-run                    what would be done, and what undoes it
  dranic attach --device eth3 --netns /run/netns/blue --config rail.yaml           do it
  dranic attach --device pci-0000-8a-00-0 --netns /proc/4711/ns/net --dry-run -o json | jq -r '.steps[].words'
  dranic release --device eth3                                                     give it back

The configuration is what stands in a claim below opaque.parameters, in YAML or JSON (docs/configuration.md).
Exit codes: 0 done, 1 failed and everything is as it was, 64 a flag has a bad value, 66 a file can't be read.";

/// End of `dranic release --help`.
pub(super) const RELEASE_HELP: &str = "\
Examples:
  dranic release --device eth3        by its name on the host, in the namespace, or as it is published
  dranic release --all

Only what dranic attach attached is given back: devices of pods are the agent's.
Exit codes: 0 done, 1 something is not as it was, 64 a flag has a bad value.";

/// Where things are.
#[derive(Debug, Args)]
struct Places {
    /// Folder of the ledger of what was attached by hand; not the agent's.
    #[arg(long, env = "DRANIC_ATTACH_STATE_DIR", default_value = "/var/lib/dranic-attach", value_name = "DIR")]
    state_dir: PathBuf,

    /// Folder of the agent's ledger, which is only read.
    #[arg(long, env = "DRANIC_STATE_DIR", default_value = "/var/lib/dranic", value_name = "DIR")]
    agent_state_dir: PathBuf,
}

/// Flags of `dranic attach`.
#[derive(Debug, Args)]
pub(super) struct AttachArgs {
    /// File with the configuration, - for standard input. Without it the device keeps what it has on the host.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The device as `dranic devices` lists it, or the name of its link.
    #[arg(long, value_name = "NAME")]
    device: String,

    /// Path of the network namespace: /run/netns/NAME, or /proc/PID/ns/net.
    #[arg(long, value_name = "PATH")]
    netns: PathBuf,

    /// Say what would be done, and what undoes it; change nothing.
    #[arg(long)]
    dry_run: bool,

    /// Take veth links too (see `dranic agent --help`).
    #[arg(long, env = "DRANIC_OFFER_VETH")]
    offer_veth: bool,

    #[command(flatten)]
    places: Places,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,

    /// Root of sysfs.
    #[arg(long, env = "DRANIC_SYSFS", default_value = "/sys", value_name = "DIR", hide = true)]
    sysfs: PathBuf,
}

/// Flags of `dranic release`.
#[derive(Debug, Args)]
pub(super) struct ReleaseArgs {
    /// The device as `dranic devices` lists it, or the name of its link, on the host or in the namespace.
    #[arg(long, value_name = "NAME", required_unless_present = "all", conflicts_with = "all")]
    device: Option<String>,

    /// Everything that was attached by hand.
    #[arg(long)]
    all: bool,

    #[command(flatten)]
    places: Places,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure { code: EXIT_FAILURE, message: why.to_string() }
}

pub(super) fn attach(args: &AttachArgs) -> Result<(), Failure> {
    args.places.check("attach")?;
    let config = args.config.as_deref().map_or_else(|| Ok(NetworkConfig::default()), read_config)?;
    if config.interface.as_ref().is_some_and(|interface| interface.dhcp == Some(true)) {
        return Err(failed("interface.dhcp: a lease is renewed by the agent only; name addresses in interface.addresses"));
    }
    let boot_id = may_work()?;
    let netns = manual::netns(&args.netns).map_err(failed)?;
    let options = ScanOptions { offer_veth: args.offer_veth, need_default_route: false, ..ScanOptions::default() };
    let scan = watch::once(&Sysfs::new(&args.sysfs).with_places(crate::doubles::places()), options).map_err(failed)?;
    let device = find::device(&scan, &args.device).map_err(failed)?.clone();
    manual::free_of_agent(&args.places.agent_state_dir, &device, &boot_id).map_err(failed)?;
    let preview = Preview::take(&device, &config, &netns).map_err(failed)?;
    if !args.dry_run {
        let manual = Manual::open(&args.places.state_dir, boot_id, scan).map_err(failed)?;
        manual.attach(&device, config, &netns).map_err(failed)?;
    }
    match args.output {
        Output::Json => emit_json(&preview),
        Output::Table if args.dry_run => emit(&text(&preview)),
        Output::Table => {
            let Preview { host_link, pod_link, device, .. } = &preview;
            emit(&format!(
                "{host_link} is {pod_link} in {} now; to give it back: dranic release --device {device}\n",
                netns.display()
            ))
        }
    }
}

#[derive(Serialize)]
struct Released {
    returned: Vec<Returned>,
    failed: Vec<String>,
}

pub(super) fn release(args: &ReleaseArgs) -> Result<(), Failure> {
    args.places.check("release")?;
    let boot_id = may_work()?;
    let manual = Manual::open(&args.places.state_dir, boot_id, Scan::default()).map_err(failed)?;
    let outcomes = match &args.device {
        Some(name) => vec![manual.release(name)],
        None => manual.records().iter().map(|record| manual.release_record(record)).collect(),
    };
    let mut released = Released { returned: Vec::new(), failed: Vec::new() };
    for outcome in outcomes {
        match outcome {
            Ok(returned) => released.returned.extend(returned),
            Err(error) => released.failed.push(error.to_string()),
        }
    }
    let not_whole = released.returned.iter().filter(|r| !r.not_restored.is_empty()).count();
    match args.output {
        Output::Json => emit_json(&released)?,
        Output::Table => emit(&released.returned.iter().map(returned_text).collect::<String>())?,
    }
    match (released.failed.as_slice(), not_whole) {
        ([], 0) => Ok(()),
        ([], n) => Err(failed(format!("{n} devices are not all as they were"))),
        (why, _) => Err(failed(why.join("; "))),
    }
}

fn returned_text(returned: &Returned) -> String {
    let Returned { device, host_link, not_restored } = returned;
    let lines: String = not_restored.iter().map(|what| format!("  not as it was: {what}\n")).collect();
    format!("{host_link} ({device}) is given back\n{lines}")
}

impl Places {
    fn check(&self, command: &str) -> Result<(), Failure> {
        let usage = |flag: &str, why: String| {
            let message = format!("{flag}: {why}\nFor more information, try 'dranic {command} --help'.");
            Err(Failure { code: EXIT_USAGE, message })
        };
        for (flag, path) in [("--state-dir", &self.state_dir), ("--agent-state-dir", &self.agent_state_dir)] {
            if !path.is_absolute() {
                return usage(flag, format!("{} must be an absolute path", path.display()));
            }
        }
        let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if real(&self.state_dir) == real(&self.agent_state_dir) {
            return usage("--state-dir", format!("{} is the agent's; name another one", self.state_dir.display()));
        }
        Ok(())
    }
}

/// The boot id of the machine, if this process may do anything.
fn may_work() -> Result<String, Failure> {
    if !nix::unistd::geteuid().is_root() {
        return Err(failed("only root can move links between network namespaces"));
    }
    crate::doubles::boot_id().map_err(|e| failed(format!("the boot id can't be read: {e}")))
}

fn read_config(path: &Path) -> Result<NetworkConfig, Failure> {
    let (name, text) = super::validate::read(path)?;
    let read = text.and_then(|text| documents(&text)).map_err(|e| failed(format!("{name}:{}: {}", e.at.line, e.why)))?;
    let [document] = read.as_slice() else {
        return Err(failed(format!("{name} has {} documents; one configuration is wanted", read.len())));
    };
    parameters(document).map_err(|faults| {
        let line = |(at, error): &(crate::manifests::Position, crate::config::FieldError)| format!("{name}:{}: {error}", at.line);
        failed(faults.iter().map(line).collect::<Vec<_>>().join("\n"))
    })
}

fn text(preview: &Preview) -> String {
    let Preview { device, host_link, pod_link, netns, steps, left_out, .. } = preview;
    let mut rows = table(&["", "STEP", "UNDONE BY"]);
    for (number, step) in steps.iter().enumerate() {
        rows.add_row([&(number + 1).to_string(), &step.words, &step.undo_words]);
    }
    let mut text = format!("{host_link} ({device}) would be {pod_link} in {netns}:\n\n{}", lines(&rows));
    if !left_out.is_empty() {
        text.push_str("\nNot copied from the host:\n");
        text.extend(left_out.iter().map(|line| format!("- {line}\n")));
    }
    text + "\nNothing was changed.\n"
}
