//! What a server lent, checked. Pure.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use super::Moment;
use super::message::{Reply, option};
use crate::netdev::LinkAddress;

/// Least prefix length, of the subnet and of a route other than the default one. A shorter one takes in half of the Internet, and
/// with it what should go by the pod's own default route.
const PREFIX_MIN: u8 = 8;
/// Least MTU of IPv4, bytes (RFC 791).
const MTU_MIN: u16 = 68;
/// Most static routes.
const ROUTES_MAX: usize = 64;
/// Most routers.
const ROUTERS_MAX: usize = 16;
/// A lease time that never ends, seconds (RFC 2131, section 3.3).
const FOREVER: u32 = u32::MAX;

/// A route that the server gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StaticRoute {
    /// Where to; `0.0.0.0/0` is the default route.
    pub destination: Ipv4Net,
    /// By which router; none: straight to the neighbour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Ipv4Addr>,
}

/// An address for a while, and what goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// The address.
    pub address: Ipv4Addr,
    /// Of its subnet (option 1).
    pub prefix_len: u8,
    /// Who lent it (option 54).
    pub server: Ipv4Addr,
    /// Link-layer address that the answer came from: the server's, or of the relay on the way to it.
    pub via: LinkAddress,
    /// Routes. Those of option 121 where the server sent it, which then stands for routers and option 33 too (RFC 3442); else those of
    /// option 33, and a default route by the first router (option 3).
    #[serde(default)]
    pub routes: Vec<StaticRoute>,
    /// Option 26, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// How long it lasts (option 51), seconds; `u32::MAX` for ever.
    pub lease_seconds: u32,
    /// When to ask its server to renew it (T1, option 58), seconds after it was obtained.
    pub renew_seconds: u32,
    /// When to ask any server (T2, option 59), seconds after it was obtained.
    pub rebind_seconds: u32,
    /// When it was asked for, which is what the times count from: milliseconds since the machine was booted.
    pub obtained_boot_ms: u64,
    /// The same since 1970, for people.
    pub obtained_unix_ms: u64,
}

/// Why an answer is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {why}")]
pub struct Refused {
    /// Which part of it.
    pub what: String,
    /// What is wrong with that.
    pub why: String,
}

fn refused(what: impl Into<String>, why: impl Into<String>) -> Refused {
    Refused { what: what.into(), why: why.into() }
}

impl Lease {
    /// What the answer lends, if all of it makes sense.
    ///
    /// # Errors
    /// The first thing that does not.
    pub(super) fn of(reply: &Reply, via: LinkAddress, asked: Moment) -> Result<Self, Refused> {
        let address = reply.address;
        if let Some(why) = not_one_host(address) {
            return Err(refused(format!("address {address}"), why));
        }
        let prefix_len = prefix_len(reply, address)?;
        let server =
            address_in(reply, option::SERVER)?.ok_or_else(|| refused("the server's address (option 54)", "is missing"))?;
        if let Some(why) = not_one_host(server) {
            return Err(refused(format!("the server's address {server} (option 54)"), why));
        }
        let (lease_seconds, renew_seconds, rebind_seconds) = times(reply)?;
        Ok(Self {
            address,
            prefix_len,
            server,
            via,
            routes: routes(reply)?,
            mtu: mtu(reply)?,
            lease_seconds,
            renew_seconds,
            rebind_seconds,
            obtained_boot_ms: asked.boot_ms,
            obtained_unix_ms: asked.unix_ms,
        })
    }

    /// Whether it never ends.
    #[must_use]
    pub fn is_forever(&self) -> bool {
        self.lease_seconds == FOREVER
    }

    /// Seconds that are left of it; `u32::MAX` for ever.
    #[must_use]
    pub fn seconds_left(&self, now: Moment) -> u32 {
        if self.is_forever() {
            return FOREVER;
        }
        let end = self.obtained_boot_ms.saturating_add(u64::from(self.lease_seconds) * 1000);
        u32::try_from(end.saturating_sub(now.boot_ms) / 1000).unwrap_or(FOREVER - 1)
    }
}

