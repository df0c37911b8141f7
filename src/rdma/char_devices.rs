//! Which files below `/dev/infiniband` belong to an RDMA device: by sysfs, and never by their numbers alone, since after a reload of
//! the driver `uverbs0` can be another device's. The roots are given, so that tests can bring trees of their own.
//!
//! All namespaces list all of these files, in exclusive mode too.

use std::fs::{DirEntry, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::CharDeviceKind;

/// Where programs look for the files (libibverbs, libibumad, librdmacm).
pub const FOLDER: &str = "/dev/infiniband";
/// Most entries of a class that are looked at. A node has at most one `uverbs` for each RDMA device, and two files more for each port.
const ENTRIES_MAX: usize = 4096;
/// Longest text read from one file, bytes: names have 63 at most.
const FILE_MAX: u64 = 128;
/// Permission bits of a mode.
const PERMISSIONS: u32 = 0o777;

/// What is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Name that the RDMA device has now.
    pub device: &'a str,
    /// Its port whose management files are wanted; from 1.
    pub port: u32,
    /// Kinds of files.
    pub kinds: &'a [CharDeviceKind],
    /// RDMA devices of the same function that have the other half of its management: their `umad` and `issm` come along.
    pub companions: &'a [&'a str],
}

/// A character device, as sysfs has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CharDevice {
    /// Name below `/dev/infiniband`.
    pub name: String,
    /// Which RDMA device it belongs to; `rdma_cm` belongs to all.
    pub device: Option<String>,
    /// Major and minor number.
    pub numbers: (u32, u32),
}

impl CharDevice {
    /// Path on the host and in containers.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{FOLDER}/{}", self.name)
    }
}

/// A character device and its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// What sysfs says.
    pub device: CharDevice,
    /// Permission bits of the node on the host.
    pub mode: u32,
    /// Owner of the node on the host.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Why a container can't be given what it needs. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CharDeviceError {
    /// The kernel has none.
    #[error(
        "RDMA device {device} has no {kind} character device (none in {} is its): is the module loaded? `modprobe {}`", class.display(),
        module(*kind)
    )]
    NotListed {
        /// The RDMA device.
        device: String,
        /// What it lacks.
        kind: CharDeviceKind,
        /// Where sysfs would have it.
        class: PathBuf,
    },
    /// There is no node of it.
    #[error(
        "RDMA device {device}: {} can't be looked at: {source}; udev or devtmpfs makes it: `udevadm trigger --action=add \
         --subsystem-match={class}` (in a container, mount the host's /dev and name that by --dev)",
        path.display()
    )]
    NoNode {
        /// The RDMA device.
        device: String,
        /// Where it should be.
        path: PathBuf,
        /// sysfs class.
        class: &'static str,
        /// Why.
        source: io::Error,
    },
    /// Something else is in its place.
    #[error("RDMA device {device}: {} is no character device; remove it, and let udev make it anew", path.display())]
    NotCharacter {
        /// The RDMA device.
        device: String,
        /// Where.
        path: PathBuf,
    },
    /// Its numbers are not those that the kernel has.
    #[error(
        "RDMA device {device}: {} has the numbers {}:{}, and sysfs says {}:{}; it is left from before its driver was loaded anew: \
         remove it, and let udev make it anew",
        path.display(), found.0, found.1, wanted.0, wanted.1
    )]
    OtherNumbers {
        /// The RDMA device.
        device: String,
        /// Where.
        path: PathBuf,
        /// Those of the node.
        found: (u32, u32),
        /// Those in sysfs.
        wanted: (u32, u32),
    },
}

fn module(kind: CharDeviceKind) -> &'static str {
    match kind {
        CharDeviceKind::Uverbs => "ib_uverbs",
        CharDeviceKind::Umad | CharDeviceKind::Issm => "ib_umad",
        CharDeviceKind::RdmaCm => "rdma_ucm",
    }
}

fn class(kind: CharDeviceKind) -> &'static str {
    match kind {
        CharDeviceKind::Uverbs => "infiniband_verbs",
        CharDeviceKind::Umad | CharDeviceKind::Issm => "infiniband_mad",
        CharDeviceKind::RdmaCm => "misc",
    }
}

