//! A CDI spec for each prepared claim, so that each container that uses the claim says so to the runtime, and by it to us.
//!
//! The kubelet does not ask again for a claim that is prepared. So of a second pod that shares it we would hear nothing but "a pod
//! without claims of ours", and its containers would start without a NIC. The spec gives them an environment variable with the
//! claim's UID, which the runtime shows in `CreateContainer`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::metadata::Metadata;
use crate::attach::Engine;
use crate::gate::{GuardUse, limits, marks};
use crate::ledger::{ClaimRecord, DeviceRecord, Ledger, RdmaRecord, Share};
use crate::names::ClaimUid;
use crate::rdma::char_devices::{CharDevices, Node};

/// Vendor and class of the devices: the same for each driver name, since devices are called by the claim's UID.
const KIND: &str = "dranic.dev/claim";
/// CDI version of the specs: the first that every runtime with DRA reads.
const VERSION: &str = "0.6.0";

/// Where the specs are, and what is in them beside their devices.
#[derive(Debug)]
pub(super) struct Specs {
    folder: PathBuf,
    driver: String,
    guard: Option<GuardUse>,
    /// Whose character devices containers get.
    files: CharDevices,
    /// Controllers that pods' cgroups can have.
    controllers: PathBuf,
    metadata: Option<Arc<Metadata>>,
    /// Who changes the folder: a spec that was found without a claim must not go as one that is just written.
    changing: Mutex<()>,
}

impl Specs {
    pub(super) fn new(folder: &Path, driver: &str, guard: Option<GuardUse>) -> Self {
        let (folder, driver) = (folder.to_owned(), driver.to_owned());
        let this = Self {
            folder,
            driver,
            guard,
            files: CharDevices::new(Path::new("/sys"), Path::new("/dev")),
            controllers: PathBuf::new(),
            metadata: None,
            changing: Mutex::new(()),
        };
        this.with_roots(Path::new("/sys"), Path::new("/dev"))
    }

    /// With sysfs and the host's `/dev` elsewhere.
    pub(super) fn with_roots(mut self, sysfs: &Path, dev: &Path) -> Self {
        self.files = CharDevices::new(sysfs, dev);
        self.controllers = sysfs.join("fs/cgroup/cgroup.controllers");
        self
    }

    /// With files that say what containers got.
    pub(super) fn with_metadata(mut self, metadata: Arc<Metadata>) -> Self {
        self.metadata = Some(metadata);
        self
    }

    /// The CDI device that stands for a device of the claim, for the kubelet's answer. One for each: the kubelet tells the health of
    /// devices apart by it.
    pub(super) fn device(claim: &ClaimUid, share: &Share) -> String {
        format!("{KIND}={}", marks::device(claim, share))
    }

