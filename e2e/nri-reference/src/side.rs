//! The runtime's side in a case: the reference in one of its versions, or our double standing for that version.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use dranic_testbed::runtime::{Caller, ContainerSpec, Kind, RuntimeDouble, RuntimeOptions, SandboxSpec};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::reference::Reference;

/// A version of NRI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version {
    /// As in go/*.mod.
    pub(crate) number: &'static str,
    /// Knows failure policies (from 0.12.4 on).
    pub(crate) policies: bool,
    /// Pod events have RPCs of their own (from 0.12 on).
    pub(crate) dedicated: bool,
}

/// The newest, the newest without failure policies, and the one with `StateChange` that is most in use (containerd 2.0 and 2.1).
pub(crate) const VERSIONS: [Version; 3] = [
    Version { number: "0.12.5", policies: true, dedicated: true },
    Version { number: "0.12.3", policies: false, dedicated: true },
    Version { number: "0.8.0", policies: false, dedicated: false },
];

/// What a case runs against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Side {
    pub(crate) version: Version,
    /// The reference's program; none for the double.
    pub(crate) program: Option<PathBuf>,
}

impl Side {
    /// "reference 0.12.5" or "double 0.12.5".
    pub(crate) fn name(&self) -> String {
        format!("{} {}", if self.program.is_some() { "reference" } else { "double" }, self.version.number)
    }

    /// Why it can't be had here.
    pub(crate) fn missing(&self) -> Option<String> {
        let program = self.program.as_ref().filter(|program| !program.is_file())?;
        Some(format!("{} is not there: build.sh says why", program.display()))
    }
}

/// What the runtime is to be.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) socket: PathBuf,
    /// For one request to one plugin.
    pub(crate) request_timeout: Duration,
    pub(crate) registration_timeout: Duration,
    /// Pods that Synchronize tells.
    pub(crate) pods: Vec<SandboxSpec>,
    /// So many more pods with one container each, with so many bytes of annotations.
    pub(crate) generate: usize,
    pub(crate) padding: usize,
}

impl Settings {
    pub(crate) fn new(socket: PathBuf) -> Self {
        let (request_timeout, registration_timeout) = (Duration::from_secs(2), Duration::from_secs(5));
        Self { socket, request_timeout, registration_timeout, pods: Vec::new(), generate: 0, padding: 0 }
    }
}

/// How a request ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Done {
    /// Why it failed; none if it went on.
    pub(crate) error: Option<String>,
    pub(crate) elapsed: Duration,
    /// OCI hooks to be run at createRuntime: path and arguments.
    pub(crate) hooks: Vec<String>,
    /// Paths of devices to be added.
    pub(crate) devices: Vec<String>,
}

/// A running runtime side.
pub(crate) enum Runtime {
    Reference { program: PathBuf, log: PathBuf, settings: Settings, process: Mutex<Arc<Reference>> },
    Double(RuntimeDouble),
}

impl Runtime {
    /// Starts it; its log, if it has one, goes to `log`.
    pub(crate) async fn start(side: &Side, settings: Settings, log: &Path) -> Result<Self> {
        let Some(program) = side.program.clone() else { return Ok(Self::Double(double(side.version, settings)?)) };
        let process = launch(&program, log, &settings).await?;
        Ok(Self::Reference { program, log: log.to_owned(), settings, process: Mutex::new(Arc::new(process)) })
    }

    /// Sends a request to the plugins, within the runtime's own limits.
    pub(crate) async fn relay(
        &self,
        kind: Kind,
        pod: &SandboxSpec,
        container: Option<&ContainerSpec>,
        caller: Caller,
    ) -> Result<Done> {
        match self {
            Self::Reference { process, .. } => {
                let op = match kind {
                    Kind::Run => "run",
                    Kind::Stop => "stop_pod",
                    Kind::Remove => "remove",
                    Kind::Create => "create",
                };
                let answer = current(process).await.call(op, request(pod, container, caller)).await?;
                Ok(Done {
                    error: answer.error,
                    elapsed: Duration::from_micros(answer.elapsed),
                    hooks: answer.hooks.unwrap_or_default(),
                    devices: answer.devices.unwrap_or_default(),
                })
            }
            Self::Double(double) => {
                let relayed = double.relay(kind, pod, container, caller).await;
                let hooks = relayed.adjustments.iter().filter_map(|a| a.hooks.as_ref()).flat_map(|hooks| &hooks.create_runtime);
                let devices = relayed.adjustments.iter().filter_map(|a| a.linux.as_ref()).flat_map(|linux| &linux.devices);
                Ok(Done {
                    hooks: hooks.map(|hook| [std::slice::from_ref(&hook.path), &hook.args[..]].concat().join(" ")).collect(),
                    devices: devices.map(|device| device.path.clone()).collect(),
                    error: relayed.error,
                    elapsed: relayed.elapsed,
                })
            }
        }
    }

