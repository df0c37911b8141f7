//! Leases of devices that are on the host: got in prepare, given back in unprepare.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::prepare::kernel;
use super::refusal::PrepareReason;
use super::{Engine, KernelError, jobs, look_deadline, micros_since};
use crate::attach::{Step, plan};
use crate::crash;
use crate::dhcp::{Client, Identity, Lease, Moment, Port, State, state};
use crate::dra::resolve::ResolvedClaim;
use crate::inventory::HardwareId;
use crate::ledger::{ClaimRecord, DeviceRecord, Durability, StepTime};
use crate::names::{ClaimUid, DeviceName};
use crate::netdev::{Link, link};
use crate::netlink::RouteSocket;

/// How long a server is waited for where nobody said otherwise. The kubelet gives 45 s for the whole of a prepare.
pub(super) const DHCP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a link may take to get a carrier before a lease is given back by it. It is best effort: the lease ends by itself.
const CARRIER_FOR_RELEASE: Duration = Duration::from_secs(3);
/// How often a carrier is looked for.
const POLL: Duration = Duration::from_millis(20);
/// `IFF_RUNNING`, `linux/if.h`: the link is up and has a carrier.
const IFF_RUNNING: u32 = 0x40;

/// Of several devices of a claim.
type Got = Vec<(DeviceName, Result<(Lease, u64), String>)>;

impl Engine {
    /// Waits so long for a DHCP server in prepare.
    #[must_use]
    pub fn with_dhcp_timeout(mut self, timeout: Duration) -> Self {
        self.dhcp_timeout = timeout;
        self
    }

    /// Gets leases for the devices that lack one, all at once, and plans these anew. What was got is recorded even where another
    /// device gets none: then the caller gives it back.
    pub(super) fn get_leases(&self, record: Arc<ClaimRecord>, claim: &ResolvedClaim) -> Result<Arc<ClaimRecord>, PrepareReason> {
        if !record.devices.iter().any(DeviceRecord::lacks_lease) {
            return Ok(record);
        }
        let mut failed = None;
        let mut next = ClaimRecord::clone(&record);
        for (name, got) in self.ask_servers(&record) {
            let Some(device) = next.devices.iter_mut().find(|d| d.device == name) else { continue };
            let taken = got.map_err(|why| no_lease(device, why)).and_then(|got| take(device, claim, got));
            failed = failed.or(taken.err());
        }
        let record = self.ledger.put(next, Durability::Disk).map_err(|e| kernel("writing the ledger", KernelError::from(e)))?;
        crash::point("prepare: leased");
        failed.map_or(Ok(record), Err)
    }

    fn ask_servers(&self, record: &ClaimRecord) -> Got {
        let limit = self.dhcp_timeout;
        let lacking: Vec<&DeviceRecord> = record.devices.iter().filter(|d| d.lacks_lease()).collect();
        self.on_host(&lacking, |device| {
            let start = Instant::now();
            crash::point("prepare: asking");
            let lease = acquire(device, &identity(record, device), start + limit);
            lease.map(|lease| (lease, micros_since(start))).map_err(|why| format!("{why} (in {} s)", limit.as_secs()))
        })
    }

    /// Gives back the leases of devices that are on the host. Best effort: what can't be given back ends by itself.
    pub(super) fn release_leases(&self, record: &Arc<ClaimRecord>) {
        let held = |d: &&DeviceRecord| d.dhcp.as_ref().is_some_and(|dhcp| dhcp.lease.is_some() && dhcp.lost.is_none());
        let holding: Vec<&DeviceRecord> = record.devices.iter().filter(|d| d.attachment.is_none()).filter(held).collect();
        if holding.is_empty() {
            return;
        }
        for (device, result) in self.on_host(&holding, |device| release(device, &identity(record, device))) {
            match result {
                Ok(()) => tracing::info!(claim = %record.claim, %device, "the DHCP lease is given back"),
                Err(why) => {
                    tracing::warn!(claim = %record.claim, %device, why, "the DHCP lease is not given back; it ends by itself")
                }
            }
        }
        // Whoever prepares the claim again must ask anew.
        let forget = |record: &mut ClaimRecord| {
            for dhcp in record.devices.iter_mut().filter_map(|d| d.dhcp.as_mut()) {
                dhcp.lease = None;
            }
        };
        if let Err(error) = self.ledger.update(&record.claim.uid, Durability::Process, forget) {
            tracing::warn!(claim = %record.claim, %error, "the ledger does not know that leases are given back");
        }
        crash::point("unprepare: leases given back");
    }

    /// Does `work` for each device on a thread of its own in the host's namespace.
    pub(super) fn on_host<T: Send>(
        &self,
        devices: &[&DeviceRecord],
        work: impl Fn(&DeviceRecord) -> Result<T, String> + Sync,
    ) -> Vec<(DeviceName, Result<T, String>)> {
        let work = &work;
        let all = self.host.run(|| {
            std::thread::scope(|scope| {
                let threads: Vec<_> = devices.iter().map(|device| scope.spawn(move || work(device))).collect();
                threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("it ended badly".to_owned()))).collect::<Vec<_>>()
            })
        });
        let results = all.unwrap_or_else(|error| devices.iter().map(|_| Err(error.to_string())).collect());
        devices.iter().map(|d| d.device.clone()).zip(results).collect()
    }
}

/// Who asks for the device's lease: the same for the same claim and device, whoever runs where.
pub(super) fn identity(record: &ClaimRecord, device: &DeviceRecord) -> Identity {
    Identity { client_id: client_id(&record.claim.uid, &device.device), host_name: record.pod.name.clone() }
}

