//! A port and its GIDs as a network namespace sees them. The kernel's RDMA netlink does not tell GIDs; sysfs does, and a mount of it shows
//! the devices of the namespace in which it was made.

use std::io::{ErrorKind, Read};
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::{Gid, PortState};
use crate::names::RdmaDeviceName;
use crate::netns::{Netns, NetnsError};

/// Most entries of a GID table that are read: as many as mlx5 has.
pub const GIDS_MAX: u32 = 256;
/// Longest file that is read, bytes: the kernel writes at most a page.
const FILE_MAX: u64 = 4096;
/// Longest text that is kept of a file, in characters; the kernel's are shorter.
const TEXT_MAX: usize = 64;

/// A port as a namespace sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortView {
    /// Whether it carries traffic.
    pub state: PortState,
    /// `Ethernet`, `InfiniBand`, or what the kernel says.
    pub link_layer: String,
    /// As the kernel has it: `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// Its GIDs by their index, without those that are zero.
    pub gids: Vec<Gid>,
}

/// Why a port could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// No sysfs of the namespace.
    #[error("sysfs of the pod's network namespace can't be mounted ({step}: {source}): it needs Linux 5.2 and CAP_SYS_ADMIN")]
    Mount {
        /// Which system call.
        step: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file can't be read.
    #[error("{path} in sysfs: {source}")]
    Read {
        /// Below the root of sysfs.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file has what is not understood.
    #[error("{path} in sysfs has {text:?}, which is not understood")]
    Odd {
        /// Below the root of sysfs.
        path: String,
        /// What it has, shortened.
        text: String,
    },
    /// The namespace.
    #[error(transparent)]
    Netns(#[from] NetnsError),
}

/// Looks at a port of `device` as `netns` has it; none when that does not see the device, or it has no such port.
///
/// # Errors
/// When sysfs can't be had, or has what is not understood.
pub fn view(netns: &Netns, device: &RdmaDeviceName, port: u32) -> Result<Option<PortView>, ViewError> {
    netns.run(|| view_below(own_sysfs()?.as_fd(), device, port))?
}

/// A mount of sysfs that nobody else sees, and that goes with its descriptor. It shows the calling thread's network namespace.
fn own_sysfs() -> Result<OwnedFd, ViewError> {
    let failed = |step| move |errno: Errno| ViewError::Mount { step, source: errno.into() };
    let context = fsopen("sysfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen"))?;
    fsconfig_create(context.as_fd()).map_err(failed("fsconfig"))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed("fsmount"))
}

/// As [`view`], with `sysfs` as the root of sysfs.
fn view_below(sysfs: BorrowedFd<'_>, device: &RdmaDeviceName, port: u32) -> Result<Option<PortView>, ViewError> {
    let base = format!("class/infiniband/{device}/ports/{port}");
    let Some(state) = read(sysfs, &format!("{base}/state"))? else { return Ok(None) };
    let odd = |text: &str| ViewError::Odd { path: format!("{base}/state"), text: text.to_owned() };
    let number = state.split(':').next().and_then(|number| number.trim().parse::<u8>().ok()).ok_or_else(|| odd(&state))?;
    Ok(Some(PortView {
        state: PortState::from(number),
        link_layer: read(sysfs, &format!("{base}/link_layer"))?.unwrap_or_default(),
        rate: read(sysfs, &format!("{base}/rate"))?,
        gids: gids(sysfs, &base)?,
    }))
}

fn gids(sysfs: BorrowedFd<'_>, base: &str) -> Result<Vec<Gid>, ViewError> {
    let mut gids = Vec::new();
    for index in 0..GIDS_MAX {
        let path = format!("{base}/gids/{index}");
        let Some(text) = read(sysfs, &path)? else { break };
        let gid: Ipv6Addr = text.parse().map_err(|_| ViewError::Odd { path, text })?;
        if gid.is_unspecified() {
            continue;
        }
        let attribute = |name: &str| read(sysfs, &format!("{base}/gid_attrs/{name}/{index}"));
        // Without a type it went away just now.
        if let Some(kind) = attribute("types")? {
            gids.push(Gid { index, gid, kind, link: attribute("ndevs")? });
        }
    }
    Ok(gids)
}

