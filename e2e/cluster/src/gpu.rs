//! A second DRA driver beside ours, `gpu.example.com`, in this process: to kubelets and scheduler a driver as any, with devices that
//! are not there. It serves the kubelet of each node over sockets in the node's own folders.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dranic::dra::authority;
use dranic::dra::proto::registration::registration_server::{Registration, RegistrationServer};
use dranic::dra::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use dranic::dra::proto::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use dranic::dra::proto::v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use futures_util::TryStreamExt;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{Api, DeleteParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::io::DuplexStream;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::context::{Context, wait};

/// Its driver name, and the name of its DeviceClass.
pub(crate) const GPU: &str = "gpu.example.com";
/// Where the kubelet expects the driver's folder and the sockets that register.
const PLUGIN: &str = "var/lib/kubelet/plugins/gpu.example.com";
const REGISTRATION: &str = "var/lib/kubelet/plugins_registry/gpu.example.com-reg.sock";
/// Longest path of a Unix socket in bytes, unix(7).
const SOCKET_PATH_MAX: usize = 107;

/// A device that each node has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gpu {
    pub(crate) name: &'static str,
    pub(crate) root: &'static str,
    pub(crate) numa: u32,
}

/// What the kubelets said.
#[derive(Debug, Default)]
struct Told {
    /// Nodes whose kubelets took the driver.
    registered: BTreeSet<String>,
    /// UIDs of claims.
    prepared: BTreeSet<String>,
}

/// The driver. Its sockets go when it is dropped; slices and class belong to the scenario's namespace, and go with it at the latest.
pub(crate) struct Driver {
    client: Client,
    slices: Vec<String>,
    files: Vec<PathBuf>,
    told: Arc<Mutex<Told>>,
    stop: CancellationToken,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.cancel();
        for file in &self.files {
            // The folder comes after what is in it; with the node it may be gone.
            let _ = if file.ends_with(GPU) { std::fs::remove_dir(file) } else { std::fs::remove_file(file) };
        }
    }
}

impl Driver {
    /// Registers with all kubelets and publishes `gpus` on each node.
    pub(crate) async fn start(c: &Context, gpus: &[Gpu]) -> Result<Self> {
        let client = c.cluster.client.clone();
        let (told, stop) = (Arc::default(), CancellationToken::new());
        let mut driver = Self { client: client.clone(), slices: Vec::new(), files: Vec::new(), told, stop };
        let namespace = Api::<Namespace>::all(client.clone()).get(&c.namespace).await?;
        let owner = json!([{"apiVersion": "v1", "kind": "Namespace", "name": c.namespace, "uid": namespace.uid()}]);
        let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": GPU, "ownerReferences": owner},
            "spec": {"selectors": [{"cel": {"expression": format!("device.driver == \"{GPU}\"")}}]}});
        Api::<DeviceClass>::all(client.clone()).create(&PostParams::default(), &serde_json::from_value(class)?).await?;
        for node in &c.cluster.nodes {
            let root = PathBuf::from(format!("/proc/{}/root", c.cluster.init_pid(node)?));
            driver.serve(node, &root).with_context(|| format!("the second driver on {node}"))?;
            let slice: ResourceSlice = serde_json::from_value(slice(node, gpus, &owner))?;
            driver.slices.push(slice.name_any());
            Api::all(client.clone()).create(&PostParams::default(), &slice).await?;
        }
        wait(Duration::from_secs(30), "the kubelets register the second driver", || async {
            let registered = driver.told().registered.clone();
            ensure!(registered.iter().eq(&c.cluster.nodes), "{registered:?} did");
            Ok(())
        })
        .await?;
        Ok(driver)
    }

    /// Both sockets of a node whose files are below `root`.
    fn serve(&mut self, node: &str, root: &Path) -> Result<()> {
        std::fs::create_dir_all(root.join(PLUGIN))?;
        let plugin = Plugin { node: node.to_owned(), client: self.client.clone(), told: self.told.clone() };
        let dra = self.bind(&root.join(PLUGIN).join("dra.sock"))?;
        self.files.push(root.join(PLUGIN));
        let server = Server::builder().add_service(DraPluginServer::new(plugin.clone()));
        tokio::spawn(server.serve_with_incoming_shutdown(dra, self.stop.clone().cancelled_owned()));
        // The kubelet calls as soon as this one is there.
        let registration = self.bind(&root.join(REGISTRATION))?.map_ok(with_filter);
        let server = Server::builder().add_service(RegistrationServer::new(plugin));
        tokio::spawn(server.serve_with_incoming_shutdown(registration, self.stop.clone().cancelled_owned()));
        Ok(())
    }

    fn bind(&mut self, path: &Path) -> Result<UnixListenerStream> {
        ensure!(path.as_os_str().len() <= SOCKET_PATH_MAX, "{} is too long for a socket", path.display());
        // Of a run that was killed.
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).with_context(|| format!("{}", path.display()))?;
        self.files.push(path.to_owned());
        Ok(UnixListenerStream::new(listener))
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the claim is prepared at the moment.
    pub(crate) fn is_prepared(&self, uid: &str) -> bool {
        self.told().prepared.contains(uid)
    }

    /// Removes everything.
    pub(crate) async fn close(self) -> Result<()> {
        let slices: Api<ResourceSlice> = Api::all(self.client.clone());
        for slice in &self.slices {
            slices.delete(slice, &DeleteParams::default()).await?;
        }
        Api::<DeviceClass>::all(self.client.clone()).delete(GPU, &DeleteParams::default()).await?;
        Ok(())
    }
}

