//! Whether an RDMA port can be used with the addresses of its link. Pure.

use std::net::IpAddr;

use super::gids::PortView;
use super::{Gid, PortState, Protocol};
use crate::netdev::Address;
use crate::netdev::address::{IFA_F_DADFAILED, IFA_F_OPTIMISTIC, IFA_F_TENTATIVE};

/// The type of a RoCE v2 GID, as the kernel writes it (`cma_configfs`, `ib_cache_gid_type_str`).
pub const ROCE_V2: &str = "RoCE v2";
/// Most GIDs that are kept of a port.
pub const KEPT_MAX: usize = 64;

/// A port and its link as they are now.
#[derive(Debug, Clone, Copy)]
pub struct Port<'a> {
    /// RDMA device as it is called in the pod.
    pub device: &'a str,
    /// From 1.
    pub number: u32,
    /// What is spoken on it.
    pub protocol: Protocol,
    /// The port.
    pub view: &'a PortView,
    /// Name of the link, where it has one.
    pub link: Option<&'a str>,
    /// The link's addresses.
    pub addresses: &'a [Address],
}

/// The GIDs that the port can be used by: those of the link's addresses first, each part in the order of the table.
///
/// # Errors
/// Why it can't be used yet, and where to look; for people.
pub fn judge(port: &Port<'_>) -> Result<Vec<Gid>, String> {
    let Port { device, number, protocol, view, link, .. } = *port;
    if view.state != PortState::Active {
        return Err(not_active(port));
    }
    if protocol == Protocol::InfiniBand && view.gids.is_empty() {
        return Err(format!("port {number} of {device} has no GID yet; see ibv_devinfo -v -d {device}"));
    }
    if protocol == Protocol::Roce {
        let lacking: Vec<String> = wanted(port.addresses)
            .into_iter()
            .filter(|ip| !view.gids.iter().any(|gid| is_of(gid, *ip, link)))
            .map(text)
            .collect();
        if !lacking.is_empty() {
            let link = link.unwrap_or("its link");
            let full = view.gids.len() >= super::gids::GIDS_MAX as usize;
            let full = if full { " (its table is full)" } else { "" };
            return Err(format!(
                "port {number} of {device} has no {ROCE_V2} GID{full} for {} of {link}; see ibv_devinfo -v -d {device} and \
                 `ip address show dev {link}` in the pod",
                lacking.join(", ")
            ));
        }
    }
    Ok(in_order(port))
}

fn not_active(port: &Port<'_>) -> String {
    let Port { device, number, protocol, view, link, .. } = *port;
    let what = match (protocol, view.state, link) {
        (Protocol::InfiniBand, PortState::Init | PortState::Armed, _) => {
            "does a subnet manager run, and does it reach the port?".to_owned()
        }
        (Protocol::InfiniBand, ..) | (_, _, None) => "is the cable plugged in, and the switch's port up?".to_owned(),
        (.., Some(link)) => format!("is {link} up in the pod, its cable plugged in, and the switch's port up?"),
    };
    format!("port {number} of {device} is {}: {what}", view.state)
}

