//! The durable record of what we meant to do: one JSON file per claim.

mod file;
mod folder;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod peek;
pub mod record;
mod store;

pub use record::{
    Attachment, ClaimRecord, ClaimRef, DeviceRecord, DhcpRecord, Missed, Phase, PodRef, RdmaRecord, RdmaUsable, Share, StepTime,
};
pub use store::{Durability, Ledger, LedgerError, Quarantined};

#[cfg(test)]
mod tests;
