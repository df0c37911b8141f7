//! What the `ethtool` program shows and changes: features, private flags, rings, channels, coalescing, flow control. Spoken over
//! the kernel's generic netlink family (`linux/ethtool_netlink.h`, Linux 5.10 and later have all that is used here).
//!
//! None of it is lost by a move to another namespace: what a pod changed stays changed, until it is put back.

mod bitset;
mod changes;
mod codec;
mod features;
mod layout;
mod socket;
mod sound;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use changes::{Setting, changes, differences, in_order};
pub use features::{FeatureRefusal, resolve};
pub use socket::EthtoolSocket;
pub(super) use sound::sound;

/// Longest name of a feature or a private flag: `ETH_GSTRING_LEN` (32) less the final NUL, `linux/ethtool.h`, bytes.
pub const NAME_MAX: usize = 31;

/// One kind of setting. In the order in which they are changed: private flags can change what else a device has, channels and
/// rings make queues anew, which can reset coalescing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Group {
    /// The driver's own switches.
    PrivateFlags,
    /// Numbers of queues.
    Channels,
    /// Sizes of queues, descriptors.
    Rings,
    /// Offloads.
    Features,
    /// Interrupt coalescing.
    Coalesce,
    /// Flow control.
    Pause,
}

impl Group {
    /// All, in the order in which they are changed.
    pub const ALL: [Self; 6] = [Self::PrivateFlags, Self::Channels, Self::Rings, Self::Features, Self::Coalesce, Self::Pause];

    /// Its name in the configuration, below `ethtool`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PrivateFlags => "privateFlags",
            Self::Channels => "channels",
            Self::Rings => "rings",
            Self::Features => "features",
            Self::Coalesce => "coalesce",
            Self::Pause => "pause",
        }
    }

    /// Whether each setting is on or off, and is taken as asked for. A driver may round the others to what its hardware can do.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::PrivateFlags | Self::Features)
    }
}

/// A feature that can be changed: what somebody wants, and what it is. Other features, the MTU or the driver may keep the kernel
/// from what is wanted; it does it as soon as they allow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Feature {
    /// Off, as wanted.
    Off,
    /// On, as wanted.
    On,
    /// Off, wanted on.
    OffWantedOn,
    /// On, wanted off.
    OnWantedOff,
}

impl Feature {
    /// By the two bits.
    #[must_use]
    pub const fn new(wanted: bool, active: bool) -> Self {
        match (wanted, active) {
            (false, false) => Self::Off,
            (true, true) => Self::On,
            (true, false) => Self::OffWantedOn,
            (false, true) => Self::OnWantedOff,
        }
    }

    /// What is wanted.
    #[must_use]
    pub const fn wanted(self) -> bool {
        matches!(self, Self::On | Self::OffWantedOn)
    }

    /// What it is.
    #[must_use]
    pub const fn active(self) -> bool {
        matches!(self, Self::On | Self::OnWantedOff)
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::On => "on",
            Self::OffWantedOn => "off, wanted on",
            Self::OnWantedOff => "on, wanted off",
        })
    }
}

/// The features of a device by the kernel's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Features {
    /// Those that can be changed.
    pub changeable: BTreeMap<String, Feature>,
    /// The others: on or off for good. The kernel lists every feature that it knows for every device. Only for planning:
    /// see [`Ethtool::without_fixed`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fixed: BTreeMap<String, bool>,
}

/// The settings of one group by their names in the configuration; those that only the record has are named in the same style.
/// A switch is 0 or 1.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Numbers {
    /// What each is. One that the device does not have is absent.
    pub now: BTreeMap<String, u32>,
    /// The largest that each may be, where the kernel says so.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub max: BTreeMap<String, u32>,
}

/// All settings of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ethtool {
    /// None where the kernel did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<Features>,
    /// The other groups, those that the device's driver has.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<Group, Numbers>,
}

impl Ethtool {
    /// Whether nothing is known of the device.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What has to be remembered: a device has about 35 features that nobody can change, and so nobody has to give back.
    #[must_use]
    pub fn without_fixed(mut self) -> Self {
        if let Some(features) = &mut self.features {
            features.fixed.clear();
        }
        self
    }
}

/// One request to change settings of one group, all at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// Of which kind.
    pub group: Group,
    /// Name and value, a switch 0 or 1.
    pub set: BTreeMap<String, u32>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ethtool {}", self.group.name())?;
        for (n, (name, value)) in self.set.iter().enumerate() {
            write!(f, "{} {name} {}", if n == 0 { "" } else { "," }, value_text(self.group, *value))?;
        }
        Ok(())
    }
}

/// A value for people.
fn value_text(group: Group, value: u32) -> String {
    match value {
        0 if group.is_exact() => "off".to_owned(),
        _ if group.is_exact() => "on".to_owned(),
        number => number.to_string(),
    }
}
