//! From a ttrpc request to the handler and back, inside the deadline.
//!
//! Every answer is ours: at the deadline the runtime gets an explicit error, which fails the request on every version of NRI and
//! keeps the plugin, while its own time-out may drop us and make the pod without us. The status code is never UNIMPLEMENTED (12):
//! the runtime would take that for a missing method.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout_at;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{MethodHandler, Server, Service, TtrpcContext};
use ttrpc::{Code, Request, Response, Status, get_status};

use super::hook::{Call, Hook, Outcome};
use super::mux::Channel;
use super::{Container, RequestTime, Sandbox, SandboxHandler, proto, wire};

/// Service the runtime calls.
pub(super) const SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// RunPodSandbox, StopPodSandbox, RemovePodSandbox, CreateContainer: valid on every version. 0 would mean all events, among them
/// validation, and then no container could be made.
const EVENTS: i32 = 0x000f;
/// Request timeout where Configure gives none, the default of every runtime.
const DEFAULT_REQUEST_TIMEOUT: Duration = Duration::from_millis(2000);
/// Sandboxes and containers one Synchronize may bring; a node has some hundreds.
const MAX_OBJECTS: usize = 200_000;
/// How much earlier than the answer a hook has to end, so that its own words, which name device and step, win over ours.
/// On a busy node a thread waits for its turn longer than 20 ms (seen with a load of 15 on 2 cores).
pub(super) const MAX_HOOK_LEAD: Duration = Duration::from_millis(50);
/// Longest name or version taken from the runtime, in characters.
const MAX_IDENTITY: usize = 64;

/// Time kept between our answer and the runtime's deadline: the larger of the two, but never more than half of the time there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Margin {
    /// Lower bound.
    pub least: Duration,
    /// Share of the request's time, in percent.
    pub percent: u32,
}

impl Default for Margin {
    fn default() -> Self {
        Self { least: Duration::from_millis(150), percent: 10 }
    }
}

impl Margin {
    /// The margin for a request that has `budget` left.
    #[must_use]
    pub fn of(self, budget: Duration) -> Duration {
        // 128 bits: no product of a u64 of nanoseconds and a u32 overflows them.
        let share = budget.as_nanos() * u128::from(self.percent) / 100;
        let share = Duration::from_nanos(u64::try_from(share).unwrap_or(u64::MAX));
        self.least.max(share).min(budget / 2)
    }
}

/// When a request came and what must happen when.
#[derive(Debug, Clone, Copy)]
struct Budget {
    arrival: Instant,
    total: Duration,
    /// The hook must have ended.
    hook: Instant,
    /// The answer leaves.
    answer: Instant,
}

impl Budget {
    fn new(arrival: Instant, total: Duration, margin: Margin) -> Self {
        let usable = total - margin.of(total);
        let lead = MAX_HOOK_LEAD.min(usable / 5);
        Self { arrival, total, hook: arrival + usable - lead, answer: arrival + usable }
    }
}

/// How far a connection has come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Progress {
    /// Name and version of the runtime, after Configure.
    pub(super) runtime: Option<String>,
    /// The last part of Synchronize was handled.
    pub(super) synchronised: bool,
}

/// What the parts of a Synchronize brought so far.
#[derive(Debug, Default, PartialEq, Eq)]
struct Parts {
    sandboxes: Vec<Sandbox>,
    containers: Vec<Container>,
}

/// The Plugin service of one connection.
#[derive(Debug)]
pub(super) struct Dispatcher<H> {
    handler: Arc<H>,
    executor: Handle,
    margin: Margin,
    plugin: String,
    /// Milliseconds.
    request_timeout: AtomicU64,
    parts: Mutex<Parts>,
    progress: watch::Sender<Progress>,
}

/// How a method is answered.
#[derive(Debug, Clone, Copy)]
pub(super) enum Method {
    Configure,
    Synchronize,
    Hook(Hook),
    StateChange,
    /// We did not subscribe to it: nothing to do, nothing to object to.
    Unsubscribed,
}

pub(super) const METHODS: [(&str, Method); 18] = [
    ("Configure", Method::Configure),
    ("Synchronize", Method::Synchronize),
    ("RunPodSandbox", Method::Hook(Hook::RunPodSandbox)),
    ("StopPodSandbox", Method::Hook(Hook::StopPodSandbox)),
    ("RemovePodSandbox", Method::Hook(Hook::RemovePodSandbox)),
    ("CreateContainer", Method::Hook(Hook::CreateContainer)),
    ("StateChange", Method::StateChange),
    ("Shutdown", Method::Unsubscribed),
    ("UpdatePodSandbox", Method::Unsubscribed),
    ("PostUpdatePodSandbox", Method::Unsubscribed),
    ("PostCreateContainer", Method::Unsubscribed),
    ("StartContainer", Method::Unsubscribed),
    ("PostStartContainer", Method::Unsubscribed),
    ("UpdateContainer", Method::Unsubscribed),
    ("PostUpdateContainer", Method::Unsubscribed),
    ("StopContainer", Method::Unsubscribed),
    ("RemoveContainer", Method::Unsubscribed),
    ("ValidateContainerAdjustment", Method::Unsubscribed),
];

