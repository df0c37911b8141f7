//! The gate of containers: what `dranic-guard` does, and what it shares with the agent.
//!
//! `dranic-guard` is an OCI `createRuntime` hook. The OCI runtime runs it on the host for each container that uses a claim, after the
//! container's namespaces are made and before its program starts. It compares the kernel with the ledger ([`check`], [`look`]), asks the
//! agent for what is missing ([`ask`]), waits, and fails the container with one line where it does not come.
//!
//! Blocking, small, without async runtime and without anything of Kubernetes' API: it must run while nothing else of ours does.

pub mod args;
pub mod ask;
pub mod check;
pub mod container;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod hook;
pub mod limits;
pub mod look;
pub mod marks;
pub mod oci;
pub mod pass;
pub mod protocol;
mod text;
pub mod told;
mod wait;
mod watch;

pub use hook::{GuardUse, Hook};
pub use wait::{main, version};
