//! Owned handles of network namespaces, and work on a thread inside one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What identifies a network namespace while it exists: device and inode of its nsfs file. The inode may be used again after
/// the namespace is gone, so compare it together with the boot id and the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// `st_dev` of the nsfs file.
    pub dev: u64,
    /// `st_ino` of the nsfs file.
    pub ino: u64,
}

/// Why a namespace could not be used.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    /// The path can't be opened.
    #[error("network namespace {path}: {source}")]
    Open {
        /// The path as given.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The path is a file, but not of a network namespace.
    #[error("{path} is not a network namespace")]
    NotNetns {
        /// The path as given.
        path: String,
    },
    /// `setns(2)` refused.
    #[error("can't enter network namespace {id:?}: {source} (is CAP_SYS_ADMIN there?)")]
    Enter {
        /// Which namespace.
        id: NetnsId,
        /// The system's error.
        source: std::io::Error,
    },
    /// A thread could not be made, or it panicked.
    #[error("thread in network namespace {id:?}: {what}")]
    Thread {
        /// Which namespace.
        id: NetnsId,
        /// What happened.
        what: String,
    },
}

/// An open network namespace. Holding it keeps the namespace, and the links in it, alive.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
}

impl Netns {
    /// Opens the namespace at `path` (a bind mount under `/var/run/netns`, or `/proc/PID/ns/net`).
    ///
    /// # Errors
    /// When the path can't be opened or is not a network namespace.
    pub fn open(path: &Path) -> Result<Self, NetnsError> {
        todo!("{path:?}")
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// When `/proc/thread-self/ns/net` can't be opened.
    pub fn current() -> Result<Self, NetnsError> {
        todo!()
    }

    /// Identity of this namespace.
    #[must_use]
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Another handle of the same namespace.
    ///
    /// # Errors
    /// When the file descriptor can't be duplicated (`EMFILE`).
    pub fn try_clone(&self) -> Result<Self, NetnsError> {
        todo!()
    }

    /// Runs `work` on a thread of its own inside this namespace and returns its result. The thread ends with the work, so no
    /// thread of a pool is ever left in a foreign namespace. Works from blocking code only.
    ///
    /// # Errors
    /// When the namespace can't be entered, or `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        let _ = work;
        todo!()
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