/// The encoded answer, or the status that refuses.
type Answer = Result<Vec<u8>, Status>;

/// Serves the Plugin service on `channel`. The server must be kept; dropping it ends the service.
pub(super) async fn serve<H: SandboxHandler>(channel: Channel, dispatcher: Arc<Dispatcher<H>>) -> ttrpc::Result<Server> {
    let methods = METHODS.map(|(name, method)| {
        let endpoint = Endpoint { method, dispatcher: dispatcher.clone() };
        (name.to_owned(), Box::new(endpoint) as Box<dyn MethodHandler + Send + Sync>)
    });
    let service = Service { methods: HashMap::from(methods), streams: HashMap::new() };
    let listener = Listener::new(tokio_stream::once(Ok(channel)));
    let mut server = Server::new().add_listener(listener).register_service(HashMap::from([(SERVICE.to_owned(), service)]));
    server.start().await?;
    Ok(server)
}

struct Endpoint<H> {
    method: Method,
    dispatcher: Arc<Dispatcher<H>>,
}

impl<H: SandboxHandler> MethodHandler for Endpoint<H> {
    // The trait is declared with async-trait; this is what that makes of an async fn.
    fn handler<'a, 'b>(
        &'a self,
        _: TtrpcContext,
        request: Request,
    ) -> Pin<Box<dyn Future<Output = ttrpc::Result<Response>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let arrival = Instant::now();
        Box::pin(async move {
            let mut response = Response::new();
            match self.dispatcher.answer(self.method, arrival, &request).await {
                Ok(payload) => {
                    response.set_status(get_status(Code::OK, ""));
                    response.set_payload(payload);
                }
                Err(status) => response.set_status(status),
            }
            Ok(response)
        })
    }
}

impl<H: SandboxHandler> Dispatcher<H> {
    /// For one connection of the plugin called `plugin`; hooks run on `executor`.
    pub(super) fn new(handler: Arc<H>, executor: Handle, margin: Margin, plugin: String) -> Self {
        Self {
            handler,
            executor,
            margin,
            plugin,
            request_timeout: AtomicU64::new(DEFAULT_REQUEST_TIMEOUT.as_millis() as u64),
            parts: Mutex::default(),
            progress: watch::Sender::default(),
        }
    }

    /// Reports each step of the handshake.
    pub(super) fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    async fn answer(&self, method: Method, arrival: Instant, request: &Request) -> Answer {
        let payload = &request.payload[..];
        match method {
            Method::Configure => self.configure(payload),
            Method::Synchronize => self.synchronize(payload, self.budget(arrival, request)).await,
            Method::Hook(hook) => self.hook(hook, payload, wire::POD_IN_REQUEST, self.budget(arrival, request)).await,
            Method::StateChange => match Hook::from_event(wire::event(payload).map_err(invalid)?) {
                Some(hook) => self.hook(hook, payload, wire::POD_IN_STATE_CHANGE, self.budget(arrival, request)).await,
                None => wire::check(payload).map(|()| Vec::new()).map_err(invalid),
            },
            Method::Unsubscribed => wire::check(payload).map(|()| Vec::new()).map_err(invalid),
        }
    }

    fn budget(&self, arrival: Instant, request: &Request) -> Budget {
        let total = match u64::try_from(request.timeout_nano) {
            Ok(nanoseconds) if nanoseconds > 0 => Duration::from_nanos(nanoseconds),
            _ => Duration::from_millis(self.request_timeout.load(Ordering::Relaxed)),
        };
        Budget::new(arrival, total, self.margin)
    }

    fn configure(&self, payload: &[u8]) -> Answer {
        let request = proto::ConfigureRequest::decode(payload).map_err(invalid)?;
        if let Ok(milliseconds) = u32::try_from(request.request_timeout)
            && milliseconds > 0
        {
            self.request_timeout.store(milliseconds.into(), Ordering::Relaxed);
        }
        let runtime = identity(&request);
        tracing::info!(%runtime, request_timeout_ms = request.request_timeout, "configured by the runtime");
        self.progress.send_modify(|progress| progress.runtime = Some(runtime));
        let policy = proto::FailurePolicy { fail_request: true, keep_connected: true };
        Ok(proto::ConfigureResponse { events: EVENTS, failure_policy: Some(policy) }.encode_to_vec())
    }

