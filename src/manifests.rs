//! Checking manifests without a cluster: the configuration of ours in DeviceClasses, ResourceClaims and ResourceClaimTemplates. Pure.
//!
//! [`yaml`] reads text into a tree that knows its lines, [`objects`] finds the configuration in it, [`check`] says what is wrong.
//! [`policy`] says the same to an API server, as far as a schema can.

pub mod check;
mod configs;
pub mod objects;
pub mod policy;
mod scalar;
pub mod yaml;

#[cfg(test)]
mod tests;

pub use check::{Fault, Report, check};
pub use configs::parameters;
pub use yaml::{Node, Position, documents};
