//! The double's view of devices' health: as kubelet 1.37, it opens a stream to each plugin that lists a health service, opens it again
//! 5 s after it ended, and forgets everything of the driver when a stream ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use anyhow::Context as _;
use dranic::dra::proto::{health_v1 as v1, health_v1alpha1 as v1alpha1};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic::transport::Channel;

use super::{KubeletDouble, State};

pub use dranic::dra::proto::health_v1::{DeviceHealth, HealthStatus};

/// The real kubelet's pause before a stream is opened again.
const AGAIN: Duration = Duration::from_secs(5);
/// Its patience where the plugin names none.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Newest first: it takes the first of its own list that the plugin has.
const SERVICES: [&str; 2] = ["v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// What was heard of a driver.
#[derive(Debug, Clone, Default)]
pub struct DriverHealth {
    /// The service in use.
    pub service: String,
    /// When each message of the present stream came.
    pub messages: Vec<Instant>,
    /// By pool and device, with the time it was last heard of.
    pub devices: BTreeMap<(String, String), (DeviceHealth, Instant)>,
}

/// The service that is used of those that a plugin offers.
pub(super) fn pick(offered: &[String]) -> Option<&'static str> {
    SERVICES.into_iter().find(|service| offered.iter().any(|other| other == service))
}

/// The stream to one plugin.
pub(super) struct Stream {
    service: &'static str,
    driver: String,
    channel: Channel,
    state: Weak<Mutex<State>>,
    changed: Weak<watch::Sender<usize>>,
}

impl Stream {
    pub(super) fn new(
        service: &'static str,
        driver: String,
        channel: Channel,
        state: &Arc<Mutex<State>>,
        changed: &Arc<watch::Sender<usize>>,
    ) -> Self {
        Self { service, driver, channel, state: Arc::downgrade(state), changed: Arc::downgrade(changed) }
    }

    pub(super) async fn run(self) {
        loop {
            let ended = if self.service == SERVICES[0] { self.watch().await } else { self.watch_old().await };
            self.with(|state| _ = state.health.remove(&self.driver));
            if ended.is_err_and(|status| status.code() == Code::Unimplemented) {
                return;
            }
            sleep(AGAIN).await;
        }
    }

    async fn watch(&self) -> Result<(), tonic::Status> {
        let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let mut stream = client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.take(message.devices);
        }
        Ok(())
    }

    async fn watch_old(&self) -> Result<(), tonic::Status> {
        let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(self.channel.clone());
        let mut stream = client.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await?.into_inner();
        while let Some(message) = stream.message().await? {
            self.take(message.devices.into_iter().map(new_health).collect());
        }
        Ok(())
    }

    /// A complete list; devices that are not in it stay until their time is over.
    fn take(&self, devices: Vec<DeviceHealth>) {
        let now = Instant::now();
        self.with(|state| {
            let known = state.health.entry(self.driver.clone()).or_default();
            known.service = self.service.to_owned();
            known.messages.push(now);
            known.devices.retain(|_, (device, at)| now - *at <= timeout_of(device));
            for device in devices {
                let id = device.device.clone().unwrap_or_default();
                known.devices.insert((id.pool_name, id.device_name), (device, now));
            }
        });
    }

    fn with(&self, change: impl FnOnce(&mut State)) {
        if let Some(state) = self.state.upgrade() {
            change(&mut state.lock().unwrap_or_else(PoisonError::into_inner));
        }
        if let Some(changed) = self.changed.upgrade() {
            changed.send_modify(|count| *count += 1);
        }
    }
}

fn timeout_of(device: &DeviceHealth) -> Duration {
    match u64::try_from(device.health_check_timeout_seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds),
        _ => DEFAULT_TIMEOUT,
    }
}

fn new_health(old: v1alpha1::DeviceHealth) -> DeviceHealth {
    DeviceHealth {
        device: old.device.map(|d| v1::DeviceIdentifier { pool_name: d.pool_name, device_name: d.device_name }),
        health: old.health,
        last_updated_time: old.last_updated_time,
        health_check_timeout_seconds: old.health_check_timeout_seconds,
        message: old.message,
    }
}

impl KubeletDouble {
    /// What was heard of `driver`; nothing before its first message, and after the end of a stream.
    #[must_use]
    pub fn driver_health(&self, driver: &str) -> Option<DriverHealth> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).health.get(driver).cloned()
    }

    /// What a pod's status would show of a device, with the message.
    #[must_use]
    pub fn health(&self, driver: &str, pool: &str, device: &str) -> (HealthStatus, String) {
        let known = self.driver_health(driver).unwrap_or_default();
        match known.devices.get(&(pool.to_owned(), device.to_owned())) {
            Some((health, at)) if at.elapsed() <= timeout_of(health) => (health.health(), health.message.clone()),
            _ => (HealthStatus::Unknown, String::new()),
        }
    }

    /// Waits until a device has this health; gives the message.
    ///
    /// # Errors
    /// When it has not within `limit`, with what it has.
    pub async fn wait_health(
        &self,
        driver: &str,
        (pool, device): (&str, &str),
        wanted: HealthStatus,
        limit: Duration,
    ) -> anyhow::Result<String> {
        let seen = || self.health(driver, pool, device);
        let found = self.wait(limit, |_| Some(seen()).filter(|(health, _)| *health == wanted).map(|(_, message)| message));
        found.await.with_context(|| format!("{device} should be {wanted:?} and is {:?}", seen()))
    }
}
