//! Facts of the kernel that matter to moves of NICs.

use std::path::Path;

use super::{Finding, Host, Level};

/// Ticks before the first look whether an RCU grace period is over.
const FIRST_FQS: &str = "/sys/module/rcutree/parameters/jiffies_till_first_fqs";

pub(super) fn look(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    let parameter = |path| host.text(Path::new(path)).ok().map(|text| text.trim().to_owned());
    findings.push(Finding::ok("links of the host", format!("{}", host.names(Path::new("/sys/class/net")).len())));
    match parameter(FIRST_FQS).as_deref() {
        Some("0") => findings.push(Finding::ok("RCU grace periods", "as short as they get")),
        Some(ticks) if ticks.len() < 24 => {
            let todo = "rcutree.jiffies_till_first_fqs=0 on the kernel's command line made moves a quarter shorter (docs/performance.md)";
            let found = format!("jiffies_till_first_fqs is {ticks}; a move of a NIC waits for some");
            findings.push(Finding::new(Level::Note, "RCU grace periods", found, todo));
        }
        _ => {}
    }
    findings
}
