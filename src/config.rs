//! The opaque parameters of claims and classes: types, strict parsing, validation, merging. Pure.
//!
//! The JSON is the peer's (DRANET), so that existing manifests run unchanged. `docs/configuration.md` has every field.

mod duplicates;
mod types;
mod validate;

pub use duplicates::duplicate_keys;
pub use types::{EthtoolConfig, InterfaceConfig, NeighborConfig, NetworkConfig, RouteConfig, RuleConfig, VrfConfig};

/// What is wrong with one field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {message}")]
pub struct FieldError {
    /// JSON path from the parameters' root, for example `interface.addresses[0]`; `(root)` for the whole.
    pub path: String,
    /// What is wrong and what is allowed.
    pub message: String,
}

/// Parses parameters strictly: unknown, duplicate and wrong-case keys are refused with their path. Does not validate values
/// across fields: see [`NetworkConfig::validate`].
///
/// # Errors
/// The first fault with its path.
pub fn parse(json: &str) -> Result<NetworkConfig, FieldError> {
    let _ = json;
    todo!()
}
