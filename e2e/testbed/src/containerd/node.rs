//! The scratch node: namespaces of its own around everything, and a folder that holds all state.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Kit;
use super::scratch::Scratch;

const SCRIPT: &str = include_str!("node.sh");

/// How long the node may take to end by itself.
const END_LIMIT: Duration = Duration::from_secs(5);

/// A set of namespaces (mount, net, pid, uts, ipc) held by one process whose end is the end of all that runs in them.
#[derive(Debug)]
pub(super) struct Node {
    /// `unshare`; in the node's namespaces itself, but for the pid namespace.
    process: Child,
    scratch: Scratch,
}

impl Node {
    /// Makes the scratch folder, lets `fill` put configuration there, and starts the node.
    pub(super) fn start(kit: &Kit, fill: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<Self> {
        let scratch = Scratch::new()?;
        fill(scratch.path())?;
        Ok(Self { process: spawn(kit, scratch.path())?, scratch })
    }

    pub(super) fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// The handle of one of the node's namespaces: `net`, `mnt`, `pid_for_children`, ...
    pub(super) fn namespace(&self, kind: &str) -> PathBuf {
        self.namespaces().join(kind)
    }

    /// The folder of the node's namespaces.
    pub(super) fn namespaces(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns", self.process.id()))
    }

    /// The cgroup under which all containers' cgroups are, relative to each hierarchy's root.
    pub(super) fn cgroup(&self) -> String {
        self.scratch.cgroup()
    }

    /// How the node ended, if it did.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.process.try_wait()?)
    }

    /// The host's pids of all processes in the node.
    pub(super) fn processes(&self) -> Vec<u32> {
        let Ok(ours) = std::fs::read_link(self.namespace("pid_for_children")) else { return Vec::new() };
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        processes
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid: &u32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|theirs| theirs == ours))
            .collect()
    }

    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        for (option, kind) in [("mount", "mnt"), ("net", "net"), ("pid", "pid_for_children"), ("uts", "uts"), ("ipc", "ipc")] {
            command.arg(format!("--{option}={}", self.namespace(kind).display()));
        }
        // nsenter forks to get into the pid namespace: without a parent-death signal, killing it would leave the program behind.
        // (Killed within the first millisecond it may still do so, until the node ends.)
        command.args(["--", "setpriv", "--pdeathsig", "KILL", "--"]).arg(program);
        command
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.process.stdin.take()); // process 1 sees it and ends; the kernel then kills all the others, and unshare returns
        if !wait(&mut self.process) {
            let _ = self.process.kill(); // takes process 1 with it (--kill-child)
            let _ = self.process.wait();
        }
    }
}

fn spawn(kit: &Kit, scratch: &Path) -> anyhow::Result<Child> {
    let log = File::create(scratch.join("node.log"))?;
    Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child=KILL", "--mount-proc", "--"])
        .args(["sh", "-c", SCRIPT, "node"])
        .args([scratch, kit.dir()])
        .current_dir("/")
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("unshare (package util-linux)")
}

fn wait(process: &mut Child) -> bool {
    let end = Instant::now() + END_LIMIT;
    while Instant::now() < end {
        if !matches!(process.try_wait(), Ok(None)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Asks the program that [`Node::command`] started to end (SIGTERM), and waits for it.
pub(super) fn terminate(process: &mut Child, limit: Duration) -> anyhow::Result<ExitStatus> {
    let nsenter = process.id();
    let program = child_of(nsenter).with_context(|| format!("nsenter {nsenter} has no program (ended already?)"))?;
    kill(Pid::from_raw(program), Signal::SIGTERM).context("SIGTERM")?;
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= end {
            let _ = process.kill();
            let _ = process.wait();
            bail!("still running {limit:?} after SIGTERM, killed");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The first process whose parent is `parent`.
fn child_of(parent: u32) -> Option<i32> {
    let processes = std::fs::read_dir("/proc").ok()?;
    processes.flatten().find_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        // pid (name) state parent ...; the name may hold anything, so count from its end
        let parent_field = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
        (parent_field == parent.to_string()).then_some(pid)
    })
}
