//! Durations as Go writes them.

use std::time::Duration;

/// Units with their length in nanoseconds (Go's `time.ParseDuration`); longer names first, where one begins with another.
const UNITS: [(&str, u64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
];

/// `2s`, `1m30s`, `1.5s`, `500ms`, `0`; none where it is no duration that is positive or zero.
pub(super) fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut nanoseconds) = (text, 0.0_f64);
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').filter(|end| *end > 0)?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, length) = UNITS.iter().find(|(unit, _)| rest.starts_with(unit))?;
        #[allow(clippy::cast_precision_loss, reason = "at most an hour's nanoseconds")]
        let length = *length as f64;
        nanoseconds += number * length;
        rest = &rest[unit.len()..];
        if rest.is_empty() {
            return Duration::try_from_secs_f64(nanoseconds / 1e9).ok();
        }
    }
}
