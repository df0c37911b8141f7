//! A pod, as far as a network driver minds.

use std::time::Instant;

use anyhow::{Context, Result};
use dranic::netdev::host_state::Snapshot;
use dranic::netlink::RouteSocket;

use crate::fabric::PodNetns;
use crate::runtime::{ContainerSpec, SandboxSpec};

use super::Cluster;

/// A pod with one sandbox, whose namespace exists.
#[derive(Debug)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// The namespace.
    pub netns: PodNetns,
    /// What the runtime tells plugins of its sandbox.
    pub sandbox: SandboxSpec,
}

impl Cluster {
    /// Makes a pod and its namespace; tells nobody yet.
    ///
    /// # Errors
    /// When the namespace can't be made.
    pub fn pod(&self, name: &str) -> Result<Pod> {
        self.sandbox(name, &format!("pod-uid-{name}"), 0)
    }

    /// A further sandbox (`attempt`) of the pod with `uid`, with a namespace of its own.
    ///
    /// # Errors
    /// When the namespace can't be made.
    pub fn sandbox(&self, name: &str, uid: &str, attempt: u32) -> Result<Pod> {
        let netns = self.pods.pod(&format!("{name}-{attempt}"))?;
        let sandbox = SandboxSpec {
            id: format!("sandbox-{name}-{attempt}"),
            uid: uid.to_owned(),
            name: name.to_owned(),
            namespace: "default".to_owned(),
            netns_path: Some(netns.path().to_string_lossy().into_owned()),
            ..SandboxSpec::default()
        };
        Ok(Pod { name: name.to_owned(), uid: uid.to_owned(), netns, sandbox })
    }
}

impl Pod {
    /// What is in its namespace.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn look(&self) -> Result<Snapshot> {
        let mut socket = RouteSocket::open_in(&self.netns.netns()?)?;
        Snapshot::take(&mut socket, Instant::now() + std::time::Duration::from_secs(10)).context("reading the pod's namespace")
    }

    /// Names of its links that are up, without `lo`.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn links_up(&self) -> Result<Vec<String>> {
        Ok(self.look()?.links.into_iter().filter(|l| l.is_up() && !l.is_loopback()).map(|l| l.name).collect())
    }

    /// A container of it.
    #[must_use]
    pub fn container(&self, name: &str) -> ContainerSpec {
        ContainerSpec { id: format!("{}-{name}", self.sandbox.id), name: name.to_owned(), ..ContainerSpec::default() }
    }
}
