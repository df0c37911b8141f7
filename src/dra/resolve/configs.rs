//! The configuration entries of a claim that are for one driver, and what they come to for one request.

use k8s_openapi::api::resource::v1::{DeviceAllocationResult, OpaqueDeviceConfiguration, ResourceClaim};

use crate::config::{self, FieldError, NetworkConfig};

/// Where the scheduler put the entries that apply.
const ALLOCATED: &str = "status.allocation.devices.config";
/// Where the claim's author wrote them.
const WRITTEN: &str = "spec.devices.config";
/// Value of `source` for an entry that came from the class.
const FROM_CLASS: &str = "FromClass";
/// How many faults one error lists.
const FAULTS_SHOWN: usize = 16;

/// One entry of our driver.
struct Entry {
    /// Path of its parameters in the claim.
    path: String,
    /// Where it came from, for people.
    source: &'static str,
    requests: Vec<String>,
    parsed: Result<NetworkConfig, Vec<FieldError>>,
}

/// All entries of our driver: the class's, then the claim's, in the order of the API.
pub(super) struct Configs(Vec<Entry>);

impl Configs {
    /// Reads every entry of `driver`.
    pub(super) fn read(claim: &ResourceClaim, allocated: &DeviceAllocationResult, raw: &str, driver: &str) -> Self {
        let twice = config::duplicate_keys(raw);
        let mut entries = Vec::new();
        for (index, entry) in allocated.config.iter().flatten().enumerate() {
            let Some(opaque) = entry.opaque.as_ref().filter(|o| o.driver == driver) else { continue };
            let source = if entry.source == FROM_CLASS { "from the class" } else { "from the claim" };
            let path = format!("{ALLOCATED}[{index}].opaque.parameters");
            let parsed = parse(opaque, &path, &twice);
            entries.push(Entry { path, source, requests: entry.requests.clone().unwrap_or_default(), parsed });
        }
        entries.extend(written_twice(claim, &twice, driver));
        // A stable sort: the class's first, each in its order.
        entries.sort_by_key(|e| e.source != "from the class");
        Self(entries)
    }

    /// The combined and checked configuration for a result of `request` (`request` or `request/subrequest`).
    ///
    /// # Errors
    /// All faults as one text.
    pub(super) fn of_request(&self, request: &str) -> Result<NetworkConfig, String> {
        let entries: Vec<&Entry> = self.0.iter().filter(|entry| applies(&entry.requests, request)).collect();
        let mut merged = NetworkConfig::default();
        let mut faults = Vec::new();
        for entry in &entries {
            match &entry.parsed {
                Ok(config) => merged = merged.merged_with(config.clone()),
                Err(errors) => faults.extend(errors.iter().map(|error| entry.fault(error))),
            }
        }
        // What is wrong comes first: a field that is not supported yet may be right or not.
        for check in [NetworkConfig::validate, NetworkConfig::not_supported_yet] {
            if faults.is_empty() {
                faults.extend(check(&merged).iter().map(|error| blame(&entries, error, check)));
            }
        }
        if faults.is_empty() { Ok(merged) } else { Err(joined(faults)) }
    }
}

impl Entry {
    fn fault(&self, error: &FieldError) -> String {
        let field = if error.path == "(root)" { String::new() } else { format!(".{}", error.path) };
        format!("{}{field}: {} ({})", self.path, error.message, self.source)
    }
}

/// Whether an entry for `requests` is for a result of `request`: the request itself, or the main request of a sub-request.
fn applies(requests: &[String], request: &str) -> bool {
    let main = request.split_once('/').map_or(request, |(main, _)| main);
    requests.is_empty() || requests.iter().any(|r| r == request || r == main)
}

fn parse(opaque: &OpaqueDeviceConfiguration, path: &str, twice: &[String]) -> Result<NetworkConfig, Vec<FieldError>> {
    let repeated = repeated(path, twice);
    let parsed = config::parse(&opaque.parameters.0.to_string());
    match parsed {
        Ok(config) if repeated.is_empty() => Ok(config),
        Ok(_) => Err(repeated),
        Err(error) => Err(repeated.into_iter().chain([error]).collect()),
    }
}

/// The repeated keys below `path`, as faults of the fields there.
fn repeated(path: &str, twice: &[String]) -> Vec<FieldError> {
    let below = |key: &String| Some(key.strip_prefix(path)?.strip_prefix('.')?.to_owned());
    let message = "stands twice in the same object; remove one";
    twice.iter().filter_map(below).map(|path| FieldError { path, message: message.into() }).collect()
}

/// Keys that repeat only where the claim's author wrote them: the copy in the allocation may have lost them.
fn written_twice(claim: &ResourceClaim, twice: &[String], driver: &str) -> Vec<Entry> {
    if twice.iter().any(|path| path.starts_with(ALLOCATED)) {
        return Vec::new();
    }
    let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    let written = devices.iter().flat_map(|d| d.config.iter().flatten()).enumerate();
    let mut entries = Vec::new();
    for (index, entry) in written {
        let path = format!("{WRITTEN}[{index}].opaque.parameters");
        let faults = repeated(&path, twice);
        if entry.opaque.as_ref().is_some_and(|o| o.driver == driver) && !faults.is_empty() {
            let requests = entry.requests.clone().unwrap_or_default();
            entries.push(Entry { path, source: "from the claim", requests, parsed: Err(faults) });
        }
    }
    entries
}

/// The fault, which `check` found, with the last entry that has it by itself, or as one of the combination.
fn blame(entries: &[&Entry], error: &FieldError, check: fn(&NetworkConfig) -> Vec<FieldError>) -> String {
    let has = |entry: &&&Entry| entry.parsed.as_ref().is_ok_and(|config| check(config).contains(error));
    match entries.iter().rev().find(has) {
        Some(entry) => entry.fault(error),
        None => format!("{error} (class and claim combined)"),
    }
}

fn joined(mut faults: Vec<String>) -> String {
    let more = faults.len().saturating_sub(FAULTS_SHOWN);
    faults.truncate(FAULTS_SHOWN);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!("{}{more}", faults.join("; "))
}
