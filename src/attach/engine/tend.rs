//! Leases while they last: renewed, taken anew, or lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lease::{identity, port, take_down, with_carrier};
use super::{Engine, Observed, PodGuard, locate, look_deadline, now_unix_ms};
use crate::attach::Step;
use crate::attach::plan::dhcp;
use crate::crash;
use crate::dhcp::{Client, DhcpError, Identity, Lease, Moment, Port, State, state};
use crate::ledger::{Attachment, ClaimRecord, DeviceRecord, DhcpRecord, Durability, Phase};
use crate::names::{ClaimUid, DeviceName};
use crate::netdev::{Route, address, link, route};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;

/// How long servers are waited for in one attempt.
const ANSWER: Duration = Duration::from_secs(3);
/// How long an attempt waits for whatever else is under way for the pod.
const LOCK: Duration = Duration::from_secs(2);

/// What became of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tended {
    /// There is a lease, for longer.
    Renewed,
    /// There is none now, or no longer one; and why.
    Failed(String),
    /// Something else is under way with the device.
    Later,
    /// It has no lease that would need anything.
    Nothing,
}

/// What happened to a device's lease, beside being renewed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseNews {
    /// Its address is not used any more, and why.
    Lost(String),
    /// It has the address again that it had lost.
    Back(String),
    /// It has another address.
    Changed(String),
}

/// A lease of this boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLease {
    /// Of which claim.
    pub claim: ClaimUid,
    /// Of which device.
    pub device: DeviceName,
    /// The lease.
    pub lease: Lease,
    /// It must not be used any more.
    pub lost: bool,
}

/// A device and the lease it has, at one moment.
struct Held {
    record: Arc<ClaimRecord>,
    position: usize,
    lease: Lease,
    lost: bool,
}

impl Held {
    fn device(&self) -> &DeviceRecord {
        &self.record.devices[self.position]
    }

    /// Asks for what is due. In the namespace of the calling thread.
    fn ask(&self, port: &Port, deadline: Instant) -> Result<Lease, DhcpError> {
        let identity: Identity = identity(&self.record, self.device());
        let client = Client { port, identity: &identity };
        match state(&self.lease, Moment::now()) {
            _ if self.lost => client.acquire(Some(self.lease.address), deadline),
            State::Ended => client.acquire(Some(self.lease.address), deadline),
            State::Rebinding => client.rebind(&self.lease, deadline),
            // Without an address, as on the host, nobody can be asked alone.
            _ if self.device().attachment.is_none() => client.rebind(&self.lease, deadline),
            State::Bound | State::Renewing => client.renew(&self.lease, deadline),
        }
    }
}

impl Engine {
    /// All leases of this boot.
    #[must_use]
    pub fn leases(&self) -> Vec<HeldLease> {
        let of = |record: &Arc<ClaimRecord>, device: &DeviceRecord| {
            let DhcpRecord { lease, lost } = device.dhcp.as_ref()?;
            let (claim, device) = (record.claim.uid.clone(), device.device.clone());
            Some(HeldLease { claim, device, lease: lease.clone()?, lost: lost.is_some() })
        };
        let records = self.current(self.ledger.all());
        records.iter().flat_map(|record| record.devices.iter().filter_map(|device| of(record, device))).collect()
    }

    /// Makes one attempt to renew a lease, or to get another one where it is lost. A device that is in a pod is asked for from there, with
    /// no lock held; one that is on the host, with the pod's. A lease that is over, or that the server refuses, is told as lost, and
    /// the address is taken out of the pod.
    #[must_use]
    pub fn tend_lease(&self, claim: &ClaimUid, device: &DeviceName) -> Tended {
        let Some(held) = self.held(claim, device) else { return Tended::Nothing };
        match (held.device().phase, &held.device().attachment) {
            (Phase::Attached, Some(attachment)) => self.tend_inside(&held, attachment),
            (Phase::Prepared, _) => self.tend_on_host(&held),
            _ => Tended::Later,
        }
    }

