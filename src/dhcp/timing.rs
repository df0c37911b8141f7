//! When to renew, and how often to try. Pure.

use std::time::Duration;

use super::{Lease, Moment};

/// Longest pause between attempts while the lease lasts is half of what is left; this is the shortest for leases of 20 minutes and more
/// (RFC 2131, section 4.4.5). For shorter ones it is a twentieth of the lease.
const PAUSE_MIN: Duration = Duration::from_secs(60);
/// The first and the longest pause between attempts to get a new lease after the end of one.
const ANEW: Duration = Duration::from_secs(10);
const ANEW_MAX: Duration = Duration::from_secs(300);

/// How far a lease is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing to do.
    Bound,
    /// Its server is asked for more time.
    Renewing,
    /// Every server is.
    Rebinding,
    /// It is over.
    Ended,
}

/// How far `lease` is.
#[must_use]
pub fn state(lease: &Lease, now: Moment) -> State {
    if lease.is_forever() {
        return State::Bound;
    }
    match now.boot_ms.saturating_sub(lease.obtained_boot_ms) / 1000 {
        age if age < u64::from(lease.renew_seconds) => State::Bound,
        age if age < u64::from(lease.rebind_seconds) => State::Renewing,
        age if age < u64::from(lease.lease_seconds) => State::Rebinding,
        _ => State::Ended,
    }
}

/// Time until the first attempt to renew: T1, or up to a twentieth of the lease later, so that those of a node that was started at once
/// do not ask at once. None for a lease that never ends.
#[must_use]
pub fn first(lease: &Lease, now: Moment, random: u64) -> Option<Duration> {
    if lease.is_forever() {
        return None;
    }
    let spread =
        (u64::from(lease.rebind_seconds.saturating_sub(lease.renew_seconds)) * 1000).min(u64::from(lease.lease_seconds) * 50);
    let due = lease.obtained_boot_ms + u64::from(lease.renew_seconds) * 1000 + random % spread.max(1);
    Some(Duration::from_millis(due.saturating_sub(now.boot_ms)))
}

/// Time until the next attempt after one that failed, `failures` with it: half of what is left of the state, but not less than a minute
/// (of a short lease: a twentieth), and not beyond the state's end. After the end of the lease ever longer, up to five minutes. Each is made up
/// to a tenth shorter by `random`.
#[must_use]
pub fn retry(lease: &Lease, now: Moment, failures: u32, random: u64) -> Duration {
    let seconds = |seconds: u32| Duration::from_secs(u64::from(seconds));
    let age = Duration::from_millis(now.boot_ms.saturating_sub(lease.obtained_boot_ms));
    let end = match state(lease, now) {
        State::Ended => return anew(failures, random),
        State::Bound => seconds(lease.renew_seconds),
        State::Renewing => seconds(lease.rebind_seconds),
        State::Rebinding => seconds(lease.lease_seconds),
    };
    let left = end.saturating_sub(age);
    let least = PAUSE_MIN.min(seconds(lease.lease_seconds) / 20);
    // The end itself is not brought forward: what is next begins there.
    if left <= least { left } else { shorter((left / 2).max(least), random) }
}

/// Time until the next attempt to get a lease where there is none any more.
#[must_use]
pub fn anew(failures: u32, random: u64) -> Duration {
    shorter(ANEW.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(ANEW_MAX), random)
}

fn shorter(pause: Duration, random: u64) -> Duration {
    pause - pause.mul_f64((random % 1000) as f64 / 10_000.0)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;
    use crate::dhcp::lease::tests::lease_of;

    fn lease(seconds: u32) -> Lease {
        let time = seconds.to_be_bytes();
        lease_of(Ipv4Addr::new(10, 9, 0, 5), &[(1, &[255, 255, 255, 0]), (54, &[10, 9, 0, 1]), (51, &time)]).unwrap()
    }

    fn at(lease: &Lease, seconds: u64) -> Moment {
        Moment { boot_ms: lease.obtained_boot_ms + seconds * 1000, unix_ms: 0 }
    }

    #[test]
    fn a_lease_goes_through_its_states() {
        let lease = lease(200);
        let expected = [(0, State::Bound), (99, State::Bound), (100, State::Renewing), (173, State::Renewing)];
        let late = [(174, State::Rebinding), (199, State::Rebinding), (200, State::Ended), (5000, State::Ended)];
        for (seconds, wanted) in expected.into_iter().chain(late) {
            assert_eq!(state(&lease, at(&lease, seconds)), wanted, "{seconds}");
        }
    }

    #[test]
    fn one_that_never_ends_is_never_renewed() {
        let lease = lease(u32::MAX);
        assert_eq!(state(&lease, Moment { boot_ms: u64::MAX, unix_ms: 0 }), State::Bound);
        assert_eq!(first(&lease, at(&lease, 0), 5), None);
    }

    #[test]
    fn the_first_attempt_is_spread_behind_t1() {
        let lease = lease(200);
        assert_eq!(first(&lease, at(&lease, 10), 0), Some(Duration::from_secs(90)));
        assert_eq!(first(&lease, at(&lease, 10), 9_999), Some(Duration::from_millis(99_999)));
        assert_eq!(first(&lease, at(&lease, 10), 10_000), Some(Duration::from_secs(90)));
        assert_eq!(first(&lease, at(&lease, 150), 0), Some(Duration::ZERO));
    }

    #[test]
    fn attempts_come_closer_to_each_other_and_end_with_the_state() {
        let day = lease(86_400);
        // T1 at 43200, T2 at 75599.
        let pause = |seconds| retry(&day, at(&day, seconds), 1, 0).as_secs();
        assert_eq!((pause(43_200), pause(70_000), pause(75_500), pause(75_560)), (16_199, 2_799, 60, 39));
        assert_eq!((pause(76_000), pause(86_300), pause(86_350)), (5_200, 60, 50));
        let short = lease(200);
        assert_eq!(retry(&short, at(&short, 160), 1, 0), Duration::from_secs(10));
    }

    #[test]
    fn after_the_end_pauses_grow_and_stay_bounded() {
        let lease = lease(200);
        let pauses: Vec<u64> = (1..8).map(|n| retry(&lease, at(&lease, 300), n, 0).as_secs()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 300, 300]);
        assert_eq!(retry(&lease, at(&lease, 300), u32::MAX, 999), Duration::from_millis(270_030));
    }

    proptest! {
        #[test]
        fn no_attempt_is_later_than_the_end_of_the_state(seconds in 1u32..200_000, age in 0u64..200_000, random: u64) {
            let lease = lease(seconds);
            let now = at(&lease, age);
            let pause = retry(&lease, now, 1, random);
            let then = Moment { boot_ms: now.boot_ms + u64::try_from(pause.as_millis()).unwrap(), unix_ms: 0 };
            let (before, after) = (state(&lease, now), state(&lease, then));
            // At most at the very moment when the next one begins.
            let just_before = Moment { boot_ms: then.boot_ms.saturating_sub(1).max(now.boot_ms), ..then };
            prop_assert!(state(&lease, just_before) == before, "{before:?} {after:?} {pause:?}");
        }
    }
}
