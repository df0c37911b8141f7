//! What users, the API, the runtime and the machine can do wrong: each gets a clear answer that names the thing and the next step,
//! and leaves nothing half done. All through the real agent as a process.
//!
//! More of the same kind, one level lower: `tests/kubelet/hostile.rs` (bytes on the kubelet's sockets), `tests/nri.rs` (bytes on the
//! NRI socket), `src/config/tests.rs` (every field of the parameters), `tests/agent/cli.rs` (flags and variables).

#[path = "common/node.rs"]
#[allow(dead_code, reason = "shared with tests/agent.rs")]
mod node;

#[path = "bad_input/claims.rs"]
mod claims;
#[path = "bad_input/parameters.rs"]
mod parameters;
#[path = "bad_input/pods.rs"]
mod pods;
#[path = "bad_input/system.rs"]
mod system;
#[path = "bad_input/wire.rs"]
mod wire;
