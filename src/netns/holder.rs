//! Processes in a network namespace, by which it is found when nothing else leads there any more.

use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::NetnsId;

/// Longest text read from one file of a process, bytes.
const FILE_MAX: u64 = 4096;
/// Digits of a container's id, as containerd and CRI-O make them: SHA-256 in hex.
const ID_DIGITS: usize = 64;

/// A process that keeps a namespace alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its process id, as seen from here.
    pub pid: u32,
    /// Name of its program (`/proc/PID/comm`).
    pub command: String,
    /// Id of its container, where its cgroup says so.
    pub container: Option<String>,
    /// Path of its namespace: leads there as long as it lives.
    pub path: PathBuf,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.command)?;
        match &self.container {
            Some(id) => write!(f, " of container {id}"),
            None => f.write_str(" of no container"),
        }
    }
}

/// The first process below `proc` (`/proc`) that is in the namespace `id`; none when there is none, or none that may be looked at: that
/// takes the host's processes (`hostPID`) and `CAP_SYS_PTRACE`.
#[must_use]
pub fn find(proc: &Path, id: NetnsId) -> Option<Holder> {
    let mut pids: Vec<u32> =
        std::fs::read_dir(proc).ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids.into_iter().find_map(|pid| {
        let folder = proc.join(pid.to_string());
        let path = folder.join("ns/net");
        let meta = std::fs::metadata(&path).ok()?;
        let is_in_it = NetnsId { dev: meta.dev(), ino: meta.ino() } == id;
        is_in_it.then(|| Holder { pid, command: command(&folder), container: container(&read(&folder.join("cgroup"))), path })
    })
}

fn command(folder: &Path) -> String {
    // A process gives itself any name.
    read(&folder.join("comm")).chars().filter(|c| !c.is_control()).take(32).collect()
}

/// The container's id in the paths of `/proc/PID/cgroup`: the innermost part that has one.
fn container(cgroups: &str) -> Option<String> {
    let parts = cgroups.lines().flat_map(|line| line.rsplit('/'));
    parts.flat_map(|part| part.split(|c: char| !c.is_ascii_alphanumeric())).find(|word| is_id(word)).map(str::to_owned)
}

fn is_id(word: &str) -> bool {
    word.len() == ID_DIGITS && word.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn read(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(FILE_MAX).read_to_end(&mut bytes));
    read.map(|_| String::from_utf8_lossy(&bytes).trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::netns::Netns;

    #[test]
    fn a_container_is_known_by_its_cgroup() {
        let id = "0123456789abcdef".repeat(4);
        for text in [
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope"),
            format!("12:cpu:/\n3:pids:/kubepods/besteffort/pod1/{id}\n"),
            format!("0::/kubepods.slice/crio-{id}.scope/container"),
        ] {
            assert_eq!(container(&text).as_ref(), Some(&id), "{text}");
        }
        for text in ["", "0::/", "0::/user.slice/session-1.scope", "0::/kubepods/pod1/0123456789abcdef"] {
            assert_eq!(container(text), None, "{text}");
        }
    }

    #[test]
    fn a_process_in_a_namespace_is_found_as_long_as_it_lives() {
        let mut child = match Command::new("unshare")
            .args(["--net", "sh", "-c", "echo; read -r end"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        {
            Ok(child) if nix::unistd::geteuid().is_root() => child,
            _ => {
                eprintln!("skipped: needs root and unshare");
                return;
            }
        };
        let mut line = [0; 1];
        child.stdout.take().unwrap().read_exact(&mut line).unwrap();
        let netns = Netns::open(Path::new(&format!("/proc/{}/ns/net", child.id()))).unwrap();
        let found = find(Path::new("/proc"), netns.id()).unwrap();
        assert_eq!((found.pid, found.command.as_str()), (child.id(), "sh"));
        assert_eq!(Netns::open(&found.path).unwrap().id(), netns.id());
        assert!(found.to_string().starts_with(&format!("process {} (sh) of ", child.id())), "{found}");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(find(Path::new("/proc"), netns.id()), None);
        assert_eq!(find(Path::new("/nowhere"), netns.id()), None);
    }
}
