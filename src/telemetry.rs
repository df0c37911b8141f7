//! Metrics and logs.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// Log lines that may wait to be written, each of some hundred bytes.
const LINES: usize = 2048;

/// Of the log that was started.
static DROPPED: OnceLock<ErrorCounter> = OnceLock::new();

/// The log's thread; what waits is written when this is dropped, unless that takes more than a second.
#[derive(Debug)]
pub struct Logs(#[allow(dead_code, reason = "it is there to be dropped")] WorkerGuard);

/// Starts log output on stderr. Called once; a second call changes nothing.
///
/// A thread of its own writes, and lines are dropped where it can't keep up: in a container stderr is a pipe to the runtime, which may
/// stand still for as long as a disk does, and whoever logs must not wait for that. The runtime's requests have a deadline.
#[must_use]
pub fn start_logs(json: bool, filter: EnvFilter) -> Logs {
    let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(LINES).thread_name("dranic-log");
    let (writer, guard) = builder.finish(std::io::stderr());
    DROPPED.get_or_init(|| writer.error_counter());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    // Fails only when logging was started before, in tests.
    let _ = if json { builder.json().try_init() } else { builder.with_ansi(false).try_init() };
    Logs(guard)
}

/// Outcome label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// `ok` or `error`.
    pub outcome: &'static str,
}

/// Label of a difference.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Sign {
    /// `over` or `under`.
    pub sign: &'static str,
}

/// The agent's metrics; names in `docs/metrics.md`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Of the process, under the names that all exporters use: without our prefix.
    process: Registry,
    /// `dranic_devices`: devices in the ResourceSlices.
    pub devices: Gauge<i64, AtomicI64>,
    /// `dranic_nri_connected`: 1 while the runtime's NRI is connected and synchronised.
    pub nri_connected: Gauge<i64, AtomicI64>,
    /// `dranic_standby`: 1 while another agent has the state directory.
    pub standby: Gauge<i64, AtomicI64>,
    /// `dranic_unhealthy_devices`: devices that are gone or have no link.
    pub unhealthy_devices: Gauge<i64, AtomicI64>,
    /// `dranic_lost_devices`: devices that are neither on the host nor in a namespace that can be found.
    pub lost_devices: Gauge<i64, AtomicI64>,
    /// `dranic_guard_usable`: 1 while containers are held back by the guard.
    pub guard_usable: Gauge<i64, AtomicI64>,
    /// `dranic_guards_waiting`: containers whose guard waits for an attach.
    pub guards_waiting: Gauge<i64, AtomicI64>,
    /// `dranic_rdma_not_usable`: RDMA devices in pods that can't be used there.
    pub rdma_not_usable: Gauge<i64, AtomicI64>,
    /// `dranic_dhcp_leases`: devices with an address by DHCP.
    pub dhcp_leases: Gauge<i64, AtomicI64>,
    dhcp_renewals: Family<Outcome, Counter>,
    attach: Family<Outcome, Histogram>,
    forecast: Histogram,
    forecast_error: Family<Sign, Histogram>,
    unforeseen: Counter,
    deferred: Counter,
    release: Histogram,
    prepare: Family<Outcome, Histogram>,
    unprepare: Family<Outcome, Histogram>,
    starts: Counter,
    log_lines_dropped: Counter,
}

/// Seconds, with more of them around the runtime's 2 s.
const BUCKETS: [f64; 16] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 1.85, 2.0, 5.0, 15.0, 45.0];

fn histogram() -> Histogram {
    Histogram::new(BUCKETS)
}

