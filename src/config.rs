//! The opaque parameters of claims and classes: types, strict parsing, validation, merging. Pure.
//!
//! The JSON is the peer's (DRANET), so that existing manifests run unchanged. `docs/configuration.md` has every field.

mod duplicates;
mod hint;
mod merge;
pub mod schema;
mod support;
mod sysctls;
mod text;
mod types;
mod validate;

#[cfg(test)]
mod tests;

pub use duplicates::duplicate_keys;
pub(crate) use hint::distance;
pub use sysctls::FieldSysctl;
pub use types::{
    AddrGenMode, ChannelsConfig, CoalesceConfig, Copies, EthtoolConfig, HostStateConfig, InterfaceConfig, InterfaceKind,
    IpoibConfig, IpoibMode, Ipv6Config, IpvlanConfig, IpvlanFlag, IpvlanMode, LinkState, MacvlanConfig, MacvlanMode,
    NeighborConfig, NetworkConfig, PauseConfig, RdmaCharDevice, RdmaConfig, RdmaLimits, RdmaNetnsMode, Restore, RingsConfig,
    RouteConfig, RouteKind, RuleConfig, Take, VfConfig, VlanConfig, VlanProtocol, VrfConfig,
};

use duplicates::PathText;
use serde_json::Value;

/// Largest parameters we read, in bytes. The API server takes up to 10 KiB (`OpaqueParametersMaxLength`); the rest is head room.
pub const PARAMETERS_MAX: usize = 64 * 1024;
/// Deepest nesting of objects and lists we read. The deepest field, `interface.vrf.name`, needs 3.
pub const NESTING_MAX: usize = 16;
/// Longest message of a fault, in characters: the decoder's messages quote values of any length.
const MESSAGE_MAX: usize = 400;
/// Paths of all fields that are objects, but elements of lists.
const OBJECTS: [&str; 17] = [
    "interface",
    "interface.vrf",
    "interface.macvlan",
    "interface.ipvlan",
    "interface.vlan",
    "interface.ipoib",
    "interface.ipv6",
    "interface.sysctls",
    "ethtool",
    "ethtool.rings",
    "ethtool.channels",
    "ethtool.coalesce",
    "ethtool.pause",
    "vf",
    "rdma",
    "rdma.limits",
    "hostState",
];
/// Path of the parameters as a whole.
const ROOT: &str = "(root)";

/// What is wrong with one field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct FieldError {
    /// JSON path from the parameters' root, for example `interface.addresses[0]`; `(root)` for the whole.
    pub path: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

impl FieldError {
    fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into().chars().take(MESSAGE_MAX).collect() }
    }
}

/// Parses parameters strictly: unknown, duplicate and wrong-case keys are refused with their path. `null` is the same as absent.
/// Does not validate values across fields: see [`NetworkConfig::validate`].
///
/// # Errors
/// The first fault with its path.
pub fn parse(json: &str) -> Result<NetworkConfig, FieldError> {
    if json.len() > PARAMETERS_MAX {
        return Err(FieldError::new(ROOT, format!("has {} bytes; at most {PARAMETERS_MAX} are read", json.len())));
    }
    let value: Value = serde_json::from_str(json).map_err(|e| FieldError::new(ROOT, format!("is not JSON: {e}")))?;
    if let Some(path) = duplicate_keys(json).into_iter().next() {
        return Err(FieldError::new(path, "stands twice in the same object; remove one"));
    }
    if deeper_than(&value, NESTING_MAX) {
        return Err(FieldError::new(ROOT, format!("is nested more than {NESTING_MAX} levels deep")));
    }
    if let Some(path) = list_for_object(&value) {
        return Err(FieldError::new(path, "must be an object, not a list"));
    }
    decode(value)
}

fn decode(value: Value) -> Result<NetworkConfig, FieldError> {
    let config: Option<NetworkConfig> = serde_path_to_error::deserialize(value).map_err(|error| {
        let mut path = PathText::default();
        for segment in error.path() {
            match segment {
                serde_path_to_error::Segment::Seq { index } => path.push_index(*index),
                serde_path_to_error::Segment::Map { key } => path.push_key(key),
                _ => {}
            }
        }
        let message = error.inner().to_string();
        let message = hint::unknown_field(error.path(), &message).unwrap_or(message);
        FieldError::new(if path.is_empty() { ROOT } else { path.as_str() }, message)
    })?;
    Ok(config.unwrap_or_default())
}

fn deeper_than(value: &Value, levels: usize) -> bool {
    let inside = |v: &Value| levels == 0 || deeper_than(v, levels - 1);
    match value {
        Value::Object(map) => levels == 0 || map.values().any(inside),
        Value::Array(list) => levels == 0 || list.iter().any(inside),
        _ => false,
    }
}

/// The first place where a list stands for an object. The derived decoders would take its elements as fields, in order.
fn list_for_object(root: &Value) -> Option<String> {
    let at = |path: &'static str| (path, root.pointer(&format!("/{}", path.replace('.', "/"))));
    let single = std::iter::once((ROOT, Some(root))).chain(OBJECTS.into_iter().map(at));
    let lists = ["routes", "rules", "neighbors"].into_iter().flat_map(|name| {
        let elements = root.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        elements.iter().enumerate().filter(|(_, e)| e.is_array()).map(move |(i, _)| format!("{name}[{i}]"))
    });
    let wrong = |(path, value): (&str, Option<&Value>)| value.is_some_and(Value::is_array).then(|| path.to_owned());
    single.filter_map(wrong).next().or_else(|| lists.into_iter().next())
}
