//! A plugin that a test scripts: any failure policy, any misbehaviour. For checks of the double itself, and of what other plugins of
//! the node may do.

use std::io;
use std::path::Path;
use std::time::Duration;

use dranic::nri::proto;
use prost::Message as _;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::wire::{self, DATA, GoReader, Message, REQUEST, RESPONSE, Request, Response, Status};

/// How it answers pod and container requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Behaviour {
    /// OK and nothing else.
    Answer,
    /// OK, this much later; other requests are answered meanwhile.
    AnswerAfter(Duration),
    /// Never.
    Silence,
    /// By closing the connection.
    Close,
    /// With a message of the wrong type.
    WrongType,
    /// With this status.
    Refuse(i32, String),
}

/// The plugin; dropping it closes its connection.
pub struct ScriptedPlugin(JoinHandle<io::Result<()>>);

impl ScriptedPlugin {
    /// Connects as `index`-`name`, subscribes to what this driver does and serves until the connection ends.
    ///
    /// # Errors
    /// If nobody listens.
    pub async fn connect(
        socket: &Path,
        index: &str,
        name: &str,
        policy: Option<proto::FailurePolicy>,
        behaviour: Behaviour,
    ) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket).await?;
        let payload = proto::RegisterPluginRequest {
            plugin_name: name.to_owned(),
            plugin_idx: index.to_owned(),
            nri_version: String::new(),
        }
        .encode_to_vec();
        let service = super::connection::RUNTIME.to_owned();
        let request = Request { service, method: "RegisterPlugin".to_owned(), payload, timeout_nano: 0 };
        let message = Message { stream: 1, kind: REQUEST, data: request.encode_to_vec() };
        wire::write_message(&mut stream, 2, &message).await?;
        Ok(Self(tokio::spawn(serve(stream, policy, behaviour))))
    }
}

impl Drop for ScriptedPlugin {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn serve(stream: UnixStream, policy: Option<proto::FailurePolicy>, behaviour: Behaviour) -> io::Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    let (answers, mut queue) = tokio::sync::mpsc::unbounded_channel::<(Duration, Message)>();
    let writing = tokio::spawn(async move {
        while let Some((delay, message)) = queue.recv().await {
            tokio::time::sleep(delay).await;
            if wire::write_message(&mut writer, 1, &message).await.is_err() {
                break;
            }
        }
    });
    let mut messages = GoReader::default();
    loop {
        let (id, payload) = wire::read_frame(&mut reader).await?;
        if id != 1 {
            continue;
        }
        for message in messages.frame(&payload).map_err(io::Error::other)? {
            match answer(&message, policy, &behaviour) {
                Some((delay, answer)) => answers.send((delay, answer)).unwrap_or_default(),
                None if behaviour == Behaviour::Close => {
                    writing.abort();
                    return Ok(());
                }
                None => {}
            }
        }
    }
}

fn answer(message: &Message, policy: Option<proto::FailurePolicy>, behaviour: &Behaviour) -> Option<(Duration, Message)> {
    let request = Request::decode(&message.data[..]).ok()?;
    let mut response = Response::default();
    let (mut kind, mut delay) = (RESPONSE, Duration::ZERO);
    match request.method.as_str() {
        "Configure" => {
            response.payload = proto::ConfigureResponse { events: 0x000f, failure_policy: policy }.encode_to_vec();
        }
        "Synchronize" => {
            let more = proto::SynchronizeRequest::decode(&request.payload[..]).ok()?.more;
            response.payload = proto::SynchronizeResponse { more }.encode_to_vec();
        }
        _ => match behaviour {
            Behaviour::Answer => {}
            Behaviour::AnswerAfter(time) => delay = *time,
            Behaviour::Silence | Behaviour::Close => return None,
            Behaviour::WrongType => kind = DATA,
            Behaviour::Refuse(code, text) => response.status = Some(Status { code: *code, message: text.clone() }),
        },
    }
    Some((delay, Message { stream: message.stream, kind, data: response.encode_to_vec() }))
}
