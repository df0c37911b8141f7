//! `ethtool`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `ethtool`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct EthtoolConfig {
    /// Feature name → on or off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<BTreeMap<String, bool>>,
    /// Private flag name → on or off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub private_flags: Option<BTreeMap<String, bool>>,
    /// Sizes of the rings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rings: Option<RingsConfig>,
    /// Numbers of channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<ChannelsConfig>,
    /// Interrupt coalescing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coalesce: Option<CoalesceConfig>,
    /// Flow control.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause: Option<PauseConfig>,
}

/// `ethtool.rings`: descriptors (`ETHTOOL_A_RINGS_*`, `linux/ethtool_netlink.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RingsConfig {
    /// Receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx: Option<u32>,
    /// Receive, small frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_mini: Option<u32>,
    /// Receive, jumbo frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_jumbo: Option<u32>,
    /// Transmit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx: Option<u32>,
}

/// `ethtool.channels` (`ETHTOOL_A_CHANNELS_*`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ChannelsConfig {
    /// Receive only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx: Option<u32>,
    /// Transmit only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx: Option<u32>,
    /// For other work, such as link interrupts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<u32>,
    /// Receive and transmit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub combined: Option<u32>,
}

/// `ethtool.coalesce` (`ETHTOOL_A_COALESCE_*`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct CoalesceConfig {
    /// Microseconds to wait after a received frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_usecs: Option<u32>,
    /// Frames to wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx_frames: Option<u32>,
    /// Microseconds to wait after a sent frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_usecs: Option<u32>,
    /// Frames to wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx_frames: Option<u32>,
    /// The driver chooses by the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive_rx: Option<bool>,
    /// As `adaptiveRx`, for sending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adaptive_tx: Option<bool>,
}

/// `ethtool.pause` (`ETHTOOL_A_PAUSE_*`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PauseConfig {
    /// Agreed with the other end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoneg: Option<bool>,
    /// Received pause frames are obeyed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rx: Option<bool>,
    /// Pause frames are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tx: Option<bool>,
}
