//! How often is written. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// A token bucket: `burst` at once, then one each `every`.
#[derive(Debug, Clone)]
pub(in crate::dra) struct Bucket {
    burst: u32,
    every: Duration,
    tokens: u32,
    since: Option<Instant>,
}

impl Bucket {
    pub(in crate::dra) fn new(burst: u32, every: Duration) -> Self {
        Self { burst, every, tokens: burst, since: None }
    }

    /// Takes a token, or says when there will be one.
    pub(in crate::dra) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let mut since = self.since.unwrap_or(now);
        while self.tokens < self.burst && now.duration_since(since) >= self.every {
            self.tokens += 1;
            since += self.every;
        }
        if self.tokens == self.burst {
            since = now;
        }
        self.since = Some(since);
        if self.tokens == 0 {
            return Err(since + self.every);
        }
        self.tokens -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_one_at_a_time() {
        let every = Duration::from_secs(2);
        let mut bucket = Bucket::new(5, every);
        let start = Instant::now();
        assert_eq!((0..9).filter(|_| bucket.take(start).is_ok()).count(), 5);
        assert_eq!(bucket.take(start + Duration::from_secs(1)), Err(start + every));
        assert_eq!(bucket.take(start + every), Ok(()));
        assert!(bucket.take(start + every).is_err());
        let later = start + Duration::from_secs(3600);
        assert_eq!((0..9).filter(|_| bucket.take(later).is_ok()).count(), 5, "a pause fills it, not more");
    }
}
