//! The thin look at what [`super::check`] compares: records, and links in the container's namespace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::check::{self, Seen, Verdict};
use super::oci::{self, State};
use super::{container, limits, marks, told};
use crate::attach::AttachError;
use crate::doubles;
use crate::ledger::{ClaimRecord, RdmaRecord, peek};
use crate::names::{ClaimUid, PodUid};
use crate::netdev::{address, link};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;
use crate::rdma::char_devices::CharDevices;
use crate::rdma::{self, RdmaSocket};

/// How long a look at the kernel may take. Generous: RTNL may be held by others for seconds.
const LIMIT: Duration = Duration::from_secs(10);

/// A container's namespace, and where the records are.
#[derive(Debug)]
pub struct Scene {
    netns: Netns,
    /// Made at the first look that needs it.
    socket: Option<RouteSocket>,
    boot_id: String,
    state_dir: PathBuf,
    /// The container's first process.
    pid: u32,
    /// Folder of its `config.json`.
    bundle: Option<PathBuf>,
    /// UIDs of the pod's claims at the last look.
    known: BTreeSet<String>,
    /// Generations of the container's claims then.
    generations: Vec<(ClaimUid, u64)>,
}

impl Scene {
    /// The namespace of the container's first process.
    ///
    /// # Errors
    /// When it can't be opened, or is the host's; for people.
    pub fn open(state: &State, state_dir: &Path) -> Result<Self, String> {
        let path = proc_path(state);
        let netns = Netns::open(&path).map_err(|e| e.to_string())?;
        let is_same = |other: Netns| other.id() == netns.id();
        // The container can be in a namespace of its own only if it is not the one that hooks run in, which is the host's.
        let host = Netns::open(Path::new("/proc/1/ns/net")).is_ok_and(is_same);
        if host || is_same(Netns::current().map_err(|e| e.to_string())?) {
            return Err(AttachError::HostNetwork.to_string());
        }
        let boot_id = doubles::boot_id().map_err(|e| format!("the boot id can't be read: {e}"))?;
        let (pid, bundle, state_dir) = (state.pid, state.bundle.clone(), state_dir.to_owned());
        Ok(Self { netns, socket: None, boot_id, state_dir, pid, bundle, known: BTreeSet::new(), generations: Vec::new() })
    }

    /// The container's namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Whether a change of the claim's record matters.
    #[must_use]
    pub fn knows(&self, claim: &str) -> bool {
        self.known.is_empty() || self.known.contains(claim)
    }

    /// A path of the namespace that leads there for others, too: the one that the runtime gave the container, if it does.
    #[must_use]
    pub fn lasting_path(&self, state: &State) -> PathBuf {
        let given = state.bundle.as_ref().and_then(|bundle| oci::netns_path(&bounded(&bundle.join("config.json"))?));
        let leads = |path: &PathBuf| Netns::open(path).is_ok_and(|netns| netns.id() == self.netns.id());
        given.filter(leads).unwrap_or_else(|| proc_path(state))
    }

    /// Waits a moment for what is told the container of what was seen at the last look.
    pub fn wait_until_told(&self) {
        told::wait(&self.state_dir, &self.generations);
    }

    /// Compares the records of the pod with the kernel.
    ///
    /// # Errors
    /// When one of them can't be read; that may get better.
    pub fn look(&mut self, pod: &PodUid, claims: &[ClaimUid]) -> Result<Verdict, String> {
        let mut records = peek::of_pod(&self.state_dir, pod)?;
        for claim in claims {
            if records.iter().any(|record| record.claim.uid == *claim) {
                continue;
            }
            let record = peek::of_claim(&self.state_dir, claim)?;
            if let Err(why) = check::admit(claim, record.as_ref(), pod) {
                return Ok(Verdict::Refused(why));
            }
            records.extend(record);
        }
        self.known = records.iter().map(|record| record.claim.uid.to_string()).collect();
        let own = records.iter().filter(|record| claims.contains(&record.claim.uid));
        self.generations = own.map(|record| (record.claim.uid.clone(), record.generation)).collect();
        let (links, addresses) = self.inside().map_err(|e| format!("the pod's links can't be listed: {e}"))?;
        let rdma = self.rdma(&records).map_err(|e| format!("the pod's RDMA devices can't be listed: {e}"))?;
        let (netns, boot_id) = (self.netns.id(), self.boot_id.as_str());
        let verdict = check::check(&records, &Seen { netns, boot_id, links: &links, addresses: &addresses, rdma: &rdma });
        if !matches!(verdict, Verdict::Complete | Verdict::Altered(_)) {
            return Ok(verdict);
        }
        Ok(self.refused(&records, claims, &rdma)?.map_or(verdict, Verdict::Refused))
    }

