//! What `make bench` measures: the agent as a process on a scratch node, against the kernel's floor on the same machine in the
//! same run.

pub mod attach;
pub mod floor;
pub mod foreign;
pub mod gate;
pub mod idle;
pub mod report;
pub mod work;

use std::time::Duration;

/// What was seen of one figure.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<Duration>);

impl Samples {
    /// One more.
    pub fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    /// All, in the order they came.
    #[must_use]
    pub fn all(&self) -> &[Duration] {
        &self.0
    }

    /// Milliseconds of the median; NaN of none.
    #[must_use]
    pub fn median_ms(&self) -> f64 {
        median(self.0.iter().map(|d| ms(*d)))
    }

    /// Microseconds of the median.
    #[must_use]
    pub fn median_us(&self) -> f64 {
        self.median_ms() * 1000.0
    }

    /// Milliseconds of the smallest.
    #[must_use]
    pub fn min_ms(&self) -> f64 {
        self.0.iter().min().map_or(f64::NAN, |d| ms(*d))
    }

    /// Milliseconds of the largest.
    #[must_use]
    pub fn max_ms(&self) -> f64 {
        self.0.iter().max().map_or(f64::NAN, |d| ms(*d))
    }

    /// Microseconds below which `share` (0 to 1) of all are.
    #[must_use]
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a position in a list"
    )]
    pub fn percentile_us(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let position = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
        sorted.get(position).map_or(f64::NAN, |d| ms(*d) * 1000.0)
    }
}

/// Milliseconds.
#[must_use]
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// The median: of an even count the mean of the two in the middle. NaN of none.
#[must_use]
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(micros: &[u64]) -> Samples {
        Samples(micros.iter().map(|us| Duration::from_micros(*us)).collect())
    }

    #[test]
    fn medians_and_spread() {
        let odd = samples(&[3000, 1000, 9000]);
        assert_eq!((odd.median_ms(), odd.min_ms(), odd.max_ms()), (3.0, 1.0, 9.0));
        assert_eq!(samples(&[1000, 3000]).median_us(), 2000.0);
        assert_eq!(samples(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]).percentile_us(0.9).round(), 10.0);
        assert!(samples(&[]).median_ms().is_nan() && samples(&[]).percentile_us(0.5).is_nan());
    }
}
