//! The gate of containers: what `dranic-guard` does, and what it shares with the agent.
//!
//! `dranic-guard` is an OCI `createRuntime` hook. The OCI runtime runs it on the host for each container that uses a claim, after the
//! container's namespaces are made and before its program starts. It compares the kernel with the ledger , asks the
//! agent for what is missing , waits, and fails the container with one line where it does not come.
//!
//! Blocking, small, without async runtime and without anything of Kubernetes' API: it must run while nothing else of ours does.

pub mod args;
pub mod hook;
pub mod oci;
pub mod pass;
pub mod protocol;

pub use hook::{GuardUse, Hook};

/// Runs the guard.
#[must_use]
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}
