//! The DRA service in both versions: conversions around [`Calls`].

use tonic::{Request, Response, Status};

use super::calls::{Answers, Calls, WireClaim};
use crate::dra::proto::{v1, v1beta1};
use crate::dra::{ClaimHandler, PreparedDevice};

/// The service of one version; `$device` makes its message from a [`PreparedDevice`].
macro_rules! dra_service {
    ($version:ident, $device:expr) => {
        impl From<$version::Claim> for WireClaim {
            fn from(claim: $version::Claim) -> Self {
                Self { namespace: claim.namespace, uid: claim.uid, name: claim.name }
            }
        }

        #[tonic::async_trait]
        impl<H: ClaimHandler> $version::dra_plugin_server::DraPlugin for Calls<H> {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers: Answers<Vec<PreparedDevice>> = self.prepare(claims).await?;
                let answer = |result: Result<Vec<PreparedDevice>, String>| match result {
                    Ok(devices) => $version::NodePrepareResourceResponse {
                        devices: devices.into_iter().map($device).collect(),
                        error: String::new(),
                    },
                    Err(error) => $version::NodePrepareResourceResponse { devices: Vec::new(), error },
                };
                let claims = answers.into_iter().map(|(uid, result)| (uid, answer(result))).collect();
                Ok(Response::new($version::NodePrepareResourcesResponse { claims }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers: Answers<()> = self.unprepare(claims).await?;
                let answer = |result: Result<(), String>| $version::NodeUnprepareResourceResponse {
                    error: result.err().unwrap_or_default(),
                };
                let claims = answers.into_iter().map(|(uid, result)| (uid, answer(result))).collect();
                Ok(Response::new($version::NodeUnprepareResourcesResponse { claims }))
            }
        }
    };
}

dra_service!(v1, |device: PreparedDevice| v1::Device {
    request_names: device.request_names,
    pool_name: device.pool,
    device_name: device.device.to_string(),
    cdi_device_ids: device.cdi_device_ids,
    share_id: device.share_id,
});

dra_service!(v1beta1, |device: PreparedDevice| v1beta1::Device {
    request_names: device.request_names,
    pool_name: device.pool,
    device_name: device.device.to_string(),
    cdi_device_ids: device.cdi_device_ids,
});
