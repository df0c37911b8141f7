//! One call of a hook, as a task that the wire can't cancel.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use prost::{DecodeError, Message};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout_at;

use super::dispatch::MAX_HOOK_LEAD;
use super::{Adjustment, Container, HookError, RequestTime, Sandbox, SandboxHandler, proto, wire};

/// The hooks there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    RunPodSandbox,
    StopPodSandbox,
    RemovePodSandbox,
    CreateContainer,
}

impl Hook {
    /// The hook for the event number of a `StateChangeEvent`; none for events that have an RPC in every version or that we did not
    /// subscribe to.
    pub(super) fn from_event(event: i32) -> Option<Self> {
        match proto::Event::try_from(event) {
            Ok(proto::Event::RunPodSandbox) => Some(Self::RunPodSandbox),
            Ok(proto::Event::StopPodSandbox) => Some(Self::StopPodSandbox),
            Ok(proto::Event::RemovePodSandbox) => Some(Self::RemovePodSandbox),
            _ => None,
        }
    }

    /// Whether the runtime only tells, and must not be stopped.
    pub(super) fn is_cleanup(self) -> bool {
        matches!(self, Self::StopPodSandbox | Self::RemovePodSandbox)
    }
}

/// A hook and what it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    hook: Hook,
    sandbox: Sandbox,
    container: Container,
}

impl Call {
    /// From the request of the RPC, or from a `StateChangeEvent`: they differ in the number of the pod's field.
    pub(super) fn decode(hook: Hook, payload: &[u8], pod: u32) -> Result<Self, DecodeError> {
        let (pod, container) = if pod == wire::POD_IN_STATE_CHANGE {
            let event = proto::StateChangeEvent::decode(payload)?;
            (event.pod, event.container)
        } else {
            // The other pod requests are this one without a container.
            let request = proto::CreateContainerRequest::decode(payload)?;
            (request.pod, request.container)
        };
        Ok(Self { hook, sandbox: pod.unwrap_or_default().into(), container: container.unwrap_or_default().into() })
    }

    /// Starts the hook on `executor`.
    pub(super) fn start<H: SandboxHandler>(self, executor: &Handle, handler: Arc<H>, time: RequestTime) -> Running {
        Running(executor.spawn(async move {
            let subject = self.to_string();
            let result = self.perform(&*handler, time).await;
            // One that waits until its deadline ends a moment after it, and its answer still counts.
            if Instant::now() > time.deadline + MAX_HOOK_LEAD {
                tracing::warn!(%subject, ?result, late = ?time.deadline.elapsed(), "hook ended after its deadline");
            }
            result
        }))
    }

    async fn perform<H: SandboxHandler>(self, handler: &H, time: RequestTime) -> Result<Adjustment, HookError> {
        let Self { hook, sandbox, container } = self;
        match hook {
            Hook::RunPodSandbox => handler.run_pod_sandbox(sandbox, time).await?,
            Hook::CreateContainer => return handler.create_container(sandbox, container, time).await,
            Hook::StopPodSandbox => handler.stop_pod_sandbox(sandbox, time).await,
            Hook::RemovePodSandbox => handler.remove_pod_sandbox(sandbox, time).await,
        }
        Ok(Adjustment::default())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sandbox { id, name, namespace, uid, .. } = &self.sandbox;
        write!(f, "{:?} of pod {namespace}/{name} (uid {uid}, sandbox {id})", self.hook)?;
        if self.hook == Hook::CreateContainer {
            write!(f, ", container {}", self.container.name)?;
        }
        Ok(())
    }
}

/// A hook at work. Dropping this does not stop it.
#[derive(Debug)]
pub(super) struct Running(JoinHandle<Result<Adjustment, HookError>>);

/// What was known of a hook when its answer was due.
#[derive(Debug)]
pub(super) enum Outcome {
    Done(Result<Adjustment, HookError>),
    /// It panicked, or the executor is shut down.
    Failed(JoinError),
    StillRunning,
}

impl Running {
    /// Waits for the end of the hook, at most until `until`.
    pub(super) async fn wait(self, until: Instant) -> Outcome {
        match timeout_at(until.into(), self.0).await {
            Ok(Ok(result)) => Outcome::Done(result),
            Ok(Err(error)) => Outcome::Failed(error),
            Err(_) => Outcome::StillRunning,
        }
    }
}
