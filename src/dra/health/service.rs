//! The health service in both versions: everything at once, again at each change, and again before the kubelet's patience ends.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use futures_util::{Stream, stream};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{Report, Reports, State};
use crate::dra::proto::{health_v1, health_v1alpha1};

/// How often one version of the service says again what it has said, and how long the kubelet may wait for it.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Between two messages in the first minute of a stream. A kubelet forgets all health of a driver when any stream of it ends, also
    /// the one of an instance that was replaced a moment ago, so this is also how long it may be wrong.
    begin: Duration,
    /// Between two messages later.
    then: Duration,
    /// After so long without a message the kubelet takes our devices for unknown.
    timeout: Duration,
}

/// How long [`Pace::begin`] holds.
const BEGIN: Duration = Duration::from_secs(60);

/// The kubelet heeds the timeout that comes with each device. Each message wakes two processes up, so there are few.
const V1: Pace = Pace { begin: Duration::from_secs(10), then: Duration::from_secs(60), timeout: Duration::from_secs(180) };

/// Kubernetes 1.34 has 30 s whatever the message says (`healthTimeout`, pkg/kubelet/cm/dra/healthinfo.go).
const V1ALPHA1: Pace = Pace { begin: Duration::from_secs(10), then: Duration::from_secs(10), timeout: Duration::from_secs(30) };

impl Pace {
    /// How long after a message it is said again, in a stream of this age.
    fn after(self, age: Duration) -> Duration {
        if age < BEGIN { self.begin } else { self.then }
    }
}

/// The service; any number of streams.
#[derive(Debug)]
pub struct Service {
    reports: Reports,
    stop: CancellationToken,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    /// Streams `reports` until `stop`.
    #[must_use]
    pub fn new(reports: Reports, stop: CancellationToken) -> Self {
        Self { reports, stop }
    }

    fn stream<T: Send + 'static>(&self, pace: Pace, message: fn(&Report) -> T) -> Answers<T> {
        let mut watched =
            Watched { reports: self.reports.clone(), stop: self.stop.clone(), pace, begun: Instant::now(), ended: false };
        watched.reports.mark_changed();
        Box::pin(stream::unfold(watched, move |mut watched| async move {
            let answer = watched.next().await?;
            Some((answer.map(|report| message(&report)), watched))
        }))
    }
}

/// One kubelet's view. A slow reader misses reports that were replaced meanwhile, never the last one.
struct Watched {
    reports: Reports,
    stop: CancellationToken,
    pace: Pace,
    begun: Instant,
    ended: bool,
}

impl Watched {
    /// The next report to send; none at the end.
    async fn next(&mut self) -> Option<Result<Arc<Report>, Status>> {
        loop {
            let changed = tokio::select! {
                biased;
                () = self.stop.cancelled() => return None,
                changed = timeout(self.pace.after(self.begun.elapsed()), self.reports.changed()) => changed,
            };
            if let Ok(Err(_closed)) = changed {
                let status = Status::unavailable("nobody looks at the devices any more; this is a bug, see the agent's log");
                return (!std::mem::replace(&mut self.ended, true)).then_some(Err(status));
            }
            if let Some(report) = self.reports.borrow_and_update().clone() {
                return Some(Ok(report));
            }
        }
    }
}

/// The service of one version. The messages are the same, the types are not.
macro_rules! health_service {
    ($version:ident, $pace:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Service {
            type NodeWatchResourcesStream = Answers<$version::NodeWatchResourcesResponse>;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                Ok(Response::new(self.stream($pace, |report| {
                    let devices = report.devices.iter().map(|device| $version::DeviceHealth {
                        device: Some($version::DeviceIdentifier {
                            pool_name: device.pool.clone(),
                            device_name: device.device.to_string(),
                        }),
                        health: match device.state {
                            State::Healthy => $version::HealthStatus::Healthy,
                            State::Unhealthy => $version::HealthStatus::Unhealthy,
                            State::Unknown => $version::HealthStatus::Unknown,
                        }
                        .into(),
                        last_updated_time: seconds(report),
                        health_check_timeout_seconds: i64::try_from($pace.timeout.as_secs()).unwrap_or(0),
                        message: device.message.clone(),
                    });
                    $version::NodeWatchResourcesResponse { devices: devices.collect() }
                })))
            }
        }
    };
}

health_service!(health_v1, V1);
health_service!(health_v1alpha1, V1ALPHA1);

/// Since 1970.
fn seconds(report: &Report) -> i64 {
    report.at.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ages in seconds, up to `limit`, at which a stream of an unchanged report says it again.
    fn said(pace: Pace, limit: u64) -> Vec<u64> {
        let next = |age: &Duration| Some(*age + pace.after(*age));
        std::iter::successors(Some(Duration::ZERO), next).map(|age| age.as_secs()).take_while(|age| *age <= limit).collect()
    }

    #[test]
    fn a_stream_is_quick_to_repeat_in_its_first_minute_and_cheap_later() {
        assert_eq!(said(V1, 240), [0, 10, 20, 30, 40, 50, 60, 120, 180, 240]);
        assert_eq!(said(V1ALPHA1, 90), [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        for pace in [V1, V1ALPHA1] {
            assert!(pace.timeout >= 3 * pace.then, "one lost message must not make devices unknown: {pace:?}");
        }
    }
}
