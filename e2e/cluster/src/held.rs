//! Pods of a node that stand still between prepare and sandbox: the program that gives a sandbox its network waits. The runtime asks
//! plugins only after that, so a scenario can do there what it likes, and for as long as it likes.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::context::{Context, wait};

/// Takes the place of the CNI plugin. It ends with the runtime that called it: another one begins anew.
const PROGRAM: &str = r#"#!/bin/bash
if [ "$CNI_COMMAND" = ADD ]; then
  echo ";$CNI_ARGS;" >>/run/cni-held/pods
  while [ -e /run/cni-held ]; do
    kill -0 $PPID 2>/dev/null || exit 1
    sleep 0.01
  done
fi
exec "$0.aside"
"#;

/// Sandboxes of a node wait while this is there.
#[derive(Debug)]
pub(crate) struct Held {
    program: PathBuf,
    folder: PathBuf,
}

impl Held {
    pub(crate) fn put(c: &Context, node: &str) -> Result<Self> {
        let root = c.cluster.scratch().join(node).join("root");
        let held = Self { program: root.join("opt/cni/bin/bridge"), folder: root.join("run/cni-held") };
        std::fs::create_dir_all(&held.folder)?;
        if !held.aside().exists() {
            std::fs::rename(&held.program, held.aside()).context("the CNI plugin")?;
        }
        // In one step: a kubelet may be about to start something.
        let new = held.program.with_extension("new");
        std::fs::write(&new, PROGRAM)?;
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755))?;
        std::fs::rename(&new, &held.program)?;
        Ok(held)
    }

    fn aside(&self) -> PathBuf {
        self.program.with_extension("aside")
    }

    /// Waits until the sandbox of this pod waits: its claims are prepared.
    pub(crate) async fn reached(&self, pod: &str) -> Result<()> {
        self.reached_times(pod, 1).await
    }

    /// Waits until that many sandboxes of this pod have come here.
    pub(crate) async fn reached_times(&self, pod: &str, times: usize) -> Result<()> {
        let name = format!(";K8S_POD_NAME={pod};");
        wait(Duration::from_secs(40), &format!("the sandbox of {pod} waits for its network"), || async {
            let pods = std::fs::read_to_string(self.folder.join("pods")).unwrap_or_default();
            let count = pods.lines().filter(|line| line.contains(&name)).count();
            ensure!(count >= times, "seen: {pods}");
            Ok(())
        })
        .await
    }

    /// Lets go what waits.
    pub(crate) fn release(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        // What has called the program already goes on when the folder is gone, and needs the other one until then.
        std::fs::remove_dir_all(&self.folder).ok();
        let copy = self.program.with_extension("new");
        if std::fs::copy(self.aside(), &copy).is_ok() {
            std::fs::rename(copy, &self.program).ok();
        }
    }
}
