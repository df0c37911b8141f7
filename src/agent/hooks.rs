//! What the runtime's hooks do: attach, gate, release.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout_at;

use super::attacher::{Attaching, BACKGROUND_LIMIT, Wanted};
use super::{Hold, OnOverrun, Shared, missed};
use crate::attach::AttachError;
use crate::gate::{limits, marks};
use crate::ledger::ClaimRecord;
use crate::names::{ClaimUid, PodUid, SandboxId};
use crate::netdev::address;
use crate::nri::{Adjustment, Container, HookError, OciHook, RequestTime, Sandbox, SandboxHandler};

/// How long the checks before the first move, or a look at what is in place, may keep the runtime waiting: a few milliseconds on a quiet
/// node.
const CHECKS: Duration = Duration::from_millis(20);

/// How much earlier than the hold ends its answer leaves, if a tenth of the hold is not less: it needs a turn on a processor here and one
/// in the runtime, and where they are busy that takes several milliseconds each.
const ANSWER: Duration = Duration::from_millis(20);

/// Longest that the end of a sandbox waits for an attach that it cut short, where a gate keeps containers from coming too early: as long
/// as `--hold` is by default. Setting a real NIC up can't be interrupted, and closing eight takes seconds.
const CUT_SHORT: Duration = Duration::from_millis(200);

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

    /// The attach into this sandbox: begun, or joined. Until `held_until` the runtime waits for it.
    async fn attach(&self, known: &Known, deadline: Instant, held_until: Instant) -> Result<Attaching, HookError> {
        let path = self.namespace(known, deadline).await?;
        let limit = match self.shared.on_overrun {
            OnOverrun::Fail => deadline,
            OnOverrun::Defer => Instant::now() + BACKGROUND_LIMIT,
        };
        let (pod, sandbox) = (known.pod.clone(), known.sandbox.clone());
        Ok(self.shared.attacher.attach(Wanted { pod, sandbox, path, netns: None, deadline: limit, held_until }))
    }

    /// Until when the runtime, and every pod of the node with it, waits for a sandbox.
    fn held_until(&self, known: &Known, time: RequestTime) -> Instant {
        match (self.shared.on_overrun, self.shared.config.hold) {
            (OnOverrun::Fail, _) | (_, Hold::Budget) => time.deadline,
            (OnOverrun::Defer, Hold::For(hold)) => hold_ends(time, hold, Instant::now(), self.shared.engine.forecast(&known.pod)),
        }
    }

    /// Every device is in place, by ledger and kernel, or the container must not be made now.
    async fn complete(&self, known: &Known, text: &str, deadline: Instant) -> Result<(), HookError> {
        let mut missing = "attaching its NICs still goes on".to_owned();
        let mut writes = self.shared.engine.ledger().subscribe();
        let mut attempts = 0;
        // Twice: an attach that was joined may have begun before the pod's last claim was prepared.
        while attempts < 2 {
            writes.mark_unchanged();
            let attaching = self.attach(known, deadline, deadline).await?;
            let ended = timeout_at(deadline.into(), attaching.done()).await;
            if let Ok(Err(error)) = ended {
                return Err(self.refuse(&known.text, error));
            }
            match self.shared.engine.check_attached(&known.pod, &known.sandbox) {
                Ok(()) if ended.is_ok() => return Ok(()),
                Ok(()) => {}
                Err(lacks) => missing = lacks,
            }
            // Everything is there, and RDMA devices can't be used yet: what is seen of them is written.
            let is_awaited = ended.is_ok() && self.shared.engine.check_usable(&known.pod).is_err();
            if !is_awaited || timeout_at(deadline.into(), writes.changed()).await.is_err() {
                attempts += 1;
            }
        }
        Err(self.refuse(text, format!("it may not start before its NICs are there: {missing}; the kubelet will try again")))
    }

    /// Lets a container be made whose start the guard holds back until every device is in place: as it is where it brings the guard
    /// already, else with it. Nobody waits here.
    async fn behind_guard(
        &self,
        known: &Known,
        container: &Container,
        guard: OciHook,
        deadline: Instant,
    ) -> Result<Adjustment, HookError> {
        let now = Instant::now();
        let attaching = self.attach(known, deadline, now).await?;
        match timeout_at(deadline.min(now + CHECKS).into(), attaching.done()).await {
            Ok(Ok(())) if self.shared.engine.check_attached(&known.pod, &known.sandbox).is_ok() => {
                return Ok(Adjustment::default());
            }
            Ok(Err(error)) if error.is_final() => return Err(self.refuse(&known.text, error)),
            _ => {}
        }
        let has_it = container.create_runtime.contains(&guard.path);
        Ok(Adjustment { create_runtime: if has_it { Vec::new() } else { vec![guard] }, ..Adjustment::default() })
    }

    /// Limits of the RDMA devices that the container uses. Several the guard writes, where it is used: older versions of runc write the
    /// map's entry at once, and the kernel takes one line at a time.
    fn limits(&self, known: &Known, container: &Container) -> Option<(String, String)> {
        let records = self.shared.engine.ledger().by_pod(&known.pod);
        let lines = limits_of(&records, &container.env);
        let by_guard = lines.len() > 1 && self.shared.guard.is_some();
        (!lines.is_empty() && !by_guard).then(|| (limits::FILE.to_owned(), lines.join("\n")))
    }

    async fn gated(&self, known: &Known, container: Container, deadline: Instant) -> Result<Adjustment, HookError> {
        if let Some(guard) = self.shared.guard_hook(&known.pod, &known.sandbox) {
            return self.behind_guard(known, &container, guard, deadline).await;
        }
        let text = format!("{}, container {}", known.text, container.name);
        self.complete(known, &text, deadline).await.map(|()| Adjustment::default())
    }
}

