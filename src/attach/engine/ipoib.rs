//! What IPoIB links need besides what all links do: `P_Key`s that the port has, and partitions, which come to the host when their
//! namespace ends, and end with the link below when its RDMA device moves.

use super::{Engine, PrepareReason, look_deadline};
use crate::attach::Step;
use crate::attach::plan::Plan;
use crate::dra::resolve::ResolvedDevice;
use crate::inventory::{Device, HardwareId};
use crate::ledger::{DeviceRecord, RdmaRecord};
use crate::names::RdmaDeviceName;
use crate::netdev::child::{self, FULL_MEMBER};
use crate::netdev::{Child, Link, link};
use crate::netlink::NetlinkError;
use crate::rdma::{NetnsMode, Protocol};

/// `IFLA_INFO_KIND` of IPoIB links, partitions among them.
const KIND: &str = "ipoib";

impl Engine {
    /// Whether the device's link can carry the partition that is planned on it, and can move where it is to move. `links` are the host's.
    pub(super) fn check_ipoib(
        &self,
        (wanted, device): (&ResolvedDevice, &Device),
        links: &[Link],
        plan: &Plan,
        rdma: Option<&RdmaRecord>,
    ) -> Result<(), PrepareReason> {
        let Some(link) = &device.link else { return Ok(()) };
        let checked = match plan.child() {
            Some(Child::Ipoib { pkey, .. }) => self.check_pkey(device, link, *pkey),
            None => rdma.map_or(Ok(()), |rdma| check_partitions(link, links, rdma)),
            Some(_) => Ok(()),
        };
        checked.map_err(|why| PrepareReason::Rdma { request: wanted.request.clone(), device: wanted.device.clone(), why })
    }

    fn check_pkey(&self, device: &Device, link: &Link, pkey: u16) -> Result<(), String> {
        if matches!(&device.hardware, HardwareId::Virtual { kind, .. } if kind == KIND)
            && link.parent.is_some_and(|p| p != link.index)
        {
            return Err(format!("interface.type: {} is a partition itself, and the kernel makes none on top of one", link.name));
        }
        let (rdma, port) = self.port_of(device, link).ok_or_else(|| {
            format!("interface.ipoib.pkey: no RDMA device of {} is on the host, so its table of P_Keys can't be read", link.name)
        })?;
        check_membership(pkey, &self.sysfs.pkeys(&rdma, port))
            .map_err(|why| format!("interface.ipoib.pkey: port {port} of RDMA device {rdma} {why}"))
    }

    /// The RDMA device and its port below the link: as the inventory has it, else those of the same function.
    fn port_of(&self, device: &Device, link: &Link) -> Option<(RdmaDeviceName, u32)> {
        if let Some(part) = &device.rdma {
            return Some((part.name.clone(), part.port));
        }
        let facts = self.sysfs.link(&link.name, link.index).ok().flatten()?;
        let port = facts.dev_port + 1;
        let same = self.sysfs.rdma_devices().into_iter().filter(|rdma| rdma.device_path == facts.device_path);
        let names = same.filter_map(|rdma| RdmaDeviceName::new(rdma.name).ok());
        names.filter(|name| !self.sysfs.pkeys(name, port).is_empty()).map(|name| (name, port)).next()
    }

    /// Deletes the partition of `device` that the kernel put on the host when its namespace ended. It is known by the alias that we gave
    /// it.
    pub(super) fn delete_returned(&self, device: &DeviceRecord, links: &[Link]) {
        for link in links.iter().filter(|link| is_returned(device, link)) {
            let deleted = self.host_socket().and_then(|mut socket| {
                match socket.request(child::delete_request(link.index), look_deadline()) {
                    Err(error) if error.errno() != Some(libc::ENODEV) => Err(NetlinkError::into(error)),
                    _ => Ok(()),
                }
            });
            match deleted {
                Ok(()) => {
                    tracing::info!(device = %device.device, link = %link.name, "its partition came to the host, and is deleted")
                }
                Err(error) => {
                    tracing::warn!(device = %device.device, link = %link.name, %error, "its partition stays on the host")
                }
            }
        }
    }

    /// As [`Self::delete_returned`], with a look at the host.
    pub(super) fn delete_returned_of(&self, devices: &[&DeviceRecord]) {
        let partitions: Vec<_> = devices.iter().filter(|device| matches!(device.child(), Some(Child::Ipoib { .. }))).collect();
        if partitions.is_empty() {
            return;
        }
        let links = self.host_socket().and_then(|mut socket| Ok(link::list(&mut socket, look_deadline())?));
        match links {
            Ok(links) => partitions.iter().for_each(|device| self.delete_returned(device, &links)),
            Err(error) => tracing::warn!(%error, "partitions that came to the host could not be looked for"),
        }
    }
}

