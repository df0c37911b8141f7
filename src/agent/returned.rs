//! Listens to the host's links for NICs that the kernel returned by itself, and has them repaired.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::attach::Engine;
use crate::attach::engine::Lost;
use crate::ledger::Share;
use crate::names::ClaimUid;
use crate::netdev::monitor::{Group, Monitor};
use crate::netns::Netns;

/// The kernel returns the links of a namespace one after the other: they are looked at together.
const QUIET: Duration = Duration::from_millis(100);
/// How often it is looked without an event: one may have been lost while there was no monitor.
const RECHECK: Duration = Duration::from_secs(60);
/// Pause before a monitor is opened again.
const REOPEN: Duration = Duration::from_secs(5);

/// Repairs what comes back, until `stop`. Usually there is nothing: the agent keeps namespaces open until it has taken its devices out
/// of them itself. It can't where it was not there when the pod ended, or can't see a namespace that somebody in it keeps alive.
/// `lost` gets what is out of sight, whenever that has changed, and the first time.
pub async fn keep(engine: Arc<Engine>, host: Netns, lost: impl Fn(&[Lost]) + Send, stop: CancellationToken) {
    let mut recheck = interval(RECHECK);
    let mut known = None;
    loop {
        let mut monitor = match Monitor::open(&host, &[Group::Link]) {
            Ok(monitor) => monitor,
            Err(error) => {
                tracing::warn!(%error, pause = ?REOPEN, "can't listen for NICs that come back by themselves; trying again");
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = sleep(REOPEN) => continue,
                }
            }
        };
        loop {
            let seen = look(&engine).await;
            let names = Some(seen.iter().map(name).collect::<BTreeSet<_>>());
            if names != known {
                lost(&seen);
                known = names;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                _ = recheck.tick() => {}
                changed = monitor.changed() => match changed {
                    Ok(_events_or_overrun) => sleep(QUIET).await,
                    Err(error) => {
                        tracing::warn!(%error, "no more events of the host's links; listening again");
                        break;
                    }
                },
            }
        }
    }
}

fn name(lost: &Lost) -> (ClaimUid, Share) {
    (lost.record.claim.uid.clone(), lost.device.clone())
}

/// Repairs what came back; gives what is out of sight.
async fn look(engine: &Arc<Engine>) -> Vec<Lost> {
    let engine = engine.clone();
    let work = move || {
        if !engine.may_have_returned() {
            return Vec::new();
        }
        engine.repair_returned();
        engine.lost().unwrap_or_else(|error| {
            tracing::warn!(%error, "devices that are out of sight could not be looked for");
            Vec::new()
        })
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "looking for NICs that came back failed");
        Vec::new()
    })
}
