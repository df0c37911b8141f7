//! RunPodSandbox where each NIC brings an address, two routes, a rule and a neighbour, against the same messages on raw sockets; and
//! the system calls of both.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use dranic::netdev::{Address, Neighbour, Route, Rule, address, link, neighbour, route, rule};
use dranic::netlink::Request;
use dranic::netns::Netns;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::Samples;
use super::floor::{self, Bed, Before};
use crate::cluster::{Cluster, Pod};
use crate::fabric::Node;
use crate::fabric::links::{self, soon};

/// NICs of the pod: the usual number of a GPU server.
pub const NICS: usize = 8;
/// Lets the agent come to rest.
const SETTLE: Duration = Duration::from_millis(300);

/// What was measured.
#[derive(Debug, Clone, Default)]
pub struct Work {
    /// RunPodSandbox as the runtime sees it.
    pub ours: Samples,
    /// Messages built beforehand, on one raw socket on the host (the moves, one by one) and one in the pod (all the rest in one call).
    pub floor: Samples,
    /// System calls of one RunPodSandbox by name, most first; why there are none.
    pub calls: Option<Result<Vec<(String, u64)>, String>>,
}

impl Work {
    /// Ratio of the medians.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.ours.median_ms() / self.floor.median_ms()
    }

    /// System calls of the floor: two for each move, one for all the rest, one for each of its acknowledgements.
    #[must_use]
    pub fn floor_calls() -> usize {
        2 * NICS + 1 + NICS * inside(0, 1).len()
    }

    /// System calls of one RunPodSandbox.
    #[must_use]
    pub fn all_calls(&self) -> Option<u64> {
        let Some(Ok(calls)) = &self.calls else { return None };
        Some(calls.iter().map(|(_, count)| count).sum())
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let calls = match &self.calls {
            Some(Ok(calls)) => {
                let most: Vec<String> = calls.iter().take(8).map(|(name, count)| format!("{name} {count}")).collect();
                format!("{} system calls ({}), floor {}", self.all_calls().unwrap_or(0), most.join(", "), Self::floor_calls())
            }
            Some(Err(why)) => format!("system calls not counted: {why}"),
            None => "system calls not counted".to_owned(),
        };
        format!(
            "{NICS} NICs with an address, two routes, a rule and a neighbour each: RunPodSandbox {:.1} ms ({:.1} to {:.1}), floor {:.1} ms \
             ({:.1} to {:.1}), ratio {:.3}; {calls}",
            self.ours.median_ms(),
            self.ours.min_ms(),
            self.ours.max_ms(),
            self.floor.median_ms(),
            self.floor.min_ms(),
            self.floor.max_ms(),
            self.ratio(),
        )
    }

    /// For machines.
    #[must_use]
    pub fn json(&self) -> Value {
        let ms = |value: f64| (value * 1000.0).round() / 1000.0;
        json!({"nics": NICS, "p50_ms": ms(self.ours.median_ms()), "floor_ms": ms(self.floor.median_ms()), "ratio": ms(self.ratio()),
            "calls": self.all_calls(), "floor_calls": Self::floor_calls()})
    }
}

/// Gives the first NICs of `node` two routes each, one of them in a table of its own, a rule for that, and a permanent neighbour: what
/// the pod gets as a copy.
///
/// # Errors
/// When the kernel refuses.
pub fn furnish(node: &Node) -> Result<()> {
    let mut socket = node.socket()?;
    for n in 0..NICS {
        let index = links::find(&mut socket, &format!("nic{n}"))?.index;
        for request in routing(n, index) {
            socket.request(request, soon()).with_context(|| format!("furnishing nic{n}"))?;
        }
    }
    Ok(())
}

/// The messages that make what NIC `n` brings besides its address.
fn routing(n: usize, index: u32) -> Vec<Request> {
    let net = |text: String| text.parse::<IpNet>().unwrap_or_default();
    let ip = |last: u8| std::net::IpAddr::from([10, 100, octet(n), last]);
    let table = 200 + u32::from(octet(n));
    let via = |destination: String, table| Route { table, gateway: Some(ip(2)), ..Route::to(net(destination)) };
    let entry = Neighbour { ip: ip(2), address: format!("02:00:00:00:02:{n:02x}").parse().ok(), flags: 0, protocol: 0 };
    let from = Rule { source: Some(net(format!("{}/32", ip(1)))), priority: Some(table), ..Rule::to_table(false, table) };
    vec![
        neighbour::add_request(index, &entry),
        route::add_request(index, &via(format!("10.101.{n}.0/24"), route::TABLE_MAIN), false),
        route::add_request(index, &via(format!("10.102.{n}.0/24"), table), false),
        rule::add_request(&from),
    ]
}

fn octet(n: usize) -> u8 {
    u8::try_from(n).unwrap_or(u8::MAX)
}

/// Everything that has to be done for NIC `n` inside the pod.
fn inside(n: usize, index: u32) -> Vec<Request> {
    let own = Address::permanent([10, 100, octet(n), 1].into(), 24);
    let mut all = vec![address::add_request(index, &own), link::up_request(index, true)];
    all.extend(routing(n, index));
    all
}

