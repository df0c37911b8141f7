//! Running things as if on a node: in its network namespace, with a `/sys` that shows it.

use std::io;
use std::process::{Child, Command};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use super::{Node, failed, on_thread};

/// Runs programs and closures on a node: in its network namespace and in a mount namespace of its own, with a fresh sysfs (sysfs
/// shows the network namespace of whoever mounted it). Mounts made later on the outside below a shared mount are seen inside.
/// On a node with more namespaces ([`Node::of`]): in all of these.
#[derive(Debug)]
pub struct NodeCommand;

impl NodeCommand {
    /// Spawns `command` on `node`.
    ///
    /// A child inherits the namespaces of the thread that makes it, so a thread enters them and spawns, and nothing has to run
    /// between fork and exec.
    ///
    /// # Errors
    /// When the namespaces can't be entered or made, or the program can't be run.
    pub fn spawn(node: &Node, command: &mut Command) -> io::Result<Child> {
        on_thread(|| enter(node).and_then(|()| command.spawn()))
    }

    /// Runs `work` on a thread on `node`.
    ///
    /// # Errors
    /// When the namespaces can't be entered or made.
    pub fn run<T: Send>(node: &Node, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_thread(|| enter(node).map(|()| work()))
    }
}

/// Puts the calling thread on the node, for good.
fn enter(node: &Node) -> io::Result<()> {
    setns(node.netns(), CloneFlags::CLONE_NEWNET).map_err(|errno| failed("entering the node's network namespace", errno))?;
    if !node.others.is_empty() {
        // A thread that shares root and working directory with others can't enter a mount namespace.
        unshare(CloneFlags::CLONE_FS).map_err(|errno| failed("a root directory of the thread's own", errno))?;
        return node.others.iter().try_for_each(|(namespace, kind)| {
            setns(namespace, *kind).map_err(|errno| failed(&format!("entering the node's {kind:?}"), errno))
        });
    }
    unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed("making a mount namespace", errno))?;
    // Slave: mounts from outside come in (pods' namespaces), ours stay inside.
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).map_err(|errno| failed("making / a slave mount", errno))?;
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).map_err(|errno| failed("mounting /sys", errno))
}

/// Gives this process (and its later threads and children) a mount namespace of its own: what it mounts goes with it. Call it
/// before there is a second thread.
///
/// # Errors
/// Without `CAP_SYS_ADMIN`.
pub fn private_mounts() -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| failed("making a mount namespace", errno))?;
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).map_err(|errno| failed("making / a slave mount", errno))
}
