use proptest::prelude::*;

use super::*;

fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(HEADER + payload.len()).unwrap().to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(align(bytes.len()), 0);
    bytes
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(4 + value.len()).unwrap().to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(align(bytes.len()), 0);
    bytes
}

fn refusal(capped: bool, request_payload: &[u8]) -> Vec<u8> {
    let mut payload = (-22i32).to_ne_bytes().to_vec();
    let request = message(16, 5, 7, request_payload);
    payload.extend(if capped { &request[..HEADER] } else { &request[..] });
    payload.extend(attribute(2, &4u32.to_ne_bytes()));
    payload.extend(attribute(NLMSGERR_ATTR_MSG, b"mtu greater than device maximum\0"));
    let flags = NLM_F_ACK_TLVS | if capped { NLM_F_CAPPED } else { 0 };
    message(NLMSG_ERROR, flags, 7, &payload)
}

#[test]
fn the_kernels_text_is_found_behind_a_capped_and_a_whole_request() {
    for datagram in [refusal(true, b"12345678"), refusal(false, b"12345678"), refusal(false, b"12345")] {
        let frame = frames(&datagram).next().unwrap().unwrap();
        match frame.acknowledgement().unwrap_err() {
            NetlinkError::Kernel { errno: 22, message: Some(text) } => assert_eq!(text, "mtu greater than device maximum"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_acknowledgement_and_the_ends_of_dumps() {
    let frame = |kind, payload: &'static [u8]| Frame { kind, flags: 0, sequence: 1, payload };
    frame(NLMSG_ERROR, &[0; 20]).acknowledgement().unwrap();
    frame(NLMSG_DONE, &[]).done().unwrap();
    frame(NLMSG_DONE, &[0; 4]).done().unwrap();
    assert!(matches!(frame(NLMSG_ERROR, &[1, 2]).acknowledgement(), Err(NetlinkError::Protocol(_))));
    let code = (-16i32).to_ne_bytes();
    let busy = Frame { kind: NLMSG_DONE, flags: 0, sequence: 1, payload: &code };
    assert_eq!(busy.done().unwrap_err().errno(), Some(16));
}

#[test]
fn a_datagram_of_several_messages() {
    let mut datagram = message(16, 2, 3, b"abcde");
    datagram.extend(message(17, NLM_F_DUMP_INTR, 4, b""));
    let all: Vec<_> = frames(&datagram).collect::<Result<_, _>>().unwrap();
    assert_eq!(all[0], Frame { kind: 16, flags: 2, sequence: 3, payload: b"abcde" });
    assert_eq!(all[1], Frame { kind: 17, flags: NLM_F_DUMP_INTR, sequence: 4, payload: b"" });
}

#[test]
fn lying_lengths_end_the_datagram() {
    for length in [0u32, 1, 15, 21, u32::MAX] {
        let mut datagram = message(16, 0, 1, b"1234");
        datagram[..4].copy_from_slice(&length.to_ne_bytes());
        let all: Vec<_> = frames(&datagram).collect();
        assert!(matches!(&all[..], [Err(NetlinkError::Protocol(_))]), "{length}: {all:?}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        for frame in frames(&bytes).flatten() {
            let _ = (frame.acknowledgement(), frame.done());
            let _ = attributes(frame.payload).map(|(_, value)| text(value)).collect::<Vec<_>>();
        }
    }

    #[test]
    fn a_damaged_refusal_is_read_without_panic(at in 0usize..80, byte: u8, capped: bool, cut in 0usize..100) {
        let mut bytes = refusal(capped, b"12345678");
        if let Some(slot) = bytes.get_mut(at) {
            *slot = byte;
        }
        bytes.truncate(cut);
        for frame in frames(&bytes).flatten() {
            let _ = frame.acknowledgement();
        }
    }

    #[test]
    fn what_is_written_is_read_back(kind: u16, flags: u16, sequence: u32, payload in proptest::collection::vec(any::<u8>(), 0..64)) {
        let bytes = message(kind, flags, sequence, &payload);
        let all: Vec<_> = frames(&bytes).collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(&all, &[Frame { kind, flags, sequence, payload: &payload }]);
    }
}
