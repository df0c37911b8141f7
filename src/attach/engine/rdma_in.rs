//! RDMA devices on their way into a pod: each after its link, on threads beside the links' moves and configuration, since the kernel
//! does not take RTNL for them. Those of one card move one after the other, whichever pods they go to or come from: drivers and
//! programs that use their connection manager have broken when they did not.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use super::attach::{AttachError, AttachTimes, Target, kernel};
use super::jobs::Job;
use super::there::{There, rdma_devices};
use super::{Engine, locate, look_deadline};
use crate::crash;
use crate::inventory::HardwareId;
use crate::ledger::DeviceRecord;
use crate::netlink::NetlinkError;
use crate::rdma::{self, NetnsMode, RdmaSocket};

/// A lock for each card, and one for all RDMA devices that are on none.
#[derive(Debug, Default)]
pub(super) struct Cards(Mutex<HashMap<String, Arc<Mutex<()>>>>);

impl Cards {
    pub(super) fn of(&self, card: &str) -> Arc<Mutex<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(card.to_owned()).or_default().clone()
    }
}

/// One move that is to be made.
struct Order {
    /// Which job.
    job: usize,
    /// Index of the RDMA device, on the host.
    index: u32,
}

/// What became of it.
struct Outcome {
    job: usize,
    time: Duration,
    /// Why it was not made, where that is so.
    failed: Result<(), Failure>,
}

enum Failure {
    /// The kernel refused.
    Kernel(NetlinkError),
    /// It was not tried: the time is over, or the sandbox.
    Stopped(&'static str),
}

/// The threads that move RDMA devices, one for each card.
pub(super) struct Lanes<'scope> {
    orders: HashMap<String, Sender<Order>>,
    threads: Vec<ScopedJoinHandle<'scope, Vec<Outcome>>>,
}

impl Engine {
    /// The card that the device is on: all functions of a PCI device, virtual ones among them. Empty where it is on none.
    pub(super) fn card(&self, device: &DeviceRecord) -> String {
        let HardwareId::Pci { address, .. } = &device.hardware else { return String::new() };
        let function = self.sysfs.virtual_function(address).map_or_else(|| address.clone(), |function| function.pf);
        function.rsplit_once('.').map_or(function.clone(), |(card, _)| card.to_owned())
    }

    /// What each job's RDMA device is on the host now, where it has one: also of those that do not move, the mode must be what it was.
    pub(super) fn find_rdma(&self, jobs: &mut [Job], there: &There) -> Result<(), AttachError> {
        if jobs.iter().all(|job| job.device().rdma.is_none()) {
            return Ok(());
        }
        let read = || -> Result<Option<(NetnsMode, Vec<rdma::Device>)>, NetlinkError> {
            let Some(mut socket) = RdmaSocket::open_in(&self.host)? else { return Ok(None) };
            Ok(Some((socket.netns_mode(look_deadline())?, socket.devices(look_deadline())?)))
        };
        let found = read().map_err(|e| kernel("reading RDMA devices of the host", e))?;
        for job in jobs {
            let Some(record) = &job.device().rdma else { continue };
            let failed = |why: String| job.failed(format!("looking for RDMA device {} on the host", record.name), why);
            let (mode, devices) = found.as_ref().ok_or_else(|| failed("the kernel has no RDMA any more".to_owned()))?;
            if *mode != record.mode {
                let why = format!("the node's RDMA mode was {} when the claim was prepared, and is {mode}", record.mode);
                return Err(failed(why));
            }
            let inside = locate::rdma(record, &there.rdma).map(|device| device.index);
            let outside = locate::rdma(record, devices).map(|device| device.index);
            let gone = || failed("it is not there; was its driver unloaded? See: dranic devices".to_owned());
            let found = inside.or(outside).ok_or_else(gone)?;
            (job.rdma, job.rdma_inside) = (Some(found), inside.is_some());
        }
        Ok(())
    }

