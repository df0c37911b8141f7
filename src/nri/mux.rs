//! Two logical connections over one socket (`docs/architecture.md`; NRI package `net/multiplex`).
//!
//! Every byte on the socket belongs to a frame: connection id and payload length, both 32 bits big-endian, then the payload.
//! Logical connections open and close without any signal; the socket's end is the end of all of them.
//!
//! A frame that starts a ttrpc message must not exceed [`FIRST_FRAME`] bytes, because the Go side reads through a buffer of that
//! size and closes the connection on a larger frame; many small frames overflow its queue. So the writing side collects whole
//! ttrpc messages and sends each as one or two frames, whatever pieces the layer above wrote.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, PollSender};

/// Logical connection on which the runtime calls the plugin.
pub const PLUGIN_SERVICE: u32 = 1;
/// Logical connection on which the plugin calls the runtime.
pub const RUNTIME_SERVICE: u32 = 2;
/// Largest payload of a frame, in bytes: a ttrpc message of 4 MiB and its header.
pub const MAX_PAYLOAD: usize = MESSAGE_HEADER + MAX_MESSAGE;
/// Largest frame that may start a ttrpc message, in bytes.
pub const FIRST_FRAME: usize = 4096;

const FRAME_HEADER: usize = 8;
const MESSAGE_HEADER: usize = 10;
const MAX_MESSAGE: usize = 4 << 20;
/// Arena the reader fills, in bytes; chunks handed on are slices of it.
const READ_ARENA: usize = 64 << 10;
/// Chunks that may wait for a logical connection's reader.
const INCOMING_CHUNKS: usize = 256;
/// Messages that may wait for the socket.
const OUTGOING_MESSAGES: usize = 16;

/// The socket under the logical connections. Dropping it closes everything.
#[derive(Debug)]
pub struct Trunk {
    close: Arc<CloseSignal>,
    tasks: Vec<JoinHandle<()>>,
}

/// One close signal with its first reason.
#[derive(Debug, Default)]
struct CloseSignal {
    token: CancellationToken,
    reason: OnceLock<String>,
}

impl CloseSignal {
    fn close(&self, reason: &str) {
        // Only the first reason is the cause; later ones are its consequences.
        let _ = self.reason.set(reason.to_owned());
        self.token.cancel();
    }
}

/// Starts reading and writing frames and returns one [`Channel`] for each of `ids`. Frames for other ids are dropped.
pub fn start<R, W, const N: usize>(reader: R, writer: W, ids: [u32; N]) -> (Trunk, [Channel; N])
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let close = Arc::new(CloseSignal::default());
    let (outgoing, queue) = mpsc::channel(OUTGOING_MESSAGES);
    let mut routes = Vec::with_capacity(N);
    let channels = ids.map(|id| {
        let (route, incoming) = mpsc::channel(INCOMING_CHUNKS);
        routes.push((id, route));
        Channel {
            id,
            incoming,
            current: Bytes::new(),
            assembler: Assembler::default(),
            outgoing: PollSender::new(outgoing.clone()),
            close: close.clone(),
        }
    });
    let tasks = vec![
        tokio::spawn(until_closed(close.clone(), read_frames(reader, routes))),
        tokio::spawn(until_closed(close.clone(), write_frames(writer, queue))),
    ];
    (Trunk { close, tasks }, channels)
}

impl Trunk {
    /// Waits until the connection is closed, by whichever side, and returns why.
    pub async fn closed(&self) -> String {
        self.close.token.cancelled().await;
        self.close.reason.get().cloned().unwrap_or_default()
    }

    /// Closes the connection and waits until the socket is closed, so that a new connection can't overlap with it.
    pub async fn shut_down(mut self, reason: &str) {
        self.close.close(reason);
        for task in self.tasks.drain(..) {
            // A task that panicked has dropped its half of the socket all the same.
            let _ = task.await;
        }
    }
}

impl Drop for Trunk {
    fn drop(&mut self) {
        self.close.close("dropped by this side");
    }
}

/// Runs one direction; its end is the end of the connection.
async fn until_closed(close: Arc<CloseSignal>, work: impl Future<Output = String>) {
    let reason = tokio::select! {
        () = close.token.cancelled() => return,
        reason = work => reason,
    };
    close.close(&reason);
}

async fn read_frames<R: AsyncRead + Unpin>(mut reader: R, routes: Vec<(u32, mpsc::Sender<Bytes>)>) -> String {
    let mut buf = BytesMut::with_capacity(READ_ARENA);
    let mut frames = Deframer::default();
    loop {
        buf.reserve(FIRST_FRAME);
        match reader.read_buf(&mut buf).await {
            Ok(0) if frames.is_between(&buf) => return "the runtime closed the connection".to_owned(),
            Ok(0) => return "the connection ended inside a frame".to_owned(),
            Ok(_) => {}
            Err(error) => return format!("read from the runtime failed: {error}"),
        }
        loop {
            match frames.next(&mut buf) {
                Ok(Some((id, chunk))) => {
                    if let Some((_, route)) = routes.iter().find(|(known, _)| *known == id) {
                        // An error means nobody reads this logical connection any more.
                        let _ = route.send(chunk).await;
                    }
                }
                Ok(None) => break,
                Err(FrameTooLong { id, length }) => {
                    return format!("the runtime announced a frame of {length} bytes on connection {id}, limit {MAX_PAYLOAD}");
                }
            }
        }
    }
}

