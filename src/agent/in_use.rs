//! What pods have in use of their RDMA devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::attach::Engine;
use crate::ledger::record::RdmaRecord;
use crate::ledger::{DeviceRecord, Phase};
use crate::netlink::NetlinkError;
use crate::netns::Netns;
use crate::rdma::{NetnsMode, RdmaSocket, Resources};

/// Time for the answers of one device.
const ANSWERS: Duration = Duration::from_secs(2);

/// Of a device that is in a pod, where its RDMA device can be asked; blocking.
pub(super) fn of(engine: &Engine, device: &DeviceRecord) -> Option<Resources> {
    let rdma = device.rdma.as_ref().filter(|_| device.phase == Phase::Attached)?;
    let netns = match rdma.mode {
        NetnsMode::Shared => None,
        NetnsMode::Exclusive => Some(engine.netns_of(&device.attachment.as_ref()?.sandbox)?),
    };
    let read = read(rdma, netns.as_ref());
    read.inspect_err(|error| tracing::debug!(%error, device = %rdma.name, "resources of an RDMA device can't be read")).ok()?
}

fn read(rdma: &RdmaRecord, netns: Option<&Arc<Netns>>) -> Result<Option<Resources>, NetlinkError> {
    let socket = netns.map_or_else(RdmaSocket::open, |netns| RdmaSocket::open_in(netns))?;
    let Some(mut socket) = socket else { return Ok(None) };
    let deadline = Instant::now() + ANSWERS;
    // Another one may have the index by now.
    let known = socket.device(rdma.index, deadline)?;
    match known.filter(|device| rdma.node_guid.is_none() || device.node_guid == rdma.node_guid) {
        Some(device) => socket.resources(device.index, deadline),
        None => Ok(None),
    }
}
