//! From a ResourceClaim to what this node has to prepare. Pure.

mod configs;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use k8s_openapi::api::resource::v1::{
    DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};

use crate::config::NetworkConfig;
use crate::ledger::{ClaimRef, PodRef, Share};
use crate::names::{DeviceName, NameError, PodUid, ShareId};
use configs::Configs;

/// Most allocation results of one claim: `AllocationResultsMaxSize`, `k8s.io/api/resource/v1`.
const RESULTS_MAX: usize = 32;
/// Longest name of a pod or pool, in bytes: a DNS subdomain, and `PoolNameMaxLength`.
const NAME_MAX: usize = 253;
/// Annotation with the pod's name of a claim that was made from a template: `PodResourceClaimAnnotation`, `k8s.io/api/resource/v1`.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";
/// How many consumers an error lists.
const CONSUMERS_SHOWN: usize = 4;

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

impl ResolvedDevice {
    /// What tells it from all others of this node.
    #[must_use]
    pub fn share(&self) -> Share {
        Share { device: self.device.clone(), id: self.share_id.clone() }
    }
}

/// A claim as far as this driver has to do with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedClaim {
    /// Which claim.
    pub claim: ClaimRef,
    /// The one pod it is reserved for; none when it is not reserved yet.
    pub pod: Option<PodRef>,
    /// What the pod calls the claim, where it was made from a template.
    pub pod_claim_name: Option<String>,
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
        source: Box<NameError>,
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
    /// One device, not shared, stands in the allocation twice.
    #[error("claim {claim} has device {device} allocated twice; delete the claim so that it is allocated anew")]
    DeviceTwice {
        /// Which claim.
        claim: ClaimRef,
        /// Which device.
        device: DeviceName,
    },
    /// Two devices would have the same name in the pod.
    #[error(
        "claim {claim}: interface.name {name:?} is configured for several devices (requests {requests}); \
             name a request in each config entry (`requests`), or leave the name out to keep the host's names"
    )]
    NameTwice {
        /// Which claim.
        claim: ClaimRef,
        /// The name.
        name: String,
        /// Which requests, for people.
        requests: String,
    },
}

/// Resolves `claim` for `driver`. `asked` is what the kubelet asked for; `raw` is the claim's JSON text as the server sent it, to
/// find keys that stand twice in opaque parameters (the decoded form has lost them).
///
/// # Errors
/// See [`ResolveError`].
pub fn resolve(asked: &ClaimRef, claim: &ResourceClaim, raw: &str, driver: &str) -> Result<ResolvedClaim, ResolveError> {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    if uid != asked.uid.as_str() {
        return Err(ResolveError::Replaced { claim: asked.clone(), found: uid.chars().take(64).collect() });
    }
    let status = claim.status.as_ref();
    let allocation = status.and_then(|s| s.allocation.as_ref()).ok_or_else(|| ResolveError::NotAllocated(asked.clone()))?;
    let pod = consumer(asked, status.and_then(|s| s.reserved_for.as_deref()).unwrap_or_default())?;
    let devices = match &allocation.devices {
        Some(allocated) => devices(asked, claim, allocated, raw, driver)?,
        None => Vec::new(),
    };
    check_devices_once(asked, &devices)?;
    check_names_once(asked, &devices)?;
    let annotation = claim.metadata.annotations.as_ref().and_then(|all| all.get(POD_CLAIM_NAME));
    // A path in containers is made of it.
    let pod_claim_name = annotation.filter(|name| DeviceName::new(name.as_str()).is_ok()).cloned();
    Ok(ResolvedClaim { claim: asked.clone(), pod, pod_claim_name, devices })
}