/// A frame header that announces more than [`MAX_PAYLOAD`].
#[derive(Debug, PartialEq, Eq)]
struct FrameTooLong {
    id: u32,
    length: usize,
}

/// Cuts the incoming bytes into pieces of frames. Payload is handed on as it arrives, so memory never follows an announced length.
#[derive(Debug, Default)]
struct Deframer {
    id: u32,
    /// Payload bytes of the current frame that have not come yet.
    remaining: usize,
}

impl Deframer {
    /// The next piece of payload and its connection id; none when more bytes are needed.
    fn next(&mut self, buf: &mut BytesMut) -> Result<Option<(u32, Bytes)>, FrameTooLong> {
        while self.remaining == 0 {
            if buf.len() < FRAME_HEADER {
                return Ok(None);
            }
            let (id, length) = (buf.get_u32(), buf.get_u32() as usize);
            if length > MAX_PAYLOAD {
                return Err(FrameTooLong { id, length });
            }
            (self.id, self.remaining) = (id, length);
        }
        let size = self.remaining.min(buf.len());
        if size == 0 {
            return Ok(None);
        }
        self.remaining -= size;
        Ok(Some((self.id, buf.split_to(size).freeze())))
    }

    fn is_between(&self, buf: &BytesMut) -> bool {
        self.remaining == 0 && buf.is_empty()
    }
}

#[derive(Debug)]
enum Outgoing {
    /// One whole ttrpc message.
    Message(u32, Vec<u8>),
    /// A logical connection was given up: close after what is queued before it.
    GivenUp(u32),
}

async fn write_frames<W: AsyncWrite + Unpin>(mut writer: W, mut queue: mpsc::Receiver<Outgoing>) -> String {
    while let Some(item) = queue.recv().await {
        match item {
            Outgoing::Message(id, message) => {
                let written = async { writer.write_all(&frames(id, &message)).await.and(writer.flush().await) }.await;
                if let Err(error) = written {
                    return format!("write to the runtime failed: {error}");
                }
            }
            Outgoing::GivenUp(id) => return format!("connection {id} was closed by this side"),
        }
    }
    "closed by this side".to_owned()
}

/// The frame, or the two frames, that carry one ttrpc message.
fn frames(id: u32, message: &[u8]) -> Vec<u8> {
    let (first, rest) = message.split_at(message.len().min(FIRST_FRAME));
    let mut out = Vec::with_capacity(message.len() + 2 * FRAME_HEADER);
    for part in [first, rest].into_iter().filter(|part| !part.is_empty()) {
        out.extend_from_slice(&id.to_be_bytes());
        // Cannot truncate: the assembler lets no message pass that is longer than MAX_PAYLOAD.
        out.extend_from_slice(&(part.len() as u32).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}

/// Collects written bytes until a whole ttrpc message is there, by the length in its header.
#[derive(Debug, Default)]
struct Assembler {
    message: Vec<u8>,
}

impl Assembler {
    /// Takes bytes up to the end of the current message and returns how many.
    fn push(&mut self, mut bytes: &[u8]) -> io::Result<usize> {
        let offered = bytes.len();
        if self.message.len() < MESSAGE_HEADER {
            let (head, rest) = bytes.split_at(bytes.len().min(MESSAGE_HEADER - self.message.len()));
            self.message.extend_from_slice(head);
            bytes = rest;
        }
        if let Some(total) = self.total() {
            if total > MAX_PAYLOAD {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("ttrpc message of {total} bytes")));
            }
            let (body, rest) = bytes.split_at(bytes.len().min(total - self.message.len()));
            self.message.extend_from_slice(body);
            bytes = rest;
        }
        Ok(offered - bytes.len())
    }

    /// Length of the current message with its header, once known.
    fn total(&self) -> Option<usize> {
        let length = self.message.first_chunk::<4>().filter(|_| self.message.len() >= MESSAGE_HEADER)?;
        Some(MESSAGE_HEADER + u32::from_be_bytes(*length) as usize)
    }

    /// The message, if it is complete.
    fn take(&mut self) -> Option<Vec<u8>> {
        (self.total() == Some(self.message.len())).then(|| std::mem::take(&mut self.message))
    }
}

/// One logical connection: a byte stream to the layer above. Dropping it closes the whole trunk once all that was written is sent,
/// because nobody would answer on it any more.
#[derive(Debug)]
pub struct Channel {
    id: u32,
    incoming: mpsc::Receiver<Bytes>,
    current: Bytes,
    assembler: Assembler,
    outgoing: PollSender<Outgoing>,
    close: Arc<CloseSignal>,
}

impl AsyncRead for Channel {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.current.is_empty() {
            match ready!(self.incoming.poll_recv(cx)) {
                Some(chunk) => self.current = chunk,
                None => return Poll::Ready(Ok(())),
            }
        }
        let size = self.current.len().min(buf.remaining());
        buf.put_slice(&self.current.split_to(size));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Channel {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        // A place in the queue comes first: bytes once taken can't be given back.
        if ready!(self.outgoing.poll_reserve(cx)).is_err() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = self.assembler.push(buf)?;
        if let Some(message) = self.assembler.take() {
            let item = Outgoing::Message(self.id, message);
            self.outgoing.send_item(item).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        }
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let queued = self.outgoing.get_ref().is_some_and(|queue| queue.try_send(Outgoing::GivenUp(self.id)).is_ok());
        if !queued {
            self.close.close("a logical connection was closed by this side");
        }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
#[cfg(test)]
mod tests;