/// Measures `rounds` times; once more comes first and does not count. Then counts system calls once.
///
/// # Errors
/// When anything goes wrong.
pub async fn measure(cluster: &Cluster, bed: &Bed, rounds: usize) -> Result<Work> {
    let mut work = Work::default();
    for round in 0..=rounds {
        let floor = bed.run_with(NICS, Before::Down, |indices, pod| floor_of(bed, indices, pod))?;
        let name = format!("work-{round}");
        let ours = with_pod(cluster, &name, async |pod| {
            let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
            let elapsed = relay.elapsed;
            relay.result().map_err(anyhow::Error::msg).with_context(|| cluster.log())?;
            Ok(elapsed)
        });
        let ours = ours.await?;
        if round > 0 {
            work.floor.push(floor);
            work.ours.push(ours);
        }
    }
    let pid = cluster.agent.as_ref().context("the agent is there")?.pid();
    let counted = with_pod(cluster, "work-calls", async |pod| {
        let counter = match Counter::start(pid) {
            Ok(counter) => counter,
            Err(why) => return Ok(Err(format!("{why:#}"))),
        };
        let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
        let calls = counter.stop();
        relay.result().map_err(anyhow::Error::msg).with_context(|| cluster.log())?;
        Ok(calls.map_err(|why| format!("{why:#}")))
    });
    work.calls = Some(counted.await?);
    Ok(work)
}

/// The moves by one raw socket on the host, all the rest in one call by one in the pod.
fn floor_of(bed: &Bed, indices: &[u32], pod: &Netns) -> Result<Duration> {
    let (host, moves) = (floor::open(bed.node().netns())?, floor::messages(indices, pod));
    let rest = indices.iter().enumerate().flat_map(|(n, index)| inside(n, *index));
    let rest: Vec<Vec<u8>> = (1..).zip(rest).map(|(sequence, request)| bytes(sequence, request)).collect();
    let socket = floor::open(pod)?;
    Ok(floor::one_by_one(&host, &moves)? + floor::one_call(&socket, &rest)?)
}

fn bytes(sequence: u32, request: Request) -> Vec<u8> {
    let mut message = NetlinkMessage::from(request.message);
    if let NetlinkPayload::InnerMessage(_) = &message.payload {
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | request.flags;
        message.header.sequence_number = sequence;
    }
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Prepares a pod, lets `work` have its sandbox made, looks that everything is there, and gives everything back.
async fn with_pod<T>(cluster: &Cluster, name: &str, work: impl AsyncFnOnce(&Pod) -> Result<T>) -> Result<T> {
    let pod = cluster.pod(name)?;
    let names: Vec<String> = (0..NICS).map(|n| format!("nic{n}")).collect();
    let claims = [cluster.claim(name, &pod, &names, &[])?];
    cluster.prepare(&claims).await?;
    tokio::time::sleep(SETTLE).await;
    let result = work(&pod).await?;
    check(&pod)?;
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    cluster.unprepare(&claims).await?;
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    for claim in &claims {
        cluster.api.delete("resourceclaims", "default", &claim.name);
    }
    tokio::time::sleep(SETTLE).await;
    Ok(result)
}

/// A fast answer only counts if everything is there.
fn check(pod: &Pod) -> Result<()> {
    let seen = pod.look()?;
    let up = seen.links.iter().filter(|l| l.name.starts_with("nic") && l.is_up()).count();
    let routes = seen.routes.iter().filter(|(_, r)| r.gateway.is_some()).count();
    let rules = seen.rules.iter().filter(|r| (200..210).contains(&r.table)).count();
    ensure!(
        (up, routes, rules, seen.neighbours.len()) == (NICS, 2 * NICS, NICS, NICS),
        "{up} NICs, {routes} routes, {rules} rules, {} neighbours are in the pod",
        seen.neighbours.len()
    );
    Ok(())
}

/// `strace` at work on a process.
struct Counter {
    child: Child,
    lines: BufReader<std::process::ChildStderr>,
}

impl Counter {
    fn start(pid: u32) -> Result<Self> {
        let mut command = Command::new("strace");
        command.args(["-f", "-c", "-U", "calls,name", "-p", &pid.to_string()]);
        let spawned = command.stderr(Stdio::piped()).stdin(Stdio::null()).spawn();
        let mut child = spawned.context("strace does not start; install it (Debian: strace)")?;
        let stderr = child.stderr.take().context("its output")?;
        let mut lines = BufReader::new(stderr);
        let mut line = String::new();
        lines.read_line(&mut line)?;
        if !line.contains("attached") {
            child.kill().ok();
            child.wait()?;
            bail!("strace: {}", line.trim());
        }
        Ok(Self { child, lines })
    }

    /// Ends it, and gives how often each system call was made, most first.
    fn stop(mut self) -> Result<Vec<(String, u64)>> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)?;
        let text: Vec<String> = std::io::BufRead::lines(&mut self.lines).collect::<std::io::Result<_>>()?;
        self.child.wait()?;
        let call = |line: &String| {
            let mut words = line.split_whitespace();
            let (count, name) = (words.next()?.parse::<u64>().ok()?, words.next()?);
            (name != "total").then(|| (name.to_owned(), count))
        };
        let mut calls: Vec<(String, u64)> = text.iter().filter_map(call).collect();
        ensure!(!calls.is_empty(), "strace counted nothing: {}", text.join(" "));
        calls.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Ok(calls)
    }
}
