//! Network namespaces of pods, seen as files, as a runtime shows them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{failed, links, new_netns};

/// A directory for namespaces' files: a mount of its own, shared, so that what is mounted in it later is also seen by nodes that
/// run already ([`super::NodeCommand`]). Unmounted when dropped.
#[derive(Debug)]
pub struct PodDir {
    path: PathBuf,
    made: bool,
}

impl PodDir {
    /// Makes the directory if it is not there, and mounts a tmpfs on it.
    ///
    /// # Errors
    /// When it can't be made or mounted.
    pub fn new(path: &Path) -> Result<Self> {
        let made = !path.exists();
        fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))?;
        let mounted = mount(Some("dranic-pods"), path, Some("tmpfs"), MsFlags::empty(), Some("mode=755"));
        mounted.map_err(|errno| failed(&format!("mounting a tmpfs on {}", path.display()), errno))?;
        // From here on there is something to undo.
        let dir = Self { path: path.to_owned(), made };
        mount(None::<&str>, path, None::<&str>, MsFlags::MS_SHARED, None::<&str>)
            .map_err(|errno| failed(&format!("sharing {}", path.display()), errno))?;
        Ok(dir)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A pod's namespace in it.
    ///
    /// # Errors
    /// As [`PodNetns::new`].
    pub fn pod(&self, name: &str) -> Result<PodNetns> {
        PodNetns::new(&self.path, name)
    }
}

impl Drop for PodDir {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        if self.made {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// A pod's namespace, bind-mounted on a file. Unmounted and removed when dropped; the namespace itself goes with its last handle.
#[derive(Debug)]
pub struct PodNetns {
    path: PathBuf,
    netns: Option<Netns>,
}

impl PodNetns {
    /// A new namespace with `lo` up, on the file `dir`/`name`. Use [`PodDir`] where nodes must see it.
    ///
    /// # Errors
    /// When the file is there already, or can't be mounted on.
    pub fn new(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        fs::File::create_new(&path).with_context(|| format!("making {}", path.display()))?;
        let mut pod = Self { path, netns: None };
        let netns = new_netns()?;
        let file = &pod.path;
        netns.run(|| {
            mount(Some("/proc/thread-self/ns/net"), file, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .map_err(|errno| failed(&format!("mounting a network namespace on {}", file.display()), errno))
        })??;
        pod.netns = Some(netns);
        Ok(pod)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The namespace.
    ///
    /// # Errors
    /// After [`Self::forget`], when the file is gone.
    pub fn netns(&self) -> Result<Netns> {
        match &self.netns {
            Some(netns) => Ok(netns.try_clone()?),
            None => Ok(Netns::open(&self.path)?),
        }
    }

    /// Closes our own handle, so that only the file (and whoever opened it) keeps the namespace, as with a runtime.
    pub fn forget(&mut self) {
        self.netns = None;
    }

    /// Gives the pod an `eth0`: a veth whose other end, `peer`, is in `host`, both up, as a CNI plugin does.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_eth0(&self, host: &Netns, peer: &str) -> Result<()> {
        let netns = self.netns()?;
        let (mut inside, mut outside) = (RouteSocket::open_in(&netns)?, RouteSocket::open_in(host)?);
        links::Veth { name: "eth0", peer, peer_netns: Some(host), ..links::Veth::default() }.create(&mut inside)?;
        links::up(&mut inside, "eth0")?;
        links::up(&mut outside, peer)
    }
}

impl Drop for PodNetns {
    fn drop(&mut self) {
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
        let _ = fs::remove_file(&self.path);
    }
}
