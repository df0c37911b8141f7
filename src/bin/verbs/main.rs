//! `dranic-verbs --device NAME --port N`: opens an RDMA device by verbs, as a program in the pod would, and prints what it saw as one line
//! of JSON ([`dranic::rdma::opened::Answer`]). It sees the network namespace that it is started in. A program of its own: a provider's
//! library that hangs or crashes takes nothing else along.

mod device;

use std::process::ExitCode;

use dranic::rdma::opened::{Answer, Opened};
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let answer = match parse(&arguments) {
        Ok((device, port)) => open(device, port),
        Err(why) => Answer::failed(why, None),
    };
    let code = if matches!(answer, Answer::Opened(_)) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    match serde_json::to_string(&answer) {
        Ok(text) => println!("{text}"),
        Err(_) => return ExitCode::FAILURE,
    }
    code
}

fn parse(arguments: &[String]) -> Result<(&str, u8), String> {
    const USAGE: &str = "usage: dranic-verbs --device NAME --port N";
    match arguments {
        [device, name, port, number] if device == "--device" && port == "--port" && !name.contains('\0') => {
            let number = number.parse().ok().filter(|number| *number > 0);
            Ok((name, number.ok_or_else(|| format!("{USAGE}; a port is a number from 1 to 255"))?))
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn open(device: &str, port: u8) -> Answer {
    if let Err(errno) = own_sysfs() {
        let why = format!("/sys of this network namespace can't be mounted: {errno} (it needs CAP_SYS_ADMIN)");
        return Answer::failed(why, Some(errno as i32));
    }
    let opened = device::Device::open(device).and_then(|opened| opened.look(port));
    match opened {
        Ok(Opened { node_guid, state, link_layer, gids, .. }) => {
            Answer::Opened(Opened { device: device.to_owned(), port, node_guid, state, link_layer, gids })
        }
        Err(device::Failure { step, errno }) => {
            let text = std::io::Error::from_raw_os_error(errno);
            Answer::failed(format!("{step}: {text}"), Some(errno))
        }
    }
}

/// libibverbs reads `/sys/class/infiniband*`, which shows the namespace that it was mounted in. In a mount namespace of our own nobody
/// else sees another one.
fn own_sysfs() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)?;
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    match mount(Some("sysfs"), "/sys", Some("sysfs"), flags, None::<&str>) {
        // The one that is there is this namespace's already: the kernel mounts no file system onto itself.
        Err(Errno::EBUSY) => Ok(()),
        result => result,
    }
}