/// When a hold ends, counted from the arrival of the request, whatever it waited for here: soon where an attach is known to need longer.
fn hold_ends(time: RequestTime, hold: Duration, now: Instant, needs: Option<Duration>) -> Instant {
    let until = time.deadline.min(time.arrival + hold - ANSWER.min(hold / 10));
    let is_in_vain = needs.is_some_and(|needs| now + needs > until);
    if is_in_vain { until.min(now + CHECKS) } else { until }
}

/// The lines of `rdma.max` for a container with these variables.
fn limits_of(records: &[Arc<ClaimRecord>], env: &[String]) -> Vec<String> {
    let devices = records.iter().flat_map(|record| record.devices.iter().map(move |device| (&record.claim.uid, device)));
    let used = devices.filter(|(uid, device)| marks::has_rdma(env, uid, &device.share()));
    limits::lines(used.filter_map(|(_, device)| {
        let rdma = device.rdma.as_ref()?;
        Some((rdma.name.as_str(), rdma.limits.as_ref()?))
    }))
}

impl SandboxHandler for Hooks {
    fn is_ours(&self, pod_uid: &str) -> bool {
        self.shared.engine.has_pod(pod_uid)
    }

    fn marks(&self) -> &str {
        marks::CLAIM
    }

    /// A container brings each of its claims (see [`super::cdi`]): they must be this pod's.
    fn admit(&self, pod_uid: &str, marked: &[&str]) -> Result<(), HookError> {
        for variable in marked {
            let (uid, name) = variable.strip_prefix(marks::CLAIM).and_then(|v| v.split_once('=')).unwrap_or_default();
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

    async fn run_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) -> Result<(), HookError> {
        let known = self.known(&sandbox)?;
        self.shared.attacher.announce(&known.sandbox);
        let held_until = self.held_until(&known, time);
        let attaching = self.attach(&known, time.deadline, held_until).await?;
        match timeout_at(held_until.into(), attaching.done()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.refuse(&known.text, error)),
            Err(_) if self.shared.on_overrun == OnOverrun::Defer => {
                self.shared.metrics.observe_deferred();
                Ok(())
            }
            Err(_) => Err(self.refuse(
                &known.text,
                "attaching its NICs took longer than the runtime's time for this request, so they are taken back; \
                 the kubelet will try again. A longer plugin_request_timeout in the runtime's NRI configuration, or \
                 --on-overrun=defer, gives it more",
            )),
        }
    }

    /// Where everything is in place, this only looks. Else the sandbox was missed, its attach failed, or it still runs.
    async fn create_container(&self, sandbox: Sandbox, container: Container, time: RequestTime) -> Result<Adjustment, HookError> {
        let known = self.known(&sandbox)?;
        let unified = self.limits(&known, &container);
        let mut adjustment = self.gated(&known, container, time.deadline).await?;
        adjustment.unified.extend(unified);
        Ok(adjustment)
    }