/// Where sysfs and the host's `/dev` are.
#[derive(Debug, Clone)]
pub struct CharDevices {
    sysfs: PathBuf,
    dev: PathBuf,
}

impl CharDevices {
    /// With these roots: `/sys` and `/dev` where nothing else is told.
    #[must_use]
    pub fn new(sysfs: &Path, dev: &Path) -> Self {
        Self { sysfs: sysfs.to_owned(), dev: dev.to_owned() }
    }

    /// What the kernel has of `wanted`, sorted by name, each once.
    ///
    /// # Errors
    /// When one of the kinds is not there.
    pub fn listed(&self, wanted: &Wanted<'_>) -> Result<Vec<CharDevice>, CharDeviceError> {
        let mut found = Vec::new();
        for kind in wanted.kinds {
            found.extend(self.of_kind(*kind, wanted.device, Some(wanted.port))?);
            if matches!(kind, CharDeviceKind::Umad | CharDeviceKind::Issm) {
                for companion in wanted.companions {
                    // All its ports are of the same function.
                    found.extend(self.of_kind(*kind, companion, None)?);
                }
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        found.dedup();
        Ok(found)
    }

    /// As [`Self::listed`], with the nodes.
    ///
    /// # Errors
    /// When one is not there, or is not what it should be.
    pub fn nodes(&self, wanted: &Wanted<'_>) -> Result<Vec<Node>, CharDeviceError> {
        self.listed(wanted)?.into_iter().map(|device| self.node(wanted, device)).collect()
    }

    fn node(&self, wanted: &Wanted<'_>, device: CharDevice) -> Result<Node, CharDeviceError> {
        let of = device.device.clone().unwrap_or_else(|| wanted.device.to_owned());
        let path = self.dev.join("infiniband").join(&device.name);
        let kind = kind_of(&device.name).unwrap_or(CharDeviceKind::RdmaCm);
        // A link would lead a container elsewhere.
        let meta = match std::fs::symlink_metadata(&path) {
            Ok(meta) => meta,
            Err(source) => return Err(CharDeviceError::NoNode { device: of, path, class: class(kind), source }),
        };
        if !meta.file_type().is_char_device() {
            return Err(CharDeviceError::NotCharacter { device: of, path });
        }
        let found = numbers_of(meta.rdev());
        if found != device.numbers {
            return Err(CharDeviceError::OtherNumbers { device: of, path, found, wanted: device.numbers });
        }
        Ok(Node { device, mode: meta.mode() & PERMISSIONS, uid: meta.uid(), gid: meta.gid() })
    }

    fn of_kind(&self, kind: CharDeviceKind, device: &str, port: Option<u32>) -> Result<Vec<CharDevice>, CharDeviceError> {
        let class = self.sysfs.join("class").join(class(kind));
        let found: Vec<_> = if kind == CharDeviceKind::RdmaCm {
            let numbers = numbers(&class.join("rdma_cm"));
            numbers.map(|numbers| CharDevice { name: "rdma_cm".to_owned(), device: None, numbers }).into_iter().collect()
        } else {
            let entries = std::fs::read_dir(&class).into_iter().flatten().flatten().take(ENTRIES_MAX);
            entries.filter_map(|entry| char_device(&entry, kind, device, port)).collect()
        };
        if found.is_empty() {
            return Err(CharDeviceError::NotListed { device: device.to_owned(), kind, class });
        }
        Ok(found)
    }
}

/// The kind that a file of this name has, if it has one of a device.
fn kind_of(name: &str) -> Option<CharDeviceKind> {
    let is_numbered = |prefix: &str| {
        let number = name.strip_prefix(prefix);
        number.is_some_and(|number| (1..=9).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit()))
    };
    [("uverbs", CharDeviceKind::Uverbs), ("umad", CharDeviceKind::Umad), ("issm", CharDeviceKind::Issm)]
        .into_iter()
        .find(|(prefix, _)| is_numbered(prefix))
        .map(|(_, kind)| kind)
}

fn char_device(entry: &DirEntry, kind: CharDeviceKind, device: &str, port: Option<u32>) -> Option<CharDevice> {
    let name = entry.file_name().into_string().ok().filter(|name| kind_of(name) == Some(kind))?;
    let folder = entry.path();
    let is_its = text(&folder.join("ibdev"))? == device;
    // Files of verbs are of all ports.
    let is_port = match port.filter(|_| kind != CharDeviceKind::Uverbs) {
        Some(port) => text(&folder.join("port"))?.parse() == Ok(port),
        None => true,
    };
    let numbers = numbers(&folder)?;
    (is_its && is_port).then(|| CharDevice { name, device: Some(device.to_owned()), numbers })
}

/// `231:192`, as sysfs says it.
fn numbers(folder: &Path) -> Option<(u32, u32)> {
    let text = text(&folder.join("dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn numbers_of(rdev: u64) -> (u32, u32) {
    let number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    (number(nix::sys::stat::major(rdev)), number(nix::sys::stat::minor(rdev)))
}

/// A short file's content; none when it can't be read or is too long.
fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    let count = File::open(path).ok()?.take(FILE_MAX + 1).read_to_string(&mut text).ok()?;
    (count as u64 <= FILE_MAX).then(|| text.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    use CharDeviceKind::{Issm, RdmaCm, Umad, Uverbs};

    /// Trees of sysfs and `/dev`.
    struct Trees(tempfile::TempDir);

    impl Trees {
        /// Two devices, one with two ports, and a companion of the second.
        fn new() -> Self {
            let trees = Self(tempfile::tempdir().unwrap());
            trees.class("infiniband_verbs/uverbs0", &[("ibdev", "mlx5_1"), ("dev", "231:192")]);
            trees.class("infiniband_verbs/uverbs1", &[("ibdev", "mlx5_0"), ("dev", "231:193")]);
            trees.class("infiniband_verbs/abi_version", &[]);
            for (n, device, port) in [(0, "mlx5_0", "1"), (1, "mlx5_0", "2"), (2, "mlx5_1", "1"), (3, "smi1", "1")] {
                trees.class(
                    &format!("infiniband_mad/umad{n}"),
                    &[("ibdev", device), ("port", port), ("dev", &format!("231:{n}"))],
                );
                let minor = 64 + n;
                trees.class(
                    &format!("infiniband_mad/issm{n}"),
                    &[("ibdev", device), ("port", port), ("dev", &format!("231:{minor}"))],
                );
            }
            trees.class("misc/rdma_cm", &[("dev", "10:120")]);
            trees
        }

        fn class(&self, folder: &str, files: &[(&str, &str)]) {
            let folder = self.0.path().join("sys/class").join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            for (name, content) in files {
                std::fs::write(folder.join(name), format!("{content}\n")).unwrap();
            }
        }

        fn devices(&self) -> CharDevices {
            CharDevices::new(&self.0.path().join("sys"), &self.0.path().join("dev"))
        }

        fn names(&self, wanted: &Wanted<'_>) -> Vec<String> {
            self.devices().listed(wanted).unwrap().into_iter().map(|d| d.name).collect()
        }
    }

    fn wanted<'a>(device: &'a str, port: u32, kinds: &'a [CharDeviceKind]) -> Wanted<'a> {
        Wanted { device, port, kinds, companions: &[] }
    }

    #[test]
    fn exactly_the_files_of_the_device_and_the_port() {
        let trees = Trees::new();
        assert_eq!(trees.names(&wanted("mlx5_0", 1, &[Uverbs, RdmaCm])), ["rdma_cm", "uverbs1"]);
        assert_eq!(trees.names(&wanted("mlx5_0", 2, &[Uverbs, Umad, Issm])), ["issm1", "umad1", "uverbs1"]);
        assert_eq!(trees.names(&wanted("mlx5_1", 1, &[Umad])), ["umad2"]);
        let first = trees.devices().listed(&wanted("mlx5_1", 1, &[Uverbs])).unwrap().remove(0);
        assert_eq!((first.path().as_str(), first.numbers), ("/dev/infiniband/uverbs0", (231, 192)));
        assert_eq!(first.device.as_deref(), Some("mlx5_1"));
    }

    #[test]
    fn several_files_of_a_device_all_come() {
        let trees = Trees::new();
        trees.class("infiniband_verbs/uverbs7", &[("ibdev", "mlx5_0"), ("dev", "231:199")]);
        assert_eq!(trees.names(&wanted("mlx5_0", 1, &[Uverbs])), ["uverbs1", "uverbs7"]);
    }

    #[test]
    fn management_of_a_companion_comes_along_and_its_verbs_do_not() {
        let trees = Trees::new();
        trees.class("infiniband_verbs/uverbs9", &[("ibdev", "smi1"), ("dev", "231:201")]);
        let both = Wanted { companions: &["smi1"], ..wanted("mlx5_1", 1, &[Uverbs, Umad, Issm]) };
        assert_eq!(trees.names(&both), ["issm2", "issm3", "umad2", "umad3", "uverbs0"]);
        let none = Wanted { companions: &["smi0"], ..both };
        let error = trees.devices().listed(&none).unwrap_err().to_string();
        assert!(error.contains("smi0 has no umad"), "a pair, or nothing: {error}");
    }

    #[test]
    fn what_the_kernel_lacks_is_named_with_its_module() {
        let trees = Trees::new();
        for (device, port, kind, words) in [
            ("mlx5_9", 1, Uverbs, "modprobe ib_uverbs"),
            ("mlx5_1", 2, Umad, "modprobe ib_umad"),
            ("mlx5_1", 2, Issm, "modprobe ib_umad"),
        ] {
            let error = trees.devices().listed(&wanted(device, port, &[kind])).unwrap_err().to_string();
            assert!(error.contains(device) && error.contains(words), "{error}");
        }
        std::fs::remove_dir_all(trees.0.path().join("sys/class/misc")).unwrap();
        let error = trees.devices().listed(&wanted("mlx5_0", 1, &[RdmaCm])).unwrap_err().to_string();
        assert!(error.contains("modprobe rdma_ucm"), "{error}");
    }

    #[test]
    fn odd_entries_do_not_count() {
        let trees = Trees::new();
        trees.class("infiniband_verbs/uverbsX", &[("ibdev", "odd"), ("dev", "231:1")]);
        trees.class("infiniband_verbs/uverbs5", &[("ibdev", "odd"), ("dev", "231")]);
        trees.class("infiniband_verbs/uverbs6", &[("ibdev", &"x".repeat(500)), ("dev", "231:2")]);
        assert!(trees.devices().listed(&wanted("odd", 1, &[Uverbs])).is_err());
    }

    #[test]
    fn a_node_that_is_missing_or_another_one_is_an_error() {
        let trees = Trees::new();
        let folder = trees.0.path().join("dev/infiniband");
        std::fs::create_dir_all(&folder).unwrap();
        let error = || trees.devices().nodes(&wanted("mlx5_0", 1, &[Uverbs])).unwrap_err().to_string();
        let missing = error();
        assert!(missing.contains("uverbs1") && missing.contains("--subsystem-match=infiniband_verbs"), "{missing}");
        std::fs::write(folder.join("uverbs1"), "").unwrap();
        assert!(error().contains("uverbs1 is no character device"), "{}", error());
        std::fs::remove_file(folder.join("uverbs1")).unwrap();
        std::os::unix::fs::symlink("/dev/null", folder.join("uverbs1")).unwrap();
        assert!(error().contains("is no character device"), "a link is followed by nobody");
    }

    #[test]
    fn a_node_has_the_numbers_of_sysfs_and_the_hosts_owner() {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let trees = Trees::new();
        let folder = trees.0.path().join("dev/infiniband");
        std::fs::create_dir_all(&folder).unwrap();
        let make = |minor| mknod(&folder.join("uverbs1"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(231, minor));
        if let Err(error) = make(192) {
            println!("skipped: no character device can be made here: {error}");
            return;
        }
        let nodes = || trees.devices().nodes(&wanted("mlx5_0", 1, &[Uverbs]));
        let error = nodes().unwrap_err().to_string();
        assert!(error.contains("231:192") && error.contains("sysfs says 231:193"), "{error}");
        std::fs::remove_file(folder.join("uverbs1")).unwrap();
        make(193).unwrap();
        let node = nodes().unwrap().remove(0);
        assert_eq!((node.mode, node.device.name.as_str()), (0o600, "uverbs1"));
        assert_eq!((node.uid, node.gid), (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw()));
    }
}
