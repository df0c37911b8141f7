//! Files of the state folder: `<claim UID>.json` records, `lock`, `successor`, `.tmp-…` while writing, `….bad` for what was set aside.

use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::file::{self, Fault};
use super::store::{Durability, LedgerError, Quarantined};
use crate::ledger::ClaimRecord;
use crate::names::ClaimUid;

/// Claim UIDs never begin with a dot.
const TEMP_PREFIX: &str = ".tmp-";
pub(super) const SUFFIX: &str = ".json";

/// What a folder holds.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) records: Vec<ClaimRecord>,
    /// Sorted by path.
    pub(super) quarantined: Vec<Quarantined>,
    /// Claims whose file stays as it is.
    pub(super) refused: HashMap<ClaimUid, String>,
}

/// The claim's file.
pub(super) fn path(folder: &Path, claim: &ClaimUid) -> PathBuf {
    folder.join(format!("{claim}{SUFFIX}"))
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    move |source| LedgerError::Io { what, path: path.to_owned(), source }
}

/// Makes the folder, locks it and tries to write to it. `waits`: until whoever has the lock lets it go.
pub(super) fn prepare(folder: &Path, waits: bool) -> Result<Flock<File>, LedgerError> {
    let unusable = |what| move |source| LedgerError::Unusable { path: folder.to_owned(), what, source };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(unusable("can't make it"))?;
    let lock = if waits { lock_when_free(folder)? } else { try_lock(folder)? };
    let trial = folder.join(format!("{TEMP_PREFIX}trial"));
    create(&trial, b"trial\n", Durability::Disk)
        .and_then(|()| std::fs::remove_file(&trial))
        .map_err(unusable("can't write to it"))?;
    Ok(lock)
}

fn open_lock(folder: &Path) -> Result<File, LedgerError> {
    let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(folder.join("lock"));
    lock.map_err(|source| LedgerError::Unusable { path: folder.to_owned(), what: "can't open its lock file", source })
}

fn cant_lock(folder: &Path, errno: Errno) -> LedgerError {
    LedgerError::Unusable { path: folder.to_owned(), what: "can't lock it", source: errno.into() }
}

fn try_lock(folder: &Path) -> Result<Flock<File>, LedgerError> {
    Flock::lock(open_lock(folder)?, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => LedgerError::InUse(folder.to_owned()),
        errno => cant_lock(folder, errno),
    })
}

fn lock_when_free(folder: &Path) -> Result<Flock<File>, LedgerError> {
    loop {
        let lock = match Flock::lock(open_lock(folder)?, FlockArg::LockExclusive) {
            Ok(lock) => lock,
            Err((_, Errno::EINTR)) => continue,
            Err((_, errno)) => return Err(cant_lock(folder, errno)),
        };
        // The folder may have been made anew while we waited: then others lock another file.
        let (ours, there) = (lock.metadata(), std::fs::metadata(folder.join("lock")));
        if matches!((ours, there), (Ok(ours), Ok(there)) if (ours.dev(), ours.ino()) == (there.dev(), there.ino())) {
            return Ok(lock);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("can't make", folder))?;
    }
}

/// Held by an agent that waits for the folder, so that the one that has it knows.
const SUCCESSOR: &str = "successor";

/// Says that somebody waits for the folder, for as long as this is held; none where another one says so already, or it can't be said.
pub(super) fn announce(folder: &Path) -> Option<Flock<File>> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(folder.join(SUCCESSOR)).ok()?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()
}

/// Whether somebody waits for the folder.
pub(super) fn is_awaited(folder: &Path) -> bool {
    let Ok(file) = OpenOptions::new().write(true).open(folder.join(SUCCESSOR)) else { return false };
    matches!(Flock::lock(file, FlockArg::LockExclusiveNonblock), Err((_, Errno::EWOULDBLOCK)))
}

/// Reads all records, removes left-over temporary files, sets damaged files aside.
pub(super) fn load(folder: &Path) -> Result<Loaded, LedgerError> {
    let mut loaded = Loaded::default();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io_error("can't list", folder))? {
        names.push(entry.map_err(io_error("can't list", folder))?.file_name());
    }
    names.sort();
    for name in names {
        let path = folder.join(&name);
        // A name that is not UTF-8 can't be one of a claim; it keeps its suffix here.
        let name = name.to_string_lossy();
        if name.starts_with(TEMP_PREFIX) {
            std::fs::remove_file(&path).map_err(io_error("can't remove left-over", &path))?;
        } else if let Some(stem) = name.strip_suffix(SUFFIX) {
            load_one(&path, stem, &mut loaded);
        }
    }
    Ok(loaded)
}

fn load_one(path: &Path, stem: &str, loaded: &mut Loaded) {
    let claim = match ClaimUid::new(stem) {
        Ok(claim) => claim,
        Err(error) => return loaded.quarantined.push(set_aside(path, error.to_string())),
    };
    let fault = match read(path) {
        Ok(bytes) => match file::decode(&bytes, &claim) {
            Ok(record) => return loaded.records.push(record),
            Err(fault) => fault,
        },
        // Kept: the disk or a permission may be what is wrong, not the record.
        Err(error) => Fault::Newer(format!("can't be read: {error}")),
    };
    match fault {
        Fault::Bad(reason) => loaded.quarantined.push(set_aside(path, reason)),
        Fault::Newer(reason) => {
            loaded.quarantined.push(Quarantined { path: path.to_owned(), reason: reason.clone() });
            loaded.refused.insert(claim, reason);
        }
    }
}

/// At most one byte more than a file may have. What is no regular file reads as empty, which is no record.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(nix::libc::ELOOP) => return Ok(Vec::new()),
        Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => return Ok(Vec::new()),
        other => other?,
    };
    let mut bytes = Vec::new();
    if file.metadata()?.is_file() {
        file.take(file::MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

fn set_aside(path: &Path, reason: String) -> Quarantined {
    let mut target = path.as_os_str().to_owned();
    target.push(".bad");
    match std::fs::rename(path, &target) {
        Ok(()) => Quarantined { path: target.into(), reason },
        Err(error) => Quarantined { path: path.to_owned(), reason: format!("{reason} (and can't be set aside: {error})") },
    }
}

/// Writes the claim's file by way of a temporary one, which never stays behind. Only one writer a claim at a time.
pub(super) fn write(folder: &Path, claim: &ClaimUid, bytes: &[u8], durability: Durability) -> Result<(), LedgerError> {
    let temp = folder.join(format!("{TEMP_PREFIX}{claim}"));
    let path = path(folder, claim);
    let written = create(&temp, bytes, durability).and_then(|()| std::fs::rename(&temp, &path));
    written.map_err(|error| {
        // On a full disk the half-written file is what keeps it full.
        let _ = std::fs::remove_file(&temp);
        io_error("can't write", &path)(error)
    })
}

/// Removes the claim's file; none there is success.
pub(super) fn remove(folder: &Path, claim: &ClaimUid) -> Result<(), LedgerError> {
    let path = path(folder, claim);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("can't remove", &path)(error)),
        _ => Ok(()),
    }
}

/// Makes renames in the folder survive a power cut.
pub(super) fn sync(folder: &Path) -> Result<(), LedgerError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("can't sync", folder))
}

fn create(path: &Path, bytes: &[u8], durability: Durability) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    // Whatever the umask.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(bytes)?;
    match durability {
        Durability::Disk => file.sync_all(),
        Durability::Process => Ok(()),
    }
}
