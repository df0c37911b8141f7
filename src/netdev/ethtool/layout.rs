//! Numbers of `linux/ethtool_netlink.h`: which command and which attribute is which setting. Data only.

use super::Group;

/// How many bytes a setting has on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// A switch, or a small number.
    One,
    /// A number.
    Four,
}

/// One setting of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    /// Its name in the configuration.
    pub(super) name: &'static str,
    /// The attribute's number.
    pub(super) kind: u16,
    /// Its size.
    pub(super) width: Width,
    /// The attribute that has its largest value.
    pub(super) max: Option<u16>,
}

/// `ETHTOOL_MSG_*_GET` and `ETHTOOL_MSG_*_SET`.
pub(super) const fn commands(group: Group) -> (u8, u8) {
    match group {
        Group::Features => (11, 12),
        Group::PrivateFlags => (13, 14),
        Group::Rings => (15, 16),
        Group::Channels => (17, 18),
        Group::Coalesce => (19, 20),
        Group::Pause => (21, 22),
    }
}

/// The settings of a group; none of those that are bitsets.
pub(super) const fn fields(group: Group) -> &'static [Field] {
    match group {
        Group::Features | Group::PrivateFlags => &[],
        Group::Rings => RINGS,
        Group::Channels => CHANNELS,
        Group::Coalesce => COALESCE,
        Group::Pause => PAUSE,
    }
}

const fn limited(name: &'static str, kind: u16, max: u16) -> Field {
    Field { name, kind, width: Width::Four, max: Some(max) }
}

const fn number(name: &'static str, kind: u16) -> Field {
    Field { name, kind, width: Width::Four, max: None }
}

const fn switch(name: &'static str, kind: u16) -> Field {
    Field { name, kind, width: Width::One, max: None }
}

/// `ETHTOOL_A_RINGS_*`. `TCP_DATA_SPLIT` is not here: what it is when nobody chose can't be written.
const RINGS: &[Field] = &[
    limited("rx", 6, 2),
    limited("rxMini", 7, 3),
    limited("rxJumbo", 8, 4),
    limited("tx", 9, 5),
    number("rxBufLen", 10),
    number("cqeSize", 12),
    switch("txPush", 13),
    switch("rxPush", 14),
];

/// `ETHTOOL_A_CHANNELS_*`.
const CHANNELS: &[Field] = &[limited("rx", 6, 2), limited("tx", 7, 3), limited("other", 8, 4), limited("combined", 9, 5)];

/// `ETHTOOL_A_COALESCE_*`.
const COALESCE: &[Field] = &[
    number("rxUsecs", 2),
    number("rxFrames", 3),
    number("rxUsecsIrq", 4),
    number("rxFramesIrq", 5),
    number("txUsecs", 6),
    number("txFrames", 7),
    number("txUsecsIrq", 8),
    number("txFramesIrq", 9),
    number("statsBlockUsecs", 10),
    switch("adaptiveRx", 11),
    switch("adaptiveTx", 12),
    number("pktRateLow", 13),
    number("rxUsecsLow", 14),
    number("rxFramesLow", 15),
    number("txUsecsLow", 16),
    number("txFramesLow", 17),
    number("pktRateHigh", 18),
    number("rxUsecsHigh", 19),
    number("rxFramesHigh", 20),
    number("txUsecsHigh", 21),
    number("txFramesHigh", 22),
    number("rateSampleInterval", 23),
    switch("cqeModeTx", 24),
    switch("cqeModeRx", 25),
    number("txAggrMaxBytes", 26),
    number("txAggrMaxFrames", 27),
    number("txAggrTimeUsecs", 28),
];

/// `ETHTOOL_A_PAUSE_*`.
const PAUSE: &[Field] = &[switch("autoneg", 2), switch("rx", 3), switch("tx", 4)];
