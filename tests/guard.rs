//! `dranic-guard` as an OCI runtime runs it: the hook of the claim's CDI spec, with the OCI state on stdin, on a node with the real agent.

#[path = "common/node.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod node;

#[path = "guard/asking.rs"]
mod asking;
#[path = "guard/holding.rs"]
mod holding;
#[path = "guard/rig.rs"]
mod rig;
