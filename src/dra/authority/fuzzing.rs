//! Target `headers`: any frames through the filter in front of the registration socket.

use fluke_hpack::Decoder;

use super::*;
use crate::fuzzing::Input;

/// Frames with a head of any bytes and up to 255 bytes of payload; the filter's output must be HTTP/2 that refers to no dynamic table.
pub(crate) fn headers(data: &[u8]) {
    let (mut input, mut filter, mut out) = (Input(data), HeaderFilter::default(), Vec::new());
    while let (Some(len), Some(kind), Some(flags), Some(stream)) = (input.byte(), input.byte(), input.byte(), input.byte()) {
        let payload = input.take(usize::from(len));
        let head = Head { len: payload.len(), kind, flags, stream: u32::from(stream) };
        if filter.frame(head, payload, &mut out).is_err() {
            break;
        }
    }
    read_back(&out);
}

fn read_back(mut bytes: &[u8]) {
    let mut fragment = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD_LEN>() {
        let head = Head::parse(*head);
        assert!(head.len <= FRAME_MAX, "a frame of {} bytes", head.len);
        let (payload, rest) = rest.split_at(head.len);
        bytes = rest;
        match head.kind {
            frame::HEADERS => {
                assert!(fragment.is_empty() && head.flags & frame::PADDED == 0);
                fragment.extend_from_slice(&payload[if head.flags & frame::PRIORITY == 0 { 0 } else { 5 }..]);
            }
            frame::CONTINUATION => fragment.extend_from_slice(payload),
            _ => continue,
        }
        if head.flags & frame::END_HEADERS != 0 {
            // A decoder of its own for each block: none may need what an earlier one left.
            let fields = Decoder::new().decode(&std::mem::take(&mut fragment));
            let fields = fields.unwrap_or_else(|error| panic!("{error:?}"));
            assert!(fields.iter().all(|(name, value)| name != b":authority" || value == b"localhost"));
        }
    }
    assert!(bytes.is_empty() && fragment.is_empty(), "it ends in the middle");
}
