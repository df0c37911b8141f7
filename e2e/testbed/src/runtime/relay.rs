//! One request to all plugins, one plugin after another, and what their failures mean.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dranic::nri::proto;
use prost::Message as _;

use super::caller::{Caller, Patience};
use super::connection::{Failure, UNIMPLEMENTED};
use super::log::What;
use super::pods::{PodRequest, StateChange};
use super::{Inner, Plugin};

/// The outcome of one request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Relay {
    /// From the request to its end, over all plugins, without the wait for other requests.
    pub elapsed: Duration,
    /// Why it failed; none if it went on.
    pub error: Option<String>,
    /// Plugins that were asked, as "index-name".
    pub asked: Vec<String>,
    /// What they want changed in a container.
    pub adjustments: Vec<proto::ContainerAdjustment>,
}

impl Relay {
    /// The outcome without its details.
    ///
    /// # Errors
    /// The text of the request's failure.
    pub fn result(self) -> Result<(), String> {
        self.error.map_or(Ok(()), Err)
    }
}

/// The requests there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// RunPodSandbox.
    Run,
    /// StopPodSandbox.
    Stop,
    /// RemovePodSandbox.
    Remove,
    /// CreateContainer.
    Create,
}

impl Kind {
    fn event(self) -> i32 {
        match self {
            Self::Run => 1,
            Self::Stop => 2,
            Self::Remove => 3,
            Self::Create => 4,
        }
    }

    /// The method's name.
    pub fn method(self) -> &'static str {
        match self {
            Self::Run => "RunPodSandbox",
            Self::Stop => "StopPodSandbox",
            Self::Remove => "RemovePodSandbox",
            Self::Create => "CreateContainer",
        }
    }
}

/// One request on its way through the plugins.
struct Round<'a> {
    inner: &'a Inner,
    kind: Kind,
    sandbox: &'a str,
    patience: Patience,
    request: PodRequest,
    /// Paths of devices, and the plugin that wants each.
    devices: BTreeMap<String, String>,
}

/// Asks every subscribed plugin in the order of the index; the first failure that counts ends it.
pub(super) async fn relay(inner: &Arc<Inner>, kind: Kind, sandbox: &str, request: PodRequest, caller: Caller) -> Relay {
    let _one_at_a_time = inner.requests.lock().await;
    let mut round = Round { inner, kind, sandbox, patience: caller.begun(), request, devices: BTreeMap::new() };
    let start = Instant::now();
    let mut relay = Relay::default();
    for plugin in inner.plugins() {
        if plugin.events & (1 << (kind.event() - 1)) == 0 {
            continue;
        }
        relay.asked.push(plugin.name.clone());
        let adjusted = match round.ask(&plugin).await {
            Ok(answer) => round.adjust(&plugin.name, &answer),
            Err(failure) => round.judge(&plugin, failure).await.map_or(Ok(None), Err),
        };
        match adjusted {
            Ok(adjustment) => relay.adjustments.extend(adjustment),
            Err(error) => {
                relay.adjustments.clear();
                relay.error = Some(error);
                break;
            }
        }
    }
    relay.elapsed = start.elapsed();
    relay
}

