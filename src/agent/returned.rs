//! Listens to the host's links and RDMA devices for NICs that the kernel returned by itself, and has them repaired.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::attach::Engine;
use crate::inventory::Scan;
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
pub async fn keep(engine: Arc<Engine>, host: Netns, mut scans: watch::Receiver<Arc<Scan>>, stop: CancellationToken) {
    let mut recheck = interval(RECHECK);
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
            look(&engine).await;
            tokio::select! {
                () = stop.cancelled() => return,
                _ = recheck.tick() => {}
                // An RDMA device that comes back is no event of links, but the inventory sees it.
                Ok(()) = scans.changed() => {}
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

async fn look(engine: &Arc<Engine>) {
    let engine = engine.clone();
    let work = move || if engine.may_have_returned() { engine.repair_returned() } else { Vec::new() };
    if let Err(error) = tokio::task::spawn_blocking(work).await {
        tracing::error!(%error, "looking for NICs that came back failed");
    }
}
