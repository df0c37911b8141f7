//! The folder of records, and an index over them in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nix::fcntl::Flock;
use tokio::sync::watch;

use super::{ClaimRecord, file, folder};
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
    /// The folder can't be made or written to.
    #[error("state directory {path} can't be used: {what}: {source}; name a writable one with --state-dir")]
    Unusable {
        /// Which folder.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another process has the folder.
    #[error("state directory {0} is in use by another dranic agent (--state-dir)")]
    InUse(PathBuf),
    /// Another agent has taken over.
    #[error("state directory {0} was handed over to another dranic agent, which will do it")]
    HandedOver(PathBuf),
    /// The record can't be written so that it could be read again.
    #[error("record of claim {claim} can't be kept: {reason}")]
    Record {
        /// Which claim.
        claim: ClaimUid,
        /// Why.
        reason: String,
    },
    /// There is a file of this claim that we must not touch: of a newer version, or unreadable.
    #[error("{path} is left as it is: {reason}; run the version that wrote it, or move the file away")]
    Refused {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// How sure a write must be before it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// File and folder are on the disk (fsync): survives a power cut.
    Disk,
    /// Renamed into place: survives the death of this process, not of the machine. For what is void after a reboot anyway.
    Process,
}

/// A file that could not be read as a record. A damaged one was set aside under its name with `.bad` appended; one of a newer
/// version, or that the system could not read, stays in place, and its claim can't be written or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// Where it is now.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

#[derive(Debug, Default)]
struct Index {
    claims: BTreeMap<ClaimUid, Arc<ClaimRecord>>,
    pods: HashMap<PodUid, BTreeSet<ClaimUid>>,
}

impl Index {
    fn insert(&mut self, record: Arc<ClaimRecord>) {
        let uid = record.claim.uid.clone();
        self.remove(&uid);
        self.pods.entry(record.pod.uid.clone()).or_default().insert(uid.clone());
        self.claims.insert(uid, record);
    }

    fn remove(&mut self, claim: &ClaimUid) {
        let Some(old) = self.claims.remove(claim) else { return };
        if let Some(claims) = self.pods.get_mut(&old.pod.uid) {
            claims.remove(claim);
            if claims.is_empty() {
                self.pods.remove(&old.pod.uid);
            }
        }
    }
}

/// The ledger. Cheap to share; all methods take `&self`. Writers of one claim wait for each other; readers, and writers of other
/// claims, never wait for the disk.
#[derive(Debug)]
pub struct Ledger {
    folder: PathBuf,
    index: RwLock<Index>,
    /// Files of these claims must not be touched, and why.
    refused: HashMap<ClaimUid, String>,
    /// Claims that somebody is writing.
    writing: Mutex<HashSet<ClaimUid>>,
    written: Condvar,
    /// How many writes there were.
    changes: watch::Sender<u64>,
    /// None when it was handed over.
    lock: Mutex<Option<Flock<File>>>,
}

/// Word of a process that waits for a folder ([`Ledger::announce`]).
#[derive(Debug)]
pub struct Announced(#[allow(dead_code, reason = "it is there to be dropped")] Option<Flock<File>>);

/// The right to write one claim.
struct Writing<'a> {
    ledger: &'a Ledger,
    claim: &'a ClaimUid,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.ledger.writers().remove(self.claim);
        self.ledger.written.notify_all();
    }
}

impl Ledger {
    /// Opens (and makes, mode 0700) the folder, takes a lock on it, and reads all records. Left-over temporary files are removed.
    ///
    /// # Errors
    /// When the folder can't be made, locked, listed or written to (it is tried).
    pub fn open(folder: &Path) -> Result<(Self, Vec<Quarantined>), LedgerError> {
        Self::open_locked(folder, folder::prepare(folder, false)?)
    }

    /// As [`Self::open`], but waits while another process has the folder, for as long as that takes: call it on a thread that may
    /// be left behind.
    ///
    /// # Errors
    /// As [`Self::open`], without [`LedgerError::InUse`].
    pub fn open_when_free(folder: &Path) -> Result<(Self, Vec<Quarantined>), LedgerError> {
        Self::open_locked(folder, folder::prepare(folder, true)?)
    }

    /// Says that this process waits for the folder, for as long as what is returned is held; see [`Self::is_awaited`].
    #[must_use]
    pub fn announce(folder: &Path) -> Announced {
        Announced(folder::announce(folder))
    }

