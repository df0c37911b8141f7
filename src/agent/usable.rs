//! Looks whether RDMA devices in pods can be used: each by a task of its own, from when it is attached until it leaves. Nobody waits for
//! that but containers, behind the gate.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::verbs::Verbs;
use crate::attach::Engine;
use crate::attach::engine::{RdmaInPod, RdmaState};
use crate::netdev::monitor::{Group, Monitor};

/// Between the first looks; then ever longer pauses. Ports and GIDs of RoCE follow events of the link, those of others have none here.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Between looks at one that can be used, where nothing is heard of its link.
const RECHECK: Duration = Duration::from_secs(15);
/// What happens to a link comes in several events: they are looked at together. Longer where nobody waits: a pod can make as many
/// events as it likes.
const QUIET: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Bytes for events that wait: what is lost is told as lost.
const RECEIVE_BUFFER: usize = 64 << 10;

/// How it is looked.
#[derive(Debug)]
pub struct Settings {
    /// After so long it is told that a device can't be used.
    pub timeout: Duration,
    /// Opens devices.
    pub verbs: Verbs,
}

/// What is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// A device can't be used for longer than the timeout, and why.
    Late(RdmaInPod, String),
    /// So many devices in pods can't be used now.
    NotUsable(usize),
}

/// Who is told; must return at once.
pub type Tell = Arc<dyn Fn(Told) + Send + Sync>;

/// Looks until `stop`.
pub async fn keep(engine: Arc<Engine>, settings: Arc<Settings>, tell: Tell, stop: CancellationToken) {
    let mut writes = engine.ledger().subscribe();
    let mut running: HashMap<RdmaInPod, (u64, CancellationToken)> = HashMap::new();
    let mut tasks: JoinSet<(RdmaInPod, u64)> = JoinSet::new();
    let mut number = 0_u64;
    loop {
        writes.mark_unchanged();
        let wanted: HashSet<RdmaInPod> = engine.rdma_in_pods().into_iter().collect();
        running.retain(|which, (_, token)| wanted.contains(which) || (token.cancel(), false).1);
        for which in wanted.into_iter().filter(|which| !running.contains_key(which)).collect::<Vec<_>>() {
            number += 1;
            let token = stop.child_token();
            running.insert(which.clone(), (number, token.clone()));
            let watch = Watch { engine: engine.clone(), settings: settings.clone(), tell: tell.clone(), which: which.clone() };
            tasks.spawn(async move {
                tokio::select! {
                    () = token.cancelled() => {}
                    () = watch.run() => {}
                }
                (which, number)
            });
        }
        tell(Told::NotUsable(engine.rdma_not_usable()));
        tokio::select! {
            () = stop.cancelled() => return,
            _ = writes.changed() => {}
            Some(ended) = tasks.join_next() => {
                if let Ok((which, number)) = ended {
                    running.retain(|other, (of, _)| *other != which || *of != number);
                }
            }
        }
    }
}

/// One device in one pod.
struct Watch {
    engine: Arc<Engine>,
    settings: Arc<Settings>,
    tell: Tell,
    which: RdmaInPod,
}

impl Watch {
    /// Until it is not there any more.
    async fn run(self) {
        let Some(mut monitor) = self.listen() else { return };
        let mut late = Late::default();
        let mut pause = PAUSE.0;
        loop {
            let Some(state) = self.look().await else { return };
            let (recheck, quiet) = match &state {
                RdmaState::Gone => return,
                RdmaState::Usable => {
                    pause = PAUSE.0;
                    (RECHECK, QUIET.1)
                }
                RdmaState::Not(_) => (pause, QUIET.0),
            };
            if let Some(why) = late.note(&state, Instant::now(), self.settings.timeout) {
                (self.tell)(Told::Late(self.which.clone(), why));
            }
            tokio::select! {
                () = sleep(recheck) => {
                    if state != RdmaState::Usable {
                        pause = (pause * 2).min(PAUSE.1);
                    }
                }
                () = event(&mut monitor) => {
                    pause = PAUSE.0;
                    sleep(quiet).await;
                }
            }
        }
    }

    /// Where events can't be had, the pauses do. None where it is gone.
    fn listen(&self) -> Option<Option<Monitor>> {
        let netns = self.engine.rdma_netns(&self.which)?;
        let opened = Monitor::with_receive_buffer(&netns, &[Group::Link, Group::Address], RECEIVE_BUFFER);
        Some(opened.inspect_err(|error| tracing::warn!(%error, "can't listen for events of a pod's links")).ok())
    }

    /// None when that ended badly.
    async fn look(&self) -> Option<RdmaState> {
        let (engine, settings, which) = (self.engine.clone(), self.settings.clone(), self.which.clone());
        let work = move || engine.tend_rdma(&which, &|netns, device, port| settings.verbs.open(netns, device, port));
        let looked = tokio::task::spawn_blocking(work).await;
        looked.inspect_err(|panic| tracing::error!(%panic, "looking at an RDMA device ended badly")).ok()
    }
}

/// Returns when something happened to the links of the pod.
async fn event(monitor: &mut Option<Monitor>) {
    match monitor {
        None => std::future::pending().await,
        Some(open) => {
            if let Err(error) = open.changed().await {
                tracing::warn!(%error, "no more events of a pod's links");
                *monitor = None;
            }
        }
    }
}

/// Since when a device can't be used, and whether that was told.
#[derive(Debug, Default)]
struct Late {
    since: Option<Instant>,
    told: bool,
}

impl Late {
    /// Why it can't be used, once, when that has lasted for `timeout`.
    fn note(&mut self, state: &RdmaState, now: Instant, timeout: Duration) -> Option<String> {
        let RdmaState::Not(why) = state else {
            *self = Self::default();
            return None;
        };
        let since = *self.since.get_or_insert(now);
        let is_due = now.duration_since(since) >= timeout && !self.told;
        self.told |= is_due;
        is_due.then(|| why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_once_after_the_timeout_and_again_when_it_could_be_used_meanwhile() {
        let (mut late, start, timeout) = (Late::default(), Instant::now(), Duration::from_secs(30));
        let not = RdmaState::Not("DOWN".to_owned());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(late.note(&not, at(0), timeout), None);
        assert_eq!(late.note(&not, at(29), timeout), None);
        assert_eq!(late.note(&not, at(30), timeout).as_deref(), Some("DOWN"));
        assert_eq!(late.note(&not, at(60), timeout), None, "once");
        assert_eq!(late.note(&RdmaState::Usable, at(70), timeout), None);
        assert_eq!(late.note(&not, at(80), timeout), None);
        assert!(late.note(&not, at(110), timeout).is_some());
    }
}
