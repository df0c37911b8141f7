//! The thin part: asks the kernel and tells it.

use std::time::Instant;

use super::layout::commands;
use super::{Change, Ethtool, Group, codec};
use crate::netlink::{GenericSocket, NetlinkError};
use crate::netns::Netns;

/// `ETHTOOL_GENL_NAME`, `linux/ethtool_netlink.h`.
const FAMILY: &str = "ethtool";

/// A socket that asks and tells the kernel settings of links, bound to the namespace it was made in. The kernel takes RTNL for each
/// request, and a driver may restart its device for one, which takes hundreds of milliseconds if the link is up.
#[derive(Debug)]
pub struct EthtoolSocket(GenericSocket);

impl EthtoolSocket {
    /// A socket in the calling thread's namespace; none where the kernel does not speak of these settings over netlink.
    ///
    /// # Errors
    /// As [`GenericSocket::open`].
    pub fn open(deadline: Instant) -> Result<Option<Self>, NetlinkError> {
        Ok(GenericSocket::open(FAMILY, deadline)?.map(Self))
    }

    /// As [`Self::open`], in `netns`; the calling thread stays where it is.
    ///
    /// # Errors
    /// As [`GenericSocket::open_in`].
    pub fn open_in(netns: &Netns, deadline: Instant) -> Result<Option<Self>, NetlinkError> {
        Ok(GenericSocket::open_in(netns, FAMILY, deadline)?.map(Self))
    }

    /// Everything that the link with `index` has: at most six requests. What its driver does not have (`EOPNOTSUPP`) is absent; so is
    /// what it would not tell, which is logged.
    ///
    /// # Errors
    /// As [`GenericSocket::get`], but what the kernel refuses is no error.
    pub fn read(&mut self, index: u32, deadline: Instant) -> Result<Ethtool, NetlinkError> {
        let mut all = Ethtool::default();
        for group in Group::ALL {
            let reply = match self.ask(index, group, deadline) {
                Ok(reply) => reply,
                Err(NetlinkError::Kernel { errno: libc::EOPNOTSUPP, .. }) => continue,
                Err(error @ NetlinkError::Kernel { .. }) => {
                    tracing::warn!(index, group = group.name(), %error, "the driver does not tell its settings");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if group == Group::Features {
                all.features = codec::features(&reply);
            } else if let Some(numbers) = codec::numbers(group, &reply).filter(|numbers| !numbers.now.is_empty()) {
                all.numbers.insert(group, numbers);
            }
        }
        Ok(all)
    }

    /// Carries out `change` on the link with `index`. Returns what is otherwise than wanted all the same, with what it is: a feature
    /// that another one forbids, a number that the driver rounded.
    ///
    /// # Errors
    /// As [`GenericSocket::request`]; a request for several settings is refused as a whole.
    pub fn change(&mut self, index: u32, change: &Change, deadline: Instant) -> Result<Vec<(String, u32)>, NetlinkError> {
        let unreadable = || NetlinkError::Protocol(format!("{change} can't be asked for, or its answer can't be read"));
        let request = codec::change_request(index, change).ok_or_else(unreadable)?;
        let (_, set) = commands(change.group);
        if change.group == Group::Features {
            let unmet = codec::unmet(&self.0.get(set, &request, deadline)?).ok_or_else(unreadable)?;
            let wanted = |name: &String| change.set.get(name).copied().unwrap_or(0);
            return Ok(unmet.into_iter().map(|name| (name.clone(), 1 - wanted(&name).min(1))).collect());
        }
        self.0.request(set, &request, deadline)?;
        let after = codec::numbers(change.group, &self.ask(index, change.group, deadline)?).ok_or_else(unreadable)?;
        let other = |(name, wanted): (&String, &u32)| {
            let value = after.now.get(name).filter(|value| *value != wanted)?;
            Some((name.clone(), *value))
        };
        Ok(change.set.iter().filter_map(other).collect())
    }

    fn ask(&mut self, index: u32, group: Group, deadline: Instant) -> Result<Vec<u8>, NetlinkError> {
        self.0.get(commands(group).0, &codec::request(index), deadline)
    }
}
