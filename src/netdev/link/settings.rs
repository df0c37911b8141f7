//! Properties of a link that one message sets together, and VRF links.

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVrf, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use serde::{Deserialize, Serialize};

use super::{IFF_ALLMULTI, IFF_PROMISC};
use crate::netlink::Request;

/// `IFLA_IFALIAS`, `linux/if_link.h`.
const IFLA_IFALIAS: u16 = 20;

/// How large the packets are that the stack hands to the link in one piece (GSO) and puts together of what the link received (GRO),
/// bytes. None: the kernel does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketSizes {
    /// `IFLA_GSO_MAX_SIZE`. Setting it to 65536 or less sets `gso_ipv4` as well (`netif_set_gso_max_size`, `net/core/dev.c`).
    #[serde(default)]
    pub gso: Option<u32>,
    /// `IFLA_GRO_MAX_SIZE`. Setting it to 65536 or less sets `gro_ipv4` as well (`netif_set_gro_max_size`).
    #[serde(default)]
    pub gro: Option<u32>,
    /// `IFLA_GSO_IPV4_MAX_SIZE`.
    #[serde(default)]
    pub gso_ipv4: Option<u32>,
    /// `IFLA_GRO_IPV4_MAX_SIZE`.
    #[serde(default)]
    pub gro_ipv4: Option<u32>,
}

impl PacketSizes {
    /// Each with its name in a configuration.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Option<u32>); 4] {
        [("gsoMaxSize", self.gso), ("groMaxSize", self.gro), ("gsoIPv4MaxSize", self.gso_ipv4), ("groIPv4MaxSize", self.gro_ipv4)]
    }

    /// The kernel takes them in the order of its own code, the IPv4 ones last, whatever the order here.
    fn attributes(&self) -> impl Iterator<Item = LinkAttribute> {
        let all = [
            self.gso.map(LinkAttribute::GsoMaxSize),
            self.gro.map(LinkAttribute::GroMaxSize),
            self.gso_ipv4.map(LinkAttribute::GsoIpv4MaxSize),
            self.gro_ipv4.map(LinkAttribute::GroIpv4MaxSize),
        ];
        all.into_iter().flatten()
    }
}

/// What is to be set of a link. None: it stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkSettings {
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Packet sizes.
    #[serde(default)]
    pub sizes: PacketSizes,
    /// `IFLA_TXQLEN`, packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_queue_len: Option<u32>,
    /// `IFLA_IFALIAS`; an empty one takes the alias away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// `IFLA_GROUP`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// `IFF_PROMISC`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promisc: Option<bool>,
    /// `IFF_ALLMULTI`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allmulti: Option<bool>,
}

impl LinkSettings {
    /// Whether there is nothing to set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Each with its name in a configuration and its value, for people.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let number = |name: &str, value: Option<u32>| value.map(|v| format!("{name} {v}"));
        let switch = |name: &str, value: Option<bool>| value.map(|v| format!("{name} {}", if v { "on" } else { "off" }));
        let sizes = self.sizes.named().into_iter().filter_map(|(name, value)| number(name, value));
        let rest = [
            number("mtu", self.mtu),
            number("txQueueLen", self.tx_queue_len),
            self.alias.as_ref().map(|alias| format!("alias {alias:?}")),
            number("group", self.group),
            switch("promisc", self.promisc),
            switch("allmulti", self.allmulti),
        ];
        sizes.chain(rest.into_iter().flatten()).collect()
    }

    fn flags(&self) -> (LinkFlags, LinkFlags) {
        let bits = [(IFF_PROMISC, self.promisc), (IFF_ALLMULTI, self.allmulti)];
        let sum = |of: fn(bool) -> bool| bits.iter().filter(|(_, v)| v.is_some_and(of)).fold(0, |sum, (bit, _)| sum | bit);
        (LinkFlags::from_bits_retain(sum(|_| true)), LinkFlags::from_bits_retain(sum(|on| on)))
    }
}

/// The one message that sets everything in `settings`. The kernel applies them one after the other: after a refusal some are set.
#[must_use]
pub fn set_request(index: u32, settings: &LinkSettings) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    (message.header.change_mask, message.header.flags) = settings.flags();
    message.attributes.extend(settings.mtu.map(LinkAttribute::Mtu));
    message.attributes.extend(settings.sizes.attributes());
    message.attributes.extend(settings.tx_queue_len.map(LinkAttribute::TxQueueLen));
    message.attributes.extend(settings.alias.as_deref().map(alias));
    message.attributes.extend(settings.group.map(LinkAttribute::Group));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// Without the final zero: only an empty attribute removes an alias.
fn alias(text: &str) -> LinkAttribute {
    LinkAttribute::Other(DefaultNla::new(IFLA_IFALIAS, text.as_bytes().to_vec()))
}

/// The request that makes the VRF `name` with `table`, up, under `index`.
#[must_use]
pub fn vrf_request(index: u32, name: &str, table: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.change_mask = LinkFlags::Up;
    message.header.flags = LinkFlags::Up;
    let data = InfoData::Vrf(vec![InfoVrf::TableId(table)]);
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Vrf), LinkInfo::Data(data)]));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: NLM_F_CREATE | NLM_F_EXCL }
}

/// The request that enslaves the link to `master`. The kernel takes a link that is up down and up again for a VRF, and so drops its
/// IPv6 addresses.
#[must_use]
pub fn enslave_request(index: u32, master: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::Controller(master));
    Request { message: RouteNetlinkMessage::NewLink(message), flags: 0 }
}

/// The request that deletes a link which is made of nothing but software.
#[must_use]
pub fn delete_request(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Request { message: RouteNetlinkMessage::DelLink(message), flags: 0 }
}