    /// Whether containers can be given what the claim's RDMA devices need.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub(super) fn check(&self, record: &ClaimRecord) -> Result<(), String> {
        for (device, rdma) in record.devices.iter().filter_map(|device| Some((device, device.rdma.as_ref()?))) {
            self.nodes(rdma).map_err(|e| format!("device {}: {e}", device.device))?;
            if rdma.limits.is_some() {
                limits::supported(&self.controllers).map_err(|e| format!("device {}: rdma.limits: {e}", device.device))?;
            }
        }
        Ok(())
    }

    fn nodes(&self, rdma: &RdmaRecord) -> Result<Vec<Node>, String> {
        let companions = rdma.companion_names();
        self.files.nodes(&rdma.files(rdma.name.as_str(), &companions)).map_err(|e| e.to_string())
    }

    /// Writes the claim's spec. The runtime sees either none or all of it.
    ///
    /// # Errors
    /// When the file can't be written; with its path.
    pub(super) fn write(&self, record: &ClaimRecord) -> Result<(), String> {
        let _changing = self.changing();
        self.put(record)
    }

    fn put(&self, record: &ClaimRecord) -> Result<(), String> {
        let uid = &record.claim.uid;
        let file = self.file(uid);
        // Runtimes read files that end in .json only.
        let part = file.with_extension("part");
        let spec = self.spec(record)?.to_string();
        // What says the same is not written: runtimes read the folder anew at each change.
        if std::fs::read(&file).is_ok_and(|there| there == spec.as_bytes()) {
            return Ok(());
        }
        std::fs::create_dir_all(&self.folder)
            .and_then(|()| std::fs::write(&part, spec))
            .and_then(|()| std::fs::rename(&part, &file))
            .map_err(|e| format!("the CDI spec {} can't be written: {e} (--cdi-dir)", file.display()))
    }

    /// The spec. What stands at its top goes into a container once, however many of its devices the container has: the guard.
    fn spec(&self, record: &ClaimRecord) -> Result<Value, String> {
        let uid = &record.claim.uid;
        let devices = record.devices.iter().map(|device| self.device_entry(record, device)).collect::<Result<Vec<_>, _>>()?;
        let mut spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices});
        if let Some(guard) = &self.guard {
            let hook = guard.hook(std::slice::from_ref(uid), None);
            spec["containerEdits"] = json!({"hooks": [{
                "hookName": "createRuntime",
                "path": hook.path,
                "args": hook.args,
                "timeout": hook.timeout.as_secs(),
            }]});
        }
        Ok(spec)
    }

    /// What a container gets that uses this device. Of what several devices bring (`rdma_cm`, a folder) runtimes make one.
    fn device_entry(&self, record: &ClaimRecord, device: &DeviceRecord) -> Result<Value, String> {
        let (uid, share) = (&record.claim.uid, device.share());
        let mut env = vec![format!("{}{uid}={}/{}", marks::CLAIM, record.claim.namespace, record.claim.name)];
        let mut edits = json!({});
        if let Some(rdma) = &device.rdma {
            env.push(marks::rdma(uid, &share, rdma));
            edits["deviceNodes"] = self.nodes(rdma)?.iter().map(device_node).collect();
        }
        edits["env"] = json!(env);
        if let Some(mount) = self.metadata.as_ref().and_then(|metadata| metadata.mount(record, device)) {
            edits["mounts"] = json!([mount]);
        }
        Ok(json!({"name": marks::device(uid, &share), "containerEdits": edits}))
    }

    /// Removes the claim's spec, if there is one.
    ///
    /// # Errors
    /// When it can't be removed; with its path.
    pub(super) fn remove(&self, claim: &ClaimUid) -> Result<(), String> {
        let _changing = self.changing();
        let file = self.file(claim);
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(format!("the CDI spec {} can't be removed: {e}", file.display())),
            _ => Ok(()),
        }
    }

    /// A spec for each record, and none for claims without one. `again`: those that are there are written anew, since they may be of
    /// another version or without guard. Those with character devices are in any case, since these may have changed.
    pub(super) fn renew(&self, ledger: &Ledger, again: bool) {
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(&self.prefix())) else { continue };
            let claim = rest.strip_suffix(".json").and_then(|uid| ClaimUid::new(uid).ok());
            let _changing = self.changing();
            // Looked for with the folder in hand: a claim has its record before it has its spec.
            if claim.is_some_and(|claim| ledger.get(&claim).is_some()) {
                continue;
            }
            match std::fs::remove_file(entry.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    tracing::warn!(path = %entry.path().display(), %error, "an old CDI spec stays");
                }
                _ => {}
            }
        }
        for record in ledger.all() {
            let _changing = self.changing();
            // Unprepare forgets the record first, and removes the spec after it.
            let has_files = record.devices.iter().any(|device| device.rdma.is_some());
            let stays = !again && !has_files && self.file(&record.claim.uid).exists();
            if stays || ledger.get(&record.claim.uid).is_none() {
                continue;
            }
            if let Err(error) = self.put(&record) {
                tracing::error!(claim = %record.claim, %error, "containers of its pod can't be started again");
            }
        }
    }

    /// Writes specs whose character devices are others by now. While one is missing, its spec stays as it is.
    fn follow(&self, ledger: &Ledger) {
        for record in ledger.all().iter().filter(|record| record.devices.iter().any(|device| device.rdma.is_some())) {
            let _changing = self.changing();
            // Before it is prepared, and after, it has none.
            if !self.file(&record.claim.uid).exists() {
                continue;
            }
            if let Err(why) = self.put(record) {
                tracing::debug!(claim = %record.claim, why, "its CDI spec stays as it is");
            }
        }
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prefix(&self) -> String {
        format!("dranic-{}-", self.driver)
    }

    fn file(&self, claim: &ClaimUid) -> PathBuf {
        self.folder.join(format!("{}{claim}.json", self.prefix()))
    }
}

/// With its numbers, a runtime need not look at the node: while an RDMA device goes into the pod's namespace the kernel has none of it,
/// and containers are made meanwhile. Whether they are still right the guard sees before a container starts.
fn device_node(node: &Node) -> Value {
    let (path, (major, minor)) = (node.device.path(), node.device.numbers);
    json!({
        "path": path, "hostPath": path, "type": "c", "major": major, "minor": minor, "permissions": "rw", "fileMode": node.mode,
        "uid": node.uid, "gid": node.gid,
    })
}

/// How soon specs follow records: not with each of the writes that an attach makes.
const SOON: Duration = Duration::from_millis(100);

/// Makes specs and records agree, each `period` until `stop`. Those of RDMA devices follow each change of records: after a move the kernel
/// may have given a device another character device.
pub(super) async fn keep(specs: Arc<Specs>, engine: Arc<Engine>, period: Duration, stop: CancellationToken) {
    let mut writes = engine.ledger().subscribe();
    let mut all = Instant::now() + period;
    loop {
        tokio::select! {
            () = sleep_until(all) => {}
            () = settled(&mut writes) => {}
            () = stop.cancelled() => return,
        }
        let is_all = Instant::now() >= all;
        if is_all {
            all = Instant::now() + period;
        }
        let (specs, engine) = (specs.clone(), engine.clone());
        let agree = move || if is_all { specs.renew(engine.ledger(), false) } else { specs.follow(engine.ledger()) };
        // It fails only when the runtime is shut down.
        let _ = tokio::task::spawn_blocking(agree).await;
    }
}

/// Waits for a write, and for those that soon follow it.
async fn settled(writes: &mut watch::Receiver<u64>) {
    // The ledger is there as long as the agent.
    let _ = writes.changed().await;
    sleep(SOON).await;
    writes.mark_unchanged();
}

#[cfg(test)]
mod tests;
