//! What `dranic status` shows: a stable JSON form of the agent's state.

use serde::{Deserialize, Serialize};

use crate::inventory::Withheld;
use crate::ledger::{ClaimRecord, Phase, StepTime};
use crate::rdma::Resources;

/// What [`Status::kubelet`] says when all is well.
pub const REGISTERED: &str = "registered";

/// Everything the agent knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Node name.
    pub node: String,
    /// Driver name.
    pub driver: String,
    /// Whether the runtime's NRI is connected and synchronised.
    pub nri_connected: bool,
    /// To whom, or why not.
    pub nri: String,
    /// Whether containers are held back by the guard.
    #[serde(default)]
    pub guard_usable: bool,
    /// Where it is on the host, or why it can't be used.
    #[serde(default)]
    pub guard: String,
    /// Whether the kubelet has registered the driver, in words.
    pub kubelet: String,
    /// Devices in the published ResourceSlices.
    pub published_devices: usize,
    /// Why publishing fails, if it does.
    pub publish_error: Option<String>,
    /// Claims that are prepared.
    pub claims: Vec<ClaimStatus>,
    /// Links that are not offered, and why.
    pub withheld: Vec<Withheld>,
}

/// One claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimStatus {
    /// Namespace of the claim.
    pub namespace: String,
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: String,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod.
    pub pod_uid: String,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// Device name.
    pub device: String,
    /// Request that it serves.
    pub request: String,
    /// Name on the host.
    pub host_link: String,
    /// Name in the pod.
    pub pod_link: String,
    /// How far it is.
    pub phase: Phase,
    /// Since when: milliseconds since 1970.
    pub since_unix_ms: u64,
    /// The sandbox it is in.
    pub sandbox: Option<String>,
    /// Path of the sandbox's namespace.
    pub netns: Option<String>,
    /// Times of the last steps.
    pub times: Vec<StepTime>,
    /// What of the host's did not go along, and why.
    pub left_out: Vec<String>,
    /// What failed last.
    pub last_error: Option<String>,
    /// What is in use of its RDMA device, while that is in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_in_use: Option<Resources>,
}

impl From<&ClaimRecord> for ClaimStatus {
    fn from(record: &ClaimRecord) -> Self {
        Self {
            namespace: record.claim.namespace.clone(),
            name: record.claim.name.clone(),
            uid: record.claim.uid.to_string(),
            pod: record.pod.name.clone(),
            pod_uid: record.pod.uid.to_string(),
            devices: record
                .devices
                .iter()
                .map(|d| DeviceStatus {
                    device: d.device.to_string(),
                    request: d.request.clone(),
                    host_link: d.host.name.clone(),
                    pod_link: d.plan.pod_link.to_string(),
                    phase: d.phase,
                    since_unix_ms: d.since_unix_ms,
                    sandbox: d.attachment.as_ref().map(|a| a.sandbox.to_string()),
                    netns: d.attachment.as_ref().map(|a| a.netns_path.display().to_string()),
                    times: d.times.clone(),
                    left_out: d.plan.left_out.clone(),
                    last_error: d.last_error.clone(),
                    rdma_in_use: None,
                })
                .collect(),
        }
    }
}
