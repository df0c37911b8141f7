//! Virtual functions: what their physical function sets for them, in prepare and when they are given back.

use std::sync::{MutexGuard, PoisonError};

use super::{Engine, KernelError, PrepareReason, jobs, look_deadline};
use crate::attach::Step;
use crate::attach::plan::{Plan, vf as plan_vf};
use crate::config::NetworkConfig;
use crate::crash;
use crate::inventory::HardwareId;
use crate::inventory::hardware::is_representor;
use crate::inventory::sysfs::VirtualFunction;
use crate::ledger::{ClaimRecord, DeviceRecord};
use crate::netdev::vf::{self, VfSetting, VfSettings};
use crate::netdev::{HostState, Link, link};
use crate::netlink::{NetlinkError, RouteSocket};

/// `ARPHRD_INFINIBAND`, `linux/if_arp.h`.
const INFINIBAND: u16 = 32;

impl Engine {
    /// Checks a virtual function against its physical one, and puts what is to be set of it in front of its plan. `links` are the
    /// host's.
    ///
    /// # Errors
    /// Why it can't be what the configuration asks for, with the path of the field.
    pub(super) fn plan_vf(
        &self,
        config: &NetworkConfig,
        hardware: &HardwareId,
        host: &HostState,
        links: &[Link],
        plan: &mut Plan,
    ) -> Result<(), String> {
        let function = match hardware {
            HardwareId::Pci { address, .. } => self.sysfs.virtual_function(address),
            _ => None,
        };
        let Some(function) = function else {
            return config.vf.as_ref().map_or(Ok(()), |_| Err("vf: the device is no virtual function; remove vf".to_owned()));
        };
        let pf = pf_link(&function.pf, links);
        if let Ok(pf) = pf {
            check_mtu(pod_mtu(plan, host), pf)?;
        }
        let Some(config) = &config.vf else { return Ok(()) };
        let pf = pf?;
        let now = self.read_vf(pf, function.index)?;
        let (wanted, before) = plan_vf::wanted(config, &now).map_err(|name| {
            if name.ends_with("Guid") && pf.arphrd != INFINIBAND {
                return format!(
                    "vf.{name}: {} is no InfiniBand link, and its virtual functions have no GUID; remove it",
                    pf.name
                );
            }
            format!("vf.{name}: the driver of {} does not tell what it is, so it could not be given back", pf.name)
        })?;
        if wanted != VfSettings::default() {
            let VirtualFunction { pf, index } = function;
            plan.steps.insert(0, Step::Vf { pf, index, wanted, before });
        }
        Ok(())
    }

    fn read_vf(&self, pf: &Link, index: u32) -> Result<VfSettings, String> {
        let read = self.host_socket().and_then(|mut socket| Ok(vf::read(&mut socket, pf.index, index, look_deadline())?));
        let read = read.map_err(|error| format!("vf: reading the virtual functions of {}: {error}", pf.name))?;
        read.ok_or_else(|| format!("vf: {} does not tell of its virtual function {index}", pf.name))
    }

    /// Sets what the plans say of virtual functions that are on the host, and reads it back.
    ///
    /// # Errors
    /// Names the setting that the driver refused.
    pub(super) fn set_vfs(&self, record: &ClaimRecord) -> Result<(), PrepareReason> {
        for device in record.devices.iter().filter(|device| device.attachment.is_none()) {
            let Some((of, wanted, _)) = step_of(device) else { continue };
            let set = self.set_vf(&of, wanted).map_err(|why| PrepareReason::Vf {
                request: device.request.clone(),
                device: device.device.clone(),
                why,
            })?;
            crash::point("prepare: vf set");
            self.take_over_address(device, &set);
        }
        Ok(())
    }

    /// Gives what was set.
    fn set_vf(&self, of: &VirtualFunction, wanted: &VfSettings) -> Result<Vec<VfSetting>, String> {
        let _one_at_a_time = self.vfs();
        let (mut socket, pf, now) = self.look_at_vf(of)?;
        let missing = plan_vf::missing(wanted, &now);
        if missing.is_empty() {
            return Ok(missing);
        }
        let set = socket.request(vf::set_request(pf.index, of.index, &missing), look_deadline());
        let after = self.read_vf(&pf, of.index)?;
        // The kernel stops at the first that is refused, so that is the first which is not as it should be.
        match (plan_vf::missing(wanted, &after).first(), set) {
            (None, _) => Ok(missing),
            (Some(refused), Err(error)) => Err(refusal(&pf, refused, &error)),
            (Some(other), Ok(())) => {
                let is = after.like(other).map_or_else(|| "not told".to_owned(), |is| is.to_string());
                Err(format!("vf.{}: {} took {other}, but it is {is} afterwards", other.name(), pf.name))
            }
        }
    }

