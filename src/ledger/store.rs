//! The folder of records, and an index over them in memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::ClaimRecord;
use crate::names::{ClaimUid, PodUid};

/// Why the ledger could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// A file operation failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried: `can't write`, …
        what: &'static str,
        /// Which file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another process has the folder.
    #[error("state directory {0} is in use by another dranic agent (--state-dir)")]
    InUse(PathBuf),
}

/// How sure a write must be before it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// File and folder are on the disk (fsync): survives a power cut.
    Disk,
    /// Renamed into place: survives the death of this process, not of the machine. For what is void after a reboot anyway.
    Process,
}

/// A file that could not be read as a record. It was set aside under its name with `.bad` appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// Where it is now.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// The ledger. Cheap to share; all methods take `&self`.
#[derive(Debug)]
pub struct Ledger {}

impl Ledger {
    /// Opens (and makes, mode 0700) the folder, takes a lock on it, and reads all records. Left-over temporary files are removed.
    ///
    /// # Errors
    /// When the folder can't be made, locked or written to (it is tried).
    pub fn open(folder: &Path) -> Result<(Self, Vec<Quarantined>), LedgerError> {
        let _ = folder;
        todo!()
    }

    /// Writes `record` (generation grows by one) and then makes it visible to readers.
    ///
    /// # Errors
    /// When it could not be written; the record before it is then still the one that is seen.
    pub fn put(&self, record: ClaimRecord, durability: Durability) -> Result<Arc<ClaimRecord>, LedgerError> {
        let _ = (record, durability);
        todo!()
    }

    /// Removes the record; none there is success.
    ///
    /// # Errors
    /// When the file could not be removed; the record is then still seen.
    pub fn remove(&self, claim: &ClaimUid) -> Result<(), LedgerError> {
        let _ = claim;
        todo!()
    }

    /// The record of a claim.
    #[must_use]
    pub fn get(&self, claim: &ClaimUid) -> Option<Arc<ClaimRecord>> {
        let _ = claim;
        todo!()
    }

    /// The records of a pod's claims, sorted by claim UID. A map look-up; no I/O.
    #[must_use]
    pub fn by_pod(&self, pod: &PodUid) -> Vec<Arc<ClaimRecord>> {
        let _ = pod;
        todo!()
    }

    /// Whether any claim of this pod is recorded. A map look-up, without allocation, for pods that are not ours.
    #[must_use]
    pub fn has_pod(&self, pod: &str) -> bool {
        let _ = pod;
        todo!()
    }

    /// All records, sorted by claim UID.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ClaimRecord>> {
        todo!()
    }
}
