//! Limits of the `rdma` cgroup controller (`rdma.max`, `Documentation/admin-guide/cgroup-v2.rst`): one line for each RDMA device.
//!
//! The runtime's plugin asks for one line by the unified map. runc up to 1.1 writes the whole map entry at once, which the kernel refuses
//! when it has several lines; so several are written by the guard, which sees to it in any case that they are there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::config::RdmaLimits;

/// File of the cgroup.
pub const FILE: &str = "rdma.max";
/// Where the cgroup file system is.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Longest file that is read, bytes. A line has some 100, and a node at most a few hundred RDMA devices.
const FILE_MAX: u64 = 64 << 10;

/// The lines for these devices, by name. Where one is there twice (two ports, two requests), the smaller number counts.
#[must_use]
pub fn lines<'a>(limits: impl IntoIterator<Item = (&'a str, &'a RdmaLimits)>) -> Vec<String> {
    let mut all: BTreeMap<&str, RdmaLimits> = BTreeMap::new();
    for (device, limits) in limits {
        let of = all.entry(device).or_default();
        of.hca_handles = [of.hca_handles, limits.hca_handles].into_iter().flatten().min();
        of.hca_objects = [of.hca_objects, limits.hca_objects].into_iter().flatten().min();
    }
    let line = |(device, limits): (&str, RdmaLimits)| {
        let values = [("hca_handle", limits.hca_handles), ("hca_object", limits.hca_objects)];
        let set: Vec<_> = values.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?))).collect();
        (!set.is_empty()).then(|| format!("{device} {}", set.join(" ")))
    };
    all.into_iter().filter_map(line).collect()
}

/// Whether `line` is in force by the content of `rdma.max`.
fn has(content: &str, line: &str) -> bool {
    let mut wanted = line.split_whitespace();
    let device = wanted.next();
    let there = content.lines().map(str::split_whitespace).find_map(|mut words| (words.next() == device).then_some(words));
    let there: Vec<_> = there.into_iter().flatten().collect();
    wanted.all(|value| there.contains(&value))
}

/// Whether pods can have limits, by the controllers that the root of the cgroup file system lists in `file`.
///
/// # Errors
/// Why not, and what to do.
pub fn supported(file: &Path) -> Result<(), String> {
    let controllers = read(file).map_err(|e| {
        format!("the node has no cgroup of version 2 ({}: {e}); boot it with systemd.unified_cgroup_hierarchy=1", file.display())
    })?;
    if controllers.split_whitespace().any(|name| name == "rdma") {
        return Ok(());
    }
    Err(format!(
        "the cgroup controller rdma is not on ({}): it needs a kernel with CONFIG_CGROUP_RDMA and without cgroup_disable=rdma",
        file.display()
    ))
}

/// Sees to it that `lines` are in force for the process, and so for the container that it will be.
///
/// # Errors
/// What is not there or refuses; for people.
pub fn apply(pid: u32, lines: &[String]) -> Result<(), String> {
    if lines.is_empty() {
        return Ok(());
    }
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|e| format!("its cgroup can't be read: {e}"))?;
    let file = file(Path::new(CGROUPS), &cgroup).ok_or("its cgroup is not of version 2, and rdma.limits needs that")?;
    apply_in(&file, lines)
}

/// `rdma.max` of a process, by its `/proc/PID/cgroup`; none where that is not version 2 alone.
fn file(root: &Path, cgroup: &str) -> Option<PathBuf> {
    let mut lines = cgroup.lines();
    let path = lines.next()?.strip_prefix("0::/")?;
    let is_plain = lines.next().is_none() && !path.split('/').any(|part| part == "..");
    is_plain.then(|| root.join(path).join(FILE))
}

fn apply_in(file: &Path, lines: &[String]) -> Result<(), String> {
    let named = |what: &str, error: std::io::Error| {
        format!("limits of RDMA devices can't be {what} ({}): {error}; is the controller rdma on for pods?", file.display())
    };
    let content = read(file).map_err(|e| named("read", e))?;
    for line in lines.iter().filter(|line| !has(&content, line)) {
        write(file, line).map_err(|e| named(&format!("set to {line:?}"), e))?;
    }
    Ok(())
}

fn read(file: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut content = String::new();
    std::fs::File::open(file)?.take(FILE_MAX).read_to_string(&mut content)?;
    Ok(content)
}

fn write(file: &Path, line: &str) -> std::io::Result<()> {
    use std::io::Write;
    // One system call each: the kernel takes one line at a time.
    std::fs::OpenOptions::new().write(true).open(file)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(handles: Option<u32>, objects: Option<u32>) -> RdmaLimits {
        RdmaLimits { hca_handles: handles, hca_objects: objects }
    }

    #[test]
    fn a_line_for_each_device_and_the_smaller_number() {
        let (a, b, c) = (limits(Some(2), Some(2000)), limits(None, Some(7)), limits(Some(9), Some(1)));
        assert_eq!(lines([("mlx5_1", &a), ("mlx5_0", &b)]), ["mlx5_0 hca_object=7", "mlx5_1 hca_handle=2 hca_object=2000"]);
        assert_eq!(lines([("mlx5_0", &a), ("mlx5_0", &c)]), ["mlx5_0 hca_handle=2 hca_object=1"]);
        assert!(lines([("mlx5_0", &limits(None, None))]).is_empty());
    }

    #[test]
    fn what_is_in_force_is_seen() {
        let content = "mlx5_0 hca_handle=2 hca_object=max\nmlx5_00 hca_handle=2 hca_object=5\n";
        assert!(has(content, "mlx5_0 hca_handle=2"));
        assert!(!has(content, "mlx5_0 hca_handle=2 hca_object=5"));
        assert!(has(content, "mlx5_00 hca_object=5") && !has(content, "mlx5_1 hca_handle=2"));
    }

    #[test]
    fn the_file_is_that_of_the_process_in_version_2() {
        let root = Path::new("/cg");
        assert_eq!(file(root, "0::/kubepods/pod1/c\n"), Some("/cg/kubepods/pod1/c/rdma.max".into()));
        assert_eq!(file(root, "0::/\n"), Some("/cg/rdma.max".into()));
        for other in ["", "12:rdma:/x\n0::/x\n", "0::/x\n1:name=systemd:/x\n", "0::/../x\n"] {
            assert_eq!(file(root, other), None, "{other:?}");
        }
    }

    #[test]
    fn what_is_not_in_force_is_written_and_a_missing_controller_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let line = ["mlx5_0 hca_handle=2".to_owned()];
        let error = apply_in(&file, &line).unwrap_err();
        assert!(error.contains("rdma.max") && error.contains("controller rdma"), "{error}");
        std::fs::write(&file, "mlx5_0 hca_handle=max hca_object=max\n").unwrap();
        apply_in(&file, &line).unwrap();
        assert!(std::fs::read_to_string(&file).unwrap().starts_with(&line[0]));
    }
}
