//! What a namespace has of what our devices can be: links, and RDMA devices.

use super::{KernelError, locate, look_deadline};
use crate::ledger::DeviceRecord;
use crate::netdev::{Link, link};
use crate::netlink::{NetlinkError, RouteSocket};
use crate::netns::Netns;
use crate::rdma::{self, RdmaSocket};

/// Links and RDMA devices of one namespace.
#[derive(Debug, Default)]
pub(super) struct There {
    pub(super) links: Vec<Link>,
    /// Empty where nobody asked for them.
    pub(super) rdma: Vec<rdma::Device>,
}

impl There {
    /// Looks into `netns`, for RDMA devices only where one of `devices` moves with one: else the kernel is not asked about RDMA at all.
    pub(super) fn look<'a>(netns: &Netns, devices: impl IntoIterator<Item = &'a DeviceRecord>) -> Result<Self, KernelError> {
        Self::look_by(&mut RouteSocket::open_in(netns)?, netns, devices)
    }

    /// As [`Self::look`], with a socket that is there.
    pub(super) fn look_by<'a>(
        socket: &mut RouteSocket,
        netns: &Netns,
        devices: impl IntoIterator<Item = &'a DeviceRecord>,
    ) -> Result<Self, KernelError> {
        let links = link::list(socket, look_deadline())?;
        let any = devices.into_iter().any(|device| device.moving_rdma().is_some());
        Ok(Self { links, rdma: if any { rdma_devices(netns)? } else { Vec::new() } })
    }

    /// Whether this pod's namespace has all of the device. What does not move is everywhere.
    pub(super) fn holds(&self, device: &DeviceRecord, index: u32) -> bool {
        let link = !device.has_link() || locate::in_pod(device, index, &self.links).is_some();
        link && device.moving_rdma().is_none_or(|rdma| locate::rdma(rdma, &self.rdma).is_some())
    }

    /// Whether this pod's namespace has anything of the device.
    pub(super) fn has_part_of(&self, device: &DeviceRecord, index: u32) -> bool {
        let link = device.has_link().then(|| locate::in_pod(device, index, &self.links).is_some());
        let rdma = device.moving_rdma().map(|rdma| locate::rdma(rdma, &self.rdma).is_some());
        match (link, rdma) {
            (None, None) => true,
            (link, rdma) => link == Some(true) || rdma == Some(true),
        }
    }

    /// Whether the device is in this namespace, the host's: by its link, or, where it has none, by its RDMA device.
    pub(super) fn is_home_of(&self, device: &DeviceRecord) -> bool {
        match device.moving_rdma() {
            _ if device.has_link() => locate::find(device, device.host.index, &self.links).is_some(),
            Some(rdma) => locate::rdma(rdma, &self.rdma).is_some(),
            None => true,
        }
    }
}

/// The RDMA devices that `netns` sees; none where the kernel has no RDMA.
pub(super) fn rdma_devices(netns: &Netns) -> Result<Vec<rdma::Device>, NetlinkError> {
    RdmaSocket::open_in(netns)?.map_or(Ok(Vec::new()), |mut socket| socket.devices(look_deadline()))
}
