//! RDMA devices in prepare: what they are now, and what of them the pod gets.

use std::sync::{MutexGuard, PoisonError};

use super::prepare::kernel;
use super::{Engine, PrepareReason, locate, look_deadline};
use crate::attach::plan::{Plan, rdma as plan_rdma};
use crate::config::NetworkConfig;
use crate::dra::resolve::ResolvedDevice;
use crate::inventory::hardware::is_share_name;
use crate::inventory::{Device, HardwareId, RdmaPart};
use crate::ledger::{ClaimRecord, DeviceRecord, PodRef, RdmaRecord};
use crate::names::RdmaDeviceName;
use crate::netdev::HostState;
use crate::netlink::NetlinkError;
use crate::netns::Netns;
use crate::rdma::{self, NetnsMode, RdmaSocket};

/// What a device lacks for which RDMA is required.
const NONE: &str = "rdma.enabled: the device has no RDMA device; ask for one that has (attribute rdma), or remove rdma.enabled";

/// What the kernel says of RDMA on the host, now.
pub(super) struct Now {
    socket: RdmaSocket,
    mode: NetnsMode,
    devices: Vec<rdma::Device>,
}

impl Now {
    /// None where the kernel has no RDMA.
    fn read(host: &Netns) -> Result<Option<Self>, NetlinkError> {
        RdmaSocket::open_in(host)?.map(Self::read_by).transpose()
    }

    fn read_by(mut socket: RdmaSocket) -> Result<Self, NetlinkError> {
        let (mode, devices) = (socket.netns_mode(look_deadline())?, socket.devices(look_deadline())?);
        Ok(Self { socket, mode, devices })
    }

    /// What is recorded of the RDMA device of `device`, which the inventory saw as `part`.
    fn record(&mut self, config: &NetworkConfig, device: &Device, part: &RdmaPart, plan: &Plan) -> Result<RdmaRecord, String> {
        let found = self.find(part);
        let found =
            found.ok_or_else(|| format!("rdma: RDMA device {} went away just now; the kubelet will ask again", part.name))?;
        let ports = self.socket.ports(found.index, look_deadline());
        let ports = ports.map_err(|error| format!("rdma: reading the ports of RDMA device {}: {error}", part.name))?;
        let link = device.link.as_ref().map(|link| link.index);
        plan_rdma::record(config, part, (self.mode, &found, &ports), link, plan.child())
    }

    /// The device that the inventory saw as `part`: by its name, unless another one has that by now; else by its GUID.
    fn find(&self, part: &RdmaPart) -> Option<rdma::Device> {
        let same_guid = |device: &&rdma::Device| part.node_guid.is_some() && device.node_guid == part.node_guid;
        let named = |device: &&rdma::Device| device.name == part.name.as_str() && (part.node_guid.is_none() || same_guid(device));
        self.devices.iter().find(named).or_else(|| locate::only(self.devices.iter().filter(same_guid))).cloned()
    }
}

