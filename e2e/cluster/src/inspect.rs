//! What the kernel says, seen with iproute2 from outside of everything that is tested.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;
use tokio::process::Command;

use crate::cluster::{output, processes};

/// A link as `ip -json -details address` shows it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Link {
    pub(crate) ifname: String,
    pub(crate) flags: Vec<String>,
    pub(crate) mtu: u32,
    #[serde(default)]
    pub(crate) address: String,
    #[serde(default)]
    addr_info: Vec<AddressInfo>,
}

#[derive(Debug, Clone, Deserialize)]
struct AddressInfo {
    local: Option<String>,
    prefixlen: u8,
    scope: String,
}

impl Link {
    pub(crate) fn is_up(&self) -> bool {
        self.flags.iter().any(|flag| flag == "UP")
    }

    /// Global addresses, `address/length`, sorted.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let global = self.addr_info.iter().filter(|a| a.scope == "global");
        let mut all: Vec<_> = global.filter_map(|a| a.local.as_ref().map(|local| format!("{local}/{}", a.prefixlen))).collect();
        all.sort();
        all
    }
}

/// Runs `program` in the network namespace of process `pid`.
pub(crate) async fn in_netns(pid: u32, program: &[&str]) -> Result<String> {
    output(Command::new("nsenter").args(["-t", &pid.to_string(), "-n"]).args(program)).await
}

/// Links of the network namespace of process `pid`.
pub(crate) async fn links(pid: u32) -> Result<Vec<Link>> {
    let text = in_netns(pid, &["ip", "-json", "-details", "address"]).await?;
    serde_json::from_str(&text).context("ip -json address")
}

/// A process of a pod, found by the UID in its cgroup's path: without help of agent or runtime.
pub(crate) fn process_of_pod(uid: &str) -> Option<u32> {
    process_in(&format!("/pod{uid}/"))
}

/// A process of the container with this id.
pub(crate) fn process_of_container(id: &str) -> Option<u32> {
    process_in(id)
}

fn process_in(group: &str) -> Option<u32> {
    processes()
        .into_iter()
        .find(|pid| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(group)))
}

/// Open files of a process: how many of each kind (`socket`, `pipe`, `anon_inode`, `net` for network namespaces, else the path).
pub(crate) fn open_files(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut all = BTreeMap::new();
    for file in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // One that was closed meanwhile isn't open.
        let Ok(target) = std::fs::read_link(file?.path()) else { continue };
        let target = target.to_string_lossy();
        *all.entry(target.split_once(":[").map_or(&*target, |(kind, _)| kind).to_owned()).or_default() += 1;
    }
    Ok(all)
}
