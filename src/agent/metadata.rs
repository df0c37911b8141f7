//! A file for the containers of each request that says what they got: the device metadata of KEP-5304, as Kubernetes' own helper for
//! drivers writes it (`k8s.io/dynamic-resource-allocation`, `kubeletplugin`). So jobs need not guess names of links and RDMA devices, and
//! which GID index is which address.
//!
//! The folder of the file is mounted, not the file: so what is renamed into place shows in containers that run.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::attach::Step;
use crate::gate::told;
use crate::inventory::Attribute;
use crate::ledger::{ClaimRecord, DeviceRecord, Ledger, Phase, RdmaRecord};
use crate::names::{ClaimUid, DeviceName};

/// Folder in containers (`ContainerDir`, `k8s.io/dynamic-resource-allocation/api/metadata`).
const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes";
/// Versions, the newest first: a file is a stream of one object for each, and readers take the first that they know.
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];
/// Most attributes of a device (`maxProperties` in that API).
const ATTRIBUTES_MAX: usize = 32;
/// Most addresses: `NetworkDeviceDataMaxIPs`, `k8s.io/api/resource/v1`.
const IPS_MAX: usize = 16;
/// Most GIDs that are told, so that the device's own attributes have room.
const GIDS_MAX: usize = 8;

/// Where the files are, on the host and for the agent.
#[derive(Debug)]
pub(super) struct Metadata {
    folder: PathBuf,
    driver: String,
    /// Generations of the records that were written. Who changes the folder has it.
    written: Mutex<HashMap<ClaimUid, u64>>,
}

impl Metadata {
    pub(super) fn new(state_dir: &Path, driver: &str) -> Self {
        Self { folder: told::folder(state_dir), driver: driver.to_owned(), written: Mutex::default() }
    }

    /// The mount for a container that uses the device, for its CDI spec; none where names are no names of files.
    pub(super) fn mount(&self, record: &ClaimRecord, device: &DeviceRecord) -> Option<Value> {
        let request = request_folder(device)?;
        let (kind, claim) = match &record.pod_claim_name {
            Some(name) => ("resourceclaimtemplates", name),
            None => ("resourceclaims", &record.claim.name),
        };
        let is_name = !claim.is_empty() && !claim.starts_with('.') && !claim.contains(['/', '\0']);
        is_name.then(|| {
            json!({
                "hostPath": self.folder.join(record.claim.uid.as_str()).join(request),
                "containerPath": format!("{IN_CONTAINER}/{kind}/{claim}/{request}"),
                "options": ["ro", "nosuid", "nodev", "noexec", "bind"],
            })
        })
    }

    /// Writes the files of the claim.
    ///
    /// # Errors
    /// When one can't be written; with its path.
    pub(super) fn write(&self, record: &ClaimRecord) -> Result<(), String> {
        let mut written = self.written();
        self.put(record)?;
        written.insert(record.claim.uid.clone(), record.generation);
        Ok(())
    }

    fn put(&self, record: &ClaimRecord) -> Result<(), String> {
        for (request, devices) in by_request(record) {
            let folder = self.folder.join(record.claim.uid.as_str()).join(request);
            let file = folder.join(format!("{}-metadata.json", self.driver));
            let part = folder.join(".part");
            std::fs::create_dir_all(&folder)
                .and_then(|()| std::fs::write(&part, stream(record, &self.driver, &devices)))
                .and_then(|()| std::fs::rename(&part, &file))
                .map_err(|e| format!("the metadata {} can't be written: {e} (--state-dir)", file.display()))?;
        }
        let file = told::file(&self.folder, &record.claim.uid);
        // Last, and for guards: so much of the record is told. One that reads half of a number waits a moment longer.
        let told = std::fs::create_dir_all(self.folder.join(record.claim.uid.as_str()))
            .and_then(|()| std::fs::write(&file, record.generation.to_string()));
        told.map_err(|e| format!("{} can't be written: {e} (--state-dir)", file.display()))
    }

    /// Removes the claim's files, if there are any.
    ///
    /// # Errors
    /// When they can't be removed; with the path.
    pub(super) fn remove(&self, claim: &ClaimUid) -> Result<(), String> {
        let mut written = self.written();
        written.remove(claim);
        remove(&self.folder.join(claim.as_str()))?;
        // Where it was the last one: only an empty folder goes.
        let _ = std::fs::remove_dir(&self.folder);
        Ok(())
    }

    /// Files that say what the records say, and none of claims without a record.
    fn renew(&self, ledger: &Ledger) {
        for record in ledger.all() {
            let mut written = self.written();
            let uid = &record.claim.uid;
            // Unprepare forgets the record first, and removes the files after it.
            if written.get(uid) == Some(&record.generation) || ledger.get(uid).is_none() {
                continue;
            }
            match self.put(&record) {
                Ok(()) => drop(written.insert(uid.clone(), record.generation)),
                Err(error) => tracing::warn!(claim = %record.claim, %error, "containers read old metadata"),
            }
        }
    }

    /// Removes what is of claims without a record.
    fn tidy(&self, ledger: &Ledger) {
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let _written = self.written();
            let name = entry.file_name();
            let claim = name.to_str().and_then(|name| ClaimUid::new(name).ok());
            if claim.is_none_or(|claim| ledger.get(&claim).is_none())
                && let Err(error) = remove(&entry.path())
            {
                tracing::warn!(error, "old metadata stays");
            }
        }
    }

    fn written(&self) -> MutexGuard<'_, HashMap<ClaimUid, u64>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(format!("the metadata {} can't be removed: {e}", folder.display())),
        _ => Ok(()),
    }
}

