//! Plans, and carrying them out: the only room that orders steps.
//!
//! [`Engine::prepare`] works on the kubelet's time: host state, plan, ledger, link down. [`Engine::attach`] works on the
//! runtime's: moves, then everything inside the pod in one pipeline. [`Engine::release`] and [`Engine::unprepare`] undo both.
//! Each of them may be called again at any time, after any crash: they compare the ledger with the kernel first.

pub mod engine;
pub mod forecast;
pub mod plan;

pub use engine::{Attach, AttachError, AttachTimes, Engine, PrepareError, PrepareReason, Released};
pub use plan::{Plan, PlanError, Step};
