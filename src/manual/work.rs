//! Attaching and giving back, with a ledger of one's own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Preview, find};
use crate::attach::engine::{self, DeviceSource, Observation, Observed};
use crate::attach::{AttachTimes, Engine, plan};
use crate::config::NetworkConfig;
use crate::dra::resolve::{ResolvedClaim, ResolvedDevice};
use crate::inventory::{Device, Scan};
use crate::ledger::{ClaimRecord, ClaimRef, Ledger, PodRef, peek};
use crate::names::{ClaimUid, DeviceName, PodUid, SandboxId};
use crate::netdev::HostState;
use crate::netdev::host_state::Snapshot;
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// How long an attach may take; nobody waits for it but the person who asked.
const ATTACH: Duration = Duration::from_secs(60);
/// How long a look at the host may take.
const LOOK: Duration = Duration::from_secs(10);
/// Namespace of the claims that are made up, for people.
const NAMESPACE: &str = "by-hand";
/// Longest text that stands for a pod's name.
const POD_NAME_MAX: usize = 253;

/// Why something could not be done; each text says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ManualError(String);

impl ManualError {
    fn new(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

/// A device that was given back.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Returned {
    /// Which device.
    pub device: DeviceName,
    /// Its name on the host.
    pub host_link: String,
    /// What is not on the host as it was, and why.
    pub not_restored: Vec<String>,
}

/// Devices of this machine, in the hands of a person.
#[derive(Debug)]
pub struct Manual {
    engine: Engine,
    failed: Arc<Mutex<Vec<String>>>,
}

/// What one look at the host found: nothing comes or goes while a command runs, or the engine says so.
struct Found(Arc<Scan>);

impl DeviceSource for Found {
    fn current(&self) -> Arc<Scan> {
        self.0.clone()
    }

    fn rescan(&self) -> Arc<Scan> {
        self.0.clone()
    }
}

impl Preview {
    /// What `config` would do to `device` in the network namespace at `netns`. Nothing is changed.
    ///
    /// # Errors
    /// When the host can't be read, or the device can't be what the configuration asks for.
    pub fn take(device: &Device, config: &NetworkConfig, netns: &Path) -> Result<Self, ManualError> {
        let host = Netns::current().map_err(ManualError::new)?;
        let (state, mut plan) = match (&device.rdma, device.is_rdma_only) {
            (Some(rdma), true) => {
                let plan = plan::rdma::without_link(config, &rdma.name).map_err(ManualError)?;
                (HostState::without_link(rdma.name.as_str()), plan)
            }
            _ => {
                let state = state_of_link(&host, device)?;
                let plan = plan::plan(config, &state).map_err(ManualError::new)?;
                (state, plan)
            }
        };
        engine::preview_rdma(&host, device, config, &mut plan).map_err(ManualError)?;
        let up = device.link.as_ref().is_some_and(crate::netdev::Link::is_up);
        Ok(Self::of_plan(&device.name, plan, &state, up, &netns.display().to_string()))
    }
}

fn state_of_link(host: &Netns, device: &Device) -> Result<HostState, ManualError> {
    let index = device.link.as_ref().map_or(0, |link| link.index);
    let snapshot = RouteSocket::open_in(host).and_then(|mut socket| Snapshot::take(&mut socket, Instant::now() + LOOK));
    let snapshot = snapshot.map_err(|e| ManualError(format!("can't read the host's links, addresses and routes: {e}")))?;
    let state = host.run(|| snapshot.host_state(index)).map_err(ManualError::new)?;
    state.ok_or_else(|| ManualError(format!("{} went away just now", device.name)))
}

/// Why a device must be left alone: the agent, whose ledger is in `folder`, has it. Reads only.
///
/// # Errors
/// The claim that has it; or why that can't be told.
pub fn free_of_agent(folder: &Path, device: &Device, boot_id: &str) -> Result<(), ManualError> {
    let records = peek::all(folder).map_err(ManualError)?;
    let holds = |record: &&ClaimRecord| record.boot_id == boot_id && record.devices.iter().any(|d| d.device == device.name);
    match records.iter().find(holds) {
        Some(record) => Err(ManualError(format!(
            "the agent has device {} for claim {}/{} of pod {}; delete that pod first",
            device.name, record.claim.namespace, record.claim.name, record.pod.name
        ))),
        None => Ok(()),
    }
}

impl Manual {
    /// Opens the ledger in `folder`, and finds out what of it is still true. `scan` is what the host has now.
    ///
    /// # Errors
    /// When the folder can't be used, or another command is at work with it.
    pub fn open(folder: &Path, boot_id: String, scan: Scan) -> Result<Self, ManualError> {
        let (ledger, bad) = Ledger::open(folder).map_err(ManualError::new)?;
        if let Some(bad) = bad.first() {
            return Err(ManualError(format!("{} can't be used: {}; move it away", bad.path.display(), bad.reason)));
        }
        let host = Netns::current().map_err(ManualError::new)?;
        let failed: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = failed.clone();
        let observer = move |seen: Observation| {
            if let Observed::Restored(_, reasons) = seen.what {
                let lines = reasons.into_iter().map(|(what, why)| format!("{what}: {why}"));
                heard.lock().unwrap_or_else(PoisonError::into_inner).extend(lines);
            }
        };
        let engine =
            Engine::new(Arc::new(ledger), host, boot_id, Arc::new(Found(Arc::new(scan)))).with_observer(Arc::new(observer));
        engine.recover();
        Ok(Self { engine, failed })
    }

