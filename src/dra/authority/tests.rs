use fluke_hpack::{Decoder, Encoder};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

use super::*;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

const ESCAPED: &[u8] = b"%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fdranic.dev-reg.sock";

fn fields(list: &[(&str, &[u8])]) -> Fields {
    list.iter().map(|(name, value)| (name.as_bytes().to_vec(), value.to_vec())).collect()
}

fn encode(encoder: &mut Encoder<'_>, fields: &Fields) -> Vec<u8> {
    encoder.encode(fields.iter().map(|(name, value)| (name.as_slice(), value.as_slice())))
}

fn expected(mut fields: Fields) -> Fields {
    for (name, value) in &mut fields {
        if name == b":authority" {
            *value = b"localhost".to_vec();
        }
    }
    fields
}

fn raw(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    Head { len: payload.len(), kind, flags, stream }.write(&mut out);
    out.extend_from_slice(payload);
    out
}

/// Splits bytes into frames.
fn frames(mut bytes: &[u8]) -> Vec<(Head, Vec<u8>)> {
    let mut list = Vec::new();
    while !bytes.is_empty() {
        let head = Head::parse(bytes[..HEAD_LEN].try_into().unwrap());
        list.push((head, bytes[HEAD_LEN..HEAD_LEN + head.len].to_vec()));
        bytes = &bytes[HEAD_LEN + head.len..];
    }
    list
}

/// Feeds frames to one filter; all that came out, or the first error.
fn run(input: &[u8]) -> Result<Vec<u8>, FilterError> {
    let mut filter = HeaderFilter::default();
    let mut out = Vec::new();
    for (head, payload) in frames(input) {
        filter.frame(head, &payload, &mut out)?;
    }
    Ok(out)
}

fn malformed(input: &[u8]) -> &'static str {
    match run(input) {
        Err(FilterError::Malformed(why)) => why,
        Err(FilterError::Io(err)) => panic!("{err}"),
        Ok(out) => panic!("not refused, {} bytes came out", out.len()),
    }
}

/// The fields of the only block in `bytes`, and the flags of its HEADERS frame.
fn block(decoder: &mut Decoder<'_>, bytes: &[u8]) -> (Fields, u8, Vec<u8>) {
    let list = frames(bytes);
    let mut fragment = Vec::new();
    let mut priority = Vec::new();
    for (i, (head, payload)) in list.iter().enumerate() {
        assert!(head.len <= FRAME_MAX);
        assert_eq!(head.kind, if i == 0 { frame::HEADERS } else { frame::CONTINUATION });
        assert_eq!(head.flags & frame::END_HEADERS != 0, i + 1 == list.len(), "END_HEADERS on the last frame only");
        let skip = if i == 0 && head.flags & frame::PRIORITY != 0 { 5 } else { 0 };
        priority.extend_from_slice(&payload[..skip]);
        fragment.extend_from_slice(&payload[skip..]);
    }
    (decoder.decode(&fragment).unwrap(), list[0].0.flags, priority)
}

#[test]
fn the_escaped_path_becomes_localhost() {
    let sent = fields(&[(":method", b"POST"), (":path", b"/x"), (":authority", ESCAPED), ("te", b"trailers")]);
    let input = raw(frame::HEADERS, frame::END_HEADERS, 1, &encode(&mut Encoder::new(), &sent));
    let (got, flags, _) = block(&mut Decoder::new(), &run(&input).unwrap());
    assert_eq!(got, expected(sent));
    assert_eq!(flags, frame::END_HEADERS);
}