/// The first line of a file; none when it is not there, or its entry is empty (`EINVAL`).
fn read(sysfs: BorrowedFd<'_>, path: &str) -> Result<Option<String>, ViewError> {
    let failed = |source| ViewError::Read { path: path.to_owned(), source };
    let opened = match openat(sysfs, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT | Errno::NODEV) => return Ok(None),
        opened => opened.map_err(|errno| failed(errno.into()))?,
    };
    let mut bytes = Vec::new();
    match std::fs::File::from(opened).take(FILE_MAX).read_to_end(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::InvalidInput || error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
        result => result.map_err(failed)?,
    };
    let line = String::from_utf8_lossy(&bytes);
    let line = line.lines().next().unwrap_or_default().trim();
    Ok((!line.is_empty()).then(|| line.chars().take(TEXT_MAX).collect()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    const BASE: &str = "class/infiniband/mlx5_0/ports/1";

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(BASE).join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn look(dir: &tempfile::TempDir, device: &str, port: u32) -> Result<Option<PortView>, ViewError> {
        view_below(File::open(dir.path()).unwrap().as_fd(), &RdmaDeviceName::new(device).unwrap(), port)
    }

    #[test]
    fn a_port_is_read_with_its_gids() {
        let dir = tree(&[
            ("state", "4: ACTIVE\n"),
            ("link_layer", "Ethernet\n"),
            ("rate", "100 Gb/sec (4X EDR)\n"),
            ("gids/0", "fe80:0000:0000:0000:0e42:a1ff:fe65:5f96\n"),
            ("gid_attrs/types/0", "IB/RoCE v1\n"),
            ("gid_attrs/ndevs/0", "net1\n"),
            ("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("gids/2", "0000:0000:0000:0000:0000:ffff:0a00:0005\n"),
            ("gid_attrs/types/2", "RoCE v2\n"),
            ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0006\n"),
            ("gids/5", "fe80::1\n"),
        ]);
        let seen = look(&dir, "mlx5_0", 1).unwrap().unwrap();
        assert_eq!((seen.state, seen.link_layer.as_str()), (PortState::Active, "Ethernet"));
        assert_eq!(seen.rate.as_deref(), Some("100 Gb/sec (4X EDR)"));
        let gids: Vec<_> = seen.gids.iter().map(|g| (g.index, g.gid.to_string(), g.kind.as_str(), g.link.as_deref())).collect();
        // Zero is none, and so is what has no type (any more); the table ends where a number is missing.
        assert_eq!(
            gids,
            [
                (0, "fe80::e42:a1ff:fe65:5f96".to_owned(), "IB/RoCE v1", Some("net1")),
                (2, "::ffff:10.0.0.5".to_owned(), "RoCE v2", None)
            ]
        );
        assert_eq!(look(&dir, "mlx5_0", 2).unwrap(), None);
        assert_eq!(look(&dir, "mlx5_1", 1).unwrap(), None);
    }

    #[test]
    fn what_is_not_understood_is_named_and_nothing_grows_without_bounds() {
        let dir = tree(&[("state", "UP\n")]);
        let error = look(&dir, "mlx5_0", 1).unwrap_err().to_string();
        assert!(error.contains("ports/1/state") && error.contains("\"UP\""), "{error}");
        let dir = tree(&[("state", "1: DOWN\n"), ("gids/0", "10.0.0.1\n")]);
        let error = look(&dir, "mlx5_0", 1).unwrap_err().to_string();
        assert!(error.contains("ports/1/gids/0"), "{error}");
        let dir = tree(&[("state", "1: DOWN\n"), ("link_layer", &"x".repeat(10_000))]);
        for n in 0..300 {
            for (folder, text) in [("gids", "fe80::1"), ("gid_attrs/types", "RoCE v2")] {
                let path = dir.path().join(BASE).join(folder);
                fs::create_dir_all(&path).unwrap();
                fs::write(path.join(n.to_string()), text).unwrap();
            }
        }
        let seen = look(&dir, "mlx5_0", 1).unwrap().unwrap();
        assert_eq!((seen.link_layer.len(), seen.gids.len()), (TEXT_MAX, GIDS_MAX as usize));
    }
}
