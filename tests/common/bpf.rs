//! Programs for tests: they do nothing, and are loaded by bpf(2) itself.
#![expect(unsafe_code, reason = "loading a program is a command of bpf(2) that the agent has no use for")]

use std::ffi::CString;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

use dranic::netdev::bpf::sys;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// `BPF_PROG_TYPE_SCHED_CLS`, `linux/bpf.h`.
pub(crate) const SCHED_CLS: u32 = 3;
/// `BPF_PROG_TYPE_XDP`, `linux/bpf.h`.
pub(crate) const XDP: u32 = 6;
/// `BPF_PROG_LOAD`, `linux/bpf.h`.
const LOAD: libc::c_long = 5;

/// A program that returns `verdict`, called `name` (up to 15 bytes).
pub(crate) fn load(kind: u32, name: &str, verdict: i32) -> OwnedFd {
    // mov64 r0, verdict; exit
    let mov = 0xb7 | u64::from(verdict.cast_unsigned()) << 32;
    let instructions: [u64; 2] = [mov, 0x95];
    let license = CString::new("GPL").unwrap();
    let mut attr = [0_u64; 16];
    attr[0] = u64::from(kind) | (instructions.len() as u64) << 32;
    attr[1] = instructions.as_ptr().expose_provenance() as u64;
    attr[2] = license.as_ptr().expose_provenance() as u64;
    let mut text = [0_u8; 16];
    text[..name.len()].copy_from_slice(name.as_bytes());
    for (word, bytes) in attr[6..8].iter_mut().zip(text.chunks(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().unwrap());
    }
    // SAFETY: the structure is as long as is said, and the addresses in it are of what lives until the call returns.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, LOAD, attr.as_ptr(), size_of_val(&attr)) };
    assert!(fd >= 0, "{name}: {}", std::io::Error::last_os_error());
    // SAFETY: the kernel made it just now, for us.
    unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).unwrap()) }
}

/// A bpffs of its own.
pub(crate) struct Bpffs(tempfile::TempDir);

impl Bpffs {
    pub(crate) fn mount() -> Self {
        let dir = tempfile::tempdir().unwrap();
        mount(Some("bpf"), dir.path(), Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
        Self(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// A file that holds `object`.
    pub(crate) fn pin(&self, object: &OwnedFd, name: &str) -> PathBuf {
        let path = self.path().join(name);
        sys::pin(object, &path).unwrap();
        path
    }

    /// All files in it.
    pub(crate) fn files(&self) -> Vec<String> {
        let out = Command::new("find").arg(self.path()).args(["-type", "f", "-printf", "%P\\n"]).output().unwrap();
        let mut files: Vec<String> = String::from_utf8(out.stdout).unwrap().lines().map(str::to_owned).collect();
        files.sort();
        files
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let _ = umount2(self.path(), MntFlags::MNT_DETACH);
    }
}
