//! Keeps the leases of devices whose addresses come by DHCP. The ledger has them, so a new agent goes on where this one stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::attach::engine::{HeldLease, Tended};
use crate::dhcp::{self, Moment};
use crate::names::{ClaimUid, DeviceName};

/// Leases that are worked on at once: each takes a thread for some seconds.
const AT_ONCE: usize = 8;
/// While something else is under way with a device. Nothing is tried more often than that.
const LATER: Duration = Duration::from_secs(1);
/// A sleep without anything to do; a write of the ledger ends it.
const IDLE: Duration = Duration::from_secs(3600);

type Key = (ClaimUid, DeviceName);

/// When something is to be done about a lease.
#[derive(Debug, Clone)]
struct Due {
    held: HeldLease,
    failures: u32,
    /// None for never.
    at: Option<Instant>,
}

/// What is due when.
#[derive(Debug, Default)]
struct Plan {
    due: BTreeMap<Key, Due>,
    running: BTreeSet<Key>,
}

/// Renews leases until `stop`; what is asked by then is waited for, since the next agent would not know the answer.
pub(super) async fn keep(shared: Arc<Shared>, stop: CancellationToken) {
    let mut writes = shared.engine.ledger().subscribe();
    let mut plan = Plan::default();
    let mut attempts: JoinSet<(Key, Tended)> = JoinSet::new();
    loop {
        writes.mark_unchanged();
        let leases = shared.engine.leases();
        let alive = leases.iter().filter(|held| !held.lost).count();
        shared.metrics.dhcp_leases.set(i64::try_from(alive).unwrap_or(i64::MAX));
        plan.follow(leases, Instant::now(), Moment::now(), dhcp::random);
        while let Some((claim, device)) = plan.next(Instant::now()) {
            let engine = shared.engine.clone();
            attempts.spawn_blocking(move || {
                let tended = engine.tend_lease(&claim, &device);
                ((claim, device), tended)
            });
        }
        tokio::select! {
            () = stop.cancelled() => break,
            _ = writes.changed() => {}
            Some(done) = attempts.join_next() => match done {
                Ok((key, tended)) => {
                    note(&shared, &key, &tended);
                    plan.done(&key, &tended, Instant::now(), Moment::now(), dhcp::random());
                }
                // A panic: its place must not stay taken.
                Err(_) if attempts.is_empty() => plan.running.clear(),
                Err(_) => {}
            },
            () = tokio::time::sleep_until(plan.wake(Instant::now())) => {}
        }
    }
    while attempts.join_next().await.is_some() {}
}

fn note(shared: &Shared, (claim, device): &Key, tended: &Tended) {
    match tended {
        Tended::Renewed => {
            shared.metrics.observe_renewal(true);
            tracing::info!(%claim, %device, "the DHCP lease is renewed");
        }
        Tended::Failed(why) => {
            shared.metrics.observe_renewal(false);
            tracing::warn!(%claim, %device, why, "the DHCP lease is not renewed");
        }
        Tended::Later | Tended::Nothing => {}
    }
}

impl Plan {
    /// Takes over what the ledger has. What is known is kept: when the next attempt is.
    fn follow(&mut self, leases: Vec<HeldLease>, now: Instant, moment: Moment, random: impl Fn() -> u64) {
        let mut due = BTreeMap::new();
        for held in leases {
            let key = (held.claim.clone(), held.device.clone());
            let known = self.due.remove(&key).filter(|known| known.held == held);
            let fresh = || {
                let first = if held.lost { Some(dhcp::anew(1, random())) } else { dhcp::first(&held.lease, moment, random()) };
                Due { at: first.map(|first| now + first), failures: 0, held: held.clone() }
            };
            due.insert(key, known.unwrap_or_else(fresh));
        }
        self.due = due;
    }

    /// The next one that is due, as running from now on.
    fn next(&mut self, now: Instant) -> Option<Key> {
        if self.running.len() >= AT_ONCE {
            return None;
        }
        let is_due = |(key, due): &(&Key, &Due)| !self.running.contains(*key) && due.at.is_some_and(|at| at <= now);
        let key = self.due.iter().filter(is_due).min_by_key(|(_, due)| due.at).map(|(key, _)| key.clone())?;
        self.running.insert(key.clone());
        Some(key)
    }

