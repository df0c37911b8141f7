//! Per-link sysctls: `net/{ipv4,ipv6}/{conf,neigh}/<link>/*`. A move to another namespace resets them.
//!
//! `/proc/sys/net` shows the namespace of the calling *thread*: call these inside [`crate::netns::Netns::run`].

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::sys::statvfs::{FsFlags, statvfs};

/// Where they are, unless [`use_root`] says otherwise.
pub const ROOT: &str = "/proc/sys/net";
/// What [`use_root`] said.
static OTHER_ROOT: OnceLock<PathBuf> = OnceLock::new();
/// The folders with one folder for each link.
const FOLDERS: [&str; 4] = ["ipv4/conf", "ipv4/neigh", "ipv6/conf", "ipv6/neigh"];
/// Follows the link's MTU by itself.
const NOT_KEPT: &str = "ipv6/conf/mtu";
/// One write to `all` changes these on every link and in `default` (`ip_forward` is another name of the first, which a pod network
/// switches on with its first pod). A link that agrees with the host in them is given back agreeing with the host, whatever the
/// host does by then: a move gives it the `default`.
const HOST_WIDE: [&str; 3] = ["ipv4/conf/forwarding", "ipv6/conf/forwarding", "ipv6/conf/disable_ipv6"];
/// Whether sockets of no VRF serve what comes in by a link of one; for the whole namespace (`Documentation/networking/vrf.rst`).
const FROM_VRFS: [&str; 2] = ["ipv4/tcp_l3mdev_accept", "ipv4/udp_l3mdev_accept"];
/// Longest value that is read, bytes. The kernel's are below 100.
const MAX_VALUE: u64 = 4096;

/// Takes the sysctls of this process from `dir`, a bind mount of [`ROOT`]: in a container [`ROOT`] itself is read-only. Such a
/// mount shows the namespace of the calling thread, too. Only the first call counts.
///
/// # Errors
/// When `dir` is not there or is mounted read-only.
pub fn use_root(dir: &Path) -> io::Result<()> {
    if statvfs(dir)?.flags().contains(FsFlags::ST_RDONLY) {
        return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "it is mounted read-only"));
    }
    if dir != Path::new(ROOT) {
        OTHER_ROOT.get_or_init(|| dir.to_owned());
    }
    Ok(())
}

fn root() -> &'static Path {
    OTHER_ROOT.get().map_or(Path::new(ROOT), PathBuf::as_path)
}

/// Reads every per-link sysctl of `link`. Keys are `ipv4/conf/arp_ignore`, `ipv6/neigh/gc_stale_time`, …: the path below
/// `net/` with the link's name left out. Those that can't be read or written are left out, and
/// host-wide switches in which the link agrees with the host.
///
/// # Errors
/// When `/proc/sys/net` is not there, or `link` can't be a link's name. A family that is off (no IPv6) is no error.
pub fn read_all(link: &str) -> io::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    fs::metadata(root())?;
    check_name(link)?;
    for folder in FOLDERS {
        let entries = match fs::read_dir(root().join(folder).join(link)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let Ok(file) = entry.file_name().into_string() else { continue };
            let key = format!("{folder}/{file}");
            if key == NOT_KEPT {
                continue;
            }
            if let Some(value) = read_writable(&entry.path())
                && !(HOST_WIDE.contains(&&*key) && read("default", &key).is_ok_and(|default| default == value))
            {
                found.insert(key, value);
            }
        }
    }
    Ok(found)
}

/// The value of a file that may be both read and written. Some refuse to be read (`stable_secret` while there is none).
fn read_writable(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    let mode = file.metadata().ok()?.permissions().mode();
    if mode & 0o200 == 0 || mode & 0o400 == 0 {
        return None;
    }
    let mut value = String::new();
    file.take(MAX_VALUE).read_to_string(&mut value).ok()?;
    Some(value.trim_end().to_owned())
}

/// Reads one sysctl, key as in [`read_all`].
///
/// # Errors
/// The system's error; `InvalidInput` for what is no key or no link's name.
pub fn read(link: &str, key: &str) -> io::Result<String> {
    let mut value = String::new();
    File::open(path(link, key)?)?.take(MAX_VALUE).read_to_string(&mut value)?;
    Ok(value.trim_end().to_owned())
}

/// Writes one sysctl, key as in [`read_all`].
///
/// # Errors
/// The system's error (`EACCES` or `EROFS` on a read-only `/proc/sys`, `EINVAL` for a value out of range); `InvalidInput` for
/// what is no key or no link's name.
pub fn write(link: &str, key: &str, value: &str) -> io::Result<()> {
    // One write call: the kernel takes each as a whole value.
    OpenOptions::new().write(true).open(path(link, key)?)?.write_all(value.as_bytes())
}

