//! One operation at a time for each pod, and telling a running attach to stop.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::names::PodUid;

#[derive(Debug, Default)]
struct Slot {
    busy: Mutex<bool>,
    free: Condvar,
    /// How many releases wait for a running attach: while there is one, attaches stop.
    cancels: Mutex<usize>,
    cancelled: AtomicBool,
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
    cancelling: bool,
}

impl Pods {
    /// Waits until nobody works on the pod.
    pub(super) fn lock(&self, uid: &PodUid) -> PodGuard<'_> {
        self.take(uid, false)
    }

    /// As [`Pods::lock`], and asks an attach that runs meanwhile to stop and roll back.
    pub(super) fn lock_cancelling(&self, uid: &PodUid) -> PodGuard<'_> {
        self.take(uid, true)
    }

    fn take(&self, uid: &PodUid, cancelling: bool) -> PodGuard<'_> {
        let slot = {
            let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            map.entry(uid.clone()).or_default().clone()
        };
        if cancelling {
            slot.add_cancel(1);
        }
        let mut busy = slot.busy.lock().unwrap_or_else(PoisonError::into_inner);
        while *busy {
            busy = slot.free.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        *busy = true;
        drop(busy);
        PodGuard { pods: self, uid: uid.clone(), slot, cancelling }
    }
}

impl Slot {
    fn add_cancel(&self, by: isize) {
        let mut cancels = self.cancels.lock().unwrap_or_else(PoisonError::into_inner);
        *cancels = cancels.saturating_add_signed(by);
        self.cancelled.store(*cancels > 0, Ordering::SeqCst);
    }
}

impl PodGuard<'_> {
    /// Whether somebody waits to take this pod's devices back.
    pub(super) fn is_cancelled(&self) -> bool {
        self.slot.cancelled.load(Ordering::SeqCst)
    }
}

impl Drop for PodGuard<'_> {
    fn drop(&mut self) {
        if self.cancelling {
            self.slot.add_cancel(-1);
        }
        let mut map = self.pods.0.lock().unwrap_or_else(PoisonError::into_inner);
        *self.slot.busy.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.slot.free.notify_one();
        // Two references: the map's and ours. A waiter holds a third one.
        if Arc::strong_count(&self.slot) == 2 {
            map.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pod_is_worked_on_by_one_and_its_entry_goes_afterwards() {
        let pods = Pods::default();
        let uid = PodUid::new("a").unwrap();
        let first = pods.lock(&uid);
        assert!(!first.is_cancelled());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let guard = pods.lock_cancelling(&uid);
                drop(guard);
            });
            while !first.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!waiter.is_finished());
            drop(first);
        });
        assert!(pods.0.lock().unwrap().is_empty());
        assert!(!pods.lock(&uid).is_cancelled());
    }
}
