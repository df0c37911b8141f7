//! Facts of the kernel that matter to moves of NICs.

use std::path::Path;

use super::{Finding, Host, Level};

/// How the kernel shares RDMA devices between network namespaces (`rdma system`), as ib_core's parameter: Y for shared.
const RDMA_SHARED: &str = "/sys/module/ib_core/parameters/netns_mode";
/// Ticks before the first look whether an RCU grace period is over.
const FIRST_FQS: &str = "/sys/module/rcutree/parameters/jiffies_till_first_fqs";

pub(super) fn look(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    let parameter = |path| host.text(Path::new(path)).ok().map(|text| text.trim().to_owned());
    findings.push(Finding::ok("links of the host", format!("{}", host.names(Path::new("/sys/class/net")).len())));
    let rdma = host.names(Path::new("/sys/class/infiniband")).len();
    if rdma > 0 {
        let subject = format!("RDMA: {rdma} devices");
        findings.extend(match parameter(RDMA_SHARED).as_deref() {
            Some("Y" | "1") => Some(Finding::new(
                Level::Note,
                subject,
                "shared between network namespaces: every pod sees the RDMA devices of all",
                "for devices that move with their NICs: `rdma system set netns exclusive`, at boot",
            )),
            Some(_) => Some(Finding::ok(subject, "exclusive to network namespaces")),
            None => None,
        });
    }
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
