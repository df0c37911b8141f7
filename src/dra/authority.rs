//! The filter in front of the registration socket.
//!
//! The kubelet sends `:authority: %2Fvar%2Flib%2F…` there, which the `http` crate refuses; it is replaced by `localhost`.
//!
//! The filter is half-duplex: it takes the client's header blocks apart, because HPACK has state and a block can't be edited in
//! place, and copies every other frame and the whole way back unchanged. It therefore ends the client's HPACK context: our
//! server sees blocks that refer to nothing but the static table.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod hpack;
#[cfg(test)]
mod tests;

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

/// What every client connection begins with, RFC 9113 3.4.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Length of a frame's head in bytes, RFC 9113 4.1.
const HEAD_LEN: usize = 9;
/// Largest frame payload in bytes: the default of `SETTINGS_MAX_FRAME_SIZE`, and our server advertises no other.
pub const FRAME_MAX: usize = 16_384;
/// Largest header block we take or make, in bytes. The kubelet's have about 200.
pub const BLOCK_MAX: usize = 64 * 1024;
/// Most CONTINUATION frames of one block, so that empty ones can't go on for ever.
const CONTINUATIONS_MAX: usize = 64;

/// Frame types and flags, RFC 9113 6.
mod frame {
    pub(super) const HEADERS: u8 = 0x1;
    pub(super) const PUSH_PROMISE: u8 = 0x5;
    pub(super) const CONTINUATION: u8 = 0x9;
    pub(super) const END_STREAM: u8 = 0x1;
    pub(super) const END_HEADERS: u8 = 0x4;
    pub(super) const PADDED: u8 = 0x8;
    pub(super) const PRIORITY: u8 = 0x20;
}

/// Why a connection was closed by the filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// Reading or writing failed; mostly the client went away in the middle of a frame.
    #[error("connection lost: {0}")]
    Io(#[from] io::Error),
    /// The client does not speak HTTP/2 as it should.
    #[error("malformed HTTP/2 from the client: {0}")]
    Malformed(&'static str),
}

/// Stands between `client` and `server` until one side ends.
///
/// # Errors
/// When the client sends something malformed, or a connection breaks. Both are then closed, as they are dropped.
pub async fn relay<C, S>(client: C, server: S) -> Result<(), FilterError>
where
    C: AsyncRead + AsyncWrite,
    S: AsyncRead + AsyncWrite,
{
    let (client_in, mut client_out) = tokio::io::split(client);
    let (mut server_in, mut server_out) = tokio::io::split(server);
    let up = async {
        filter(BufReader::new(client_in), &mut server_out).await?;
        Ok::<_, FilterError>(server_out.shutdown().await?)
    };
    let down = async {
        tokio::io::copy(&mut server_in, &mut client_out).await?;
        Ok::<_, FilterError>(client_out.shutdown().await?)
    };
    tokio::pin!(down);
    // A server that is done ends it; a client that is done may still wait for answers.
    tokio::select! {
        done = &mut down => return done,
        done = up => done?,
    }
    down.await
}

/// Copies the client's frames to the server until the client closes, header blocks through [`HeaderFilter`].
async fn filter<R, W>(mut client: BufReader<R>, server: &mut W) -> Result<(), FilterError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    // Someone may connect only to see whether we are alive.
    if client.fill_buf().await?.is_empty() {
        return Ok(());
    }
    let mut preface = [0; PREFACE.len()];
    client.read_exact(&mut preface).await?;
    if &preface != PREFACE {
        return Err(FilterError::Malformed("it does not begin with the HTTP/2 preface"));
    }
    server.write_all(PREFACE).await?;

    let mut headers = HeaderFilter::default();
    let (mut payload, mut out) = (Vec::new(), Vec::new());
    while !client.fill_buf().await?.is_empty() {
        let mut raw = [0; HEAD_LEN];
        client.read_exact(&mut raw).await?;
        let head = Head::parse(raw);
        if head.len > FRAME_MAX {
            return Err(FilterError::Malformed("a frame is larger than 16384 bytes"));
        }
        payload.resize(head.len, 0);
        client.read_exact(&mut payload).await?;
        out.clear();
        headers.frame(head, &payload, &mut out)?;
        server.write_all(&out).await?;
    }
    Ok(())
}

/// The head of a frame, RFC 9113 4.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    /// Of the payload, in bytes.
    len: usize,
    kind: u8,
    flags: u8,
    /// Stream id, with the reserved bit as it came.
    stream: u32,
}

impl Head {
    fn parse(raw: [u8; HEAD_LEN]) -> Self {
        let [a, b, c, kind, flags, stream @ ..] = raw;
        Self { len: u32::from_be_bytes([0, a, b, c]) as usize, kind, flags, stream: u32::from_be_bytes(stream) }
    }