/// The one pod that the claim is reserved for.
fn consumer(claim: &ClaimRef, reserved_for: &[ResourceClaimConsumerReference]) -> Result<Option<PodRef>, ResolveError> {
    let name_error = |source| ResolveError::Name { claim: claim.clone(), source: Box::new(source) };
    match reserved_for {
        [] => Ok(None),
        [one] if one.resource == "pods" && one.api_group.as_deref().unwrap_or_default().is_empty() => {
            let name = checked("pod name", &one.name).map_err(name_error)?;
            let uid = PodUid::new(one.uid.as_str()).map_err(name_error)?;
            Ok(Some(PodRef { name, uid }))
        }
        many => {
            let short = |c: &ResourceClaimConsumerReference| format!("{}/{}", c.resource, c.name).chars().take(80).collect();
            let mut consumers: Vec<String> = many.iter().take(CONSUMERS_SHOWN).map(short).collect();
            if many.len() > CONSUMERS_SHOWN {
                consumers.push(format!("{} more", many.len() - CONSUMERS_SHOWN));
            }
            Err(ResolveError::Consumers { claim: claim.clone(), consumers: consumers.join(", ") })
        }
    }
}

fn checked(kind: &'static str, value: &str) -> Result<String, NameError> {
    if value.is_empty() || value.len() > NAME_MAX {
        return Err(NameError { kind, value: value.chars().take(64).collect(), reason: "must have 1 to 253 bytes" });
    }
    Ok(value.to_owned())
}

fn devices(
    asked: &ClaimRef,
    claim: &ResourceClaim,
    allocated: &DeviceAllocationResult,
    raw: &str,
    driver: &str,
) -> Result<Vec<ResolvedDevice>, ResolveError> {
    let results = allocated.results.as_deref().unwrap_or_default();
    if results.len() > RESULTS_MAX {
        return Err(ResolveError::TooMany { claim: asked.clone(), count: results.len() });
    }
    let configs = Configs::read(claim, allocated, raw, driver);
    results.iter().filter(|result| result.driver == driver).map(|result| device(asked, result, &configs)).collect()
}

fn device(asked: &ClaimRef, result: &DeviceRequestAllocationResult, configs: &Configs) -> Result<ResolvedDevice, ResolveError> {
    let name_error = |source| ResolveError::Name { claim: asked.clone(), source: Box::new(source) };
    let config = configs.of_request(&result.request).map_err(|faults| ResolveError::Config {
        claim: asked.clone(),
        request: result.request.chars().take(NAME_MAX).collect(),
        faults,
    })?;
    Ok(ResolvedDevice {
        request: checked("request", &result.request).map_err(name_error)?,
        pool: checked("pool name", &result.pool).map_err(name_error)?,
        device: DeviceName::new(result.device.as_str()).map_err(name_error)?,
        config,
        share_id: result.share_id.clone().map(ShareId::new).transpose().map_err(name_error)?.map(String::from),
        admin_access: result.admin_access == Some(true),
    })
}

/// A device may stand in a claim several times only as shares of it, or for admin access, which changes nothing.
fn check_devices_once(claim: &ClaimRef, devices: &[ResolvedDevice]) -> Result<(), ResolveError> {
    let mut shares: HashMap<(&str, &DeviceName), HashSet<Option<&str>>> = HashMap::new();
    for device in devices.iter().filter(|d| !d.admin_access) {
        let seen = shares.entry((&device.pool, &device.device)).or_default();
        let share = device.share_id.as_deref();
        let whole = share.is_none() || seen.contains(&None);
        if !seen.insert(share) || (whole && seen.len() > 1) {
            return Err(ResolveError::DeviceTwice { claim: claim.clone(), device: device.device.clone() });
        }
    }
    Ok(())
}

fn check_names_once(claim: &ClaimRef, devices: &[ResolvedDevice]) -> Result<(), ResolveError> {
    let mut requests: HashMap<&str, Vec<&str>> = HashMap::new();
    for device in devices.iter().filter(|d| !d.admin_access) {
        let Some(name) = device.config.interface.as_ref().and_then(|i| i.name.as_ref()) else { continue };
        let of_name = requests.entry(name.as_str()).or_default();
        of_name.push(&device.request);
        if of_name.len() > 1 {
            let (name, requests) = (name.to_string(), of_name.join(", "));
            return Err(ResolveError::NameTwice { claim: claim.clone(), name, requests });
        }
    }
    Ok(())
}
