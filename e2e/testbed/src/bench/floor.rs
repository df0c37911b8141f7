//! The kernel's floor: a loop of messages built beforehand on a raw netlink socket, and nothing else.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dranic::netdev::link;
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use crate::fabric::links::{self, soon};
use crate::fabric::{Fabric, NicSpec, Node, new_netns};

/// `RTM_NEWLINK`, `linux/rtnetlink.h`.
const RTM_NEWLINK: u16 = 16;
/// `NLMSG_ERROR`, `linux/netlink.h`.
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST | NLM_F_ACK`, `linux/netlink.h`.
const REQUEST_ACK: u16 = 1 | 4;
/// `IFLA_NET_NS_FD`, `linux/if_link.h`.
const IFLA_NET_NS_FD: u16 = 28;
/// Lets what a change of links set off come to rest before a measurement.
const SETTLE: Duration = Duration::from_millis(150);

/// How the links are before they are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Administratively down: the move has nothing to close.
    Down,
    /// Up.
    Up,
}

/// How the messages are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One socket, one message after the other.
    OneByOne,
    /// One socket, all messages in one system call.
    OneCall,
    /// So many threads, each with a socket and its share of the links.
    Threads(usize),
}

/// A node for moving links out of, and back.
#[derive(Debug)]
pub struct Bed {
    specs: Vec<NicSpec>,
    node: Node,
    _fabric: Fabric,
}

impl Bed {
    /// A node with NICs.
    ///
    /// # Errors
    /// Without root.
    pub fn new(specs: Vec<NicSpec>) -> Result<Self> {
        let (fabric, node) = (Fabric::new()?, Node::new()?);
        for nic in &specs {
            fabric.add_nic(&node, nic)?;
        }
        Ok(Self { specs, node, _fabric: fabric })
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Moves the first `count` NICs into a new namespace and returns how long that took; then moves them back.
    ///
    /// # Errors
    /// When the kernel refuses, or a link is not where it should be.
    pub fn run(&self, count: usize, before: Before, way: Way) -> Result<Duration> {
        self.run_with(count, before, |indices, pod| match way {
            Way::OneByOne => one_by_one(&open(self.node.netns())?, &messages(indices, pod)),
            Way::OneCall => one_call(&open(self.node.netns())?, &messages(indices, pod)),
            Way::Threads(threads) => self.by_threads(threads, &messages(indices, pod)),
        })
    }

    /// As [`Self::run`], by `work`, which gets the links' indices and the new namespace.
    ///
    /// # Errors
    /// As [`Self::run`], and what `work` says.
    pub fn run_with(
        &self,
        count: usize,
        before: Before,
        work: impl FnOnce(&[u32], &Netns) -> Result<Duration>,
    ) -> Result<Duration> {
        let indices = self.make_ready(count, before)?;
        let pod = new_netns()?;
        std::thread::sleep(SETTLE);
        let took = work(&indices, &pod)?;
        let mut inside = RouteSocket::open_in(&pod)?;
        let there = link::list(&mut inside, soon())?.iter().filter(|l| !l.is_loopback()).count();
        ensure!(there == count, "{there} of {count} links are in the pod after the floor's moves");
        let back: Vec<u32> =
            self.specs[..count].iter().map(|nic| Ok(links::find(&mut inside, &nic.name)?.index)).collect::<Result<_>>()?;
        one_by_one(&open(&pod)?, &messages(&back, self.node.netns()))?;
        Ok(took)
    }

    /// Sets the first `count` NICs up, with their addresses; then down if asked. Gives their indices.
    fn make_ready(&self, count: usize, before: Before) -> Result<Vec<u32>> {
        let mut socket = self.node.socket()?;
        let mut indices = Vec::with_capacity(count);
        for nic in &self.specs[..count] {
            let index = links::find(&mut socket, &nic.name)?.index;
            link::set_up(&mut socket, index, true, soon())?;
            for address in &nic.addresses {
                match links::add_address(&mut socket, index, *address) {
                    Err(e) if e.to_string().contains("exists") => {}
                    added => added.with_context(|| format!("{address} on {}", nic.name))?,
                }
            }
            indices.push(index);
        }
        if before == Before::Down {
            for index in &indices {
                link::set_up(&mut socket, *index, false, soon())?;
            }
        }
        Ok(indices)
    }

    fn by_threads(&self, threads: usize, messages: &[Vec<u8>]) -> Result<Duration> {
        let shares: Vec<(OwnedFd, &[Vec<u8>])> = messages
            .chunks(messages.len().div_ceil(threads))
            .map(|share| Ok((open(self.node.netns())?, share)))
            .collect::<Result<_>>()?;
        let gate = std::sync::Barrier::new(shares.len() + 1);
        std::thread::scope(|scope| {
            let work = |(socket, share): &(OwnedFd, &[Vec<u8>])| {
                gate.wait();
                one_by_one(socket, share).map(drop)
            };
            let running: Vec<_> = shares.iter().map(|share| scope.spawn(move || work(share))).collect();
            gate.wait();
            let start = Instant::now();
            for thread in running {
                thread.join().map_err(|_| anyhow::anyhow!("a thread of the floor panicked"))??;
            }
            Ok(start.elapsed())
        })
    }
}

/// A raw socket in `netns`.
pub(super) fn open(netns: &Netns) -> Result<OwnedFd> {
    let make = || socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute);
    netns.run(make)?.context("a netlink socket")
}

/// For each link the smallest message that moves it: nothing but the namespace.
pub(super) fn messages(indices: &[u32], target: &Netns) -> Vec<Vec<u8>> {
    let target = target.as_fd().as_raw_fd();
    let build = |(sequence, index): (u32, &u32)| {
        let mut bytes = Vec::with_capacity(40);
        bytes.extend(40u32.to_ne_bytes());
        bytes.extend(RTM_NEWLINK.to_ne_bytes());
        bytes.extend(REQUEST_ACK.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]); // port
        bytes.extend([0; 4]); // ifi_family, padding, ifi_type
        bytes.extend(index.to_ne_bytes());
        bytes.extend([0; 8]); // ifi_flags, ifi_change
        bytes.extend(8u16.to_ne_bytes());
        bytes.extend(IFLA_NET_NS_FD.to_ne_bytes());
        bytes.extend(target.to_ne_bytes());
        bytes
    };
    (1..).zip(indices).map(build).collect()
}

/// Sends each message and waits for its acknowledgement.
pub(super) fn one_by_one(socket: &OwnedFd, messages: &[Vec<u8>]) -> Result<Duration> {
    let fd = socket.as_raw_fd();
    let mut buffer = [0; 8192];
    let start = Instant::now();
    for message in messages {
        send(fd, message, MsgFlags::empty())?;
        let length = recv(fd, &mut buffer, MsgFlags::empty())?;
        acknowledged(&buffer[..length])?;
    }
    Ok(start.elapsed())
}

/// Sends all messages in one call and reads all acknowledgements.
pub(super) fn one_call(socket: &OwnedFd, messages: &[Vec<u8>]) -> Result<Duration> {
    let (fd, bytes) = (socket.as_raw_fd(), messages.concat());
    let mut buffer = [0; 8192];
    let start = Instant::now();
    send(fd, &bytes, MsgFlags::empty())?;
    for _ in messages {
        let length = recv(fd, &mut buffer, MsgFlags::empty())?;
        acknowledged(&buffer[..length])?;
    }
    Ok(start.elapsed())
}

/// `nlmsghdr`, then the (negative) errno.
fn acknowledged(answer: &[u8]) -> Result<()> {
    let number = |at: usize| answer.get(at..at + 4).and_then(|b| b.try_into().ok()).map(i32::from_ne_bytes);
    let kind = answer.get(4..6).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
    ensure!(kind == Some(NLMSG_ERROR), "an answer of type {kind:?}");
    let errno = number(16).context("a short answer")?;
    ensure!(errno == 0, "{}", std::io::Error::from_raw_os_error(-errno));
    Ok(())
}
