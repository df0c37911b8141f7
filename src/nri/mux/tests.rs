use proptest::prelude::*;

use super::*;

fn message(data: usize) -> Vec<u8> {
    let mut bytes = (data as u32).to_be_bytes().to_vec();
    bytes.extend([0, 0, 0, 1, 2, 0]);
    bytes.resize(MESSAGE_HEADER + data, 7);
    bytes
}

/// Sizes of the frames in `bytes`.
fn sizes(mut bytes: &[u8]) -> Vec<usize> {
    let mut sizes = Vec::new();
    while !bytes.is_empty() {
        let (_, size) = (bytes.get_u32(), bytes.get_u32() as usize);
        bytes.advance(size);
        sizes.push(size);
    }
    sizes
}

#[test]
fn a_message_becomes_one_or_two_frames() {
    for (data, expected) in [
        (0, vec![10]),
        (1, vec![11]),
        (4085, vec![4095]),
        (4086, vec![4096]),
        (4087, vec![4096, 1]),
        (4096, vec![4096, 10]),
        (8192, vec![4096, 4106]),
        (1 << 20, vec![4096, (1 << 20) - 4086]),
        (4 << 20, vec![4096, (4 << 20) - 4086]),
    ] {
        assert_eq!(sizes(&frames(1, &message(data))), expected, "{data} bytes of data");
    }
}

#[test]
fn a_message_over_the_limit_is_refused() {
    let mut assembler = Assembler::default();
    assert!(assembler.push(&((4u32 << 20) + 1).to_be_bytes()).is_ok());
    assert_eq!(assembler.push(&[0; 6]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_frame_over_the_limit_is_refused_before_its_payload() {
    let header = |length: u32| BytesMut::from(&[1u32.to_be_bytes(), length.to_be_bytes()].concat()[..]);
    let mut frames = Deframer::default();
    assert_eq!(frames.next(&mut header(0xffff_fff0)), Err(FrameTooLong { id: 1, length: 0xffff_fff0 }));
    assert_eq!(Deframer::default().next(&mut header(MAX_PAYLOAD as u32)), Ok(None));
}

proptest! {
    #[test]
    fn written_pieces_do_not_matter(data in prop::collection::vec(0usize..9000, 1..5), piece in 1usize..5000) {
        let messages: Vec<_> = data.into_iter().map(message).collect();
        let (mut assembler, mut seen) = (Assembler::default(), Vec::new());
        for mut bytes in messages.concat().chunks(piece) {
            while !bytes.is_empty() {
                bytes = &bytes[assembler.push(bytes).unwrap()..];
                seen.extend(assembler.take());
            }
        }
        prop_assert_eq!(seen, messages);
    }

    #[test]
    fn read_pieces_do_not_matter(payloads in prop::collection::vec((0u32..4, prop::collection::vec(any::<u8>(), 0..300)), 0..20),
                                 piece in 1usize..400) {
        let mut stream = Vec::new();
        let mut expected = vec![Vec::<u8>::new(); 4];
        for (id, payload) in &payloads {
            stream.extend(id.to_be_bytes());
            stream.extend((payload.len() as u32).to_be_bytes());
            stream.extend(payload);
            expected[*id as usize].extend(payload);
        }
        let (mut frames, mut buf, mut seen) = (Deframer::default(), BytesMut::new(), vec![Vec::new(); 4]);
        for chunk in stream.chunks(piece) {
            buf.extend_from_slice(chunk);
            while let Some((id, bytes)) = frames.next(&mut buf).unwrap() {
                seen[id as usize].extend(bytes);
            }
        }
        prop_assert_eq!(seen, expected);
        prop_assert!(frames.is_between(&buf));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let (mut frames, mut buf) = (Deframer::default(), BytesMut::from(&bytes[..]));
        while let Ok(Some(_)) = frames.next(&mut buf) {}
    }
}

#[tokio::test]
async fn dropping_a_channel_closes_after_what_was_written() {
    let (near, mut far) = tokio::io::duplex(64);
    let (reader, writer) = tokio::io::split(near);
    let (trunk, [mut one, two]) = start(reader, writer, [1, 2]);
    let reading = tokio::spawn(async move {
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).await.map(|_| bytes)
    });
    one.write_all(&message(5000)).await.unwrap();
    drop(one);
    assert_eq!(trunk.closed().await, "connection 1 was closed by this side");
    drop(two);
    trunk.shut_down("test").await;
    assert_eq!(sizes(&reading.await.unwrap().unwrap()), [4096, 914]);
}

#[tokio::test]
async fn the_end_of_the_socket_is_the_end_of_all_channels() {
    for (bytes, reason) in [
        (&[][..], "the runtime closed the connection"),
        (&[0, 0, 0, 1, 0][..], "the connection ended inside a frame"),
        (&[0, 0, 0, 1, 0, 0, 0, 9, 1][..], "the connection ended inside a frame"),
    ] {
        let (near, mut far) = tokio::io::duplex(64);
        let (reader, writer) = tokio::io::split(near);
        let (trunk, [mut one, _two]) = start(reader, writer, [1, 2]);
        far.write_all(bytes).await.unwrap();
        drop(far);
        assert_eq!(trunk.closed().await, reason);
        let mut rest = Vec::new();
        one.read_to_end(&mut rest).await.unwrap();
        assert!(rest.len() <= 1);
    }
}
