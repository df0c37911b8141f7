//! Which events are the same, and which is written next. Pure.

use std::collections::HashMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::{Event, WAITING_MAX};
use crate::dra::api::Backoff;

/// Most events that are remembered, to count the same ones.
const REMEMBERED_MAX: usize = 1024;
/// How often one event is tried.
const TRIES: u32 = 5;

/// The same event, once or many times.
#[derive(Debug)]
struct Same {
    name: String,
    first: Timestamp,
    last: Timestamp,
    seen: Instant,
    count: i32,
    /// The count that the server has; 0 when it has nothing.
    written: i32,
    due: Instant,
    tries: u32,
    backoff: Backoff,
}

impl Same {
    fn waits(&self) -> bool {
        self.count > self.written
    }
}

/// What to write.
#[derive(Debug, Clone)]
pub(super) struct Write {
    pub(super) event: Event,
    pub(super) name: String,
    pub(super) first: Timestamp,
    pub(super) last: Timestamp,
    pub(super) count: i32,
    /// The server has it: only the count is new.
    pub(super) exists: bool,
}

/// All events of the last minutes.
#[derive(Debug)]
pub(super) struct Series {
    window: Duration,
    recount: Duration,
    events: HashMap<Event, Same>,
    made: u64,
    dropped: u64,
}

impl Series {
    pub(super) fn new(window: Duration, recount: Duration) -> Self {
        Self { window, recount, events: HashMap::new(), made: 0, dropped: 0 }
    }

    /// Takes an event: as one more of the same, or as a new one.
    pub(super) fn add(&mut self, event: Event, now: Instant, time: Timestamp) {
        if let Some(same) = self.events.get_mut(&event).filter(|same| now.duration_since(same.seen) < self.window) {
            same.count = same.count.saturating_add(1);
            (same.last, same.seen) = (time, now);
            return;
        }
        let window = self.window;
        self.events.retain(|_, same| same.waits() || now.duration_since(same.seen) < window);
        let waiting = self.events.values().filter(|same| same.waits()).count();
        if waiting >= WAITING_MAX || self.events.len() >= REMEMBERED_MAX {
            self.dropped += 1;
            return;
        }
        self.made += 1;
        let same = Same {
            name: name(&event.object.name, time, self.made),
            first: time,
            last: time,
            seen: now,
            count: 1,
            written: 0,
            due: now,
            tries: 0,
            backoff: Backoff::default(),
        };
        self.events.insert(event, same);
    }

    /// When something is to be written.
    pub(super) fn due(&self) -> Option<Instant> {
        self.events.values().filter(|same| same.waits()).map(|same| same.due).min()
    }

    /// What is to be written first.
    pub(super) fn next(&self) -> Option<Write> {
        let waiting = self.events.iter().filter(|(_, same)| same.waits());
        let (event, same) = waiting.min_by_key(|(_, same)| (same.due, same.first))?;
        Some(Write {
            event: event.clone(),
            name: same.name.clone(),
            first: same.first,
            last: same.last,
            count: same.count,
            exists: same.written > 0,
        })
    }

    pub(super) fn written(&mut self, write: &Write, now: Instant) {
        let recount = self.recount;
        self.change(write, |same| {
            same.written = write.count;
            same.due = now + recount;
            same.tries = 0;
            same.backoff.reset();
        });
    }

    /// The server does not have it any more: it is made anew.
    pub(super) fn is_lost(&mut self, write: &Write, now: Instant) {
        self.change(write, |same| {
            same.written = 0;
            same.due = now;
        });
    }

    /// Tries again later, a few times.
    pub(super) fn failed(&mut self, write: &Write, now: Instant, wish: Option<Duration>) {
        self.change(write, |same| {
            same.tries += 1;
            same.due = now + same.backoff.fail(wish);
            if same.tries >= TRIES {
                same.tries = 0;
                same.written = same.count;
            }
        });
    }

    pub(super) fn give_up(&mut self, write: &Write) {
        self.events.remove(&write.event);
    }

