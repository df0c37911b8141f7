//! Runs `dranic-verbs` in a pod's network namespace.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::names::RdmaDeviceName;
use crate::netns::Netns;
use crate::rdma::opened::Answer;

/// The program's name, beside ours.
pub const PROGRAM: &str = "dranic-verbs";
/// How long it may take: opening an mlx5 takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
/// How long its end is waited for after it was killed.
const KILLED: Duration = Duration::from_secs(1);
/// Longest answer that is read, bytes: 256 GIDs of at most 90 each.
const ANSWER_MAX: u64 = 64 << 10;
/// Programs that hang in the kernel and can't be ended; with so many no more are started.
const HUNG_MAX: usize = 4;

/// Opens RDMA devices by verbs, where the program for that is there.
#[derive(Debug)]
pub struct Verbs {
    program: Option<PathBuf>,
    hung: AtomicUsize,
}

impl Verbs {
    /// Without a program nothing is opened.
    #[must_use]
    pub fn new(program: Option<PathBuf>) -> Self {
        Self { program, hung: AtomicUsize::new(0) }
    }

    /// The program beside this one, if there is one.
    #[must_use]
    pub fn beside_us() -> Option<PathBuf> {
        let program = std::env::current_exe().ok()?.with_file_name(PROGRAM);
        program.is_file().then_some(program)
    }

    /// Opens and closes the device in `netns`; false where there is no program for it. Blocks for up to 6 s.
    ///
    /// # Errors
    /// Why it can't be opened, and what to do.
    pub fn open(&self, netns: &Netns, device: &RdmaDeviceName, port: u32) -> Result<bool, String> {
        let Some(program) = &self.program else { return Ok(false) };
        let failed = |why: String| format!("{device} can't be opened by verbs: {why}");
        if self.hung.load(Ordering::Relaxed) >= HUNG_MAX {
            return Err(failed(format!(
                "not tried, since {HUNG_MAX} programs that opened devices hang in the kernel; see dmesg"
            )));
        }
        let arguments = ["--device".to_owned(), device.to_string(), "--port".to_owned(), port.to_string()];
        let answer = self.ask(program, netns, &arguments, LIMIT).map_err(failed)?;
        answer.problem().map_or(Ok(true), |why| Err(failed(why)))
    }

    fn ask(&self, program: &Path, netns: &Netns, arguments: &[String], limit: Duration) -> Result<Answer, String> {
        let shown = program.display();
        let end = Instant::now() + limit;
        // A process begins in the network namespace of the thread that makes it.
        let spawned = netns.run(|| spawn(program, arguments)).map_err(|e| e.to_string())?;
        let mut child = spawned.map_err(|e| format!("{shown} can't be run: {e}"))?;
        let Some(status) = wait(&mut child, end) else {
            self.kill(&mut child);
            return Err(format!("{shown} did not end within {} s; see dmesg", limit.as_secs()));
        };
        let mut said = Vec::new();
        // It has ended, so what it said is there.
        if let Some(out) = child.stdout.take() {
            out.take(ANSWER_MAX).read_to_end(&mut said).map_err(|e| e.to_string())?;
        }
        serde_json::from_slice(&said).map_err(|_| format!("{shown} ended with {status} and said nothing that is understood"))
    }

    fn kill(&self, child: &mut Child) {
        if child.kill().is_ok() && wait(child, Instant::now() + KILLED).is_some() {
            return;
        }
        tracing::error!(pid = child.id(), "dranic-verbs hangs in the kernel and can't be ended");
        self.hung.fetch_add(1, Ordering::Relaxed);
    }
}

fn spawn(program: &Path, arguments: &[String]) -> std::io::Result<Child> {
    let mut command = Command::new(program);
    command.args(arguments).env_clear().current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut tries = 20;
    loop {
        match command.spawn() {
            // Another thread was making a process while the file was written, and that one has it open for a moment more.
            Err(e) if e.kind() == ErrorKind::ExecutableFileBusy && tries > 0 => std::thread::sleep(Duration::from_millis(10)),
            other => return other,
        }
        tries -= 1;
    }
}

fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    let mut pause = Duration::from_millis(1);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < end => std::thread::sleep(pause),
            _ => return None,
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(text: &str) -> (tempfile::TempDir, Verbs) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PROGRAM);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        (dir, Verbs::new(Some(path)))
    }

    fn open(verbs: &Verbs) -> Result<bool, String> {
        verbs.open(&Netns::current().unwrap(), &RdmaDeviceName::new("mlx5_0").unwrap(), 1)
    }

    fn root() -> bool {
        let root = nix::unistd::geteuid().is_root();
        if !root {
            println!("skipped: needs root");
        }
        root
    }

    #[test]
    fn its_answer_counts_and_nothing_else() {
        assert_eq!(open(&Verbs::new(None)), Ok(false));
        if !root() {
            return;
        }
        let opened = r#"{"opened":{"device":"mlx5_0","port":1,"nodeGuid":7,"state":4,"linkLayer":2,"gids":[]}}"#;
        let (_dir, verbs) = script(&format!(r#"[ "$*" = "--device mlx5_0 --port 1" ] && echo '{opened}'"#));
        assert_eq!(open(&verbs), Ok(true));
        let failed = r#"{"failed":{"why":"opening the device: no","errno":1,"hint":"do this"}}"#;
        let (_dir, verbs) = script(&format!("echo '{failed}'; exit 1"));
        assert_eq!(open(&verbs).unwrap_err(), "mlx5_0 can't be opened by verbs: opening the device: no; do this");
        let (_dir, verbs) = script("kill -SEGV $$");
        assert!(open(&verbs).unwrap_err().contains("signal: 11"));
        let missing = Verbs::new(Some("/nowhere/dranic-verbs".into()));
        assert!(open(&missing).unwrap_err().contains("can't be run"));
    }

    #[test]
    fn one_that_does_not_end_is_killed() {
        if !root() {
            return;
        }
        let (_dir, verbs) = script("exec sleep 60");
        let program = verbs.program.clone().unwrap();
        let begin = Instant::now();
        let why = verbs.ask(&program, &Netns::current().unwrap(), &[], Duration::from_millis(200)).unwrap_err();
        assert!(why.contains("did not end") && begin.elapsed() < Duration::from_secs(20), "{why}");
        assert_eq!(verbs.hung.load(Ordering::Relaxed), 0);
    }
}
