//! A node with our sockets on it, and a handler that does what the claim's name says.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dranic::dra::grpc::{Registration, Serving, SocketConfig, serve};
use dranic::dra::health::Reports;
use dranic::dra::{ClaimError, ClaimHandler, PreparedDevice};
use dranic::ledger::ClaimRef;
use dranic::names::DeviceName;
use dranic_testbed::kubelet::{Claim, KubeletDouble};
use tempfile::TempDir;
use tokio::sync::{Barrier, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};

pub(crate) const DRIVER: &str = "dranic.test";
/// Longer than anything here takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);
/// How many claims named `barrier-*` wait for each other.
pub(crate) const BARRIER: usize = 16;

pub(crate) fn claim(name: &str) -> Claim {
    Claim { namespace: "ns".into(), uid: format!("uid-{name}"), name: name.into() }
}

pub(crate) struct Script {
    log: Mutex<Vec<String>>,
    barrier: Barrier,
    /// Claims named `held*` wait for a permit.
    pub(crate) release: Semaphore,
}

impl Default for Script {
    fn default() -> Self {
        Self { log: Mutex::default(), barrier: Barrier::new(BARRIER), release: Semaphore::new(0) }
    }
}

impl Script {
    pub(crate) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    pub(crate) async fn wait_log(&self, len: usize) {
        let reached = async {
            while self.log().len() < len {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LIMIT, reached).await.expect("the handler was called");
    }

    async fn act(&self, verb: &str, claim: &ClaimRef) -> Result<(), ClaimError> {
        self.log.lock().unwrap().push(format!("{verb} {claim}"));
        match claim.name.split('-').next().unwrap() {
            "fails" => return Err(ClaimError(format!("claim {}/{}: as scripted", claim.namespace, claim.name))),
            "panics" => panic!("scripted panic"),
            "barrier" => _ = self.barrier.wait().await,
            "held" => self.release.acquire().await.unwrap().forget(),
            _ => {}
        }
        Ok(())
    }
}

impl ClaimHandler for Script {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        self.act("prepare", &claim).await?;
        Ok(vec![PreparedDevice {
            request_names: vec!["nic/fast".into()],
            pool: "node-1".into(),
            device: DeviceName::new(format!("dev-{}", claim.name)).unwrap(),
            cdi_device_ids: vec![format!("dranic.dev/claim={}", claim.uid)],
            share_id: Some("share-1".into()),
        }])
    }

    async fn unprepare(&self, claim: ClaimRef) -> Result<(), ClaimError> {
        self.act("unprepare", &claim).await
    }
}

pub(crate) struct Node {
    root: TempDir,
    pub(crate) handler: Arc<Script>,
    pub(crate) serving: Serving,
    pub(crate) stop: CancellationToken,
    /// Stops when the test ends, also when it fails.
    _guard: DropGuard,
}

impl Node {
    pub(crate) async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let handler = Arc::<Script>::default();
        let stop = CancellationToken::new();
        let serving = serve(config(root.path()), handler.clone(), no_health(), stop.clone()).await.unwrap();
        Self { root, handler, serving, _guard: stop.clone().drop_guard(), stop }
    }

    pub(crate) fn root(&self) -> &Path {
        self.root.path()
    }

    pub(crate) async fn wait_registered(&self) {
        let mut registered = self.serving.registered.clone();
        let done = registered.wait_for(|state| *state == Registration::Registered);
        tokio::time::timeout(LIMIT, done).await.unwrap().unwrap();
    }
}

/// Nobody looks at devices.
pub(crate) fn no_health() -> Reports {
    tokio::sync::watch::channel(None).1
}

pub(crate) fn config(root: &Path) -> SocketConfig {
    SocketConfig { kubelet_root: root.to_owned(), driver: DRIVER.into(), instance: None }
}

pub(crate) async fn registered() -> (Node, KubeletDouble) {
    let node = Node::start().await;
    let kubelet = KubeletDouble::start(node.root()).unwrap();
    kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
    (node, kubelet)
}
