//! The `dranic` program as it is run: `dranic agent` as a process on a scratch node, between doubles of API server, kubelet and
//! runtime, and the other commands beside it.

#[path = "common/node.rs"]
#[allow(dead_code, reason = "shared with tests/bad_input.rs")]
mod node;

#[path = "agent/budget.rs"]
mod budget;
#[path = "agent/cli.rs"]
mod cli;
#[path = "agent/crio.rs"]
mod crio;
#[path = "agent/hold.rs"]
mod hold;
#[path = "agent/job.rs"]
mod job;
#[path = "agent/late.rs"]
mod late;
#[path = "agent/restarts.rs"]
mod restarts;
#[path = "agent/stop.rs"]
mod stop;
#[path = "agent/views.rs"]
mod views;
