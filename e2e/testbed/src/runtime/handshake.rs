//! From an accepted connection to a plugin in the list.

use std::sync::Arc;
use std::time::Instant;

use dranic::nri::proto;
use prost::Message as _;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::connection::{Connection, Failure, RUNTIME};
use super::log::What;
use super::pods::{Synchronized, parts};
use super::wire::{Request, Status};
use super::{Inner, Plugin};

/// Left of a message for service, method and lengths, in bytes.
const ENVELOPE: usize = 1024;

/// What goes wrong with the next connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// RegisterPlugin is refused with this text; the connection stays open and unused, as with the real runtime.
    Refuse(String),
    /// Closed instead of the answer to RegisterPlugin.
    CloseBeforeAnswer,
    /// Closed between RegisterPlugin's answer and Configure.
    CloseBeforeConfigure,
    /// Closed between Configure and Synchronize.
    CloseBeforeSynchronize,
}

/// Registers, configures and synchronises one plugin; an error closes its connection, or leaves it unused after a refusal.
pub(super) async fn handshake(inner: &Arc<Inner>, stream: UnixStream) {
    let (connection, requests) = Connection::start(stream, inner.log.clone());
    // If the double stops in the middle of this, the connection ends too.
    let guard = connection.closed.clone().drop_guard();
    inner.log.add("", What::Connected);
    let mut name = String::new();
    match establish(inner, &connection, requests, &mut name).await {
        Ok(()) => drop(guard.disarm()),
        Err(End::Close(reason)) => {
            connection.close(&reason).await;
            inner.log.add(&name, What::Gone(reason));
        }
        Err(End::Refuse(reason)) => {
            guard.disarm();
            inner.log.add(&name, What::Refused(reason));
            inner.refused.lock().await.push(connection);
        }
    }
}

enum End {
    Close(String),
    Refuse(String),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Close(format!("{failure:?}"))
    }
}

fn close_if(fault: Option<&Fault>, point: &Fault) -> Result<(), End> {
    if fault == Some(point) { Err(End::Close(format!("{point:?}"))) } else { Ok(()) }
}

async fn establish(
    inner: &Arc<Inner>,
    connection: &Arc<Connection>,
    mut requests: mpsc::Receiver<(u32, Request)>,
    name: &mut String,
) -> Result<(), End> {
    let fault = inner.faults.lock().await.pop_front();
    let fault = fault.as_ref();
    let (index, stream) = registration(inner, connection, &mut requests, name, fault).await?;
    close_if(fault, &Fault::CloseBeforeAnswer)?;
    let mut configured = None;
    if inner.options.configure_first {
        configured = Some(configure(inner, connection, name).await?);
    }
    sleep(inner.options.register_delay).await;
    connection.answer(stream, None).await?;
    inner.log.add(name, What::Registered);
    close_if(fault, &Fault::CloseBeforeConfigure)?;
    let configured = match configured {
        Some(configured) => configured,
        None => configure(inner, connection, name).await?,
    };
    close_if(fault, &Fault::CloseBeforeSynchronize)?;
    // As in the runtime: nothing happens to pods from before Synchronize until the plugin is in the list.
    let _no_requests = inner.requests.lock().await;
    synchronize(inner, connection, name).await?;
    let plugin = Plugin {
        name: name.clone(),
        index,
        events: if configured.events == 0 { inner.options.valid_events } else { configured.events },
        policy: configured.failure_policy.unwrap_or_default(),
        state_change: (!inner.options.dedicated_rpcs).into(),
        connection: connection.clone(),
    };
    inner.add(plugin);
    Ok(())
}

async fn registration(
    inner: &Inner,
    connection: &Connection,
    requests: &mut mpsc::Receiver<(u32, Request)>,
    name: &mut String,
    fault: Option<&Fault>,
) -> Result<(String, u32), End> {
    let request = timeout(inner.options.registration_timeout, requests.recv()).await;
    let Ok(Some((stream, request))) = request else {
        return Err(End::Close("no registration in time".to_owned()));
    };
    if (request.service.as_str(), request.method.as_str()) != (RUNTIME, "RegisterPlugin") {
        return Err(End::Close(format!("{}/{} before registration", request.service, request.method)));
    }
    let request = proto::RegisterPluginRequest::decode(&request.payload[..]).map_err(|error| End::Close(error.to_string()))?;
    *name = format!("{}-{}", request.plugin_idx, request.plugin_name);
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_.+-".contains(c) || !inner.options.checks_names;
    let refusal = match fault {
        Some(Fault::Refuse(text)) => Some(text.clone()),
        _ if request.plugin_name.is_empty() || !request.plugin_name.chars().all(allowed) => Some("invalid name".to_owned()),
        _ if request.plugin_idx.len() != 2 || !request.plugin_idx.bytes().all(|b| b.is_ascii_digit()) => {
            Some("invalid index".to_owned())
        }
        _ => None,
    };
    match refusal {
        Some(text) => {
            connection.answer(stream, Some(Status { code: 2, message: text.clone() })).await?;
            Err(End::Refuse(text))
        }
        None => Ok((request.plugin_idx, stream)),
    }
}

async fn configure(inner: &Inner, connection: &Connection, name: &str) -> Result<proto::ConfigureResponse, End> {
    let options = &inner.options;
    let milliseconds = |limit: std::time::Duration| if options.tells_timeouts { limit.as_millis() as i64 } else { 0 };
    let request = proto::ConfigureRequest {
        config: String::new(),
        runtime_name: options.runtime_name.clone(),
        runtime_version: options.runtime_version.clone(),
        registration_timeout: milliseconds(options.registration_timeout),
        request_timeout: milliseconds(inner.request_timeout()),
        nri_version: options.nri_version.clone(),
    };
    let answer = connection.call("Configure", request.encode_to_vec(), inner.request_timeout()).await?;
    inner.log.add(name, What::Configured(answer.clone()));
    let answer = proto::ConfigureResponse::decode(&answer[..]).map_err(|error| End::Close(error.to_string()))?;
    if answer.events & !options.valid_events != 0 {
        return Err(End::Close(format!("invalid plugin events {:#x}", answer.events)));
    }
    Ok(answer)
}

/// All parts share one request timeout.
async fn synchronize(inner: &Inner, connection: &Connection, name: &str) -> Result<(), End> {
    let start = Instant::now();
    let (pods, containers) = inner.objects();
    for part in parts(pods, containers, inner.options.message_limit - ENVELOPE) {
        let limit = inner.request_timeout().saturating_sub(start.elapsed());
        let answer = connection.call("Synchronize", part.encode_to_vec(), limit).await?;
        let answer = Synchronized::decode(&answer[..]).map_err(|error| End::Close(error.to_string()))?;
        if answer.more != part.more || (part.more && !answer.updates.is_empty()) {
            return Err(End::Close("plugin does not handle split sync requests".to_owned()));
        }
        let (pods, containers) = (part.pods.len(), part.containers.len());
        inner.log.add(name, What::SyncPart { pods, containers, more: part.more });
    }
    Ok(())
}