/// Why `ip` can't be that of a host on the link; none when it can.
fn not_one_host(ip: Ipv4Addr) -> Option<&'static str> {
    match ip.octets()[0] {
        0 => Some("is not an address (0.0.0.0/8)"),
        127 => Some("is a loopback address"),
        224..=239 => Some("is a multicast address"),
        240..=255 => Some("is reserved (240.0.0.0/4) or the broadcast address"),
        _ => None,
    }
}

fn prefix_len(reply: &Reply, address: Ipv4Addr) -> Result<u8, Refused> {
    let mask = address_in(reply, option::MASK)?.ok_or_else(|| refused("the subnet mask (option 1)", "is missing"))?;
    let what = || format!("subnet mask {mask} (option 1)");
    let net = Ipv4Net::with_netmask(address, mask).map_err(|_| refused(what(), "has a hole in it"))?;
    if net.prefix_len() < PREFIX_MIN {
        return Err(refused(what(), "makes half of the Internet a neighbour; the shortest that is taken is 255.0.0.0"));
    }
    let is_end = net.prefix_len() < 31 && (address == net.network() || address == net.broadcast());
    if is_end {
        return Err(refused(format!("address {net}"), "is its subnet's own, or broadcast, address"));
    }
    Ok(net.prefix_len())
}

/// Lease time, T1 and T2, in this order. T1 and T2 that make no sense are those of RFC 2131, section 4.4.5.
fn times(reply: &Reply) -> Result<(u32, u32, u32), Refused> {
    let lease = number(reply, option::TIME)?.ok_or_else(|| refused("the lease time (option 51)", "is missing"))?;
    if lease == 0 {
        return Err(refused("a lease time of 0 s (option 51)", "is none"));
    }
    let usual = (lease / 2, lease - lease / 8 - 1);
    let renew = number(reply, option::RENEW)?.unwrap_or(usual.0);
    let rebind = number(reply, option::REBIND)?.unwrap_or(usual.1);
    let (renew, rebind) = if renew > 0 && renew <= rebind && rebind <= lease { (renew, rebind) } else { usual };
    Ok((lease, renew, rebind))
}

fn mtu(reply: &Reply) -> Result<Option<u16>, Refused> {
    let Some(bytes) = reply.option(option::MTU) else { return Ok(None) };
    let mtu = <[u8; 2]>::try_from(bytes).map(u16::from_be_bytes).map_err(|_| bad_length("the MTU", option::MTU, bytes))?;
    if mtu < MTU_MIN {
        return Err(refused(format!("MTU {mtu} (option 26)"), format!("is below {MTU_MIN}, the least of IPv4")));
    }
    Ok(Some(mtu))
}

fn routes(reply: &Reply) -> Result<Vec<StaticRoute>, Refused> {
    let found = match reply.option(option::CLASSLESS_ROUTES) {
        Some(bytes) => classless(bytes)?,
        None => classful(reply)?,
    };
    if found.len() > ROUTES_MAX {
        return Err(refused(format!("{} static routes", found.len()), format!("are more than {ROUTES_MAX}")));
    }
    match found.iter().find_map(|route| bad_route(route).map(|why| (route, why))) {
        Some((route, why)) => Err(refused(format!("static route {}", route.destination), why)),
        None => Ok(found),
    }
}

