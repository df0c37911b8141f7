//! Links over rtnetlink: what they are, what the host gave them, moving them, giving it back.
//!
//! Knows nothing of Kubernetes. All types that the ledger keeps derive `Serialize`; those that come from the kernel are our own,
//! so that the netlink crates' types stay inside this room.

pub mod address;
pub mod bpf;
pub mod child;
pub mod ethtool;
pub mod host_state;
pub mod link;
pub mod monitor;
pub mod moves;
pub mod neighbour;
pub mod qdisc;
mod raw;
pub mod route;
pub mod rule;
pub mod sysctl;
pub mod uplink;
pub mod vf;

pub use address::Address;
pub use child::{Child, IpoibMode, IpvlanFlag, IpvlanMode, MacvlanMode, VlanProtocol};
pub use ethtool::Ethtool;
pub use host_state::{Difference, HostState, RestoreReport};
pub use link::{Link, LinkAddress, LinkSettings, PacketSizes};
pub use neighbour::Neighbour;
pub use qdisc::Qdisc;
pub use route::{NextHop, Route};
pub use rule::Rule;
