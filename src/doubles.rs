//! Files that tests bring where the kernel's own can't be had: of a node that is a namespace of a machine which is not started again and
//! has no hardware. Release builds have none of it.
//!
//! `DRANIC_TEST_BOOT_ID=<file>` has another boot id than the machine's. `DRANIC_TEST_SYSFS=<folder>` is a sysfs tree that says where
//! links are ([`crate::inventory::sysfs::Sysfs::with_places`]). Both may come and go while the agent runs.

use std::io;
use std::path::{Path, PathBuf};

/// Of this boot of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The boot id of this node.
pub(crate) fn boot_id() -> io::Result<String> {
    boot_id_of(given("DRANIC_TEST_BOOT_ID").as_deref(), Path::new(BOOT_ID))
}

/// The tree that says where links are.
pub(crate) fn places() -> Option<PathBuf> {
    given("DRANIC_TEST_SYSFS")
}

#[cfg(debug_assertions)]
fn given(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// None.
#[cfg(not(debug_assertions))]
fn given(_: &str) -> Option<PathBuf> {
    None
}

/// What `double` says if it is there, else what `kernel` says.
fn boot_id_of(double: Option<&Path>, kernel: &Path) -> io::Result<String> {
    let text = match double.map(std::fs::read_to_string) {
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => std::fs::read_to_string(kernel)?,
        Some(text) => text?,
        None => std::fs::read_to_string(kernel)?,
    };
    match text.trim() {
        // Records of another boot would look like those of this one.
        "" => Err(io::Error::new(io::ErrorKind::InvalidData, "it is empty")),
        id => Ok(id.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boot_id_is_the_kernels_unless_a_test_has_one() {
        let folder = tempfile::tempdir().unwrap();
        let (double, kernel) = (folder.path().join("double"), folder.path().join("kernel"));
        std::fs::write(&kernel, "4f1c-kernel\n").unwrap();
        assert_eq!(boot_id_of(None, &kernel).unwrap(), "4f1c-kernel");
        assert_eq!(boot_id_of(Some(&double), &kernel).unwrap(), "4f1c-kernel");
        std::fs::write(&double, "9a2e-double\n").unwrap();
        assert_eq!(boot_id_of(Some(&double), &kernel).unwrap(), "9a2e-double");
        std::fs::write(&double, "\n").unwrap();
        assert_eq!(boot_id_of(Some(&double), &kernel).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(boot_id_of(None, &folder.path().join("neither")).is_err());
    }
}
