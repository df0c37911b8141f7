//! What is said of each device. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, NetworkDeviceData, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::attach::engine::{Look, Seen};
use crate::ledger::{ClaimRecord, ClaimRef, DeviceRecord, Phase};
use crate::netdev::{Address, Child, Link, address};

/// The condition that says whether the device is in the pod and configured.
pub const READY: &str = "Ready";
/// Most addresses of a device: `NetworkDeviceDataMaxIPs`, `k8s.io/api/resource/v1`.
pub const IPS_MAX: usize = 16;
/// Most bytes of `data`: `AllocatedDeviceStatusDataMaxLength` (10 KiB), less a reserve for other ways to write the same JSON.
pub const DATA_MAX: usize = 8 << 10;
/// Longest message of a condition, in bytes. The API takes 32768; nobody reads so much, and a claim can have 32 devices.
pub const MESSAGE_MAX: usize = 1024;
/// Longest single text in `data`, in bytes.
const TEXT_MAX: usize = 256;
/// Most step times in `data`.
const STEPS_MAX: usize = 32;

/// Why a device is ready or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// In the pod and configured.
    Attached,
    /// Planned; the pod's sandbox is awaited.
    Prepared,
    /// On its way into the pod.
    Attaching,
    /// It could not be brought into the pod. The kubelet tries again.
    AttachFailed,
    /// On its way back to the host, or stuck on it.
    Releasing,
    /// It was in a sandbox and is on the host again.
    Released,
    /// It was in the pod and is not there any more.
    DeviceGone,
    /// The pod's network namespace ended.
    SandboxGone,
    /// Prepared before the node was rebooted.
    Rebooted,
    /// In the pod, and without its address by DHCP.
    LeaseLost,
    /// Containers of the pod run without it.
    SandboxMissed,
    /// In the pod and configured, and containers of the pod were started before.
    AttachedLate,
}

impl Reason {
    /// As the API has it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Attached => "Attached",
            Self::Prepared => "Prepared",
            Self::Attaching => "Attaching",
            Self::AttachFailed => "AttachFailed",
            Self::Releasing => "Releasing",
            Self::Released => "Released",
            Self::DeviceGone => "DeviceGone",
            Self::SandboxGone => "SandboxGone",
            Self::Rebooted => "Rebooted",
            Self::LeaseLost => "LeaseLost",
            Self::SandboxMissed => "SandboxMissed",
            Self::AttachedLate => "AttachedLate",
        }
    }

    /// Whether the device is ready.
    #[must_use]
    pub fn is_ready(self) -> bool {
        matches!(self, Self::Attached | Self::AttachedLate)
    }
}

/// Which device of a claim: pool, device, share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceKey {
    /// Pool name.
    pub pool: String,
    /// Device name.
    pub device: String,
    /// Share id, where it has one.
    pub share_id: Option<String>,
}

/// Everything that is said of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceState {
    /// Which device.
    pub key: DeviceKey,
    /// Ready or not, and why.
    pub reason: Reason,
    /// For people.
    pub message: String,
    /// When this began, where the ledger knows: milliseconds since 1970.
    pub since_unix_ms: Option<u64>,
    /// As the kernel has it in the pod.
    pub network: Option<NetworkDeviceData>,
    /// Host link, request, step times, what was left out.
    pub data: Value,
}

/// Ready or not, and since when, of each device: as it was said last.
pub type Transitions = BTreeMap<DeviceKey, (bool, Timestamp)>;

/// What is to be said of the devices of a claim, in the order of the record.
#[must_use]
pub fn device_states(look: &Look) -> Vec<DeviceState> {
    look.record.devices.iter().map(|device| device_state(look, device)).collect()
}

fn device_state(look: &Look, device: &DeviceRecord) -> DeviceState {
    let seen = look.seen.get(&device.share());
    let (reason, message) = if look.this_boot { verdict(device, seen) } else { rebooted() };
    let (reason, message) = missed(&look.record, device, reason).unwrap_or((reason, message));
    let network = match (reason, seen) {
        (Reason::Attached | Reason::AttachedLate, Some(Seen::Here(link, addresses))) => Some(network(link, addresses)),
        _ => None,
    };
    // When a device went away is not recorded.
    let is_recorded = !matches!(reason, Reason::DeviceGone | Reason::SandboxGone | Reason::Rebooted);
    DeviceState {
        key: DeviceKey { pool: device.pool.clone(), device: device.device.to_string(), share_id: device.share_id.clone() },
        reason,
        message: cut(&message, MESSAGE_MAX),
        since_unix_ms: is_recorded.then_some(device.since_unix_ms),
        network,
        data: data(device),
    }
}

/// What is to be said instead of `reason` where containers of the pod were started without the device.
fn missed(record: &ClaimRecord, device: &DeviceRecord, reason: Reason) -> Option<(Reason, String)> {
    let missed = record.missed.as_ref()?;
    let is_in_it = device.attachment.as_ref().is_some_and(|a| a.sandbox == missed.sandbox);
    match reason {
        Reason::Attached if is_in_it => Some((Reason::AttachedLate, missed.why.clone())),
        Reason::Prepared => Some((Reason::SandboxMissed, missed.why.clone())),
        _ => None,
    }
}

