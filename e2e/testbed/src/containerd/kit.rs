//! Where the programs come from.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

/// `EX_TEMPFAIL`: how `hack/containerd.sh` says that containerd can't be had on this machine.
const UNAVAILABLE: i32 = 75;

/// A folder with containerd, runc, ctr, busybox (`bin/`) and the CNI plugins (`cni/`).
#[derive(Debug, Clone)]
pub struct Kit {
    dir: PathBuf,
}

/// Why there is no containerd to test with.
#[derive(Debug, thiserror::Error)]
pub enum NoContainerd {
    /// It can't be had here: the test says `skipped: <reason>` and ends.
    #[error("{0}")]
    Skip(String),
    /// It should have worked: the test fails.
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

impl Kit {
    /// Brings the programs onto this machine with `hack/containerd.sh`: seconds the first time, milliseconds from then on.
    ///
    /// # Errors
    /// [`NoContainerd::Skip`] without root (real root, not that of a user namespace) or when Debian's packages can't be had.
    pub fn get() -> Result<Self, NoContainerd> {
        if !is_real_root() {
            return Err(NoContainerd::Skip("a real containerd needs root".to_owned()));
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hack/containerd.sh");
        let output = Command::new("bash")
            .arg(&script)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("bash {}", script.display()))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or_default();
        match output.status.code() {
            Some(0) => {
                let dir = String::from_utf8_lossy(&output.stdout);
                Ok(Self { dir: PathBuf::from(dir.trim_end()) })
            }
            Some(UNAVAILABLE) => Err(NoContainerd::Skip(last.to_owned())),
            _ => Err(anyhow!("{} ended with {}: {errors}", script.display(), output.status).into()),
        }
    }

    /// The folder itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The path of a program (`ctr`, `runc`, `busybox`, ...).
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.dir.join("bin").join(name)
    }
}

/// Root of the machine: a user namespace in which we are merely mapped to root can't make containers' cgroups.
fn is_real_root() -> bool {
    let maps_all = |map: String| map.split_whitespace().eq(["0", "0", "4294967295"]);
    nix::unistd::geteuid().is_root() && std::fs::read_to_string("/proc/self/uid_map").is_ok_and(maps_all)
}