    /// "index-name" of the plugins that get requests, in their order.
    pub(crate) async fn plugins(&self) -> Result<Vec<String>> {
        match self {
            Self::Reference { process, .. } => {
                Ok(current(process).await.must("plugins", json!({})).await?.plugins.unwrap_or_default())
            }
            Self::Double(double) => Ok(double.plugins()),
        }
    }

    /// For one request to one plugin, from now on.
    pub(crate) async fn set_request_timeout(&self, limit: Duration) -> Result<()> {
        match self {
            Self::Reference { process, .. } => {
                current(process).await.must("timeout", json!({"request_timeout": limit.as_millis()})).await?;
            }
            Self::Double(double) => double.set_request_timeout(limit),
        }
        Ok(())
    }

    /// The pods that Synchronize tells from now on.
    pub(crate) async fn list(&self, pods: &[SandboxSpec]) -> Result<()> {
        match self {
            Self::Reference { process, .. } => {
                let pods: Vec<_> = pods.iter().map(pod_of).collect();
                current(process).await.must("list", json!({ "pods": pods })).await?;
            }
            Self::Double(double) => {
                double.clear_pods();
                pods.iter().for_each(|pod| double.add_pod(pod.clone(), Vec::new()));
            }
        }
        Ok(())
    }

    /// Ends it: told to (the socket goes), or killed (the socket stays and refuses).
    pub(crate) async fn down(&self, clean: bool) -> Result<()> {
        match self {
            Self::Reference { process, .. } => {
                let process = current(process).await;
                if clean {
                    process.must("stop", json!({})).await?;
                }
                process.kill().await
            }
            Self::Double(double) => {
                double.stop(clean).await;
                Ok(())
            }
        }
    }

    /// Starts it again after [`down`](Self::down).
    pub(crate) async fn up(&self) -> Result<()> {
        match self {
            Self::Reference { program, log, settings, process } => {
                let again = launch(program, log, settings).await?;
                *process.lock().await = Arc::new(again);
                Ok(())
            }
            Self::Double(double) => Ok(double.up()?),
        }
    }
}

/// Not locked for the length of a command: several may run.
async fn current(process: &Mutex<Arc<Reference>>) -> Arc<Reference> {
    process.lock().await.clone()
}

async fn launch(program: &Path, log: &Path, settings: &Settings) -> Result<Reference> {
    let process = Reference::start(program, log)?;
    let start = json!({
        "socket": settings.socket,
        "name": "containerd",
        "version": "v2.4.2",
        "request_timeout": settings.request_timeout.as_millis(),
        "registration_timeout": settings.registration_timeout.as_millis(),
        "pods": settings.pods.iter().map(pod_of).collect::<Vec<_>>(),
        "generate": settings.generate,
        "padding": settings.padding,
    });
    process.must("start", start).await.context("start of the reference")?;
    Ok(process)
}

fn pod_of(pod: &SandboxSpec) -> Value {
    json!({
        "id": pod.id, "uid": pod.uid, "name": pod.name, "namespace": pod.namespace,
        "netns": pod.netns_path.clone().unwrap_or_default(),
    })
}

fn request(pod: &SandboxSpec, container: Option<&ContainerSpec>, caller: Caller) -> Value {
    let milliseconds = |limit: Option<Duration>| limit.map_or(0, |limit| limit.as_millis());
    let container = container.map(|container| json!({"id": container.id, "name": container.name, "env": container.env}));
    json!({
        "pod": pod_of(pod),
        "container": container,
        "deadline": milliseconds(caller.deadline),
        "cancel": milliseconds(caller.cancel),
    })
}

/// The double with the options that stand for this version.
fn double(version: Version, settings: Settings) -> Result<RuntimeDouble> {
    let newest = RuntimeOptions::new(&settings.socket);
    let options = match (version.policies, version.dedicated) {
        (true, true) => newest,
        (false, true) => RuntimeOptions { honours_policy: false, nri_version: format!("v{}", version.number), ..newest },
        (false, false) => RuntimeOptions::old(&settings.socket),
        (true, false) => bail!("there is no such version"),
    };
    let (request_timeout, registration_timeout) = (settings.request_timeout, settings.registration_timeout);
    let double = RuntimeDouble::start(RuntimeOptions { request_timeout, registration_timeout, ..options })?;
    for pod in settings.pods {
        double.add_pod(pod, Vec::new());
    }
    for number in 0..settings.generate {
        let id = format!("g{number:05}");
        let container = ContainerSpec { id: format!("c-{id}"), name: "main".to_owned(), ..ContainerSpec::default() };
        let pod = SandboxSpec {
            uid: format!("foreign-{id}"),
            name: format!("pod-{id}"),
            namespace: "default".to_owned(),
            netns_path: Some(format!("/run/netns/{id}")),
            padding: settings.padding,
            id,
            ..SandboxSpec::default()
        };
        double.add_pod(pod, vec![container]);
    }
    Ok(double)
}