/// Lets TCP and UDP sockets of the calling thread's namespace serve links in VRFs, too.
///
/// # Errors
/// The system's error; `NotFound` from a kernel that has no VRFs.
pub fn accept_from_vrfs() -> io::Result<()> {
    FROM_VRFS.iter().try_for_each(|key| OpenOptions::new().write(true).open(root().join(key))?.write_all(b"1"))
}

/// Writes those of `wanted` whose current value differs and returns what could not be written.
pub fn restore(link: &str, wanted: &BTreeMap<String, String>) -> Vec<(String, io::Error)> {
    restore_counted(link, wanted).1
}

/// As [`restore`]; returns the keys that were written, too.
pub(super) fn restore_counted(link: &str, wanted: &BTreeMap<String, String>) -> (Vec<String>, Vec<(String, io::Error)>) {
    let mut keys: Vec<&String> = wanted.keys().collect();
    keys.sort_by_key(|key| (order(key), *key));
    let (mut written, mut failed) = (Vec::new(), Vec::new());
    for key in keys {
        let value = &wanted[key];
        match read(link, key) {
            Ok(current) if current == *value => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                failed.push((key.clone(), error));
                continue;
            }
            // One that can't be read now could be when it was recorded: write it.
            _ => {}
        }
        match write(link, key, value) {
            Ok(()) => written.push(key.clone()),
            Err(error) => failed.push((key.clone(), error)),
        }
    }
    (written, failed)
}

/// Writing a secret switches `addr_gen_mode`, and `forwarding` changes what router advertisements do: those first. Otherwise
/// the order of the names, where the exact form of a value (`…_ms`, `…_bytes`) comes after the rounded one.
pub(crate) fn order(key: &str) -> u8 {
    match key.rsplit('/').next() {
        Some("stable_secret") => 0,
        Some("forwarding") => 1,
        _ => 2,
    }
}

fn path(link: &str, key: &str) -> io::Result<PathBuf> {
    check_name(link)?;
    let (folder, file) = key.rsplit_once('/').ok_or_else(|| invalid(key))?;
    if !FOLDERS.contains(&folder) || matches!(file, "" | "." | "..") {
        return Err(invalid(key));
    }
    Ok(root().join(folder).join(link).join(file))
}

/// A link's name is one path component; dots inside are fine.
fn check_name(link: &str) -> io::Result<()> {
    if matches!(link, "" | "." | "..") || link.contains(['/', '\0']) { Err(invalid(link)) } else { Ok(()) }
}

fn invalid(what: &str) -> io::Error {
    let what: String = what.chars().take(64).collect();
    io::Error::new(io::ErrorKind::InvalidInput, format!("{what:?} is not a per-link sysctl or a link's name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stay_below_their_folder() {
        for key in ["", "arp_ignore", "ipv4/conf/", "ipv4/conf/..", "ipv4/route/x", "ipv4/conf/../x", "../ipv4/conf/x"] {
            assert!(path("lo", key).is_err(), "{key}");
        }
        for link in ["", ".", "..", "a/b", "../lo"] {
            assert!(path(link, "ipv4/conf/arp_ignore").is_err(), "{link}");
            assert!(read_all(link).is_err(), "{link}");
        }
        assert_eq!(path("eth0.10", "ipv4/conf/arp_ignore").unwrap(), Path::new("/proc/sys/net/ipv4/conf/eth0.10/arp_ignore"));
    }

    #[test]
    fn secrets_and_forwarding_come_first() {
        let mut keys = ["ipv6/conf/accept_ra", "ipv6/conf/forwarding", "ipv6/conf/addr_gen_mode", "ipv6/conf/stable_secret"];
        keys.sort_by_key(|key| (order(key), *key));
        assert_eq!(keys, ["ipv6/conf/stable_secret", "ipv6/conf/forwarding", "ipv6/conf/accept_ra", "ipv6/conf/addr_gen_mode"]);
    }

    #[test]
    fn reads_the_loopback_links() {
        let all = read_all("lo").unwrap();
        assert!(all.contains_key("ipv4/conf/rp_filter"), "{all:?}");
        assert!(!all.contains_key("ipv6/conf/mtu") && all.contains_key("ipv4/conf/send_redirects"));
        assert_eq!(all["ipv4/conf/rp_filter"], read("lo", "ipv4/conf/rp_filter").unwrap());
        // The same values again: nothing to write.
        assert!(restore_counted("lo", &all).0.is_empty());
    }
}
