//! Files of a bpffs, which keep programs and links alive while no process has them open.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::sys;

/// Where a bpffs is by convention.
pub const BPFFS: &str = "/sys/fs/bpf";
/// How deep folders are followed, and how many files are looked at: a node of a large cluster network has some thousands.
const DEPTH: usize = 16;
/// See [`DEPTH`].
const FILES: usize = 100_000;
/// What a link that is made anew is called until it takes the place of the old one. A bpffs allows no dot.
const NEW: &str = "_dranic";

/// Whether `dir` is on a bpffs.
#[must_use]
pub fn is_bpffs(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

/// The files that hold links with these numbers, in every bpffs that is mounted here. What can't be read is passed over.
#[must_use]
pub fn of_links(ids: &BTreeSet<u32>) -> BTreeMap<u32, Vec<PathBuf>> {
    let mut found: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    let mut left = FILES;
    for root in mounted() {
        walk(&root, DEPTH, &mut left, &mut |path| {
            if let Some(id) = link_at(path).map(|info| info.id).filter(|id| ids.contains(id)) {
                found.entry(id).or_default().push(path.to_owned());
            }
        });
    }
    if left == 0 {
        tracing::warn!(files = FILES, "there are more files of bpf than are looked at; some links may seem to have none");
    }
    found.values_mut().for_each(|files| files.sort());
    found
}

/// The link that the file holds; none when it holds something else, or nothing.
pub(super) fn link_at(path: &Path) -> Option<sys::LinkInfo> {
    let fd = sys::open_pin(path).ok()?;
    let what = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    if what.as_os_str() != "anon_inode:bpf_link" && what.as_os_str() != "anon_inode:bpf-link" {
        return None;
    }
    sys::link_info(&fd).ok()
}

/// Where a bpffs is mounted, each once.
fn mounted() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let (mut seen, mut roots) = (BTreeSet::new(), Vec::new());
    for line in text.lines() {
        // "36 35 0:31 / /sys/fs/bpf rw,… - bpf bpf rw": identity, root within it, where.
        let Some((mount, kind)) = line.split_once(" - ") else { continue };
        let fields: Vec<&str> = mount.split(' ').collect();
        if let ([_, _, device, root, at, ..], true) = (&fields[..], kind.starts_with("bpf "))
            && seen.insert((*device, *root))
        {
            roots.push(PathBuf::from(unescape(at)));
        }
    }
    roots
}

/// Blanks and the like are octal in there.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

fn walk(dir: &Path, depth: usize, left: &mut usize, look: &mut impl FnMut(&Path)) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if *left == 0 {
            return;
        }
        *left -= 1;
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth > 0 => walk(&entry.path(), depth - 1, left, look),
            Ok(kind) if kind.is_file() => look(&entry.path()),
            _ => {}
        }
    }
}

/// Keeps `object` by a file of a bpffs; folders are made, for root only.
///
/// # Errors
/// The system's.
pub fn keep(object: &impl AsFd, path: &Path) -> io::Result<()> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    sys::pin(object, path)
}

/// Makes the file at `path` hold `link` instead of what it holds, with the same owner and mode. Nobody sees it without one.
pub(super) fn replace(link: &impl AsFd, path: &Path) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    let new = temporary(path);
    sys::pin(link, &new)?;
    std::os::unix::fs::chown(&new, Some(meta.uid()), Some(meta.gid()))?;
    fs::set_permissions(&new, meta.permissions())?;
    crate::crash::point("unprepare: program link pinned");
    fs::rename(&new, path)
}

/// Where [`replace`] has the new link first.
pub(super) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().map(OsString::from).unwrap_or_default();
    name.push(NEW);
    path.with_file_name(name)
}