    fn held(&self, claim: &ClaimUid, device: &DeviceName) -> Option<Held> {
        let record = self.ledger.get(claim).filter(|record| record.boot_id == self.boot_id)?;
        let position = record.devices.iter().position(|d| d.device == *device)?;
        let DhcpRecord { lease, lost } = record.devices[position].dhcp.clone()?;
        Some(Held { lease: lease?, lost: lost.is_some(), record, position })
    }

    fn tend_inside(&self, held: &Held, attachment: &Attachment) -> Tended {
        if !held.lost && state(&held.lease, Moment::now()) == State::Ended {
            let why = format!("{} is over: no server renewed it in time", held.lease.address);
            return self.lose(held, &why);
        }
        let Some(netns) = self.open_pod(attachment) else { return Tended::Later };
        let asked = netns.run(|| {
            let port = port_inside(held.device(), attachment)?;
            Ok(held.ask(&port, Instant::now() + ANSWER))
        });
        crash::point("renew: answered");
        match asked.unwrap_or_else(|e| Err(e.to_string())) {
            Ok(Ok(lease)) => self.adopt(held, &lease, Some(&netns)),
            Ok(Err(DhcpError::Nak { why })) if !held.lost => {
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                self.lose(held, &format!("the DHCP server refused to renew {}{why}", held.lease.address))
            }
            Ok(Err(error)) => Tended::Failed(error.to_string()),
            Err(why) => Tended::Failed(why),
        }
    }

    fn tend_on_host(&self, held: &Held) -> Tended {
        let Some((guard, held)) = self.lock_held(held) else { return Tended::Later };
        let limit = Instant::now() + ANSWER;
        let asked = self.on_host(&[held.device()], |device| {
            let asked = with_carrier(device, limit).and_then(|link| Ok(held.ask(&port(&link)?, limit)));
            take_down(device).and(asked)
        });
        let asked = asked.into_iter().next().map_or_else(|| Err("nobody was asked".to_owned()), |(_, asked)| asked);
        match asked {
            Ok(Ok(lease)) => self.adopt_locked(&guard, &held, &lease, None),
            Ok(Err(DhcpError::Nak { .. })) => {
                let why = format!("the DHCP server refused to renew {}", held.lease.address);
                self.lose_locked(&guard, &held, &why)
            }
            Ok(Err(error)) => Tended::Failed(error.to_string()),
            Err(why) => Tended::Failed(why),
        }
    }

    /// The pod's lock, and the device as it is now, unless that is in another place or has another lease by now.
    fn lock_held(&self, held: &Held) -> Option<(PodGuard<'_>, Held)> {
        let guard = self.pods.lock(&held.record.pod.uid, Instant::now() + LOCK)?;
        let now = self.held(&held.record.claim.uid, &held.device().device)?;
        let place = |held: &Held| (held.device().phase, held.device().attachment.clone());
        (place(&now) == place(held) && now.lease == held.lease && now.lost == held.lost).then_some((guard, now))
    }

    fn adopt(&self, held: &Held, lease: &Lease, netns: Option<&Netns>) -> Tended {
        let Some((guard, held)) = self.lock_held(held) else { return Tended::Later };
        self.adopt_locked(&guard, &held, lease, netns)
    }

    /// Puts a new lease in the place of the old one: in the pod, in the plan and in the ledger.
    fn adopt_locked(&self, _guard: &PodGuard<'_>, held: &Held, lease: &Lease, netns: Option<&Netns>) -> Tended {
        let is_other = lease.address != held.lease.address || lease.prefix_len != held.lease.prefix_len;
        let steps = if is_other || held.lost { with_lease(&held.device().plan.steps, &held.lease, lease) } else { Vec::new() };
        if let (Some(netns), Some(attachment)) = (netns, &held.device().attachment)
            && let Err(error) = put_inside(netns, attachment.index, held, lease, &steps)
        {
            return Tended::Failed(format!("{} could not be put into the pod: {error}", lease.address));
        }
        crash::point("renew: in the pod");
        let written = self.change_lease(held, |device| {
            device.dhcp = Some(DhcpRecord { lease: Some(lease.clone()), lost: None });
            if !steps.is_empty() {
                device.plan.steps.clone_from(&steps);
            }
        });
        if is_other {
            let text = format!("{} instead of {}", lease.address, held.lease.address);
            self.tell(held, LeaseNews::Changed(text));
        } else if held.lost {
            self.tell(held, LeaseNews::Back(format!("{} is lent again", lease.address)));
        }
        written.map_or_else(Tended::Failed, |()| Tended::Renewed)
    }

