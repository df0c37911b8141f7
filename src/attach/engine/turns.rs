//! Whose turn it is to move a link, or to set one up that takes long.
//!
//! The kernel moves one link at a time, with its RTNL lock held for 15 to 20 ms, and everything else on the node that makes or changes
//! a link waits for that: the network of other pods first of all. So all moves of this agent go one by one: those of a hook that the
//! runtime waits for before all others, and of each sort that with the nearest deadline. What the runtime does not wait for leaves the
//! lock free for a moment after each move. Setting a real NIC up holds the lock for up to half a second: one after the other, behind all
//! moves, and not while another attach is before its moves or at them, since each of its looks at links needs the lock, too.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much of a hurry there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pace {
    /// The runtime waits: move after move.
    Held,
    /// Behind the gate, or on the way back: others come in between.
    Background,
    /// Setting a real NIC up behind the gate: a pod with eight of them does so for seconds, and the moves of others are short.
    Opening,
}

/// Longest that setting a link up waits for attaches that are not done with their moves: 32 of these take 0.6 s. So pods that come one
/// after the other don't put it off for ever.
const STEPS_BACK: Duration = Duration::from_secs(1);

/// After a turn in the background: time for all who wait for the lock to get it. Most hold it for some microseconds. Pauses as long as
/// the moves were measured, too: they helped nobody more, and a pod with 32 NICs started 0.4 s later (`docs/performance.md`).
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
struct State {
    busy: bool,
    /// Who waits, the first to go first.
    waiting: BTreeSet<(Pace, Instant, u64)>,
    counter: u64,
    /// Until then only [`Pace::Held`] goes.
    calm_until: Option<Instant>,
    /// Attaches that are not done with their moves.
    moving: usize,
}

/// One move at a time.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

/// The right to move one link, or to set it up, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    pace: Pace,
}

impl Turns {
    /// Waits for a turn. `deadline` orders those of one pace; it does not end the wait.
    pub(super) fn take(&self, pace: Pace, deadline: Instant) -> Turn<'_> {
        let mut state = self.state();
        state.counter += 1;
        let me = (pace, deadline, state.counter);
        state.waiting.insert(me);
        let steps_back_until = Instant::now() + STEPS_BACK;
        loop {
            if pace == Pace::Opening && state.moving > 0 {
                let left = steps_back_until.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            }
            let is_first = !state.busy && state.waiting.first() == Some(&me);
            let calm =
                state.calm_until.filter(|_| pace != Pace::Held).map(|until| until.saturating_duration_since(Instant::now()));
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
        Turn { turns: self, pace }
    }

    /// An attach begins. Until it is done with its moves no link is set up in the background.
    pub(super) fn moving(&self) -> Moving<'_> {
        self.state().moving += 1;
        Moving { turns: self, done: AtomicBool::new(false) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attach that is not done with its moves, until that is said, or it is dropped.
#[derive(Debug)]
pub(super) struct Moving<'a> {
    turns: &'a Turns,
    done: AtomicBool,
}

impl Moving<'_> {
    /// Its moves are done.
    pub(super) fn done(&self) {
        if !self.done.swap(true, Ordering::Relaxed) {
            self.turns.state().moving -= 1;
            self.turns.changed.notify_all();
        }
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.done();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.busy = false;
        state.calm_until = (self.pace != Pace::Held).then(|| Instant::now() + PAUSE);
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
            let wanted = [(Pace::Opening, 1), (Pace::Background, 1), (Pace::Held, 8), (Pace::Background, 5), (Pace::Held, 2)];
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
        let expected = [(Pace::Held, 2), (Pace::Held, 8), (Pace::Background, 1), (Pace::Background, 5), (Pace::Opening, 1)];
        assert_eq!(*order.lock().unwrap(), expected);
    }

    #[test]
    fn in_the_background_a_pause_follows_that_others_need_not_wait_for() {
        let turns = Turns::default();
        drop(turns.take(Pace::Background, later(9)));
        assert!(turns.state().calm_until.is_some());
        drop(turns.take(Pace::Held, later(9)));
        assert_eq!(turns.state().calm_until, None, "the lock was in use since");
        let begin = Instant::now();
        drop(turns.take(Pace::Background, later(9)));
        drop(turns.take(Pace::Background, later(9)));
        assert!(begin.elapsed() >= PAUSE, "{:?}", begin.elapsed());
        assert!(turns.state().waiting.is_empty());
    }

    #[test]
    fn no_link_is_set_up_while_another_attach_moves_but_for_ever() {
        let turns = Turns::default();
        let moving = turns.moving();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| drop(turns.take(Pace::Opening, later(1))));
            drop(turns.take(Pace::Background, later(9)));
            drop(turns.take(Pace::Held, later(9)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!opening.is_finished());
            drop(moving);
            opening.join().unwrap();
        });
        assert!(begin.elapsed() < STEPS_BACK, "it goes on at once when the moves are done");
        let _moving = turns.moving();
        let begin = Instant::now();
        drop(turns.take(Pace::Opening, later(1)));
        assert!(begin.elapsed() >= STEPS_BACK, "{:?}", begin.elapsed());
    }
}
