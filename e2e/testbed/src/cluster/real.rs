//! The cluster with a real containerd.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::{Options, Site};
use crate::containerd::{self, Containerd, Kit, NRI_SOCKET};

/// A [`Site`] on the node of a real containerd.
pub struct RealCluster {
    /// All but the runtime.
    pub site: Site,
    /// The runtime, and the node.
    pub containerd: Containerd,
}

impl Deref for RealCluster {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

impl DerefMut for RealCluster {
    fn deref_mut(&mut self) -> &mut Site {
        &mut self.site
    }
}

impl RealCluster {
    /// Starts containerd, makes the NICs in its node, and starts an agent there, which is ready then.
    ///
    /// # Errors
    /// When something can't be made, or is not ready within half a minute.
    pub async fn start(kit: &Kit, runtime: &containerd::Options, options: Options) -> Result<Self> {
        let containerd = Containerd::start(kit, runtime).await?;
        let dir = containerd.scratch().join("agent");
        // Where this runtime binds pods' namespaces.
        std::fs::create_dir_all(&dir)?;
        std::os::unix::fs::symlink("/var/run/netns", dir.join("netns"))?;
        let site = Site::new(options, containerd.node()?, &dir, PathBuf::from(NRI_SOCKET))?;
        let mut cluster = Self { site, containerd };
        cluster.start_agent()?;
        cluster.wait_ready(Duration::from_secs(30)).await?;
        Ok(cluster)
    }
}