/// RFC 7541 C.4: three requests with Huffman strings, where the second and third refer to the dynamic table.
#[test]
fn the_examples_of_the_rfc_are_understood() {
    let blocks: [&[u8]; 3] = [
        &[0x82, 0x86, 0x84, 0x41, 0x8c, 0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff],
        &[0x82, 0x86, 0x84, 0xbe, 0x58, 0x86, 0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf],
        &[
            0x82, 0x87, 0x85, 0xbf, 0x40, 0x88, 0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xa9, 0x7d, 0x7f, 0x89, 0x25, 0xa8, 0x49, 0xe9,
            0x5b, 0xb8, 0xe8, 0xb4, 0xbf,
        ],
    ];
    let mut filter = HeaderFilter::default();
    let mut decoder = Decoder::new();
    let last = [(":method", "GET"), (":scheme", "https"), (":path", "/index.html"), (":authority", "localhost")];
    let mut got = Vec::new();
    for (i, bytes) in blocks.iter().enumerate() {
        let head = Head { len: bytes.len(), kind: frame::HEADERS, flags: frame::END_HEADERS, stream: 1 + 2 * i as u32 };
        let mut out = Vec::new();
        filter.frame(head, bytes, &mut out).unwrap();
        got = block(&mut decoder, &out).0;
    }
    let want: Vec<_> = last.into_iter().chain([("custom-key", "custom-value")]).collect();
    assert_eq!(got, fields(&want.iter().map(|(n, v)| (*n, v.as_bytes())).collect::<Vec<_>>()));
}

/// Two calls on one connection, as Go's encoder (golang.org/x/net/http2/hpack) made them; the second is mostly indices.
#[test]
fn the_bytes_of_go_are_understood() {
    let blocks = [
        "8386459c62ba2d98d558598c84d83498f52fb4b31909b06931ea63115392a94f41ae54587b8ec545868346a8b0f5b632d054aa2c35d16cc6a9\
         1158598c84d9e9516192c1d4622f217bad61665d07275f5f8b1d75d0620d263d4c4d65647a8a9acac8b4c7602bbc25c340027465864d833505\
         b11f40899acac8b24d494f6a7f867df7df79eb7f",
        "8386c3c2c1c0bf7e8669f7df7db6ad",
    ];
    let mut filter = HeaderFilter::default();
    for (hex, timeout) in blocks.into_iter().zip(["999988u", "4999954u"]) {
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
        let mut out = Vec::new();
        let head = Head { len: bytes.len(), kind: frame::HEADERS, flags: frame::END_HEADERS, stream: 1 };
        filter.frame(head, &bytes, &mut out).unwrap();
        let want = fields(&[
            (":method", b"POST"),
            (":scheme", b"http"),
            (":path", b"/pluginregistration.Registration/GetInfo"),
            (":authority", b"localhost"),
            ("content-type", b"application/grpc"),
            ("user-agent", b"grpc-go/1.82.1"),
            ("te", b"trailers"),
            ("grpc-timeout", timeout.as_bytes()),
        ]);
        assert_eq!(block(&mut Decoder::new(), &out).0, want);
    }
}

#[test]
fn other_frames_pass_unchanged() {
    let input =
        [raw(0x4, 0, 0, &[0, 4, 0, 1, 0, 0]), raw(0x0, 0x9, 3, b"\x02ab\0\0"), raw(0xfe, 0xff, 0x8000_0001, b"x")].concat();
    assert_eq!(run(&input).unwrap(), input);
}

#[test]
fn a_client_may_shrink_its_table_but_not_outgrow_the_default() {
    let field = [0x82];
    assert!(run(&raw(frame::HEADERS, frame::END_HEADERS, 1, &[&[0x20][..], &field].concat())).is_ok());
    // 4096 = 31 + 97 + 31 * 128.
    assert!(run(&raw(frame::HEADERS, frame::END_HEADERS, 1, &[&[0x3f, 0xe1, 0x1f][..], &field].concat())).is_ok());
    malformed(&raw(frame::HEADERS, frame::END_HEADERS, 1, &[&[0x3f, 0xe2, 0x1f][..], &field].concat()));
}

