//! `ResourceClaim.status.devices`: what this driver says of its devices, by server-side apply.
//!
//! [`content`] decides what is said (pure), [`writer`] sees to it that the API server has it.

pub mod content;
mod send;
#[cfg(test)]
mod tests;
pub mod writer;

pub use content::{Reason, apply_body, device_states};
pub use writer::{Queue, Source, StatusConfig, run};
