//! What RDMA devices need of the host. Only looked at where there are any.

use std::path::{Path, PathBuf};

use super::{Finding, Host, Level};

/// How the kernel shares RDMA devices between network namespaces, as ib_core's parameter: Y for shared.
const NETNS_MODE: &str = "/sys/module/ib_core/parameters/netns_mode";
const DEVICES: &str = "/sys/class/infiniband";
const VERBS: &str = "/sys/class/infiniband_verbs";
const MAD: &str = "/sys/class/infiniband_mad";
const RDMA_CM: &str = "/sys/class/misc/rdma_cm";
/// Where character devices are.
const NODES: &str = "/dev/infiniband";
/// Processes whose limits containers inherit, by `comm`.
const RUNTIMES: [&str; 2] = ["containerd", "crio"];
/// `ARPHRD_INFINIBAND`, `linux/if_arp.h`.
const ARPHRD_INFINIBAND: &str = "32";
/// Most names in one finding.
const SHOWN: usize = 8;

pub(super) fn look(host: &Host) -> Vec<Finding> {
    let devices = names(host, DEVICES);
    if devices.is_empty() {
        let is_loaded = host.path(Path::new(DEVICES)).is_dir();
        let why = if is_loaded { "no device" } else { "this kernel has none (module ib_core is not loaded)" };
        return vec![Finding::ok("RDMA", why)];
    }
    let is_shared = text(host, NETNS_MODE).map(|mode| matches!(mode.as_str(), "Y" | "1"));
    let mut findings: Vec<_> = is_shared.map(|is_shared| mode(devices.len(), is_shared)).into_iter().collect();
    findings.extend(modules(host));
    findings.extend(nodes(host, &devices));
    findings.push(cgroup(host));
    findings.extend(locked_memory(host));
    if is_shared == Some(false) {
        findings.extend(several_ports(host, &devices));
        findings.extend(ipoib(host));
    }
    findings
}

fn mode(devices: usize, is_shared: bool) -> Finding {
    let subject = format!("RDMA: {devices} devices");
    if !is_shared {
        return Finding::ok(subject, "exclusive to network namespaces: they move with their NICs");
    }
    Finding::new(
        Level::Note,
        subject,
        "shared between network namespaces: every pod sees the RDMA devices of all, and opens those that it claimed",
        "for devices that move with their NICs: \"options ib_core netns_mode=0\" in /etc/modprobe.d (and in the initramfs), and a reboot; \
         or `rdma system set netns exclusive` in a service that starts before the container runtime, as it is refused while there \
         are other network namespaces",
    )
}

/// By what they make: one that is built in is not among the modules.
fn modules(host: &Host) -> Vec<Finding> {
    let missing = [
        (VERBS, Level::Error, "ib_uverbs", "containers can't use RDMA devices"),
        (RDMA_CM, Level::Warning, "rdma_ucm", "programs that connect by rdma_cm don't run in containers"),
        (MAD, Level::Note, "ib_umad", "claims with rdma.charDevices are refused"),
    ];
    let missing = missing.into_iter().filter(|(path, ..)| !host.path(Path::new(path)).exists());
    let finding = |(_, level, module, means): (_, _, &str, &str)| {
        let todo = format!("`modprobe {module}`, and its name in a file of /etc/modules-load.d (rdma-core's service does that)");
        Finding::new(level, format!("RDMA: module {module}"), format!("not loaded: {means}"), todo)
    };
    missing.map(finding).collect()
}

/// Character devices: of each kind that the kernel has, those that /dev lacks; and RDMA devices without one for verbs.
fn nodes(host: &Host, devices: &[String]) -> Vec<Finding> {
    let verbs = names(host, VERBS).into_iter().filter(|name| name.starts_with("uverbs"));
    let with_verbs: Vec<_> = verbs.clone().filter_map(|name| text(host, &format!("{VERBS}/{name}/ibdev"))).collect();
    let management = names(host, MAD).into_iter().filter(|name| name.starts_with("umad") || name.starts_with("issm"));
    let manager = Some("rdma_cm".to_owned()).filter(|_| host.path(Path::new(RDMA_CM)).exists());
    let missing: Vec<_> =
        verbs.chain(management).chain(manager).filter(|name| !host.path(&PathBuf::from(NODES).join(name)).exists()).collect();
    let mut findings = Vec::new();
    if !missing.is_empty() {
        findings.push(Finding::new(
            Level::Error,
            format!("RDMA: {NODES}"),
            format!("lacks {}: claims of these devices are refused", list(&missing)),
            "udev makes them: `udevadm trigger --subsystem-match=infiniband_verbs --subsystem-match=infiniband_mad \
             --subsystem-match=misc`; in a pod the host's /dev is not seen: run this on the node",
        ));
    }
    let mute: Vec<_> = devices.iter().filter(|name| !with_verbs.contains(name)).cloned().collect();
    if !mute.is_empty() && !with_verbs.is_empty() {
        findings.push(Finding::new(
            Level::Note,
            "RDMA: devices without verbs",
            format!("{}: there is no uverbs of them", list(&mute)),
            "nothing for devices that are but another's half for management; else see the kernel's log for the driver's reason",
        ));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(format!("RDMA: {NODES}"), "complete"));
    }
    findings
}

