//! Programs whose link is lent are kept loaded: by this process, and by files of a bpffs for the next one.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Engine;
use crate::attach::Step;
use crate::crash;
use crate::ledger::{ClaimRecord, DeviceRecord};
use crate::names::ClaimUid;
use crate::netdev::bpf::{Program, TakeOffError, pins, sys};

/// Programs by their number.
pub(super) type Open = HashMap<u32, Arc<OwnedFd>>;

/// See above.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// A bpffs, where there may be one, and the folder in it.
    files: Option<(PathBuf, PathBuf)>,
    open: Mutex<HashMap<ClaimUid, Open>>,
}

/// Whether the plan takes all programs off the device.
pub(super) fn takes_off(device: &DeviceRecord) -> bool {
    device.plan.steps.iter().any(|step| matches!(step, Step::DetachPrograms { .. }))
}

impl Engine {
    /// Keeps programs of lent links in the file system `bpffs` too, in a folder for the driver `driver`, so that they outlive the agent.
    /// Where that is no bpffs, they are kept by the process alone.
    #[must_use]
    pub fn with_bpffs(mut self, bpffs: &Path, driver: &str) -> Self {
        self.kept.files = Some((bpffs.to_owned(), bpffs.join("dranic").join(without_dots(driver))));
        self
    }
}

/// A bpffs takes no name with a dot.
fn without_dots(name: &str) -> String {
    name.replace('.', "_")
}

impl Kept {
    /// Keeps what the record's devices need when they come back, as far as it is not kept yet.
    ///
    /// # Errors
    /// When a program that will be taken off can't be opened; the others are kept all the same.
    pub(super) fn keep(&self, record: &ClaimRecord) -> Result<(), TakeOffError> {
        let mut refused = Ok(());
        for device in &record.devices {
            let all = takes_off(device);
            for program in device.host.programs.to_keep(all) {
                match self.keep_one(&record.claim.uid, program) {
                    Ok(()) => {}
                    Err(error) if all && error.raw_os_error() != Some(libc::ENOENT) => {
                        refused = Err(TakeOffError { what: format!("opening {program}"), why: error.to_string() });
                    }
                    Err(error) => {
                        tracing::warn!(claim = %record.claim, device = %device.device, %program, %error, "can't be kept for the host");
                    }
                }
            }
        }
        refused
    }

    fn keep_one(&self, claim: &ClaimUid, program: &Program) -> io::Result<()> {
        if self.open().get(claim).is_some_and(|open| open.contains_key(&program.id)) {
            return Ok(());
        }
        let file = self.folder(claim).map(|folder| folder.join(program.id.to_string()));
        let kept = file.as_ref().and_then(|file| sys::open_pin(file).ok()).filter(|fd| program.is(fd));
        let fd = match kept {
            Some(fd) => fd,
            None => {
                let fd = sys::program_by_id(program.id)?;
                if !program.is(&fd) {
                    return Err(io::Error::from_raw_os_error(libc::ENOENT));
                }
                if let Some(Err(error)) = file.map(|file| pins::keep(&fd, &file)) {
                    tracing::warn!(%claim, %program, %error, "has no file in the bpffs; it is lost if the agent ends before the link is back");
                }
                fd
            }
        };
        crash::point("prepare: program kept");
        self.open().entry(claim.clone()).or_default().insert(program.id, Arc::new(fd));
        Ok(())
    }

    /// What is kept for a claim.
    pub(super) fn of(&self, claim: &ClaimUid) -> Open {
        self.open().get(claim).cloned().unwrap_or_default()
    }

    /// The claim's devices are back.
    pub(super) fn let_go(&self, claim: &ClaimUid) {
        self.open().remove(claim);
        if let Some(folder) = self.folder(claim) {
            remove(&folder);
        }
    }

    /// Removes the files of all claims but those that `stays` says: an agent was killed before it could.
    pub(super) fn tidy(&self, stays: impl Fn(&str) -> bool) {
        let Some((_, folder)) = &self.files else { return };
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| !stays(name)) {
                remove(&entry.path());
            }
        }
    }

    /// The name of a claim's folder.
    pub(super) fn name(claim: &ClaimUid) -> String {
        without_dots(claim.as_str())
    }

    fn folder(&self, claim: &ClaimUid) -> Option<PathBuf> {
        let (bpffs, folder) = self.files.as_ref()?;
        pins::is_bpffs(bpffs).then(|| folder.join(Self::name(claim)))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<ClaimUid, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(folder = %folder.display(), %error, "programs that nobody needs any more stay loaded; remove it");
        }
        _ => {}
    }
}
