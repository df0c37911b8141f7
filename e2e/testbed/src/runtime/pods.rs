//! Pods and containers as the double stores and sends them: encoded once, with padding where a test wants size.

use dranic::nri::proto;
use prost::Message as _;

/// A pod sandbox to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SandboxSpec {
    /// The runtime's id.
    pub id: String,
    /// Pod UID.
    pub uid: String,
    /// Pod name.
    pub name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Path of the network namespace; none for a pod on the host's network.
    pub netns_path: Option<String>,
    /// The pod's addresses, where the runtime was killed while it made the sandbox: they are all that it knows of its namespaces.
    pub lost: Option<Vec<String>>,
    /// Size of an annotation to add, in bytes.
    pub padding: usize,
}

/// A container to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ContainerSpec {
    /// The runtime's id.
    pub id: String,
    /// Name in the pod.
    pub name: String,
    /// Fully qualified CDI device names.
    pub cdi_devices: Vec<String>,
    /// Environment, `NAME=value`: what CDI specs brought as well.
    pub env: Vec<String>,
    /// Programs to run at `createRuntime`, that CDI specs brought.
    pub create_runtime: Vec<String>,
}

/// Every request about a pod, with the parts already encoded. On the wire the same as the message it stands for.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct PodRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) pod: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) container: Vec<u8>,
}

/// `StateChangeEvent`, likewise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct StateChange {
    #[prost(int32, tag = "1")]
    pub(super) event: i32,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) pod: Vec<u8>,
}

/// `SynchronizeRequest`, likewise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Synchronize {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub(super) pods: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(super) containers: Vec<Vec<u8>>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
}

/// `SynchronizeResponse`, likewise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(super) struct Synchronized {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub(super) updates: Vec<Vec<u8>>,
    #[prost(bool, tag = "2")]
    pub(super) more: bool,
}

/// The field of a pod that our own protocol file leaves out.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Annotations {
    #[prost(btree_map = "string, string", tag = "6")]
    annotations: std::collections::BTreeMap<String, String>,
}

impl SandboxSpec {
    /// Encoded `PodSandbox`; `stopped` pods have no process and no namespaces left.
    pub(crate) fn encode(&self, stopped: bool) -> Vec<u8> {
        let namespace = |kind: &str, path: &str| proto::LinuxNamespace { r#type: kind.to_owned(), path: path.to_owned() };
        let mut namespaces = vec![namespace("pid", ""), namespace("ipc", ""), namespace("mount", "")];
        if let Some(path) = &self.netns_path {
            namespaces.push(namespace("network", path));
        }
        if self.lost.is_some() {
            namespaces.clear();
        }
        let pod = proto::PodSandbox {
            id: self.id.clone(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            linux: Some(proto::LinuxPodSandbox { namespaces }),
            pid: if stopped { 0 } else { 4711 },
            ips: self.lost.clone().unwrap_or_default(),
        };
        let mut bytes = pod.encode_to_vec();
        if self.padding > 0 {
            // Fields may come in any order and in pieces, so appending them is right.
            let annotation = ("padding".to_owned(), "x".repeat(self.padding));
            bytes.extend(Annotations { annotations: [annotation].into() }.encode_to_vec());
        }
        bytes
    }
}

impl ContainerSpec {
    /// Encoded `Container`.
    pub(super) fn encode(&self, sandbox: &str, state: i32) -> Vec<u8> {
        let cdi_devices = self.cdi_devices.iter().map(|name| proto::CdiDevice { name: name.clone() }).collect();
        let hook = |path: &String| proto::Hook { path: path.clone(), ..proto::Hook::default() };
        let create_runtime = self.create_runtime.iter().map(hook).collect();
        proto::Container {
            id: self.id.clone(),
            pod_sandbox_id: sandbox.to_owned(),
            name: self.name.clone(),
            state,
            env: self.env.clone(),
            hooks: Some(proto::Hooks { create_runtime, ..proto::Hooks::default() }),
            cdi_devices,
        }
        .encode_to_vec()
    }
}

/// Splits what is to be synchronised into messages of at most `limit` bytes of data.
pub(super) fn parts(pods: Vec<Vec<u8>>, containers: Vec<Vec<u8>>, limit: usize) -> Vec<Synchronize> {
    let mut parts = vec![Synchronize::default()];
    let mut size = 0;
    let objects = pods.into_iter().map(|pod| (true, pod)).chain(containers.into_iter().map(|container| (false, container)));
    for (is_pod, object) in objects {
        // A key, up to four bytes of length, the object.
        let cost = object.len() + 5;
        if size + cost > limit && size > 0 {
            parts.push(Synchronize::default());
            size = 0;
        }
        size += cost;
        if let Some(part) = parts.last_mut() {
            if is_pod { part.pods.push(object) } else { part.containers.push(object) }
        }
    }
    let last = parts.len() - 1;
    parts.iter_mut().take(last).for_each(|part| part.more = true);
    parts
}
