//! What a physical function sets for its virtual ones: read and written by its link (`IFLA_VFINFO_LIST`).

use std::fmt;
use std::time::Instant;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage};
use serde::{Deserialize, Serialize};

use super::LinkAddress;
use crate::netlink::decode::{attributes, find, read_u32};
use crate::netlink::{NetlinkError, Request, RouteSocket};
use crate::rdma::Guid;

// linux/if_link.h.
const IFLA_VFINFO_LIST: u16 = 22;
/// In `IFLA_VFINFO_LIST`.
const IFLA_VF_INFO: u16 = 1;
// In `IFLA_VF_INFO`; each value begins with the function's number.
const IFLA_VF_MAC: u16 = 1;
const IFLA_VF_VLAN: u16 = 2;
const IFLA_VF_SPOOFCHK: u16 = 4;
const IFLA_VF_LINK_STATE: u16 = 5;
const IFLA_VF_RATE: u16 = 6;
const IFLA_VF_TRUST: u16 = 9;
const IFLA_VF_IB_NODE_GUID: u16 = 10;
const IFLA_VF_IB_PORT_GUID: u16 = 11;
const IFLA_VF_VLAN_LIST: u16 = 12;
/// In `IFLA_VF_VLAN_LIST`.
const IFLA_VF_VLAN_INFO: u16 = 1;
/// `NLA_F_NESTED`, `linux/netlink.h`.
const NESTED: u16 = 1 << 15;
/// `sizeof(struct ifinfomsg)`, `linux/rtnetlink.h`.
const HEADER: usize = 16;
/// Size of the address in `struct ifla_vf_mac` (`MAX_ADDR_LEN`), `linux/if_link.h`, bytes.
const MAX_ADDRESS: usize = 32;
/// What the kernel fills in for a setting that the driver does not tell.
const NOT_TOLD: u32 = u32::MAX;
/// `ETH_P_8021Q`, `linux/if_ether.h`.
pub const ETH_P_8021Q: u16 = 0x8100;

/// The tag that a function's frames get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfVlan {
    /// 1 to 4094; 0 none.
    pub id: u16,
    /// Priority, 0 to 7.
    pub qos: u8,
    /// `ETH_P_8021Q` or `ETH_P_8021AD`.
    pub protocol: u16,
}

/// Limits of what a function sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VfRate {
    /// Mbit/s; 0 none.
    pub min: u32,
    /// Mbit/s; 0 no limit.
    pub max: u32,
}

/// Settings of one virtual function, as the kernel groups them: none where the driver does not tell, or where nothing is to be set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VfSettings {
    /// Link-layer address that the physical function gives it; all zero for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<LinkAddress>,
    /// The tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VfVlan>,
    /// The limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<VfRate>,
    /// Frames with another source address are dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoof_check: Option<bool>,
    /// `IFLA_VF_LINK_STATE_*`: 0 auto, 1 enable, 2 disable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_state: Option<u32>,
    /// The function may change its address and be promiscuous.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<bool>,
    /// GUID of the function as an InfiniBand node; zero for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_guid: Option<Guid>,
    /// GUID of its port; zero for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_guid: Option<Guid>,
}

/// One group of [`VfSettings`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VfSetting {
    /// See [`VfSettings::mac`].
    Mac(LinkAddress),
    /// See [`VfSettings::vlan`].
    Vlan(VfVlan),
    /// See [`VfSettings::rate`].
    Rate(VfRate),
    /// See [`VfSettings::spoof_check`].
    SpoofCheck(bool),
    /// See [`VfSettings::link_state`].
    LinkState(u32),
    /// See [`VfSettings::trust`].
    Trust(bool),
    /// See [`VfSettings::node_guid`].
    NodeGuid(Guid),
    /// See [`VfSettings::port_guid`].
    PortGuid(Guid),
}

impl VfSettings {
    /// What is set, in the order in which it is written.
    #[must_use]
    pub fn all(&self) -> Vec<VfSetting> {
        let settings = [
            self.mac.clone().map(VfSetting::Mac),
            self.vlan.map(VfSetting::Vlan),
            self.rate.map(VfSetting::Rate),
            self.spoof_check.map(VfSetting::SpoofCheck),
            self.link_state.map(VfSetting::LinkState),
            self.trust.map(VfSetting::Trust),
            self.node_guid.map(VfSetting::NodeGuid),
            self.port_guid.map(VfSetting::PortGuid),
        ];
        settings.into_iter().flatten().collect()
    }

    /// The setting of the same kind as `other`.
    #[must_use]
    pub fn like(&self, other: &VfSetting) -> Option<VfSetting> {
        self.all().into_iter().find(|setting| setting.name() == other.name())
    }
}