    /// An attempt is over.
    fn done(&mut self, key: &Key, tended: &Tended, now: Instant, moment: Moment, random: u64) {
        self.running.remove(key);
        let Some(due) = self.due.get_mut(key) else { return };
        let pause = match tended {
            // The ledger has another lease by now, which `follow` sees.
            Tended::Renewed | Tended::Nothing => LATER,
            Tended::Later => LATER,
            Tended::Failed(_) => {
                due.failures = due.failures.saturating_add(1);
                if due.held.lost {
                    dhcp::anew(due.failures, random)
                } else {
                    dhcp::retry(&due.held.lease, moment, due.failures, random)
                }
            }
        };
        due.at = Some(now + pause.max(LATER));
    }

    /// When to look again.
    fn wake(&self, now: Instant) -> Instant {
        let idle = now + IDLE;
        if self.running.len() >= AT_ONCE {
            return idle;
        }
        let waiting = self.due.iter().filter(|(key, _)| !self.running.contains(*key));
        waiting.filter_map(|(_, due)| due.at).min().unwrap_or(idle).min(idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(name: &str, obtained_boot_ms: u64, lost: bool) -> HeldLease {
        let lease = serde_json::json!({
            "address": "10.9.0.5", "prefixLen": 24, "server": "10.9.0.1", "via": "02:00:00:00:00:01", "leaseSeconds": 200,
            "renewSeconds": 100, "rebindSeconds": 174, "obtainedBootMs": obtained_boot_ms, "obtainedUnixMs": 1
        });
        let (claim, device) = (ClaimUid::new("uid-1").unwrap(), DeviceName::new(name).unwrap());
        HeldLease { claim, device, lease: serde_json::from_value(lease).unwrap(), lost }
    }

    fn at(seconds: u64) -> Moment {
        Moment { boot_ms: seconds * 1000, unix_ms: 0 }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_lease_is_due_at_t1_once_and_again_when_it_was_renewed() {
        let (mut plan, start) = (Plan::default(), Instant::now());
        plan.follow(vec![held("nic-a", 0, false)], start, at(10), || 0);
        assert_eq!((plan.wake(start), plan.next(start)), (start + seconds(90), None));
        let due = start + seconds(90);
        let key = plan.next(due).unwrap();
        assert_eq!(plan.next(due), None, "it runs");
        assert_eq!(plan.wake(due), due + IDLE);
        plan.done(&key, &Tended::Renewed, due, at(100), 0);
        plan.follow(vec![held("nic-a", 100_000, false)], due, at(100), || 0);
        assert_eq!(plan.wake(due), due + seconds(100));
        plan.follow(Vec::new(), due, at(100), || 0);
        assert_eq!((plan.wake(due), plan.next(due + seconds(900))), (due + IDLE, None));
    }

    #[test]
    fn a_failed_attempt_is_followed_by_others_and_a_lost_lease_by_ever_rarer_ones() {
        let (mut plan, start) = (Plan::default(), Instant::now());
        plan.follow(vec![held("nic-a", 0, false)], start, at(100), || 0);
        let key = plan.next(start).unwrap();
        plan.done(&key, &Tended::Failed(String::new()), start, at(100), 0);
        assert_eq!(plan.wake(start), start + seconds(37), "half of the time until T2");
        plan.follow(vec![held("nic-a", 0, true)], start, at(150), || 0);
        assert_eq!(plan.wake(start), start + seconds(10), "not at T1 of what is lost");
        for pause in [10, 20, 40] {
            plan.done(&key, &Tended::Failed(String::new()), start, at(150), 0);
            assert_eq!(plan.wake(start), start + seconds(pause));
            plan.follow(vec![held("nic-a", 0, true)], start, at(150), || 0);
        }
        plan.done(&key, &Tended::Later, start, at(150), 0);
        assert_eq!(plan.wake(start), start + LATER);
    }

    #[test]
    fn few_are_worked_on_at_once_the_most_urgent_first() {
        let (mut plan, start) = (Plan::default(), Instant::now());
        let all: Vec<HeldLease> = (0..20).map(|n| held(&format!("nic-{n}"), 1000 * (20 - n), false)).collect();
        plan.follow(all, start, at(200), || 0);
        let first: Vec<Key> = std::iter::from_fn(|| plan.next(start)).collect();
        assert_eq!(first.len(), AT_ONCE);
        assert_eq!(plan.wake(start), start + IDLE);
        plan.done(&first[0], &Tended::Later, start, at(200), 0);
        assert!(plan.next(start).is_some_and(|key| key != first[0]));
    }
}
