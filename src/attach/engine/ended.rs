//! Sandboxes that were stopped: whoever asks late for an attach into one, a guard in a container that never starts, must not get it.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::names::SandboxId;

/// How many are remembered. Those of whom somebody may still ask ended within the last minutes; a node ends some hundreds an hour.
const MAX: usize = 4096;

#[derive(Debug, Default)]
struct Known {
    ids: HashSet<SandboxId>,
    order: VecDeque<SandboxId>,
}

/// The last ones. Runtimes give each sandbox an id of its own, so none of them comes again.
#[derive(Debug, Default)]
pub(super) struct Ended(Mutex<Known>);

impl Ended {
    pub(super) fn add(&self, sandbox: &SandboxId) {
        let mut known = self.known();
        if !known.ids.insert(sandbox.clone()) {
            return;
        }
        known.order.push_back(sandbox.clone());
        if known.order.len() > MAX
            && let Some(oldest) = known.order.pop_front()
        {
            known.ids.remove(&oldest);
        }
    }

    pub(super) fn has(&self, sandbox: &SandboxId) -> bool {
        self.known().ids.contains(sandbox)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_first() {
        let ended = Ended::default();
        let id = |n: usize| SandboxId::new(format!("s{n}")).unwrap();
        for n in 0..=MAX {
            ended.add(&id(n));
            ended.add(&id(n));
        }
        assert!(!ended.has(&id(0)) && ended.has(&id(1)) && ended.has(&id(MAX)));
        assert_eq!(ended.known().ids.len(), MAX);
    }
}
