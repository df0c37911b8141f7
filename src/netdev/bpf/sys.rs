//! bpf(2): the few commands that are needed, each with its types. Numbers and layouts are those of `linux/bpf.h`.
#![expect(unsafe_code, reason = "there is no safe crate for these commands; nothing outside of this file needs any")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `enum bpf_cmd`.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
enum Command {
    ObjPin = 6,
    ObjGet = 7,
    ProgAttach = 8,
    ProgDetach = 9,
    ProgGetFdById = 13,
    ObjGetInfoByFd = 15,
    ProgQuery = 16,
    LinkCreate = 28,
    LinkGetFdById = 30,
    LinkGetNextId = 31,
    LinkDetach = 34,
}

/// `BPF_XDP` of `enum bpf_attach_type`.
pub const XDP: u32 = 37;
/// `BPF_TCX_INGRESS` of `enum bpf_attach_type`.
pub const TCX_INGRESS: u32 = 46;
/// `BPF_TCX_EGRESS` of `enum bpf_attach_type`.
pub const TCX_EGRESS: u32 = 47;
/// `BPF_LINK_TYPE_XDP` of `enum bpf_link_type`.
pub const LINK_XDP: u32 = 6;
/// `BPF_LINK_TYPE_TCX` of `enum bpf_link_type`.
pub const LINK_TCX: u32 = 11;
/// `BPF_MPROG_MAX`, `linux/bpf_mprog.h`: most programs at one place of a link.
const MAX_PROGRAMS: usize = 64;
/// `BPF_TAG_SIZE`, bytes.
const TAG: usize = 8;
/// `BPF_OBJ_NAME_LEN`, bytes.
const NAME: usize = 16;

/// The start of `union bpf_attr`. The kernel takes any length whose rest is zero.
#[derive(Debug)]
#[repr(C, align(8))]
struct Attr([u8; 64]);

impl Attr {
    fn new() -> Self {
        Self([0; 64])
    }

    /// A 32-bit field at `at` bytes.
    fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn fd(self, at: usize, fd: &impl AsFd) -> Self {
        self.word(at, fd.as_fd().as_raw_fd().cast_unsigned())
    }

    /// A 64-bit field at `at` bytes with the address of `to`.
    fn pointer<T>(mut self, at: usize, to: *const T) -> Self {
        self.0[at..at + 8].copy_from_slice(&(to.expose_provenance() as u64).to_ne_bytes());
        self
    }

    fn read(&self, at: usize) -> u32 {
        read(&self.0, at)
    }
}

fn read(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// # Safety
/// Each address in `attr` is of a buffer that the command may read, or write, to the length that `attr` gives for it.
unsafe fn bpf(command: Command, attr: &mut Attr) -> io::Result<i32> {
    // SAFETY: `attr` is as long as is said, and lives until the call returns; what it points to is the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_long, std::ptr::from_mut(attr), size_of::<Attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { i32::try_from(result).map_err(io::Error::other) }
}

/// A command without addresses.
fn plain(command: Command, mut attr: Attr) -> io::Result<i32> {
    // SAFETY: these commands have no address among their fields.
    unsafe { bpf(command, &mut attr) }
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the kernel made this descriptor for the caller, just now; nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// What `BPF_OBJ_GET_INFO_BY_FD` tells of a program (`struct bpf_prog_info`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramInfo {
    /// `enum bpf_prog_type`.
    pub kind: u32,
    /// Its number, as long as it is loaded.
    pub id: u32,
    /// Hash of its instructions.
    pub tag: [u8; TAG],
    /// Its name, up to 15 bytes; may be empty.
    pub name: String,
}

/// What `BPF_OBJ_GET_INFO_BY_FD` tells of a link of a program to a network link (`struct bpf_link_info`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkInfo {
    /// `enum bpf_link_type`: [`LINK_TCX`], [`LINK_XDP`], or another.
    pub kind: u32,
    /// Its number, as long as it exists.
    pub id: u32,
    /// Number of its program.
    pub program: u32,
    /// Index of the network link, in the namespace that one is in (which is not told); 0 when the link was detached.
    pub index: u32,
    /// `enum bpf_attach_type`, for TCX.
    pub attach_type: u32,
}

/// A program by its number. Needs `CAP_SYS_ADMIN`.
///
/// # Errors
/// The system's: `ENOENT` where there is none, `EPERM`.
pub fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    plain(Command::ProgGetFdById, Attr::new().word(0, id)).map(owned)
}

/// A link by its number. Needs `CAP_SYS_ADMIN`.
///
/// # Errors
/// The system's: `ENOENT` where there is none, `EPERM`.
pub fn link_by_id(id: u32) -> io::Result<OwnedFd> {
    plain(Command::LinkGetFdById, Attr::new().word(0, id)).map(owned)
}

