//! The kubelet's and the API server's side: registration, gRPC service, claims and their status, events, ResourceSlices.

pub mod api;
pub mod authority;
pub mod events;
pub mod evict;
pub mod grpc;
pub mod health;
pub mod peer;
pub mod publisher;
pub mod resolve;
pub mod status;

use std::future::Future;

use crate::ledger::ClaimRef;
use crate::names::DeviceName;

/// Generated from `proto/`: the kubelet's protocols.
pub mod proto {
    /// Plugin registration, v1.
    #[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    pub mod registration {
        include!(concat!(env!("OUT_DIR"), "/pluginregistration/pluginregistration.rs"));
    }
    /// DRA plugin, v1.
    #[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/dra_v1/k8s.io.kubelet.pkg.apis.dra.v1.rs"));
    }
    /// DRA plugin, v1beta1.
    #[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    pub mod v1beta1 {
        include!(concat!(env!("OUT_DIR"), "/dra_v1beta1/k8s.io.kubelet.pkg.apis.dra.v1beta1.rs"));
    }
    /// Health of devices, v1.
    #[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    pub mod health_v1 {
        include!(concat!(env!("OUT_DIR"), "/dra_health_v1/v1.rs"));
    }
    /// Health of devices, v1alpha1.
    #[allow(missing_docs, unreachable_pub, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]
    pub mod health_v1alpha1 {
        include!(concat!(env!("OUT_DIR"), "/dra_health_v1alpha1/v1alpha1.rs"));
    }
}

/// A device that was prepared, as the kubelet is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// The requests it serves; sub-requests as `request/subrequest`.
    pub request_names: Vec<String>,
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: DeviceName,
    /// Fully qualified CDI names; may be empty.
    pub cdi_device_ids: Vec<String>,
    /// Set for shared devices (v1 only).
    pub share_id: Option<String>,
}

/// Why a claim was not prepared or unprepared: one text for people that names claim, device, step, cause and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ClaimError(pub String);

/// What the gRPC service asks for each claim. Called for several claims at once; each call is idempotent.
pub trait ClaimHandler: Send + Sync + 'static {
    /// Prepares the claim.
    fn prepare(&self, claim: ClaimRef) -> impl Future<Output = Result<Vec<PreparedDevice>, ClaimError>> + Send;
    /// Gives back everything of the claim. An unknown claim is success.
    fn unprepare(&self, claim: ClaimRef) -> impl Future<Output = Result<(), ClaimError>> + Send;
}
