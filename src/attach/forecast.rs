//! How long an attach will take, by what those before it took. Pure.
//!
//! A NIC's time is its driver's: moving a link costs 15 to 20 ms whatever it is, and opening a large real NIC hundreds. So devices are
//! told apart by kind, and nothing is assumed of a kind that was never attached here.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::inventory::{Attribute, Attributes};

/// Samples that are kept of a kind. The median of so many follows a change (another driver, a busier node) after half of them, and one
/// attach that was slow for reasons of its own does not count.
const SAMPLES: usize = 15;
/// Kinds that are kept: a node has a handful.
const KINDS: usize = 64;

/// What devices have in common as to time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Kind(String);

impl Kind {
    /// By what is published of the device: the link's type, and of hardware the vendor's and the device's id.
    #[must_use]
    pub fn of(attributes: &Attributes) -> Self {
        let texts = ["type", "pciVendor", "pciDevice"].iter().filter_map(|name| match attributes.get(*name) {
            Some(Attribute::String(text)) => Some(text.as_str()),
            _ => None,
        });
        Self(texts.collect::<Vec<_>>().join(" "))
    }

    /// A link that is made on top of such a device.
    #[must_use]
    pub fn below(self, child: &str) -> Self {
        Self(format!("{child} on {}", self.0))
    }
}

/// The last so many times of something.
#[derive(Debug, Default)]
struct Samples(VecDeque<Duration>);

impl Samples {
    fn add(&mut self, time: Duration) {
        if self.0.len() == SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(time);
    }

    fn median(&self) -> Option<Duration> {
        let mut sorted: Vec<_> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }
}

/// Times of one kind, of one device each.
#[derive(Debug, Default)]
struct Times {
    /// The move.
    moves: Samples,
    /// Everything inside the pod, the opening of the link among it.
    configure: Samples,
}

/// What was learned.
#[derive(Debug, Default)]
pub struct Forecast {
    kinds: HashMap<Kind, Times>,
    /// Of a whole attach: opening, looking, recording.
    rest: Samples,
}

/// An attach that was carried out, whole or in part.
#[derive(Debug, Clone, Default)]
pub struct Done {
    /// The devices' kinds and their moves.
    pub moves: Vec<(Kind, Duration)>,
    /// Of a whole one: everything inside the pod, for all devices; and what is neither of the two.
    pub inside: Option<(Duration, Duration)>,
}

impl Forecast {
    /// Learns from an attach.
    pub fn learn(&mut self, done: &Done) {
        let Ok(count) = u32::try_from(done.moves.len()) else { return };
        if count == 0 {
            return;
        }
        for (kind, time) in &done.moves {
            if let Some(times) = self.times(kind) {
                times.moves.add(*time);
            }
        }
        let Some((configure, rest)) = done.inside else { return };
        self.rest.add(rest);
        // All devices are configured in one pipeline: whose share is whose is known where all are alike.
        let first = &done.moves[0].0;
        if done.moves.iter().all(|(kind, _)| kind == first)
            && let Some(times) = self.times(first)
        {
            times.configure.add(configure / count);
        }
    }

    fn times(&mut self, kind: &Kind) -> Option<&mut Times> {
        (self.kinds.contains_key(kind) || self.kinds.len() < KINDS).then(|| self.kinds.entry(kind.clone()).or_default())
    }