/// Option 121 (RFC 3442): each a length, as many bytes of the destination as that needs, and the router, 0.0.0.0 for none.
fn classless(mut bytes: &[u8]) -> Result<Vec<StaticRoute>, Refused> {
    let bad = |why: &str| refused("the classless static routes (option 121)", why);
    let mut found = Vec::new();
    while let [length, rest @ ..] = bytes {
        let used = usize::from(length.div_ceil(8));
        if *length > 32 {
            return Err(bad("have a destination of more than 32 bits"));
        }
        let (Some(destination), Some(router)) = (rest.get(..used), rest.get(used..used + 4)) else {
            return Err(bad("end in the middle of one"));
        };
        let mut octets = [0; 4];
        octets[..used].copy_from_slice(destination);
        let destination = Ipv4Net::new(Ipv4Addr::from(octets), *length).map_err(|_| bad("have a bad destination"))?.trunc();
        let router = ipv4(router);
        found.push(StaticRoute { destination, gateway: Some(router).filter(|router| !router.is_unspecified()) });
        bytes = &rest[used + 4..];
    }
    Ok(found)
}

/// Option 33 (a host or a network of before CIDR, and a router, each), and a default route by the first router.
fn classful(reply: &Reply) -> Result<Vec<StaticRoute>, Refused> {
    let mut found = Vec::new();
    let pairs = addresses(reply, "the static routes", option::STATIC_ROUTES)?;
    if pairs.len() % 2 != 0 {
        return Err(refused("the static routes (option 33)", "end in the middle of one"));
    }
    for pair in pairs.chunks_exact(2) {
        let destination = Ipv4Net::new(pair[0], class_len(pair[0])).unwrap_or_default();
        found.push(StaticRoute { destination, gateway: Some(pair[1]) });
    }
    let routers = addresses(reply, "the routers", option::ROUTER)?;
    if routers.len() > ROUTERS_MAX {
        return Err(refused(format!("{} routers (option 3)", routers.len()), format!("are more than {ROUTERS_MAX}")));
    }
    found.extend(routers.first().map(|router| StaticRoute { destination: Ipv4Net::default(), gateway: Some(*router) }));
    Ok(found)
}

/// The prefix length of an address's class (RFC 950), where its host part is zero; else it is a host's.
fn class_len(ip: Ipv4Addr) -> u8 {
    let length = match ip.octets()[0] {
        0..=127 => 8,
        128..=191 => 16,
        _ => 24,
    };
    let host_part = u32::from(ip) << length;
    if host_part == 0 { length } else { 32 }
}

fn bad_route(route: &StaticRoute) -> Option<String> {
    let (destination, length) = (route.destination.network(), route.destination.prefix_len());
    if length > 0 && length < PREFIX_MIN {
        return Some(format!("is neither the default route nor at least {PREFIX_MIN} bits long"));
    }
    if length > 0
        && let Some(why) = not_one_host(destination)
    {
        return Some(why.to_owned());
    }
    route.gateway.and_then(|gateway| not_one_host(gateway).map(|why| format!("has router {gateway}, which {why}")))
}

fn ipv4(bytes: &[u8]) -> Ipv4Addr {
    <[u8; 4]>::try_from(bytes).map_or(Ipv4Addr::UNSPECIFIED, Ipv4Addr::from)
}

fn bad_length(what: &str, code: u8, bytes: &[u8]) -> Refused {
    refused(format!("{what} (option {code})"), format!("can't have {} bytes", bytes.len()))
}

fn addresses(reply: &Reply, what: &str, code: u8) -> Result<Vec<Ipv4Addr>, Refused> {
    let Some(bytes) = reply.option(code) else { return Ok(Vec::new()) };
    if !bytes.len().is_multiple_of(4) {
        return Err(bad_length(what, code, bytes));
    }
    Ok(bytes.chunks_exact(4).map(ipv4).collect())
}

fn address_in(reply: &Reply, code: u8) -> Result<Option<Ipv4Addr>, Refused> {
    match reply.option(code) {
        None => Ok(None),
        Some(bytes) if bytes.len() == 4 => Ok(Some(ipv4(bytes))),
        Some(bytes) => Err(bad_length("an address", code, bytes)),
    }
}

