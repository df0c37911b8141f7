//! What `dranic-verbs` says of an RDMA device that it opened: one line of JSON between two programs of ours.

use std::net::Ipv6Addr;

use serde::{Deserialize, Serialize};

/// What came of opening a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// It was opened, and closed again.
    Opened(Opened),
    /// It was not.
    #[serde(rename_all = "camelCase")]
    Failed {
        /// What was tried, and why it did not work.
        why: String,
        /// The system's error, where there is one.
        errno: Option<i32>,
        /// What to do about it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

/// What verbs say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Opened {
    /// Name of the device.
    pub device: String,
    /// The port that was asked for; from 1.
    pub port: u8,
    /// GUID of the device.
    pub node_guid: u64,
    /// `enum ibv_port_state`: 4 is active.
    pub state: u8,
    /// `IBV_LINK_LAYER_*`: 0 not told, 1 InfiniBand, 2 Ethernet.
    pub link_layer: u8,
    /// The port's GIDs.
    pub gids: Vec<OpenedGid>,
}

/// A GID as verbs have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpenedGid {
    /// Its place in the table.
    pub index: u32,
    /// The GID.
    pub gid: Ipv6Addr,
    /// `enum ibv_gid_type`: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.
    #[serde(rename = "type")]
    pub kind: u32,
}

impl Answer {
    /// A failure, and what to do about it.
    #[must_use]
    pub fn failed(why: String, errno: Option<i32>) -> Self {
        Self::Failed { why, errno, hint: errno.and_then(hint).map(str::to_owned) }
    }

    /// The failure in words; none where the device was opened.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        match self {
            Self::Opened(_) => None,
            Self::Failed { why, hint: Some(hint), .. } => Some(format!("{why}; {hint}")),
            Self::Failed { why, .. } => Some(why.clone()),
        }
    }
}

fn hint(errno: i32) -> Option<&'static str> {
    match errno {
        // The device cgroup, or the kernel where the device is in another network namespace.
        libc::EPERM | libc::EACCES => Some(
            "either it is in another network namespace, or this agent may not open devices: run the agent privileged (chart: \
             verbs.enabled=true), or set --verbs=off",
        ),
        libc::ENOENT | libc::ENXIO => Some(
            "its file under /dev/infiniband is not there, or is of another device: is ib_uverbs loaded, and /dev of the host mounted \
             where the agent runs (chart: verbs.enabled=true)?",
        ),
        libc::ENODEV => Some(
            "libibverbs does not know it here: is its provider installed (ibverbs-providers), is it in this network namespace?",
        ),
        libc::ENOMEM | libc::EAGAIN => Some("see LimitMEMLOCK and the rdma cgroup of the agent"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_to_do() {
        let failed = Answer::failed("opening the device: Operation not permitted".to_owned(), Some(libc::EPERM));
        let problem = failed.problem().unwrap();
        assert!(problem.contains("opening the device") && problem.contains("--verbs=off"), "{problem}");
        assert_eq!(Answer::failed("odd".to_owned(), Some(libc::EIO)).problem().unwrap(), "odd");
        assert_eq!(Answer::failed("usage".to_owned(), None).problem().unwrap(), "usage");
    }

    #[test]
    fn both_sides_speak_the_same() {
        let gid = OpenedGid { index: 3, gid: "::ffff:10.0.0.5".parse().unwrap(), kind: 2 };
        let opened = Opened { device: "mlx5_0".to_owned(), port: 1, node_guid: 7, state: 4, link_layer: 2, gids: vec![gid] };
        let text = serde_json::to_string(&Answer::Opened(opened.clone())).unwrap();
        assert!(text.starts_with(r#"{"opened":{"device":"mlx5_0""#), "{text}");
        assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), Answer::Opened(opened));
    }
}
