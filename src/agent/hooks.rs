//! What the runtime's hooks do: attach, gate, release.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{OnOverrun, Shared};
use crate::attach::{AttachError, AttachTimes};
use crate::names::{ClaimUid, PodUid, SandboxId};
use crate::netdev::address;
use crate::nri::{Adjustment, Container, HookError, Sandbox, SandboxHandler};

/// Longest an attach may go on behind the gate.
const DEFER_LIMIT: Duration = Duration::from_secs(60);

/// Longest error text for the runtime, in characters: it becomes a pod event. What the runtime sent (a path) may be of any length.
const ERROR_MAX: usize = 4096;

/// Whether the runtime's leg is usable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NriState {
    /// Registered, configured and synchronised.
    pub connected: bool,
    /// To whom, or why not.
    pub detail: String,
}

pub(super) struct Hooks {
    shared: Arc<Shared>,
}

/// A sandbox of ours, with its names checked.
struct Known {
    pod: PodUid,
    sandbox: SandboxId,
    netns: Option<PathBuf>,
    /// As in [`Sandbox`].
    lost: bool,
    ips: Vec<IpAddr>,
    text: String,
}

impl Hooks {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    fn refuse(&self, what: &str, why: impl std::fmt::Display) -> HookError {
        let text = format!("{}: {what}: {why}", self.shared.config.driver_name);
        HookError(text.chars().take(ERROR_MAX).collect())
    }

    /// A pod without a network namespace of its own can't have a NIC: that is said where a user looks.
    fn no_namespace(&self, known: &Known, error: AttachError) -> HookError {
        let (shared, pod, refusal) = (self.shared.clone(), known.pod.clone(), self.refuse(&known.text, &error));
        self.shared.background.spawn_blocking(move || {
            shared.engine.attach_failed(&pod, &error.to_string());
            shared.reports.attach_failed(&shared.engine, &pod, &error);
        });
        refusal
    }

    /// The network namespace of a sandbox. containerd that is killed between starting a sandbox and writing its specification goes
    /// on with the sandbox and knows none of its namespaces, but it knows its addresses; the kubelet would ask for ever.
    async fn namespace(&self, known: &Known, deadline: Instant) -> Result<PathBuf, HookError> {
        if let Some(path) = &known.netns {
            return Ok(path.clone());
        }
        if !known.lost {
            return Err(self.no_namespace(known, AttachError::HostNetwork));
        }
        let (dir, ips) = (self.shared.config.netns_dir.clone(), known.ips.clone());
        let look = move || address::namespace_with(&dir, &ips, deadline);
        let found = self.shared.background.spawn_blocking(look).await.ok().flatten();
        let Some(path) = found else {
            let dir = self.shared.config.netns_dir.clone();
            return Err(self.no_namespace(known, AttachError::NamespaceLost { dir }));
        };
        tracing::warn!(pod = %known.pod, sandbox = %known.sandbox, path = %path.display(), "the runtime has lost its namespace; found by address");
        Ok(path)
    }

    fn known(&self, sandbox: &Sandbox) -> Result<Known, HookError> {
        let text = format!("pod {}/{}", sandbox.namespace, sandbox.name);
        let pod = PodUid::new(sandbox.uid.as_str()).map_err(|e| self.refuse(&text, e))?;
        let id = SandboxId::new(sandbox.id.as_str()).map_err(|e| self.refuse(&text, e))?;
        let ips = sandbox.ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        Ok(Known { pod, sandbox: id, netns: sandbox.netns.as_ref().map(PathBuf::from), lost: sandbox.lost, ips, text })
    }

    /// Attaches inside the deadline, or fails, or (deferred) goes on behind the gate.
    /// `late` when the sandbox was made before.
    async fn attach(&self, known: &Known, deadline: Instant, late: bool) -> Result<(), HookError> {
        let path = self.namespace(known, deadline).await?;
        let limit = match self.shared.config.on_overrun {
            OnOverrun::Fail => deadline,
            OnOverrun::Defer => Instant::now() + DEFER_LIMIT,
        };
        let shared = self.shared.clone();
        let (pod, sandbox) = (known.pod.clone(), known.sandbox.clone());
        let job = self.shared.background.spawn_blocking(move || {
            let start = Instant::now();
            let result = shared.engine.attach(&pod, &sandbox, &path, limit);
            if result.as_ref().map_or(true, |times| !times.moves.is_empty()) {
                shared.metrics.observe_attach(start.elapsed(), result.is_ok());
            }
            match &result {
                Ok(times) if times.moves.is_empty() => {}
                Ok(times) => {
                    log_attached(&pod, &sandbox, times);
                    if late {
                        shared.attached_late(&pod, &sandbox, times.moves.len());
                    }
                }
                Err(error) => {
                    tracing::warn!(%pod, %sandbox, %error, "not attached");
                    shared.reports.attach_failed(&shared.engine, &pod, error);
                }
            }
            result
        });
        match tokio::time::timeout_at(deadline.into(), job).await {
            Ok(Ok(Ok(_))) => Ok(()),
            Ok(Ok(Err(error))) => Err(self.refuse(&known.text, error)),
            Ok(Err(panic)) => Err(self.refuse(&known.text, format!("the attach ended badly: {panic}"))),
            Err(_) if self.shared.config.on_overrun == OnOverrun::Defer => Ok(()),
            Err(_) => Err(self.refuse(
                &known.text,
                "attaching its NICs took longer than the runtime's time for this request, so they are taken back; \
                 the kubelet will try again. A longer plugin_request_timeout in the runtime's NRI configuration, or \
                 --on-overrun=defer, gives it more",
            )),
        }
    }
}