    pub(super) fn give_up_all(&mut self) {
        self.events.retain(|_, same| !same.waits());
    }

    /// Everything is due now.
    pub(super) fn hurry(&mut self) {
        let now = Instant::now();
        self.events.values_mut().for_each(|same| same.due = now);
    }

    /// How many were dropped since this was asked.
    pub(super) fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn change(&mut self, write: &Write, change: impl FnOnce(&mut Same)) {
        if let Some(same) = self.events.get_mut(&write.event) {
            change(same);
        }
    }
}

/// The name of an event: that of its object, and something that no other event has. At most 253 bytes, a DNS subdomain.
fn name(object: &str, time: Timestamp, number: u64) -> String {
    let mut end = object.len().min(200);
    while !object.is_char_boundary(end) {
        end -= 1;
    }
    let object = object[..end].trim_end_matches(['-', '.']);
    format!("{object}.{:x}{number:x}", time.as_microsecond())
}

#[cfg(test)]
mod tests {
    use super::super::Object;
    use super::*;
    use crate::ledger::ClaimRef;
    use crate::names::ClaimUid;

    fn event(message: &str) -> Event {
        let uid = ClaimUid::new("u1").unwrap();
        let claim = ClaimRef { namespace: "default".to_owned(), name: "c".to_owned(), uid };
        Event::warning(Object::claim(&claim), "Test", message)
    }

    fn series() -> (Series, Instant, Timestamp) {
        (Series::new(Duration::from_secs(300), Duration::from_secs(10)), Instant::now(), Timestamp::now())
    }

    #[test]
    fn the_same_event_is_counted_and_the_count_written_later() {
        let (mut series, now, time) = series();
        series.add(event("a"), now, time);
        let first = series.next().unwrap();
        assert!(!first.exists && first.count == 1);
        series.written(&first, now);
        assert_eq!(series.due(), None);
        for _ in 0..1000 {
            series.add(event("a"), now, time);
        }
        assert_eq!(series.due(), Some(now + Duration::from_secs(10)));
        let again = series.next().unwrap();
        assert!(again.exists && again.count == 1001 && again.name == first.name);
        series.written(&again, now);
        // After the window it is another event.
        series.add(event("a"), now + Duration::from_secs(301), time);
        let other = series.next().unwrap();
        assert!(!other.exists && other.count == 1 && other.name != first.name);
    }

    #[test]
    fn what_waits_and_what_is_remembered_is_bounded() {
        let (mut series, now, time) = series();
        for n in 0..1000 {
            series.add(event(&n.to_string()), now, time);
        }
        assert_eq!(series.events.len(), WAITING_MAX);
        assert_eq!(series.take_dropped(), 1000 - WAITING_MAX as u64);
        for round in 0..20 {
            while let Some(write) = series.next() {
                series.written(&write, now);
            }
            for n in 0..100 {
                series.add(event(&format!("{round} {n}")), now, time);
            }
        }
        assert!(series.events.len() <= REMEMBERED_MAX);
    }

    #[test]
    fn an_event_is_tried_a_few_times_only_and_made_anew_when_it_was_deleted() {
        let (mut series, now, time) = series();
        series.add(event("a"), now, time);
        for _ in 0..TRIES {
            let write = series.next().unwrap();
            series.failed(&write, now, None);
        }
        assert_eq!(series.due(), None);
        series.add(event("b"), now, time);
        let write = series.next().unwrap();
        series.written(&write, now);
        series.add(event("b"), now, time);
        series.is_lost(&write, now);
        assert!(!series.next().unwrap().exists);
    }

    #[test]
    fn a_name_is_a_dns_subdomain_of_bounded_length() {
        let name = name(&format!("{}-.{}", "a".repeat(199), "b".repeat(60)), Timestamp::now(), u64::MAX);
        assert!(name.len() <= 253, "{name}");
        assert!(name.starts_with(&"a".repeat(199)) && !name.contains("-."), "{name}");
    }
}