impl VfSetting {
    /// As the configuration calls it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mac(_) => "mac",
            Self::Vlan(_) => "vlan",
            Self::Rate(_) => "rate",
            Self::SpoofCheck(_) => "spoofCheck",
            Self::LinkState(_) => "linkState",
            Self::Trust(_) => "trust",
            Self::NodeGuid(_) => "nodeGuid",
            Self::PortGuid(_) => "portGuid",
        }
    }

    /// The attribute that sets it.
    fn attribute(&self, vf: u32) -> Vec<u8> {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
        match self {
            Self::Mac(mac) => {
                let mut value = words(&[vf]);
                value.extend(mac.bytes());
                value.resize(4 + MAX_ADDRESS, 0);
                attribute(IFLA_VF_MAC, &value)
            }
            Self::Vlan(vlan) => {
                let mut value = words(&[vf, vlan.id.into(), vlan.qos.into()]);
                value.extend(vlan.protocol.to_be_bytes());
                value.extend([0; 2]);
                attribute(IFLA_VF_VLAN_LIST | NESTED, &attribute(IFLA_VF_VLAN_INFO, &value))
            }
            Self::Rate(rate) => attribute(IFLA_VF_RATE, &words(&[vf, rate.min, rate.max])),
            Self::SpoofCheck(on) => attribute(IFLA_VF_SPOOFCHK, &words(&[vf, u32::from(*on)])),
            Self::LinkState(state) => attribute(IFLA_VF_LINK_STATE, &words(&[vf, *state])),
            Self::Trust(on) => attribute(IFLA_VF_TRUST, &words(&[vf, u32::from(*on)])),
            Self::NodeGuid(guid) => attribute(IFLA_VF_IB_NODE_GUID, &guid_value(vf, *guid)),
            Self::PortGuid(guid) => attribute(IFLA_VF_IB_PORT_GUID, &guid_value(vf, *guid)),
        }
    }
}

impl fmt::Display for VfSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_off = |on: &bool| if *on { "on" } else { "off" };
        match self {
            Self::Mac(mac) => write!(f, "mac {mac}"),
            Self::Vlan(vlan) => write!(f, "vlan {} qos {} protocol {:#06x}", vlan.id, vlan.qos, vlan.protocol),
            Self::Rate(rate) => write!(f, "rate {} to {} Mbit/s", rate.min, rate.max),
            Self::SpoofCheck(on) => write!(f, "spoofCheck {}", on_off(on)),
            Self::LinkState(state) => {
                write!(f, "linkState {}", ["auto", "enable", "disable"].get(*state as usize).copied().unwrap_or("unknown"))
            }
            Self::Trust(on) => write!(f, "trust {}", on_off(on)),
            Self::NodeGuid(guid) => write!(f, "nodeGuid {guid}"),
            Self::PortGuid(guid) => write!(f, "portGuid {guid}"),
        }
    }
}

/// Reads the settings of function number `vf` of the physical function whose link is `pf`; none when it has no such function.
///
/// # Errors
/// As [`RouteSocket::get_raw`].
pub fn read(socket: &mut RouteSocket, pf: u32, vf: u32, deadline: Instant) -> Result<Option<VfSettings>, NetlinkError> {
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::Vf, LinkExtentMask::SkipStats]));
    let reply = socket.get_raw(RouteNetlinkMessage::GetLink(message), deadline)?;
    Ok(parse(&reply.payload, vf))
}

/// The request that sets `settings` of function number `vf`, each in a block of its own. The kernel carries them out in this order and
/// stops at the first that the driver refuses: read back what is set.
#[must_use]
pub fn set_request(pf: u32, vf: u32, settings: &[VfSetting]) -> Request {
    let blocks = settings.iter().flat_map(|setting| attribute(IFLA_VF_INFO | NESTED, &setting.attribute(vf))).collect();
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message.attributes.push(LinkAttribute::Other(DefaultNla::new(IFLA_VFINFO_LIST | NESTED, blocks)));
    Request { message: RouteNetlinkMessage::SetLink(message), flags: 0 }
}

/// The settings of function number `vf` in an `RTM_NEWLINK`.
fn parse(payload: &[u8], vf: u32) -> Option<VfSettings> {
    // An address has as many bytes as the physical function's.
    const IFLA_ADDRESS: u16 = 1;
    let link = payload.get(HEADER..)?;
    let length = find(link, IFLA_ADDRESS).map_or(6, <[u8]>::len).clamp(6, MAX_ADDRESS);
    let blocks = attributes(find(link, IFLA_VFINFO_LIST)?).filter(|(kind, _)| *kind == IFLA_VF_INFO);
    let block = blocks.map(|(_, block)| block).find(|block| find(block, IFLA_VF_MAC).and_then(|v| read_u32(v, 0)) == Some(vf))?;
    let word = |kind, at| find(block, kind).and_then(|value| read_u32(value, at)).filter(|word| *word != NOT_TOLD);
    let switch = |kind| word(kind, 4).map(|word| word != 0);
    Some(VfSettings {
        mac: find(block, IFLA_VF_MAC).and_then(|value| value.get(4..4 + length)).map(|mac| LinkAddress::new(mac.to_vec())),
        vlan: vlan(block),
        rate: word(IFLA_VF_RATE, 4).zip(word(IFLA_VF_RATE, 8)).map(|(min, max)| VfRate { min, max }),
        spoof_check: switch(IFLA_VF_SPOOFCHK),
        link_state: word(IFLA_VF_LINK_STATE, 4),
        trust: switch(IFLA_VF_TRUST),
        node_guid: find(block, IFLA_VF_IB_NODE_GUID).and_then(guid),
        port_guid: find(block, IFLA_VF_IB_PORT_GUID).and_then(guid),
    })
}

