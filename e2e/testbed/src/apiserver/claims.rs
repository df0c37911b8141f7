//! Claims as JSON with raw parameters, and a scheduler that does as it is told.

use std::fmt::Write;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{ApiServerDouble, Key};

/// The only key of an object that stands for raw JSON text. No API object has it.
const RAW: &str = "\u{0}raw";

/// Raw JSON text as a value: it is sent exactly as given, with keys that stand twice, and is never parsed.
fn raw(text: &str) -> Value {
    json!({RAW: text})
}

/// JSON text of `value`, with raw text as it was given.
pub(super) fn to_text(value: &Value) -> String {
    let mut text = String::new();
    write_value(value, &mut text);
    text
}

fn write_value(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(raw)) = map.get(RAW) {
                text.push_str(raw);
                return;
            }
            text.push('{');
            for (index, (key, value)) in map.iter().enumerate() {
                let comma = if index == 0 { "" } else { "," };
                let _ = write!(text, "{comma}{}:", Value::String(key.clone()));
                write_value(value, text);
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (index, value) in items.iter().enumerate() {
                text.push_str(if index == 0 { "" } else { "," });
                write_value(value, text);
            }
            text.push(']');
        }
        plain => {
            let _ = write!(text, "{plain}");
        }
    }
}

/// Opaque parameters of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimConfig {
    /// `FromClass` or `FromClaim`.
    pub source: &'static str,
    /// The requests it is for; empty for all.
    pub requests: Vec<String>,
    /// The driver it is for.
    pub driver: String,
    /// JSON text, sent as it is.
    pub parameters: String,
}

impl ClaimConfig {
    /// Parameters written in the claim, for all requests.
    #[must_use]
    pub fn from_claim(driver: &str, parameters: &str) -> Self {
        Self { source: "FromClaim", requests: Vec::new(), driver: driver.to_owned(), parameters: parameters.to_owned() }
    }

    /// Parameters of the DeviceClass, for all requests.
    #[must_use]
    pub fn from_class(driver: &str, parameters: &str) -> Self {
        Self { source: "FromClass", ..Self::from_claim(driver, parameters) }
    }

    fn opaque(&self) -> Value {
        json!({"driver": self.driver, "parameters": raw(&self.parameters)})
    }
}

/// A claim with one request for each of `requests`, each for one device of `class`, and with the parameters in `configs` that are
/// `FromClaim`.
#[must_use]
pub fn claim_json(namespace: &str, name: &str, class: &str, requests: &[&str], configs: &[ClaimConfig]) -> Value {
    let requests: Vec<Value> = requests
        .iter()
        .map(|request| {
            let exactly = json!({"deviceClassName": class, "allocationMode": "ExactCount", "count": 1});
            json!({"name": request, "exactly": exactly})
        })
        .collect();
    let own = configs.iter().filter(|c| c.source == "FromClaim");
    let config: Vec<Value> = own.map(|c| json!({"requests": c.requests, "opaque": c.opaque()})).collect();
    json!({
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"devices": {"requests": requests, "config": config}},
    })
}

impl ApiServerDouble {
    /// Creates or replaces a claim (see [`claim_json`]); gives its UID.
    ///
    /// # Panics
    /// When the claim has no name.
    pub fn create_claim(&self, claim: Value) -> String {
        self.put("resourceclaims", claim)
    }

    /// Makes the server answer a get of the claim with exactly `text`, whatever is written to it later; gives the UID that `text`
    /// has.
    ///
    /// # Errors
    /// When `text` has no metadata with a name.
    pub fn create_claim_text(&self, text: &str) -> Result<String> {
        let parsed: Value = serde_json::from_str(text)?;
        let metadata = parsed.get("metadata").context("a claim has metadata")?.clone();
        anyhow::ensure!(metadata["name"].is_string(), "a claim has a name");
        let mut object = raw(text);
        object["metadata"] = metadata;
        self.put("resourceclaims", object);
        Ok(parsed["metadata"]["uid"].as_str().unwrap_or_default().to_owned())
    }

    /// What the scheduler does: allocates `devices` (request, names of devices in the pool) of `driver` on `node` to the claim
    /// and reserves it for `pod` (name, UID).
    ///
    /// # Errors
    /// When there is no such claim.
    #[allow(clippy::too_many_arguments, reason = "a helper of tests, called with literals")]
    pub fn allocate(
        &self,
        namespace: &str,
        claim: &str,
        driver: &str,
        node: &str,
        devices: &[(&str, &[&str])],
        pod: (&str, &str),
        configs: &[ClaimConfig],
    ) -> Result<()> {
        let result = |request: &str, device: &str| json!({"request": request, "driver": driver, "pool": node, "device": device});
        let results: Vec<Value> =
            devices.iter().flat_map(|(request, names)| names.iter().map(|name| result(request, name))).collect();
        let config: Vec<Value> =
            configs.iter().map(|c| json!({"source": c.source, "requests": c.requests, "opaque": c.opaque()})).collect();
        let here = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]});
        let status = json!({
            "allocation": {"devices": {"results": results, "config": config}, "nodeSelector": {"nodeSelectorTerms": [here]}},
            "reservedFor": [{"resource": "pods", "name": pod.0, "uid": pod.1}],
        });
        let mut store = self.shared.store();
        let key = Key::new("resourceclaims", namespace, claim);
        let mut object = store.get(&key).cloned().with_context(|| format!("no claim {namespace}/{claim}"))?;
        object["status"] = status;
        store.replace(key, object).context("the claim is gone")?;
        Ok(())
    }
}