    fn lose(&self, held: &Held, why: &str) -> Tended {
        let Some((guard, held)) = self.lock_held(held) else { return Tended::Later };
        self.lose_locked(&guard, &held, why)
    }

    /// The address must not be used from now on (RFC 2131, sections 4.4.5 and 3.1.5).
    fn lose_locked(&self, _guard: &PodGuard<'_>, held: &Held, why: &str) -> Tended {
        let netns = held.device().attachment.as_ref().and_then(|a| Some((self.open_pod(a)?, a.index)));
        if let Some((netns, index)) = netns
            && let Err(error) = delete_inside(&netns, index, &held.lease)
        {
            tracing::warn!(claim = %held.record.claim, device = %held.device().device, %error, "the address of a lost lease stays");
        }
        let written = self.change_lease(held, |device| {
            device.dhcp = Some(DhcpRecord { lease: Some(held.lease.clone()), lost: Some(why.to_owned()) });
            device.since_unix_ms = now_unix_ms();
        });
        self.tell(held, LeaseNews::Lost(why.to_owned()));
        Tended::Failed(written.err().unwrap_or_else(|| why.to_owned()))
    }

    fn change_lease(&self, held: &Held, change: impl Fn(&mut DeviceRecord)) -> Result<(), String> {
        let name = &held.device().device;
        let written = self.ledger.update(&held.record.claim.uid, Durability::Process, |record| {
            record.devices.iter_mut().filter(|d| d.device == *name).for_each(&change);
        });
        written.map(drop).map_err(|error| format!("the ledger does not know the lease: {error}"))
    }

    fn tell(&self, held: &Held, news: LeaseNews) {
        let device = held.device().share();
        tracing::warn!(claim = %held.record.claim, %device, ?news, "DHCP lease");
        self.observe_claim(&held.record.claim.uid, &Observed::Lease(device, news));
    }
}

/// The client's end of the device's link, in the pod.
fn port_inside(device: &DeviceRecord, attachment: &Attachment) -> Result<Port, String> {
    let links = RouteSocket::open().and_then(|mut socket| link::list(&mut socket, look_deadline())).map_err(|e| e.to_string())?;
    port(locate::in_pod(device, attachment.index, &links).ok_or("it is not in the pod any more")?)
}

/// The routes of `lease` as they belong into a plan of `steps`: in the table of the VRF, where the link is in one. A route of the
/// claim's own to the same destination stays alone.
fn leased_routes(steps: &[Step], lease: &Lease) -> Vec<Step> {
    let vrf = steps.iter().find_map(|step| if let Step::Vrf { table, .. } = step { Some(*table) } else { None });
    let is_configured = |route: &Route| {
        steps.iter().any(|step| match step {
            Step::Route { route: own, configured: true } => (own.destination, own.table) == (route.destination, route.table),
            _ => false,
        })
    };
    let in_table = |route: Route| Route { table: vrf.unwrap_or(route.table), ..route };
    let routes = dhcp::routes(lease).into_iter().map(in_table).filter(|route| !is_configured(route));
    routes.map(|route| Step::Route { route, configured: false }).collect()
}