fn rebooted() -> (Reason, String) {
    (Reason::Rebooted, "prepared before the node was rebooted; the kubelet prepares it again".to_owned())
}

fn verdict(device: &DeviceRecord, seen: Option<&Seen>) -> (Reason, String) {
    let (host, pod) = (&device.host.name, &device.plan.pod_link);
    let error = device.last_error.as_deref();
    match device.phase {
        Phase::Attached => match seen {
            Some(Seen::Missing) => {
                (Reason::DeviceGone, format!("{pod} ({host} on the host) is not in the pod any more; was it unplugged?"))
            }
            Some(Seen::NoRdma) => {
                let rdma = device.rdma.as_ref().map_or("", |rdma| rdma.name.as_str());
                (
                    Reason::DeviceGone,
                    format!("{host} is in the pod as {pod}, without its RDMA device {rdma}; was its driver loaded anew?"),
                )
            }
            Some(Seen::NoNamespace) => {
                (Reason::SandboxGone, "the pod's network namespace ended; the device goes back to the host".to_owned())
            }
            Some(Seen::Unknown(why)) => {
                (Reason::Attached, format!("{host} is in the pod as {pod}; its addresses could not be read: {why}"))
            }
            Some(Seen::Here(..)) if lost(device).is_some() => {
                let why = lost(device).unwrap_or_default();
                (Reason::LeaseLost, format!("{host} is in the pod as {pod}, without an address by DHCP: {why}"))
            }
            Some(Seen::Here(link, addresses)) => {
                let failed = addresses.iter().filter(|a| has_failed(a));
                let failed: String = failed.map(|a| format!("; {} is not used, since somebody else has it", a.ip)).collect();
                (Reason::Attached, format!("{host} is in the pod as {}{failed}", link.name))
            }
            Some(Seen::Bare) => (Reason::Attached, format!("RDMA device {host} is in the pod")),
            None => (Reason::Attached, format!("{host} is in the pod as {pod}")),
        },
        Phase::Attaching => (Reason::Attaching, format!("{host} is on its way into the pod as {pod}")),
        Phase::Releasing => {
            let last = error.map(|e| format!("; last error: {e}")).unwrap_or_default();
            (Reason::Releasing, format!("{pod} is on its way back to the host, or still in the pod{last}"))
        }
        Phase::Prepared => match error {
            Some(error) => (Reason::AttachFailed, error.to_owned()),
            None => waiting(device),
        },
    }
}

/// Why its address by DHCP must not be used any more.
fn lost(device: &DeviceRecord) -> Option<&str> {
    device.dhcp.as_ref()?.lost.as_deref()
}

/// On the host, before the pod's sandbox or after it.
fn waiting(device: &DeviceRecord) -> (Reason, String) {
    let host = &device.host.name;
    match (device.child().map(Child::kind), was_attached(device)) {
        (_, true) if !device.has_link() => (Reason::Released, format!("RDMA device {host} is on the host again")),
        (_, false) if !device.has_link() => (Reason::Prepared, format!("RDMA device {host} waits for the pod's sandbox")),
        (None, true) => (Reason::Released, format!("{host} is on the host again, down")),
        (None, false) => (Reason::Prepared, format!("{host} is down on the host and waits for the pod's sandbox")),
        (Some(kind), true) => (Reason::Released, format!("the {kind} link on {host} was deleted")),
        (Some(kind), false) => (Reason::Prepared, format!("a {kind} link on {host} is made when the pod has its sandbox")),
    }
}

/// The times of an attach stay in the record of a device that was attached once.
fn was_attached(device: &DeviceRecord) -> bool {
    device.times.iter().any(|time| time.step == "move" || time.step == "create" || time.step == "configure")
}

/// Duplicate address detection found somebody else with it.
fn has_failed(address: &Address) -> bool {
    address.flags & address::IFA_F_DADFAILED != 0
}

fn network(link: &Link, addresses: &[Address]) -> NetworkDeviceData {
    // Link-local ones last: they are the first to be left out where there are too many.
    let usable = |a: &&Address| !has_failed(a);
    let (local, global): (Vec<&Address>, Vec<&Address>) =
        addresses.iter().filter(usable).partition(|a| a.scope == address::SCOPE_LINK);
    let mut ips: Vec<String> = Vec::new();
    for text in global.into_iter().chain(local).filter_map(cidr) {
        if ips.len() < IPS_MAX && !ips.contains(&text) {
            ips.push(text);
        }
    }
    NetworkDeviceData {
        interface_name: Some(link.name.clone()),
        hardware_address: link.address.as_ref().filter(|a| !a.bytes().is_empty()).map(ToString::to_string),
        ips: (!ips.is_empty()).then_some(ips),
    }
}

/// In the one form that the API takes: an IPv4 address inside of IPv6 is written as IPv4.
fn cidr(address: &Address) -> Option<String> {
    match (address.ip, address.ip.to_canonical()) {
        (IpAddr::V6(_), IpAddr::V4(ip)) => Some(format!("{ip}/{}", address.prefix_len.checked_sub(96)?)),
        (_, ip) => Some(format!("{ip}/{}", address.prefix_len)),
    }
}

