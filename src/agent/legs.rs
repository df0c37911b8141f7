//! The legs: the kubelet's, the runtime's, and the publisher's; from their start to their end in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::claims::Claims;
use super::places::Places;
use super::reports::Reporting;
use super::{NriState, Shared, Signals, cdi, handover, health, hooks, leases, returned, standby, usable, verbs};
use crate::attach::engine::Lost;
use crate::dra::publisher::PublisherConfig;
use crate::dra::{grpc, publisher};
use crate::inventory::Scan;
use crate::inventory::sysfs::Sysfs;
use crate::names::DeviceName;
use crate::netns::Netns;
use crate::nri::session::{self, SessionConfig};

/// How long running calls and attaches may take after SIGTERM. With what follows it stays under 10 s, and with a hand-over under 13.
const STOP_LIMIT: Duration = Duration::from_millis(7500);

/// Everything that works on claims and pods.
pub(super) struct Legs {
    shared: Arc<Shared>,
    claims: Arc<Claims>,
    endpoint: std::path::PathBuf,
    serving: JoinHandle<()>,
    registration: JoinHandle<()>,
    nri: Option<std::thread::JoinHandle<()>>,
    publisher: JoinHandle<()>,
    reporting: Reporting,
    stop: Stop,
}

/// What tells each to stop.
struct Stop {
    /// No call of the kubelet may wait any longer.
    waits: CancellationToken,
    /// No more calls.
    grpc: CancellationToken,
    nri: CancellationToken,
    publisher: CancellationToken,
}

