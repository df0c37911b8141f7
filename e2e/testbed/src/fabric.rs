//! Scratch nodes: network namespaces with NICs on a fabric of bridges.
//!
//! Namespaces are anonymous and live by their file descriptors, so nothing is left when the values are dropped, or the process
//! dies. Only [`PodDir`] and [`PodNetns`] are seen outside (a runtime shows pods' namespaces as files); they undo it when dropped.
//! Everything here needs root: tests ask [`root`] first.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use dranic::netdev::{Link, LinkAddress};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use ipnet::IpNet;
use nix::sched::CloneFlags;

pub mod links;

mod exec;
mod ping;
mod pod;

pub use exec::{NodeCommand, private_mounts};
pub use ping::ping;
pub use pod::{PodDir, PodNetns};

/// Whether this process can make namespaces. If not, says on stderr that the test is skipped.
#[must_use]
pub fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root (network namespaces)");
    }
    root
}

/// A new namespace with `lo` up. It is gone when the last handle of it is.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`.
pub fn new_netns() -> Result<Netns> {
    on_thread(|| {
        nix::sched::unshare(CloneFlags::CLONE_NEWNET).context("unshare a network namespace")?;
        let mut socket = RouteSocket::open()?;
        links::up(&mut socket, "lo")?;
        Ok(Netns::current()?)
    })
}

/// Runs `work` on a thread of its own in a new namespace that vanishes with it. A panic of the work is passed on.
///
/// # Panics
/// When the namespace can't be made, and when `work` panics.
pub fn with_scratch_netns<T: Send>(work: impl FnOnce(&Netns) -> T + Send) -> T {
    on_thread(|| {
        let netns = new_netns().expect("a scratch network namespace");
        nix::sched::setns(&netns, CloneFlags::CLONE_NEWNET).expect("entering the scratch namespace");
        work(&netns)
    })
}

fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The network between the nodes: one bridge for each rail, in a namespace of its own.
#[derive(Debug)]
pub struct Fabric {
    netns: Netns,
    next_port: AtomicU32,
}

/// The host of a node.
#[derive(Debug)]
pub struct Node {
    netns: Netns,
    /// Its other namespaces, if it has more than that one; the mount namespace is the first.
    others: Vec<(File, CloneFlags)>,
}

/// What a NIC shall be.
#[derive(Debug, Clone, Default)]
pub struct NicSpec {
    /// Its name in the node.
    pub name: String,
    /// Its address; the kernel's choice if none.
    pub mac: Option<LinkAddress>,
    /// Which bridge its cable goes to.
    pub rail: u32,
    /// Its IP addresses (IPv6 ones without duplicate address detection).
    pub addresses: Vec<IpNet>,
    /// Bytes; 1500 if none. The cable's other end has the same.
    pub mtu: Option<u32>,
    /// Whether it is up; the other end always is.
    pub up: bool,
}

/// A NIC of a node, as it was made.
#[derive(Debug, Clone)]
pub struct Nic {
    /// The link in the node.
    pub link: Link,
    /// Index of the cable's other end in the fabric's namespace.
    pub port: u32,
    /// Index of its bridge there.
    pub bridge: u32,
}

impl Node {
    /// Another handle of the same node.
    ///
    /// # Errors
    /// When file descriptors run out.
    pub fn try_clone(&self) -> Result<Self> {
        let others = self.others.iter().map(|(file, kind)| Ok((file.try_clone()?, *kind))).collect::<Result<_>>()?;
        Ok(Self { netns: self.netns.try_clone()?, others })
    }

    /// A namespace with `lo` up.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`.
    pub fn new() -> Result<Self> {
        Ok(Self { netns: new_netns()?, others: Vec::new() })
    }

    /// A node that somebody else made, with mount, pid, uts and ipc namespaces of its own: the ones in `folder` (`/proc/PID/ns`).
    /// Its children's pid namespace counts, so PID may be the process that made it.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn of(folder: &Path) -> Result<Self> {
        let kinds = [
            ("mnt", CloneFlags::CLONE_NEWNS),
            ("pid_for_children", CloneFlags::CLONE_NEWPID),
            ("uts", CloneFlags::CLONE_NEWUTS),
            ("ipc", CloneFlags::CLONE_NEWIPC),
        ];
        let open = |(name, kind)| -> Result<(File, CloneFlags)> {
            let path = folder.join(name);
            Ok((File::open(&path).with_context(|| path.display().to_string())?, kind))
        };
        let others = kinds.into_iter().map(open).collect::<Result<_>>()?;
        Ok(Self { netns: Netns::open(&folder.join("net"))?, others })
    }

    /// The host's network namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// A netlink socket in it.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn socket(&self) -> Result<RouteSocket> {
        Ok(RouteSocket::open_in(&self.netns)?)
    }
}

impl Fabric {
    /// A fabric without rails; they come with the NICs.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`.
    pub fn new() -> Result<Self> {
        Ok(Self { netns: new_netns()?, next_port: AtomicU32::new(0) })
    }

    /// The namespace of the bridges.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Gives a rail's bridge an address, so that there is something to ping.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_address(&self, rail: u32, address: IpNet) -> Result<()> {
        let mut fabric = RouteSocket::open_in(&self.netns)?;
        let bridge = bridge(&mut fabric, rail)?;
        links::add_address(&mut fabric, bridge, address)
    }

    /// Puts a NIC into the node: one end of a veth, the other end on the rail's bridge.
    ///
    /// # Errors
    /// When the kernel refuses, for example because the name is taken in the node.
    pub fn add_nic(&self, node: &Node, spec: &NicSpec) -> Result<Nic> {
        let mut fabric = RouteSocket::open_in(&self.netns)?;
        let mut host = node.socket()?;
        let bridge = bridge(&mut fabric, spec.rail)?;
        let port_name = format!("port{}", self.next_port.fetch_add(1, Ordering::Relaxed));
        links::Veth { name: &spec.name, mac: spec.mac.as_ref(), mtu: spec.mtu, peer: &port_name, peer_netns: Some(&self.netns) }
            .create(&mut host)
            .with_context(|| format!("NIC {}", spec.name))?;
        let port = links::find(&mut fabric, &port_name)?.index;
        links::set_master(&mut fabric, port, bridge)?;
        links::up(&mut fabric, &port_name)?;
        if spec.up {
            links::up(&mut host, &spec.name)?;
        }
        let index = links::find(&mut host, &spec.name)?.index;
        for address in &spec.addresses {
            links::add_address(&mut host, index, *address).with_context(|| format!("{address} on {}", spec.name))?;
        }
        Ok(Nic { link: links::find(&mut host, &spec.name)?, port, bridge })
    }
}

/// Index of the rail's bridge, made if it is not there.
fn bridge(fabric: &mut RouteSocket, rail: u32) -> Result<u32> {
    let name = format!("rail{rail}");
    match links::create(fabric, "bridge", &name) {
        Err(error) if error.downcast_ref::<dranic::netlink::NetlinkError>().and_then(|e| e.errno()) == Some(libc::EEXIST) => {}
        made => made?,
    }
    links::up(fabric, &name)?;
    Ok(links::find(fabric, &name)?.index)
}

/// A kernel's errno as an I/O error that says what was tried.
fn failed(what: &str, errno: nix::errno::Errno) -> io::Error {
    let error = io::Error::from(errno);
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

#[cfg(test)]
mod tests;
