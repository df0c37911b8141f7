//! Hears of changes in the ledger's folder and in the one of the agent's socket. What can't be watched is looked at from time to time.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};

/// Records are renamed into place.
const RECORDS: AddWatchFlags = AddWatchFlags::IN_MOVED_TO.union(AddWatchFlags::IN_DELETE).union(AddWatchFlags::IN_ONLYDIR);
/// Sockets are bound in place; an agent that comes after one that was killed removes the old one first.
const SOCKET: AddWatchFlags = AddWatchFlags::IN_CREATE.union(AddWatchFlags::IN_MOVED_TO).union(AddWatchFlags::IN_ONLYDIR);

/// A watch of two folders.
#[derive(Debug)]
pub(super) struct Watch {
    inotify: Option<Inotify>,
    folders: [(PathBuf, AddWatchFlags, Option<WatchDescriptor>); 2],
}

/// What changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Files of the ledger, by name; none of them where it is not known which.
    pub(super) records: Vec<Option<OsString>>,
    /// Something came into the folder of the socket.
    pub(super) socket: bool,
}

impl Watch {
    /// Watches the ledger's folder and the folder of the socket, those of them that are there.
    pub(super) fn new(state_dir: &Path, socket: &Path) -> Self {
        // Without an instance (`fs.inotify.max_user_instances`) there is still the look from time to time.
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).ok();
        let socket_dir = socket.parent().unwrap_or(Path::new("/")).to_owned();
        let mut watch = Self { inotify, folders: [(state_dir.to_owned(), RECORDS, None), (socket_dir, SOCKET, None)] };
        watch.renew();
        watch
    }

    /// Watches folders that were made since.
    pub(super) fn renew(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        for (folder, flags, watched) in &mut self.folders {
            // A folder that is watched already gives the same descriptor again; one that was made anew another.
            *watched = inotify.add_watch(folder.as_path(), *flags).ok();
        }
    }

    /// To wait for changes.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// What changed since the last call.
    pub(super) fn drain(&mut self) -> Changes {
        let mut changes = Changes::default();
        let Some(inotify) = &self.inotify else { return changes };
        while let Ok(events) = inotify.read_events() {
            for event in events {
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    changes.records.push(None);
                    changes.socket = true;
                } else if Some(event.wd) == self.folders[1].2 {
                    changes.socket = true;
                    // Both may be one folder.
                    if self.folders[0].2 == self.folders[1].2 {
                        changes.records.push(event.name);
                    }
                } else {
                    changes.records.push(event.name);
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_sockets_are_heard_of_also_in_folders_that_come_later() {
        let folder = tempfile::tempdir().unwrap();
        let (state, run) = (folder.path().join("state"), folder.path().join("run"));
        let mut watch = Watch::new(&state, &run.join("gate.sock"));
        std::fs::create_dir(&state).unwrap();
        std::fs::create_dir(&run).unwrap();
        watch.renew();
        std::fs::write(state.join(".tmp-c"), "x").unwrap();
        assert!(watch.drain().records.is_empty(), "a file on its way is not news");
        std::fs::rename(state.join(".tmp-c"), state.join("c.json")).unwrap();
        let changes = watch.drain();
        assert_eq!(changes.records, [Some(OsString::from("c.json"))]);
        assert!(!changes.socket);
        let _listener = std::os::unix::net::UnixListener::bind(run.join("gate.sock")).unwrap();
        let changes = watch.drain();
        assert!(changes.socket && changes.records.is_empty());
    }
}
