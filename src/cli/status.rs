//! `dranic status`.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::output::{emit, emit_json, lines, table};
use super::{EXIT_FAILURE, EXIT_UNAVAILABLE, Failure, Output};
use crate::agent::status::{ClaimStatus, DeviceStatus, Status};

/// Largest answer we read, bytes: far above a node's devices.
const MAX_ANSWER: u64 = 64 * 1024 * 1024;

/// End of `dranic status --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic status                                     claims, devices, phases, step times, last errors
  dranic status -o json | jq '.claims[].devices[] | select(.lastError)'

It exits 69 when no agent answers.";

/// Flags of `dranic status`.
#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Socket of the running agent.
    #[arg(long, env = "DRANIC_STATUS_SOCKET", default_value = "/run/dranic/dranic.sock", value_name = "SOCKET")]
    status_socket: PathBuf,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
}

pub(super) fn run(args: &StatusArgs) -> Result<(), Failure> {
    let answer = ask(&args.status_socket)?;
    let status: Status = serde_json::from_str(&answer).map_err(|e| Failure {
        code: EXIT_FAILURE,
        message: format!("the agent's answer can't be read ({e}); is it of another version?"),
    })?;
    match args.output {
        Output::Json => emit_json(&status),
        Output::Table => emit(&text(&status)),
    }
}

/// Reads the agent's JSON document.
///
/// # Errors
/// When no agent answers; exit code 69.
pub(super) fn ask(socket: &Path) -> Result<String, Failure> {
    let unavailable = |e: std::io::Error| Failure {
        code: EXIT_UNAVAILABLE,
        message: format!(
            "no agent answers at {}: {e}; is it running on this node, are you root, is --status-socket right?",
            socket.display()
        ),
    };
    let stream = UnixStream::connect(socket).map_err(unavailable)?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(unavailable)?;
    let mut text = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut text).map_err(unavailable)?;
    if text.is_empty() {
        return Err(unavailable(std::io::Error::from(std::io::ErrorKind::PermissionDenied)));
    }
    Ok(text)
}

fn text(status: &Status) -> String {
    let error = status.publish_error.as_ref().map(|e| format!(" ({e})")).unwrap_or_default();
    let mut text = format!(
        "Node:      {}\nDriver:    {} ({})\nKubelet:   {}\nNRI:       {}{}\nGuard:     {}{}\nPublished: {} devices{error}\n\n",
        status.node,
        status.driver,
        status.version,
        status.kubelet,
        if status.nri_connected { "" } else { "not connected: " },
        status.nri,
        if status.guard_usable { "" } else { "not used: " },
        status.guard,
        status.published_devices,
    );
    if status.claims.is_empty() {
        return text + "No claim is prepared.\n";
    }
    let mut rows = table(&["CLAIM", "POD", "DEVICE", "HOST", "IN POD", "PHASE", "TIMES", "ERROR"]);
    for claim in &status.claims {
        rows.add_rows(claim.devices.iter().map(|device| row(claim, device)));
    }
    text.push_str(&lines(&rows));
    for (claim, device) in status.claims.iter().flat_map(|claim| claim.devices.iter().map(move |device| (claim, device))) {
        if let Some(used) = &device.rdma_in_use {
            let by = if used.is_used() { "in use" } else { "not in use" };
            text.push_str(&format!("\nRDMA device of {} in {}/{}: {by} ({used})\n", device.device, claim.namespace, claim.name));
        }
    }
    text
}

fn row(claim: &ClaimStatus, device: &DeviceStatus) -> [String; 8] {
    let times: Vec<String> = device.times.iter().map(|t| format!("{} {}", t.step, millis(t.micros))).collect();
    [
        format!("{}/{}", claim.namespace, claim.name),
        claim.pod.clone(),
        device.device.clone(),
        device.host_link.clone(),
        device.pod_link.clone(),
        format!("{:?}", device.phase).to_lowercase(),
        times.join(", "),
        device.last_error.clone().unwrap_or_default(),
    ]
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn millis(micros: u64) -> String {
    format!("{:.1} ms", micros as f64 / 1000.0)
}
