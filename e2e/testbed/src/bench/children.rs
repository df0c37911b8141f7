//! Many links on top of one NIC, made in one pod: the engine against the kernel's own time for the same messages, in turns.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dranic::attach::Engine;
use dranic::attach::engine::DeviceSource;
use dranic::dra::resolve::{ResolvedClaim, ResolvedDevice};
use dranic::inventory::{Device, HardwareId, Scan};
use dranic::ledger::{ClaimRef, Ledger, PodRef};
use dranic::names::{ClaimUid, DeviceName, PodUid, SandboxId};
use dranic::netdev::{Child, MacvlanMode, child, link};
use dranic::netlink::RouteSocket;
use dranic::netns::Netns;

use super::Samples;
use super::attach::nics;
use crate::fabric::links::soon;
use crate::fabric::{Fabric, Node, PodDir, PodNetns, new_netns};

/// Shares of one claim: what the API takes.
const OF_CLAIM: usize = 32;
/// Lets the kernel end what is left of the namespace before.
const SETTLE: Duration = Duration::from_millis(500);

/// What was measured.
#[derive(Debug, Clone, Default)]
pub struct Children {
    /// Links made.
    pub links: usize,
    /// `Engine::attach`: looked for, recorded, made, set up, verified, recorded.
    pub ours: Samples,
    /// One `RTM_NEWLINK` after the other on one socket, and nothing else.
    pub floor: Samples,
    /// `Engine::release` of all of them.
    pub release: Samples,
}

impl Children {
    /// Ratio of the medians.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.ours.median_ms() / self.floor.median_ms()
    }
}

/// The node's one NIC.
struct One(Device);

impl DeviceSource for One {
    fn current(&self) -> Arc<Scan> {
        Arc::new(Scan { devices: vec![self.0.clone()], ..Scan::default() })
    }

    fn rescan(&self) -> Arc<Scan> {
        self.current()
    }
}

/// Makes `links` macvlan links in a pod, `rounds` times by both ways, after one round that does not count.
///
/// # Errors
/// When anything goes wrong, or not every link is there.
pub fn measure(links: usize, rounds: usize) -> Result<Children> {
    let (fabric, node) = (Fabric::new()?, Node::new()?);
    fabric.add_nic(&node, &nics(1)[0])?;
    let nic = link::by_name(&mut node.socket()?, "nic0", soon())?.context("the NIC is there")?;
    let dir = tempfile::tempdir()?;
    let pods = PodDir::new(&dir.path().join("pods"))?;
    let hardware = HardwareId::Virtual { kind: "veth".to_owned(), address: nic.address.clone(), twin: None };
    let device = Device {
        name: hardware.device_name(),
        hardware,
        link: Some(nic.clone()),
        attributes: Default::default(),
        rdma: None,
        is_rdma_only: false,
    };
    let share = DeviceName::new(format!("share-{}", device.name))?;
    let (ledger, _) = Ledger::open(&dir.path().join("state"))?;
    let engine = Engine::new(Arc::new(ledger), node.netns().try_clone()?, "bench".to_owned(), Arc::new(One(device)));

    let mut result = Children { links, ..Children::default() };
    let mut unused = Children::default();
    for round in 0..=rounds {
        let into = if round == 0 { &mut unused } else { &mut result };
        let pod = pods.pod(&format!("pod-{round}"))?;
        for turn in 0..2 {
            std::thread::sleep(SETTLE);
            if (round + turn) % 2 == 0 {
                into.floor.push(floor(&node, nic.index, links)?);
            } else {
                by_engine(&engine, &share, &pod, (round, links), into)?;
            }
        }
    }
    Ok(result)
}

/// The kernel's own time. The links end with their namespace.
fn floor(node: &Node, parent: u32, links: usize) -> Result<Duration> {
    let pod = new_netns()?;
    let mut socket = node.socket()?;
    let mac = Child::Macvlan { mode: MacvlanMode::Bridge };
    let request = |number: usize| -> Result<_> {
        let (index, name) = (1000 + u32::try_from(number)?, format!("net{number}"));
        let create = child::Create { child: mac, parent, target: pod.as_fd(), index, name, mtu: None, address: None };
        Ok(child::create_request(&create))
    };
    let requests = (0..links).map(request).collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    for request in requests {
        socket.request(request, soon())?;
    }
    let took = start.elapsed();
    ensure!(made(&pod)? == links, "the kernel did not make all");
    Ok(took)
}

fn by_engine(
    engine: &Engine,
    share: &DeviceName,
    pod: &PodNetns,
    (round, links): (usize, usize),
    into: &mut Children,
) -> Result<()> {
    let of_pod = PodRef { name: format!("pod-{round}"), uid: PodUid::new(format!("pod-{round}"))? };
    let sandbox = SandboxId::new(format!("sandbox-{round}"))?;
    let claims = (0..links.div_ceil(OF_CLAIM))
        .map(|number| claim(share, &format!("claim-{round}-{number}"), (links - number * OF_CLAIM).min(OF_CLAIM)))
        .collect::<Result<Vec<_>>>()?;
    for claim in &claims {
        engine.prepare(claim, &of_pod)?;
    }
    let start = Instant::now();
    engine.attach(&of_pod.uid, &sandbox, pod.path(), soon())?;
    into.ours.push(start.elapsed());
    ensure!(made(&pod.netns()?)? == links, "not every link is in the pod");
    let start = Instant::now();
    drop(engine.release(&of_pod.uid, &sandbox));
    into.release.push(start.elapsed());
    ensure!(made(&pod.netns()?)? == 0, "links are left in the pod");
    for claim in &claims {
        engine.unprepare(&claim.claim).map_err(anyhow::Error::msg)?;
    }
    Ok(())
}

fn claim(device: &DeviceName, name: &str, shares: usize) -> Result<ResolvedClaim> {
    let config = dranic::config::parse(r#"{"interface":{"type":"macvlan"}}"#)?;
    let share = |number: usize| ResolvedDevice {
        request: format!("nic{number}"),
        pool: "node".to_owned(),
        device: device.clone(),
        config: config.clone(),
        share_id: Some(format!("{name}-{number}")),
        admin_access: false,
    };
    let claim = ClaimRef { namespace: "default".to_owned(), name: name.to_owned(), uid: ClaimUid::new(name)? };
    Ok(ResolvedClaim { claim, pod: None, pod_claim_name: None, devices: (0..shares).map(share).collect() })
}

/// How many macvlan links are in the namespace.
fn made(netns: &Netns) -> Result<usize> {
    let links = link::list(&mut RouteSocket::open_in(netns)?, soon())?;
    Ok(links.iter().filter(|link| link.kind.as_deref() == Some("macvlan")).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_links_are_made_by_both_ways() {
        if !crate::fabric::root() {
            return;
        }
        let result = measure(40, 1).unwrap();
        assert_eq!((result.links, result.ours.all().len(), result.floor.all().len()), (40, 1, 1));
        // A debug build on a busy machine; the benchmark's goal is 5.
        assert!(result.ratio() < 50.0, "{result:?}");
    }
}
