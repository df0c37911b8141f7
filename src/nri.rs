//! The runtime's side: mux, ttrpc session, deadlines, and the sandbox hooks as a trait.
//!
//! Knows the protocol, nothing of netlink and nothing of claims.

pub mod dispatch;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod hook;
pub mod mux;
pub mod session;
mod wire;

use std::collections::BTreeMap;
use std::future::Future;
use std::time::Instant;

/// Generated from `proto/nri.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/nri/nri.pkg.api.v1alpha1.rs"));
}

/// A pod sandbox as a hook sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sandbox {
    /// The runtime's id.
    pub id: String,
    /// Pod name.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod UID.
    pub uid: String,
    /// Path of the network namespace; none for a pod on the host's network, and in some runtimes' Stop and Remove.
    pub netns: Option<String>,
    /// The runtime names no namespace at all. Killed while it made the sandbox, it has lost what it knew of them.
    pub lost: bool,
    /// Addresses of the pod on the pod network.
    pub ips: Vec<String>,
    /// Process id of the pause container, 0 where unknown.
    pub pid: u32,
}

/// A container as a hook sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Container {
    /// The runtime's id.
    pub id: String,
    /// Id of its sandbox.
    pub sandbox: String,
    /// Name in the pod.
    pub name: String,
    /// Its environment, as `NAME=value`, with what CDI devices brought.
    pub env: Vec<String>,
    /// Fully qualified CDI names it was given (runtimes with NRI 0.12 or later).
    pub cdi_devices: Vec<String>,
    /// Programs that the OCI runtime is to run at `createRuntime`, by CDI or by plugins that were asked before us.
    pub create_runtime: Vec<String>,
    /// `ContainerState`: 1 created, 2 paused, 3 running, 4 stopped.
    pub state: i32,
}

/// A program that the OCI runtime runs at `createRuntime`: on the host, when the container's namespaces are made and nothing of it runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OciHook {
    /// Absolute, on the host.
    pub path: String,
    /// With the program's name first.
    pub args: Vec<String>,
    /// Seconds.
    pub timeout: i64,
}

/// What is changed of a container that is about to be made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Adjustment {
    /// Added to what it has.
    pub create_runtime: Vec<OciHook>,
    /// Files of the container's cgroup (v2) and what is written to them.
    pub unified: BTreeMap<String, String>,
}

/// Why a hook refuses. The text goes to the pod's event, so it names driver, pod, device, step, cause and what to do: the
/// runtime adds nothing to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HookError(pub String);

/// When a request came, and by when its hook must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTime {
    /// It was read from the connection.
    pub arrival: Instant,
    /// Leaves the margin for the answer already.
    pub deadline: Instant,
}

/// What the hooks do. One implementation, in the agent; tests have their own.
///
/// Every call runs in a task of its own that the wire cannot cancel. Calls for one pod can overlap (a kept time-out, a Stop while
/// Run still works): the implementation orders them.
pub trait SandboxHandler: Send + Sync + 'static {
    /// Whether this pod has anything to do with us. Called for every request, on the connection's task: a map look-up, no I/O.
    /// Only pods for which this is true reach the hooks below; for others the runtime gets an empty answer at once. So it stays true
    /// as long as anything of the pod is to be undone.
    fn is_ours(&self, pod_uid: &str) -> bool;

    /// How the names of environment variables begin that [`Self::admit`] wants to see; empty for none.
    fn marks(&self) -> &str {
        ""
    }

    /// A container is about to be made, in a pod of ours or not, with these marked variables (`NAME=value`). Called on the
    /// connection's task: a map look-up, no I/O.
    ///
    /// # Errors
    /// When the container must not be made.
    fn admit(&self, pod_uid: &str, marked: &[&str]) -> Result<(), HookError> {
        let _ = (pod_uid, marked);
        Ok(())
    }

    /// A sandbox was made.
    fn run_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) -> impl Future<Output = Result<(), HookError>> + Send;

    /// A container is about to be made.
    fn create_container(
        &self,
        sandbox: Sandbox,
        container: Container,
        time: RequestTime,
    ) -> impl Future<Output = Result<Adjustment, HookError>> + Send;

    /// A sandbox stops. Never an error; what takes long goes on in the background.
    fn stop_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) -> impl Future<Output = ()> + Send;

    /// A sandbox is removed. Never an error.
    fn remove_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) -> impl Future<Output = ()> + Send;

    /// All sandboxes and containers the runtime has, after each (re)connect. Must return at once; work goes on in the background.
    fn synchronize(&self, sandboxes: Vec<Sandbox>, containers: Vec<Container>) -> impl Future<Output = ()> + Send;

    /// The connection is up and synchronised, or gone; `detail` says to whom, or why not.
    fn connection(&self, up: bool, detail: &str);
}
