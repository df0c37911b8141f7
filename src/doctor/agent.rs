//! What the running agent says of itself.

use serde_json::Value;

use super::{Finding, Level, Options, text};

/// What the other checks take from it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// NRI is connected and synchronised.
    pub(super) connected: bool,
    /// What the runtime calls itself, while connected: "containerd v2.4.2 (NRI v0.12.3)".
    pub(super) runtime: Option<String>,
}

/// `answer` may be of another version: fields that it does not have are not judged.
pub(super) fn look(answer: &Result<String, String>, options: &Options) -> (Seen, Vec<Finding>) {
    const SUBJECT: &str = "agent";
    let failed = |found: String, todo: &str| (Seen::default(), vec![Finding::new(Level::Error, SUBJECT, found, todo)]);
    let status: Value = match answer.as_deref().map(serde_json::from_str) {
        Err(why) => {
            return failed(
                format!("no answer: {}", text::short(why)),
                "kubectl logs of its pod say why; is --status-socket right?",
            );
        }
        Ok(Err(why)) => return failed(format!("its answer is no JSON: {why}"), "is it dranic that has the socket?"),
        Ok(Ok(status)) => status,
    };
    let words = |key: &str| status.get(key).and_then(Value::as_str).map(text::short);
    let connected = status.get("nriConnected").and_then(Value::as_bool);
    let runtime = words("nri").filter(|_| connected == Some(true));
    let mut findings = vec![Finding::ok(SUBJECT, format!("version {} answers", words("version").unwrap_or_default()))];
    match connected {
        _ if !options.uses_nri => {}
        Some(true) => findings.push(Finding::ok("agent: NRI", format!("connected to {}", runtime.clone().unwrap_or_default()))),
        Some(false) => {
            let found = format!("not connected: {}", words("nri").unwrap_or_default());
            findings.push(Finding::new(
                Level::Error,
                "agent: NRI",
                found,
                "see the findings about the runtime and the socket below",
            ));
        }
        None => {}
    }
    match words("kubelet").as_deref() {
        Some("registered") => findings.push(Finding::ok("agent: kubelet", "registered")),
        Some(other) => {
            let todo = "is --kubelet-root the kubelet's --root-dir?";
            findings.push(Finding::new(Level::Error, "agent: kubelet", format!("not registered: {other}"), todo));
        }
        None => {}
    }
    findings.extend(published(&status));
    match (status.get("guardUsable").and_then(Value::as_bool), words("guard").unwrap_or_default()) {
        (Some(true), place) => findings.push(Finding::ok("agent: guard", format!("used, {place}"))),
        (Some(false), why) => {
            let todo = "without it containers are gated by NRI alone";
            findings.push(Finding::new(Level::Warning, "agent: guard", format!("not used: {why}"), todo));
        }
        (None, _) => {}
    }
    (Seen { connected: connected == Some(true), runtime }, findings)
}

fn published(status: &Value) -> Option<Finding> {
    const SUBJECT: &str = "agent: ResourceSlices";
    if let Some(why) = status.get("publishError").and_then(Value::as_str) {
        return Some(Finding::new(
            Level::Error,
            SUBJECT,
            format!("not published: {}", text::short(why)),
            "docs/install.md, \"When it does not become ready\"",
        ));
    }
    match status.get("publishedDevices").and_then(Value::as_u64)? {
        0 => Some(Finding::new(
            Level::Warning,
            SUBJECT,
            "no device is published",
            "dranic devices says which links are kept back, and why",
        )),
        count => Some(Finding::ok(SUBJECT, format!("{count} devices published"))),
    }
}
