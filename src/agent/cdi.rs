//! A CDI spec for each prepared claim, so that each container that uses the claim says so to the runtime, and by it to us.
//!
//! The kubelet does not ask again for a claim that is prepared. So of a second pod that shares it we would hear nothing but "a pod
//! without claims of ours", and its containers would start without a NIC. The spec gives them an environment variable with the
//! claim's UID, which the runtime shows in `CreateContainer`.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::ledger::{ClaimRecord, ClaimRef};
use crate::names::{ClaimUid, DeviceName};

/// Vendor and class of the devices: the same for each driver name, since devices are called by the claim's UID.
const KIND: &str = "dranic.dev/claim";
/// CDI version of the specs: the first that every runtime with DRA reads.
const VERSION: &str = "0.6.0";
/// Begin of the variable's name; the claim's UID follows, since a container can have several claims.
pub(crate) const VARIABLE: &str = "DRANIC_CLAIM_";

/// Where the specs are.
#[derive(Debug, Clone)]
pub(super) struct Specs {
    folder: PathBuf,
    driver: String,
}

impl Specs {
    pub(super) fn new(folder: &Path, driver: &str) -> Self {
        Self { folder: folder.to_owned(), driver: driver.to_owned() }
    }

    /// The CDI device that stands for a device of the claim, for the kubelet's answer. One for each: the kubelet tells the health of
    /// devices apart by it.
    pub(super) fn device(claim: &ClaimUid, device: &DeviceName) -> String {
        format!("{KIND}={claim}-{device}")
    }

    /// Writes the claim's spec. The runtime sees either none or all of it.
    ///
    /// # Errors
    /// When the file can't be written; with its path.
    pub(super) fn write<'a>(&self, claim: &ClaimRef, devices: impl Iterator<Item = &'a DeviceName>) -> Result<(), String> {
        let uid = &claim.uid;
        let variable = format!("{VARIABLE}{uid}={}/{}", claim.namespace, claim.name);
        let devices: Vec<_> =
            devices.map(|device| json!({"name": format!("{uid}-{device}"), "containerEdits": {"env": [variable]}})).collect();
        let spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices});
        let file = self.file(uid);
        // Runtimes read files that end in .json only.
        let part = file.with_extension("part");
        std::fs::create_dir_all(&self.folder)
            .and_then(|()| std::fs::write(&part, spec.to_string()))
            .and_then(|()| std::fs::rename(&part, &file))
            .map_err(|e| format!("the CDI spec {} can't be written: {e} (--cdi-dir)", file.display()))
    }

    /// Removes the claim's spec, if there is one.
    ///
    /// # Errors
    /// When it can't be removed; with its path.
    pub(super) fn remove(&self, claim: &ClaimUid) -> Result<(), String> {
        let file = self.file(claim);
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(format!("the CDI spec {} can't be removed: {e}", file.display())),
            _ => Ok(()),
        }
    }

    /// At start: a spec for each record, and none for claims without one.
    pub(super) fn renew(&self, records: &[std::sync::Arc<ClaimRecord>]) {
        let wanted: Vec<PathBuf> = records.iter().map(|record| self.file(&record.claim.uid)).collect();
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(&self.prefix()));
            if ours
                && !wanted.contains(&path)
                && let Err(error) = std::fs::remove_file(&path)
            {
                tracing::warn!(path = %path.display(), %error, "an old CDI spec stays");
            }
        }
        for record in records {
            if let Err(error) = self.write(&record.claim, record.devices.iter().map(|d| &d.device)) {
                tracing::error!(claim = %record.claim, %error, "containers of its pod can't be started again");
            }
        }
    }

    fn prefix(&self) -> String {
        format!("dranic-{}-", self.driver)
    }

    fn file(&self, claim: &ClaimUid) -> PathBuf {
        self.folder.join(format!("{}{claim}.json", self.prefix()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uid: &str) -> ClaimRef {
        ClaimRef { namespace: "shop".to_owned(), name: "rail".to_owned(), uid: ClaimUid::new(uid).unwrap() }
    }

    fn write(specs: &Specs, uid: &str) -> Result<(), String> {
        specs.write(&claim(uid), [DeviceName::new("nic-a").unwrap(), DeviceName::new("nic-b").unwrap()].iter())
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_spec_names_its_claim_and_goes_again() {
        let folder = tempfile::tempdir().unwrap();
        let specs = Specs::new(&folder.path().join("cdi"), "dra.net");
        write(&specs, "u-1").unwrap();
        write(&specs, "u-1").unwrap();
        let written = folder.path().join("cdi");
        assert_eq!(names(&written), ["dranic-dra.net-u-1.json"]);
        let spec: serde_json::Value =
            serde_json::from_slice(&std::fs::read(written.join("dranic-dra.net-u-1.json")).unwrap()).unwrap();
        for (index, device) in ["nic-a", "nic-b"].into_iter().enumerate() {
            let entry = &spec["devices"][index];
            assert_eq!(entry["containerEdits"]["env"][0], "DRANIC_CLAIM_u-1=shop/rail");
            let name = format!("{}={}", spec["kind"].as_str().unwrap(), entry["name"].as_str().unwrap());
            assert_eq!(name, Specs::device(&claim("u-1").uid, &DeviceName::new(device).unwrap()));
        }
        specs.remove(&claim("u-1").uid).unwrap();
        specs.remove(&claim("u-1").uid).unwrap();
        assert!(names(&written).is_empty());
    }

    #[test]
    fn at_start_old_specs_go_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("other.json"), "{}").unwrap();
        let specs = Specs::new(folder.path(), "dra.net");
        write(&specs, "old").unwrap();
        write(&Specs::new(folder.path(), "dranic.dev"), "theirs").unwrap();
        specs.renew(&[]);
        assert_eq!(names(folder.path()), ["dranic-dranic.dev-theirs.json", "other.json"]);
    }

    #[test]
    fn a_folder_that_can_not_be_made_is_named() {
        let error = write(&Specs::new(Path::new("/dev/null/cdi"), "dra.net"), "u-1").unwrap_err();
        assert!(error.contains("/dev/null/cdi/dranic-dra.net-u-1.json") && error.contains("--cdi-dir"), "{error}");
    }
}
