//! What the agent does with a device, without Kubernetes: for operators, and for trials on one machine.
//!
//! Inventory, plan and engine are the agent's; the ledger is in a folder of its own. A claim is made up for each device, a pod for
//! each network namespace.

pub mod find;
pub mod preview;
mod work;

pub use preview::Preview;
pub use work::{Manual, ManualError, Returned, free_of_agent, netns};
