//! What the double does wrong, when told so.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

#[derive(Debug, Clone)]
struct Planned {
    method: Option<String>,
    status: u16,
    retry_after: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    planned: VecDeque<Planned>,
    latency: Duration,
    forbidden: BTreeSet<String>,
}

/// Faults to come. Each planned one hits one request.
#[derive(Debug, Default)]
pub struct Faults(Mutex<State>);

impl Faults {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the next `n` requests with `status` and `Retry-After` (seconds).
    pub fn next(&self, n: usize, status: u16, retry_after: Option<u64>) {
        self.plan(n, Planned { method: None, status, retry_after });
    }

    /// As [`Self::next`], for requests with `method` only.
    pub fn next_of(&self, method: &str, n: usize, status: u16, retry_after: Option<u64>) {
        self.plan(n, Planned { method: Some(method.to_owned()), status, retry_after });
    }

    fn plan(&self, n: usize, planned: Planned) {
        self.state().planned.extend(std::iter::repeat_n(planned, n));
    }

    /// No planned faults any more.
    pub fn clear(&self) {
        self.state().planned.clear();
    }

    /// Every answer comes so much later.
    pub fn set_latency(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// 403 for `METHOD path-part`, for example `GET /nodes`; the method may be `*`.
    pub fn forbid(&self, rule: &str) {
        self.state().forbidden.insert(rule.to_owned());
    }

    /// Takes a rule of [`Self::forbid`] back.
    pub fn allow(&self, rule: &str) {
        self.state().forbidden.remove(rule);
    }

    pub(super) fn latency(&self) -> Duration {
        self.state().latency
    }

    pub(super) fn is_forbidden(&self, method: &str, path: &str) -> bool {
        self.state().forbidden.iter().any(|rule| {
            let (of, part) = rule.split_once(' ').unwrap_or(("*", rule));
            (of == "*" || of == method) && path.contains(part)
        })
    }

    /// The fault for a request with `method`, if one is planned: status and `Retry-After`.
    pub(super) fn take(&self, method: &str) -> Option<(u16, Option<u64>)> {
        let planned = &mut self.state().planned;
        let at = planned.iter().position(|p| p.method.as_deref().is_none_or(|m| m == method))?;
        planned.remove(at).map(|p| (p.status, p.retry_after))
    }
}