#[test]
fn malformed_input_is_named() {
    let whole = |payload: &[u8]| raw(frame::HEADERS, frame::END_HEADERS, 1, payload);
    // The first two made the decoder panic.
    assert!(malformed(&whole(&[0x3f])).contains("ends early"));
    assert!(malformed(&whole(&[0x3f, 0xff, 0xff, 0xff, 0xff, 0xff])).contains("too long"));
    assert!(malformed(&whole(&[0x82, 0x20])).contains("behind a header field"));
    assert!(malformed(&whole(&[0x00, 0x05, b'a'])).contains("string ends early"));
    assert!(malformed(&whole(&[0xff, 0x7f])).contains("HPACK refuses"));
    assert!(malformed(&whole(&[0x82; 257])).contains("256 fields"));
    assert!(malformed(&raw(frame::HEADERS, frame::END_HEADERS, 0, &[0x82])).contains("stream 0"));
    for (flags, payload) in [(frame::PADDED, &[][..]), (frame::PADDED, &[2, 0][..]), (frame::PRIORITY, &[0; 4][..])] {
        assert!(malformed(&raw(frame::HEADERS, flags, 1, payload)).contains("shorter"));
    }
    assert!(malformed(&raw(frame::CONTINUATION, frame::END_HEADERS, 1, &[0x82])).contains("without HEADERS"));
    assert!(malformed(&raw(frame::PUSH_PROMISE, 0, 1, &[])).contains("PUSH_PROMISE"));
    let open = raw(frame::HEADERS, 0, 1, &[0x82]);
    assert!(malformed(&[open.clone(), raw(0x0, 0, 1, b"x")].concat()).contains("in the middle"));
    assert!(malformed(&[open.clone(), raw(frame::CONTINUATION, 0, 3, &[])].concat()).contains("another stream"));
    let flood = raw(frame::CONTINUATION, 0, 1, &[]).repeat(CONTINUATIONS_MAX + 1);
    assert!(malformed(&[open.clone(), flood].concat()).contains("more than 64"));
    let big = raw(frame::CONTINUATION, 0, 1, &[0; FRAME_MAX]).repeat(4);
    assert!(malformed(&[open, big].concat()).contains("64 KiB"));
}

#[test]
fn a_block_that_explodes_is_refused() {
    let mut payload = vec![0x40, 1, b'a', 0x7f, 0xa1, 0x1e]; // one field of 4000 bytes goes into the table ...
    payload.extend([b'x'; 4000]);
    payload.extend([0xbe; 200]); // ... and is named 200 times.
    assert!(malformed(&raw(frame::HEADERS, frame::END_HEADERS, 1, &payload)).contains("when decoded"));
}

#[tokio::test]
async fn the_relay_reads_piecemeal_and_copies_answers() {
    let (mut kubelet, client) = duplex(64);
    let (server, mut tonic) = duplex(64);
    let relay = tokio::spawn(relay(client, server));
    let sent = fields(&[(":path", b"/x"), (":authority", ESCAPED)]);
    let bytes = [&PREFACE[..], &raw(frame::HEADERS, frame::END_HEADERS, 1, &encode(&mut Encoder::new(), &sent))].concat();
    let writer = tokio::spawn(async move {
        for byte in bytes {
            kubelet.write_all(&[byte]).await.unwrap();
        }
        kubelet
    });
    let mut preface = [0; 24];
    tonic.read_exact(&mut preface).await.unwrap();
    assert_eq!(&preface, PREFACE);
    tonic.write_all(b"answer").await.unwrap();
    let mut kubelet = writer.await.unwrap();
    kubelet.shutdown().await.unwrap();
    let mut seen = Vec::new();
    tonic.read_to_end(&mut seen).await.unwrap();
    assert_eq!(block(&mut Decoder::new(), &seen).0, expected(sent));
    drop(tonic);
    let mut answer = Vec::new();
    kubelet.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"answer");
    relay.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stranger_and_a_huge_frame_end_the_relay() {
    let huge = [&PREFACE[..], &[0, 0x40, 1, 0, 0, 0, 0, 0, 1]].concat();
    for (bytes, why) in [(&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], "preface"), (&huge, "16384")] {
        let (mut kubelet, client) = duplex(1024);
        let (server, _tonic) = duplex(1024);
        kubelet.write_all(bytes).await.unwrap();
        let err = relay(client, server).await.unwrap_err();
        assert!(err.to_string().contains(why), "{err}");
    }
}