    /// Gives virtual functions back what they were, where nobody else changed it. What could not be, and why.
    pub(super) fn restore_vf(&self, record: &ClaimRecord, device: &DeviceRecord) -> Option<(String, String)> {
        let (of, wanted, before) = step_of(device)?;
        let _one_at_a_time = self.vfs();
        let restored = self.look_at_vf(&of).and_then(|(mut socket, pf, now)| {
            let (set, respected) = plan_vf::back(wanted, before, &now);
            for what in respected {
                tracing::info!(claim = %record.claim, device = %device.device, what, "changed by somebody else, left as it is");
            }
            if set.is_empty() {
                return Ok(());
            }
            let done = socket.request(vf::set_request(pf.index, of.index, &set), look_deadline());
            crash::point("unprepare: vf restored");
            self.take_over_address(device, &set);
            done.map_err(|error| error.to_string())
        });
        restored.err().map(|why| ("vf".to_owned(), why))
    }

    /// Where an address was `set`, has the function's own driver take it: it asks for it when its link goes down. One that is up is left
    /// alone; prepare takes it down soon. What fails here shows when the link gets its address.
    fn take_over_address(&self, device: &DeviceRecord, set: &[VfSetting]) {
        let Some(mac) = set.iter().find_map(|setting| if let VfSetting::Mac(mac) = setting { Some(mac) } else { None }) else {
            return;
        };
        let result = self.host_socket().and_then(|mut socket| {
            let found = jobs::on_host(&mut socket, device)?.filter(|link| !link.is_up() && link.address.as_ref() != Some(mac));
            let Some(link) = found else { return Ok(()) };
            link::set_up(&mut socket, link.index, true, look_deadline())?;
            Ok(link::set_up(&mut socket, link.index, false, look_deadline())?)
        });
        if let Err(error) = result {
            tracing::warn!(device = %device.device, %error, "its driver was not told of its new link-layer address");
        }
    }

    /// A socket on the host, the physical function's link, and what it says of the virtual one now.
    fn look_at_vf(&self, of: &VirtualFunction) -> Result<(RouteSocket, Link, VfSettings), String> {
        let mut socket = self.host_socket().map_err(|error| error.to_string())?;
        let links = link::list(&mut socket, look_deadline()).map_err(|e| KernelError::from(e).to_string())?;
        let pf = pf_link(&of.pf, &links)?.clone();
        let now = self.read_vf(&pf, of.index)?;
        Ok((socket, pf, now))
    }

    /// Reading, writing and reading again is one thing for each physical function. One lock for all of them: the kernel has no more.
    fn vfs(&self) -> MutexGuard<'_, ()> {
        self.vfs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the plan of the device says of it as a virtual function.
fn step_of(device: &DeviceRecord) -> Option<(VirtualFunction, &VfSettings, &VfSettings)> {
    device.plan.steps.iter().find_map(|step| match step {
        Step::Vf { pf, index, wanted, before } => Some((VirtualFunction { pf: pf.clone(), index: *index }, wanted, before)),
        _ => None,
    })
}

/// The link of the physical function, which speaks for its virtual ones.
fn pf_link<'a>(pf: &str, links: &'a [Link]) -> Result<&'a Link, String> {
    let is_pf = |l: &&Link| l.parent_device.as_ref().is_some_and(|p| p.bus == "pci" && p.name == pf) && !is_representor(l);
    links.iter().find(is_pf).ok_or_else(|| {
        format!("vf: the physical function {pf} has no link on the host; is it lent to a pod, or bound to another driver?")
    })
}

fn pod_mtu(plan: &Plan, host: &HostState) -> u32 {
    let moved = plan.steps.iter().find_map(|step| match step {
        Step::Move { mtu, .. } => *mtu,
        _ => None,
    });
    moved.unwrap_or(host.mtu)
}

/// A physical function drops what is longer than its own frames; but IPoIB's packets are of links, not of the port.
fn check_mtu(mtu: u32, pf: &Link) -> Result<(), String> {
    if mtu <= pf.mtu || pf.arphrd == INFINIBAND {
        return Ok(());
    }
    Err(format!(
        "interface.mtu: the virtual function would have {mtu} bytes in the pod, and its physical function {} has {}; set interface.mtu, or \
         raise the MTU of {}",
        pf.name, pf.mtu, pf.name
    ))
}

fn refusal(pf: &Link, refused: &VfSetting, error: &NetlinkError) -> String {
    if error.errno() == Some(libc::EOPNOTSUPP) {
        return format!("vf.{}: the driver of {} does not support this setting", refused.name(), pf.name);
    }
    format!("vf.{}: {} refused {refused}: {error}", refused.name(), pf.name)
}
