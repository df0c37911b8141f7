//! Moving links from a sandbox back to the host, or finding that they are there already.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::{Engine, KernelError, Pace, Released, kept, locate, look_deadline, vrf};
use crate::attach::Step;
use crate::attach::plan::Undo;
use crate::crash;
use crate::ledger::DeviceRecord;
use crate::netdev::{Link, Route, Rule, bpf, child, link, moves, route, rule};
use crate::netlink::RouteSocket;
use crate::netns::Netns;

/// Where the moves of a release stand among those that wait for their turn: as long as an attach may take behind the gate, so that of
/// the two who came first is done first.
const BACK: Duration = Duration::from_secs(60);

/// The kernel returns the hardware of a namespace that ended some time later, when it cleans up: it is waited for so long.
pub(super) const COMES_BACK: Duration = Duration::from_secs(3);
/// How often it is looked for.
pub(super) const POLL: Duration = Duration::from_millis(50);
/// Why hardware whose link is somewhere is on neither side.
const OUT_OF_SIGHT: &str = "it is neither on the host nor in a network namespace that can be found: a process, an open file or a mount \
     of somebody keeps the pod's namespace alive (lsns -t net); the kernel returns it when that ends";

impl Engine {
    pub(super) fn move_back(&self, netns: &Netns, devices: &[&DeviceRecord], stay: &[Leftover], pace: Pace) -> Vec<Released> {
        match self.both_sides(netns) {
            Ok((mut pod, inside, outside)) => {
                drop_programs(netns, devices, &inside);
                delete_leftovers(&mut pod, devices, stay);
                crash::point("release: rules deleted");
                let mut home = Home::new(&outside);
                let urgency = (pace, Instant::now() + BACK);
                let outcomes =
                    devices.iter().map(|device| self.move_one_back(&mut pod, device, &inside, &mut home, urgency)).collect();
                vrf::delete_empty(&mut pod, devices);
                crash::point("release: VRFs deleted");
                outcomes
            }
            Err(error) => devices.iter().map(|d| Released::Stuck(d.share(), error.to_string())).collect(),
        }
    }

    fn both_sides(&self, netns: &Netns) -> Result<(RouteSocket, Vec<Link>, Vec<Link>), KernelError> {
        let mut pod = RouteSocket::open_in(netns)?;
        let inside = link::list(&mut pod, look_deadline())?;
        let outside = link::list(&mut self.host_socket()?, look_deadline())?;
        Ok((pod, inside, outside))
    }

    fn move_one_back(
        &self,
        pod: &mut RouteSocket,
        device: &DeviceRecord,
        inside: &[Link],
        home: &mut Home<'_>,
        (pace, deadline): (Pace, Instant),
    ) -> Released {
        let index = device.attachment.as_ref().map_or(0, |a| a.index);
        let Some(found) = locate::in_pod(device, index, inside) else {
            return self.at_home_or_gone(device, home.links);
        };
        if device.child().is_some() {
            return delete(pod, device, found.index);
        }
        remove_alt_names(pod, device, found);
        crash::point("release: altnames removed");
        let name = home.name_for(device);
        // The kernel would refuse the whole move for an altname that another link has by now; the restore says who has it.
        for taken in found.alt_names.iter().filter(|alt| home.names.contains(*alt)) {
            let removed = pod.request(link::alt_name_request(found.index, taken, false), look_deadline());
            tracing::warn!(device = %device.device, altname = %taken, ?removed, "the altname is in use on the host");
        }
        let back = moves::Move {
            index: found.index,
            target: self.host.as_fd(),
            new_index: home.index_for(device),
            name,
            mtu: (found.mtu != device.host.mtu).then_some(device.host.mtu),
            address: if found.address == device.host.address { None } else { device.host.address.clone() },
        };
        let turn = self.turns.take(pace, deadline);
        let result = moves::send(pod, std::slice::from_ref(&back), look_deadline()).pop();
        crash::point("release: moved");
        drop(turn);
        let Some(Err(error)) = result else { return Released::Moved(device.share()) };
        // Not atomic: it may be back all the same; what the message could not set, the restore will.
        match link::by_index(pod, found.index, look_deadline()) {
            Ok(None) => {
                tracing::warn!(device = %device.device, %error, "the link came back, but not with everything set");
                Released::Moved(device.share())
            }
            _ => Released::Stuck(device.share(), error.to_string()),
        }
    }

    /// Devices whose namespace is gone. The kernel returns hardware some time later, when it cleans up.
    pub(super) fn look_at_home(&self, devices: &[&DeviceRecord]) -> Vec<Released> {
        let give_up = Instant::now() + COMES_BACK;
        loop {
            let links = match self.host_socket().and_then(|mut s| Ok(link::list(&mut s, look_deadline())?)) {
                Ok(links) => links,
                Err(error) => return devices.iter().map(|d| Released::Stuck(d.share(), error.to_string())).collect(),
            };
            let outcomes: Vec<_> = devices.iter().map(|device| self.at_home_or_gone(device, &links)).collect();
            if Instant::now() >= give_up || !outcomes.iter().any(|outcome| matches!(outcome, Released::Stuck(..))) {
                return outcomes;
            }
            std::thread::sleep(POLL);
        }
    }

