//! Keeps this node's ResourceSlices as they should be.
//!
//! [`devices`] turns what the inventory found into the API's devices and drops what the API would refuse, [`split`] spreads them
//! over slices, [`plan`] compares with what is there: all pure. [`run`] is the loop around them.
//!
//! The kubelet deletes all slices of its node when it starts, and 30 s after a driver went away; so the loop watches them, and
//! a slice that is there already is adopted, not replaced.

mod compare;
mod convert;
mod follow;
pub(super) mod pace;
mod plan;
mod share;
mod split;
mod sync;

use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::resource::v1::Device;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use convert::devices;
pub use plan::{Changes, Target, plan};
pub use share::{Shares, with_shares};
pub use split::{limit_for, split};

use sync::Publisher;

/// What the publisher has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherConfig {
    /// Name of the driver: a DNS subdomain of at most 63 bytes.
    pub driver: String,
    /// Name of the Node, and of the pool.
    pub node_name: String,
}

/// How publishing goes, for readiness and status.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishStatus {
    /// What is wanted is on the server, as far as the server takes it.
    pub in_sync: bool,
    /// Devices in the server's slices.
    pub published: usize,
    /// Slices on the server.
    pub slices: usize,
    /// The pool's generation; 0 before there is one.
    pub generation: i64,
    /// The last write that succeeded.
    pub last_write: Option<SystemTime>,
    /// What does not work at the moment.
    pub last_error: Option<String>,
    /// Fields that the server dropped (`devices[].taints`), sorted: a feature of the cluster is off.
    pub dropped_fields: Vec<String>,
    /// Devices that the server refused and that are left out, with its reason.
    pub refused: Vec<String>,
}

/// Publishes `devices` until `stop`. The first value is published at once, so start this after the first scan: before, every
/// slice would be emptied. Where the sender of `devices` is gone, its last value stays published. At the end the slices stay:
/// the kubelet deletes them 30 s later unless a driver is back.
pub async fn run(
    client: Client,
    config: PublisherConfig,
    mut devices: watch::Receiver<Arc<Vec<Device>>>,
    status: watch::Sender<PublishStatus>,
    stop: CancellationToken,
) {
    let (seen, mut events) = mpsc::channel(64);
    let follower = follow::follow(client.clone(), follow::Selector::new(&config), seen);
    let _follower = AbortOnDropHandle::new(tokio::spawn(follower));
    let first = Arc::clone(&devices.borrow_and_update());
    let mut publisher = Publisher::new(client, config, &first);
    let mut open = true;
    loop {
        let due = publisher.due();
        tokio::select! {
            () = stop.cancelled() => return,
            Some(event) = events.recv() => publisher.observe(event, Instant::now()),
            changed = devices.changed(), if open => match changed {
                Ok(()) => publisher.want(&Arc::clone(&devices.borrow_and_update()), Instant::now()),
                Err(_) => open = false,
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = publisher.sync() => {}
                }
            }
        }
        status.send_if_modified(|old| {
            let changed = *old != *publisher.status();
            old.clone_from(publisher.status());
            changed
        });
    }
}

#[cfg(test)]
mod tests;