/// Makes files and records agree at each change of a record, until `stop`.
pub(super) async fn keep(metadata: Arc<Metadata>, shared: Arc<Shared>, stop: CancellationToken) {
    let mut writes = shared.engine.ledger().subscribe();
    let mut is_first = true;
    loop {
        writes.mark_unchanged();
        let (metadata, engine) = (metadata.clone(), shared.engine.clone());
        let tidy = std::mem::take(&mut is_first);
        let work = move || {
            if tidy {
                metadata.tidy(engine.ledger());
            }
            metadata.renew(engine.ledger());
        };
        // It fails only when the runtime is shut down.
        let _ = tokio::task::spawn_blocking(work).await;
        tokio::select! {
            () = stop.cancelled() => return,
            changed = writes.changed() => if changed.is_err() { return },
        }
    }
}

/// The devices by the request that containers name: subrequests of one request share its folder.
fn by_request(record: &ClaimRecord) -> BTreeMap<&str, Vec<&DeviceRecord>> {
    let mut requests: BTreeMap<&str, Vec<&DeviceRecord>> = BTreeMap::new();
    for device in &record.devices {
        if let Some(request) = request_folder(device) {
            requests.entry(request).or_default().push(device);
        }
    }
    requests
}

/// The request without its subrequest: a DNS label, so a name of a folder.
fn request_folder(device: &DeviceRecord) -> Option<&str> {
    device.request.split('/').next().filter(|request| DeviceName::new(*request).is_ok())
}

/// The file's text.
fn stream(record: &ClaimRecord, driver: &str, devices: &[&DeviceRecord]) -> String {
    let entries: Vec<Value> = devices.iter().map(|device| entry(driver, device)).collect();
    let request = devices.first().map_or("", |device| device.request.as_str());
    let mut object = json!({
        "kind": "DeviceMetadata",
        "metadata": {
            "name": record.claim.name, "namespace": record.claim.namespace, "uid": record.claim.uid, "generation": record.generation,
        },
        "requests": [{"name": request, "devices": entries}],
    });
    if let Some(name) = &record.pod_claim_name {
        object["podClaimName"] = json!(name);
    }
    let version = |version: &str| {
        let mut object = object.clone();
        object["apiVersion"] = json!(format!("metadata.resource.k8s.io/{version}"));
        format!("{object:#}\n")
    };
    VERSIONS.into_iter().map(version).collect()
}

fn entry(driver: &str, device: &DeviceRecord) -> Value {
    let mut entry = json!({"driver": driver, "pool": device.pool, "name": device.device, "attributes": attributes(device)});
    if device.phase == Phase::Attached && device.has_link() {
        entry["networkData"] = network(device);
    }
    entry
}

/// Those of RDMA first: there may be no room for all.
fn attributes(device: &DeviceRecord) -> Map<String, Value> {
    let mut all: Map<String, Value> = device.rdma.as_ref().map(rdma).unwrap_or_default();
    for (name, value) in &device.attributes {
        if all.len() >= ATTRIBUTES_MAX {
            break;
        }
        if !all.contains_key(name) {
            all.insert(name.clone(), attribute(value));
        }
    }
    all
}

fn attribute(value: &Attribute) -> Value {
    match value {
        Attribute::Bool(value) => json!({"bool": value}),
        Attribute::Int(value) => json!({"int": value}),
        Attribute::String(value) => json!({"string": value}),
    }
}

/// `rdmaDevice` and `rdmaPort` for `NCCL_IB_HCA`; `rdmaGidIndex`, of the first address, for `NCCL_IB_GID_INDEX`; `rdmaGid3: 10.0.0.5` for
/// each address.
fn rdma(rdma: &RdmaRecord) -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, value: Attribute| all.insert(name.to_owned(), attribute(&value));
    add("rdma", Attribute::Bool(true));
    add("rdmaDevice", Attribute::String(rdma.name.to_string()));
    add("rdmaPort", Attribute::Int(rdma.port.into()));
    add("rdmaProtocol", Attribute::String(rdma.protocol.to_string()));
    add("rdmaUsable", Attribute::Bool(rdma.usable.is_some()));
    let gids = rdma.usable.iter().flat_map(|usable| &usable.gids).filter(|gid| gid.kind == "RoCE v2");
    for (place, gid) in gids.take(GIDS_MAX).enumerate() {
        if place == 0 {
            add("rdmaGidIndex", Attribute::Int(gid.index.into()));
        }
        add(&format!("rdmaGid{}", gid.index), Attribute::String(gid.address().to_string()));
    }
    all
}

/// The link as it was planned, which attach has verified.
fn network(device: &DeviceRecord) -> Value {
    let steps = &device.plan.steps;
    let planned = steps.iter().filter_map(|step| match step {
        Step::Address { address } => Some(format!("{}/{}", address.ip, address.prefix_len)),
        _ => None,
    });
    let lease = device.lease().map(|lease| format!("{}/{}", lease.address, lease.prefix_len));
    let ips: Vec<String> = planned.chain(lease).take(IPS_MAX).collect();
    let own = steps.iter().find_map(|step| match step {
        Step::Move { address, .. } | Step::Create { address, .. } => address.clone(),
        _ => None,
    });
    let mut network = json!({"interfaceName": device.plan.pod_link, "ips": ips});
    // An address that the kernel chooses for a link on top of the device is not planned.
    let host = device.host.address.clone().filter(|_| device.child().is_none());
    if let Some(address) = own.or(host) {
        network["hardwareAddress"] = json!(address);
    }
    network
}

#[cfg(test)]
mod tests;
