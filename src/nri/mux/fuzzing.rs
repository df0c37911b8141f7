//! Target `mux`: any bytes from the runtime in any pieces, and any bytes from the layer above in any pieces.

use super::*;

/// How a stream of frames ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    BetweenFrames,
    InsideFrame,
    TooLong { id: u32, length: usize },
}

/// Payload by connection, neighbours joined, and the end.
type Read = (Vec<(u32, Vec<u8>)>, End);

/// The first byte says how large the pieces are.
pub(crate) fn mux(data: &[u8]) {
    let Some((&piece, bytes)) = data.split_first() else { return };
    let piece = match usize::from(piece) {
        small @ 1..128 => small,
        large => (large & 127) * 64 + 1,
    };
    let expected = by_the_book(bytes);
    assert_eq!(read(bytes, piece), expected, "in pieces of {piece}");
    assert_eq!(read(bytes, usize::MAX), expected, "in one piece");
    write(bytes, piece);
}

/// What a frame is, said once more: id, length, payload.
fn by_the_book(mut bytes: &[u8]) -> Read {
    let mut seen = Vec::new();
    while let Some((header, rest)) = bytes.split_first_chunk::<8>() {
        let [a, b, c, d, length @ ..] = *header;
        let (id, length) = (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes(length) as usize);
        if length > 4 * 1024 * 1024 + 10 {
            return (seen, End::TooLong { id, length });
        }
        let there = length.min(rest.len());
        note(&mut seen, id, &rest[..there]);
        if there < length {
            return (seen, End::InsideFrame);
        }
        bytes = &rest[there..];
    }
    (seen, if bytes.is_empty() { End::BetweenFrames } else { End::InsideFrame })
}

/// The frames of one message on the plugin's connection.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    frames(PLUGIN_SERVICE, message)
}

fn note(seen: &mut Vec<(u32, Vec<u8>)>, id: u32, payload: &[u8]) {
    match seen.last_mut() {
        _ if payload.is_empty() => {}
        Some((last, bytes)) if *last == id => bytes.extend_from_slice(payload),
        _ => seen.push((id, payload.to_vec())),
    }
}

fn read(bytes: &[u8], piece: usize) -> Read {
    let (mut frames, mut buf, mut seen) = (Deframer::default(), BytesMut::new(), Vec::new());
    for piece in bytes.chunks(piece) {
        buf.extend_from_slice(piece);
        loop {
            match frames.next(&mut buf) {
                Ok(Some((id, chunk))) => {
                    assert!(!chunk.is_empty(), "an empty piece would be the end of a logical connection");
                    note(&mut seen, id, &chunk);
                }
                Ok(None) => break,
                Err(FrameTooLong { id, length }) => return (seen, End::TooLong { id, length }),
            }
        }
    }
    (seen, if frames.is_between(&buf) { End::BetweenFrames } else { End::InsideFrame })
}

/// What is written comes out as whole messages in frames that a Go reader takes.
fn write(bytes: &[u8], piece: usize) {
    let (mut assembler, mut sent) = (Assembler::default(), Vec::new());
    for mut piece in bytes.chunks(piece) {
        while !piece.is_empty() {
            let Ok(taken) = assembler.push(piece) else {
                let header = bytes[sent.len()..].first_chunk::<4>().copied().unwrap_or_default();
                assert!(u32::from_be_bytes(header) > 4 * 1024 * 1024, "refused with length {header:?}");
                return;
            };
            assert!(taken > 0, "nothing is taken: the writer would wait for ever");
            piece = &piece[taken..];
            if let Some(message) = assembler.take() {
                sent.extend(go_reads(&frames(PLUGIN_SERVICE, &message)));
            }
        }
    }
    assert!(bytes.starts_with(&sent));
    let open = &bytes[sent.len()..];
    let length = open.first_chunk::<4>().map(|length| u32::from_be_bytes(*length) as usize);
    assert!(length.is_none_or(|length| open.len() < 10 + length), "a whole message was kept back");
}

/// One message, read as Go's ttrpc reads: its header and up to 4096 bytes from the first frame, then the rest from one other.
fn go_reads(frames: &[u8]) -> Vec<u8> {
    let (mut rest, mut message) = (frames, Vec::new());
    let mut count = 0;
    while let Some((header, after)) = rest.split_first_chunk::<8>() {
        let [a, b, c, d, length @ ..] = *header;
        assert_eq!(u32::from_be_bytes([a, b, c, d]), PLUGIN_SERVICE);
        let (payload, after) = after.split_at(u32::from_be_bytes(length) as usize);
        let room = if count == 0 { 4096 } else { MAX_PAYLOAD };
        assert!(payload.len() <= room, "frame {count} has {} bytes", payload.len());
        message.extend_from_slice(payload);
        (rest, count) = (after, count + 1);
    }
    assert!(rest.is_empty() && (1..=2).contains(&count), "{count} frames");
    let length = message.first_chunk::<4>().map(|length| u32::from_be_bytes(*length) as usize);
    assert_eq!(length, Some(message.len() - 10), "not one whole message");
    message
}