fn label(ok: bool) -> Outcome {
    Outcome { outcome: if ok { "ok" } else { "error" } }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics in a registry of their own.
    #[must_use]
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("dranic"),
            process: Registry::default(),
            devices: Gauge::default(),
            nri_connected: Gauge::default(),
            standby: Gauge::default(),
            unhealthy_devices: Gauge::default(),
            lost_devices: Gauge::default(),
            guard_usable: Gauge::default(),
            guards_waiting: Gauge::default(),
            rdma_not_usable: Gauge::default(),
            dhcp_leases: Gauge::default(),
            dhcp_renewals: Family::default(),
            attach: Family::new_with_constructor(histogram),
            forecast: histogram(),
            forecast_error: Family::new_with_constructor(histogram),
            unforeseen: Counter::default(),
            deferred: Counter::default(),
            release: histogram(),
            prepare: Family::new_with_constructor(histogram),
            unprepare: Family::new_with_constructor(histogram),
            starts: Counter::default(),
            log_lines_dropped: Counter::default(),
        };
        metrics.starts.inc();
        // Both are there from the start: an alert can't tell a series that is not there from one that is misspelt.
        for sign in ["over", "under"] {
            drop(metrics.forecast_error.get_or_create(&Sign { sign }));
        }
        for ok in [true, false] {
            drop(metrics.dhcp_renewals.get_or_create(&label(ok)));
        }
        let started = Gauge::<f64, AtomicU64>::default();
        started.set(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
        metrics.process.register_with_unit("process_start_time", "Start of the agent, since 1970", Unit::Seconds, started);
        let registry = &mut metrics.registry;
        registry.register("devices", "Devices in the ResourceSlices of this node", metrics.devices.clone());
        registry.register(
            "nri_connected",
            "1 while the runtime's NRI is connected and synchronised",
            metrics.nri_connected.clone(),
        );
        registry.register("standby", "1 while another agent of this node has the state directory", metrics.standby.clone());
        registry.register("unhealthy_devices", "Devices that are gone or have no link", metrics.unhealthy_devices.clone());
        let about = "Devices that are neither on the host nor in a network namespace that can be found";
        registry.register("lost_devices", about, metrics.lost_devices.clone());
        registry.register("guard_usable", "1 while containers are held back by the guard", metrics.guard_usable.clone());
        registry.register("guards_waiting", "Containers whose guard waits for an attach", metrics.guards_waiting.clone());
        let about = "RDMA devices in pods that can't be used there: the port is not active, or an address has no GID";
        registry.register("rdma_not_usable", about, metrics.rdma_not_usable.clone());
        registry.register("dhcp_leases", "Devices with an address by DHCP", metrics.dhcp_leases.clone());
        let about = "Attempts to renew a DHCP lease, or to get another one where it is lost";
        registry.register("dhcp_renewals", about, metrics.dhcp_renewals.clone());
        registry.register_with_unit("attach", "Attaching all devices of a pod", Unit::Seconds, metrics.attach.clone());
        registry.register_with_unit(
            "attach_forecast",
            "What was foretold of attaches that succeeded",
            Unit::Seconds,
            metrics.forecast.clone(),
        );
        let about = "How far the attach was from its forecast: shorter (sign=\"under\") or longer (sign=\"over\")";
        registry.register_with_unit("attach_forecast_error", about, Unit::Seconds, metrics.forecast_error.clone());
        let about = "Attaches without a forecast: no device of the kind was attached since the start";
        registry.register("attach_unforeseen", about, metrics.unforeseen.clone());
        let about = "Sandboxes that the runtime was answered while their attach went on behind the gate";
        registry.register("attach_deferred", about, metrics.deferred.clone());
        registry.register_with_unit("release", "Moving all devices of a sandbox back", Unit::Seconds, metrics.release.clone());
        registry.register_with_unit("prepare", "NodePrepareResources, per claim", Unit::Seconds, metrics.prepare.clone());
        registry.register_with_unit("unprepare", "NodeUnprepareResources, per claim", Unit::Seconds, metrics.unprepare.clone());
        registry.register("starts", "Starts of the agent", metrics.starts.clone());
        let about = "Lines of the log that were dropped, since nobody took those before them";
        registry.register("log_lines_dropped", about, metrics.log_lines_dropped.clone());
        metrics
    }

    /// Notes an attach.
    pub fn observe_attach(&self, time: Duration, ok: bool) {
        self.attach.get_or_create(&label(ok)).observe(time.as_secs_f64());
    }

    /// Notes how long an attach took that was foretold, or not, to take so long.
    pub fn observe_forecast(&self, forecast: Option<Duration>, took: Duration) {
        let Some(forecast) = forecast else {
            self.unforeseen.inc();
            return;
        };
        self.forecast.observe(forecast.as_secs_f64());
        let sign = if took > forecast { "over" } else { "under" };
        self.forecast_error.get_or_create(&Sign { sign }).observe(took.abs_diff(forecast).as_secs_f64());
    }

    /// Notes an answer to the runtime that came before the attach was over.
    pub fn observe_deferred(&self) {
        self.deferred.inc();
    }

    /// Notes a release.
    pub fn observe_release(&self, time: Duration) {
        self.release.observe(time.as_secs_f64());
    }

    /// Notes an attempt to renew a lease.
    pub fn observe_renewal(&self, ok: bool) {
        self.dhcp_renewals.get_or_create(&label(ok)).inc();
    }

    /// Notes the prepare of a claim.
    pub fn observe_prepare(&self, time: Duration, ok: bool) {
        self.prepare.get_or_create(&label(ok)).observe(time.as_secs_f64());
    }

    /// Notes the unprepare of a claim.
    pub fn observe_unprepare(&self, time: Duration, ok: bool) {
        self.unprepare.get_or_create(&label(ok)).observe(time.as_secs_f64());
    }

    /// The metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// When formatting fails, which it does not for a `String`.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let dropped = DROPPED.get().map_or(0, ErrorCounter::dropped_lines);
        self.log_lines_dropped.inner().store(u64::try_from(dropped).unwrap_or(u64::MAX), Ordering::Relaxed);
        let mut out = String::new();
        text::encode_registry(&mut out, &self.process)?;
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_has_its_common_metric_and_ours_have_our_prefix() {
        let text = Metrics::new().encode().expect("a String takes everything");
        assert!(text.contains("\nprocess_start_time_seconds "), "{text}");
        assert!(text.contains("\ndranic_starts_total 1"), "{text}");
        assert_eq!(text.matches("# EOF").count(), 1);
    }
}