/// The number of the first link after `id` of the whole system; none after the last. Needs `CAP_SYS_ADMIN`.
///
/// # Errors
/// The system's: `EPERM`.
pub fn next_link(id: u32) -> io::Result<Option<u32>> {
    let mut attr = Attr::new().word(0, id);
    // SAFETY: the command has no address among its fields; the answer is written into `attr`.
    match unsafe { bpf(Command::LinkGetNextId, &mut attr) } {
        Ok(_) => Ok(Some(attr.read(4))),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Fills the start of an info structure; what an older kernel does not know stays zero.
fn info<const N: usize>(fd: &impl AsFd) -> io::Result<[u8; N]> {
    #[repr(C, align(8))]
    struct Info<const N: usize>([u8; N]);
    let mut info = Info([0; N]);
    let length = u32::try_from(N).map_err(io::Error::other)?;
    let mut attr = Attr::new().fd(0, fd).word(4, length).pointer(8, std::ptr::from_mut(&mut info).cast_const());
    // SAFETY: the kernel writes at most `length` bytes at the address, which are `info`'s.
    unsafe { bpf(Command::ObjGetInfoByFd, &mut attr)? };
    Ok(info.0)
}

/// What a program is.
///
/// # Errors
/// The system's: `EINVAL` for what is no object of bpf.
pub fn program_info(program: &impl AsFd) -> io::Result<ProgramInfo> {
    let bytes: [u8; 80] = info(program)?;
    let mut tag = [0; TAG];
    tag.copy_from_slice(&bytes[8..8 + TAG]);
    let name = bytes[64..64 + NAME].split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(name).into_owned();
    Ok(ProgramInfo { kind: read(&bytes, 0), id: read(&bytes, 4), tag, name })
}

/// What a link is. `index` and `attach_type` mean something for [`LINK_TCX`] and [`LINK_XDP`] only.
///
/// # Errors
/// As [`program_info`].
pub fn link_info(link: &impl AsFd) -> io::Result<LinkInfo> {
    let bytes: [u8; 24] = info(link)?;
    let at = |at| read(&bytes, at);
    Ok(LinkInfo { kind: at(0), id: at(4), program: at(8), index: at(16), attach_type: at(20) })
}

/// The programs at one place of the network link with `index` in the thread's namespace, in their order: number of the program, and
/// of the link that holds it there (0: it is attached directly). Needs `CAP_NET_ADMIN`.
///
/// # Errors
/// The system's: `EINVAL` where the kernel does not know the place, `ENODEV`, `EPERM`.
pub fn query(index: u32, attach_type: u32) -> io::Result<Vec<(u32, u32)>> {
    let (mut programs, mut links) = ([0_u32; MAX_PROGRAMS], [0_u32; MAX_PROGRAMS]);
    let attr = Attr::new().word(0, index).word(4, attach_type).word(24, MAX_PROGRAMS as u32);
    let mut attr =
        attr.pointer(16, std::ptr::from_mut(&mut programs).cast_const()).pointer(40, std::ptr::from_mut(&mut links).cast_const());
    // SAFETY: both addresses are of arrays with as many elements as the count at 24 says; the others are null: not wanted.
    unsafe { bpf(Command::ProgQuery, &mut attr)? };
    let count = (attr.read(24) as usize).min(MAX_PROGRAMS);
    Ok(programs.into_iter().zip(links).take(count).collect())
}

/// Attaches a program directly, behind those that are at the place already.
///
/// # Errors
/// The system's: `EEXIST` where it is there already.
pub fn attach(program: &impl AsFd, index: u32, attach_type: u32) -> io::Result<()> {
    plain(Command::ProgAttach, Attr::new().word(0, index).fd(4, program).word(8, attach_type)).map(drop)
}

/// Detaches a program that is attached directly.
///
/// # Errors
/// The system's: `ENOENT` where it is not there.
pub fn detach(program: &impl AsFd, index: u32, attach_type: u32) -> io::Result<()> {
    plain(Command::ProgDetach, Attr::new().word(0, index).fd(4, program).word(8, attach_type)).map(drop)
}

/// Attaches a program by a link, which lasts as long as somebody holds it. `flags` are those of the place (`XDP_FLAGS_*`).
///
/// # Errors
/// The system's.
pub fn create_link(program: &impl AsFd, index: u32, attach_type: u32, flags: u32) -> io::Result<OwnedFd> {
    let attr = Attr::new().fd(0, program).word(4, index).word(8, attach_type).word(12, flags);
    plain(Command::LinkCreate, attr).map(owned)
}

/// Takes a link's program from the network link. The link stays, to no purpose.
///
/// # Errors
/// The system's.
pub fn detach_link(link: &impl AsFd) -> io::Result<()> {
    plain(Command::LinkDetach, Attr::new().fd(0, link)).map(drop)
}

fn path_text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)
}

/// Makes a file of a bpffs that holds a program or link.
///
/// # Errors
/// The system's: `EEXIST`, `EPERM` where it is no bpffs or the name has a dot.
pub fn pin(object: &impl AsFd, path: &Path) -> io::Result<()> {
    let path = path_text(path)?;
    let mut attr = Attr::new().pointer(0, path.as_ptr()).fd(8, object);
    // SAFETY: the address is of a text that ends with zero and outlives the call.
    unsafe { bpf(Command::ObjPin, &mut attr) }.map(drop)
}

/// What a file of a bpffs holds: a program, a map or a link.
///
/// # Errors
/// The system's: `ENOENT`, `EACCES` where it is no such file.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = path_text(path)?;
    let mut attr = Attr::new().pointer(0, path.as_ptr());
    // SAFETY: the address is of a text that ends with zero and outlives the call.
    unsafe { bpf(Command::ObjGet, &mut attr) }.map(owned)
}
