//! Whose turn it is to move a link.
//!
//! The kernel moves one link at a time, with its RTNL lock held for 15 to 20 ms, and everything else on the node that makes or changes
//! a link waits for that: the network of other pods first of all. So all moves of this agent go one by one: those of a hook that the
//! runtime waits for before all others, and of each sort that with the nearest deadline. What nobody of the runtime waits for leaves
//! the lock free for a while after each move, as long as the move took.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much of a hurry there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pace {
    /// The runtime waits: move after move.
    Held,
    /// Behind the gate, or on the way back: others come in between.
    Background,
}

/// Longest pause after a move. One that took longer was itself kept waiting.
const PAUSE_MAX: Duration = Duration::from_millis(25);

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// Who waits, the first to go first.
    waiting: BTreeSet<(Pace, Instant, u64)>,
    counter: u64,
    /// Until then only [`Pace::Held`] goes.
    calm_until: Option<Instant>,
}

/// One move at a time.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

/// The right to move one link, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    pace: Pace,
    start: Instant,
}

impl Turns {
    /// Waits for a turn. `deadline` orders those of one pace; it does not end the wait.
    pub(super) fn take(&self, pace: Pace, deadline: Instant) -> Turn<'_> {
        let mut state = self.state();
        state.counter += 1;
        let me = (pace, deadline, state.counter);
        state.waiting.insert(me);
        loop {
            let is_first = !state.busy && state.waiting.first() == Some(&me);
            let calm = state
                .calm_until
                .filter(|_| pace == Pace::Background)
                .map(|until| until.saturating_duration_since(Instant::now()));
            match calm.filter(|left| !left.is_zero()) {
                None if is_first => break,
                Some(left) if is_first => {
                    state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                _ => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
        state.waiting.remove(&me);
        state.busy = true;
        Turn { turns: self, pace, start: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.busy = false;
        let now = Instant::now();
        let pause = (now - self.start).min(PAUSE_MAX);
        state.calm_until = (self.pace == Pace::Background).then_some(now + pause);
        drop(state);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn later(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn the_held_go_first_and_then_the_nearest_deadline() {
        let turns = Turns::default();
        let order = Mutex::new(Vec::new());
        let first = turns.take(Pace::Held, later(9));
        std::thread::scope(|scope| {
            let wanted = [(Pace::Background, 1), (Pace::Held, 8), (Pace::Background, 5), (Pace::Held, 2)];
            for (count, (pace, seconds)) in wanted.into_iter().enumerate() {
                let (turns, order) = (&turns, &order);
                scope.spawn(move || {
                    let _turn = turns.take(pace, later(seconds));
                    order.lock().unwrap().push((pace, seconds));
                });
                while turns.state().waiting.len() <= count {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            drop(first);
        });
        let expected = [(Pace::Held, 2), (Pace::Held, 8), (Pace::Background, 1), (Pace::Background, 5)];
        assert_eq!(*order.lock().unwrap(), expected);
    }

    #[test]
    fn in_the_background_a_pause_follows_that_others_need_not_wait_for() {
        let turns = Turns::default();
        let work = Duration::from_millis(20);
        let slow = turns.take(Pace::Background, later(9));
        std::thread::sleep(work);
        drop(slow);
        let free = Instant::now();
        drop(turns.take(Pace::Held, later(9)));
        // A held one ends the pause: the lock was in use since.
        assert!(turns.state().calm_until.is_none());
        let slow = turns.take(Pace::Background, later(9));
        std::thread::sleep(work);
        drop(slow);
        let begin = Instant::now();
        drop(turns.take(Pace::Background, later(9)));
        assert!(begin.elapsed() >= work, "{:?}", begin.elapsed());
        assert!(free.elapsed() < Duration::from_secs(10));
        assert!(turns.state().waiting.is_empty());
    }
}