/// Type 0 (RFC 2132: none of hardware), and 16 bytes of a hash of the claim's UID and the device's name.
fn client_id(claim: &ClaimUid, device: &DeviceName) -> Vec<u8> {
    let hash = Sha256::new().chain_update(claim.as_str()).chain_update([0]).chain_update(device.as_str()).finalize();
    std::iter::once(0).chain(hash.into_iter().take(16)).collect()
}

/// Why the device's address can't be put into a pod now; none when it can, or comes from elsewhere.
pub(super) fn no_address(device: &DeviceRecord, now: Moment) -> Option<String> {
    let dhcp = device.dhcp.as_ref()?;
    match (&dhcp.lease, &dhcp.lost) {
        (None, _) => Some("it has no DHCP lease yet: it is not prepared".to_owned()),
        (_, Some(why)) => Some(format!("it has no DHCP lease any more: {why}")),
        (Some(lease), None) if state(lease, now) == State::Ended => Some(format!("its DHCP lease of {} is over", lease.address)),
        (Some(_), None) => None,
    }
}

fn take(device: &mut DeviceRecord, claim: &ResolvedClaim, (lease, micros): (Lease, u64)) -> Result<(), PrepareReason> {
    let wanted = claim.devices.iter().find(|wanted| wanted.device == device.device);
    let dhcp = device.dhcp.get_or_insert_default();
    let lease = dhcp.lease.insert(lease);
    device.times.retain(|t| t.step != "lease");
    device.times.push(StepTime { step: "lease".to_owned(), micros });
    if let Some(wanted) = wanted {
        let mut plan = plan::plan_with(&wanted.config, &device.host, Some(lease)).map_err(|source| PrepareReason::Plan {
            request: device.request.clone(),
            device: device.device.clone(),
            source,
        })?;
        // What was set of a virtual function is done, and has to be undone.
        let set = device.plan.steps.iter().filter(|step| matches!(step, Step::Vf { .. })).cloned();
        plan.steps.splice(0..0, set);
        if let Some(rdma) = &device.rdma {
            plan::rdma::add_step(&mut plan, rdma);
        }
        device.plan = plan;
    }
    device.host.ethtool = std::mem::take(&mut device.host.ethtool).without_fixed();
    Ok(())
}

fn no_lease(device: &DeviceRecord, why: String) -> PrepareReason {
    PrepareReason::NoLease { device: device.device.clone(), name: device.host.name.clone(), why }
}

fn acquire(device: &DeviceRecord, identity: &Identity, deadline: Instant) -> Result<Lease, String> {
    let link = with_carrier(device, deadline)?;
    let port = port(&link)?;
    Client { port: &port, identity }.acquire(None, deadline).map_err(|e| e.to_string())
}

fn release(device: &DeviceRecord, identity: &Identity) -> Result<(), String> {
    let Some(lease) = device.lease() else { return Ok(()) };
    let result = with_carrier(device, Instant::now() + CARRIER_FOR_RELEASE).and_then(|link| {
        let port = port(&link)?;
        Client { port: &port, identity }.release(lease).map_err(|e| e.to_string())
    });
    // As prepare left it: what follows brings it up if it was.
    take_down(device).and(result)
}

/// The client's end of a link.
pub(super) fn port(link: &Link) -> Result<Port, String> {
    Port::of(link).ok_or_else(|| "DHCP works by Ethernet links only; configure interface.addresses".to_owned())
}

/// Sets the device's link up on the host and waits for its carrier.
pub(super) fn with_carrier(device: &DeviceRecord, deadline: Instant) -> Result<Link, String> {
    let mut socket = RouteSocket::open().map_err(|e| e.to_string())?;
    let mut link = loop {
        match jobs::on_host(&mut socket, device).map_err(|e| e.to_string())? {
            Some(link) => break link,
            // Hardware comes back some time after its namespace ended; a link without any does not.
            None if !matches!(device.hardware, HardwareId::Virtual { .. }) && Instant::now() < deadline => {
                std::thread::sleep(POLL)
            }
            None => return Err("its link is not on the host".to_owned()),
        }
    };
    if !link.is_up() {
        link::set_up(&mut socket, link.index, true, look_deadline()).map_err(|e| format!("setting the link up: {e}"))?;
    }
    while link.flags & IFF_RUNNING == 0 {
        if Instant::now() >= deadline {
            return Err("the link has no carrier: is it plugged in, and the port of the switch up?".to_owned());
        }
        std::thread::sleep(POLL);
        let again = link::by_index(&mut socket, link.index, look_deadline()).map_err(|e| e.to_string())?;
        link = again.ok_or("its link went away just now")?;
    }
    Ok(link)
}

/// Takes the device's link down on the host.
pub(super) fn take_down(device: &DeviceRecord) -> Result<(), String> {
    let down = |socket: &mut RouteSocket| match jobs::on_host(socket, device)?.filter(Link::is_up) {
        Some(link) => link::set_up(socket, link.index, false, look_deadline()),
        None => Ok(()),
    };
    RouteSocket::open().and_then(|mut socket| down(&mut socket)).map_err(|e| format!("taking the link down again: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_id_is_of_its_claim_and_device() {
        let id = |claim: &str, device: &str| client_id(&ClaimUid::new(claim).unwrap(), &DeviceName::new(device).unwrap());
        assert_eq!(id("uid-1", "nic-a"), id("uid-1", "nic-a"));
        assert_eq!((id("uid-1", "nic-a").len(), id("uid-1", "nic-a")[0]), (17, 0));
        assert_ne!(id("uid-1", "nic-a"), id("uid-1", "nic-b"));
        assert_ne!(id("uid-1", "nic-a"), id("uid-2", "nic-a"));
    }
}
