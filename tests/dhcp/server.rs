//! DHCP servers on the fabric: dnsmasq, and a double that does what a test wants.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dranic::netns::Netns;
use dranic_testbed::fabric::Fabric;
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{setsockopt, sockopt};

/// Waits until `done`, at most 15 s.
pub(crate) fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(15), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// dnsmasq on rails of a fabric.
pub(crate) struct Dnsmasq {
    child: Child,
    dir: tempfile::TempDir,
}

impl Dnsmasq {
    /// With these options, besides those that any test needs. None (and a line that says so) where it is not installed.
    pub(crate) fn start(fabric: &Fabric, options: &[&str]) -> Option<Self> {
        if Command::new("dnsmasq").arg("--version").stdout(Stdio::null()).status().is_err() {
            println!("skipped: needs dnsmasq (Debian's dnsmasq-base; hack/setup.sh)");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name).display().to_string();
        let mut command = Command::new("dnsmasq");
        command.args(["--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--user=root", "--log-dhcp", "--no-ping"]);
        command.arg(format!("--dhcp-leasefile={}", file("leases"))).arg(format!("--pid-file={}", file("pid")));
        command.arg(format!("--log-facility={}", file("log"))).args(options).stdin(Stdio::null());
        let child = std::thread::scope(|scope| {
            scope.spawn(|| setns(fabric.netns(), CloneFlags::CLONE_NEWNET).map(|()| command.spawn().unwrap())).join().unwrap()
        });
        let server = Self { child: child.unwrap(), dir };
        wait("dnsmasq starts", || server.log().contains("DHCP, IP range"));
        Some(server)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// One line a lease: end, link-layer address, address, host name, client id.
    pub(crate) fn leases(&self) -> Vec<String> {
        std::fs::read_to_string(self.path("leases")).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) const DISCOVER: u8 = 1;
pub(crate) const OFFER: u8 = 2;
pub(crate) const REQUEST: u8 = 3;
pub(crate) const ACK: u8 = 5;
pub(crate) const NAK: u8 = 6;
pub(crate) const RELEASE: u8 = 7;

/// What a client said.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    pub(crate) kind: u8,
    /// The address it came from.
    pub(crate) from: Ipv4Addr,
    /// The address that the client says it has.
    pub(crate) own: Ipv4Addr,
    pub(crate) options: Vec<(u8, Vec<u8>)>,
}

impl Heard {
    pub(crate) fn option(&self, code: u8) -> Option<&[u8]> {
        self.options.iter().find(|(c, _)| *c == code).map(|(_, value)| value.as_slice())
    }
}

/// What the double does.
#[derive(Debug, Clone)]
pub(crate) enum Does {
    /// Lends this address with these options, for as many seconds.
    Lend(Ipv4Addr, u32, Vec<(u8, Vec<u8>)>),
    /// Refuses requests.
    Refuse,
    /// Says nothing.
    Nothing,
    /// Sends these bytes as the answer's message, behind BOOTP's fixed part where so many are kept.
    Garbage(Vec<u8>),
}

/// A server on rail 0: it is 10.9.0.1.
pub(crate) struct Double {
    does: Arc<Mutex<Does>>,
    heard: Arc<Mutex<Vec<Heard>>>,
    stop: Arc<Mutex<bool>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Double {
    pub(crate) fn start(fabric: &Fabric, does: Does) -> Self {
        fabric.add_address(0, "10.9.0.1/24".parse().unwrap()).unwrap();
        let socket = socket(fabric.netns(), "rail0");
        let (does, heard, stop) = (Arc::new(Mutex::new(does)), Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(false)));
        let thread = {
            let (does, heard, stop) = (does.clone(), heard.clone(), stop.clone());
            std::thread::spawn(move || {
                while !*stop.lock().unwrap() {
                    serve(&socket, &does, &heard);
                }
            })
        };
        Self { does, heard, stop, thread: Some(thread) }
    }

    pub(crate) fn now_does(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    /// What was heard since the last call.
    pub(crate) fn take(&self) -> Vec<Heard> {
        std::mem::take(&mut self.heard.lock().unwrap())
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        *self.stop.lock().unwrap() = true;
        let _ = self.thread.take().unwrap().join();
    }
}

fn socket(netns: &Netns, link: &str) -> UdpSocket {
    let open = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 67)).unwrap();
        setsockopt(&socket, sockopt::BindToDevice, &link.into()).unwrap();
        socket.set_broadcast(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        socket
    };
    netns.run(open).unwrap()
}

fn serve(socket: &UdpSocket, does: &Mutex<Does>, heard: &Mutex<Vec<Heard>>) {
    let mut buffer = [0; 1500];
    let Ok((length, from)) = socket.recv_from(&mut buffer) else { return };
    let std::net::IpAddr::V4(from) = from.ip() else { return };
    let query = &buffer[..length];
    let options = options(&query[240..]);
    let kind = options.iter().find(|(code, _)| *code == 53).unwrap().1[0];
    let own = Ipv4Addr::new(query[12], query[13], query[14], query[15]);
    heard.lock().unwrap().push(Heard { kind, from, own, options });
    let answer_kind = if kind == DISCOVER { OFFER } else { ACK };
    let answer = match (&*does.lock().unwrap(), kind) {
        (Does::Nothing, _) | (_, RELEASE) => return,
        (Does::Refuse, REQUEST) => answer(query, NAK, Ipv4Addr::UNSPECIFIED, 0, &[(56, b"not here".to_vec())]),
        (Does::Refuse, _) => return,
        (Does::Garbage(bytes), _) => [&head(query, Ipv4Addr::new(10, 9, 0, 50))[..], bytes].concat(),
        (Does::Lend(address, seconds, options), _) => answer(query, answer_kind, *address, *seconds, options),
    };
    // Broadcast, since nobody answers ARP for an address that is only about to be lent.
    socket.send_to(&answer, (Ipv4Addr::BROADCAST, 68)).unwrap();
}

fn options(mut bytes: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut found = Vec::new();
    while let [code, length, rest @ ..] = bytes {
        if *code == 255 {
            break;
        }
        let (value, after) = rest.split_at(usize::from(*length));
        found.push((*code, value.to_vec()));
        bytes = after;
    }
    found
}

fn head(query: &[u8], address: Ipv4Addr) -> Vec<u8> {
    let mut out = query[..240].to_vec();
    out[0] = 2;
    out[16..20].copy_from_slice(&address.octets());
    out
}

fn answer(query: &[u8], kind: u8, address: Ipv4Addr, seconds: u32, options: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut all: Vec<(u8, Vec<u8>)> = vec![(53, vec![kind]), (54, vec![10, 9, 0, 1])];
    if kind != NAK {
        all.push((51, seconds.to_be_bytes().to_vec()));
    }
    if !options.iter().any(|(code, _)| *code == 1) && kind != NAK {
        all.push((1, vec![255, 255, 255, 0]));
    }
    let mut out = head(query, address);
    for (code, value) in all.iter().chain(options) {
        out.extend([*code, u8::try_from(value.len()).unwrap()]);
        out.extend(value);
    }
    out.push(255);
    out
}
