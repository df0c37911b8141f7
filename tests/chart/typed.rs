//! Objects read with the API's types: what they can't hold was written wrong.

use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingAdmissionPolicyBinding, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Pod, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaimTemplate};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads `object` with its type and compares it with what the type gives back.
pub(crate) fn check(object: &Value) -> Result<(), String> {
    let (version, kind) = (object["apiVersion"].as_str().unwrap_or(""), object["kind"].as_str().unwrap_or(""));
    let name = object["metadata"]["name"].as_str().ok_or_else(|| format!("{kind} without a name: {object}"))?;
    let said = |why: String| format!("{kind} {name}: {why}");
    match (version, kind) {
        ("v1", "ServiceAccount") => same::<ServiceAccount>(object),
        ("v1", "Service") => same::<Service>(object),
        ("v1", "Pod") => same::<Pod>(object),
        ("apps/v1", "DaemonSet") => same::<DaemonSet>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => same::<ClusterRole>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => same::<ClusterRoleBinding>(object),
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy") => same::<ValidatingAdmissionPolicy>(object),
        ("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding") => {
            same::<ValidatingAdmissionPolicyBinding>(object)
        }
        ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicy") => same::<MutatingAdmissionPolicy>(object),
        ("admissionregistration.k8s.io/v1", "MutatingAdmissionPolicyBinding") => same::<MutatingAdmissionPolicyBinding>(object),
        ("resource.k8s.io/v1", "DeviceClass") => same::<DeviceClass>(object),
        ("resource.k8s.io/v1", "ResourceClaimTemplate") => same::<ResourceClaimTemplate>(object),
        // A custom resource: no type of Kubernetes' own.
        ("monitoring.coreos.com/v1", "ServiceMonitor") => Ok(()),
        _ => Err(format!("apiVersion {version} is not expected")),
    }
    .map_err(said)
}

fn same<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let typed: T = serde_json::from_value(object.clone()).map_err(|e| e.to_string())?;
    let back = serde_json::to_value(typed).map_err(|e| e.to_string())?;
    kept("", object, &back)
}

/// Everything of `object` is in `back`.
fn kept(path: &str, object: &Value, back: &Value) -> Result<(), String> {
    match (object, back) {
        (Value::Object(fields), Value::Object(others)) => fields.iter().try_for_each(|(key, value)| match others.get(key) {
            Some(other) => kept(&format!("{path}.{key}"), value, other),
            None => Err(format!("{path}.{key} is not known to the API")),
        }),
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            items.iter().zip(others).enumerate().try_for_each(|(n, (item, other))| kept(&format!("{path}[{n}]"), item, other))
        }
        _ if object == back => Ok(()),
        _ => Err(format!("{path} is {object}, and the API reads {back}")),
    }
}