/// Where the time went, in microseconds: what an operator asks first when pods start slowly.
fn log_attached(pod: &PodUid, sandbox: &SandboxId, times: &AttachTimes) {
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    tracing::info!(
        %pod,
        %sandbox,
        devices = times.moves.len(),
        total_us = us(times.total),
        open_us = us(times.open),
        look_us = us(times.look),
        intent_us = us(times.intent),
        moves_us = us(times.moves.iter().map(|(_, time)| *time).sum()),
        configure_us = us(times.configure),
        verify_us = us(times.verify),
        record_us = us(times.record),
        "attached"
    );
}

impl Shared {
    fn attached_late(&self, pod: &PodUid, sandbox: &SandboxId, devices: usize) {
        tracing::warn!(%pod, %sandbox, devices, "attached late: its sandbox was missed");
        self.reports.attached_late(&self.engine, pod, devices);
    }
}

impl SandboxHandler for Hooks {
    fn is_ours(&self, pod_uid: &str) -> bool {
        self.shared.engine.has_pod(pod_uid)
    }

    fn marks(&self) -> &str {
        super::cdi::VARIABLE
    }

    /// A container brings each of its claims (see [`super::cdi`]): they must be this pod's.
    fn admit(&self, pod_uid: &str, marked: &[&str]) -> Result<(), HookError> {
        for variable in marked {
            let (uid, name) = variable.strip_prefix(super::cdi::VARIABLE).and_then(|v| v.split_once('=')).unwrap_or_default();
            let record = ClaimUid::new(uid).ok().and_then(|uid| self.shared.engine.ledger().get(&uid));
            match record {
                Some(record) if record.pod.uid.as_str() == pod_uid => {}
                Some(record) => {
                    let why = format!(
                        "its NICs are in pod {}/{}; a NIC can be in one pod only: use a ResourceClaimTemplate, so that each pod \
                         gets a claim of its own",
                        record.claim.namespace, record.pod.name
                    );
                    return Err(self.refuse(&format!("claim {name}"), why));
                }
                None => return Err(self.refuse(&format!("claim {name}"), "it is not prepared on this node (any more)")),
            }
        }
        Ok(())
    }

    async fn run_pod_sandbox(&self, sandbox: Sandbox, deadline: Instant) -> Result<(), HookError> {
        let known = self.known(&sandbox)?;
        self.attach(&known, deadline, false).await
    }

    async fn create_container(&self, sandbox: Sandbox, container: Container, deadline: Instant) -> Result<Adjustment, HookError> {
        let known = self.known(&sandbox)?;
        // Where everything is in place, this only looks. Else the sandbox was missed, its attach failed, or it still runs: attach now,
        // or wait for it.
        let text = format!("{}, container {}", known.text, container.name);
        self.attach(&known, deadline, true).await?;
        self.shared.engine.check_attached(&known.pod, &known.sandbox).map_err(|missing| {
            self.refuse(&text, format!("it may not start before its NICs are there: {missing}; the kubelet will try again"))
        })?;
        Ok(Adjustment::default())
    }

    async fn stop_pod_sandbox(&self, sandbox: Sandbox, _deadline: Instant) {
        if !self.is_ours(&sandbox.uid) {
            return;
        }
        let Ok(known) = self.known(&sandbox) else { return };
        let shared = self.shared.clone();
        // The namespace is pinned, so the runtime need not wait for the way back.
        self.shared.background.spawn_blocking(move || {
            let start = Instant::now();
            let released = shared.engine.release(&known.pod, &known.sandbox);
            shared.metrics.observe_release(start.elapsed());
            if !released.is_empty() {
                tracing::info!(pod = %known.pod, sandbox = %known.sandbox, ?released, total = ?start.elapsed(), "released");
            }
        });
    }

    async fn remove_pod_sandbox(&self, sandbox: Sandbox, deadline: Instant) {
        self.stop_pod_sandbox(sandbox, deadline).await;
    }

    async fn synchronize(&self, sandboxes: Vec<Sandbox>, _containers: Vec<Container>) {
        let known: Vec<_> = sandboxes.iter().filter_map(|s| self.known(s).ok()).map(|k| (k.pod, k.sandbox, k.netns)).collect();
        let shared = self.shared.clone();
        let (done, released) = tokio::sync::oneshot::channel();
        self.shared.background.spawn_blocking(move || {
            let todo = shared.engine.reconcile(&known);
            for (pod, sandbox) in todo.release {
                let released = shared.engine.release(&pod, &sandbox);
                tracing::info!(%pod, %sandbox, ?released, "the runtime does not know this sandbox any more");
            }
            // Nobody waits any more when the answer was due.
            let _ = done.send(());
            for (pod, sandbox, path) in todo.attach {
                match shared.engine.attach(&pod, &sandbox, &path, Instant::now() + DEFER_LIMIT) {
                    // The gate of a container was quicker.
                    Ok(times) if times.moves.is_empty() => {}
                    Ok(times) => shared.attached_late(&pod, &sandbox, times.moves.len()),
                    Err(error) => {
                        tracing::error!(%pod, %sandbox, %error, "a sandbox that was missed could not be attached");
                        shared.reports.attach_failed(&shared.engine, &pod, &error);
                    }
                }
            }
        });
        // Until this is answered no sandbox is made: one that is must not be taken for one that the runtime does not list.
        let _ = released.await;
    }

    fn connection(&self, up: bool, detail: &str) {
        self.shared.metrics.nri_connected.set(i64::from(up));
        self.shared.nri.send_replace(NriState { connected: up, detail: detail.to_owned() });
    }
}
