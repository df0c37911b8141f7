//! One request to all plugins, one plugin after another, and what their failures mean.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dranic::nri::proto;
use prost::Message as _;

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
pub(super) enum Kind {
    Run,
    Stop,
    Remove,
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

    fn method(self) -> &'static str {
        match self {
            Self::Run => "RunPodSandbox",
            Self::Stop => "StopPodSandbox",
            Self::Remove => "RemovePodSandbox",
            Self::Create => "CreateContainer",
        }
    }
}

/// Asks every subscribed plugin in the order of the index; the first failure that counts ends it.
pub(super) async fn relay(inner: &Arc<Inner>, kind: Kind, sandbox: &str, request: &PodRequest) -> Relay {
    let _one_at_a_time = inner.requests.lock().await;
    let start = Instant::now();
    let mut relay = Relay::default();
    for plugin in inner.plugins() {
        if plugin.events & (1 << (kind.event() - 1)) == 0 {
            continue;
        }
        relay.asked.push(plugin.name.clone());
        match ask(inner, &plugin, kind, sandbox, request).await {
            Ok(answer) if kind == Kind::Create => {
                let answer = proto::CreateContainerResponse::decode(&answer[..]).unwrap_or_default();
                relay.adjustments.extend(answer.adjust);
            }
            Ok(_) => {}
            Err(failure) => relay.error = judge(inner, &plugin, kind, failure).await,
        }
        if relay.error.is_some() {
            break;
        }
    }
    relay.elapsed = start.elapsed();
    relay
}

async fn ask(inner: &Inner, plugin: &Plugin, kind: Kind, sandbox: &str, request: &PodRequest) -> Result<Vec<u8>, Failure> {
    let by_event = StateChange { event: kind.event(), pod: request.pod.clone() };
    // CreateContainer has had an RPC of its own in every version.
    if kind != Kind::Create && plugin.state_change.load(Ordering::Relaxed) {
        return timed_call(inner, plugin, "StateChange", sandbox, by_event.encode_to_vec()).await;
    }
    match timed_call(inner, plugin, kind.method(), sandbox, request.encode_to_vec()).await {
        Err(Failure::Explicit(UNIMPLEMENTED, _)) if kind != Kind::Create => {
            plugin.state_change.store(true, Ordering::Relaxed);
            timed_call(inner, plugin, "StateChange", sandbox, by_event.encode_to_vec()).await
        }
        answer => answer,
    }
}

async fn timed_call(inner: &Inner, plugin: &Plugin, method: &str, sandbox: &str, payload: Vec<u8>) -> Result<Vec<u8>, Failure> {
    let name = &plugin.name;
    let method = method.to_owned();
    inner.log.add(name, What::Request { method: method.clone(), sandbox: sandbox.to_owned() });
    let start = Instant::now();
    let answer = plugin.connection.call(&method, payload, inner.options.request_timeout).await;
    let (elapsed, error) = (start.elapsed(), answer.as_ref().err().map(|failure| format!("{failure:?}")));
    inner.log.add(name, What::Answer { method, elapsed, error });
    answer
}

/// Whether the request fails, by the plugin's failure policy if this runtime knows it; drops the plugin where that is due.
async fn judge(inner: &Inner, plugin: &Plugin, kind: Kind, failure: Failure) -> Option<String> {
    let policy = if inner.options.honours_policy { plugin.policy } else { proto::FailurePolicy::default() };
    let (cause, kept) = match failure {
        Failure::Explicit(code, text) => return Some(format!("rpc error: code = {code} desc = {text}")),
        Failure::Timeout => ("context deadline exceeded".to_owned(), policy.keep_connected),
        Failure::Lost(reason) => (reason, false),
        Failure::Protocol(text) => (text, false),
    };
    let error = format!("plugin {} failed to handle {} request: {cause}", plugin.name, kind.method());
    if !kept {
        inner.drop_plugin(plugin, &error).await;
    }
    policy.fail_request.then_some(error)
}
