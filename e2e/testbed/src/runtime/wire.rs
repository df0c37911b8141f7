//! Frames and ttrpc messages as the Go side of NRI reads and writes them. Shares no code with the plugin's side on purpose.

use std::collections::VecDeque;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Size of the buffer through which ttrpc-go reads, in bytes.
const GO_BUFFER: usize = 4096;
/// Frames that may wait on one logical connection.
const GO_QUEUE: usize = 256;
/// Largest payload of a Go writer's frame.
const MAX_FRAME: usize = (4 << 20) + HEADER;
/// Largest data of a ttrpc message.
pub const MAX_DATA: usize = 4 << 20;
/// Length of a ttrpc message header.
pub const HEADER: usize = 10;

/// ttrpc message type of a request.
pub const REQUEST: u8 = 1;
/// ttrpc message type of a response.
pub const RESPONSE: u8 = 2;
/// ttrpc message type of stream data, never right in NRI.
pub const DATA: u8 = 3;

/// A ttrpc message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Stream id, odd and growing for a client's requests.
    pub stream: u32,
    /// [`REQUEST`], [`RESPONSE`] or [`DATA`].
    pub kind: u8,
    /// Encoded [`Request`] or [`Response`].
    pub data: Vec<u8>,
}

/// Data of a request.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Request {
    /// Full name of the service.
    #[prost(string, tag = "1")]
    pub service: String,
    /// Bare name of the method.
    #[prost(string, tag = "2")]
    pub method: String,
    /// Encoded NRI message.
    #[prost(bytes = "vec", tag = "3")]
    pub payload: Vec<u8>,
    /// Time the caller still has; 0 for no limit.
    #[prost(int64, tag = "4")]
    pub timeout_nano: i64,
}

/// Data of a response.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Response {
    /// Absent and code 0 both mean OK.
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    /// Encoded NRI message.
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
}

/// An error code of gRPC and its text.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Status {
    /// gRPC code.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// Text.
    #[prost(string, tag = "2")]
    pub message: String,
}

impl Message {
    /// Header and data.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.data.len());
        bytes.extend((self.data.len() as u32).to_be_bytes());
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend([self.kind, 0]);
        bytes.extend(&self.data);
        bytes
    }
}

/// One frame with any payload.
pub fn frame(id: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(8 + payload.len());
    bytes.extend(id.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Writes a message in the frames Go makes of it: up to 4096 bytes, then all the rest; a frame's header and payload are written
/// separately.
///
/// # Errors
/// If the socket is gone.
pub async fn write_message<W: AsyncWrite + Unpin>(writer: &mut W, id: u32, message: &Message) -> io::Result<()> {
    let bytes = message.encode();
    let (first, rest) = bytes.split_at(bytes.len().min(GO_BUFFER));
    for payload in [first, rest].into_iter().filter(|payload| !payload.is_empty()) {
        let framed = frame(id, payload);
        writer.write_all(&framed[..8]).await?;
        writer.write_all(&framed[8..]).await?;
    }
    writer.flush().await
}

/// Reads one frame: connection id and payload.
///
/// # Errors
/// If the socket is gone or the length is beyond what any Go writer sends.
pub async fn read_frame<R: AsyncRead + Unpin>(reader: &mut R) -> io::Result<(u32, Vec<u8>)> {
    let id = reader.read_u32().await?;
    let length = reader.read_u32().await? as usize;
    if length > MAX_FRAME {
        return Err(io::Error::other(format!("frame of {length} bytes")));
    }
    let mut payload = vec![0; length];
    reader.read_exact(&mut payload).await?;
    Ok((id, payload))
}

/// Puts the frames of one logical connection together under the rules of ttrpc-go's reader: each read takes one frame, which must fit
/// into what the reader offers. That is its 4096-byte buffer, or the rest of the current message when that is larger.
#[derive(Debug, Default)]
pub struct GoReader {
    buffered: VecDeque<u8>,
    /// Header of the message whose data is being read, and that data.
    current: Option<(Message, usize)>,
    /// Frames since the last whole message: all could wait in the queue at once.
    frames: usize,
}

impl GoReader {
    /// Takes one frame; returns the messages it completed.
    ///
    /// # Errors
    /// What makes Go close the connection.
    pub fn frame(&mut self, payload: &[u8]) -> Result<Vec<Message>, String> {
        self.frames += 1;
        if self.frames > GO_QUEUE {
            return Err("failed to queue payload for reading".to_owned());
        }
        let offered = match &self.current {
            Some((message, length)) => GO_BUFFER.max(length - message.data.len()),
            None => GO_BUFFER,
        };
        if payload.len() > offered {
            return Err(format!("frame of {} bytes where the reader offers {offered}", payload.len()));
        }
        self.buffered.extend(payload);
        let mut messages = Vec::new();
        while let Some(message) = self.message()? {
            self.frames = 0;
            messages.push(message);
        }
        Ok(messages)
    }

    fn message(&mut self) -> Result<Option<Message>, String> {
        if self.current.is_none() {
            if self.buffered.len() < HEADER {
                return Ok(None);
            }
            let header: Vec<u8> = self.buffered.drain(..HEADER).collect();
            let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let length = word(0) as usize;
            if length > MAX_DATA {
                return Err(format!("message of {length} bytes"));
            }
            self.current = Some((Message { stream: word(4), kind: header[8], data: Vec::new() }, length));
        }
        if let Some((message, length)) = &mut self.current {
            let size = (*length - message.data.len()).min(self.buffered.len());
            message.data.extend(self.buffered.drain(..size));
            if message.data.len() < *length {
                return Ok(None);
            }
        }
        Ok(self.current.take().map(|(message, _)| message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(size: usize) -> Message {
        Message { stream: 1, kind: RESPONSE, data: vec![7; size] }
    }

    #[test]
    fn frames_that_go_accepts() {
        let small = message(4086).encode();
        assert_eq!(GoReader::default().frame(&small).unwrap(), [message(4086)]);
        let large = message(6057).encode();
        let mut reader = GoReader::default();
        assert!(reader.frame(&large[..4096]).unwrap().is_empty());
        assert_eq!(reader.frame(&large[4096..]).unwrap(), [message(6057)]);
        let mut reader = GoReader::default();
        assert!(reader.frame(&large[..10]).unwrap().is_empty());
        assert_eq!(reader.frame(&large[10..]).unwrap(), [message(6057)]);
    }

    #[test]
    fn frames_that_go_refuses() {
        let large = message(6057).encode();
        assert!(GoReader::default().frame(&large).unwrap_err().contains("offers 4096"));
        let mut reader = GoReader::default();
        let bytes = message(2 << 20).encode();
        let refused = bytes.chunks(4096).find_map(|chunk| reader.frame(chunk).err());
        assert!(refused.unwrap().contains("queue"));
    }
}
