//! The calls a kubelet makes, as methods of [`Containerd`].

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::Context;
use tonic::transport::Channel;

use super::{Containerd, IMAGE};

/// The messages of CRI v1 that we use.
#[allow(missing_docs, clippy::all, clippy::allow_attributes_without_reason, reason = "generated from cri.proto")]
pub mod v1 {
    tonic::include_proto!("runtime.v1");
}

use v1::runtime_service_client::RuntimeServiceClient;

/// A pod as a kubelet would ask for it.
#[derive(Debug, Clone, Default)]
pub struct PodSpec {
    /// Name of the Pod object.
    pub name: String,
    /// Uid of the Pod object.
    pub uid: String,
    /// Namespace of the Pod object.
    pub namespace: String,
    /// Shares the node's network namespace.
    pub host_network: bool,
    /// Which sandbox of the same pod this is, from 0; a kubelet counts up when a sandbox has died.
    pub attempt: u32,
    /// Annotations of the Pod object.
    pub annotations: BTreeMap<String, String>,
}

impl PodSpec {
    /// A pod with a network of its own in the namespace "default".
    #[must_use]
    pub fn new(name: &str, uid: &str) -> Self {
        Self { name: name.to_owned(), uid: uid.to_owned(), namespace: "default".to_owned(), ..Self::default() }
    }
}

/// What a program in a container wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exec {
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// Exit code.
    pub code: i32,
}