    /// What is attached, or was when the machine was last up.
    #[must_use]
    pub fn records(&self) -> Vec<Arc<ClaimRecord>> {
        self.engine.records()
    }

    /// Puts `device` into the network namespace at `netns`, or takes everything back.
    ///
    /// # Errors
    /// Why not; nothing has changed then.
    pub fn attach(&self, device: &Device, config: NetworkConfig, netns: &Path) -> Result<AttachTimes, ManualError> {
        let claim = claim(&device.name, config)?;
        self.clear(&claim.claim)?;
        let (pod, sandbox) = pod(netns)?;
        self.engine.prepare(&claim, &pod).map_err(|error| ManualError::new(error.reason))?;
        self.engine.attach(&pod.uid, &sandbox, netns, Instant::now() + ATTACH).map_err(|error| {
            let back = self.engine.unprepare(&claim.claim);
            ManualError(match back {
                Ok(()) => format!("{error}; the host is as it was"),
                Err(why) => format!("{error}; giving it back failed too: {why}. Try: dranic release --device {}", device.name),
            })
        })
    }

    /// Ends what a command before this one left behind; what is attached stays.
    fn clear(&self, claim: &ClaimRef) -> Result<(), ManualError> {
        let Some(record) = self.engine.ledger().get(&claim.uid) else { return Ok(()) };
        let this_boot = record.boot_id == self.engine.boot_id();
        let attached = record.devices.iter().find_map(|d| d.attachment.as_ref()).filter(|_| this_boot);
        match attached {
            Some(attachment) => Err(ManualError(format!(
                "device {} is attached to {} already; first: dranic release --device {}",
                claim.name,
                attachment.netns_path.display(),
                claim.name
            ))),
            None => self.engine.unprepare(&record.claim).map_err(ManualError),
        }
    }

    /// Gives back the device called `name` (as it is published, or as its link is called on the host or in the namespace).
    ///
    /// # Errors
    /// When there is none, or it could not be taken back.
    pub fn release(&self, name: &str) -> Result<Vec<Returned>, ManualError> {
        let records = self.records();
        let record = find::attached(records.iter().map(AsRef::as_ref), name).map_err(ManualError)?;
        self.release_record(record)
    }

    /// Gives back one claim's devices.
    ///
    /// # Errors
    /// When one could not be taken back.
    pub fn release_record(&self, record: &ClaimRecord) -> Result<Vec<Returned>, ManualError> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.engine.unprepare(&record.claim).map_err(ManualError)?;
        let not_restored = std::mem::take(&mut *self.failed.lock().unwrap_or_else(PoisonError::into_inner));
        let returned = |d: &crate::ledger::DeviceRecord| Returned {
            device: d.device.clone(),
            host_link: d.host.name.clone(),
            not_restored: not_restored.clone(),
        };
        Ok(record.devices.iter().map(returned).collect())
    }
}

/// The claim that stands for a device.
fn claim(device: &DeviceName, config: NetworkConfig) -> Result<ResolvedClaim, ManualError> {
    let uid = ClaimUid::new(format!("{NAMESPACE}-{device}")).map_err(ManualError::new)?;
    let wanted = ResolvedDevice {
        request: "device".to_owned(),
        pool: NAMESPACE.to_owned(),
        device: device.clone(),
        config,
        share_id: None,
        admin_access: false,
    };
    let claim = ClaimRef { namespace: NAMESPACE.to_owned(), name: device.to_string(), uid };
    Ok(ResolvedClaim { claim, pod: None, devices: vec![wanted] })
}

/// The pod and the sandbox that stand for a network namespace.
fn pod(netns: &Path) -> Result<(PodRef, SandboxId), ManualError> {
    let id = Netns::open(netns).map_err(ManualError::new)?.id();
    let text = format!("netns-{}-{}", id.dev, id.ino);
    let name = netns.display().to_string().chars().take(POD_NAME_MAX).collect();
    let uid = PodUid::new(text.clone()).map_err(ManualError::new)?;
    Ok((PodRef { name, uid }, SandboxId::new(text).map_err(ManualError::new)?))
}

/// Checks that a namespace is one, and is not the host's; gives its absolute path.
///
/// # Errors
/// What is wrong with it.
pub fn netns(path: &Path) -> Result<PathBuf, ManualError> {
    let opened =
        Netns::open(path).map_err(|e| ManualError(format!("{e}; make one with: ip netns add NAME, and give /run/netns/NAME")))?;
    let host = Netns::current().map_err(ManualError::new)?;
    if opened.id() == host.id() {
        return Err(ManualError(format!("{} is the network namespace that the device is in already", path.display())));
    }
    std::path::absolute(path).map_err(ManualError::new)
}
