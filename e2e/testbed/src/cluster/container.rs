//! A container that is made and started: what the runtime's plugins add to it is run as an OCI runtime runs it.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::{Cluster, Pod};
use crate::fabric::{Node, NodeCommand};
use crate::kubelet::Claim;

/// A program to run at `createRuntime`, with all its arguments.
type Hook = (String, Vec<String>);

/// A container whose hooks run.
pub struct Starting(JoinHandle<Result<(), String>>);

impl Starting {
    /// Waits until it was started.
    ///
    /// # Errors
    /// What the OCI runtime would say: which hook failed, and its words.
    pub async fn started(&mut self) -> Result<(), String> {
        (&mut self.0).await.map_err(|e| e.to_string())?
    }
}

impl Cluster {
    /// Makes a container of `pod` that uses `claims`, and starts it.
    ///
    /// # Errors
    /// What a user would read: why it was not made, or what a hook said that failed.
    pub async fn start_container(&self, pod: &Pod, name: &str, claims: &[Claim]) -> Result<(), String> {
        self.begin_container(pod, name, claims).await?.started().await
    }

    /// Makes a container of `pod` that uses `claims`, with what their CDI specs add, and begins to start it: the hooks for
    /// `createRuntime`, of the specs and of plugins, run as an OCI runtime runs them.
    ///
    /// # Errors
    /// Why it was not made.
    pub async fn begin_container(&self, pod: &Pod, name: &str, claims: &[Claim]) -> Result<Starting, String> {
        let mut container = pod.container(name);
        let mut hooks: Vec<Hook> = Vec::new();
        for claim in claims {
            let spec = self.cdi_spec(claim)?;
            hooks.extend(spec["containerEdits"]["hooks"].as_array().into_iter().flatten().map(hook_of));
            let edits = spec["devices"].as_array().into_iter().flatten().flat_map(|d| d["containerEdits"]["env"].as_array());
            container.env.extend(edits.flatten().filter_map(Value::as_str).map(str::to_owned));
        }
        container.create_runtime = hooks.iter().map(|(path, _)| path.clone()).collect();
        let relay = self.runtime.create_container(&pod.sandbox.id, &container).await;
        if let Some(error) = relay.error {
            return Err(error);
        }
        let added = relay.adjustments.into_iter().filter_map(|a| a.hooks).flat_map(|hooks| hooks.create_runtime);
        hooks.extend(added.map(|hook| (hook.path, hook.args)));
        let init = Init::start(pod).map_err(|e| format!("a process in the pod's namespace: {e}"))?;
        let state = state(pod, name, &init);
        let node = self.node.try_clone().map_err(|e| e.to_string())?;
        let run_all = move || {
            let _init = init;
            hooks.iter().try_for_each(|hook| run(&node, hook, &state.to_string()))
        };
        Ok(Starting(tokio::task::spawn_blocking(run_all)))
    }

    /// How long the hooks take that a container of `pod` with `claims` has by CDI.
    ///
    /// # Errors
    /// As [`Self::start_container`].
    pub async fn time_guard(&self, pod: &Pod, claims: &[Claim]) -> Result<Duration, String> {
        let specs: Vec<Value> = claims.iter().map(|claim| self.cdi_spec(claim)).collect::<Result<_, _>>()?;
        let hooks: Vec<Hook> =
            specs.iter().flat_map(|spec| spec["containerEdits"]["hooks"].as_array().into_iter().flatten().map(hook_of)).collect();
        let init = Init::start(pod).map_err(|e| format!("a process in the pod's namespace: {e}"))?;
        let (node, state) = (self.node.try_clone().map_err(|e| e.to_string())?, state(pod, "timed", &init));
        let run_all = move || {
            let begin = Instant::now();
            hooks.iter().try_for_each(|hook| run(&node, hook, &state.to_string())).map(|()| begin.elapsed())
        };
        tokio::task::spawn_blocking(run_all).await.map_err(|e| e.to_string())?
    }

    /// The runtime refuses a container with a device that no spec has.
    fn cdi_spec(&self, claim: &Claim) -> Result<Value, String> {
        let file = self.path(&format!("cdi/dranic-{}-{}.json", self.options.driver, claim.uid));
        let text = std::fs::read(&file).map_err(|e| format!("unresolvable CDI devices: {}: {e}", file.display()))?;
        serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", file.display()))
    }
}

fn hook_of(hook: &Value) -> Hook {
    let arguments = hook["args"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned);
    (hook["path"].as_str().unwrap_or_default().to_owned(), arguments.collect())
}

/// What the OCI runtime tells hooks.
fn state(pod: &Pod, container: &str, init: &Init) -> Value {
    json!({"ociVersion": "1.1.0", "id": container, "status": "creating", "pid": init.0.id(), "bundle": "/does/not/exist",
        "annotations": {"io.kubernetes.cri.sandbox-uid": pod.uid, "io.kubernetes.cri.sandbox-id": pod.sandbox.id,
            "io.kubernetes.cri.sandbox-name": pod.name, "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.container-name": container}})
}

/// A process in the pod's network namespace; it ends with this.
struct Init(Child);

impl Init {
    fn start(pod: &Pod) -> std::io::Result<Self> {
        let netns = pod.netns.netns().map_err(std::io::Error::other)?;
        let mut sleep = Command::new("sleep");
        sleep.arg("120").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // A child is in the namespaces of the thread that makes it.
        netns.run(|| sleep.spawn()).map_err(std::io::Error::other)?.map(Self)
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Hooks run on the host, with the container's state on their standard input.
fn run(node: &Node, (path, arguments): &Hook, state: &str) -> Result<(), String> {
    let mut command = Command::new(path);
    command.args(arguments.iter().skip(1)).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = NodeCommand::spawn(node, &mut command).map_err(|e| format!("{path}: {e}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read it says so by itself.
        let _ = stdin.write_all(state.as_bytes());
    }
    let output = child.wait_with_output().map_err(|e| format!("{path}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("error running hook: {}, stderr: {}", output.status, String::from_utf8_lossy(&output.stderr)))
}