    async fn stop_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) {
        if !self.is_ours(&sandbox.uid) {
            return;
        }
        let Ok(known) = self.known(&sandbox) else { return };
        self.shared.attacher.forget(&known.sandbox);
        let is_cut_short = self.shared.attacher.running_in(&known.sandbox).is_some();
        let mut held_until = self.held_until(&known, time);
        if self.shared.on_overrun == OnOverrun::Defer {
            held_until = held_until.min(Instant::now() + CUT_SHORT);
        }
        let shared = self.shared.clone();
        // The namespace is pinned, so the runtime need not wait for the way back.
        let release = self.shared.background.spawn_blocking(move || {
            let start = Instant::now();
            let released = shared.engine.release(&known.pod, &known.sandbox);
            shared.metrics.observe_release(start.elapsed());
            if !released.is_empty() {
                tracing::info!(pod = %known.pod, sandbox = %known.sandbox, ?released, total = ?start.elapsed(), "released");
            }
        });
        // An attach on its way in is another matter: once this is answered, the runtime expects that nothing comes any more.
        if is_cut_short {
            let _ = timeout_at(held_until.into(), release).await;
        }
    }

    async fn remove_pod_sandbox(&self, sandbox: Sandbox, time: RequestTime) {
        self.stop_pod_sandbox(sandbox, time).await;
    }

    async fn synchronize(&self, sandboxes: Vec<Sandbox>, containers: Vec<Container>) {
        let known: Vec<Known> = sandboxes.iter().filter_map(|s| self.known(s).ok()).collect();
        self.shared.attacher.keep(&known.iter().map(|k| k.sandbox.clone()).collect());
        let listed = known.into_iter().map(|k| (k.pod, k.sandbox, k.netns)).collect();
        let (done, released) = tokio::sync::oneshot::channel();
        self.shared.background.spawn(missed::catch_up(self.shared.clone(), listed, containers, done));
        // Until this is answered no sandbox is made: one that is must not be taken for one that the runtime does not list.
        let _ = released.await;
    }

    fn connection(&self, up: bool, detail: &str) {
        self.shared.metrics.nri_connected.set(i64::from(up));
        self.shared.nri.send_replace(NriState { connected: up, detail: detail.to_owned() });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_hold_counts_from_the_arrival_and_is_short_where_it_is_in_vain() {
        let (arrival, ms) = (Instant::now(), Duration::from_millis);
        let time = RequestTime { arrival, deadline: arrival + ms(1800) };
        let ends = |hold, now, needs| hold_ends(time, ms(hold), arrival + ms(now), needs).duration_since(arrival);
        assert_eq!(ends(200, 0, None), ms(180));
        assert_eq!(ends(200, 70, None), ms(180));
        assert_eq!(ends(50, 0, None), ms(45));
        assert_eq!(ends(0, 3, None), ms(0));
        assert_eq!(ends(60_000, 0, None), ms(1800));
        assert_eq!(ends(200, 30, Some(ms(150))), ms(180));
        assert_eq!(ends(200, 30, Some(ms(151))), ms(50));
        assert_eq!(ends(200, 170, Some(ms(500))), ms(180));
    }

    #[test]
    fn limits_are_those_of_the_devices_that_the_container_uses() {
        let device = |name: &str, rdma: &str, handles: u32| {
            json!({
                "request": "nic", "pool": "node-a", "device": name, "hardware": {"pci": {"address": "0000:8a:00.0"}}, "attributes": {},
                "host": {
                    "index": 7, "name": "eth1", "mtu": 9000, "flags": 4099,
                    "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
                },
                "plan": {"podLink": "eth1", "steps": []}, "phase": "prepared", "sinceUnixMs": 1,
                "rdma": {
                    "name": rdma, "index": 3, "port": 1, "protocol": "RoCE", "mode": "shared", "charDevices": ["uverbs"],
                    "waitForPort": true, "limits": {"hcaHandles": handles}
                }
            })
        };
        let record: ClaimRecord = serde_json::from_value(json!({
            "claim": {"namespace": "shop", "name": "rail", "uid": "u-1"}, "pod": {"name": "p", "uid": "pod-1"},
            "generation": 0, "bootId": "boot-1", "devices": [device("nic-a", "mlx5_0", 2), device("nic-b", "mlx5_1", 3)]
        }))
        .unwrap();
        let records = [Arc::new(record)];
        let marks = ["DRANIC_RDMA_u-1-nic-a=mlx5_0:1".to_owned(), "DRANIC_RDMA_u-1-nic-b=mlx5_1:1".to_owned()];
        assert_eq!(limits_of(&records, &marks), ["mlx5_0 hca_handle=2", "mlx5_1 hca_handle=3"]);
        assert_eq!(limits_of(&records, &marks[1..]), ["mlx5_1 hca_handle=3"]);
        assert!(limits_of(&records, &["DRANIC_CLAIM_u-1=shop/rail".to_owned()]).is_empty(), "no device of RDMA is used");
    }
}
