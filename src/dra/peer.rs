//! Another instance of this driver, asked as the kubelet asks it: while one agent hands the node over to the next, calls that still come
//! to the first go to the second.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::proto::v1;
use super::proto::v1::dra_plugin_client::DraPluginClient;
use super::{ClaimError, PreparedDevice};
use crate::ledger::ClaimRef;
use crate::names::DeviceName;

/// As long as the kubelet waits for us (`kubelet/pkg/cm/dra`), about.
const LIMIT: Duration = Duration::from_secs(40);

/// The DRA socket of another instance beside `own`, if one answers there.
pub async fn find(own: &Path) -> Option<PathBuf> {
    let folder = own.parent()?;
    let others = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let sockets = others.filter(|path| path != own && path.extension().is_some_and(|extension| extension == "sock"));
    for socket in sockets.collect::<Vec<_>>() {
        if UnixStream::connect(&socket).await.is_ok() {
            return Some(socket);
        }
    }
    None
}

/// Has it prepare the claim.
///
/// # Errors
/// Its refusal, or why it could not be asked.
pub async fn prepare(socket: &Path, claim: &ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
    let request = v1::NodePrepareResourcesRequest { claims: vec![on_the_wire(claim)] };
    let answer = client(socket, claim).await?.node_prepare_resources(limited(request)).await.map_err(|e| failed(claim, &e))?;
    let Some(answer) = answer.into_inner().claims.remove(claim.uid.as_str()) else { return Err(failed(claim, &"no answer")) };
    if !answer.error.is_empty() {
        return Err(ClaimError(answer.error));
    }
    answer.devices.into_iter().map(|device| prepared(device).map_err(|e| failed(claim, &e))).collect()
}

/// Has it unprepare the claim.
///
/// # Errors
/// As [`prepare`].
pub async fn unprepare(socket: &Path, claim: &ClaimRef) -> Result<(), ClaimError> {
    let request = v1::NodeUnprepareResourcesRequest { claims: vec![on_the_wire(claim)] };
    let answer = client(socket, claim).await?.node_unprepare_resources(limited(request)).await.map_err(|e| failed(claim, &e))?;
    match answer.into_inner().claims.remove(claim.uid.as_str()) {
        Some(answer) if answer.error.is_empty() => Ok(()),
        Some(answer) => Err(ClaimError(answer.error)),
        None => Err(failed(claim, &"no answer")),
    }
}

async fn client(socket: &Path, claim: &ClaimRef) -> Result<DraPluginClient<Channel>, ClaimError> {
    let path = socket.to_owned();
    let connect = move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    };
    // The name is never looked up: the connector goes to the socket.
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(service_fn(connect)).await.map_err(|e| failed(claim, &e))?;
    Ok(DraPluginClient::new(channel))
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(LIMIT);
    request
}

fn on_the_wire(claim: &ClaimRef) -> v1::Claim {
    v1::Claim { namespace: claim.namespace.clone(), uid: claim.uid.to_string(), name: claim.name.clone() }
}

fn prepared(device: v1::Device) -> Result<PreparedDevice, String> {
    Ok(PreparedDevice {
        request_names: device.request_names,
        pool: device.pool_name,
        device: DeviceName::new(device.device_name).map_err(|e| e.to_string())?,
        cdi_device_ids: device.cdi_device_ids,
        share_id: device.share_id,
    })
}

fn failed(claim: &ClaimRef, why: &dyn std::fmt::Display) -> ClaimError {
    ClaimError(format!(
        "claim {claim}: the agent that takes this node over could not be asked: {why}; the kubelet will try again"
    ))
}