    /// The RDMA devices that the container's namespace sees, where that matters.
    fn rdma(&self, records: &[ClaimRecord]) -> Result<Vec<rdma::Device>, NetlinkError> {
        if !records.iter().flat_map(|record| &record.devices).any(|device| device.rdma.is_some()) {
            return Ok(Vec::new());
        }
        let socket = RdmaSocket::open_in(&self.netns)?;
        socket.map_or_else(|| Ok(Vec::new()), |mut socket| socket.devices(Instant::now() + LIMIT))
    }

    /// Why the container can't use the RDMA devices of the claims that it brings, and won't however long one waits: what it is given
    /// is settled when it is made.
    fn refused(&self, records: &[ClaimRecord], claims: &[ClaimUid], seen: &[rdma::Device]) -> Result<Option<String>, String> {
        let own = || records.iter().filter(|record| claims.contains(&record.claim.uid));
        if !own().flat_map(|record| &record.devices).any(|device| device.rdma.is_some()) {
            return Ok(None);
        }
        let config = self.bundle.as_ref().and_then(|bundle| bounded(&bundle.join("config.json")));
        let given = container::parse(&config.ok_or("its config.json can't be read")?);
        let given = given.map_err(|e| format!("its config.json can't be used: {e}"))?;
        let files = CharDevices::new(Path::new("/sys"), Path::new("/dev"));
        let mut wanted = Vec::new();
        for (record, rdma) in own().flat_map(|record| uses(record, &given.env)) {
            let now = rdma.find(seen).ok_or_else(|| format!("RDMA device {} is not there (any more)", rdma.name))?;
            let companions = rdma.companion_names();
            let needed = files.listed(&rdma.files(&now.name, &companions)).map_err(|e| e.to_string())?;
            if let Some(lack) = needed.iter().find_map(|file| given.lacks(file)) {
                return Ok(Some(format!("claim {}/{}: {lack}", record.claim.namespace, record.claim.name)));
            }
            wanted.extend(rdma.limits.as_ref().map(|limits| (now.name.as_str(), limits)));
        }
        Ok(limits::apply(self.pid, &limits::lines(wanted)).err())
    }

    fn inside(&mut self) -> Result<Inside, NetlinkError> {
        let deadline = Instant::now() + LIMIT;
        let mut socket = match self.socket.take() {
            Some(socket) => socket,
            None => RouteSocket::open_in(&self.netns)?,
        };
        let seen = (link::list(&mut socket, deadline)?, address::list(&mut socket, deadline)?);
        // One that failed is not used again.
        self.socket = Some(socket);
        Ok(seen)
    }
}

/// The RDMA devices of the claim that a container with these variables uses.
fn uses<'a>(record: &'a ClaimRecord, env: &'a [String]) -> impl Iterator<Item = (&'a ClaimRecord, &'a RdmaRecord)> {
    let used = record.devices.iter().filter(|device| marks::has_rdma(env, &record.claim.uid, &device.share()));
    used.filter_map(move |device| Some((record, device.rdma.as_ref()?)))
}

/// What is in the namespace: its links, and addresses by index of their link.
type Inside = (Vec<link::Link>, Vec<(u32, address::Address)>);

fn proc_path(state: &State) -> PathBuf {
    PathBuf::from(format!("/proc/{}/ns/net", state.pid))
}

/// A file's content; none when it can't be read or is too large.
fn bounded(path: &Path) -> Option<Vec<u8>> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(oci::CONFIG_MAX as u64 + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() <= oci::CONFIG_MAX).then_some(bytes)
}
