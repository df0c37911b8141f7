//! Sockets, folders and programs on the node.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs};
use nix::sys::statvfs::{FsFlags, statvfs};

use super::{Finding, Host, Level, Options};

/// Name of the guard's program.
const GUARD: &str = "dranic-guard";

pub(super) fn look(host: &Host, options: &Options) -> Vec<Finding> {
    let mut findings = Vec::new();
    if options.uses_nri {
        findings.push(socket(host, &options.nri_socket));
    }
    match &options.guard_dir {
        None => {
            findings.push(Finding::new(Level::Note, "guard", "none (--guard-dir is empty)", "containers are gated by NRI alone"))
        }
        Some(dir) => findings.extend(guard(host, dir)),
    }
    findings.extend(ledger(host, &options.state_dir));
    findings
}

fn socket(host: &Host, path: &Path) -> Finding {
    let subject = format!("NRI socket {}", path.display());
    match fs::metadata(host.path(path)) {
        Ok(file) if file.file_type().is_socket() => Finding::ok(subject, "there"),
        Ok(_) => Finding::new(Level::Error, subject, "it is no socket", "remove it, and restart the container runtime"),
        Err(why) => {
            let todo = "turn NRI on in the container runtime (docs/install.md); in a pod, mount its folder";
            Finding::new(Level::Error, subject, why.to_string(), todo)
        }
    }
}

fn guard(host: &Host, dir: &Path) -> Vec<Finding> {
    let path = dir.join(GUARD);
    let subject = format!("guard {}", path.display());
    let here = host.path(&path);
    let file = match fs::metadata(&here) {
        Ok(file) if file.is_file() => file,
        Ok(_) => {
            return vec![Finding::new(
                Level::Error,
                subject,
                "it is no file",
                "remove it; the agent puts the guard there when it starts",
            )];
        }
        Err(why) => {
            let todo = "the agent puts it there when it starts; its log says why it could not";
            return vec![Finding::new(Level::Error, subject, why.to_string(), todo)];
        }
    };
    let mut findings = Vec::new();
    let mut wrong = |found: String, todo: &str| findings.push(Finding::new(Level::Error, &subject, found, todo));
    if file.mode() & 0o111 == 0 {
        wrong(format!("not executable (mode {:04o})", file.mode() & 0o7777), "chmod 0755, or restart the agent");
    }
    for (what, found) in [(&path, Some(file)), (&dir.to_owned(), fs::metadata(host.path(dir)).ok())] {
        if let Some(why) = found.and_then(|found| changeable(&found)) {
            wrong(format!("{} {why}: the container runtime runs it as root", what.display()), "chown root, chmod go-w");
        }
    }
    // What it says is of the mount as seen from here, which in a pod may be another one than the runtime's.
    if statvfs(&here).is_ok_and(|mount| mount.flags().contains(FsFlags::ST_NOEXEC)) {
        wrong("its file system is mounted noexec".to_owned(), "another --guard-dir, on a file system that programs can run from");
    }
    if findings.is_empty() {
        findings.push(Finding::ok(subject, "there, executable, of root"));
    }
    findings
}

/// Why somebody but root can change it.
fn changeable(found: &Metadata) -> Option<String> {
    let mode = found.mode() & 0o7777;
    if found.uid() != 0 {
        return Some(format!("belongs to user {}", found.uid()));
    }
    // Where only the owner may remove files, others can't put theirs in place of one.
    (mode & 0o022 != 0 && mode & 0o1000 == 0).then(|| format!("can be written by others (mode {mode:04o})"))
}

fn ledger(host: &Host, dir: &Path) -> Vec<Finding> {
    let subject = format!("ledger {}", dir.display());
    let here = host.path(dir);
    let folder = match fs::metadata(&here) {
        Ok(folder) if folder.is_dir() => folder,
        Ok(_) => return vec![Finding::new(Level::Error, subject, "it is no folder", "another --state-dir")],
        Err(why) => {
            let todo = "the agent makes it when it starts; is --state-dir right?";
            return vec![Finding::new(Level::Warning, subject, why.to_string(), todo)];
        }
    };
    let mut findings = Vec::new();
    let mode = folder.mode() & 0o777;
    if let Some(why) = changeable(&folder) {
        let found = format!("{why}: what is known of NICs can be taken away");
        findings.push(Finding::new(Level::Warning, &subject, found, "chown root, chmod 0700"));
    } else if mode & 0o077 != 0 {
        let found = format!("mode {mode:04o}: others can see which claims there are; the records are for root only");
        findings.push(Finding::new(Level::Note, &subject, found, "chmod 0700, if that matters"));
    }
    let kind = statfs(&here).map(|mount| mount.filesystem_type());
    let lost = match kind {
        Ok(TMPFS_MAGIC) => Some("in memory: after a reboot nobody knows what NICs were on the host"),
        Ok(OVERLAYFS_SUPER_MAGIC) => Some("in a container's own layer: it goes with the container"),
        _ => None,
    };
    if let Some(found) = lost {
        findings.push(Finding::new(Level::Note, &subject, found, "a folder on a disk (--state-dir; chart: agent.stateDir)"));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(subject, "there, for root only, on a disk"));
    }
    findings
}
