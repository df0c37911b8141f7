//! From a ResourceClaim to what this node has to prepare. Pure.

use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::config::NetworkConfig;
use crate::ledger::{ClaimRef, PodRef};
use crate::names::DeviceName;

/// One device to prepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedDevice {
    /// As in the allocation result: `request` or `request/subrequest`.
    pub request: String,
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: DeviceName,
    /// Class and claim configuration combined and validated.
    pub config: NetworkConfig,
    /// Set for shared devices.
    pub share_id: Option<String>,
    /// The request asked for admin access: nothing of the device may be changed.
    pub admin_access: bool,
}

/// A claim as far as this driver has to do with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedClaim {
    /// Which claim.
    pub claim: ClaimRef,
    /// The one pod it is reserved for; none when it is not reserved yet.
    pub pod: Option<PodRef>,
    /// Devices of this driver, in the order of the allocation result.
    pub devices: Vec<ResolvedDevice>,
}

/// Why a claim can't be prepared. Each text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The claim in the API is another one than the kubelet's.
    #[error("claim {claim} was replaced: the API server has UID {found}; the kubelet will ask again")]
    Replaced {
        /// What the kubelet asked for.
        claim: ClaimRef,
        /// UID in the API.
        found: String,
    },
    /// Nothing is allocated.
    #[error("claim {0} is not allocated yet; the kubelet will ask again")]
    NotAllocated(ClaimRef),
    /// More than one pod, or not a pod.
    #[error("claim {claim} is reserved for {consumers}; a NIC can be in one pod only, so use a ResourceClaimTemplate")]
    Consumers {
        /// Which claim.
        claim: ClaimRef,
        /// Who, for people.
        consumers: String,
    },
    /// A name or UID in the claim is not one.
    #[error("claim {claim}: {source}")]
    Name {
        /// Which claim.
        claim: ClaimRef,
        /// Which name.
        source: crate::names::NameError,
    },
    /// Configuration that is wrong: every fault, with its JSON path.
    #[error("claim {claim}, request {request}: {faults}")]
    Config {
        /// Which claim.
        claim: ClaimRef,
        /// Which request.
        request: String,
        /// All faults.
        faults: String,
    },
    /// More devices than a claim may have (`AllocationResultsMaxSize`, 32).
    #[error("claim {claim} has {count} allocation results; the API allows 32")]
    TooMany {
        /// Which claim.
        claim: ClaimRef,
        /// How many.
        count: usize,
    },
}

/// Resolves `claim` for `driver`. `asked` is what the kubelet asked for; `raw` is the claim's JSON text as the server sent it, to
/// find keys that stand twice in opaque parameters (the decoded form has lost them).
///
/// # Errors
/// See [`ResolveError`].
pub fn resolve(asked: &ClaimRef, claim: &ResourceClaim, raw: &str, driver: &str) -> Result<ResolvedClaim, ResolveError> {
    let _ = (asked, claim, raw, driver);
    todo!()
}