fn any_fields() -> impl Strategy<Value = Fields> {
    let name =
        prop_oneof![Just(":authority".to_owned()), Just(":path".to_owned()), Just("user-agent".to_owned()), "[a-z-]{1,12}",];
    proptest::collection::vec((name.prop_map(String::into_bytes), proptest::collection::vec(any::<u8>(), 0..300)), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn blocks_keep_all_but_the_authority(
        requests in proptest::collection::vec((any_fields(), any::<[bool; 3]>(), any::<u8>(), 1_usize..5000), 1..5),
    ) {
        let (mut encoder, mut decoder, mut filter) = (Encoder::new(), Decoder::new(), HeaderFilter::default());
        for (i, (sent, [end, padded, priority], padding, cut)) in requests.into_iter().enumerate() {
            let encoded = encode(&mut encoder, &sent);
            let mut parts = encoded.chunks(cut.max(encoded.len() / 50 + 1).min(FRAME_MAX - 300));
            let mut payload = Vec::new();
            if padded { payload.push(padding) }
            if priority { payload.extend([1, 2, 3, 4, 5]) }
            payload.extend_from_slice(parts.next().unwrap());
            if padded { payload.extend(std::iter::repeat_n(0, usize::from(padding))) }
            let mut flags = 0;
            for (set, flag) in [(end, frame::END_STREAM), (padded, frame::PADDED), (priority, frame::PRIORITY)] {
                if set { flags |= flag }
            }
            let stream = 1 + 2 * i as u32;
            let mut input = vec![(frame::HEADERS, flags, payload)];
            input.extend(parts.map(|part| (frame::CONTINUATION, 0, part.to_vec())));
            input.last_mut().unwrap().1 |= frame::END_HEADERS;
            let mut out = Vec::new();
            for (kind, flags, payload) in input {
                prop_assert!(out.is_empty(), "nothing is sent before the block is complete");
                filter.frame(Head { len: payload.len(), kind, flags, stream }, &payload, &mut out).unwrap();
            }
            let (got, flags, bytes) = block(&mut decoder, &out);
            prop_assert_eq!(got, expected(sent));
            prop_assert_eq!(flags & frame::END_STREAM != 0, end);
            prop_assert_eq!(flags & frame::PADDED, 0);
            prop_assert_eq!(bytes, if priority { vec![1, 2, 3, 4, 5] } else { vec![] });
        }
    }

    #[test]
    fn no_header_block_panics(blocks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..8)) {
        let mut filter = HeaderFilter::default();
        for bytes in blocks {
            let head = Head { len: bytes.len(), kind: frame::HEADERS, flags: frame::END_HEADERS, stream: 1 };
            let _ = filter.frame(head, &bytes, &mut Vec::new());
        }
    }

    #[test]
    fn no_frames_panic(list in proptest::collection::vec(
        (prop_oneof![Just(1_u8), Just(9), any::<u8>()], any::<u8>(), 0_u32..3, proptest::collection::vec(any::<u8>(), 0..40)), 1..20,
    )) {
        let mut filter = HeaderFilter::default();
        for (kind, flags, stream, payload) in list {
            if filter.frame(Head { len: payload.len(), kind, flags, stream }, &payload, &mut Vec::new()).is_err() { break }
        }
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..500), good_start in any::<bool>()) {
        let input = if good_start { [&PREFACE[..], &bytes].concat() } else { bytes };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _ = runtime.block_on(filter(BufReader::new(&input[..]), &mut Vec::new()));
    }
}
