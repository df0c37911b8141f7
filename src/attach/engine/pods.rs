//! One operation at a time for each pod, and telling a running attach to stop.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::names::{PodUid, SandboxId};

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// Who holds or awaits it. Changed with the map locked: an entry without any goes.
    users: usize,
    /// What releases that wait, or work, take back: one sandbox, or (none) everything of the pod. Attaches of these stop.
    cancels: Vec<Option<SandboxId>>,
}

#[derive(Debug, Default)]
struct Slot {
    state: Mutex<State>,
    free: Condvar,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Locks by pod. A pod's entry goes when nobody holds or awaits it.
#[derive(Debug, Default)]
pub(super) struct Pods(Mutex<HashMap<PodUid, Arc<Slot>>>);

/// The right to work on a pod, until it is dropped.
#[derive(Debug)]
pub struct PodGuard<'a> {
    pods: &'a Pods,
    uid: PodUid,
    slot: Arc<Slot>,
    cancels: Option<Option<SandboxId>>,
    /// False while it waits.
    held: bool,
}

impl Pods {
    /// Waits until nobody works on the pod, at most until `limit`.
    pub(super) fn lock(&self, uid: &PodUid, limit: Instant) -> Option<PodGuard<'_>> {
        self.take(uid, None, Some(limit))
    }

    /// As [`Pods::lock`], and asks a running attach to stop and roll back: that into `sandbox`, or, with none, any.
    pub(super) fn lock_cancelling(
        &self,
        uid: &PodUid,
        sandbox: Option<&SandboxId>,
        limit: Option<Instant>,
    ) -> Option<PodGuard<'_>> {
        self.take(uid, Some(sandbox.cloned()), limit)
    }

    fn take(&self, uid: &PodUid, cancels: Option<Option<SandboxId>>, limit: Option<Instant>) -> Option<PodGuard<'_>> {
        let slot = {
            let mut map = self.map();
            let slot = map.entry(uid.clone()).or_default().clone();
            slot.state().users += 1;
            slot
        };
        let mut guard = PodGuard { pods: self, uid: uid.clone(), slot, cancels, held: false };
        let mut state = guard.slot.state();
        state.cancels.extend(guard.cancels.clone());
        while state.busy {
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            state = match left {
                Some(left) if left.is_zero() => {
                    drop(state);
                    return None;
                }
                Some(left) => guard.slot.free.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
                None => guard.slot.free.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        state.busy = true;
        drop(state);
        guard.held = true;
        Some(guard)
    }

    fn map(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PodGuard<'_> {
    /// Whether somebody waits to take back what is in, or on its way into, `sandbox`.
    pub(super) fn is_cancelled(&self, sandbox: &SandboxId) -> bool {
        self.slot.state().cancels.iter().any(|which| which.as_ref().is_none_or(|which| which == sandbox))
    }
}

impl Drop for PodGuard<'_> {
    fn drop(&mut self) {
        let mut map = self.pods.map();
        let mut state = self.slot.state();
        if let Some(cancels) = &self.cancels
            && let Some(at) = state.cancels.iter().position(|other| other == cancels)
        {
            state.cancels.swap_remove(at);
        }
        state.busy &= !self.held;
        state.users -= 1;
        if state.users == 0 {
            map.remove(&self.uid);
        }
        drop(state);
        self.slot.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn a_pod_is_worked_on_by_one_and_its_entry_goes_afterwards() {
        let pods = Pods::default();
        let (uid, sandbox, other) = (PodUid::new("a").unwrap(), SandboxId::new("s").unwrap(), SandboxId::new("other").unwrap());
        let first = pods.lock(&uid, soon()).unwrap();
        assert!(!first.is_cancelled(&sandbox));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(pods.lock_cancelling(&uid, Some(&sandbox), None).unwrap()));
            while !first.is_cancelled(&sandbox) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!first.is_cancelled(&other), "the end of one sandbox does not stop an attach into another");
            assert!(!waiter.is_finished());
            drop(first);
        });
        assert!(pods.map().is_empty());
        let whole = pods.lock_cancelling(&uid, None, Some(soon())).unwrap();
        assert!(whole.is_cancelled(&sandbox) && whole.is_cancelled(&other));
        drop(whole);
        assert!(!pods.lock(&uid, soon()).unwrap().is_cancelled(&sandbox));
    }

    #[test]
    fn nobody_waits_longer_than_he_said_and_nothing_stays_of_him() {
        let pods = Pods::default();
        let (uid, sandbox) = (PodUid::new("a").unwrap(), SandboxId::new("s").unwrap());
        let first = pods.lock(&uid, Instant::now()).expect("free, so there is nothing to wait for");
        assert!(pods.lock(&uid, Instant::now() + Duration::from_millis(5)).is_none());
        assert!(pods.lock_cancelling(&uid, None, Some(Instant::now() + Duration::from_millis(5))).is_none());
        assert!(!first.is_cancelled(&sandbox));
        drop(first);
        assert!(pods.map().is_empty());
    }
}