    /// How long an attach of devices of these kinds takes; none where one of them was never attached.
    #[must_use]
    pub fn predict<'a>(&self, kinds: impl IntoIterator<Item = &'a Kind>) -> Option<Duration> {
        let mut total = self.rest.median().unwrap_or_default();
        for kind in kinds {
            let times = self.kinds.get(kind)?;
            total += times.moves.median()? + times.configure.median().unwrap_or_default();
        }
        Some(total)
    }

    /// One attach was refused because of a forecast: the oldest sample of each of its kinds goes. So a forecast that is wrong, and by
    /// which nothing is attached any more that could correct it, ends by itself.
    pub fn doubt<'a>(&mut self, kinds: impl IntoIterator<Item = &'a Kind>) {
        let kinds: std::collections::HashSet<&Kind> = kinds.into_iter().collect();
        for kind in kinds {
            if let Some(times) = self.kinds.get_mut(kind) {
                times.moves.0.pop_front();
                times.configure.0.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn kind(name: &str) -> Kind {
        Kind::of(&Attributes::from([("type".to_owned(), Attribute::String(name.to_owned()))]))
    }

    fn done(moves: &[(&str, u64)], configure: u64, rest: u64) -> Done {
        let moves = moves.iter().map(|(name, time)| (kind(name), ms(*time))).collect();
        Done { moves, inside: Some((ms(configure), ms(rest))) }
    }

    #[test]
    fn a_kind_is_a_type_and_a_chip() {
        let text = |value: &str| Attribute::String(value.to_owned());
        let nic = Attributes::from([
            ("type".to_owned(), text("device")),
            ("pciVendor".to_owned(), text("Mellanox")),
            ("pciDevice".to_owned(), text("1021")),
            ("mtu".to_owned(), Attribute::Int(9000)),
        ]);
        assert_eq!(Kind::of(&nic), Kind("device Mellanox 1021".to_owned()));
        assert_ne!(Kind::of(&nic), kind("device"));
    }

    #[test]
    fn nothing_is_said_of_what_was_never_seen() {
        let mut forecast = Forecast::default();
        assert_eq!(forecast.predict(&[kind("veth")]), None);
        forecast.learn(&done(&[("veth", 20)], 1, 2));
        assert_eq!(forecast.predict(&[kind("veth"), kind("device")]), None);
        assert_eq!(forecast.predict(&[kind("veth"), kind("veth")]), Some(ms(2 + 2 * 21)));
        // Nothing to learn from.
        forecast.learn(&Done::default());
        assert_eq!(forecast.predict(&[kind("veth")]), Some(ms(23)));
    }

    #[test]
    fn each_kind_has_its_own_time_and_a_pipeline_of_several_teaches_no_share() {
        let mut forecast = Forecast::default();
        forecast.learn(&done(&[("veth", 20), ("device", 30)], 500, 4));
        assert_eq!(forecast.predict(&[kind("veth"), kind("device")]), Some(ms(4 + 50)));
        forecast.learn(&done(&[("device", 30), ("device", 30)], 1000, 4));
        assert_eq!(forecast.predict(&[kind("veth"), kind("device")]), Some(ms(4 + 20 + 530)));
    }

    #[test]
    fn one_slow_attach_does_not_count_and_a_lasting_change_does() {
        let mut forecast = Forecast::default();
        for _ in 0..SAMPLES {
            forecast.learn(&done(&[("veth", 20)], 0, 0));
        }
        forecast.learn(&done(&[("veth", 4000)], 0, 0));
        assert_eq!(forecast.predict(&[kind("veth")]), Some(ms(20)));
        for _ in 0..SAMPLES / 2 {
            forecast.learn(&done(&[("veth", 50)], 0, 0));
        }
        assert_eq!(forecast.predict(&[kind("veth")]), Some(ms(50)));
    }

    #[test]
    fn a_forecast_that_keeps_everything_out_ends() {
        let mut forecast = Forecast::default();
        for _ in 0..3 * SAMPLES {
            forecast.learn(&done(&[("veth", 9000)], 0, 0));
        }
        for refused in 0..SAMPLES {
            assert_eq!(forecast.predict(&[kind("veth")]), Some(ms(9000)), "after {refused}");
            forecast.doubt(&[kind("veth"), kind("veth")]);
        }
        assert_eq!(forecast.predict(&[kind("veth")]), None);
    }

    #[test]
    fn an_attach_that_failed_teaches_its_moves() {
        let mut forecast = Forecast::default();
        forecast.learn(&Done { moves: vec![(kind("veth"), ms(20))], inside: None });
        assert_eq!(forecast.predict(&[kind("veth"), kind("veth")]), Some(ms(40)));
    }

    #[test]
    fn kinds_are_bounded() {
        let mut forecast = Forecast::default();
        for n in 0..2 * KINDS {
            forecast.learn(&done(&[(&format!("kind{n}"), 20)], 0, 0));
        }
        assert_eq!(forecast.kinds.len(), KINDS);
        assert_eq!(forecast.predict(&[kind(&format!("kind{}", 2 * KINDS - 1))]), None);
    }
}