    async fn synchronize(&self, payload: &[u8], budget: Budget) -> Answer {
        let request = proto::SynchronizeRequest::decode(payload).map_err(invalid)?;
        let more = request.more;
        if let Some(Parts { sandboxes, containers }) = self.collect(request)? {
            let (count, handler) = (sandboxes.len(), self.handler.clone());
            let work = self.executor.spawn(async move { handler.synchronize(sandboxes, containers).await });
            match timeout_at(budget.answer.into(), work).await {
                Ok(Ok(())) => tracing::info!(sandboxes = count, "synchronised with the runtime"),
                Ok(Err(error)) => return Err(get_status(Code::INTERNAL, format!("{}: Synchronize: {error}", self.plugin))),
                Err(_) => tracing::warn!(sandboxes = count, "the Synchronize hook goes on after its answer"),
            }
            self.progress.send_modify(|progress| progress.synchronised = true);
        }
        Ok(proto::SynchronizeResponse { more }.encode_to_vec())
    }

    /// Adds one part; everything together after the last one.
    fn collect(&self, request: proto::SynchronizeRequest) -> Result<Option<Parts>, Status> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.sandboxes.extend(request.pods.into_iter().map(Sandbox::from));
        parts.containers.extend(request.containers.into_iter().map(Container::from));
        if parts.sandboxes.len() + parts.containers.len() > MAX_OBJECTS {
            *parts = Parts::default();
            let text = format!("{}: Synchronize brings more than {MAX_OBJECTS} sandboxes and containers", self.plugin);
            return Err(get_status(Code::RESOURCE_EXHAUSTED, text));
        }
        Ok((!request.more).then(|| std::mem::take(&mut *parts)))
    }

    async fn hook(&self, hook: Hook, payload: &[u8], pod: u32, budget: Budget) -> Answer {
        let uid = wire::pod_uid(payload, pod).map_err(invalid)?;
        if hook == Hook::CreateContainer && !self.handler.marks().is_empty() {
            let marked = wire::variables(payload, self.handler.marks()).map_err(invalid)?;
            self.handler.admit(uid, &marked).map_err(|error| get_status(Code::FAILED_PRECONDITION, error))?;
        }
        if !self.handler.is_ours(uid) {
            return Ok(Vec::new());
        }
        let call = Call::decode(hook, payload, pod).map_err(invalid)?;
        let subject = call.to_string();
        let time = RequestTime { arrival: budget.arrival, deadline: budget.hook };
        let outcome = call.start(&self.executor, self.handler.clone(), time).wait(budget.answer).await;
        tracing::debug!(%subject, ?outcome, elapsed = ?budget.arrival.elapsed(), "hook answered");
        match outcome {
            Outcome::Done(Ok(adjustment)) => Ok(wire::answer(adjustment)),
            // Stop and Remove never fail: on some runtimes that would wedge the pod's deletion.
            _ if hook.is_cleanup() => Ok(Vec::new()),
            Outcome::Done(Err(error)) => Err(get_status(Code::FAILED_PRECONDITION, error)),
            Outcome::Failed(error) => Err(get_status(Code::INTERNAL, format!("{}: {subject} failed: {error}", self.plugin))),
            Outcome::StillRunning => Err(get_status(Code::ABORTED, self.late(&subject, budget))),
        }
    }

    fn late(&self, subject: &str, budget: Budget) -> String {
        let text = format!(
            "{}: {subject} is still running after {} ms of the runtime's {} ms; refused now, before the runtime's time-out; \
             it will be tried again",
            self.plugin,
            budget.arrival.elapsed().as_millis(),
            budget.total.as_millis(),
        );
        tracing::warn!("{text}");
        text
    }
}

/// "containerd v2.4.2 (NRI v0.12.5)", as far as the runtime says it.
fn identity(request: &proto::ConfigureRequest) -> String {
    let clean = |text: &str| text.chars().filter(|c| !c.is_control()).take(MAX_IDENTITY).collect::<String>();
    let mut identity = format!("{} {}", clean(&request.runtime_name), clean(&request.runtime_version));
    if !request.nri_version.is_empty() {
        identity.push_str(&format!(" (NRI {})", clean(&request.nri_version)));
    }
    identity
}

fn invalid(error: impl std::fmt::Display) -> Status {
    get_status(Code::INVALID_ARGUMENT, error)
}

#[cfg(test)]
mod tests;
