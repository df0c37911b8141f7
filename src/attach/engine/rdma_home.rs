//! RDMA devices on their way back to the host: each before its link, and under its name there.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::time::Instant;

use super::home::{self, COMES_BACK, POLL};
use super::there::rdma_devices;
use super::{Engine, locate, look_deadline};
use crate::crash;
use crate::inventory::HardwareId;
use crate::ledger::{ClaimRecord, DeviceRecord, RdmaRecord, Share};
use crate::netlink::NetlinkError;
use crate::netns::Netns;
use crate::rdma::{Device, RdmaSocket};

/// What became of an RDMA device on the way back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Back {
    /// It was moved.
    Moved,
    /// It was on the host already.
    AtHome,
    /// It is nowhere that we can see.
    Gone,
    /// It is still in the pod, and why.
    Stuck(String),
}

/// Devices of one card.
type OfCard<'a> = Vec<(&'a DeviceRecord, &'a RdmaRecord)>;

impl Engine {
    /// Moves the RDMA devices that moved with `devices` from `netns` to the host. Those of different cards go at once.
    pub(super) fn rdma_back(&self, netns: &Netns, devices: &[&DeviceRecord]) -> BTreeMap<Share, Back> {
        let mut cards: BTreeMap<String, OfCard<'_>> = BTreeMap::new();
        for (device, rdma) in devices.iter().filter_map(|device| Some((*device, device.moving_rdma()?))) {
            cards.entry(self.card(device)).or_default().push((device, rdma));
        }
        std::thread::scope(|scope| {
            let work = |(card, all): (String, OfCard<'_>)| self.card_back(netns, &card, &all);
            let first = cards.pop_first();
            let others: Vec<_> = cards.into_iter().map(|card| scope.spawn(move || work(card))).collect();
            let mut outcomes = first.map(work).unwrap_or_default();
            for thread in others {
                outcomes.extend(thread.join().unwrap_or_default());
            }
            outcomes
        })
    }

    fn card_back(&self, netns: &Netns, card: &str, all: &OfCard<'_>) -> BTreeMap<Share, Back> {
        let lock = self.cards.of(card);
        let _one_at_a_time = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let sockets = RdmaSocket::open_in(netns).and_then(|pod| Ok(pod.zip(RdmaSocket::open_in(&self.host)?)));
        let same = |back: Back| all.iter().map(|(device, _)| (device.share(), back.clone())).collect();
        match sockets {
            Ok(Some((mut pod, mut host))) => {
                let one = |(device, rdma): &(&DeviceRecord, &RdmaRecord)| {
                    let back = self.one_back(device, rdma, (netns, &mut pod), &mut host);
                    (device.share(), back.unwrap_or_else(|error| Back::Stuck(error.to_string())))
                };
                all.iter().map(one).collect()
            }
            // Whatever there was went with the kernel's module.
            Ok(None) => same(Back::Gone),
            Err(error) => same(Back::Stuck(error.to_string())),
        }
    }

    fn one_back(
        &self,
        device: &DeviceRecord,
        rdma: &RdmaRecord,
        (netns, pod): (&Netns, &mut RdmaSocket),
        host: &mut RdmaSocket,
    ) -> Result<Back, NetlinkError> {
        let inside = locate::rdma(rdma, &pod.devices(look_deadline())?).map(|found| found.index);
        let moved = inside.map(|index| pod.move_to(netns, index, self.host.as_fd(), look_deadline()));
        crash::point("release: rdma moved");
        let at_home = locate::rdma(rdma, &host.devices(look_deadline())?).cloned();
        let Some(found) = at_home else {
            return match moved {
                Some(Err(error)) => Err(error),
                Some(Ok(())) => Ok(Back::Stuck("the kernel moved it, and it is not on the host".to_owned())),
                None => Ok(Back::Gone),
            };
        };
        if let Err(why) = give_name(host, rdma, found.index, &found.name) {
            tracing::warn!(device = %device.device, rdma = %rdma.name, why, "the RDMA device is on the host under another name");
        }
        crash::point("release: rdma named");
        Ok(if moved.is_some_and(|moved| moved.is_ok()) { Back::Moved } else { Back::AtHome })
    }

    /// Gives RDMA devices that are on the host by themselves the names that they had there. What can't be is logged: unprepare tries
    /// again, and tells.
    pub(super) fn name_rdma(&self, record: &ClaimRecord, devices: &[&DeviceRecord]) {
        for (device, rdma) in devices.iter().filter_map(|device| Some((device, device.moving_rdma()?))) {
            match self.name_at_home(rdma) {
                Ok(true) => {
                    tracing::info!(claim = %record.claim, device = %device.device, rdma = %rdma.name, "RDMA device on the host")
                }
                Ok(false) => {
                    tracing::warn!(claim = %record.claim, device = %device.device, rdma = %rdma.name, "RDMA device is gone")
                }
                Err(why) => tracing::warn!(
                    claim = %record.claim, device = %device.device, rdma = %rdma.name, why, "RDMA device keeps another name"
                ),
            }
        }
    }

    /// What of the device's RDMA device is not on the host as it was, and why. One of hardware may come some time after its namespace
    /// ended.
    pub(super) fn restore_rdma(&self, device: &DeviceRecord) -> Option<(String, String)> {
        let rdma = device.moving_rdma()?;
        let is_virtual = matches!(device.hardware, HardwareId::Virtual { .. });
        let give_up = Instant::now() + if is_virtual { Default::default() } else { COMES_BACK };
        loop {
            match self.name_at_home(rdma) {
                Ok(true) => return None,
                Err(why) => return Some(("RDMA device".to_owned(), why)),
                // It went with its link, which says so itself.
                Ok(false) if is_virtual => return None,
                Ok(false) if Instant::now() >= give_up => {
                    let why = format!("{} is not on the host; was its driver unloaded?", rdma.name);
                    return Some(("RDMA device".to_owned(), why));
                }
                Ok(false) => std::thread::sleep(POLL),
            }
        }
    }

    /// Whether it is on the host, and under its name now.
    fn name_at_home(&self, rdma: &RdmaRecord) -> Result<bool, String> {
        let found = rdma_devices(&self.host).map_err(|error| error.to_string())?;
        let Some(found) = locate::rdma(rdma, &found) else { return Ok(false) };
        let socket = RdmaSocket::open_in(&self.host).map_err(|error| error.to_string())?;
        let Some(mut socket) = socket else { return Ok(false) };
        give_name(&mut socket, rdma, found.index, &found.name).map(|()| true)
    }
}

/// Gives the RDMA device with `index` on the host its name there. Where another one has that by now (names are unique in the whole kernel),
/// it gets one that no pod chose.
fn give_name(host: &mut RdmaSocket, rdma: &RdmaRecord, index: u32, is: &str) -> Result<(), String> {
    let wanted = rdma.name.as_str();
    if is == wanted {
        return Ok(());
    }
    let Err(error) = host.rename(index, wanted, look_deadline()) else { return Ok(()) };
    if error.errno() != Some(libc::EEXIST) {
        return Err(format!("it is called {is}, and could not be called {wanted}: {error}"));
    }
    // Its own name is free for itself: one that stepped aside before stays where it is.
    let others = |all: Vec<Device>| all.into_iter().filter(|device| device.index != index).map(|device| device.name).collect();
    let names = host.devices(look_deadline()).map(others);
    let aside = home::free_name(&names.unwrap_or_default());
    let is = if is == aside || host.rename(index, &aside, look_deadline()).is_ok() { aside } else { is.to_owned() };
    Err(format!("it is called {is}, since another RDMA device is called {wanted}; rename that one"))
}