impl Engine {
    /// Held while RDMA devices are read, planned and recorded: two claims may have links of one. None where there is none to read.
    pub(super) fn one_plan_of_rdma(&self, devices: &[(&ResolvedDevice, Device)]) -> Option<MutexGuard<'_, ()>> {
        let any = devices.iter().any(|(_, device)| device.rdma.is_some());
        any.then(|| self.rdma_plans.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the kernel says, where the pod is to get an RDMA device. None where it is not, or where the kernel has no RDMA.
    pub(super) fn rdma_now(&self, devices: &[(&ResolvedDevice, Device)]) -> Result<Option<Now>, PrepareReason> {
        if !devices.iter().any(|(wanted, device)| device.rdma.is_some() && plan_rdma::is_wanted(&wanted.config)) {
            return Ok(None);
        }
        Now::read(&self.host).map_err(|error| kernel("reading RDMA devices", error.into()))
    }

    /// What is recorded of the device's RDMA device; its step is put into the plan.
    pub(super) fn plan_rdma(
        &self,
        pod: &PodRef,
        (wanted, device): (&ResolvedDevice, &Device),
        now: Option<&mut Now>,
        plan: &mut Plan,
    ) -> Result<Option<RdmaRecord>, PrepareReason> {
        let refused = |why| refused(wanted, why);
        if !plan_rdma::is_wanted(&wanted.config) {
            return Ok(None);
        }
        let Some(part) = &device.rdma else {
            self.check_not_lent(pod, wanted, device)?;
            if plan_rdma::is_required(&wanted.config) {
                let why =
                    "rdma.enabled: the device has no RDMA device; ask for one that has (attribute rdma), or remove rdma.enabled";
                return Err(refused(why.to_owned()));
            }
            return Ok(None);
        };
        let now = now.ok_or_else(|| refused(no_rdma(part)))?;
        let record = now.record(&wanted.config, device, part, plan).map_err(refused)?;
        if record.mode == NetnsMode::Exclusive {
            let is_it = |other: &DeviceRecord| other.moving_rdma().is_some_and(|rdma| rdma.index == record.index);
            self.check_free(pod, wanted, &record.name, is_it)?;
        }
        plan_rdma::add_step(plan, &record);
        Ok(Some(record))
    }

    /// Whether the RDMA device that the device lacks on the host went with another link of the same function.
    fn check_not_lent(&self, pod: &PodRef, wanted: &ResolvedDevice, device: &Device) -> Result<(), PrepareReason> {
        let HardwareId::Pci { address, .. } = &device.hardware else { return Ok(()) };
        let is_sibling = |other: &DeviceRecord| {
            let same = matches!(&other.hardware, HardwareId::Pci { address: its, .. } if its == address);
            same && other.hardware != device.hardware && other.moving_rdma().is_some()
        };
        let name = RdmaDeviceName::new(format!("of {address}")).map_err(|error| refused(wanted, error.to_string()))?;
        self.check_free(pod, wanted, &name, is_sibling)
    }

    /// Whether no claim of another pod has the RDMA device.
    fn check_free(
        &self,
        pod: &PodRef,
        wanted: &ResolvedDevice,
        rdma: &RdmaDeviceName,
        is_it: impl Fn(&DeviceRecord) -> bool,
    ) -> Result<(), PrepareReason> {
        let records = self.current(self.ledger.all());
        let holds = |record: &&std::sync::Arc<ClaimRecord>| record.pod.uid != pod.uid && record.devices.iter().any(&is_it);
        match records.iter().find(holds) {
            None => Ok(()),
            Some(owner) => Err(PrepareReason::RdmaHeld {
                device: wanted.device.clone(),
                rdma: rdma.clone(),
                owner: format!("{} of pod {}", owner.claim, owner.pod.name),
            }),
        }
    }
}

/// Puts the step for the device's RDMA device into a plan that is only to be shown.
///
/// # Errors
/// Why it can't be had.
pub(crate) fn preview_rdma(host: &Netns, device: &Device, config: &NetworkConfig, plan: &mut Plan) -> Result<(), String> {
    if !plan_rdma::is_wanted(config) {
        return Ok(());
    }
    let Some(part) = &device.rdma else {
        return if plan_rdma::is_required(config) { Err(NONE.to_owned()) } else { Ok(()) };
    };
    let now = Now::read(host).map_err(|error| format!("reading RDMA devices: {error}"))?;
    let record = now.ok_or_else(|| no_rdma(part))?.record(config, device, part, plan)?;
    plan_rdma::add_step(plan, &record);
    Ok(())
}

fn no_rdma(part: &RdmaPart) -> String {
    format!("rdma: the kernel has no RDMA any more, and {} is asked for; load ib_core and its driver", part.name)
}

/// Host state and plan of an RDMA device without a link.
///
/// # Errors
/// Names what of the configuration needs a link.
pub(super) fn plan_without_link(wanted: &ResolvedDevice, device: &Device) -> Result<(HostState, Plan), PrepareReason> {
    let name = device.rdma.as_ref().map(|part| &part.name);
    let name = name.ok_or_else(|| refused(wanted, "rdma: it is not on the host; the kubelet will ask again".to_owned()))?;
    if wanted.share_id.is_some() || is_share_name(&wanted.device) {
        return Err(refused(wanted, "rdma: an RDMA device without a link has no shares; allocate it as a whole".to_owned()));
    }
    let plan = plan_rdma::without_link(&wanted.config, name).map_err(|why| refused(wanted, why))?;
    Ok((HostState::without_link(name.as_str()), plan))
}

fn refused(wanted: &ResolvedDevice, why: String) -> PrepareReason {
    PrepareReason::Rdma { request: wanted.request.clone(), device: wanted.device.clone(), why }
}
