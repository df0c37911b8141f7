//! The client: exchanges with servers by one link, in the namespace of the calling thread. Blocks.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::frame::{self, CLIENT_PORT, SERVER_PORT};
use super::lease::{Lease, Refused};
use super::message::{Kind, Query, Reply};
use super::socket::PacketSocket;
use super::{Moment, random};
use crate::netdev::{Link, LinkAddress};

/// Everybody on the link.
const EVERYBODY: [u8; 6] = [0xff; 6];
/// First and longest wait for an answer before the question is asked again. RFC 2131 has 4 to 64 s, for machines that boot; the kubelet
/// waits for us.
const WAIT: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(4);
/// Largest packet that is read.
const PACKET_MAX: usize = 2048;
/// `ARPHRD_ETHER`, `linux/if_arp.h`.
const ETHERNET: u16 = 1;

/// Who asks, the same for as long as the lease shall be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Option 61: a type (0 for none of those of hardware) and what identifies the client; 2 to 255 bytes.
    pub client_id: Vec<u8>,
    /// Option 12; at most a DNS label of it is sent.
    pub host_name: String,
}

/// The link by which it is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    index: u32,
    name: String,
    mac: [u8; 6],
}

impl Port {
    /// A link, as it is now. None where it is not Ethernet, of which alone RFC 2131's fixed fields are filled in here.
    #[must_use]
    pub fn of(link: &Link) -> Option<Self> {
        let mac = <[u8; 6]>::try_from(link.address.as_ref()?.bytes()).ok()?;
        (link.arphrd == ETHERNET).then(|| Self { index: link.index, name: link.name.clone(), mac })
    }
}

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum DhcpError {
    /// Nobody said anything useful in time.
    #[error("no DHCP server answered{}", heard.as_ref().map(|heard| format!(" so that it could be used: {heard}")).unwrap_or_default())]
    NoAnswer {
        /// What was heard last that could not be used.
        heard: Option<String>,
    },
    /// The server says no: the address must not be used.
    #[error("the DHCP server refused{}", why.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    Nak {
        /// As it says.
        why: Option<String>,
    },
    /// The system refused.
    #[error("{step}: {source}")]
    Io {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn io_error(step: &'static str) -> impl FnOnce(io::Error) -> DhcpError {
    move |source| DhcpError::Io { step, source }
}

/// A client on a link.
#[derive(Debug, Clone, Copy)]
pub struct Client<'a> {
    /// By which link.
    pub port: &'a Port,
    /// In whose name.
    pub identity: &'a Identity,
}

impl Client<'_> {
    /// Gets a lease, `wanted`'s address if the server agrees. The link must be up; it needs no address.
    ///
    /// # Errors
    /// When none was got until `deadline`, and when the system refuses.
    pub fn acquire(&self, wanted: Option<Ipv4Addr>, deadline: Instant) -> Result<Lease, DhcpError> {
        let mut talk = Talk::open(self.port)?;
        let mut wait = WAIT;
        loop {
            talk.broadcast(&Query { wanted, ..talk.query(self, Kind::Discover) })?;
            let until = (Instant::now() + jitter(wait)).min(deadline);
            wait = (wait * 2).min(WAIT_MAX);
            if let Some(offer) = talk.lease(Kind::Offer, until)? {
                match self.request(&mut talk, &offer, deadline) {
                    Err(DhcpError::Nak { why }) => {
                        talk.heard = Some(format!("{} refused its own offer {}", offer.server, why.unwrap_or_default()));
                        // Not at once: a server that always says no would be asked without a pause.
                        std::thread::sleep(until.saturating_duration_since(Instant::now()));
                    }
                    Err(DhcpError::NoAnswer { .. }) => {}
                    other => return other,
                }
            }
            if Instant::now() >= deadline {
                return Err(DhcpError::NoAnswer { heard: talk.heard });
            }
        }
    }

    /// Takes what was offered.
    fn request(&self, talk: &mut Talk<'_>, offer: &Lease, deadline: Instant) -> Result<Lease, DhcpError> {
        for wait in [WAIT, WAIT * 2] {
            let query = Query { wanted: Some(offer.address), server: Some(offer.server), ..talk.query(self, Kind::Request) };
            talk.broadcast(&query)?;
            if let Some(lease) = talk.lease(Kind::Ack, (Instant::now() + jitter(wait)).min(deadline))? {
                return Ok(lease);
            }
        }
        Err(DhcpError::NoAnswer { heard: talk.heard.take() })
    }

    /// Asks the server that lent it for more time. The link must have the address. Where the server can't be reached so (something in the
    /// namespace has the port, say), every server is asked, as [`Client::rebind`] does.
    ///
    /// # Errors
    /// As [`Client::acquire`], and when the server refuses.
    pub fn renew(&self, lease: &Lease, deadline: Instant) -> Result<Lease, DhcpError> {
        match unicast(self.port, lease) {
            Ok(socket) => self.extend(lease, deadline, |_, query| socket.send(&query.encode()).map(drop)),
            Err(error) => {
                tracing::debug!(link = %self.port.name, %error, "the lease's server can't be asked alone");
                self.rebind(lease, deadline)
            }
        }
    }

    /// Asks every server for more time.
    ///
    /// # Errors
    /// As [`Client::renew`].
    pub fn rebind(&self, lease: &Lease, deadline: Instant) -> Result<Lease, DhcpError> {
        self.extend(lease, deadline, |socket, query| {
            socket.send(&frame::encode(lease.address, Ipv4Addr::BROADCAST, &query.encode()), EVERYBODY)
        })
    }

    fn extend(
        &self,
        lease: &Lease,
        deadline: Instant,
        send: impl Fn(&PacketSocket, &Query<'_>) -> io::Result<()>,
    ) -> Result<Lease, DhcpError> {
        let mut talk = Talk::open(self.port)?;
        let mut wait = WAIT;
        while Instant::now() < deadline {
            // Neither option 50 nor 54 (RFC 2131, section 4.3.2): the address it has says it all.
            let query = Query { own: lease.address, ..talk.query(self, Kind::Request) };
            // A server that is away may be told by an error of the last question (ICMP); the next attempt asks others.
            if let Err(error) = send(&talk.socket, &query) {
                talk.heard = Some(error.to_string());
            }
            let until = (Instant::now() + jitter(wait)).min(deadline);
            wait *= 2;
            match talk.lease(Kind::Ack, until)? {
                Some(renewed) if renewed.address == lease.address => return Ok(renewed),
                Some(other) => talk.heard = Some(format!("{} confirms another address, {}", other.server, other.address)),
                None => {}
            }
        }
        Err(DhcpError::NoAnswer { heard: talk.heard })
    }

    /// Says that the lease is not used any more. There is no answer to that. The link must be up; it needs no address.
    ///
    /// # Errors
    /// When it could not be sent.
    pub fn release(&self, lease: &Lease) -> Result<(), DhcpError> {
        let talk = Talk::open(self.port)?;
        let query = Query { own: lease.address, server: Some(lease.server), ..talk.query(self, Kind::Release) };
        let to = <[u8; 6]>::try_from(lease.via.bytes()).unwrap_or(EVERYBODY);
        let packet = frame::encode(lease.address, lease.server, &query.encode());
        talk.socket.send(&packet, to).map_err(io_error("sending"))
    }
}

