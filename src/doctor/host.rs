//! Files of the host, which may be mounted below another folder, and may be anything.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Largest file that is read, bytes. A full default configuration has 20 KiB.
pub(super) const FILE_MAX: usize = 1 << 20;
/// Most symbolic links on one path, as in the kernel (`MAXSYMLINKS`).
const LINKS_MAX: usize = 40;
/// Most entries of one folder that are looked at.
const ENTRIES_MAX: usize = 4096;

/// Why a file has no text for us.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// It is not there.
    Missing,
    /// It is there, and this is wrong.
    Bad(String),
}

/// The host's files.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// The host whose root is mounted at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where the host's `path` is here. Absolute links of the host lead to the host's files (`/var/run` is one, mostly), and nothing
    /// leads out of the root.
    pub fn path(&self, path: &Path) -> PathBuf {
        if self.root == Path::new("/") {
            return path.to_owned();
        }
        let mut done = PathBuf::new();
        let mut open: VecDeque<OsString> = parts(path).into();
        let mut links = 0;
        while let Some(part) = open.pop_front() {
            if part == ".." {
                done.pop();
                continue;
            }
            let here = self.root.join(&done).join(&part);
            match fs::read_link(&here) {
                Ok(target) if links < LINKS_MAX => {
                    links += 1;
                    if target.is_absolute() {
                        done.clear();
                    }
                    parts(&target).into_iter().rev().for_each(|part| open.push_front(part));
                }
                _ => done.push(part),
            }
        }
        self.root.join(done)
    }

    /// The text of a file of the host.
    pub(super) fn text(&self, path: &Path) -> Result<String, Unread> {
        let bad = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => Unread::Missing,
            _ => Unread::Bad(e.to_string()),
        };
        let here = self.path(path);
        // Opening a pipe would wait for its writer.
        if !fs::metadata(&here).map_err(bad)?.is_file() {
            return Err(Unread::Bad("it is no file".to_owned()));
        }
        let mut bytes = Vec::new();
        fs::File::open(&here).map_err(bad)?.take(FILE_MAX as u64 + 1).read_to_end(&mut bytes).map_err(bad)?;
        if bytes.len() > FILE_MAX {
            return Err(Unread::Bad(format!("it has more than {FILE_MAX} bytes")));
        }
        String::from_utf8(bytes).map_err(|_| Unread::Bad("it is no text".to_owned()))
    }

    /// Names in a folder of the host, sorted; none where it can't be read.
    pub(super) fn names(&self, folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().take(ENTRIES_MAX);
        let mut names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
        names.sort();
        names
    }

    /// The host's paths that match a pattern in which `*` and `?` stand for characters of one name; at most `max`.
    pub(super) fn matching(&self, pattern: &Path, max: usize) -> Vec<PathBuf> {
        let mut found = vec![PathBuf::from("/")];
        for part in parts(pattern) {
            let Some(part) = part.to_str() else { return Vec::new() };
            let next = |folder: &PathBuf| -> Vec<PathBuf> {
                if !part.contains(['*', '?']) {
                    return vec![folder.join(part)];
                }
                let names = self.names(folder).into_iter().filter(|name| name.to_str().is_some_and(|name| fits(part, name)));
                names.map(|name| folder.join(name)).collect()
            };
            found = found.iter().flat_map(next).take(ENTRIES_MAX).collect();
        }
        found.retain(|path| self.path(path).exists());
        found.truncate(max);
        found
    }
}

/// The names of which a path consists, `..` among them.
fn parts(path: &Path) -> Vec<OsString> {
    let is_name = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_name).map(|part| part.as_os_str().to_owned()).collect()
}

/// Whether `name` fits `pattern`. A star that fitted too little is given one character more: no worse than their lengths multiplied.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    (p, n) = (at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}
