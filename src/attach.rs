//! Plans, and carrying them out: the only room that orders steps.

pub mod engine;
pub mod plan;

pub use plan::{Plan, PlanError, Step};
