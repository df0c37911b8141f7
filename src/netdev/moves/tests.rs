use std::os::fd::AsFd;

use netlink_packet_core::NetlinkSerializable;
use proptest::prelude::*;

use super::*;
use crate::netlink::decode;

fn set(indices: &[u32]) -> BTreeSet<u32> {
    indices.iter().copied().collect()
}

fn nic() -> Link {
    Link {
        index: 5,
        name: "eth5".into(),
        alt_names: vec!["enp5s0".into()],
        mtu: 1500,
        min_mtu: Some(68),
        max_mtu: Some(9000),
        address: Some("02:00:00:00:00:05".parse().unwrap()),
        ..Link::default()
    }
}

/// What `check` says to a move of [`nic`] changed by `change`, into a namespace with `eth0` (altname `ens0`) at index 2.
fn checked(change: impl FnOnce(&mut Move<'_>)) -> Result<(), Refusal> {
    let stdin = std::io::stdin();
    let mut m = Move { index: 5, target: stdin.as_fd(), new_index: 5, name: "gpu0".into(), mtu: None, address: None };
    change(&mut m);
    let there = Occupied::by(&[Link { index: 2, name: "eth0".into(), alt_names: vec!["ens0".into()], ..Link::default() }]);
    check(&nic(), &m, &there)
}

#[test]
fn the_message_carries_everything_in_one() {
    let stdin = std::io::stdin();
    let address: LinkAddress = "02:00:00:00:00:09".parse().unwrap();
    let m = Move {
        index: 5,
        target: stdin.as_fd(),
        new_index: 77,
        name: "gpu0".into(),
        mtu: Some(9000),
        address: Some(address.clone()),
    };
    let request = request(&m);
    assert_eq!(request.flags, 0, "neither EXCL nor CREATE: a link that is gone must not be made anew");
    assert_eq!(request.message.message_type(), 16);
    let mut bytes = vec![0; request.message.buffer_len()];
    request.message.serialize(&mut bytes);
    assert_eq!((decode::read_u32(&bytes, 4), &bytes[8..16]), (Some(5), &[0u8; 8][..]), "no flag of the link is touched");
    let found: Vec<_> = decode::attributes(&bytes[16..]).collect();
    let [fd, index, mtu] = [0u32, 77, 9000].map(u32::to_ne_bytes);
    assert_eq!(found, [(28, &fd[..]), (49, &index[..]), (3, &b"gpu0\0"[..]), (4, &mtu[..]), (1, address.bytes())]);
}

#[test]
fn an_index_is_kept_where_it_is_free() {
    assert_eq!(pick_index(&set(&[]), 7), 7);
    assert_eq!(pick_index(&set(&[1, 2]), 7), 7);
    assert_eq!(pick_index(&set(&[1, 7, 12]), 7), 13);
    assert_eq!(pick_index(&set(&[1]), 0), 2);
    assert_eq!(pick_index(&set(&[1]), u32::MAX), 2);
    assert_eq!(pick_index(&set(&[1, MAX_INDEX]), 1), MAX_INDEX - 1);
    assert_eq!(pick_index(&set(&[3, MAX_INDEX, MAX_INDEX - 1]), 3), MAX_INDEX - 2);
}

#[test]
fn what_the_kernel_would_refuse_or_do_by_half_is_refused() {
    assert_eq!(checked(|_| {}), Ok(()));
    assert_eq!(checked(|m| m.mtu = Some(9000)), Ok(()));
    assert_eq!(checked(|m| m.name = "eth0".into()), Err(Refusal::NameTaken { name: "eth0".into() }));
    assert_eq!(checked(|m| m.name = "ens0".into()), Err(Refusal::NameTaken { name: "ens0".into() }));
    assert_eq!(checked(|m| m.name = "enp5s0".into()), Err(Refusal::OwnAltName { name: "enp5s0".into() }));
    assert_eq!(checked(|m| m.new_index = 2), Err(Refusal::IndexTaken { index: 2 }));
    assert_eq!(checked(|m| m.new_index = 0), Err(Refusal::IndexTaken { index: 0 }));
    assert_eq!(checked(|m| m.mtu = Some(9001)), Err(Refusal::Mtu { mtu: 9001, min: 68, max: 9000 }));
    assert_eq!(checked(|m| m.mtu = Some(67)), Err(Refusal::Mtu { mtu: 67, min: 68, max: 9000 }));
    let long = LinkAddress::new(vec![1; 20]);
    assert_eq!(checked(|m| m.address = Some(long.clone())), Err(Refusal::AddressLength { address: long.clone(), length: 6 }));
    for name in ["", ".", "..", "a/b", "a:b", "a b", "r%d", "sixteen-bytes-xx"] {
        assert_eq!(checked(|m| m.name = name.into()), Err(Refusal::BadName { name: name.into() }));
    }
    let there = Occupied { names: ["enp5s0".to_owned()].into(), ..Occupied::default() };
    let stdin = std::io::stdin();
    let m = Move { index: 5, target: stdin.as_fd(), new_index: 5, name: "gpu0".into(), mtu: None, address: None };
    assert_eq!(check(&nic(), &m, &there), Err(Refusal::AltNameTaken { name: "enp5s0".into() }));
}

#[test]
fn hardware_is_known_again_by_what_it_is() {
    let address = |text: &str| Some(text.parse::<LinkAddress>().unwrap());
    let device = |name: &str| Some(ParentDevice { bus: "pci".into(), name: name.into() });
    let before = Link { perm_address: address("02:00:00:00:00:05"), parent_device: device("0000:8a:00.0"), ..nic() };
    let sought = Identity::of(&before, None);
    assert!(sought.is_strong());
    let after = Link { index: 9, name: "gpu0".into(), address: address("02:00:00:00:00:99"), ..before.clone() };
    assert!(sought.matches(&after));
    assert!(!sought.matches(&Link { parent_device: device("0000:8a:00.1"), ..after.clone() }));
    assert!(!sought.matches(&Link { kind: Some("vlan".into()), ..after }));
    // A virtual link has only its address, old or new.
    let (virtual_link, new) = (nic(), address("02:00:00:00:00:07"));
    let sought = Identity::of(&virtual_link, new.as_ref());
    assert!(!sought.is_strong());
    assert!(sought.matches(&Link { address: new.clone(), ..nic() }) && sought.matches(&nic()));
    assert!(!sought.matches(&Link { address: address("02:00:00:00:00:08"), ..nic() }));
}

proptest! {
    #[test]
    fn a_picked_index_is_free_and_legal(taken in proptest::collection::btree_set(1u32..40, 0..39), wanted in 0u32..50) {
        let picked = pick_index(&taken, wanted);
        prop_assert!(picked > 0 && picked <= MAX_INDEX && !taken.contains(&picked));
        prop_assert!(picked == wanted || wanted == 0 || taken.contains(&wanted));
    }
}
