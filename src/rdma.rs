//! RDMA devices as the kernel has them: over its RDMA netlink, and by their files. Nothing here knows pods.
//!
//! Numbers and names are those of `rdma/rdma_netlink.h` (`RDMA_NLDEV_*`) and `rdma/ib_verbs.h`.

pub mod char_devices;
mod codec;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub mod gids;
pub mod monitor;
pub mod opened;
pub mod ready;
mod resources;
mod socket;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use monitor::RdmaMonitor;
pub use resources::Resources;
pub use socket::RdmaSocket;

/// Which network namespaces see an RDMA device (`RDMA_NLDEV_SYS_ATTR_NETNS_MODE`). The administrator sets it at boot; it can't be
/// changed while there is more than one namespace. It is read for each operation, and never set here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NetnsMode {
    /// All of them. The link moves into a pod alone, and containers get the character devices.
    Shared,
    /// One at a time: the RDMA device moves, too.
    Exclusive,
}

impl fmt::Display for NetnsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shared => "shared",
            Self::Exclusive => "exclusive",
        })
    }
}

/// What is spoken on a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Protocol {
    /// RDMA over converged Ethernet.
    #[serde(rename = "RoCE")]
    Roce,
    /// InfiniBand.
    InfiniBand,
    /// RDMA over TCP.
    #[serde(rename = "iWARP")]
    Iwarp,
    /// Something else (EFA, usNIC), or not told.
    #[default]
    Other,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Roce => "RoCE",
            Self::InfiniBand => "InfiniBand",
            Self::Iwarp => "iWARP",
            Self::Other => "other",
        })
    }
}

/// State of a port (`enum ib_port_state`, `rdma/ib_verbs.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortState {
    /// 1.
    Down,
    /// 2.
    Init,
    /// 3.
    Armed,
    /// 4: it carries traffic.
    Active,
    /// 5.
    ActiveDefer,
    /// Any other number, as the kernel gave it.
    Other(u8),
}

impl From<u8> for PortState {
    fn from(number: u8) -> Self {
        match number {
            1 => Self::Down,
            2 => Self::Init,
            3 => Self::Armed,
            4 => Self::Active,
            5 => Self::ActiveDefer,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Down => f.write_str("DOWN"),
            Self::Init => f.write_str("INIT"),
            Self::Armed => f.write_str("ARMED"),
            Self::Active => f.write_str("ACTIVE"),
            Self::ActiveDefer => f.write_str("ACTIVE_DEFER"),
            Self::Other(number) => write!(f, "state {number}"),
        }
    }
}

/// A GUID: of a node (an RDMA device) or of a port. Written `0c42:a103:0065:5f96`, as sysfs does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Guid(pub u64);

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = [48, 32, 16, 0].map(|shift| self.0 >> shift & 0xffff);
        write!(f, "{a:04x}:{b:04x}:{c:04x}:{d:04x}")
    }
}

/// What is no GUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GUID: 16 hex digits, as 0c42:a103:0065:5f96 or 0c:42:a1:03:00:65:5f:96")]
pub struct NoGuid(String);

impl FromStr for Guid {
    type Err = NoGuid;

    fn from_str(text: &str) -> Result<Self, NoGuid> {
        let no_guid = || NoGuid(text.chars().take(64).collect());
        let parts: Vec<&str> = text.split(':').collect();
        let width = match parts.len() {
            1 => 16,
            4 => 4,
            8 => 2,
            _ => return Err(no_guid()),
        };
        if !parts.iter().all(|part| part.len() == width && part.bytes().all(|b| b.is_ascii_hexdigit())) {
            return Err(no_guid());
        }
        u64::from_str_radix(&parts.concat(), 16).map(Self).map_err(|_| no_guid())
    }
}

impl TryFrom<String> for Guid {
    type Error = NoGuid;
    fn try_from(text: String) -> Result<Self, NoGuid> {
        text.parse()
    }
}

impl From<Guid> for String {
    fn from(guid: Guid) -> Self {
        guid.to_string()
    }
}

/// An RDMA device, as `RDMA_NLDEV_CMD_GET` has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// `RDMA_NLDEV_ATTR_DEV_INDEX`: stays the same in every namespace, until its driver registers it anew.
    pub index: u32,
    /// `mlx5_0`, or `rocep138s0`.
    pub name: String,
    /// How many ports it has. They are numbered from 1.
    pub ports: u32,
    /// None where it is zero: the device has none (yet).
    pub node_guid: Option<Guid>,
    /// `enum rdma_node_type`, `rdma/ib_verbs.h`: 1 `IB_CA`, 4 `RNIC`, 5 and 6 usNIC, 7 unspecified (EFA).
    pub node_type: u8,
    /// What is spoken on its first port.
    pub protocol: Protocol,
    /// Firmware version.
    pub firmware: Option<String>,
    /// Name of the device that this one is a part of (`RDMA_NLDEV_ATTR_PARENT_NAME`: a plane of a planar one).
    pub parent: Option<String>,
}

/// A port, as `RDMA_NLDEV_CMD_PORT_GET` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Index of the device.
    pub device: u32,
    /// From 1.
    pub port: u32,
    /// Whether it carries traffic.
    pub state: PortState,
    /// Index and name of its link: of RoCE and iWARP, and only for who asks in the link's namespace.
    pub link: Option<(u32, String)>,
    /// `RDMA_NLDEV_ATTR_SUBNET_PREFIX`, of InfiniBand.
    pub subnet_prefix: Option<u64>,
    /// Local id, of InfiniBand.
    pub lid: Option<u32>,
}

/// A kind of character device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CharDeviceKind {
    /// `/dev/infiniband/uverbsN`: verbs.
    Uverbs,
    /// `/dev/infiniband/umadN`: management datagrams of one port.
    Umad,
    /// `/dev/infiniband/issmN`: for a subnet manager, of one port.
    Issm,
    /// `/dev/infiniband/rdma_cm`: connections, of all devices.
    RdmaCm,
}

impl fmt::Display for CharDeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uverbs => "uverbs",
            Self::Umad => "umad",
            Self::Issm => "issm",
            Self::RdmaCm => "rdma_cm",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gid {
    /// Its place in the table: what `NCCL_IB_GID_INDEX` and the like want.
    pub index: u32,
    /// The GID. Of RoCE v2 over IPv4 it is the address, mapped: `::ffff:10.0.0.5`.
    pub gid: std::net::Ipv6Addr,
    /// `IB/RoCE v1`, `RoCE v2`, or what the kernel says.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name of the link it belongs to, in the namespace where it was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
}

impl Gid {
    /// The IP address that a RoCE v2 GID stands for.
    #[must_use]
    pub fn address(&self) -> std::net::IpAddr {
        self.gid.to_ipv4_mapped().map_or(self.gid.into(), Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guids_are_read_and_written() {
        for text in ["0c42:a103:0065:5f96", "0c:42:a1:03:00:65:5f:96", "0c42a10300655f96", "0C42:A103:0065:5F96"] {
            assert_eq!(text.parse(), Ok(Guid(0x0c42_a103_0065_5f96)), "{text}");
        }
        assert_eq!(Guid(0x0c42_a103_0065_5f96).to_string(), "0c42:a103:0065:5f96");
        for text in ["", "0c42:a103:0065", "0c42:a103:0065:5f9", "0c42:a103:0065:5g96", "+c42a10300655f96", &"0".repeat(99)] {
            assert!(text.parse::<Guid>().is_err(), "{text}");
        }
    }
}
