//! Unary gRPC over raw HTTP/2 on a Unix socket, with the bytes that grpc-go sends when it is given a path and a dialer of its own: the
//! kubelet's way to the registration socket. A client built on hyper can't send this `:authority`.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use fluke_hpack::Decoder;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::hpack::Encoder;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// How the server refused a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// It reset the stream, with this HTTP/2 error; 1 is PROTOCOL_ERROR.
    Reset(u32),
    /// It closes the connection, with this HTTP/2 error.
    GoAway(u32),
    /// A gRPC status other than OK.
    Status {
        /// The number.
        code: u32,
        /// The text, percent-encoded as it came.
        message: String,
    },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset(code) => write!(f, "stream reset with HTTP/2 error {code}"),
            Self::GoAway(code) => write!(f, "connection closed with HTTP/2 error {code}"),
            Self::Status { code, message } => write!(f, "gRPC status {code}: {message}"),
        }
    }
}

impl std::error::Error for Refused {}

/// One connection; calls go one after the other.
pub struct Connection {
    stream: UnixStream,
    authority: String,
    encoder: Encoder,
    decoder: Decoder<'static>,
    last_stream: u32,
    /// What the server advertised so far: identifiers and values of SETTINGS.
    pub settings: Vec<(u16, u32)>,
}

/// A path as grpc-go makes an authority of it: all but unreserved characters are escaped.
pub fn escape(path: &str) -> String {
    path.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
        text
    })
}

impl Connection {
    /// Connects and sends preface and settings.
    ///
    /// # Errors
    /// When nobody listens or the path is not UTF-8.
    pub async fn open(path: &Path) -> anyhow::Result<Self> {
        let authority = escape(path.to_str().context("the path is not UTF-8")?);
        let mut stream = UnixStream::connect(path).await?;
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
        let (encoder, decoder) = (Encoder::default(), Decoder::new());
        let mut connection = Self { stream, authority, encoder, decoder, last_stream: 0, settings: Vec::new() };
        connection.send(SETTINGS, 0, 0, &[]).await?;
        Ok(connection)
    }

    /// Calls `path` (`/package.Service/Method`) and waits at most `deadline`, which the server is told too.
    ///
    /// # Errors
    /// With a [`Refused`] inside when the server refused; otherwise when the connection or a message is broken, or time is up.
    pub async fn unary<A: Message, B: Message + Default>(
        &mut self,
        path: &str,
        message: &A,
        deadline: Duration,
    ) -> anyhow::Result<B> {
        let call = self.exchange(path, message, deadline);
        timeout(deadline, call).await.with_context(|| format!("{path}: no answer within {deadline:?}"))?
    }

    async fn exchange<A: Message, B: Message + Default>(
        &mut self,
        path: &str,
        message: &A,
        deadline: Duration,
    ) -> anyhow::Result<B> {
        // Client streams have odd numbers.
        self.last_stream = if self.last_stream == 0 { 1 } else { self.last_stream + 2 };
        let id = self.last_stream;
        let grpc_timeout = format!("{}u", deadline.as_micros());
        let authority = self.authority.clone();
        let block = self.encoder.encode(&[
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", &authority),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-go/1.82.1"),
            ("te", "trailers"),
            ("grpc-timeout", &grpc_timeout),
        ]);
        self.send(HEADERS, END_HEADERS, id, &block).await?;
        let body = message.encode_to_vec();
        let mut data = vec![0];
        data.extend(u32::try_from(body.len())?.to_be_bytes());
        data.extend(body);
        self.send(DATA, END_STREAM, id, &data).await?;
        self.answer(id).await
    }

    async fn answer<B: Message + Default>(&mut self, id: u32) -> anyhow::Result<B> {
        let mut body = Vec::new();
        loop {
            let (kind, flags, stream, payload) = self.receive().await?;
            match kind {
                SETTINGS if flags & ACK == 0 => {
                    let value = |c: &[u8]| (u16::from_be_bytes([c[0], c[1]]), u32::from_be_bytes([c[2], c[3], c[4], c[5]]));
                    self.settings.extend(payload.chunks_exact(6).map(value));
                    self.send(SETTINGS, ACK, 0, &[]).await?;
                }
                PING if flags & ACK == 0 => self.send(PING, ACK, 0, &payload).await?,
                GOAWAY => return Err(Refused::GoAway(code(payload.get(4..))).into()),
                RST_STREAM if stream == id => return Err(Refused::Reset(code(Some(&payload))).into()),
                DATA if stream == id => body.extend(payload),
                HEADERS if stream == id => {
                    ensure!(flags & !END_STREAM == END_HEADERS, "HEADERS with flags {flags:#x}, which this client does not know");
                    let fields = self.decoder.decode(&payload).map_err(|err| anyhow::anyhow!("HPACK: {err:?}"))?;
                    if flags & END_STREAM != 0 {
                        status(&fields)?;
                        return Ok(B::decode(body.get(5..).context("an answer without a message")?)?);
                    }
                }
                _ => {}
            }
        }
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> anyhow::Result<()> {
        let mut out = u32::try_from(payload.len())?.to_be_bytes()[1..].to_vec();
        out.extend([kind, flags]);
        out.extend(stream.to_be_bytes());
        out.extend(payload);
        Ok(self.stream.write_all(&out).await?)
    }

    async fn receive(&mut self) -> anyhow::Result<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.context("the server closed the connection")?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        ensure!(payload.len() <= 16_384, "a frame of {} bytes", payload.len());
        self.stream.read_exact(&mut payload).await?;
        Ok((kind, flags, u32::from_be_bytes(stream), payload))
    }
}

fn code(bytes: Option<&[u8]>) -> u32 {
    bytes.and_then(|bytes| bytes.first_chunk()).map_or(u32::MAX, |code| u32::from_be_bytes(*code))
}

fn status(fields: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
    let get =
        |name: &str| fields.iter().find(|(n, _)| n == name.as_bytes()).map(|(_, v)| String::from_utf8_lossy(v).into_owned());
    match get("grpc-status").as_deref() {
        Some("0") => Ok(()),
        Some(code) => Err(Refused::Status { code: code.parse()?, message: get("grpc-message").unwrap_or_default() }.into()),
        None => bail!("no grpc-status at the end of the stream"),
    }
}