/// The plan's steps with `new` in place of `old`.
fn with_lease(steps: &[Step], old: &Lease, new: &Lease) -> Vec<Step> {
    let mut routes = leased_routes(steps, new);
    let mut all = Vec::with_capacity(steps.len() + routes.len());
    for step in steps {
        match step {
            Step::Address { address } if address.ip == old.address => {
                all.push(Step::Address {
                    address: dhcp::leased_address(new, Moment { boot_ms: new.obtained_boot_ms, unix_ms: 0 }),
                });
            }
            Step::Route { route, .. } if dhcp::is_leased(route) => {}
            Step::Rule { .. } => {
                all.append(&mut routes);
                all.push(step.clone());
            }
            _ => all.push(step.clone()),
        }
    }
    all.append(&mut routes);
    all
}

/// Adds the address, or gives it its new life time; where `steps` are new, the routes as well.
fn put_inside(netns: &Netns, index: u32, held: &Held, lease: &Lease, steps: &[Step]) -> Result<(), NetlinkError> {
    let mut socket = RouteSocket::open_in(netns)?;
    let now = Moment::now();
    if lease.address != held.lease.address || lease.prefix_len != held.lease.prefix_len {
        // It may have ended by itself.
        drop(socket.request(address::delete_request(index, &dhcp::leased_address(&held.lease, now)), look_deadline()));
    }
    socket.request(address::add_request(index, &dhcp::leased_address(lease, now)), look_deadline())?;
    let routes = steps.iter().filter_map(|step| match step {
        Step::Route { route, .. } => Some(route),
        _ => None,
    });
    // With its last address the link lost all its routes.
    for wanted in routes {
        if let Err(error) = socket.request(route::add_request(index, wanted, true), look_deadline()) {
            tracing::warn!(route = %wanted, %error, "a route is not there again after a new DHCP lease");
        }
    }
    Ok(())
}

fn delete_inside(netns: &Netns, index: u32, lease: &Lease) -> Result<(), NetlinkError> {
    let mut socket = RouteSocket::open_in(netns)?;
    let gone = |error: &NetlinkError| error.errno() == Some(nix::libc::EADDRNOTAVAIL);
    match socket.request(address::delete_request(index, &dhcp::leased_address(lease, Moment::now())), look_deadline()) {
        Err(error) if !gone(&error) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lease(address: &str) -> Lease {
        let route = json!({"destination": "10.70.0.0/16", "gateway": "10.9.0.1"});
        let lease = json!({
            "address": address, "prefixLen": 24, "server": "10.9.0.1", "via": "02:00:00:00:00:01", "leaseSeconds": 200,
            "renewSeconds": 100, "rebindSeconds": 174, "obtainedBootMs": 1000, "obtainedUnixMs": 1, "routes": [route]
        });
        serde_json::from_value(lease).unwrap()
    }

    /// Table and destination of each route, by the plan that prepare made and by the one after another lease.
    fn tables(interface: serde_json::Value) -> [Vec<(u32, String)>; 2] {
        let config = serde_json::from_value(json!({"interface": interface})).unwrap();
        let host = serde_json::from_value(json!({
            "index": 7, "name": "nic0", "mtu": 1500, "address": "02:00:00:00:00:02", "flags": 1, "addresses": [], "routes": [],
            "rules": [], "neighbours": [], "sysctls": {}
        }));
        let (old, new) = (lease("10.9.0.5"), lease("10.9.0.6"));
        let plan = crate::attach::plan::plan_with(&config, &host.unwrap(), Some(&old)).unwrap();
        let after = with_lease(&plan.steps, &old, &new);
        [plan.steps, after].map(|steps| {
            let routes =
                steps.into_iter().filter_map(|step| if let Step::Route { route, .. } = step { Some(route) } else { None });
            routes.map(|route| (route.table, route.destination.to_string())).collect()
        })
    }

    #[test]
    fn another_lease_has_its_routes_where_the_first_had_them() {
        for (interface, table) in
            [(json!({"dhcp": true}), 254), (json!({"dhcp": true, "vrf": {"name": "blue", "table": 1500}}), 1500)]
        {
            let [first, then] = tables(interface);
            assert_eq!(first, [(table, "10.70.0.0/16".to_owned())]);
            assert_eq!(then, first);
        }
    }
}