/// Whether `link`, on the host, is the partition of `device`.
fn is_returned(device: &DeviceRecord, link: &Link) -> bool {
    let alias = device.plan.steps.iter().find_map(|step| match step {
        Step::Link { settings } => settings.alias.as_ref(),
        _ => None,
    });
    let is_partition = matches!(device.child(), Some(Child::Ipoib { .. })) && link.kind.as_deref() == Some(KIND);
    is_partition && link.parent == Some(device.host.index) && alias.is_some() && link.alias.as_ref() == alias
}

/// Whether a port with this table is in the partition, as it is asked for.
///
/// # Errors
/// What it has instead, and what to do.
fn check_membership(pkey: u16, table: &[u16]) -> Result<(), String> {
    let same: Vec<u16> = table.iter().copied().filter(|other| other & !FULL_MEMBER == pkey & !FULL_MEMBER).collect();
    let all = || table.iter().map(|pkey| format!("{pkey:#06x}")).collect::<Vec<_>>().join(", ");
    match (same.is_empty(), pkey & FULL_MEMBER != 0) {
        (true, _) if table.is_empty() => Err("has no P_Key at all; is there a subnet manager?".to_owned()),
        (true, _) => Err(format!("is not in partition {pkey:#06x}; its table has {}. The subnet manager decides", all())),
        (false, true) if same.iter().all(|other| other & FULL_MEMBER == 0) => Err(format!(
            "is a limited member of partition {pkey:#06x}, not a full one; ask for {:#06x}, or let the subnet manager make it one",
            pkey & !FULL_MEMBER
        )),
        _ => Ok(()),
    }
}

/// Whether no partition of the host's would end with the link, whose RDMA device moves.
fn check_partitions(link: &Link, links: &[Link], rdma: &RdmaRecord) -> Result<(), String> {
    if rdma.mode != NetnsMode::Exclusive || rdma.protocol != Protocol::InfiniBand {
        return Ok(());
    }
    let is_partition =
        |other: &&Link| other.kind.as_deref() == Some(KIND) && other.index != link.index && other.parent == Some(link.index);
    let names: Vec<&str> = links.iter().filter(is_partition).map(|other| other.name.as_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(format!(
        "rdma: the host's partitions {} of {} would end when RDMA device {} moves into the pod; delete them, or set rdma.enabled to false",
        names.join(", "),
        link.name,
        rdma.name
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_partition_that_the_port_is_not_in_is_refused() {
        let table = [0xffff, 0x8001, 0x0002];
        for good in [0x8001, 0x0001, 0x0002, 0xffff, 0x7fff] {
            assert_eq!(check_membership(good, &table), Ok(()), "{good:#06x}");
        }
        let why = check_membership(0x8003, &table).unwrap_err();
        assert!(why.starts_with("is not in partition 0x8003; its table has 0xffff, 0x8001, 0x0002"), "{why}");
        let why = check_membership(0x8002, &table).unwrap_err();
        assert!(why.contains("limited member") && why.contains("ask for 0x0002"), "{why}");
        assert!(check_membership(0x8001, &[]).unwrap_err().contains("subnet manager"));
    }

    proptest! {
        #[test]
        fn what_the_table_has_can_be_had(table in proptest::collection::vec(1_u16.., 1..20), at in any::<prop::sample::Index>()) {
            let pkey = *at.get(&table);
            prop_assert_eq!(check_membership(pkey, &table), Ok(()));
            prop_assert_eq!(check_membership(pkey & !FULL_MEMBER, &table), Ok(()));
        }
    }

    #[test]
    fn partitions_of_the_host_keep_the_device_from_moving() {
        let of = |name: &str, index, parent, kind: &str| Link {
            name: name.to_owned(),
            index,
            parent: Some(parent),
            kind: Some(kind.to_owned()),
            ..Link::default()
        };
        let links = [of("ib0", 7, 7, "ipoib"), of("ib0.8001", 8, 7, "ipoib"), of("ib1.8001", 9, 6, "ipoib")];
        let rdma = |mode, protocol| RdmaRecord {
            name: RdmaDeviceName::new("mlx5_0").unwrap(),
            index: 1,
            node_guid: None,
            port: 1,
            protocol,
            mode,
            char_devices: vec![],
            companions: vec![],
            limits: None,
            wait_for_port: true,
            usable: None,
            problem: None,
        };
        let moving = rdma(NetnsMode::Exclusive, Protocol::InfiniBand);
        let why = check_partitions(&links[0], &links, &moving).unwrap_err();
        assert!(why.contains("partitions ib0.8001 of ib0") && why.contains("mlx5_0"), "{why}");
        assert_eq!(check_partitions(&links[0], &links[..1], &moving), Ok(()));
        assert_eq!(check_partitions(&links[0], &links, &rdma(NetnsMode::Shared, Protocol::InfiniBand)), Ok(()));
        assert_eq!(check_partitions(&links[0], &links, &rdma(NetnsMode::Exclusive, Protocol::Roce)), Ok(()));
    }
}