impl Round<'_> {
    async fn ask(&self, plugin: &Plugin) -> Result<Vec<u8>, Failure> {
        // CreateContainer has had an RPC of its own in every version.
        if self.kind == Kind::Create {
            return self.timed_call(plugin, self.kind.method(), self.request.encode_to_vec()).await;
        }
        let by_event = StateChange { event: self.kind.event(), pod: self.request.pod.clone() }.encode_to_vec();
        let first = if plugin.state_change.load(Ordering::Relaxed) {
            self.timed_call(plugin, "StateChange", by_event.clone()).await
        } else {
            self.timed_call(plugin, self.kind.method(), self.request.encode_to_vec()).await
        };
        match first {
            // Also when it was an event already.
            Err(Failure::Explicit(UNIMPLEMENTED, _)) if self.inner.options.dedicated_rpcs => {
                plugin.state_change.store(true, Ordering::Relaxed);
                self.timed_call(plugin, "StateChange", by_event).await
            }
            answer => answer,
        }
    }

    async fn timed_call(&self, plugin: &Plugin, method: &str, payload: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let (log, name, method) = (&self.inner.log, &plugin.name, method.to_owned());
        log.add(name, What::Request { method: method.clone(), sandbox: self.sandbox.to_owned() });
        let start = Instant::now();
        let limit = self.patience.left(self.inner.request_timeout());
        let answer = tokio::select! {
            biased;
            answer = plugin.connection.call(&method, payload, limit) => answer,
            () = self.patience.cancelled() => Err(Failure::Cancelled),
        };
        let (elapsed, error) = (start.elapsed(), answer.as_ref().err().map(|failure| format!("{failure:?}")));
        log.add(name, What::Answer { method, elapsed, error });
        answer
    }

    /// Takes what a plugin wants changed in a container. Plugins that are asked later see the hooks; no two may want one device, and
    /// none may want it twice.
    fn adjust(&mut self, plugin: &str, answer: &[u8]) -> Result<Option<proto::ContainerAdjustment>, String> {
        if self.kind != Kind::Create {
            return Ok(None);
        }
        let Some(adjust) = proto::CreateContainerResponse::decode(answer).unwrap_or_default().adjust else { return Ok(None) };
        for device in adjust.linux.iter().flat_map(|linux| &linux.devices) {
            if let Some(other) = self.devices.insert(device.path.clone(), plugin.to_owned()) {
                return Err(format!("plugins {plugin:?} and {other:?} both tried to set Devices {}", device.path));
            }
        }
        // Fields of a message may come in pieces: appending hooks adds them.
        let changed = proto::Container { hooks: adjust.hooks.clone(), ..proto::Container::default() };
        self.request.container.extend(changed.encode_to_vec());
        Ok(Some(adjust))
    }

    /// Whether the request fails, by the plugin's failure policy if this runtime knows it; drops the plugin where that is due.
    async fn judge(&self, plugin: &Plugin, failure: Failure) -> Option<String> {
        let knows_policies = self.inner.options.honours_policy;
        let policy = if knows_policies { plugin.policy } else { proto::FailurePolicy::default() };
        let kept = policy.keep_connected && failure == Failure::Timeout;
        let cause = match failure {
            Failure::Explicit(code, text) => return Some(format!("rpc error: code = {} desc = {text}", code_name(code))),
            Failure::Unreadable(text) => return Some(text),
            Failure::Cancelled => return Some("context canceled".to_owned()),
            Failure::Timeout => "context deadline exceeded".to_owned(),
            Failure::Lost(reason) => reason,
            Failure::Protocol(text) => text,
        };
        // With the policies came that a plugin is not blamed when it was the runtime that gave up.
        if knows_policies && self.patience.is_over() {
            return Some(cause);
        }
        let error = format!("plugin {} failed to handle {} request: {cause}", plugin.name, self.kind.method());
        if !kept {
            self.inner.drop_plugin(plugin, &error).await;
        }
        policy.fail_request.then_some(error)
    }
}

/// A status code as Go writes it.
fn code_name(code: i32) -> String {
    const NAMES: [&str; 17] = [
        "OK",
        "Canceled",
        "Unknown",
        "InvalidArgument",
        "DeadlineExceeded",
        "NotFound",
        "AlreadyExists",
        "PermissionDenied",
        "ResourceExhausted",
        "FailedPrecondition",
        "Aborted",
        "OutOfRange",
        "Unimplemented",
        "Internal",
        "Unavailable",
        "DataLoss",
        "Unauthenticated",
    ];
    let name = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
    name.map_or_else(|| format!("Code({code})"), |name| (*name).to_owned())
}