fn data(device: &DeviceRecord) -> Value {
    let steps: serde_json::Map<String, Value> =
        device.times.iter().take(STEPS_MAX).map(|t| (cut(&t.step, TEXT_MAX), json!(t.micros))).collect();
    let mut data = json!({
        "request": cut(&device.request, TEXT_MAX),
        "hostLink": cut(&device.host.name, TEXT_MAX),
        "stepMicroseconds": steps,
    });
    let left_out = &device.plan.left_out;
    let mut size = data.to_string().len();
    let mut kept: Vec<String> = Vec::new();
    for text in left_out.iter().map(|text| cut(text, TEXT_MAX)) {
        size += written_size(&text);
        if size > DATA_MAX - 64 {
            break;
        }
        kept.push(text);
    }
    if kept.len() < left_out.len() {
        data["leftOutMore"] = json!(left_out.len() - kept.len());
    }
    if !kept.is_empty() {
        data["leftOut"] = json!(kept);
    }
    data
}

/// Bytes of `text` in JSON with a comma, as the server writes it: it escapes `<`, `>` and `&` with six bytes.
fn written_size(text: &str) -> usize {
    json!(text).to_string().len() + 1 + 5 * text.matches(['<', '>', '&']).count()
}

/// `text` in at most `limit` bytes, with a sign that it was cut.
#[must_use]
pub fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let sign = " …";
    let mut end = limit.saturating_sub(sign.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{sign}", &text[..end])
}

/// When each device came to be as `states` say: as before where ready or not did not change.
#[must_use]
pub fn transitions(states: &[DeviceState], before: &Transitions, now: Timestamp) -> Transitions {
    let since = |state: &DeviceState| {
        let ready = state.reason.is_ready();
        let time = match before.get(&state.key) {
            Some((was, time)) if *was == ready => *time,
            _ => {
                let recorded = state.since_unix_ms.and_then(|ms| Timestamp::from_millisecond(i64::try_from(ms).ok()?).ok());
                // The node's clock may have been set back since.
                recorded.filter(|time| *time <= now).unwrap_or(now)
            }
        };
        // The API has seconds: what we remember must be what a reader of it remembers.
        (state.key.clone(), (ready, Timestamp::from_second(time.as_second()).unwrap_or(time)))
    };
    states.iter().map(since).collect()
}

/// What the claim said of the devices of `driver` last.
#[must_use]
pub fn said(claim: &ResourceClaim, driver: &str) -> Transitions {
    let devices = claim.status.as_ref().and_then(|s| s.devices.as_deref()).unwrap_or_default();
    let entry = |device: &AllocatedDeviceStatus| {
        let ready = device.conditions.as_deref().unwrap_or_default().iter().find(|c| c.type_ == READY)?;
        let key = DeviceKey { pool: device.pool.clone(), device: device.device.clone(), share_id: device.share_id.clone() };
        Some((key, (ready.status == "True", ready.last_transition_time.0)))
    };
    devices.iter().filter(|d| d.driver == driver).filter_map(entry).collect()
}

/// Whether the claim says anything of devices of `driver`.
#[must_use]
pub fn says_anything(claim: &ResourceClaim, driver: &str) -> bool {
    claim.status.iter().flat_map(|s| s.devices.as_deref().unwrap_or_default()).any(|d| d.driver == driver)
}

/// Whether a device of `driver` is allocated to the claim. Of others the API takes no status.
#[must_use]
pub fn is_allocated(claim: &ResourceClaim, driver: &str) -> bool {
    let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref()).and_then(|a| a.devices.as_ref());
    allocation.iter().flat_map(|d| d.results.as_deref().unwrap_or_default()).any(|r| r.driver == driver)
}

/// The body of the apply: all devices of ours, since an apply takes away what this manager said before and does not say again.
/// The UID makes the server refuse it for another claim of the same name.
#[must_use]
pub fn apply_body(driver: &str, claim: &ClaimRef, states: &[DeviceState], transitions: &Transitions) -> Value {
    let devices: Vec<AllocatedDeviceStatus> = states.iter().map(|state| entry(driver, state, transitions)).collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid.as_str()},
        "status": {"devices": devices},
    })
}

fn entry(driver: &str, state: &DeviceState, transitions: &Transitions) -> AllocatedDeviceStatus {
    let (ready, since) = transitions.get(&state.key).copied().unwrap_or((state.reason.is_ready(), Timestamp::UNIX_EPOCH));
    AllocatedDeviceStatus {
        driver: driver.to_owned(),
        pool: state.key.pool.clone(),
        device: state.key.device.clone(),
        share_id: state.key.share_id.clone(),
        conditions: Some(vec![Condition {
            type_: READY.to_owned(),
            status: if ready { "True" } else { "False" }.to_owned(),
            reason: state.reason.as_str().to_owned(),
            message: state.message.clone(),
            last_transition_time: Time(since),
            observed_generation: None,
        }]),
        data: Some(RawExtension(state.data.clone())),
        network_data: state.network.clone(),
    }
}