fn cgroup(host: &Host) -> Finding {
    const SUBJECT: &str = "RDMA: cgroup controller";
    match text(host, "/sys/fs/cgroup/cgroup.controllers") {
        Some(controllers) if controllers.split_whitespace().any(|name| name == "rdma") => Finding::ok(SUBJECT, "rdma is there"),
        Some(_) => {
            let todo = "a kernel with CONFIG_CGROUP_RDMA, and not cgroup_disable=rdma on its command line";
            Finding::new(Level::Note, SUBJECT, "the kernel has none: claims with rdma.limits are refused", todo)
        }
        None => {
            let todo = "systemd.unified_cgroup_hierarchy=1 on the kernel's command line";
            Finding::new(Level::Note, SUBJECT, "no cgroup v2 at /sys/fs/cgroup: claims with rdma.limits are refused", todo)
        }
    }
}

/// RDMA programs lock the memory that devices read and write. Containers inherit the limit of the runtime.
fn locked_memory(host: &Host) -> Vec<Finding> {
    let processes = names(host, "/proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let limits = processes.filter_map(|pid| {
        let name = text(host, &format!("/proc/{pid}/comm")).filter(|name| RUNTIMES.contains(&name.as_str()))?;
        Some((name, locked(&text(host, &format!("/proc/{pid}/limits"))?)?))
    });
    let finding = |(name, limit): (String, String)| {
        let subject = format!("RDMA: locked memory of {name}");
        if limit == "unlimited" {
            return Finding::ok(subject, "unlimited, and so that of containers");
        }
        let found = format!("{limit} bytes, and so that of containers: registering memory fails beyond it");
        let todo = format!(
            "LimitMEMLOCK=infinity in a drop-in of {name}.service, and a restart of {name}; or CAP_IPC_LOCK in the container"
        );
        Finding::new(Level::Warning, subject, found, todo)
    };
    limits.take(RUNTIMES.len()).map(finding).collect()
}

/// The soft limit of `Max locked memory         8388608              8388608              bytes`.
fn locked(limits: &str) -> Option<String> {
    let value = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?.split_whitespace().next()?;
    Some(value.to_owned()).filter(|value| value == "unlimited" || value.bytes().all(|byte| byte.is_ascii_digit()))
}

fn several_ports(host: &Host, devices: &[String]) -> Option<Finding> {
    let ports = |name: &str| names(host, &format!("{DEVICES}/{name}/ports")).len();
    let several: Vec<_> = devices.iter().filter(|name| ports(name) > 1).cloned().collect();
    let found =
        format!("{}: an RDMA device is in one namespace, so the links of all its ports can be only in one pod", list(&several));
    let todo = "claim the links of such a device together, or leave the mode shared";
    (!several.is_empty()).then(|| Finding::new(Level::Note, "RDMA: devices with several ports", found, todo))
}

fn ipoib(host: &Host) -> Option<Finding> {
    let is_ipoib = |name: &String| text(host, &format!("/sys/class/net/{name}/type")).as_deref() == Some(ARPHRD_INFINIBAND);
    let links: Vec<_> = names(host, "/sys/class/net").into_iter().filter(is_ipoib).collect();
    let found = format!(
        "{}: the kernel makes them anew when their RDMA device moves, and the agent gives them their state back",
        list(&links)
    );
    let todo = "--ipoib=ignore (chart: agent.ipoib) where nobody needs them: then the RDMA device is offered without";
    (!links.is_empty()).then(|| Finding::new(Level::Note, "RDMA: IPoIB links", found, todo))
}

fn names(host: &Host, folder: &str) -> Vec<String> {
    host.names(Path::new(folder)).into_iter().filter_map(|name| name.into_string().ok()).collect()
}

fn text(host: &Host, path: &str) -> Option<String> {
    host.text(Path::new(path)).ok().map(|text| text.trim().to_owned())
}

/// Names as one text, the first few of many.
fn list(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| super::text::short(name)).collect();
    let more = names.len().saturating_sub(SHOWN);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_locked_memory_is_read() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         8388608              unlimited     bytes\n";
        assert_eq!(locked(limits).as_deref(), Some("8388608"));
        assert_eq!(locked("Max locked memory  unlimited unlimited bytes").as_deref(), Some("unlimited"));
        for text in ["", "Max locked memory", "Max locked memory lots of it", "Max open files 1 1"] {
            assert_eq!(locked(text), None, "{text}");
        }
    }
}
