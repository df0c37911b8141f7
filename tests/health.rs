//! Health of devices: the service against the kubelet's double, and what the agent says while links change on a scratch node.

#[path = "common/node.rs"]
#[allow(dead_code, reason = "shared with other test programs")]
mod node;

#[path = "health/agent.rs"]
mod agent;
#[path = "health/service.rs"]
mod service;
