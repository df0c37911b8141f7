//! The reference: a Go process that embeds the runtime side of NRI, driven by lines of JSON.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::{Mutex as AsyncMutex, oneshot};

/// For any command; those that wait for a plugin are bounded by the request's time-out.
const LIMIT: Duration = Duration::from_secs(30);

/// One line of the process's output.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Answer {
    id: u64,
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// Microseconds.
    pub(crate) elapsed: u64,
    #[serde(default)]
    pub(crate) plugins: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) hooks: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) devices: Option<Vec<String>>,
}

type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Answer>>>>;

/// The running process; it is killed when this is dropped.
pub(crate) struct Reference {
    child: AsyncMutex<Child>,
    input: AsyncMutex<ChildStdin>,
    waiting: Waiting,
    next: AtomicU64,
}

impl Reference {
    /// Starts the process. What the adaptation logs goes to the file `log`.
    pub(crate) fn start(program: &Path, log: &Path) -> Result<Self> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log)?;
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("{}", program.display()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else { bail!("no pipes") };
        let waiting = Waiting::default();
        tokio::spawn(read(output, waiting.clone()));
        Ok(Self { child: child.into(), input: input.into(), waiting, next: AtomicU64::new(1) })
    }

    /// One command and its answer; an error in the answer is left to the caller.
    ///
    /// # Errors
    /// If the process is gone or does not answer.
    pub(crate) async fn call(&self, op: &str, mut arguments: Value) -> Result<Answer> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, sender);
        arguments["id"] = json!(id);
        arguments["op"] = json!(op);
        let mut line = arguments.to_string();
        line.push('\n');
        self.input.lock().await.write_all(line.as_bytes()).await.context("the reference is gone")?;
        let answer = tokio::time::timeout(LIMIT, answer).await;
        answer.with_context(|| format!("{op}: no answer within {LIMIT:?}"))?.with_context(|| format!("{op}: the reference ended"))
    }

    /// The same for a command that must succeed.
    ///
    /// # Errors
    /// Also the command's own.
    pub(crate) async fn must(&self, op: &str, arguments: Value) -> Result<Answer> {
        let answer = self.call(op, arguments).await?;
        ensure!(answer.error.is_none(), "{op}: {}", answer.error.unwrap_or_default());
        Ok(answer)
    }

    /// SIGKILL, and waits for the end.
    pub(crate) async fn kill(&self) -> Result<()> {
        Ok(self.child.lock().await.kill().await?)
    }
}

async fn read(output: ChildStdout, waiting: Waiting) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(answer) = serde_json::from_str::<Answer>(&line) else { break };
        if let Some(sender) = waiting.lock().unwrap_or_else(PoisonError::into_inner).remove(&answer.id) {
            // An error means that nobody waits any more.
            let _ = sender.send(answer);
        }
    }
    waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
