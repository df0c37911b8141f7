//! Tells when something in a folder is removed or replaced.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A watch on one folder.
#[derive(Debug)]
pub(super) struct Presence {
    events: AsyncFd<OwnedFd>,
}

impl Presence {
    /// Watches `folder`. Needs a tokio runtime with I/O around it.
    ///
    /// # Errors
    /// When there is no such folder, or the system has no watch left (`fs.inotify.max_user_instances`).
    pub(super) fn watch(folder: &Path) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // Moved to: a file that takes the place of another. The folder itself may go, too.
        let removed = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVE;
        let folder_removed = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_ONLYDIR;
        inotify.add_watch(folder, removed | folder_removed)?;
        #[allow(
            deprecated,
            reason = "the other constructor is unsafe; what it asks for holds: OwnedFd owns one fd until it is dropped"
        )]
        let events = AsyncFd::with_interest(OwnedFd::from(inotify), Interest::READABLE)?;
        Ok(Self { events })
    }

    /// Waits until something was removed or replaced. Safe to drop at any time (nothing is lost).
    ///
    /// # Errors
    /// When the watch is broken.
    pub(super) async fn changed(&self) -> io::Result<()> {
        loop {
            let mut ready = self.events.readable().await?;
            if let Ok(drained) = ready.try_io(|events| drain(events.get_ref())) {
                return drained;
            }
        }
    }
}

/// Reads what is queued and throws it away: whoever waits looks for himself. `WouldBlock` when there was nothing.
fn drain(events: &impl AsFd) -> io::Result<()> {
    let mut buffer = [0; 4096];
    let mut seen = false;
    loop {
        match nix::unistd::read(events, &mut buffer) {
            Ok(_) => seen = true,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) if seen => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn removals_and_replacements_are_told_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        let (file, other) = (folder.join("file"), folder.join("other"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&file, "").unwrap();
        let presence = Presence::watch(&folder).unwrap();
        std::fs::write(&other, "").unwrap();
        timeout(Duration::from_millis(50), presence.changed()).await.expect_err("a new file is nothing to look for");
        std::fs::rename(&other, &file).unwrap();
        timeout(SOON, presence.changed()).await.expect("a replacement").unwrap();
        std::fs::remove_file(&file).unwrap();
        timeout(SOON, presence.changed()).await.expect("a removal").unwrap();
        std::fs::remove_dir(&folder).unwrap();
        timeout(SOON, presence.changed()).await.expect("the folder itself").unwrap();
        assert!(Presence::watch(&folder).is_err());
    }
}
