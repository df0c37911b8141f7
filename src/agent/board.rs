//! What the legs say of themselves: for `/readyz`, `/metrics` and `dranic status`.

use std::sync::Arc;

use tokio::sync::watch;

use super::NriState;
use crate::dra::grpc::Registration;
use crate::dra::publisher::PublishStatus;
use crate::telemetry::Metrics;

/// What this agent is to another one of the same node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// There is no other.
    Alone,
    /// The other one works, we wait for its end.
    Standby,
    /// It has ended, or is just ending.
    Successor,
}

/// Cheap to clone; all clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Board {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) nri: watch::Sender<NriState>,
    pub(crate) registration: watch::Sender<Registration>,
    pub(crate) published: watch::Sender<PublishStatus>,
    pub(crate) role: watch::Sender<Role>,
    /// Whether the agent is of no use without the runtime's NRI.
    needs_nri: bool,
}

impl Board {
    pub(crate) fn new(needs_nri: bool) -> Self {
        Self {
            metrics: Arc::new(Metrics::new()),
            nri: watch::Sender::new(NriState::default()),
            registration: watch::Sender::new(Registration::Waiting),
            published: watch::Sender::new(PublishStatus::default()),
            role: watch::Sender::new(Role::Alone),
            needs_nri,
        }
    }

    pub(crate) fn set_role(&self, role: Role) {
        self.metrics.standby.set(i64::from(role == Role::Standby));
        self.role.send_replace(role);
    }

    /// What is missing for readiness; nothing on standby, where there is nothing more to do. A DaemonSet ends the old pod of a
    /// rolling update (`maxSurge: 1`) only when the new one is ready.
    pub(crate) fn missing(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if *self.role.borrow() == Role::Standby {
            return missing;
        }
        match &*self.registration.borrow() {
            Registration::Registered => {}
            Registration::Waiting => missing.push("the kubelet has not registered the driver yet".to_owned()),
            Registration::Refused(why) => missing.push(format!("the kubelet refused the driver: {why}")),
        }
        let nri = self.nri.borrow().clone();
        if self.needs_nri && !nri.connected {
            missing.push(format!("NRI is not connected: {}", nri.detail));
        }
        let published = self.published.borrow().clone();
        if !published.in_sync {
            let why = published.last_error.unwrap_or_else(|| "not written yet".to_owned());
            missing.push(format!("ResourceSlices are not published: {why}"));
        }
        missing
    }
}
