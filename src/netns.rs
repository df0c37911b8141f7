//! Owned handles of network namespaces, and work on a thread inside one.

pub mod holder;

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};
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
        /// The path as given, shortened to 256 characters.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The path is a file, but not of a network namespace.
    #[error("{path} is not a network namespace")]
    NotNetns {
        /// The path as given, shortened to 256 characters.
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

/// A path for people; a runtime may give one of any length.
fn shown(path: &Path) -> String {
    path.to_string_lossy().chars().take(256).collect()
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
        let open_error = |source| NetnsError::Open { path: shown(path), source };
        // O_NONBLOCK: whoever hands us the path of a FIFO must not hang us.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(open_error)?;
        Self::of_file(file, path)
    }

    /// The namespace of a descriptor that somebody handed over.
    ///
    /// # Errors
    /// When it is not of a network namespace.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, NetnsError> {
        Self::of_file(File::from(fd), Path::new("what was handed over"))
    }

    fn of_file(file: File, path: &Path) -> Result<Self, NetnsError> {
        let open_error = |source| NetnsError::Open { path: shown(path), source };
        if !is_netns(&file).map_err(open_error)? {
            return Err(NetnsError::NotNetns { path: shown(path) });
        }
        let meta = file.metadata().map_err(open_error)?;
        Ok(Self { fd: file.into(), id: NetnsId { dev: meta.dev(), ino: meta.ino() } })
    }

    /// The namespace of the calling thread.
    ///
    /// # Errors
    /// When `/proc/thread-self/ns/net` can't be opened.
    pub fn current() -> Result<Self, NetnsError> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
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
        let fd = self.fd.try_clone().map_err(|source| NetnsError::Open { path: format!("net:[{}]", self.id.ino), source })?;
        Ok(Self { fd, id: self.id })
    }

    /// Runs `work` on a thread of its own inside this namespace and returns its result. The thread ends with the work, so no
    /// thread of a pool is ever left in a foreign namespace. Works from blocking code only.
    ///
    /// # Errors
    /// When the namespace can't be entered, or `work` panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        let thread_error = |what: String| NetnsError::Thread { id: self.id, what };
        let inside = || {
            setns(&self.fd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetnsError::Enter { id: self.id, source: errno.into() })?;
            Ok(work())
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, inside);
            let thread = thread.map_err(|error| thread_error(format!("can't be started: {error}")))?;
            thread.join().unwrap_or_else(|panic| Err(thread_error(format!("panicked: {}", panic_text(&*panic)))))
        })
    }
}

/// Whether `file` is a network namespace. nsfs holds all kinds, and a bind mount does not show its own; `setns(2)` compares the
/// kind (`EINVAL`) before it looks at privileges, so asking it on a thread that ends at once tells without `unsafe`.
fn is_netns(file: &File) -> std::io::Result<bool> {
    if !fstatfs(file).is_ok_and(|stat| stat.filesystem_type() == NSFS_MAGIC) {
        return Ok(false);
    }
    let of_kind = || setns(file, CloneFlags::CLONE_NEWNET) != Err(Errno::EINVAL);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, of_kind)?;
        Ok(thread.join().unwrap_or(false))
    })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> bool {
        let root = nix::unistd::geteuid().is_root();
        if !root {
            eprintln!("skipped: needs root");
        }
        root
    }

    /// A fresh namespace, made on a thread that ends.
    fn fresh() -> Netns {
        let make = || {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).unwrap();
            Netns::current().unwrap()
        };
        std::thread::spawn(make).join().unwrap()
    }

    #[test]
    fn work_runs_inside_and_the_caller_stays_outside() {
        if !root() {
            return;
        }
        let before = Netns::current().unwrap().id();
        let netns = fresh();
        assert_ne!(netns.id(), before);
        assert_eq!(netns.run(|| Netns::current().unwrap().id()).unwrap(), netns.id());
        assert_eq!(netns.try_clone().unwrap().run(|| Netns::current().unwrap().id()).unwrap(), netns.id());
        assert_eq!(Netns::current().unwrap().id(), before);
    }

    #[test]
    fn a_panic_of_the_work_is_an_error() {
        if !root() {
            return;
        }
        let error = fresh().run(|| panic!("no such {}", "luck")).unwrap_err();
        assert!(error.to_string().contains("panicked: no such luck"), "{error}");
    }

    #[test]
    fn other_files_and_other_namespaces_are_refused_by_name() {
        for path in ["/proc/self/ns/uts", "/proc/self/ns/mnt", "/proc/self/status", "/tmp", "/dev/null"] {
            let error = Netns::open(Path::new(path)).unwrap_err();
            assert!(matches!(&error, NetnsError::NotNetns { path: named } if named == path), "{error}");
        }
        let error = Netns::open(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(matches!(error, NetnsError::Open { .. }) && error.to_string().contains("/nowhere/at/all"), "{error}");
    }

    #[test]
    fn a_descriptor_that_was_handed_over_is_checked() {
        let own = File::open("/proc/thread-self/ns/net").unwrap();
        assert_eq!(Netns::from_fd(own.into()).unwrap().id(), Netns::current().unwrap().id());
        for other in ["/proc/self/ns/uts", "/dev/null", "/tmp"] {
            let error = Netns::from_fd(File::open(other).unwrap().into()).unwrap_err();
            assert!(matches!(error, NetnsError::NotNetns { .. }), "{other}: {error}");
        }
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(Netns::from_fd(socket.into()), Err(NetnsError::NotNetns { .. })));
    }

    #[test]
    fn a_fifo_does_not_hang() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(matches!(Netns::open(&path), Err(NetnsError::NotNetns { .. })));
    }
}
