//! A plugin that a test scripts: any failure policy, any misbehaviour. For checks of the double itself, of the runtimes it stands for,
//! and of what other plugins of the node may do.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dranic::nri::proto;
use prost::Message as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::wire::{self, DATA, GoReader, Message, REQUEST, RESPONSE, Request, Response, Status};

/// What this driver subscribes to.
const OUR_EVENTS: i32 = 0x000f;

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
    /// As a plugin from before NRI 0.12: it knows pod events as `StateChange` only, and refuses their RPCs as not implemented.
    Old,
    /// OK with this payload.
    Payload(Vec<u8>),
    /// With these bytes as the message's data, in frames of this shape.
    Data(Vec<u8>, Shape),
}

/// How a message is cut into frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// As Go does it: up to 4096 bytes, then all the rest.
    Go,
    /// One frame, whatever its size.
    Whole,
    /// Frames of so many bytes.
    Pieces(usize),
}

/// Who the plugin is and what it does.
#[derive(Debug, Clone)]
pub struct Script {
    /// Index in the order of the requests.
    pub index: String,
    /// Name.
    pub name: String,
    /// Its answer to Configure.
    pub events: i32,
    /// Its answer to Configure, too.
    pub policy: Option<proto::FailurePolicy>,
    /// What it does with requests.
    pub behaviour: Behaviour,
}

impl Script {
    /// Subscribes to what this driver does.
    pub fn new(index: &str, name: &str, policy: Option<proto::FailurePolicy>, behaviour: Behaviour) -> Self {
        Self { index: index.to_owned(), name: name.to_owned(), events: OUR_EVENTS, policy, behaviour }
    }
}

/// A request it got.
#[derive(Debug, Clone)]
pub struct Asked {
    /// When.
    pub at: Instant,
    /// Method as sent.
    pub method: String,
    /// Nanoseconds that the caller still has.
    pub timeout_nano: i64,
}

/// What it was told and asked.
#[derive(Debug, Default)]
struct Seen {
    asked: Mutex<Vec<Asked>>,
    /// The answer to RegisterPlugin.
    registered: watch::Sender<Option<Result<(), String>>>,
    /// Cancelled when the connection has ended.
    ended: CancellationToken,
}

/// The plugin; dropping it closes its connection.
pub struct ScriptedPlugin {
    seen: Arc<Seen>,
    _stop: DropGuard,
}

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
        Self::start(socket, Script::new(index, name, policy, behaviour)).await
    }

    /// Connects, registers and serves until the connection ends.
    ///
    /// # Errors
    /// If nobody listens.
    pub async fn start(socket: &Path, script: Script) -> io::Result<Self> {
        let (reader, mut writer) = UnixStream::connect(socket).await?.into_split();
        let registration = proto::RegisterPluginRequest {
            plugin_name: script.name.clone(),
            plugin_idx: script.index.clone(),
            nri_version: String::new(),
        };
        let (service, method) = (super::connection::RUNTIME.to_owned(), "RegisterPlugin".to_owned());
        let request = Request { service, method, payload: registration.encode_to_vec(), timeout_nano: 0 };
        wire::write_message(&mut writer, 2, &Message { stream: 1, kind: REQUEST, data: request.encode_to_vec() }).await?;
        let (seen, stop) = (Arc::new(Seen::default()), CancellationToken::new());
        let (serving, told, stopped) = (seen.clone(), seen.clone(), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                // What went wrong is seen at the other end.
                _ = serve(reader, writer, &script, &serving) => {}
                () = stopped.cancelled() => {}
            }
            told.ended.cancel();
        });
        Ok(Self { seen, _stop: stop.drop_guard() })
    }

    /// The requests so far, without Configure and Synchronize.
    pub fn asked(&self) -> Vec<Asked> {
        self.seen.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for the answer to its registration; none if the connection ends first.
    pub async fn registered(&self) -> Option<Result<(), String>> {
        let mut answer = self.seen.registered.subscribe();
        tokio::select! {
            answer = answer.wait_for(Option::is_some) => answer.ok().and_then(|answer| answer.clone()),
            () = self.seen.ended.cancelled() => None,
        }
    }

    /// Whether its connection has ended.
    pub fn has_ended(&self) -> bool {
        self.seen.ended.is_cancelled()
    }
}

