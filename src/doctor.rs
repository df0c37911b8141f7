//! What an operator can get wrong on a node, looked at without changing anything: `dranic doctor`.
//!
//! Whatever is read here (configuration, folders, the agent's answer) may be missing, damaged or hostile: then that is the finding.

mod agent;
mod containerd;
mod crio;
mod duration;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod host;
mod kernel;
mod node;
mod rdma;
mod runtime;
mod text;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use serde::Serialize;

pub use host::Host;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing.
    Note,
    /// Works, and will not in some case.
    Warning,
    /// Does not work.
    Error,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub level: Level,
    /// What was looked at.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do; none where nothing is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub todo: Option<String>,
}

impl Finding {
    fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), found: found.into(), todo: None }
    }

    fn new(level: Level, subject: impl Into<String>, found: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { level, subject: subject.into(), found: found.into(), todo: Some(todo.into()) }
    }
}

/// What the agent of this node is given, as far as it matters here, and where to look.
#[derive(Debug, Clone)]
pub struct Options {
    /// Configuration of containerd.
    pub containerd_config: PathBuf,
    /// Configuration of CRI-O; more in the folder of that name with `.d` at its end.
    pub crio_config: PathBuf,
    /// Driver name, which is the name of the NRI plugin.
    pub driver_name: String,
    /// NRI plugin index.
    pub nri_index: String,
    /// Whether the agent uses NRI.
    pub uses_nri: bool,
    /// NRI socket.
    pub nri_socket: PathBuf,
    /// Folder of CDI specs.
    pub cdi_dir: PathBuf,
    /// Folder of the ledger.
    pub state_dir: PathBuf,
    /// Folder of the guard; none where the agent has none.
    pub guard_dir: Option<PathBuf>,
}

/// Looks at everything. `agent` is the agent's answer to `dranic status`, or why there is none.
#[must_use]
pub fn examine(host: &Host, options: &Options, agent: &Result<String, String>) -> Vec<Finding> {
    let (status, mut findings) = agent::look(agent, options);
    let settings = [
        containerd::load(host, &options.containerd_config, status.runtime.as_deref()),
        crio::load(host, &options.crio_config, status.runtime.as_deref()),
    ];
    let mut known = false;
    for (settings, faults) in settings.into_iter().flatten() {
        known = true;
        findings.extend(faults);
        findings.extend(runtime::judge(&settings, options, status.connected));
    }
    if !known {
        findings.push(Finding::new(
            Level::Note,
            "configuration of the container runtime",
            format!(
                "neither {} nor {} is there: the runtime has its defaults, or its configuration is elsewhere",
                options.containerd_config.display(),
                options.crio_config.display()
            ),
            "in the agent's pod the host's /etc is not mounted: run this on the node, or with --root where the host is mounted",
        ));
    }
    findings.extend(node::look(host, options));
    findings.extend(kernel::look(host));
    findings.extend(rdma::look(host));
    findings
}
