//! Health of devices: [`judge`] decides, [`Service`] tells the kubelet, which shows it in the pod's `allocatedResourcesStatus`.

pub mod judge;
mod service;

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use crate::names::DeviceName;

pub use service::Service;

/// Longest message, bytes (`ResourceHealthMessageMaxLength`, `k8s.io/api/core/v1`): the kubelet cuts there, also inside a
/// character.
pub const MESSAGE_MAX: usize = 1024;

/// What is known of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing is wrong with it.
    Healthy,
    /// It can't do its work.
    Unhealthy,
    /// It could not be looked at.
    Unknown,
}

/// Health of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: DeviceName,
    /// What is known.
    pub state: State,
    /// Why, for people; empty when healthy. At most [`MESSAGE_MAX`] bytes.
    pub message: String,
}

/// All devices of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Sorted by pool and name.
    pub devices: Vec<DeviceHealth>,
    /// When they were looked at.
    pub at: SystemTime,
}

/// The latest report; none before the first look. Marked as changed when a device's health changed.
pub type Reports = watch::Receiver<Option<Arc<Report>>>;