/// `struct ifla_vf_guid`, `linux/if_link.h`: the function's number, padding, and the GUID as a number of this machine.
fn guid_value(vf: u32, guid: Guid) -> Vec<u8> {
    let mut value = vf.to_ne_bytes().to_vec();
    value.extend([0; 4]);
    value.extend(guid.0.to_ne_bytes());
    value
}

fn guid(value: &[u8]) -> Option<Guid> {
    Some(Guid(u64::from_ne_bytes(*value.get(8..)?.first_chunk()?)))
}

fn vlan(block: &[u8]) -> Option<VfVlan> {
    let listed = find(block, IFLA_VF_VLAN_LIST).and_then(|list| find(list, IFLA_VF_VLAN_INFO));
    let value = listed.or_else(|| find(block, IFLA_VF_VLAN))?;
    let protocol = listed.and_then(|value| Some(u16::from_be_bytes(*value.get(12..)?.first_chunk()?)));
    Some(VfVlan {
        id: u16::try_from(read_u32(value, 4)?).ok()?,
        qos: u8::try_from(read_u32(value, 8)?).ok()?,
        protocol: protocol.unwrap_or(ETH_P_8021Q),
    })
}

/// An attribute with its header and padding.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(4 + value.len()).unwrap_or(u16::MAX).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn settings() -> VfSettings {
        VfSettings {
            mac: Some("02:00:00:00:00:07".parse().unwrap()),
            vlan: Some(VfVlan { id: 100, qos: 3, protocol: 0x88a8 }),
            rate: Some(VfRate { min: 10, max: 200 }),
            spoof_check: Some(false),
            link_state: Some(2),
            trust: Some(true),
            node_guid: Some(Guid(0x0c42_a103_0065_5f96)),
            port_guid: Some(Guid(0x0c42_a103_0065_5f97)),
        }
    }

    /// What the kernel would say of functions with these settings.
    fn reply(functions: &[(u32, VfSettings)]) -> Vec<u8> {
        let block = |(vf, settings): &(u32, VfSettings)| {
            let all: Vec<u8> = settings.all().iter().flat_map(|setting| setting.attribute(*vf)).collect();
            attribute(IFLA_VF_INFO | NESTED, &all)
        };
        let list: Vec<u8> = functions.iter().flat_map(block).collect();
        let mut payload = vec![0; HEADER];
        payload.extend(attribute(1, &[2, 0, 0, 0, 0, 1]));
        payload.extend(attribute(IFLA_VFINFO_LIST | NESTED, &list));
        payload
    }

    #[test]
    fn what_is_written_is_read() {
        let other = VfSettings { mac: Some("02:00:00:00:00:08".parse().unwrap()), ..VfSettings::default() };
        let reply = reply(&[(0, other.clone()), (1, settings())]);
        assert_eq!(parse(&reply, 1), Some(settings()));
        assert_eq!(parse(&reply, 0), Some(other));
        assert_eq!(parse(&reply, 2), None);
        let words: Vec<String> = settings().all().iter().map(ToString::to_string).collect();
        assert_eq!(words[1..4], ["vlan 100 qos 3 protocol 0x88a8", "rate 10 to 200 Mbit/s", "spoofCheck off"]);
        assert_eq!(words[4..], ["linkState disable", "trust on", "nodeGuid 0c42:a103:0065:5f96", "portGuid 0c42:a103:0065:5f97"]);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn a_guid_is_written_as_the_kernel_has_it() {
        let bytes = VfSetting::PortGuid(Guid(0x0102_0304_0506_0708)).attribute(3);
        assert_eq!(bytes, [20, 0, 11, 0, 3, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(VfSetting::NodeGuid(Guid(1)).attribute(3)[2..4], [10, 0]);
    }

    #[test]
    fn what_the_driver_does_not_tell_is_none() {
        let mut block = attribute(IFLA_VF_MAC, &[0; 36]);
        for kind in [IFLA_VF_SPOOFCHK, IFLA_VF_TRUST] {
            block.extend(attribute(kind, &[0, 0, 0, 0, 255, 255, 255, 255]));
        }
        let mut payload = vec![0; HEADER];
        payload.extend(attribute(IFLA_VFINFO_LIST, &attribute(IFLA_VF_INFO, &block)));
        let read = parse(&payload, 0).unwrap();
        assert_eq!((read.spoof_check, read.trust, read.vlan), (None, None, None));
        assert_eq!(read.mac.unwrap().bytes(), [0; 6]);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), vf in 0_u32..3) {
            let _ = parse(&bytes, vf);
            let mut list = vec![0; HEADER];
            list.extend(attribute(IFLA_VFINFO_LIST, &attribute(IFLA_VF_INFO, &bytes)));
            let _ = parse(&list, vf);
        }
    }
}
