//! Target `dhcp`: any bytes as a packet of the link, and as a message in a packet that is sound.

use super::lease::Lease;
use super::message::Reply;
use super::timing::{self, State};
use super::{Moment, frame};
use crate::netdev::LinkAddress;

pub(crate) fn dhcp(data: &[u8]) {
    if let Some(message) = frame::decode(data) {
        look(message);
    }
    look(data);
}

fn look(message: &[u8]) {
    let Ok(reply) = Reply::parse(message) else { return };
    assert!(reply.text().is_none_or(|text| !text.chars().any(char::is_control)));
    let asked = Moment { boot_ms: 1_000, unix_ms: 1 };
    let lease = match Lease::of(&reply, LinkAddress::new(vec![2, 0, 0, 0, 0, 1]), asked) {
        Ok(lease) => lease,
        Err(refused) => {
            assert!(!refused.to_string().contains('\n'));
            return;
        }
    };
    assert!((8..=32).contains(&lease.prefix_len) && lease.mtu.is_none_or(|mtu| mtu >= 68));
    assert!(!lease.address.is_unspecified() && !lease.address.is_loopback() && !lease.address.is_multicast());
    assert!(lease.routes.len() <= 65);
    for route in &lease.routes {
        assert!(matches!(route.destination.prefix_len(), 0 | 8..=32) && route.destination == route.destination.trunc());
    }
    assert!(lease.renew_seconds <= lease.rebind_seconds && lease.rebind_seconds <= lease.lease_seconds);
    let end = Moment { boot_ms: 1_000 + 1_000 * u64::from(lease.lease_seconds), unix_ms: 1 };
    assert_eq!(timing::state(&lease, end) == State::Ended, !lease.is_forever());
    let _ = (timing::first(&lease, end, 7), timing::retry(&lease, end, 1, 7), timing::retry(&lease, asked, 1, 7));
    let text = serde_json::to_string(&lease).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(serde_json::from_str::<Lease>(&text).ok(), Some(lease));
}