    /// Whether another process has said that it waits for the folder.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        folder::is_awaited(&self.folder)
    }

    /// Lets the folder go to the process that waits for it. From then on nothing is written here any more.
    pub fn hand_over(&self) {
        // Whoever writes a claim now is done first.
        let mut writers = self.writers();
        while !writers.is_empty() {
            writers = self.written.wait(writers).unwrap_or_else(PoisonError::into_inner);
        }
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn is_ours(&self) -> bool {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn open_locked(folder: &Path, lock: Flock<File>) -> Result<(Self, Vec<Quarantined>), LedgerError> {
        let loaded = folder::load(folder)?;
        let mut index = Index::default();
        for record in loaded.records {
            index.insert(Arc::new(record));
        }
        let ledger = Self {
            folder: folder.to_owned(),
            index: RwLock::new(index),
            refused: loaded.refused,
            writing: Mutex::default(),
            written: Condvar::new(),
            changes: watch::Sender::new(0),
            lock: Mutex::new(Some(lock)),
        };
        Ok((ledger, loaded.quarantined))
    }

    /// Writes `record` (generation grows by one) and then makes it visible to readers. Blocks on the disk.
    ///
    /// # Errors
    /// When it could not be written; the record before it is then still the one that is seen.
    pub fn put(&self, record: ClaimRecord, durability: Durability) -> Result<Arc<ClaimRecord>, LedgerError> {
        let claim = record.claim.uid.clone();
        let _writing = self.write_lock(&claim)?;
        self.put_locked(record, durability)
    }

    /// Changes the record of `claim` as [`Self::put`] does, with no other writer in between; returns what `change` returned, or
    /// none when there is no record. `change` can't alter the claim's UID, and must not write to the ledger itself.
    ///
    /// # Errors
    /// As [`Self::put`].
    pub fn update<T>(
        &self,
        claim: &ClaimUid,
        durability: Durability,
        change: impl FnOnce(&mut ClaimRecord) -> T,
    ) -> Result<Option<T>, LedgerError> {
        let _writing = self.write_lock(claim)?;
        let Some(record) = self.get(claim) else { return Ok(None) };
        let mut record = ClaimRecord::clone(&record);
        let result = change(&mut record);
        record.claim.uid = claim.clone();
        self.put_locked(record, durability)?;
        Ok(Some(result))
    }

    fn put_locked(&self, mut record: ClaimRecord, durability: Durability) -> Result<Arc<ClaimRecord>, LedgerError> {
        let old = self.get(&record.claim.uid);
        record.generation = old.as_ref().map_or(record.generation, |old| old.generation.max(record.generation)).saturating_add(1);
        let encode = |record: &ClaimRecord| {
            file::encode(record).map_err(|reason| LedgerError::Record { claim: record.claim.uid.clone(), reason })
        };
        let claim = &record.claim.uid;
        let bytes = encode(&record)?;
        // What a prepare writes is new, and is all that brings a NIC back as it was. Later writes change phases, on the runtime's
        // time, and reading back is most of what a write costs.
        if durability == Durability::Disk {
            let unreadable = |reason| LedgerError::Record { claim: claim.clone(), reason };
            file::check(&bytes, &record).map_err(unreadable)?;
        }
        folder::write(&self.folder, claim, &bytes, durability)?;
        if durability == Durability::Disk
            && let Err(error) = folder::sync(&self.folder)
        {
            // Renamed, but not surely on the disk: what readers see must be what a restart would see.
            let _ = match &old {
                Some(old) => encode(old).and_then(|bytes| folder::write(&self.folder, claim, &bytes, Durability::Process)),
                None => folder::remove(&self.folder, claim),
            };
            return Err(error);
        }
        let record = Arc::new(record);
        self.index_mut().insert(Arc::clone(&record));
        self.changes.send_modify(|count| *count += 1);
        Ok(record)
    }

    /// Removes the record; none there is success. Blocks on the disk.
    ///
    /// # Errors
    /// When the file could not be removed; the record is then still seen.
    pub fn remove(&self, claim: &ClaimUid) -> Result<(), LedgerError> {
        let _writing = self.write_lock(claim)?;
        folder::remove(&self.folder, claim)?;
        // A removed record that a power cut brings back is of an earlier boot, and void: not worth failing for.
        let _ = folder::sync(&self.folder);
        self.index_mut().remove(claim);
        self.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    /// The record of a claim.
    #[must_use]
    pub fn get(&self, claim: &ClaimUid) -> Option<Arc<ClaimRecord>> {
        self.index().claims.get(claim).cloned()
    }

    /// The records of a pod's claims, sorted by claim UID. A map look-up; no I/O.
    #[must_use]
    pub fn by_pod(&self, pod: &PodUid) -> Vec<Arc<ClaimRecord>> {
        let index = self.index();
        let claims = index.pods.get(pod).into_iter().flatten();
        claims.filter_map(|claim| index.claims.get(claim).cloned()).collect()
    }

    /// Whether any claim of this pod is recorded. A map look-up, without allocation, for pods that are not ours.
    #[must_use]
    pub fn has_pod(&self, pod: &str) -> bool {
        self.index().pods.contains_key(pod)
    }

    /// All records, sorted by claim UID.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<ClaimRecord>> {
        self.index().claims.values().cloned().collect()
    }

    /// Changes whenever a record does.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Waits until nobody writes `claim`.
    fn write_lock<'a>(&'a self, claim: &'a ClaimUid) -> Result<Writing<'a>, LedgerError> {
        if let Some(reason) = self.refused.get(claim) {
            return Err(LedgerError::Refused { path: folder::path(&self.folder, claim), reason: reason.clone() });
        }
        let mut writers = self.writers();
        if !self.is_ours() {
            return Err(LedgerError::HandedOver(self.folder.clone()));
        }
        while writers.contains(claim) {
            writers = self.written.wait(writers).unwrap_or_else(PoisonError::into_inner);
        }
        writers.insert(claim.clone());
        Ok(Writing { ledger: self, claim })
    }

    // Nothing under these locks can leave them half changed, so a panic elsewhere does not matter.
    fn writers(&self) -> MutexGuard<'_, HashSet<ClaimUid>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}