/// The addresses that need a GID. One whose uniqueness is not known yet is left out: it may not be used, nor may one that somebody else
/// has; and the link-local ones, unless there are no others.
fn wanted(addresses: &[Address]) -> Vec<IpAddr> {
    let is_usable = |a: &&Address| {
        let tentative = a.flags & IFA_F_TENTATIVE != 0 && a.flags & IFA_F_OPTIMISTIC == 0;
        !tentative && a.flags & IFA_F_DADFAILED == 0
    };
    let (local, others): (Vec<IpAddr>, Vec<IpAddr>) =
        addresses.iter().filter(is_usable).map(|a| a.ip.to_canonical()).partition(is_link_local);
    if others.is_empty() { local } else { others }
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Whether it is the RoCE v2 GID of this address. The same address may be on another link of the RDMA device.
fn is_of(gid: &Gid, ip: IpAddr, link: Option<&str>) -> bool {
    let on_link = gid.link.is_none() || link.is_none() || gid.link.as_deref() == link;
    gid.kind == ROCE_V2 && gid.address() == ip && on_link
}

fn in_order(port: &Port<'_>) -> Vec<Gid> {
    let ips = wanted(port.addresses);
    let (mut first, rest): (Vec<Gid>, Vec<Gid>) =
        port.view.gids.iter().cloned().partition(|gid| ips.iter().any(|ip| is_of(gid, *ip, port.link)));
    first.extend(rest);
    first.truncate(KEPT_MAX);
    first
}

#[allow(clippy::needless_pass_by_value, reason = "for map")]
fn text(ip: IpAddr) -> String {
    ip.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdev::address::SCOPE_UNIVERSE;

    fn address(ip: &str, flags: u32) -> Address {
        let mut address: Address = serde_json::from_value(serde_json::json!({
            "ip": ip, "prefix_len": 24, "scope": SCOPE_UNIVERSE, "flags": flags, "valid_lifetime": 1, "preferred_lifetime": 1
        }))
        .unwrap();
        address.flags = flags;
        address
    }

    fn gid(index: u32, gid: &str, kind: &str, link: &str) -> Gid {
        Gid { index, gid: gid.parse().unwrap(), kind: kind.to_owned(), link: Some(link.to_owned()) }
    }

    fn table() -> Vec<Gid> {
        vec![
            gid(0, "fe80::1", "IB/RoCE v1", "net1"),
            gid(1, "fe80::1", ROCE_V2, "net1"),
            gid(2, "::ffff:10.0.0.5", "IB/RoCE v1", "net1"),
            gid(3, "::ffff:10.0.0.5", ROCE_V2, "net1"),
            gid(4, "::ffff:10.0.0.6", ROCE_V2, "net2"),
            gid(5, "fd00::5", ROCE_V2, "net1"),
        ]
    }

    fn view(state: PortState, gids: Vec<Gid>) -> PortView {
        PortView { state, link_layer: "Ethernet".to_owned(), rate: None, gids }
    }

    fn judged(protocol: Protocol, view: &PortView, addresses: &[Address]) -> Result<Vec<u32>, String> {
        let port = Port { device: "mlx5_0", number: 1, protocol, view, link: Some("net1"), addresses };
        judge(&port).map(|gids| gids.iter().map(|gid| gid.index).collect())
    }

    #[test]
    fn each_address_has_its_gid_and_those_come_first() {
        let view = view(PortState::Active, table());
        let addresses = [address("fd00::5", 0), address("10.0.0.5", 0), address("fe80::1", 0)];
        assert_eq!(judged(Protocol::Roce, &view, &addresses), Ok(vec![3, 5, 0, 1, 2, 4]));
        assert_eq!(judged(Protocol::Roce, &view, &[address("fe80::1", 0)]), Ok(vec![1, 0, 2, 3, 4, 5]), "there is no other");
        assert_eq!(judged(Protocol::Roce, &view, &[]), Ok(vec![0, 1, 2, 3, 4, 5]));
    }

    #[test]
    fn an_address_without_its_gid_is_named() {
        let view = view(PortState::Active, table());
        // 10.0.0.6 has one, but of another link; 10.0.0.7 none at all; a RoCE v1 one does not do.
        for lacking in ["10.0.0.6", "10.0.0.7", "fd00::6"] {
            let why = judged(Protocol::Roce, &view, &[address("10.0.0.5", 0), address(lacking, 0)]).unwrap_err();
            assert!(why.contains(&format!("no RoCE v2 GID for {lacking} of net1")), "{why}");
        }
        let mut v1 = view.clone();
        v1.gids.truncate(3);
        assert!(judged(Protocol::Roce, &v1, &[address("10.0.0.5", 0)]).is_err());
        assert!(judged(Protocol::Iwarp, &v1, &[address("10.0.0.5", 0)]).is_ok(), "iWARP has no such GIDs");
    }

    #[test]
    fn an_address_that_may_not_be_used_yet_is_not_waited_for() {
        let view = view(PortState::Active, table());
        for flags in [IFA_F_TENTATIVE, IFA_F_DADFAILED] {
            let addresses = [address("10.0.0.5", 0), address("fd00::7", flags)];
            assert_eq!(judged(Protocol::Roce, &view, &addresses).map(|gids| gids[0]), Ok(3));
        }
        let optimistic = [address("fd00::7", IFA_F_TENTATIVE | IFA_F_OPTIMISTIC)];
        assert!(judged(Protocol::Roce, &view, &optimistic).is_err());
    }

    #[test]
    fn a_port_that_is_not_active_says_where_to_look() {
        for (protocol, state, words) in [
            (Protocol::Roce, PortState::Down, "port 1 of mlx5_0 is DOWN: is net1 up in the pod"),
            (Protocol::InfiniBand, PortState::Init, "is INIT: does a subnet manager run"),
            (Protocol::InfiniBand, PortState::Down, "is DOWN: is the cable plugged in"),
            (Protocol::Other, PortState::Other(9), "is state 9"),
        ] {
            let why = judged(protocol, &view(state, table()), &[]).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        assert!(judged(Protocol::InfiniBand, &view(PortState::Active, Vec::new()), &[]).unwrap_err().contains("no GID"));
    }

    #[test]
    fn not_more_is_kept_than_is_of_use() {
        let mut gids: Vec<Gid> = (0..200).map(|n| gid(n, "fe80::2", "IB/RoCE v1", "net1")).collect();
        gids.push(gid(200, "::ffff:10.0.0.5", ROCE_V2, "net1"));
        let kept = judged(Protocol::Roce, &view(PortState::Active, gids), &[address("10.0.0.5", 0)]).unwrap();
        assert_eq!((kept.len(), kept[0]), (KEPT_MAX, 200));
    }
}
