//! Parts of node1 that die again and again while pods start and end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use dranic::ledger::Phase;
use futures_util::future::{join_all, try_join_all};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams};

use super::stream::{Random, Slot, Up};
use crate::context::{Context, wait};

/// Places for pods on node1; one more is on node2, which must not notice anything.
const SLOTS: u32 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Agent,
    Kubelet,
    Containerd,
    ApiServer,
}

pub(super) async fn agent(c: Context) -> Result<()> {
    rounds(c, Victim::Agent).await
}

pub(super) async fn kubelet(c: Context) -> Result<()> {
    rounds(c, Victim::Kubelet).await
}

pub(super) async fn containerd(c: Context) -> Result<()> {
    rounds(c, Victim::Containerd).await
}

pub(super) async fn apiserver(c: Context) -> Result<()> {
    rounds(c, Victim::ApiServer).await
}

impl Victim {
    /// Its name as a daemon of the node, unless it is the agent.
    fn daemon(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Kubelet => "kubelet",
            Self::Containerd => "containerd",
            Self::ApiServer => "kube-apiserver",
        }
    }

    /// Milliseconds between the moment when it is back and the next kill, at most: some pods start or end in that time.
    fn longest_gap(self) -> u64 {
        match self {
            Self::Agent => 1500,
            Self::Kubelet | Self::Containerd => 3000,
            Self::ApiServer => 2000,
        }
    }

    /// Kills it on node1 and waits until its work goes on. The agent is started again by the kubelet, after its back-off.
    async fn kill(self, c: &Context) -> Result<()> {
        let node = c.node(0);
        if self == Self::Agent {
            c.cluster.kill_agent(node).await?;
        } else {
            c.cluster.daemon(node, self.daemon(), "kill").await?;
            c.cluster.daemon(node, self.daemon(), "start").await?;
        }
        wait(Duration::from_secs(60), &format!("{} is back", self.daemon()), || async {
            if self == Self::Kubelet {
                c.cluster.shell(node, "busybox wget -q -O - http://127.0.0.1:10248/healthz").await?;
            }
            c.cluster.client.apiserver_version().await?;
            c.agent_ready(node).await
        })
        .await
    }
}

/// What happened in all rounds.
#[derive(Debug, Default)]
struct Tally {
    kills: u32,
    started: u32,
    ended: u32,
    /// NICs that died with the namespace of a pod that ended while the agent was dead.
    lost: u32,
    /// Pods whose container was started twice.
    restarted: u32,
    /// Devices of node1 that were just then prepared, on the way in, on the way out.
    met: [u32; 3],
}

async fn rounds(c: Context, victim: Victim) -> Result<()> {
    let (rounds, kills) = if c.full { (20, 10) } else { (2, 3) };
    let mut slots: Vec<_> = (0..SLOTS).map(|index| Slot::new(&c, 0, index)).collect();
    for slot in &slots {
        slot.prepare(&c).await?;
    }
    slots.push(Slot::new(&c, 1, 0));
    let mut tally = Tally::default();
    let mut longest = Duration::ZERO;
    for number in 0..rounds {
        let begin = Instant::now();
        let state = Mutex::new(State { tally, ..State::default() });
        let round = Round { c: &c, victim, number, kills, begin, state };
        let done = round.run(&slots).await;
        let state = round.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        tally = state.tally;
        let moments = state.moments;
        done.with_context(|| format!("seed {}, round {number}, {victim:?} killed after {moments:?} ms", c.seed))?;
        longest = longest.max(begin.elapsed());
        if c.full {
            println!("        round {number}: {:.0} s, kills after {:?} ms", begin.elapsed().as_secs_f64(), moments);
        }
    }
    let Tally { kills, started, ended, lost, restarted, met: [prepared, attaching, releasing] } = tally;
    c.tell(format!(
        "{kills} kills in {rounds} rounds, the longest {:.0} s; {started} pods started, {ended} ended under way",
        longest.as_secs_f64()
    ));
    c.tell(format!("kills met devices prepared {prepared}, attaching {attaching}, releasing {releasing}"));
    if lost > 0 {
        c.tell(format!("{lost} NICs made again: being virtual, they died with a namespace that ended without an agent"));
    }
    if restarted > 0 {
        c.tell(format!(
            "{restarted} containers were made again by the kubelet, since the {} had died while it made them",
            victim.daemon()
        ));
    }
    Ok(())
}

struct Round<'a> {
    c: &'a Context,
    victim: Victim,
    number: u64,
    kills: u32,
    begin: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    tally: Tally,
    /// Of the kills of this round, milliseconds since it began.
    moments: Vec<u128>,
    /// The victim is dead or not yet back at work.
    down: bool,
    /// The last kill is over.
    over: bool,
}

