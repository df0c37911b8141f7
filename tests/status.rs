//! The status of claims and events: against a double of the API server, and of the whole agent on a scratch node.

#[path = "status/agent.rs"]
mod agent;
#[path = "status/events.rs"]
mod events;
#[path = "status/rig.rs"]
mod rig;
#[path = "status/writer.rs"]
mod writer;
