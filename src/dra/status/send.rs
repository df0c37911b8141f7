//! One claim read, one apply sent.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::core::Request;
use kube::core::params::{Patch, PatchParams};
use kube::{Client, Resource};
use serde_json::Value;
use tokio::time::Instant;

use crate::dra::api::{self, ApiError, Call, OBJECT_MAX, call};
use crate::ledger::ClaimRef;

/// How long one request may take, with what is tried again inside.
const LIMIT: Duration = Duration::from_secs(10);

/// The claim, if it is still the same one.
pub(super) async fn read(client: &Client, claim: &ClaimRef) -> Result<Option<ResourceClaim>, ApiError> {
    match api::fetch_claim(client, &claim.namespace, &claim.name, Instant::now() + LIMIT).await {
        Ok(fetched) => Ok(Some(fetched.claim).filter(|c| c.metadata.uid.as_deref() == Some(claim.uid.as_str()))),
        Err(ApiError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Applies `body` to the claim's status, over the will of other managers; gives the claim as it is then.
pub(super) async fn apply(client: &Client, driver: &str, claim: &ClaimRef, body: &Value) -> Result<ResourceClaim, ApiError> {
    let what = Call::new("patch", "resource.k8s.io", "resourceclaims/status", format!("{}/{}", claim.namespace, claim.name));
    let base = Request::new(ResourceClaim::url_path(&(), Some(&claim.namespace)));
    let params = PatchParams::apply(driver).force();
    let request = base.patch_subresource("status", &claim.name, &params, &Patch::Apply(body));
    let request = request.map_err(|e| what.other(e.to_string()))?;
    let text = match tokio::time::timeout(LIMIT, call(client, &what, request, OBJECT_MAX)).await {
        Ok(answer) => answer.map_err(|error| permission(error, driver))?,
        Err(_) => return Err(what.unreachable(format!("no answer in {} s", LIMIT.as_secs()))),
    };
    serde_json::from_str(&text).map_err(|e| what.other(format!("the answer is not a ResourceClaim: {e}")))
}

/// Since 1.36 the server asks for one more permission, and refuses with 422 where it is missing.
fn permission(error: ApiError, driver: &str) -> ApiError {
    match error {
        ApiError::Invalid { what, text, .. } if text.contains("Forbidden") && text.contains("resourceclaims/driver") => {
            let rule = format!(
                "apiGroups [\"resource.k8s.io\"], resources [\"resourceclaims/driver\"], resourceNames [{driver:?}], \
                 verbs [\"associated-node:patch\"], in a pod with a service account token of its own"
            );
            ApiError::Forbidden { what, text, rule }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_want_of_the_node_verb_is_a_matter_of_permissions() {
        let invalid = |text: &str| ApiError::Invalid { what: "patch".to_owned(), text: text.to_owned(), fields: Vec::new() };
        let text = "status.devices: Forbidden: changing status.devices requires resource=\"resourceclaims/driver\", verb=\"x\"";
        let ApiError::Forbidden { rule, .. } = permission(invalid(text), "dra.net") else { panic!("not Forbidden") };
        assert!(rule.contains("associated-node:patch") && rule.contains("dra.net"), "{rule}");
        assert!(matches!(permission(invalid("status.devices[0]: Invalid value"), "dra.net"), ApiError::Invalid { .. }));
    }
}