impl Round<'_> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(&self, slots: &[Slot]) -> Result<()> {
        let streams = try_join_all(slots.iter().map(|slot| self.stream(slot)));
        let ((), pods) = tokio::select! {
            done = async { tokio::try_join!(self.kill_again_and_again(), streams) } => done?,
            failed = self.mend(slots) => return Err(failed),
        };
        for (slot, pod) in slots.iter().zip(&pods) {
            slot.still(self.c, pod).await?;
        }
        self.c.api::<Pod>().delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        let ends = slots.iter().zip(&pods).map(|(slot, pod)| slot.end(self.c, &pod.name));
        let lost = try_join_all(ends).await?.concat();
        ensure!(lost.is_empty(), "{lost:?} died although nothing was killed any more");
        crate::runner::idle(&self.c.cluster, Duration::from_secs(30)).await
    }

    async fn kill_again_and_again(&self) -> Result<()> {
        let mut random = Random::new(self.c.seed, &[self.number]);
        for _ in 0..self.kills {
            tokio::time::sleep(Duration::from_millis(random.below(self.victim.longest_gap()))).await;
            self.look_before().await;
            {
                let mut state = self.state();
                state.tally.kills += 1;
                state.moments.push(self.begin.elapsed().as_millis());
                state.down = true;
            }
            self.victim.kill(self.c).await?;
            self.state().down = false;
        }
        self.state().over = true;
        Ok(())
    }

    /// Counts what the kill is about to meet. Only a number in the result: an agent that does not answer is not what is tested here.
    async fn look_before(&self) {
        let Ok(status) = self.c.cluster.status(self.c.node(0)).await else { return };
        let mut state = self.state();
        for device in status.claims.iter().flat_map(|claim| &claim.devices) {
            let index = match device.phase {
                Phase::Prepared => 0,
                Phase::Attaching => 1,
                Phase::Releasing => 2,
                Phase::Attached => continue,
            };
            state.tally.met[index] += 1;
        }
    }

    /// One pod after the other; gives the last one, which runs when the kills are over.
    async fn stream(&self, slot: &Slot) -> Result<Up> {
        let mut random = Random::new(self.c.seed, &[self.number, slot.index.into(), slot.node.len() as u64]);
        for number in 0.. {
            let before = self.mark();
            let up = slot.start(self.c, &format!("{}-{}-{}-{number}", slot.node, self.number, slot.index)).await?;
            self.started(slot, &up, before)?;
            if !self.state().over {
                tokio::time::sleep(Duration::from_millis(random.below(1500))).await;
            }
            if self.state().over {
                return Ok(up);
            }
            let before = self.mark();
            let lost = slot.end(self.c, &up.name).await?;
            self.ended(slot, &up, &lost, before).await?;
        }
        unreachable!("the numbers do not end")
    }

    /// Makes NICs again that died under a pod that waits for them: the runtime gives a sandbox up when the agent dies while it is asked,
    /// and virtual NICs go with the namespace. Real ones would be back on the host. Returns only when that is not allowed.
    async fn mend(&self, slots: &[Slot]) -> anyhow::Error {
        let mut before: Vec<Vec<String>> = vec![Vec::new(); slots.len()];
        loop {
            for (slot, before) in slots.iter().zip(&mut before) {
                // An agent that does not answer now is asked again.
                let now = slot.missing(self.c).await.unwrap_or_default();
                // Twice in a row: it is not just on its way into the sandbox.
                for nic in now.iter().filter(|nic| before.contains(nic)) {
                    if !(self.victim == Victim::Agent && self.excuse(slot, 0)) {
                        return anyhow!("{nic} of {} died under a pod that waits for it", slot.node);
                    }
                    self.state().tally.lost += 1;
                    if let Err(error) = self.c.cluster.nic_again(&slot.node, nic).await {
                        return error;
                    }
                }
                *before = now;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// To be compared with later: kills until now; one more while the victim is not back at work.
    fn mark(&self) -> usize {
        let state = self.state();
        state.moments.len() - usize::from(state.down)
    }

    /// No container may have run too early, whatever died meanwhile: where the runtime can ask nobody, the guard stands before it.
    fn started(&self, slot: &Slot, up: &Up, before: usize) -> Result<()> {
        if let Some(seen) = &up.early {
            bail!("{} ran before its NICs were there; it saw {seen}", up.name);
        }
        let here = self.excuse(slot, before);
        let mut state = self.state();
        state.tally.started += 1;
        if up.restarts > 0 {
            // Killed between creating a container and starting it, kubelet and runtime make another one.
            let excused = here && matches!(self.victim, Victim::Kubelet | Victim::Containerd);
            ensure!(excused, "the container of {} was started {} times", up.name, up.restarts + 1);
            state.tally.restarted += 1;
        }
        Ok(())
    }

    /// Something was killed on this node since the mark.
    fn excuse(&self, slot: &Slot, before: usize) -> bool {
        slot.node == self.c.node(0) && self.state().moments.len() > before
    }

    /// NICs may have died only where the agent was dead meanwhile.
    async fn ended(&self, slot: &Slot, up: &Up, lost: &[String], before: usize) -> Result<()> {
        let excused = self.excuse(slot, before) && self.victim == Victim::Agent;
        ensure!(lost.is_empty() || excused, "{lost:?} died with the namespace of {}", up.name);
        {
            let mut state = self.state();
            state.tally.ended += 1;
            state.tally.lost += u32::try_from(lost.len())?;
        }
        for done in join_all(lost.iter().map(|nic| self.c.cluster.nic_again(&slot.node, nic))).await {
            done?;
        }
        Ok(())
    }
}
