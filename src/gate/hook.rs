//! How the guard is called, for CDI specs and for containers that get it from the runtime's plugin.

use std::path::PathBuf;
use std::time::Duration;

use super::args;
use crate::names::{ClaimUid, PodUid, SandboxId};

/// Name of the program, on the host and beside the agent's.
pub const PROGRAM: &str = "dranic-guard";
/// The OCI runtime ends a hook that takes so much longer than its own bound: so that the message is ours.
pub const GRACE: Duration = Duration::from_secs(5);

/// An OCI hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// The program, on the host.
    pub path: PathBuf,
    /// All arguments, the program's name first.
    pub args: Vec<String>,
    /// When the OCI runtime ends it; whole seconds.
    pub timeout: Duration,
}

/// A guard that is installed and was seen to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuardUse {
    /// The program, on the host.
    pub program: PathBuf,
    /// Driver name.
    pub driver: String,
    /// Folder of the ledger, on the host.
    pub state_dir: PathBuf,
    /// The agent's socket for guards, on the host.
    pub socket: PathBuf,
    /// How long it waits.
    pub wait: Duration,
}

impl GuardUse {
    /// The hook for a container that uses `claims`, or for one of the pod and sandbox where those are known, or for both.
    #[must_use]
    pub fn hook(&self, claims: &[ClaimUid], pod: Option<(&PodUid, &SandboxId)>) -> Hook {
        let mut args = vec![PROGRAM.to_owned()];
        let mut flag = |flag: &str, value: String| args.extend([flag.to_owned(), value]);
        flag("--driver", self.driver.clone());
        flag("--state-dir", self.state_dir.to_string_lossy().into_owned());
        flag("--socket", self.socket.to_string_lossy().into_owned());
        if self.wait != args::WAIT {
            flag("--wait", self.wait.as_secs().to_string());
        }
        for claim in claims {
            flag("--claim", claim.to_string());
        }
        if let Some((pod, sandbox)) = pod {
            flag("--pod", pod.to_string());
            flag("--sandbox", sandbox.to_string());
        }
        Hook { path: self.program.clone(), args, timeout: self.wait + GRACE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::args::{Command, parse};

    #[test]
    fn the_guard_reads_what_the_agent_writes() {
        let guard = GuardUse {
            program: "/opt/dranic-guard".into(),
            driver: "dra.net".to_owned(),
            state_dir: "/var/lib/dranic".into(),
            socket: "/run/dranic/gate.sock".into(),
            wait: Duration::from_secs(9),
        };
        let (claim, pod, sandbox) = (ClaimUid::new("c").unwrap(), PodUid::new("p").unwrap(), SandboxId::new("s").unwrap());
        let hook = guard.hook(std::slice::from_ref(&claim), Some((&pod, &sandbox)));
        assert_eq!((hook.path.to_str(), hook.timeout), (Some("/opt/dranic-guard"), Duration::from_secs(14)));
        let Ok(Command::Guard(read)) = parse(hook.args.into_iter().skip(1).map(Into::into)) else { panic!("not read") };
        assert_eq!(
            (read.driver, read.state_dir, read.socket),
            (guard.driver.clone(), guard.state_dir.clone(), guard.socket.clone())
        );
        assert_eq!((read.wait, read.claims, read.pod, read.sandbox), (guard.wait, vec![claim], Some(pod), Some(sandbox)));
        let hook = GuardUse { wait: args::WAIT, ..guard }.hook(&[], None);
        assert!(!hook.args.iter().any(|arg| arg == "--wait" || arg == "--pod"), "{hook:?}");
    }
}
