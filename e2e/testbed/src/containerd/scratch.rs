//! The folder and the cgroups of a node, and their end.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;

/// In /tmp whatever TMPDIR says: socket paths must stay short, and /run and /var/lib are replaced in the node.
const PARENT: &str = "/tmp";
const PREFIX: &str = "dranic-node-";

/// How long the kernel may take to let go of the cgroups of killed processes.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Younger folders of others are left alone: they may not be locked yet.
const SETTLED: Duration = Duration::from_secs(10);

/// A folder that is removed on drop, together with the cgroup of the same name.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    /// Locked while this process lives; [`sweep`] looks at it.
    _lock: File,
}

impl Scratch {
    /// Makes the folder, and removes those of killed tests.
    pub(super) fn new() -> anyhow::Result<Self> {
        sweep();
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(PARENT).context("scratch folder in /tmp")?;
        let lock = File::open(dir.path())?;
        lock.lock().context("lock the scratch folder")?;
        Ok(Self { path: dir.keep(), _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The cgroup under which all containers' cgroups are, relative to each hierarchy's root.
    pub(super) fn cgroup(&self) -> String {
        format!("/{}", name(&self.path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove_cgroups(&name(&self.path));
        remove(&self.path);
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Removes what tests that were killed (Ctrl-C) left behind; their processes ended with them.
fn sweep() {
    for entry in std::fs::read_dir(PARENT).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let age = entry.metadata().and_then(|data| data.modified()).ok().and_then(|time| time.elapsed().ok());
        if !ours || age.is_none_or(|age| age < SETTLED) {
            continue;
        }
        let Ok(dir) = File::open(entry.path()) else { continue };
        if dir.try_lock().is_ok() {
            remove_cgroups(&name(&entry.path()));
            remove(&entry.path());
        }
    }
}

/// Removes the folder, unless something is mounted in it: then it may hold the host's own folders.
fn remove(scratch: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if mounts.is_empty() || mounts.contains(&*scratch.to_string_lossy()) {
        eprintln!("not removed, for there are mounts in it: {}", scratch.display());
        return;
    }
    if let Err(error) = std::fs::remove_dir_all(scratch) {
        eprintln!("{} stays behind: {error}", scratch.display());
    }
}

/// Removes the cgroup `name` from every hierarchy (the one of v2, or each one of v1). The kernel frees the groups of processes
/// that have just been killed with some delay.
fn remove_cgroups(name: &str) {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    let groups: Vec<PathBuf> = hierarchies.chain([root.to_owned()]).map(|hierarchy| hierarchy.join(name)).collect();
    let end = Instant::now() + END_LIMIT;
    while Instant::now() < end {
        groups.iter().for_each(|group| remove_cgroup(group));
        if !groups.iter().any(|group| group.exists()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("cgroup {name} stays behind");
}

fn remove_cgroup(group: &Path) {
    for child in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if child.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&child.path());
        }
    }
    let _ = std::fs::remove_dir(group); // not yet, or not there: the caller looks
}
