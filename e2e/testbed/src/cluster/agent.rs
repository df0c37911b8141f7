//! The agent as a process on a scratch node.

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dranic::agent::status::Status;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{NODE, Options};
use crate::fabric::{Node, NodeCommand};

/// A running agent. Killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
}

impl Agent {
    pub(super) fn spawn(options: &Options, node: &Node, dir: &Path, nri_socket: &Path) -> Result<Self> {
        let log = if options.deaf_log {
            // Never read, and full after 64 KiB.
            let (reader, writer) = std::io::pipe()?;
            std::mem::forget(reader);
            Stdio::from(writer)
        } else {
            File::options().create(true).append(true).open(dir.join("agent.log"))?.into()
        };
        let mut command = Command::new(&options.program);
        command
            .arg("agent")
            .args(["--node-name", NODE, "--driver-name", &options.driver, "--offer-veth", "--http-address", "127.0.0.1:9177"])
            .arg("--kubeconfig")
            .arg(dir.join("kubeconfig"))
            .arg("--kubelet-root")
            .arg(dir.join("kubelet"))
            .arg("--nri-socket")
            .arg(nri_socket)
            .arg("--state-dir")
            .arg(dir.join("state"))
            .arg("--cdi-dir")
            .arg(dir.join("cdi"))
            .arg("--netns-dir")
            .arg(dir.join("netns"))
            .arg("--status-socket")
            .arg(dir.join("status.sock"))
            .args(&options.arguments)
            .env("DRANIC_LOG", std::env::var("DRANIC_LOG").unwrap_or_else(|_| "info".to_owned()))
            // So that refusals are quick; a flag among the arguments wins.
            .env("DRANIC_WAIT_FOR_DEVICE", "0")
            .env("DRANIC_GUARD_DIR", guard_dir(&options.program, dir))
            .env_remove("POD_UID")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = NodeCommand::spawn(node, &mut command).with_context(|| format!("running {}", options.program.display()))?;
        Ok(Self { child })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// When it has ended before.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("killing the agent")?;
        self.child.wait().context("waiting for the agent")?;
        Ok(())
    }

    /// SIGTERM; gives how it ended and how long that took.
    ///
    /// # Errors
    /// When it takes longer than 15 s.
    pub fn terminate(mut self) -> Result<(ExitStatus, Duration)> {
        let begin = Instant::now();
        self.signal(Signal::SIGTERM)?;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok((status, begin.elapsed()));
            }
            if begin.elapsed() > Duration::from_secs(15) {
                bail!("the agent does not end");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Any signal, for example SIGSTOP.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.child.id())?);
        kill(pid, signal).with_context(|| format!("{signal} to the agent"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One for all nodes of a build: the guard is put there once, not by each test. Without a guard beside the program the test has none.
fn guard_dir(program: &Path, dir: &Path) -> PathBuf {
    match program.parent() {
        Some(built) if built.join("dranic-guard").exists() => built.join("guard"),
        _ => dir.join("guard"),
    }
}

/// Asks the status socket.
pub(super) fn status(socket: &Path) -> Result<Status> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}
