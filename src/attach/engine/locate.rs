//! Where a device's link is, and its RDMA device: by index first and by what does not change second. Never by name alone.

use crate::inventory::HardwareId;
use crate::ledger::{DeviceRecord, Phase, RdmaRecord};
use crate::netdev::{Child, Link};
use crate::rdma;

/// Whether `link`, on the host or moved into a pod, is the device of `record`: what the hardware says, or, for a link without
/// hardware, its kind and one of the addresses it can have by now.
pub(super) fn is_device(record: &DeviceRecord, link: &Link) -> bool {
    match &record.hardware {
        // A link of the same function (IPoIB that is ignored) is another matter.
        _ if !record.has_link() => false,
        HardwareId::Virtual { kind, .. } => link.kind.as_deref().unwrap_or_default() == kind && has_known_address(record, link),
        HardwareId::Pci { .. } | HardwareId::Bus { .. } => {
            let pci = link.parent_device.as_ref().filter(|p| p.bus == "pci").map(|p| p.name.as_str());
            record.hardware.may_be(link, pci)
        }
    }
}

/// Whether `now` is still the link that the inventory saw as `seen`: an index can be another link's by now.
pub(super) fn is_same(seen: &Link, now: &Link) -> bool {
    let hardware = |link: &Link| (link.kind.clone(), link.parent_device.clone(), link.perm_address.clone());
    hardware(seen) == hardware(now) && (seen.perm_address.is_some() || seen.address == now.address)
}

fn has_known_address(record: &DeviceRecord, link: &Link) -> bool {
    let configured = record.plan.steps.iter().find_map(|step| match step {
        crate::attach::Step::Move { address, .. } => address.as_ref(),
        _ => None,
    });
    link.address == record.host.address || (configured.is_some() && link.address.as_ref() == configured)
}

/// The link of `record` among `links`, those in its pod: the device itself, or what was made on top of it.
pub(crate) fn in_pod<'a>(record: &DeviceRecord, index: u32, links: &'a [Link]) -> Option<&'a Link> {
    match record.child() {
        None => moved(record, index, links),
        // Several on one device look alike, and an index does not change while a link is in one namespace.
        Some(child) => links.iter().find(|link| link.index == index && is_child(record, child, link)),
    }
}

/// As [`in_pod`], but a device itself must look as it was lent or as it was planned.
pub(crate) fn as_planned<'a>(record: &DeviceRecord, index: u32, links: &'a [Link]) -> Option<&'a Link> {
    if record.child().is_some() { in_pod(record, index, links) } else { find(record, index, links) }
}

/// Whether `link`, in the pod and with the index that was chosen for it, is what was made on top of the device. Until it is recorded as
/// attached, somebody else in the pod may have made a link with that index; afterwards the pod may rename it.
fn is_child(record: &DeviceRecord, child: &Child, link: &Link) -> bool {
    // On top of a macvlan or ipvlan link the kernel makes such a link on the one below that.
    let is_sibling = matches!(&record.hardware, HardwareId::Virtual { kind, .. } if kind == child.kind());
    let is_above = is_sibling || link.parent == Some(record.host.index);
    let is_of_kind = link.kind.as_deref() == Some(child.kind()) && is_above;
    let address = record.plan.steps.iter().find_map(|step| match step {
        crate::attach::Step::Create { address, .. } => address.as_ref(),
        _ => None,
    });
    let has_address = address.is_some() && link.address.as_ref() == address;
    is_of_kind && (record.phase == Phase::Attached || has_address || link.name == record.plan.pod_link.as_str())
}

/// The device's link among `links`: the one with `index` if it is the device; else the only one that is.
pub(crate) fn find<'a>(record: &DeviceRecord, index: u32, links: &'a [Link]) -> Option<&'a Link> {
    let by_index = links.iter().find(|link| link.index == index).filter(|link| is_device(record, link));
    // Another index: several links without hardware may look alike, and then none is better than a wrong one.
    by_index.or_else(|| only(links.iter().filter(|link| is_device(record, link))))
}

/// The RDMA device of `record` among `devices`: the one with its index, which the kernel gives to no other before it has used all;
/// else, since its driver may have registered it anew, the only one with its node GUID.
pub(super) fn rdma<'a>(record: &RdmaRecord, devices: &'a [rdma::Device]) -> Option<&'a rdma::Device> {
    let same_guid = |device: &&rdma::Device| device.node_guid.is_some() && device.node_guid == record.node_guid;
    // Indices begin anew when the kernel's RDMA module is loaded again.
    let may_be = |device: &&rdma::Device| {
        let no_guid = device.node_guid.is_none() || record.node_guid.is_none();
        no_guid || same_guid(device) || device.name == record.name.as_str()
    };
    let by_index = devices.iter().find(|device| device.index == record.index).filter(may_be);
    by_index.or_else(|| only(devices.iter().filter(same_guid)))
}

/// The item, if there is one and no other.
pub(super) fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    match (items.next(), items.next()) {
        (Some(item), None) => Some(item),
        _ => None,
    }
}

/// The device's link among `links`, those of the namespace it was moved to with `index`: as [`find`]; but a pod may give its link
/// another link-layer address (a bond does), and a link without hardware has nothing else to be known by. So the link with the index
/// that we chose there, if it has the kind, is the device as well.
fn moved<'a>(record: &DeviceRecord, index: u32, links: &'a [Link]) -> Option<&'a Link> {
    let HardwareId::Virtual { kind, .. } = &record.hardware else { return find(record, index, links) };
    let same_kind = |link: &&Link| record.has_link() && link.index == index && link.kind.as_deref().unwrap_or_default() == kind;
    find(record, index, links).or_else(|| links.iter().find(same_kind))
}
