//! What would happen to a device, as steps with their undo. Pure.

use serde::Serialize;

use crate::attach::plan::{self, Plan, PlanError, Step, Undo};
use crate::config::NetworkConfig;
use crate::names::DeviceName;
use crate::netdev::HostState;

/// What would happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// Which device.
    pub device: DeviceName,
    /// Its name on the host.
    pub host_link: String,
    /// Its name in the network namespace.
    pub pod_link: String,
    /// Path of the network namespace.
    pub netns: String,
    /// In order.
    pub steps: Vec<PreviewStep>,
    /// What of the host's is not copied, and why.
    pub left_out: Vec<String>,
    /// How much is given back afterwards: `full` or `minimal`.
    pub restore: crate::config::Restore,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PreviewStep {
    /// The step in words.
    pub words: String,
    /// What undoes it, in words.
    pub undo_words: String,
    /// The step itself; none for what is done to every link before its plan.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub step: Option<Step>,
    /// What undoes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub undo: Option<Undo>,
}

impl Preview {
    /// What `config` would do to a device that is on the host as `host` says, up or down.
    ///
    /// # Errors
    /// When the device can't be what the configuration asks for.
    pub fn new(device: &DeviceName, config: &NetworkConfig, host: &HostState, up: bool, netns: &str) -> Result<Self, PlanError> {
        Ok(Self::of_plan(device, plan::plan(config, host)?, host, up, netns))
    }

    /// As [`Self::new`], of a plan that is there.
    #[must_use]
    pub fn of_plan(device: &DeviceName, plan: Plan, host: &HostState, up: bool, netns: &str) -> Self {
        let Plan { pod_link, steps, left_out, restore } = plan;
        let down = PreviewStep {
            words: format!("setting {} down on the host", host.name),
            undo_words: "setting it up again, once everything else is given back".to_owned(),
            step: None,
            undo: None,
        };
        let steps = up.then_some(down).into_iter().chain(steps.into_iter().map(PreviewStep::of));
        Self {
            device: device.clone(),
            host_link: host.name.clone(),
            pod_link: pod_link.to_string(),
            netns: netns.to_owned(),
            steps: steps.collect(),
            left_out,
            restore,
        }
    }
}

impl PreviewStep {
    fn of(step: Step) -> Self {
        let undo = step.undo();
        Self { words: step.describe(), undo_words: undo.describe(), step: Some(step), undo: Some(undo) }
    }
}