/// A socket that speaks to the lease's server.
fn unicast(port: &Port, lease: &Lease) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((lease.address, CLIENT_PORT))?;
    setsockopt(&socket, sockopt::BindToDevice, &OsString::from(&port.name))?;
    socket.connect((lease.server, SERVER_PORT))?;
    Ok(socket)
}

/// Up to a tenth more or less, so that clients that were started at once do not go on at once.
fn jitter(wait: Duration) -> Duration {
    wait.mul_f64(0.9 + (random() % 1000) as f64 / 5000.0)
}

/// One exchange.
struct Talk<'a> {
    port: &'a Port,
    socket: PacketSocket,
    xid: u32,
    asked: Moment,
    start: Instant,
    /// What was heard last that could not be used.
    heard: Option<String>,
}

impl<'a> Talk<'a> {
    fn open(port: &'a Port) -> Result<Self, DhcpError> {
        let socket = PacketSocket::open(port.index).map_err(io_error("opening a packet socket"))?;
        Ok(Self { port, socket, xid: random() as u32, asked: Moment::now(), start: Instant::now(), heard: None })
    }

    /// A question of this exchange; the lease that answers it counts from now.
    fn query<'q>(&self, client: &'q Client<'_>, kind: Kind) -> Query<'q> {
        Query {
            kind,
            xid: self.xid,
            seconds: u16::try_from(self.start.elapsed().as_secs()).unwrap_or(u16::MAX),
            own: Ipv4Addr::UNSPECIFIED,
            mac: self.port.mac,
            client_id: &client.identity.client_id,
            host_name: &client.identity.host_name,
            wanted: None,
            server: None,
        }
    }

    fn broadcast(&mut self, query: &Query<'_>) -> Result<(), DhcpError> {
        self.asked = Moment::now();
        let packet = frame::encode(Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST, &query.encode());
        self.socket.send(&packet, EVERYBODY).map_err(io_error("sending"))
    }

    /// The first usable answer of this kind until `until`. Anybody on the link can send what is not usable: it is passed over.
    ///
    /// # Errors
    /// When a server refuses (where `wanted` is an acknowledgement), and when the system does.
    fn lease(&mut self, wanted: Kind, until: Instant) -> Result<Option<Lease>, DhcpError> {
        let mut buffer = [0; PACKET_MAX];
        while let Some((length, from)) = self.socket.receive(&mut buffer, until).map_err(io_error("receiving"))? {
            let Some(message) = buffer.get(..length).and_then(frame::decode) else { continue };
            let reply = match Reply::parse(message) {
                Ok(reply) if reply.xid == self.xid && reply.mac == self.port.mac => reply,
                Ok(_) => continue,
                Err(why) => {
                    self.heard = Some(format!("an answer is broken: {why}"));
                    continue;
                }
            };
            match reply.kind() {
                Some(Kind::Nak) if wanted == Kind::Ack => return Err(DhcpError::Nak { why: reply.text() }),
                Some(kind) if kind == wanted => match Lease::of(&reply, LinkAddress::new(from.to_vec()), self.asked) {
                    Ok(lease) => return Ok(Some(lease)),
                    Err(refused) => self.heard = Some(not_taken(wanted, &reply, &refused)),
                },
                _ => {}
            }
        }
        Ok(None)
    }
}

fn not_taken(kind: Kind, reply: &Reply, refused: &Refused) -> String {
    let what = if kind == Kind::Offer { "offer" } else { "lease" };
    format!("the {what} of {} is not taken: {refused}", reply.address)
}
