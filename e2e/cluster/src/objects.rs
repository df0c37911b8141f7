//! Manifests, as short as they can be.

use serde_json::{Value, json};

/// Driver name under test: the peer's, so that its manifests are what is tested.
pub(crate) const DRIVER: &str = "dra.net";
/// DeviceClass of the rails' NICs.
pub(crate) const CLASS: &str = "e2e-nics";
/// The only image there is.
pub(crate) const IMAGE: &str = "registry.local/busybox:1";

/// A DeviceClass of the links of kind macvlan that are called nic….
pub(crate) fn class() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": CLASS},
        "spec": {"selectors": [{"cel": {"expression": format!(
            "device.driver == \"{DRIVER}\" && device.attributes[\"{DRIVER}\"].type == \"macvlan\" \
             && device.attributes[\"{DRIVER}\"].ifName.startsWith(\"nic\")")}}]},
    })
}

/// A request for one device of the class.
pub(crate) fn request(name: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": CLASS}})
}

/// A request for the device that is called `link` on the host.
pub(crate) fn request_link(name: &str, link: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": CLASS, "selectors": [by_name(link)]}})
}

/// CEL: the device that is called `link` on the host.
pub(crate) fn by_name(link: &str) -> Value {
    json!({"cel": {"expression": format!("device.attributes[\"{DRIVER}\"].ifName == \"{link}\"")}})
}

/// Parameters of our driver for `requests` (all, where empty).
pub(crate) fn config(requests: &[&str], parameters: Value) -> Value {
    json!({"requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
}

/// `spec` of a claim.
pub(crate) fn devices(requests: Vec<Value>, config: Vec<Value>) -> Value {
    json!({"devices": {"requests": requests, "config": config}})
}

/// A ResourceClaim.
pub(crate) fn claim(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": spec})
}

/// A ResourceClaimTemplate.
pub(crate) fn template(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": {"spec": spec}})
}

/// A container that ends at once when it is told to.
pub(crate) fn container(name: &str) -> Value {
    json!({
        "name": name, "image": IMAGE, "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"],
    })
}

/// Where a pod's claim comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum From<'a> {
    Template(&'a str),
    Claim(&'a str),
}

/// A pod with one container that uses the claims, in order `c0`, `c1`, ….
pub(crate) fn pod(name: &str, node: Option<&str>, sources: &[From<'_>]) -> Value {
    let names: Vec<String> = (0..sources.len()).map(|i| format!("c{i}")).collect();
    let claims: Vec<Value> = names
        .iter()
        .zip(sources)
        .map(|(name, source)| match source {
            From::Template(template) => json!({"name": name, "resourceClaimTemplateName": template}),
            From::Claim(claim) => json!({"name": name, "resourceClaimName": claim}),
        })
        .collect();
    let mut main = container("main");
    main["resources"]["claims"] = names.iter().map(|name| json!({"name": name})).collect();
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [main], "resourceClaims": claims, "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": false, "enableServiceLinks": false,
        },
    });
    if let Some(node) = node {
        pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    }
    pod
}