fn slice(node: &str, gpus: &[Gpu], owner: &Value) -> Value {
    let device = |gpu: &Gpu| {
        json!({"name": gpu.name, "attributes": {
            "name": {"string": gpu.name},
            "resource.kubernetes.io/pcieRoot": {"string": gpu.root},
            "resource.kubernetes.io/numaNode": {"int": gpu.numa},
        }})
    };
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": {"name": format!("{node}-{GPU}"), "ownerReferences": owner},
        "spec": {
            "driver": GPU, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": gpus.iter().map(device).collect::<Vec<_>>(),
        },
    })
}

/// As our own agent does: the kubelet's `:authority` is refused by the HTTP library.
fn with_filter(client: UnixStream) -> DuplexStream {
    let (filter_side, server_side) = tokio::io::duplex(64 * 1024);
    tokio::spawn(authority::relay(client, filter_side));
    server_side
}

/// What the kubelet of one node talks to.
#[derive(Clone)]
struct Plugin {
    node: String,
    client: Client,
    told: Arc<Mutex<Told>>,
}

impl Plugin {
    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn prepare(&self, claim: &Claim) -> Result<Vec<Device>> {
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        let allocation = claims.get(&claim.name).await?.status.and_then(|s| s.allocation).context("it is not allocated")?;
        let results = allocation.devices.and_then(|d| d.results).unwrap_or_default();
        let ours = results.into_iter().filter(|result| result.driver == GPU);
        let device = |r: k8s_openapi::api::resource::v1::DeviceRequestAllocationResult| Device {
            request_names: vec![r.request],
            pool_name: r.pool,
            device_name: r.device,
            ..Device::default()
        };
        let devices: Vec<_> = ours.map(device).collect();
        ensure!(!devices.is_empty(), "no device of it is of {GPU}");
        self.told().prepared.insert(claim.uid.clone());
        Ok(devices)
    }
}

#[tonic::async_trait]
impl Registration for Plugin {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".into(),
            name: GPU.into(),
            // As the kubelet sees it.
            endpoint: format!("/{PLUGIN}/dra.sock"),
            supported_versions: vec!["v1.DRAPlugin".into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = status.into_inner();
        if status.plugin_registered {
            self.told().registered.insert(self.node.clone());
        } else {
            println!("        note: the kubelet of {} refuses {GPU}: {}", self.node, status.error);
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl DraPlugin for Plugin {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut answer = NodePrepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let result = match self.prepare(&claim).await {
                Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
                Err(error) => NodePrepareResourceResponse { devices: Vec::new(), error: format!("{error:#}") },
            };
            answer.claims.insert(claim.uid, result);
        }
        Ok(Response::new(answer))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut answer = NodeUnprepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            self.told().prepared.remove(&claim.uid);
            answer.claims.insert(claim.uid, NodeUnprepareResourceResponse::default());
        }
        Ok(Response::new(answer))
    }
}
