//! The command line of `dranic-guard`. It is a contract: specs that an older agent wrote call the guard of a newer one, and the other
//! way round. Flags are added, never changed.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::names::{ClaimUid, PodUid, SandboxId};

/// How long the guard waits where nothing else is said. The runtime's caller gives a container 2 minutes (the kubelet's
/// `runtimeRequestTimeout`).
pub const WAIT: Duration = Duration::from_secs(60);
/// Longest wait that can be asked for: with [`super::hook::GRACE`] it stays under those 2 minutes.
pub const WAIT_MAX: Duration = Duration::from_secs(110);

/// `dranic-guard --help`.
pub const HELP: &str = "\
dranic-guard: holds a container back until the NICs of its pod's claims are there (an OCI createRuntime hook of Dranic)

Usage: dranic-guard --driver NAME --state-dir DIR --socket SOCKET [--wait SECONDS] [--claim UID]... [--pod UID] [--sandbox ID]

      --driver NAME      driver name, for messages
      --state-dir DIR    folder of the agent's ledger
      --socket SOCKET    the agent's socket for guards
      --wait SECONDS     how long to wait for what is missing, 0 to 110 [default: 60]
      --claim UID        a claim that the container uses; its devices, and all others of its pod, must be there
      --pod UID          the pod; what the runtime says in the OCI state where absent
      --sandbox ID       the pod's sandbox; likewise
      --version, --help

The OCI state is read from stdin. Exit codes: 0 all is there, 1 it is not (one line on stderr says what and why), 64 bad arguments.
";

/// What the guard was told to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Hold a container back.
    Guard(Args),
    /// Print the version.
    Version,
    /// Print the help.
    Help,
}

/// Arguments of the guard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Args {
    /// Driver name.
    pub driver: String,
    /// Folder of the ledger.
    pub state_dir: PathBuf,
    /// The agent's socket.
    pub socket: PathBuf,
    /// How long to wait.
    pub wait: Duration,
    /// Claims that must have a record.
    pub claims: Vec<ClaimUid>,
    /// Which pod.
    pub pod: Option<PodUid>,
    /// Which sandbox.
    pub sandbox: Option<SandboxId>,
}

/// Reads the arguments, without the program's name.
///
/// # Errors
/// One line that names the flag.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let (mut driver, mut state_dir, mut socket, mut wait) = (None, None, None, WAIT);
    let (mut claims, mut pod, mut sandbox) = (Vec::new(), None, None);
    let mut arguments = arguments.into_iter();
    while let Some(flag) = arguments.next() {
        let flag = flag.to_str().unwrap_or("?").to_owned();
        match flag.as_str() {
            "--version" => return Ok(Command::Version),
            "--help" => return Ok(Command::Help),
            _ => {}
        }
        let value = arguments.next().ok_or_else(|| format!("{flag} has no value, or is not known (see --help)"))?;
        let text = || value.to_str().ok_or_else(|| format!("{flag}: the value is not UTF-8"));
        let named = |error: crate::names::NameError| format!("{flag}: {error}");
        match flag.as_str() {
            "--driver" => driver = Some(text()?.to_owned()),
            "--state-dir" => state_dir = Some(PathBuf::from(value)),
            "--socket" => socket = Some(PathBuf::from(value)),
            "--wait" => wait = seconds(text()?)?,
            "--claim" => claims.push(ClaimUid::new(text()?).map_err(named)?),
            "--pod" => pod = Some(PodUid::new(text()?).map_err(named)?),
            "--sandbox" => sandbox = Some(SandboxId::new(text()?).map_err(named)?),
            other => return Err(format!("{other} is not known (see --help)")),
        }
    }
    let needed = |flag| format!("{flag} is missing (see --help)");
    Ok(Command::Guard(Args {
        driver: driver.ok_or_else(|| needed("--driver"))?,
        state_dir: state_dir.ok_or_else(|| needed("--state-dir"))?,
        socket: socket.ok_or_else(|| needed("--socket"))?,
        wait,
        claims,
        pod,
        sandbox,
    }))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().map(Duration::from_secs).filter(|wait| *wait <= WAIT_MAX);
    seconds.ok_or_else(|| format!("--wait: {text:?} is not a number of seconds up to {}", WAIT_MAX.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn everything_that_a_hook_says_is_read() {
        let line = "--driver d --state-dir /s --socket /g --wait 7 --claim c-1 --claim c-2 --pod p --sandbox b";
        let Ok(Command::Guard(args)) = read(line) else { panic!("{:?}", read(line)) };
        assert_eq!((args.driver.as_str(), args.wait), ("d", Duration::from_secs(7)));
        assert_eq!((args.state_dir, args.socket), (PathBuf::from("/s"), PathBuf::from("/g")));
        assert_eq!(args.claims, [ClaimUid::new("c-1").unwrap(), ClaimUid::new("c-2").unwrap()]);
        assert_eq!((args.pod.unwrap().as_str(), args.sandbox.unwrap().as_str()), ("p", "b"));
        let Ok(Command::Guard(args)) = read("--driver d --state-dir /s --socket /g") else { panic!() };
        assert_eq!((args.wait, args.claims.len(), args.pod), (WAIT, 0, None));
        assert_eq!(read("--version"), Ok(Command::Version));
        assert_eq!(read("--driver d --help"), Ok(Command::Help));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let fine = "--driver d --state-dir /s --socket /g";
        for (line, named) in [
            ("", "--driver"),
            ("--driver d --socket /g", "--state-dir"),
            ("--driver d --state-dir /s", "--socket"),
            (&format!("{fine} --claim ../x"), "--claim"),
            (&format!("{fine} --pod ."), "--pod"),
            (&format!("{fine} --sandbox /"), "--sandbox"),
            (&format!("{fine} --wait 111"), "--wait"),
            (&format!("{fine} --wait -1"), "--wait"),
            (&format!("{fine} --claim"), "--claim"),
            (&format!("{fine} --what x"), "--what"),
        ] {
            let error = read(line).unwrap_err();
            assert!(error.contains(named), "{line}: {error}");
        }
    }
}