/// What is to be written when.
type Answer = (Duration, Message, Shape);

async fn serve(mut reader: OwnedReadHalf, writer: OwnedWriteHalf, script: &Script, seen: &Seen) -> io::Result<()> {
    let (answers, queue) = mpsc::unbounded_channel::<(Message, Shape)>();
    let mut writing = tokio::task::JoinSet::new();
    writing.spawn(write(writer, queue));
    let mut readers = [GoReader::default(), GoReader::default()];
    loop {
        let (id, payload) = wire::read_frame(&mut reader).await?;
        let Some(messages) = (id as usize).checked_sub(1).and_then(|index| readers.get_mut(index)) else { continue };
        for message in messages.frame(&payload).map_err(io::Error::other)? {
            if id == 2 {
                seen.registered.send_replace(Some(registration(&message)));
                continue;
            }
            let (delay, message, shape) = match answer(&message, script, seen) {
                Some(answer) => answer,
                None if script.behaviour == Behaviour::Close => return Ok(()),
                None => continue,
            };
            let answers = answers.clone();
            writing.spawn(async move {
                tokio::time::sleep(delay).await;
                // An error means that the connection has ended.
                let _ = answers.send((message, shape));
            });
        }
    }
}

async fn write(mut writer: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<(Message, Shape)>) {
    while let Some((message, shape)) = queue.recv().await {
        let size = match shape {
            Shape::Go => {
                if wire::write_message(&mut writer, 1, &message).await.is_err() {
                    return;
                }
                continue;
            }
            Shape::Whole => usize::MAX,
            Shape::Pieces(size) => size,
        };
        for piece in message.encode().chunks(size) {
            if writer.write_all(&wire::frame(1, piece)).await.is_err() {
                return;
            }
        }
    }
}

fn registration(message: &Message) -> Result<(), String> {
    match Response::decode(&message.data[..]).map_err(|error| error.to_string())?.status {
        Some(status) if status.code != 0 => Err(status.message),
        _ => Ok(()),
    }
}

fn answer(message: &Message, script: &Script, seen: &Seen) -> Option<Answer> {
    let request = Request::decode(&message.data[..]).ok()?;
    let mut response = Response::default();
    let (mut kind, mut delay, mut raw) = (RESPONSE, Duration::ZERO, None);
    match request.method.as_str() {
        "Configure" => {
            response.payload = proto::ConfigureResponse { events: script.events, failure_policy: script.policy }.encode_to_vec();
        }
        "Synchronize" => {
            let more = proto::SynchronizeRequest::decode(&request.payload[..]).ok()?.more;
            response.payload = proto::SynchronizeResponse { more }.encode_to_vec();
        }
        _ => {
            let method = request.method;
            let asked = Asked { at: Instant::now(), method: method.clone(), timeout_nano: request.timeout_nano };
            seen.asked.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
            match &script.behaviour {
                Behaviour::Answer => {}
                Behaviour::AnswerAfter(time) => delay = *time,
                Behaviour::Silence | Behaviour::Close => return None,
                Behaviour::WrongType => kind = DATA,
                Behaviour::Refuse(code, text) => response.status = Some(Status { code: *code, message: text.clone() }),
                Behaviour::Old if matches!(&*method, "StateChange" | "CreateContainer") => {}
                Behaviour::Old => response.status = Some(Status { code: super::connection::UNIMPLEMENTED, message: method }),
                Behaviour::Payload(payload) => response.payload.clone_from(payload),
                Behaviour::Data(data, shape) => raw = Some((data.clone(), *shape)),
            }
        }
    }
    let (data, shape) = raw.unwrap_or_else(|| (response.encode_to_vec(), Shape::Go));
    Some((delay, Message { stream: message.stream, kind, data }, shape))
}