impl Legs {
    /// Starts them; none when we were told to stop meanwhile.
    ///
    /// # Errors
    /// When the sockets for the kubelet can't be had, or a thread.
    pub(super) async fn start(
        shared: &Arc<Shared>,
        client: kube::Client,
        reporting: Reporting,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<Self>> {
        let config = &shared.config;
        let grpc_stop = CancellationToken::new();
        let stops = Stop {
            waits: grpc_stop.child_token(),
            grpc: grpc_stop,
            nri: CancellationToken::new(),
            publisher: stop.child_token(),
        };
        let specs = Arc::new(cdi::Specs::new(&config.cdi_dir, &config.driver_name, shared.guard.clone()));
        specs.renew(shared.engine.ledger(), true);
        tokio::spawn(cdi::keep(specs.clone(), shared.engine.clone(), config.rescan, stops.publisher.clone()));
        shared.background.spawn(leases::keep(shared.clone(), stops.waits.clone()));
        tokio::spawn(keep_usable(shared, stops.publisher.clone()));
        let lost = {
            let shared = shared.clone();
            move |lost: &[Lost]| {
                shared.metrics.lost_devices.set(i64::try_from(lost.len()).unwrap_or(i64::MAX));
                shared.reports.lost(lost);
            }
        };
        tokio::spawn(returned::keep(shared.engine.clone(), Netns::current()?, lost, stops.publisher.clone()));
        let claims = Arc::new(Claims::new(shared.clone(), client.clone(), specs, stops.waits.clone()));
        let health = health::start(shared.clone(), Netns::current()?, stop.clone());
        let bind = || grpc::serve(config.kubelet_sockets(), claims.clone(), health.clone(), stops.grpc.clone());
        let is_taken = |error: &grpc::ServeError| matches!(error, grpc::ServeError::InTheWay { .. });
        let serving = standby::bind(&shared.board, stop, bind, is_taken)
            .await
            .with_context(|| format!("no sockets for the kubelet in --kubelet-root {}", config.kubelet_root.display()))?;
        let Some(serving) = serving else { return Ok(None) };
        let registration = tokio::spawn(forward(serving.registered.clone(), shared.clone()));
        let nri = match start_nri(shared.clone(), stops.nri.clone()) {
            Ok(nri) => nri,
            Err(error) => {
                stops.grpc.cancel();
                serving.stopped().await;
                return Err(error);
            }
        };
        let publisher = tokio::spawn(publish(client, shared.clone(), stops.publisher.clone()));
        tracing::info!(node = %config.node_name, driver = %config.driver_name, "the agent runs");
        let (endpoint, serving) = (serving.endpoint.clone(), tokio::spawn(serving.stopped()));
        let shared = shared.clone();
        Ok(Some(Self { shared, claims, endpoint, serving, registration, nri, publisher, reporting, stop: stops }))
    }

    /// Works until a signal comes or something breaks, and ends in order.
    ///
    /// # Errors
    /// What broke.
    pub(super) async fn run(mut self, signals: &mut Signals, places: &mut Places) -> anyhow::Result<()> {
        let broken = tokio::select! {
            signal = signals.wait() => {
                tracing::info!(signal, "stopping: no new prepares");
                None
            }
            _ = &mut self.serving => Some(anyhow::anyhow!("the sockets for the kubelet broke (see the log)")),
            error = places.broken() => Some(error),
        };
        // Without an instance's own names both agents would have one place for the kubelet's sockets.
        let is_awaited = broken.is_none() && self.shared.config.instance.is_some() && self.shared.engine.ledger().is_awaited();
        if is_awaited {
            self.hand_over(places).await
        } else {
            self.end(places).await
        }
        broken.map_or(Ok(()), Err)
    }

    /// The kubelet's calls end first, then what else works.
    async fn end(mut self, places: &mut Places) {
        let in_order = async {
            self.stop.grpc.cancel();
            if !self.serving.is_finished() {
                let _ = (&mut self.serving).await;
            }
            self.registration.abort();
            places.stop().cancel();
            self.end_nri().await;
        };
        if tokio::time::timeout(STOP_LIMIT, in_order).await.is_err() {
            tracing::warn!("an attach or a call still runs; the next start goes on from the ledger");
        }
        self.end_reports().await;
    }

    /// The kubelet's calls end last: until another agent takes them, they wait here.
    async fn hand_over(mut self, places: &mut Places) {
        tracing::info!("another agent waits for this node: handing it over");
        if let Err(error) = self.try_hand_over(places).await {
            tracing::warn!(
                error = format!("{error:#}"),
                "not handed over in order; the other agent goes on when this one is gone"
            );
        }
        self.stop.grpc.cancel();
        let _ = tokio::time::timeout(STOP_LIMIT, self.serving).await;
    }

    async fn try_hand_over(&mut self, places: &mut Places) -> anyhow::Result<()> {
        self.stop.waits.cancel();
        let paused = handover::pause(&self.claims).await;
        places.leave().await;
        self.end_reports().await;
        self.registration.abort();
        // Late: until the other agent is connected, the runtime asks nobody.
        tokio::time::timeout(STOP_LIMIT, self.end_nri()).await.context("an attach still runs")?;
        handover::hand_over(&self.shared, paused?, &self.endpoint).await
    }

    /// The runtime's leg, and every attach and release.
    async fn end_nri(&mut self) {
        self.stop.nri.cancel();
        let nri = self.nri.take();
        let nri = tokio::task::spawn_blocking(move || nri.map(std::thread::JoinHandle::join));
        self.shared.background.close();
        let _ = tokio::join!(self.shared.background.wait(), nri);
    }

    async fn end_reports(&mut self) {
        self.stop.publisher.cancel();
        let _ = tokio::time::timeout(Duration::from_millis(200), &mut self.publisher).await;
        self.reporting.stop().await;
    }
}

/// The NRI leg has a thread and a runtime of its own: every pod of the node waits for its answers, and one thread answers
/// without waking others.
fn start_nri(shared: Arc<Shared>, stop: CancellationToken) -> anyhow::Result<Option<std::thread::JoinHandle<()>>> {
    if !shared.config.nri {
        shared.nri.send_replace(NriState { connected: false, detail: "off (--nri=off)".to_owned() });
        return Ok(None);
    }
    let config = SessionConfig::new(
        shared.config.nri_socket.clone(),
        &shared.config.driver_name,
        &shared.config.nri_index,
        shared.config.nri_margin,
        tokio::runtime::Handle::current(),
    )?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("can't start the NRI leg")?;
    let hooks = Arc::new(hooks::Hooks::new(shared));
    let thread = std::thread::Builder::new()
        .name("dranic-nri".to_owned())
        .spawn(move || runtime.block_on(session::run(config, hooks, stop)))
        .context("can't start the NRI leg's thread")?;
    Ok(Some(thread))
}

/// RDMA devices in pods.
fn keep_usable(shared: &Arc<Shared>, stop: CancellationToken) -> impl Future<Output = ()> + use<> {
    let verbs = verbs::Verbs::new(shared.config.verbs.clone());
    let settings = Arc::new(usable::Settings { timeout: shared.config.rdma_timeout, verbs });
    let (engine, metrics, reports) = (shared.engine.clone(), shared.metrics.clone(), shared.reports.clone());
    let tell = move |told| match told {
        usable::Told::Late(which, why) => {
            tracing::warn!(claim = %which.claim, device = %which.share, why, "an RDMA device in a pod can't be used");
            reports.rdma_not_usable(&engine, &which.claim, &which.share, &why);
        }
        usable::Told::NotUsable(count) => {
            metrics.rdma_not_usable.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    };
    usable::keep(shared.engine.clone(), settings, Arc::new(tell), stop)
}

async fn forward(mut from: watch::Receiver<grpc::Registration>, shared: Arc<Shared>) {
    loop {
        let state = from.borrow_and_update().clone();
        shared.registration.send_replace(state);
        if from.changed().await.is_err() {
            return;
        }
    }
}

/// Speeds of links that are on the host and have a carrier; the others have the last one that was known.
fn note_speeds(scan: &Scan, sysfs: &Sysfs, speeds: &mut BTreeMap<DeviceName, u64>) {
    speeds.retain(|name, _| scan.devices.iter().any(|device| device.name == *name));
    for device in &scan.devices {
        if let Some(speed) = device.link.as_ref().and_then(|link| sysfs.speed(&link.name)) {
            speeds.insert(device.name.clone(), speed);
        }
    }
}

async fn publish(client: kube::Client, shared: Arc<Shared>, stop: CancellationToken) {
    let driver = shared.config.driver_name.clone();
    let (devices, receiver) = watch::channel(Arc::new(Vec::new()));
    let mut scans = shared.inventory.subscribe();
    let config = PublisherConfig { driver: driver.clone(), node_name: shared.config.node_name.clone() };
    let mut speeds = BTreeMap::new();
    let convert = async {
        loop {
            let scan = scans.borrow_and_update().clone();
            let (all, refused) = publisher::devices(&scan, &driver);
            if shared.config.shares.slots > 0 {
                note_speeds(&scan, &Sysfs::new(&shared.config.sysfs), &mut speeds);
            }
            let all = publisher::with_shares(all, &scan, &driver, &shared.config.shares, &speeds);
            for why in refused {
                tracing::warn!(why, "not published");
            }
            shared.metrics.devices.set(i64::try_from(all.len()).unwrap_or(i64::MAX));
            devices.send_replace(Arc::new(all));
            if scans.changed().await.is_err() {
                return;
            }
        }
    };
    // The first list is there before the publisher looks: it must not publish an empty one.
    tokio::pin!(convert);
    tokio::select! {
        biased;
        () = &mut convert => {}
        () = publisher::run(client, config, receiver, shared.published.clone(), stop) => {}
    }
}