    fn write(self, out: &mut Vec<u8>) {
        // At most 24 bits: every length written is bounded by FRAME_MAX.
        out.extend_from_slice(&(self.len as u32).to_be_bytes()[1..]);
        out.extend_from_slice(&[self.kind, self.flags]);
        out.extend_from_slice(&self.stream.to_be_bytes());
    }
}

/// A header block whose END_HEADERS has not come yet.
#[derive(Default)]
struct Block {
    stream: u32,
    /// END_STREAM and PRIORITY, as they came; padding is left out.
    flags: u8,
    /// The five bytes of the PRIORITY flag, or nothing.
    priority: Vec<u8>,
    fragment: Vec<u8>,
    continuations: usize,
}

/// The pure part: frames in, frames out.
#[derive(Default)]
struct HeaderFilter {
    hpack: hpack::Rewriter,
    open: Option<Block>,
}

impl HeaderFilter {
    /// Appends to `out` what the server shall get for this frame: nothing while a header block is incomplete.
    fn frame(&mut self, head: Head, payload: &[u8], out: &mut Vec<u8>) -> Result<(), FilterError> {
        let block = match (head.kind, self.open.take()) {
            (frame::HEADERS, None) => begin(head, payload)?,
            (frame::CONTINUATION, Some(block)) => extend(block, head, payload)?,
            (_, Some(_)) => return Err(FilterError::Malformed("a frame in the middle of a header block")),
            (frame::CONTINUATION, None) => return Err(FilterError::Malformed("CONTINUATION without HEADERS")),
            (frame::PUSH_PROMISE, None) => return Err(FilterError::Malformed("PUSH_PROMISE from a client")),
            (_, None) => {
                head.write(out);
                out.extend_from_slice(payload);
                return Ok(());
            }
        };
        if head.flags & frame::END_HEADERS == 0 {
            self.open = Some(block);
            return Ok(());
        }
        let encoded = self.hpack.rewrite(&block.fragment)?;
        write_block(&block, &encoded, out);
        Ok(())
    }
}

/// Takes a HEADERS frame: flags, padding, priority, first part of the block.
fn begin(head: Head, payload: &[u8]) -> Result<Block, FilterError> {
    const SHORT: FilterError = FilterError::Malformed("a HEADERS frame is shorter than its flags say");
    if head.stream & 0x7fff_ffff == 0 {
        return Err(FilterError::Malformed("HEADERS on stream 0"));
    }
    let mut rest = payload;
    if head.flags & frame::PADDED != 0 {
        let (&padding, after) = rest.split_first().ok_or(SHORT)?;
        rest = &after[..after.len().checked_sub(usize::from(padding)).ok_or(SHORT)?];
    }
    let priority_len = if head.flags & frame::PRIORITY != 0 { 5 } else { 0 };
    let (priority, fragment) = rest.split_at_checked(priority_len).ok_or(SHORT)?;
    Ok(Block {
        stream: head.stream,
        flags: head.flags & (frame::END_STREAM | frame::PRIORITY),
        priority: priority.to_vec(),
        fragment: fragment.to_vec(),
        continuations: 0,
    })
}

/// Takes a CONTINUATION frame.
fn extend(mut block: Block, head: Head, payload: &[u8]) -> Result<Block, FilterError> {
    if head.stream != block.stream {
        return Err(FilterError::Malformed("CONTINUATION of another stream"));
    }
    block.continuations += 1;
    if block.continuations > CONTINUATIONS_MAX || block.fragment.len() + payload.len() > BLOCK_MAX {
        return Err(FilterError::Malformed("a header block is larger than 64 KiB or has more than 64 CONTINUATION frames"));
    }
    block.fragment.extend_from_slice(payload);
    Ok(block)
}

/// Writes the block as one HEADERS frame and as many CONTINUATION frames as it takes.
fn write_block(block: &Block, encoded: &[u8], out: &mut Vec<u8>) {
    let first = encoded.len().min(FRAME_MAX - block.priority.len());
    let (mut part, mut rest) = encoded.split_at(first);
    let mut head =
        Head { len: block.priority.len() + part.len(), kind: frame::HEADERS, flags: block.flags, stream: block.stream };
    let mut prefix: &[u8] = &block.priority;
    loop {
        if rest.is_empty() {
            head.flags |= frame::END_HEADERS;
        }
        head.write(out);
        out.extend_from_slice(prefix);
        out.extend_from_slice(part);
        if rest.is_empty() {
            return;
        }
        (part, rest) = rest.split_at(rest.len().min(FRAME_MAX));
        prefix = &[];
        head = Head { len: part.len(), kind: frame::CONTINUATION, flags: 0, stream: block.stream };
    }
}
