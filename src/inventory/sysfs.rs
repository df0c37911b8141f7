//! What sysfs says of links and PCI functions. The root is given, so that tests can bring a tree of their own.

use std::path::PathBuf;

/// A sysfs tree.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

impl Sysfs {
    /// The tree below `root` (`/sys`).
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Path of the root.
    #[must_use]
    pub fn root(&self) -> &std::path::Path {
        &self.root
    }
}