    fn at_home_or_gone(&self, device: &DeviceRecord, links: &[Link]) -> Released {
        match locate::find(device, device.host.index, links) {
            // What was made on top of it is not there any more, and that is all there is to give back.
            _ if device.child().is_some() => Released::Deleted(device.share()),
            Some(_) => Released::AtHome(device.share()),
            None if self.has_interface(device) => Released::Stuck(device.share(), OUT_OF_SIGHT.to_owned()),
            None => Released::Gone(device.share()),
        }
    }
}

/// Deletes what was made on top of a device.
fn delete(pod: &mut RouteSocket, device: &DeviceRecord, index: u32) -> Released {
    let deleted = pod.request(child::delete_request(index), look_deadline());
    crash::point("release: deleted");
    match deleted {
        Err(error) if error.errno() != Some(nix::libc::ENODEV) => Released::Stuck(device.share(), error.to_string()),
        _ => Released::Deleted(device.share()),
    }
}

/// Names and indices on the host while links come back to it.
struct Home<'a> {
    links: &'a [Link],
    indices: BTreeSet<u32>,
    names: BTreeSet<String>,
}

impl<'a> Home<'a> {
    fn new(links: &'a [Link]) -> Self {
        let names = links.iter().flat_map(|l| std::iter::once(&l.name).chain(&l.alt_names)).cloned().collect();
        Self { links, indices: links.iter().map(|l| l.index).collect(), names }
    }

    fn index_for(&mut self, device: &DeviceRecord) -> u32 {
        let index = moves::pick_index(&self.indices, device.host.index);
        self.indices.insert(index);
        index
    }

    /// The host's name for it, or, when another link has that, one that no link has: the restore says so and tries again.
    fn name_for(&mut self, device: &DeviceRecord) -> String {
        let own = device.host.name.clone();
        let name = if self.names.contains(&own) { free_name(&self.names) } else { own };
        self.names.insert(name.clone());
        name
    }
}

/// The first of `dranic0`, `dranic1`, … that is not among `names`.
pub(super) fn free_name(names: &BTreeSet<String>) -> String {
    let mut n = 0;
    loop {
        let name = format!("dranic{n}");
        if !names.contains(&name) {
            return name;
        }
        n += 1;
    }
}

/// What would stay in a pod when a device leaves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Leftover {
    Rule(Rule),
    Route(Route),
}

/// What `device` brought that would stay, the last first.
pub(super) fn leftovers_of(device: &DeviceRecord) -> Vec<Leftover> {
    let undo = device.plan.steps.iter().rev().map(Step::undo);
    undo.filter_map(|undo| match undo {
        Undo::DeleteRule { rule } => Some(Leftover::Rule(rule)),
        Undo::DeleteRoute { route } => Some(Leftover::Route(route)),
        _ => None,
    })
    .collect()
}

/// Takes away those of the link's altnames that it got for the pod.
pub(super) fn remove_alt_names(socket: &mut RouteSocket, device: &DeviceRecord, link: &Link) {
    let undo = device.plan.steps.iter().map(Step::undo);
    let ours = undo.filter_map(|undo| match undo {
        Undo::RemoveAltName { name } => Some(name),
        _ => None,
    });
    let there = ours.filter(|name| link.alt_names.contains(name) && !device.host.alt_names.contains(name));
    let requests = there.map(|name| link::alt_name_request(link.index, &name, false)).collect();
    // One that stays is told of when the host state is restored.
    drop(socket.pipeline(requests, look_deadline()));
}

/// eBPF that the pod attached to its links would go with them: it is taken off. What the host has there stays.
fn drop_programs(netns: &Netns, devices: &[&DeviceRecord], inside: &[Link]) {
    let work = || {
        let mut pod = RouteSocket::open()?;
        for device in devices {
            let index = device.attachment.as_ref().map_or(0, |attachment| attachment.index);
            let Some(link) = locate::find(device, index, inside) else { continue };
            let known = if kept::takes_off(device) { &[][..] } else { &device.host.programs.attached };
            for (program, result) in bpf::take_off_others(&mut pod, link, known, look_deadline()) {
                match result {
                    Ok(()) => tracing::info!(device = %device.device, %program, "the pod attached it; it is taken off"),
                    Err(error) => {
                        tracing::warn!(device = %device.device, %program, %error, "the pod attached it, and it stays on the link")
                    }
                }
            }
        }
        Ok::<_, KernelError>(())
    };
    if let Err(error) = netns.run(work).map_err(KernelError::from).and_then(|result| result) {
        tracing::warn!(%error, "eBPF that the pod may have attached could not be looked for");
    }
}

fn delete_leftovers(pod: &mut RouteSocket, devices: &[&DeviceRecord], stay: &[Leftover]) {
    let all = devices.iter().flat_map(|device| leftovers_of(device)).filter(|leftover| !stay.contains(leftover));
    let request = |leftover| match leftover {
        Leftover::Rule(rule) => rule::delete_request(&rule),
        Leftover::Route(route) => route::delete_request(0, &route),
    };
    // One that is not there (the attach did not get so far) is what is wanted.
    drop(pod.pipeline(all.map(request).collect(), look_deadline()));
}
