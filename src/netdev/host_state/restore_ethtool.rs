//! Giving back what `ethtool` shows: features, private flags, rings, channels, coalescing, flow control.

use super::super::ethtool::{Change, EthtoolSocket, Group, changes};
use super::restore::Restorer;
use crate::netlink::NetlinkError;

impl Restorer<'_> {
    /// After the MTU, the master and the sysctls, which switch features off, and before the queueing disciplines, which hang on the
    /// channels.
    pub(super) fn ethtool(&mut self) {
        if self.state.ethtool.is_empty() {
            return;
        }
        if let Err(error) = self.try_ethtool() {
            self.failed("ethtool", error);
        }
    }

    fn try_ethtool(&mut self) -> Result<(), NetlinkError> {
        let Some(mut socket) = EthtoolSocket::open(self.deadline)? else { return Ok(()) };
        let now = socket.read(self.link.index, self.deadline)?;
        for change in changes(&now, &self.state.ethtool) {
            let result = socket.change(self.link.index, &change, self.deadline);
            match result {
                Ok(other) => self.note(&change, &other),
                Err(_) if change.set.len() > 1 => self.one_by_one(&mut socket, &change),
                Err(error) => self.failed(&one(&change), error),
            }
        }
        Ok(())
    }

    /// The kernel refuses a request as a whole: what of it can be put back is.
    fn one_by_one(&mut self, socket: &mut EthtoolSocket, change: &Change) {
        for (name, value) in &change.set {
            let single = Change { group: change.group, set: [(name.clone(), *value)].into() };
            match socket.change(self.link.index, &single, self.deadline) {
                Ok(other) => self.note(&single, &other),
                Err(error) => self.failed(&one(&single), error),
            }
        }
    }

    fn note(&mut self, change: &Change, other: &[(String, u32)]) {
        self.report.restored.push(change.to_string());
        for (name, _) in other {
            // One that was not as wanted before is as it was.
            let was = self.state.ethtool.features.as_ref().and_then(|f| f.changeable.get(name));
            let was_so = change.group == Group::Features && was.is_some_and(|feature| feature.wanted() != feature.active());
            if !was_so {
                let what = format!("ethtool {} {name}", change.group.name());
                self.failed(&what, "the kernel took it, and it is otherwise");
            }
        }
    }
}

/// What a change of one setting is about.
fn one(change: &Change) -> String {
    let names: Vec<&str> = change.set.keys().map(String::as_str).collect();
    format!("ethtool {} {}", change.group.name(), names.join(", "))
}