/// Each call fails with containerd's own status, of which the message of a failed NRI hook is a part.
impl Containerd {
    /// A client for calls that have no method here. It may be used in parallel with all others.
    #[must_use]
    pub fn client(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone())
    }

    /// Name and version of the runtime.
    pub async fn version(&self) -> Result<v1::VersionResponse, tonic::Status> {
        Ok(self.client().version(v1::VersionRequest::default()).await?.into_inner())
    }

    /// Starts a pod and returns the id of its sandbox.
    pub async fn run_pod_sandbox(&self, pod: &PodSpec) -> Result<String, tonic::Status> {
        let request = v1::RunPodSandboxRequest { config: Some(self.sandbox_config(pod)), runtime_handler: String::new() };
        Ok(self.client().run_pod_sandbox(request).await?.into_inner().pod_sandbox_id)
    }

    /// Stops a pod: its containers, then its network. Stopping twice is no error.
    pub async fn stop_pod_sandbox(&self, sandbox: &str) -> Result<(), tonic::Status> {
        self.client().stop_pod_sandbox(v1::StopPodSandboxRequest { pod_sandbox_id: sandbox.to_owned() }).await?;
        Ok(())
    }

    /// Removes a pod with its containers. Removing twice is no error.
    pub async fn remove_pod_sandbox(&self, sandbox: &str) -> Result<(), tonic::Status> {
        self.client().remove_pod_sandbox(v1::RemovePodSandboxRequest { pod_sandbox_id: sandbox.to_owned() }).await?;
        Ok(())
    }

    /// A pod's state and addresses.
    pub async fn pod_status(&self, sandbox: &str) -> Result<v1::PodSandboxStatus, tonic::Status> {
        let reply = self.pod_status_reply(sandbox, false).await?;
        reply.status.ok_or_else(|| tonic::Status::internal("PodSandboxStatus without status"))
    }

    /// The path of a pod's network namespace as the node's programs see it (`/var/run/netns/cni-...`).
    ///
    /// # Errors
    /// When the call fails, or the pod has none (host network, or stopped).
    pub async fn pod_netns(&self, sandbox: &str) -> anyhow::Result<String> {
        let reply = self.pod_status_reply(sandbox, true).await?;
        let info = reply.info.get("info").context("no verbose status")?;
        let info: serde_json::Value = serde_json::from_str(info)?;
        let namespaces = info["runtimeSpec"]["linux"]["namespaces"].as_array().context("no namespaces in the sandbox's spec")?;
        let network = namespaces.iter().find(|namespace| namespace["type"] == "network").context("no network namespace")?;
        Ok(network["path"].as_str().context("network namespace without path")?.to_owned())
    }

    /// All pods, in any state.
    pub async fn list_pods(&self) -> Result<Vec<v1::PodSandbox>, tonic::Status> {
        Ok(self.client().list_pod_sandbox(v1::ListPodSandboxRequest {}).await?.into_inner().items)
    }

    /// Makes a container of the busybox image in a pod; it sleeps. `cdi_devices` are names like `vendor.example/class=device`.
    pub async fn create_container(
        &self,
        sandbox: &str,
        pod: &PodSpec,
        name: &str,
        cdi_devices: &[&str],
    ) -> Result<String, tonic::Status> {
        let request = self.container_request(sandbox, pod, name, cdi_devices);
        Ok(self.client().create_container(request).await?.into_inner().container_id)
    }

    /// What [`Containerd::create_container`] asks for.
    #[must_use]
    pub fn container_request(
        &self,
        sandbox: &str,
        pod: &PodSpec,
        name: &str,
        cdi_devices: &[&str],
    ) -> v1::CreateContainerRequest {
        let devices = cdi_devices.iter().map(|&name| v1::CdiDevice { name: name.to_owned() });
        let config = v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata { name: name.to_owned(), attempt: 0 }),
            image: Some(v1::ImageSpec { image: IMAGE.to_owned() }),
            labels: labels(pod, Some(name)),
            linux: Some(v1::LinuxContainerConfig::default()),
            cdi_devices: devices.collect(),
            ..v1::ContainerConfig::default()
        };
        v1::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config),
            sandbox_config: Some(self.sandbox_config(pod)),
        }
    }

    /// Starts a container.
    pub async fn start_container(&self, container: &str) -> Result<(), tonic::Status> {
        self.client().start_container(v1::StartContainerRequest { container_id: container.to_owned() }).await?;
        Ok(())
    }

    /// Stops a container, at once (its process 1 ignores SIGTERM anyway).
    pub async fn stop_container(&self, container: &str) -> Result<(), tonic::Status> {
        self.client().stop_container(v1::StopContainerRequest { container_id: container.to_owned(), timeout: 0 }).await?;
        Ok(())
    }

    /// Removes a container.
    pub async fn remove_container(&self, container: &str) -> Result<(), tonic::Status> {
        self.client().remove_container(v1::RemoveContainerRequest { container_id: container.to_owned() }).await?;
        Ok(())
    }

    /// All containers, in any state.
    pub async fn list_containers(&self) -> Result<Vec<v1::Container>, tonic::Status> {
        Ok(self.client().list_containers(v1::ListContainersRequest {}).await?.into_inner().containers)
    }

    /// Runs a program in a container and waits for it, 10 s at most.
    pub async fn exec_sync(&self, container: &str, command: &[&str]) -> Result<Exec, tonic::Status> {
        let request = v1::ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: command.iter().map(|&word| word.to_owned()).collect(),
            timeout: EXEC_LIMIT.as_secs().cast_signed(),
        };
        let reply = self.client().exec_sync(request).await?.into_inner();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(Exec { stdout: text(&reply.stdout), stderr: text(&reply.stderr), code: reply.exit_code })
    }

    async fn pod_status_reply(&self, sandbox: &str, verbose: bool) -> Result<v1::PodSandboxStatusResponse, tonic::Status> {
        let request = v1::PodSandboxStatusRequest { pod_sandbox_id: sandbox.to_owned(), verbose };
        Ok(self.client().pod_sandbox_status(request).await?.into_inner())
    }

    fn sandbox_config(&self, pod: &PodSpec) -> v1::PodSandboxConfig {
        let network = if pod.host_network { v1::NamespaceMode::Node } else { v1::NamespaceMode::Pod };
        let namespaces = v1::NamespaceOption {
            network: network.into(),
            pid: v1::NamespaceMode::Container.into(),
            ipc: v1::NamespaceMode::Pod.into(),
        };
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                namespace: pod.namespace.clone(),
                attempt: pod.attempt,
            }),
            hostname: if pod.host_network { String::new() } else { pod.name.clone() },
            log_directory: String::new(), // no logs
            // Without it containerd copies the host's /etc/resolv.conf, which may point to what the node does not have.
            dns_config: Some(v1::DnsConfig { servers: vec!["127.0.0.1".to_owned()] }),
            labels: labels(pod, None),
            annotations: pod.annotations.clone().into_iter().collect(),
            linux: Some(v1::LinuxPodSandboxConfig {
                cgroup_parent: format!("{}/pod{}", self.node.cgroup(), pod.uid),
                security_context: Some(v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces),
                    privileged: false,
                }),
            }),
        }
    }
}

/// How long a program of [`Containerd::exec_sync`] may run.
const EXEC_LIMIT: Duration = Duration::from_secs(10);

/// The labels by which a kubelet finds its own pods and containers again.
fn labels(pod: &PodSpec, container: Option<&str>) -> HashMap<String, String> {
    [
        ("io.kubernetes.pod.name", Some(pod.name.as_str())),
        ("io.kubernetes.pod.namespace", Some(&pod.namespace)),
        ("io.kubernetes.pod.uid", Some(&pod.uid)),
        ("io.kubernetes.container.name", container),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())))
    .collect()
}
