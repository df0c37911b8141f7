//! Which claim has, or is about to have, which device or share of it; and what does not go together.

use std::collections::BTreeMap;

use super::Engine;
use super::refusal::PrepareReason;
use crate::attach::plan::child;
use crate::dra::resolve::ResolvedClaim;
use crate::inventory::hardware::share_name;
use crate::ledger::Share;
use crate::names::{ClaimUid, DeviceName};
use crate::netdev::Child;

/// A claim, and what it makes on top of the device; none where the device itself goes into its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holder {
    claim: ClaimUid,
    child: Option<Child>,
}

/// Holders by the device's name for shares, whether or not they hold shares, and then by what they hold.
#[derive(Debug, Default)]
pub(super) struct Reserved(BTreeMap<DeviceName, BTreeMap<Share, Holder>>);

/// Why `claim` can't have what it wants.
#[derive(Debug, PartialEq, Eq)]
enum Clash {
    /// This claim has the device, or what is wanted of it.
    Held(ClaimUid),
    /// This claim has the other thing on the device, and the two do not go together.
    Apart(ClaimUid, Child, &'static str),
}

impl Reserved {
    /// Whatever others have.
    pub(super) fn add(&mut self, share: Share, child: Option<Child>, claim: &ClaimUid) {
        let holder = Holder { claim: claim.clone(), child };
        self.0.entry(share_name(&share.device)).or_default().insert(share, holder);
    }

    pub(super) fn remove(&mut self, claim: &ClaimUid) {
        for holders in self.0.values_mut() {
            holders.retain(|_, holder| holder.claim != *claim);
        }
        self.0.retain(|_, holders| !holders.is_empty());
    }

    /// What is in the way of `claim`, which wants `child` by `share`.
    fn clash(&self, share: &Share, child: Option<&Child>, claim: &ClaimUid) -> Option<Clash> {
        let holders = self.0.get(&share_name(&share.device)).into_iter().flatten();
        let others = holders.filter(|(held, holder)| *held != share || holder.claim != *claim);
        let in_the_way = |(held, holder): (&Share, &Holder)| match (child, &holder.child) {
            (Some(wanted), Some(other)) if held != share => {
                wanted.conflict(other).map(|why| Clash::Apart(holder.claim.clone(), *other, why))
            }
            _ => Some(Clash::Held(holder.claim.clone())),
        };
        others.filter_map(in_the_way).next()
    }
}

impl Engine {
    /// Reserves every device of the claim, or none.
    pub(super) fn reserve(&self, claim: &ResolvedClaim) -> Result<(), PrepareReason> {
        let mut reserved = self.reserved();
        let uid = &claim.claim.uid;
        for device in &claim.devices {
            let (share, child) = (device.share(), device.config.interface.as_ref().and_then(child::of));
            if let Some(clash) = reserved.clash(&share, child.as_ref(), uid) {
                reserved.remove(uid);
                return Err(self.clash(&device.device, child.as_ref(), clash));
            }
            reserved.add(share, child, uid);
        }
        Ok(())
    }

    fn clash(&self, device: &DeviceName, wanted: Option<&Child>, clash: Clash) -> PrepareReason {
        let device = device.clone();
        match clash {
            Clash::Held(owner) => PrepareReason::Held { device, owner: self.owner(&owner) },
            Clash::Apart(owner, other, why) => PrepareReason::Shared {
                device,
                wanted: wanted.map(ToString::to_string).unwrap_or_default(),
                owner: self.owner(&owner),
                other: other.to_string(),
                why: why.to_owned(),
            },
        }
    }

    /// A claim and its pod, for people.
    fn owner(&self, claim: &ClaimUid) -> String {
        self.ledger.get(claim).map_or_else(|| claim.to_string(), |r| format!("{} of pod {}", r.claim, r.pod.name))
    }

    pub(super) fn unreserve(&self, claim: &ClaimUid) {
        self.reserved().remove(claim);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::{IpvlanFlag, IpvlanMode, MacvlanMode};

    const MACVLAN: Child = Child::Macvlan { mode: MacvlanMode::Bridge };
    const IPVLAN: Child = Child::Ipvlan { mode: IpvlanMode::L2, flag: IpvlanFlag::Bridge };

    fn uid(name: &str) -> ClaimUid {
        ClaimUid::new(name).unwrap()
    }

    fn share(device: &str, id: &str) -> Share {
        Share { device: DeviceName::new(device).unwrap(), id: (!id.is_empty()).then(|| id.to_owned()) }
    }

    #[test]
    fn the_whole_device_and_shares_of_it_exclude_each_other() {
        let (whole, one, two) = (share("pci-1", ""), share("share-pci-1", "1"), share("share-pci-1", "2"));
        let mut reserved = Reserved::default();
        reserved.add(one.clone(), Some(MACVLAN), &uid("a"));
        assert_eq!(reserved.clash(&whole, None, &uid("b")), Some(Clash::Held(uid("a"))));
        assert_eq!(reserved.clash(&whole, None, &uid("a")), Some(Clash::Held(uid("a"))), "not in one claim either");
        assert_eq!(reserved.clash(&two, Some(&MACVLAN), &uid("b")), None);
        assert_eq!(reserved.clash(&one, Some(&MACVLAN), &uid("b")), Some(Clash::Held(uid("a"))), "the same share");
        assert!(
            matches!(reserved.clash(&two, Some(&IPVLAN), &uid("b")), Some(Clash::Apart(owner, MACVLAN, _)) if owner == uid("a"))
        );
        assert_eq!(reserved.clash(&share("pci-2", ""), None, &uid("b")), None);

        reserved.remove(&uid("a"));
        reserved.add(whole, None, &uid("b"));
        assert_eq!(reserved.clash(&one, Some(&MACVLAN), &uid("a")), Some(Clash::Held(uid("b"))));
        reserved.remove(&uid("b"));
        assert!(reserved.0.is_empty());
    }

    #[test]
    fn one_that_is_allocated_as_a_whole_and_has_a_child_is_held_once() {
        let whole = share("pci-1", "");
        let mut reserved = Reserved::default();
        reserved.add(whole.clone(), Some(MACVLAN), &uid("a"));
        assert_eq!(reserved.clash(&whole, Some(&MACVLAN), &uid("a")), None, "again");
        assert_eq!(reserved.clash(&whole, Some(&MACVLAN), &uid("b")), Some(Clash::Held(uid("a"))));
        assert_eq!(reserved.clash(&whole, None, &uid("b")), Some(Clash::Held(uid("a"))));
    }
}