    /// A thread for each card of `jobs` whose RDMA devices move.
    pub(super) fn open_lanes<'scope, 'env>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        target: &'env Target<'env>,
        stop: &'env AtomicBool,
        jobs: &[Job],
    ) -> Result<Lanes<'scope>, AttachError> {
        let mut lanes = Lanes { orders: HashMap::new(), threads: Vec::new() };
        for job in jobs.iter().filter(|job| job.moves_rdma()) {
            let card = self.card(job.device());
            if lanes.orders.contains_key(&card) {
                continue;
            }
            let (sender, orders) = channel();
            let lock = self.cards.of(&card);
            let thread = std::thread::Builder::new().name("rdma".to_owned());
            let started = thread.spawn_scoped(scope, move || self.carry_rdma(target, stop, &lock, &orders));
            lanes.threads.push(started.map_err(|e| kernel("starting a thread", NetlinkError::Io(e)))?);
            lanes.orders.insert(card, sender);
        }
        Ok(lanes)
    }

    /// Asks for the move of the RDMA device of the job at `position`, where it moves and is not in the pod; of several that have ports of
    /// one, the last asks.
    pub(super) fn order_rdma(&self, lanes: &Lanes<'_>, jobs: &[Job], position: usize) {
        let job = &jobs[position];
        let Some(index) = job.rdma.filter(|_| job.moves_rdma() && !job.rdma_inside) else { return };
        if jobs[position + 1..].iter().any(|later| later.moves_rdma() && later.rdma == Some(index)) {
            return;
        }
        if let Some(lane) = lanes.orders.get(&self.card(job.device())) {
            // A thread that is gone has panicked: that shows when it is joined.
            let _ = lane.send(Order { job: position, index });
        }
    }

    /// One lane's work.
    fn carry_rdma(&self, target: &Target<'_>, stop: &AtomicBool, card: &Mutex<()>, orders: &Receiver<Order>) -> Vec<Outcome> {
        let mut socket = None;
        let mut outcomes = Vec::new();
        for Order { job, index } in orders {
            let _one_at_a_time = card.lock().unwrap_or_else(PoisonError::into_inner);
            let why = target.why_stop().or_else(|| stop.load(Ordering::Relaxed).then_some("another step failed"));
            let start = Instant::now();
            let failed = match why {
                Some(why) => Err(Failure::Stopped(why)),
                None => self.move_rdma_in(target, &mut socket, index).map_err(Failure::Kernel),
            };
            crash::point("attach: rdma moved");
            outcomes.push(Outcome { job, time: start.elapsed(), failed });
        }
        outcomes
    }

    fn move_rdma_in(&self, target: &Target<'_>, socket: &mut Option<RdmaSocket>, index: u32) -> Result<(), NetlinkError> {
        if socket.is_none() {
            *socket = RdmaSocket::open_in(&self.host)?;
        }
        let no_rdma = || NetlinkError::Kernel { errno: libc::EPROTONOSUPPORT, message: None };
        socket.as_mut().ok_or_else(no_rdma)?.move_to(&self.host, index, target.netns.as_fd(), look_deadline())
    }

    /// Every RDMA device that moved is in the pod, and on the host no more.
    pub(super) fn verify_rdma(&self, target: &Target<'_>, jobs: &[Job]) -> Result<(), AttachError> {
        if !jobs.iter().any(Job::moves_rdma) {
            return Ok(());
        }
        let inside = rdma_devices(target.netns).map_err(|e| kernel("listing the pod's RDMA devices", e))?;
        let outside = rdma_devices(&self.host).map_err(|e| kernel("listing the host's RDMA devices", e))?;
        for job in jobs.iter().filter(|job| job.moves_rdma()) {
            let has = |devices: &[rdma::Device]| devices.iter().any(|device| Some(device.index) == job.rdma);
            let wrong = match (has(&inside), has(&outside)) {
                (true, false) => continue,
                (true, true) => "the host still sees it",
                (false, true) => "it is still on the host",
                (false, false) => "it is neither in the pod nor on the host; its driver may have registered it anew",
            };
            let step = format!("looking for RDMA device {} in the pod after the move", job.rdma_name());
            return Err(job.failed(step, wrong.to_owned()));
        }
        crash::point("attach: rdma verified");
        Ok(())
    }
}

impl Lanes<'_> {
    /// Waits for all moves that were asked for. Adds their times; fails with the first that failed.
    pub(super) fn finish(self, jobs: &[Job], times: &mut AttachTimes) -> Result<(), AttachError> {
        // Threads end when no order can come any more.
        drop(self.orders);
        let mut first = Ok(());
        for thread in self.threads {
            let Ok(outcomes) = thread.join() else {
                return Err(kernel("moving RDMA devices", NetlinkError::Protocol("the thread panicked".to_owned())));
            };
            for Outcome { job, time, failed } in outcomes {
                times.rdma.push((jobs[job].device().share(), time));
                first = first.and(failed.map_err(|failure| refused(jobs, job, failure)));
            }
        }
        first
    }
}

fn refused(jobs: &[Job], position: usize, failure: Failure) -> AttachError {
    let job = &jobs[position];
    let error = match failure {
        Failure::Stopped(why) => {
            return AttachError::Stopped { done: jobs.iter().filter(|job| job.inside).count(), all: jobs.len(), why };
        }
        Failure::Kernel(error) => error,
    };
    let hint = match error.errno() {
        Some(libc::EOPNOTSUPP) => " (its driver can't move it; set rdma.enabled to false, or boot the node in shared mode)",
        Some(libc::EINVAL | libc::ENODEV) => {
            " (it went away just now; was its driver unloaded, or does it go when its link moves?)"
        }
        _ => "",
    };
    job.failed(format!("moving RDMA device {} into the pod", job.rdma_name()), format!("{error}{hint}"))
}
