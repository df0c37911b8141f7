//! The guard itself: look, ask, wait, and look again.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::args::{self, Args, Command};
use super::ask::{Client, News};
use super::check::{Lack, Verdict};
use super::look::Scene;
use super::oci::{self, State};
use super::protocol::{Request, VERSION};
use super::text::Subject;
use super::watch::Watch;
use crate::ledger::peek;
use crate::names::{PodUid, SandboxId};

/// How often the guard looks where it hears of nothing.
const FALLBACK: Duration = Duration::from_secs(1);
/// Bad arguments: `EX_USAGE` of `sysexits.h`.
const EXIT_USAGE: u8 = 64;

/// The program. Exit codes are in [`args::HELP`].
#[must_use]
pub fn main() -> ExitCode {
    match args::parse(std::env::args_os().skip(1)) {
        Ok(Command::Version) => print(&format!("{}\n", version())),
        Ok(Command::Help) => print(args::HELP),
        Ok(Command::Guard(args)) => match run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(line) => fail(&line, 1),
        },
        Err(why) => fail(&format!("dranic-guard: {why}"), EXIT_USAGE),
    }
}

/// What `--version` says; the agent compares it with its own.
#[must_use]
pub fn version() -> String {
    format!("dranic-guard {}", env!("CARGO_PKG_VERSION"))
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn fail(line: &str, code: u8) -> ExitCode {
    // Where nobody reads it, the exit code still holds the container back.
    let _ = writeln!(std::io::stderr(), "{line}");
    ExitCode::from(code)
}

/// Returns when everything is there.
///
/// # Errors
/// One line for people.
fn run(args: &Args) -> Result<(), String> {
    let begin = Instant::now();
    let unknown = State::default();
    let state = read_state().map_err(|why| {
        let why = format!("the OCI state on stdin can't be used: {why}");
        Subject { driver: &args.driver, state: &unknown }.refused(&why)
    })?;
    let subject = Subject { driver: &args.driver, state: &state };
    let refused = |why: String| subject.refused(&why);
    let scene = Scene::open(&state, &args.state_dir).map_err(refused)?;
    let Some(pod) = pod(args, &state).map_err(refused)? else {
        return Err(refused("neither the runtime nor a claim says which pod it is of".to_owned()));
    };
    Guard { args, subject, begin, scene, pod, lack: None, trouble: None, agreed: false }.wait()
}

fn read_state() -> Result<State, String> {
    let mut bytes = Vec::new();
    std::io::stdin().take(oci::STATE_MAX as u64 + 1).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    oci::parse(&bytes)
}

/// The pod, from whoever knows it.
fn pod(args: &Args, state: &State) -> Result<Option<PodUid>, String> {
    if let Some(pod) = args.pod.as_ref().or(state.pod.as_ref()) {
        return Ok(Some(pod.clone()));
    }
    let Some(claim) = args.claims.first() else { return Ok(None) };
    match peek::of_claim(&args.state_dir, claim)? {
        Some(record) => Ok(Some(record.pod.uid)),
        None => Err(format!("claim with UID {claim}: it is not prepared on this node (any more)")),
    }
}

struct Guard<'a> {
    args: &'a Args,
    subject: Subject<'a>,
    begin: Instant,
    scene: Scene,
    pod: PodUid,
    /// What was missing at the last look.
    lack: Option<Lack>,
    /// Why the last look failed.
    trouble: Option<String>,
    /// The agent said that everything is there, after the last look but one.
    agreed: bool,
}

impl Guard<'_> {
    fn wait(mut self) -> Result<(), String> {
        if self.look()? {
            return Ok(());
        }
        let mut client = Client::new(&self.args.socket, &self.request());
        let mut watch = Watch::new(&self.args.state_dir, &self.args.socket);
        let end = self.begin + self.args.wait;
        // Something may have changed before the watch was there.
        let mut look_at = Instant::now();
        loop {
            if Instant::now() >= look_at {
                watch.renew();
                if self.look()? {
                    return Ok(());
                }
                look_at = Instant::now() + FALLBACK;
            }
            client.ask(self.scene.netns().as_fd());
            let now = Instant::now();
            if now >= end {
                return Err(self.late(client.why()));
            }
            let until = client.next().into_iter().chain([end, look_at]).min().unwrap_or(end);
            sleep(&watch, &client, until.saturating_duration_since(now));
            let changes = watch.drain();
            if changes.socket {
                client.hurry();
            }
            let matters = |name: &std::ffi::OsString| {
                name.to_str().and_then(|name| name.strip_suffix(".json")).is_some_and(|claim| self.scene.knows(claim))
            };
            if changes.records.iter().any(|name| name.as_ref().is_none_or(matters)) {
                look_at = Instant::now();
            }
            match client.read() {
                News::None => {}
                News::Attached => {
                    self.agreed = true;
                    look_at = Instant::now();
                }
                News::Refused(why) => return Err(self.subject.refused(&why)),
            }
        }
    }

    /// Whether everything is there.
    fn look(&mut self) -> Result<bool, String> {
        let agreed = std::mem::take(&mut self.agreed);
        self.trouble = None;
        match self.scene.look(&self.pod, &self.args.claims) {
            Ok(Verdict::Complete) => return Ok(self.told()),
            // What the agent finds in order is not ours to refuse.
            Ok(Verdict::Altered(_)) if agreed => return Ok(self.told()),
            Ok(Verdict::Altered(lack) | Verdict::Lacking(lack)) => self.lack = Some(lack),
            Ok(Verdict::Refused(why)) => return Err(self.subject.refused(&why)),
            Err(why) => self.trouble = Some(why),
        }
        Ok(false)
    }

    /// All is there, and the container's files say so.
    fn told(&self) -> bool {
        self.scene.wait_until_told();
        true
    }

    fn request(&self) -> Request {
        let state = self.subject.state;
        let sandbox = self.args.sandbox.clone().or_else(|| state.sandbox.clone());
        // Letters and digits, so it is one.
        let unnamed = || SandboxId::new(format!("netns-{}", self.scene.netns().id().ino)).ok();
        Request {
            version: VERSION,
            pod: self.pod.clone(),
            sandbox: sandbox.or_else(unnamed).unwrap_or_else(|| unreachable!("digits are an id")),
            claims: self.args.claims.clone(),
            container: state.container.clone(),
            netns_path: self.scene.lasting_path(state),
        }
    }

    fn late(&self, agent: &str) -> String {
        let why = match &self.trouble {
            Some(trouble) => format!("{trouble}; {agent}"),
            None => agent.to_owned(),
        };
        self.subject.late(self.lack.as_ref(), &why, self.begin.elapsed())
    }
}

/// Until something happens, at most so long.
fn sleep(watch: &Watch, client: &Client, limit: Duration) {
    let fds = watch.fd().into_iter().chain(client.stream());
    let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    // Rounded up: else the last millisecond would be spent in a busy loop.
    let limit = PollTimeout::try_from(limit + Duration::from_millis(1)).unwrap_or(PollTimeout::from(1000u16));
    // Interrupted, or out of memory: the caller looks at everything anyway.
    let _ = poll(&mut fds, limit);
}