fn number(reply: &Reply, code: u8) -> Result<Option<u32>, Refused> {
    let Some(bytes) = reply.option(code) else { return Ok(None) };
    <[u8; 4]>::try_from(bytes).map(|bytes| Some(u32::from_be_bytes(bytes))).map_err(|_| bad_length("a time", code, bytes))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dhcp::message::{Kind, tests::reply};

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 5);

    /// What every sound answer has.
    const SOUND: [(u8, &[u8]); 3] =
        [(option::MASK, &[255, 255, 255, 0]), (option::SERVER, &[10, 9, 0, 1]), (option::TIME, &[0, 0, 0, 200])];

    pub(crate) fn lease_of(address: Ipv4Addr, options: &[(u8, &[u8])]) -> Result<Lease, Refused> {
        let parsed = Reply::parse(&reply(Kind::Ack, address, options)).unwrap();
        let via = LinkAddress::new(vec![2, 0, 0, 0, 0, 1]);
        Lease::of(&parsed, via, Moment { boot_ms: 1_000_000, unix_ms: 1 })
    }

    /// A sound answer in which these options are added, or stand in place of what is in [`SOUND`].
    fn with(options: &[(u8, &[u8])]) -> Result<Lease, Refused> {
        let kept = SOUND.iter().filter(|(code, _)| !options.iter().any(|(other, _)| other == code));
        lease_of(ADDRESS, &kept.chain(options).copied().collect::<Vec<_>>())
    }

    fn shown(lease: &Lease) -> Vec<String> {
        let via = |r: &StaticRoute| r.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
        lease.routes.iter().map(|r| format!("{}{}", r.destination, via(r))).collect()
    }

    #[test]
    fn a_plain_lease_has_the_usual_times() {
        let lease = with(&[]).unwrap();
        assert_eq!((lease.address, lease.prefix_len, lease.server), (ADDRESS, 24, Ipv4Addr::new(10, 9, 0, 1)));
        assert_eq!((lease.lease_seconds, lease.renew_seconds, lease.rebind_seconds), (200, 100, 174));
        assert_eq!(lease.seconds_left(Moment { boot_ms: 1_050_500, unix_ms: 0 }), 149);
        assert_eq!(lease.seconds_left(Moment { boot_ms: 9_000_000, unix_ms: 0 }), 0);
        let forever = with(&[(option::TIME, &[255; 4])]).unwrap();
        assert_eq!(forever.seconds_left(Moment { boot_ms: u64::MAX, unix_ms: 0 }), u32::MAX);
        let text = serde_json::to_string(&lease).unwrap();
        assert_eq!(serde_json::from_str::<Lease>(&text).unwrap(), lease);
    }

    #[test]
    fn times_of_the_server_count_if_they_are_in_order() {
        let seconds = |t1: u8, t2: u8| {
            let lease = with(&[(option::RENEW, &[0, 0, 0, t1]), (option::REBIND, &[0, 0, 0, t2])]).unwrap();
            (lease.renew_seconds, lease.rebind_seconds)
        };
        assert_eq!(seconds(60, 120), (60, 120));
        for (t1, t2) in [(0, 120), (120, 60), (60, 201)] {
            assert_eq!(seconds(t1, t2), (100, 174), "{t1} {t2}");
        }
    }

    #[test]
    fn classless_routes_stand_for_routers_and_old_routes() {
        let old: [(u8, &[u8]); 2] = [
            (option::ROUTER, &[10, 9, 0, 1, 10, 9, 0, 2]),
            (option::STATIC_ROUTES, &[10, 77, 0, 1, 10, 9, 0, 3, 172, 16, 0, 0, 10, 9, 0, 4]),
        ];
        let lease = with(&old).unwrap();
        assert_eq!(shown(&lease), ["10.77.0.1/32 via 10.9.0.3", "172.16.0.0/16 via 10.9.0.4", "0.0.0.0/0 via 10.9.0.1"]);
        let classless: &[u8] =
            &[24, 10, 20, 30, 10, 9, 0, 7, 32, 10, 9, 1, 1, 0, 0, 0, 0, 0, 10, 9, 0, 9, 12, 172, 31, 10, 9, 0, 7];
        let lease = with(&[old[0], old[1], (option::CLASSLESS_ROUTES, classless)]).unwrap();
        let expected = ["10.20.30.0/24 via 10.9.0.7", "10.9.1.1/32", "0.0.0.0/0 via 10.9.0.9", "172.16.0.0/12 via 10.9.0.7"];
        assert_eq!(shown(&lease), expected);
    }

    #[test]
    fn a_hostile_answer_is_refused_by_name() {
        let many: Vec<u8> = (0..65).flat_map(|n| [32, 10, 20, 0, n, 10, 9, 0, 1]).collect();
        let routers = [10u8, 9, 0, 1].repeat(17);
        let cases: &[(&str, u8, &[u8])] = &[
            ("subnet mask 255.0.255.0 (option 1) has a hole", option::MASK, &[255, 0, 255, 0]),
            ("subnet mask 128.0.0.0 (option 1) makes half", option::MASK, &[128, 0, 0, 0]),
            ("an address (option 1) can't have 3 bytes", option::MASK, &[255, 255, 255]),
            ("(option 54) is a multicast", option::SERVER, &[224, 0, 0, 1]),
            ("lease time of 0 s", option::TIME, &[0; 4]),
            ("a time (option 51) can't have 2 bytes", option::TIME, &[0; 2]),
            ("MTU 67 (option 26) is below 68", option::MTU, &[0, 67]),
            ("the MTU (option 26) can't have 1 bytes", option::MTU, &[9]),
            ("65 static routes are more than 64", option::CLASSLESS_ROUTES, &many),
            ("17 routers (option 3) are more than 16", option::ROUTER, &routers),
            ("the routers (option 3) can't have 5 bytes", option::ROUTER, &[1; 5]),
            ("static route 0.0.0.0/0 has router 127.0.0.1", option::ROUTER, &[127, 0, 0, 1]),
            ("(option 33) end in the middle", option::STATIC_ROUTES, &[10, 1, 0, 0]),
            ("more than 32 bits", option::CLASSLESS_ROUTES, &[33, 10, 0, 0, 0, 0, 10, 9, 0, 1]),
            ("(option 121) end in the middle", option::CLASSLESS_ROUTES, &[24, 10, 0, 0, 10]),
            ("128.0.0.0/1 is neither the default", option::CLASSLESS_ROUTES, &[1, 128, 10, 9, 0, 1]),
            ("static route 127.0.0.0/8 is a loopback", option::CLASSLESS_ROUTES, &[8, 127, 10, 9, 0, 1]),
            ("static route 224.0.0.0/8 is a multicast", option::CLASSLESS_ROUTES, &[8, 224, 10, 9, 0, 1]),
            ("has router 240.0.0.1", option::CLASSLESS_ROUTES, &[8, 10, 240, 0, 0, 1]),
        ];
        for (text, code, value) in cases {
            let error = with(&[(*code, value)]).unwrap_err().to_string();
            assert!(error.contains(text), "{text}: {error}");
        }
        for bad in ["0.0.0.0", "127.0.0.1", "224.0.0.9", "255.255.255.255", "10.9.0.0", "10.9.0.255"] {
            let error = lease_of(bad.parse().unwrap(), &SOUND).unwrap_err().to_string();
            assert!(error.contains(&format!("address {bad}")), "{error}");
        }
        for missing in 0..SOUND.len() {
            let options: Vec<_> = SOUND.iter().enumerate().filter(|(n, _)| *n != missing).map(|(_, o)| *o).collect();
            let error = lease_of(ADDRESS, &options).unwrap_err().to_string();
            assert!(error.ends_with("is missing"), "{error}");
        }
    }

    #[test]
    fn a_subnet_of_one_or_two_has_no_ends() {
        for mask in [[255, 255, 255, 254], [255, 255, 255, 255]] {
            assert!(with(&[(option::MASK, &mask)]).is_ok(), "{mask:?}");
        }
    }
}
