//! The registration service: who we are, and what the kubelet thinks of it.

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{error, info};

use super::Registration;
use crate::dra::proto::registration::registration_server;
use crate::dra::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};

/// The kubelet's name for plugins like us.
const PLUGIN_TYPE: &str = "DRAPlugin";
/// Of the plugin services the kubelet takes the first one it knows; of the health services the newest.
const VERSIONS: [&str; 4] = ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
/// Longest refusal that is kept, in characters.
const REFUSAL_MAX: usize = 1024;

/// Answers the kubelet's plugin manager.
pub(super) struct Registrar {
    pub(super) driver: String,
    /// Absolute path of the DRA socket.
    pub(super) endpoint: String,
    pub(super) state: watch::Sender<Registration>,
}

#[tonic::async_trait]
impl registration_server::Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.into(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: VERSIONS.map(Into::into).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            info!(driver = self.driver, "registered with the kubelet");
            self.state.send_replace(Registration::Registered);
        } else {
            let text: String = status.error.chars().take(REFUSAL_MAX).collect();
            error!(driver = self.driver, error = text, "the kubelet refuses this driver and will try again");
            self.state.send_replace(Registration::Refused(text));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
