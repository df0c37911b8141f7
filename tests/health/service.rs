//! The service on its socket, with reports that the test makes.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use dranic::dra::grpc::{Serving, SocketConfig, serve};
use dranic::dra::health::{DeviceHealth, Report, State};
use dranic::dra::proto::health_v1alpha1 as v1alpha1;
use dranic::dra::{ClaimError, ClaimHandler, PreparedDevice};
use dranic::ledger::ClaimRef;
use dranic::names::DeviceName;
use dranic_testbed::kubelet::health::HealthStatus;
use dranic_testbed::kubelet::{KubeletDouble, channel};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::node::LIMIT;

const DRIVER: &str = "dranic.test";

struct NoClaims;

impl ClaimHandler for NoClaims {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        Err(ClaimError(format!("{claim}")))
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), ClaimError> {
        Err(ClaimError(format!("{claim}")))
    }
}

struct Rig {
    root: tempfile::TempDir,
    reports: watch::Sender<Option<Arc<Report>>>,
    serving: Serving,
    stop: CancellationToken,
    _guard: DropGuard,
}

async fn rig() -> Rig {
    let root = tempfile::tempdir().unwrap();
    let (reports, receiver) = watch::channel(None);
    let stop = CancellationToken::new();
    let config = SocketConfig { kubelet_root: root.path().to_owned(), driver: DRIVER.to_owned(), instance: None };
    let serving = serve(config, Arc::new(NoClaims), receiver, stop.clone()).await.unwrap();
    Rig { root, reports, serving, _guard: stop.clone().drop_guard(), stop }
}

fn report(devices: &[(&str, State, &str)]) -> Option<Arc<Report>> {
    let device = |(name, state, message): &(&str, State, &str)| DeviceHealth {
        pool: "node-1".to_owned(),
        device: DeviceName::new(*name).unwrap(),
        state: *state,
        message: (*message).to_owned(),
    };
    Some(Arc::new(Report { devices: devices.iter().map(device).collect(), at: SystemTime::now() }))
}

async fn wait(kubelet: &KubeletDouble, device: &str, wanted: HealthStatus) -> String {
    kubelet.wait_health(DRIVER, ("node-1", device), wanted, LIMIT).await.unwrap()
}

#[tokio::test]
async fn the_kubelet_hears_everything_at_once_every_change_and_again_before_its_patience_ends() {
    let rig = rig().await;
    let kubelet = KubeletDouble::start(rig.root.path()).unwrap();
    kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(kubelet.driver_health(DRIVER).is_none(), "nothing was looked at yet");

    rig.reports.send_replace(report(&[("a", State::Healthy, ""), ("b", State::Unknown, "being looked at")]));
    wait(&kubelet, "a", HealthStatus::Healthy).await;
    let seen = kubelet.driver_health(DRIVER).unwrap();
    assert_eq!((seen.service.as_str(), seen.devices.len()), ("v1.DRAResourceHealth", 2));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    for (device, _) in seen.devices.values() {
        assert_eq!(device.health_check_timeout_seconds, 180);
        assert!(now.abs_diff(device.last_updated_time.try_into().unwrap()) < 60, "{device:?}");
    }

    let begin = Instant::now();
    rig.reports.send_replace(report(&[("a", State::Unhealthy, "link down"), ("b", State::Healthy, "")]));
    assert_eq!(wait(&kubelet, "a", HealthStatus::Unhealthy).await, "link down");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    wait(&kubelet, "b", HealthStatus::Healthy).await;

    // In a stream's first minute; how it goes on is a unit test of the service.
    let pause = Duration::from_secs(10);
    let before = kubelet.driver_health(DRIVER).unwrap().messages.len();
    let again = kubelet.wait(pause * 2, |_| {
        let messages = kubelet.driver_health(DRIVER)?.messages;
        (messages.len() > before).then_some(messages)
    });
    let messages = again.await.unwrap();
    let seen = messages[before] - messages[before - 1];
    assert!(seen > pause / 2 && seen < pause * 2, "{seen:?}");
}

#[tokio::test]
async fn a_kubelet_of_before_1_37_is_served_as_well() {
    let rig = rig().await;
    rig.reports.send_replace(report(&[("a", State::Unhealthy, "device gone")]));
    let channel = channel(rig.serving.endpoint.clone());
    let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let mut stream = client.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let device = stream.message().await.unwrap().unwrap().devices.remove(0);
    assert_eq!(device.health(), v1alpha1::HealthStatus::Unhealthy);
    assert_eq!(device.message, "device gone");
    let id = device.device.unwrap();
    assert_eq!((id.pool_name.as_str(), id.device_name.as_str()), ("node-1", "a"));
    // Whoever looks at nothing any more must not go on saying that all is well.
    drop(rig.reports);
    assert_eq!(stream.message().await.unwrap_err().code(), tonic::Code::Unavailable);
}

#[tokio::test]
async fn streams_end_with_us_and_do_not_keep_us() {
    let rig = rig().await;
    let kubelet = KubeletDouble::start(rig.root.path()).unwrap();
    rig.reports.send_replace(report(&[("a", State::Healthy, "")]));
    wait(&kubelet, "a", HealthStatus::Healthy).await;
    let begin = Instant::now();
    rig.stop.cancel();
    tokio::time::timeout(LIMIT, rig.serving.stopped()).await.unwrap();
    assert!(begin.elapsed() < Duration::from_millis(900), "{:?}", begin.elapsed());
    wait(&kubelet, "a", HealthStatus::Unknown).await;
}
