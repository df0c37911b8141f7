//! Time inside RunPodSandbox against the kernel's floors, in turns.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dranic::ledger::Phase;

use super::floor::{Bed, Before, Way};
use super::{Samples, median, ms};
use crate::cluster::{Cluster, Pod};
use crate::fabric::NicSpec;
use crate::kubelet::Claim;

/// Bytes; what RDMA fabrics use.
const MTU: u32 = 9000;
/// Lets the agent's look at the host after a change come to its end before the next measurement.
const SETTLE: Duration = Duration::from_millis(300);
/// For the way back.
const BACK_LIMIT: Duration = Duration::from_secs(30);

/// What was measured for one number of NICs.
#[derive(Debug, Clone, Default)]
pub struct Attach {
    /// NICs of the pod.
    pub nics: usize,
    /// RunPodSandbox as the runtime sees it.
    pub ours: Samples,
    /// The floor, links down before.
    pub floor_down: Samples,
    /// The floor, links up before.
    pub floor_up: Samples,
    /// NodePrepareResources as the kubelet sees it.
    pub prepare: Samples,
    /// StopPodSandbox as the runtime sees it.
    pub stop: Samples,
    /// From StopPodSandbox to the last NIC's return.
    pub back: Samples,
    /// NodeUnprepareResources, after that.
    pub unprepare: Samples,
    /// Parts of RunPodSandbox by the agent's own clock, by name.
    pub parts: BTreeMap<String, Samples>,
}

impl Attach {
    /// Ratio of the medians to the floor with links down.
    #[must_use]
    pub fn ratio_down(&self) -> f64 {
        self.ours.median_ms() / self.floor_down.median_ms()
    }

    /// Ratio of the medians to the floor with links up.
    #[must_use]
    pub fn ratio_up(&self) -> f64 {
        self.ours.median_ms() / self.floor_up.median_ms()
    }

    /// Median of each round's own ratio to the floor with links down.
    #[must_use]
    pub fn round_ratio_down(&self) -> f64 {
        median(self.ours.all().iter().zip(self.floor_down.all()).map(|(ours, floor)| ms(*ours) / ms(*floor)))
    }
}

/// `count` NICs: up, MTU 9000, one IPv4 address each.
///
/// # Panics
/// With more than 256.
#[must_use]
pub fn nics(count: usize) -> Vec<NicSpec> {
    let nic = |n: u8| NicSpec {
        name: format!("nic{n}"),
        rail: n.into(),
        mtu: Some(MTU),
        up: true,
        addresses: vec![format!("10.100.{n}.1/24").parse().expect("an address")],
        ..NicSpec::default()
    };
    (0..count).map(|n| nic(u8::try_from(n).expect("at most 256 NICs"))).collect()
}

/// Measures `rounds` times, after `warm_up` rounds that do not count. In each round the three take turns, each time another one first.
///
/// # Errors
/// When anything goes wrong, or a pod did not get all of its NICs.
pub async fn measure(cluster: &Cluster, bed: &Bed, nics: usize, warm_up: usize, rounds: usize) -> Result<Attach> {
    let mut result = Attach { nics, ..Attach::default() };
    let mut unused = Attach::default();
    for round in 0..warm_up + rounds {
        let into = if round < warm_up { &mut unused } else { &mut result };
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => into.floor_down.push(bed.run(nics, Before::Down, Way::OneByOne)?),
                1 => into.floor_up.push(bed.run(nics, Before::Up, Way::OneByOne)?),
                _ => one_pod(cluster, nics, round, into).await?,
            }
        }
    }
    Ok(result)
}

async fn one_pod(cluster: &Cluster, nics: usize, round: usize, into: &mut Attach) -> Result<()> {
    let name = format!("bench-{nics}-{round}");
    let pod = cluster.pod(&name)?;
    let names: Vec<String> = (0..nics).map(|n| format!("nic{n}")).collect();
    let claims = [cluster.claim(&name, &pod, &names, &[])?];
    tokio::time::sleep(SETTLE).await;
    into.prepare.push(timed(cluster.prepare(&claims)).await?);
    tokio::time::sleep(SETTLE).await;
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    into.ours.push(relay.elapsed);
    relay.result().map_err(anyhow::Error::msg).with_context(|| cluster.log())?;
    check(&pod, nics)?;
    for (part, time) in parts(&cluster.log())? {
        into.parts.entry(part).or_default().push(time);
    }
    tokio::time::sleep(SETTLE).await;
    give_back(cluster, &pod, &claims, into).await
}

async fn give_back(cluster: &Cluster, pod: &Pod, claims: &[Claim], into: &mut Attach) -> Result<()> {
    let start = Instant::now();
    let relay = cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await;
    into.stop.push(relay.elapsed);
    relay.result().map_err(anyhow::Error::msg)?;
    loop {
        let claims = cluster.status()?.claims;
        if claims.iter().flat_map(|c| &c.devices).all(|d| d.phase == Phase::Prepared) {
            break;
        }
        ensure!(start.elapsed() < BACK_LIMIT, "NICs are not back {BACK_LIMIT:?} after StopPodSandbox\n{}", cluster.log());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    into.back.push(start.elapsed());
    into.unprepare.push(timed(cluster.unprepare(claims)).await?);
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().map_err(anyhow::Error::msg)?;
    for claim in claims {
        cluster.api.delete("resourceclaims", "default", &claim.name);
    }
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

async fn timed(work: impl Future<Output = Result<()>>) -> Result<Duration> {
    let start = Instant::now();
    work.await?;
    Ok(start.elapsed())
}

/// A fast answer only counts if everything is there.
fn check(pod: &Pod, nics: usize) -> Result<()> {
    let seen = pod.look()?;
    let good = |n: usize| {
        let address: Option<std::net::IpAddr> = format!("10.100.{n}.1").parse().ok();
        let link = seen.links.iter().find(|l| l.name == format!("nic{n}") && l.is_up() && l.mtu == MTU);
        link.is_some_and(|l| seen.addresses.iter().any(|(index, a)| *index == l.index && Some(a.ip) == address))
    };
    let bad: Vec<usize> = (0..nics).filter(|n| !good(*n)).collect();
    ensure!(bad.is_empty(), "NICs {bad:?} are not in {} as they should be", pod.name);
    Ok(())
}

/// The fields `<part>_us` of the agent's last line "attached" (JSON).
fn parts(log: &str) -> Result<BTreeMap<String, Duration>> {
    let lines = log.lines().rev().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut attached = lines.map(|line| line["fields"].clone()).filter(|fields| fields["message"] == "attached");
    let fields = attached.next().context("the agent's log does not say \"attached\"")?;
    let fields = fields.as_object().context("fields")?;
    let part = |(name, value): (&String, &serde_json::Value)| {
        Some((name.strip_suffix("_us")?.to_owned(), Duration::from_micros(value.as_u64()?)))
    };
    Ok(fields.iter().filter_map(part).collect())
}
