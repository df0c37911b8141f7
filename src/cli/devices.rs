//! `dranic devices`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::output::{emit, emit_json, lines, table};
use super::{Failure, Output};
use crate::inventory::sysfs::Sysfs;
use crate::inventory::{Attribute, Attributes, Device, Ipoib, Scan, ScanOptions, Withheld, watch};

/// End of `dranic devices --help`.
pub(super) const AFTER_HELP: &str = "\
Examples:
  dranic devices                                    what is offered, and what is kept back and why
  dranic devices -o json | jq '.withheld'";

/// Flags of `dranic devices`.
#[derive(Debug, Args)]
pub(super) struct DevicesArgs {
    /// Offer veth links too (see `dranic agent --help`).
    #[arg(long, env = "DRANIC_OFFER_VETH")]
    offer_veth: bool,

    /// Offer nothing while there is no default route (see `dranic agent --help`).
    #[arg(long, env = "DRANIC_NEED_DEFAULT_ROUTE")]
    need_default_route: bool,

    /// What becomes of IPoIB links (see `dranic agent --help`).
    #[arg(long, env = "DRANIC_IPOIB", value_enum, default_value = "attach", value_name = "WHAT")]
    ipoib: Ipoib,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,

    /// Root of sysfs.
    #[arg(long, env = "DRANIC_SYSFS", default_value = "/sys", value_name = "DIR", hide = true)]
    sysfs: PathBuf,
}

#[derive(Serialize)]
struct Json<'a> {
    devices: Vec<JsonDevice<'a>>,
    withheld: &'a [Withheld],
    problems: &'a [String],
}

#[derive(Serialize)]
struct JsonDevice<'a> {
    name: &'a str,
    attributes: &'a Attributes,
}

pub(super) fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let options = ScanOptions { offer_veth: args.offer_veth, need_default_route: args.need_default_route, ipoib: args.ipoib };
    let scan = watch::once(&Sysfs::new(&args.sysfs).with_places(crate::doubles::places()), options)
        .map_err(|e| Failure { code: super::EXIT_FAILURE, message: e })?;
    match args.output {
        Output::Json => {
            let devices = scan.devices.iter().map(|d| JsonDevice { name: d.name.as_str(), attributes: &d.attributes }).collect();
            emit_json(&Json { devices, withheld: &scan.withheld, problems: &scan.problems })
        }
        Output::Table => emit(&text(&scan)),
    }
}

fn text(scan: &Scan) -> String {
    let mut text = String::new();
    if scan.devices.is_empty() {
        text.push_str("This node would publish no device.\n");
    } else {
        if let Some(Attribute::String(mode)) = scan.devices.iter().find_map(|device| device.attributes.get("rdmaNetnsMode")) {
            text.push_str(&format!("RDMA devices are {mode}{}.\n\n", meaning(mode)));
        }
        let mut rows = table(&["DEVICE", "LINK", "TYPE", "STATE", "MTU", "PCI", "NUMA", "RDMA"]);
        rows.add_rows(scan.devices.iter().map(row));
        text.push_str(&lines(&rows));
    }
    if !scan.withheld.is_empty() {
        let mut rows = table(&["NOT OFFERED", "REASON"]);
        rows.add_rows(scan.withheld.iter().map(|link| [&link.link, &link.reason]));
        text.push('\n');
        text.push_str(&lines(&rows));
    }
    for problem in &scan.problems {
        text.push_str(&format!("\nproblem: {problem}\n"));
    }
    text
}

fn row(device: &Device) -> [String; 8] {
    let get = |key: &str| {
        device.attributes.get(key).map_or_else(String::new, |value| match value {
            Attribute::Bool(b) => b.to_string(),
            Attribute::Int(i) => i.to_string(),
            Attribute::String(s) => s.clone(),
        })
    };
    let kind = if device.is_rdma_only { "no link".to_owned() } else { get("type") };
    let (rdma, protocol) = (get("rdmaDevice"), get("rdmaProtocol"));
    let port = Some(get("rdmaPort")).filter(|port| !port.is_empty()).map(|port| format!("/{port}")).unwrap_or_default();
    let rdma = if rdma.is_empty() { get("rdma") } else { format!("{rdma}{port} {protocol}").trim_end().to_owned() };
    [device.name.to_string(), get("ifName"), kind, get("state"), get("mtu"), get("pciAddress"), get("numaNode"), rdma]
}

fn meaning(mode: &str) -> &'static str {
    if mode == "exclusive" { ": they move with their links" } else { " between network namespaces: links move without them" }
}
