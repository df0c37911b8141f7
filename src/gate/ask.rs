//! Asking the agent for an attach, over and over again: it may be away, or go away in between. Nothing here blocks.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::pass;
use super::protocol::{Answer, LINE_MAX, Request, line};

/// Pauses between two attempts: from the first to the second, twice as long each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// What came from the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Nothing that changes anything.
    None,
    /// It says that everything is there.
    Attached,
    /// It will not do it, and asking again is useless.
    Refused(String),
}

/// One request, and where it stands.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    request: Vec<u8>,
    stream: Option<UnixStream>,
    received: Vec<u8>,
    /// When to connect again; not while connected.
    next: Instant,
    pause: Duration,
    why: String,
}

impl Client {
    /// A client that has not asked yet.
    #[must_use]
    pub fn new(socket: &Path, request: &Request) -> Self {
        Self {
            socket: socket.to_owned(),
            request: line(request),
            stream: None,
            received: Vec::new(),
            next: Instant::now(),
            pause: PAUSE.0,
            why: "the agent was not asked yet".to_owned(),
        }
    }

    /// What the agent said last, or why it says nothing.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// When [`Client::ask`] has something to do.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.stream.is_none().then_some(self.next)
    }

    /// The connection, to wait for what comes.
    #[must_use]
    pub fn stream(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    /// There is news of the socket: it may be worth while to try now. A listener is there a moment after its file is.
    pub fn hurry(&mut self) {
        self.pause = PAUSE.0;
        self.next = self.next.min(Instant::now() + Duration::from_millis(2));
    }

    /// Connects and asks, where that is due.
    pub fn ask(&mut self, netns: BorrowedFd<'_>) {
        if self.stream.is_some() || Instant::now() < self.next {
            return;
        }
        match dial(&self.socket).and_then(|stream| send(&stream, &self.request, netns).map(|()| stream)) {
            Ok(stream) => {
                "the agent has not answered yet".clone_into(&mut self.why);
                self.received.clear();
                self.stream = Some(stream);
            }
            Err(error) => self.close(format!("no agent answers at {}: {error}", self.socket.display())),
        }
    }

    /// Reads what the agent has said by now.
    pub fn read(&mut self) -> News {
        let mut news = News::None;
        let mut buffer = [0; 4096];
        while let Some(stream) = &self.stream {
            match io::Read::read(&mut &*stream, &mut buffer) {
                Ok(0) => self.close_keeping("the agent went away"),
                Ok(count) => {
                    self.received.extend_from_slice(&buffer[..count]);
                    news = self.lines(news);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => self.close_keeping(&format!("the agent went away: {error}")),
            }
        }
        news
    }

    fn lines(&mut self, mut news: News) -> News {
        while let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.received.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(Answer::Working { why }) => {
                    self.why = why;
                    self.pause = PAUSE.0;
                }
                Ok(Answer::Attached) => {
                    self.close("the agent says that everything is in the pod".to_owned());
                    news = News::Attached;
                }
                Ok(Answer::Refused { why, is_final: true }) => return News::Refused(why),
                Ok(Answer::Refused { why, is_final: false }) => self.close(why),
                Err(error) => self.close(format!("the agent's answer can't be read: {error}; is it of another version?")),
            }
        }
        if self.received.len() > LINE_MAX {
            self.close("the agent's answer is too long; is it of another version?".to_owned());
        }
        news
    }

    /// As [`Client::close`]; what it said before it went stays.
    fn close_keeping(&mut self, how: &str) {
        let why = if self.why.contains(how) { self.why.clone() } else { format!("{how}; before that: {}", self.why) };
        self.close(why);
    }

    fn close(&mut self, why: String) {
        self.why = why;
        self.stream = None;
        self.received.clear();
        self.next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSE.1);
    }
}

/// Connects without waiting: an agent that hangs has a full queue at some time.
fn dial(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// A request fits into the socket's buffer, so one that does not is not sent in parts.
fn send(stream: &UnixStream, request: &[u8], netns: BorrowedFd<'_>) -> io::Result<()> {
    let sent = pass::send(stream, request, netns)?;
    if sent == request.len() { Ok(()) } else { Err(io::Error::new(ErrorKind::WouldBlock, "the request was not taken whole")) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::gate::protocol::{VERSION, parse_request};
    use crate::names::{PodUid, SandboxId};

    fn request() -> Request {
        Request {
            version: VERSION,
            pod: PodUid::new("p").unwrap(),
            sandbox: SandboxId::new("s").unwrap(),
            claims: Vec::new(),
            container: None,
            netns_path: "/x".into(),
        }
    }

    /// Reads until there is news, or the connection has gone.
    fn read(client: &mut Client) -> News {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let before = client.why().to_owned();
            let news = client.read();
            if news != News::None || client.why() != before || client.stream().is_none() {
                return news;
            }
            assert!(Instant::now() < end, "nothing came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_asks_until_somebody_answers_and_says_why_nobody_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate.sock");
        let file = tempfile::tempfile().unwrap();
        let mut client = Client::new(&path, &request());
        client.ask(file.as_fd());
        assert!(client.why().contains("no agent answers") && client.why().contains("gate.sock"), "{}", client.why());
        assert!(client.next().is_some_and(|next| next > Instant::now()));

        let listener = UnixListener::bind(&path).unwrap();
        client.hurry();
        std::thread::sleep(Duration::from_millis(3));
        client.ask(file.as_fd());
        assert!(client.next().is_none(), "{}", client.why());
        let (mut agent, _) = listener.accept().unwrap();
        let (mut bytes, mut fds) = ([0; 4096], Vec::new());
        let count = pass::receive(&agent, &mut bytes, &mut fds).unwrap();
        assert_eq!((parse_request(&bytes[..count]), fds.len()), (Ok(request()), 1));

        agent.write_all(&line(&Answer::Working { why: "moving".to_owned() })).unwrap();
        assert_eq!((read(&mut client), client.why()), (News::None, "moving"));
        agent.write_all(b"{\"state\":\"atta").unwrap();
        assert_eq!(client.read(), News::None);
        drop(agent);
        assert_eq!(read(&mut client), News::None);
        assert_eq!(client.why(), "the agent went away; before that: moving");

        for (answer, news) in [
            (line(&Answer::Attached), News::Attached),
            (line(&Answer::Refused { why: "no".to_owned(), is_final: false }), News::None),
            (line(&Answer::Refused { why: "never".to_owned(), is_final: true }), News::Refused("never".to_owned())),
            (b"nonsense\n".to_vec(), News::None),
            (vec![b'x'; LINE_MAX + 2], News::None),
        ] {
            client = Client::new(&path, &request());
            client.ask(file.as_fd());
            let (mut agent, _) = listener.accept().unwrap();
            agent.write_all(&answer).unwrap();
            let end = Instant::now() + Duration::from_secs(10);
            let got = loop {
                let got = client.read();
                if got != News::None || client.stream().is_none() {
                    break got;
                }
                assert!(Instant::now() < end, "nothing came of {:?}", String::from_utf8_lossy(&answer));
            };
            assert_eq!(got, news, "{}", client.why());
        }
        assert!(client.why().contains("version"), "{}", client.why());
    }

    #[test]
    fn a_listener_that_hangs_does_not_hang_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut clients = Vec::new();
        // Until the queue of the listener is full.
        let full = (0..10_000).find(|_| {
            let mut client = Client::new(&path, &request());
            client.ask(file.as_fd());
            let full = client.stream().is_none();
            clients.push(client);
            full
        });
        assert!(full.is_some(), "the queue has no end");
        assert!(clients.last().unwrap().why().contains("no agent answers"));
    }
}
