//! What is in use of an RDMA device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How many objects of each kind an RDMA device has, those of the kernel itself among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// Open handles of programs. While there are none, whatever else is there is the kernel's.
    pub contexts: u64,
    /// Queue pairs.
    pub queue_pairs: u64,
    /// Completion queues.
    pub completion_queues: u64,
    /// Memory regions.
    pub memory_regions: u64,
    /// Protection domains.
    pub protection_domains: u64,
}

impl Resources {
    /// Notes `count` of what the kernel calls `name` (`restrack` types, `drivers/infiniband/core/nldev.c`).
    pub(super) fn note(&mut self, name: &str, count: u64) {
        match name {
            "ctx" => self.contexts = count,
            "qp" => self.queue_pairs = count,
            "cq" => self.completion_queues = count,
            "mr" => self.memory_regions = count,
            "pd" => self.protection_domains = count,
            _ => {}
        }
    }

    /// Whether a program has it open.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.contexts > 0
    }
}

/// As `rdma resource show` abbreviates them.
impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { contexts, queue_pairs, completion_queues, memory_regions, protection_domains } = self;
        write!(f, "{contexts} ctx, {queue_pairs} qp, {completion_queues} cq, {memory_regions} mr, {protection_domains} pd")
    }
}
