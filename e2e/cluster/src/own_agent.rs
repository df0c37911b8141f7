//! An agent with flags and environment of a scenario's own on one node, in place of the node's.

use anyhow::Result;

use crate::cluster::{Cluster, output};
use crate::context::Context;

/// It is there until this ends or is dropped.
pub(crate) struct OwnAgent {
    cluster: Cluster,
    node: String,
    ended: bool,
}

impl OwnAgent {
    /// The node's own agent leaves; another one starts with `flags` and `environment` (`NAME=value`) beside what all have.
    pub(crate) async fn start(c: &Context, node: &str, flags: &[&str], environment: &[&str]) -> Result<Self> {
        let own = Self { cluster: c.cluster.clone(), node: node.to_owned(), ended: false };
        let mut start = c.cluster.script("own-agent.sh");
        start.args([node, "start"]).env("AGENT_ARGS", flags.join(" ")).env("AGENT_ENV", environment.join("\n"));
        output(&mut start).await?;
        c.agent_ready(node).await?;
        Ok(own)
    }

    /// The node's own agent again.
    pub(crate) async fn end(mut self, c: &Context) -> Result<()> {
        self.ended = true;
        output(self.cluster.script("own-agent.sh").args([self.node.as_str(), "back"])).await?;
        c.agent_ready(&self.node).await
    }
}

impl Drop for OwnAgent {
    fn drop(&mut self) {
        if !self.ended {
            // A scenario that failed or ran out of time: nobody can wait here. The runner waits until the node is as it was.
            let done = self.cluster.script("own-agent.sh").as_std_mut().args([self.node.as_str(), "back"]).status();
            if !done.as_ref().is_ok_and(std::process::ExitStatus::success) {
                eprintln!("the agent of {} could not be brought back: {done:?}", self.node);
            }
        }
    }
}
