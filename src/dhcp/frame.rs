//! IPv4 and UDP around a message, for a packet socket. Pure.

use std::net::Ipv4Addr;

/// Ports of server and client (RFC 2131, section 4.1).
pub(super) const SERVER_PORT: u16 = 67;
pub(super) const CLIENT_PORT: u16 = 68;
/// `IPPROTO_UDP`.
const UDP: u8 = 17;
const IP_HEAD: usize = 20;
const UDP_HEAD: usize = 8;
/// Time to live, as most systems send.
const TTL: u8 = 64;

/// A packet from the client's to the server's port. `message` has less than 1400 bytes.
pub(super) fn encode(source: Ipv4Addr, destination: Ipv4Addr, message: &[u8]) -> Vec<u8> {
    let udp_len = (UDP_HEAD + message.len()) as u16;
    let mut out = vec![0; IP_HEAD + UDP_HEAD];
    out[0] = 0x45;
    out[2..4].copy_from_slice(&(IP_HEAD as u16 + udp_len).to_be_bytes());
    out[8..10].copy_from_slice(&[TTL, UDP]);
    out[12..16].copy_from_slice(&source.octets());
    out[16..20].copy_from_slice(&destination.octets());
    let sum = checksum(0, &out[..IP_HEAD]);
    out[10..12].copy_from_slice(&sum.to_be_bytes());
    out[20..22].copy_from_slice(&CLIENT_PORT.to_be_bytes());
    out[22..24].copy_from_slice(&SERVER_PORT.to_be_bytes());
    out[24..26].copy_from_slice(&udp_len.to_be_bytes());
    out.extend(message);
    // Over the addresses, the protocol and the length too (RFC 768). 0 would say that there is none.
    let pseudo = [&out[12..20], &[0, UDP], &udp_len.to_be_bytes()].concat();
    let sum = match checksum(sum_of(0, &pseudo), &out[IP_HEAD..]) {
        0 => 0xffff,
        sum => sum,
    };
    out[26..28].copy_from_slice(&sum.to_be_bytes());
    out
}

/// The message in a whole packet from a server's to the client's port; none in any other.
///
/// The UDP checksum is not looked at: a packet that never was on a wire (veth, a bridge) has none yet, its sender leaves it to the
/// hardware that does not come.
pub(super) fn decode(packet: &[u8]) -> Option<&[u8]> {
    let head = packet.get(..IP_HEAD)?;
    let head_len = usize::from(head[0] & 0xf) * 4;
    let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
    let is_fragment = u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0;
    if head[0] >> 4 != 4 || head_len < IP_HEAD || is_fragment || head[9] != UDP {
        return None;
    }
    let datagram = packet.get(..total)?.get(head_len..)?;
    if checksum(0, packet.get(..head_len)?) != 0 {
        return None;
    }
    let number = |at: usize| Some(u16::from_be_bytes([*datagram.get(at)?, *datagram.get(at + 1)?]));
    if number(0)? != SERVER_PORT || number(2)? != CLIENT_PORT {
        return None;
    }
    datagram.get(UDP_HEAD..usize::from(number(4)?))
}

/// The Internet checksum (RFC 1071), `before` being the sum of what comes before.
fn checksum(before: u32, bytes: &[u8]) -> u16 {
    let mut sum = sum_of(before, bytes);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn sum_of(before: u32, bytes: &[u8]) -> u32 {
    bytes.chunks(2).fold(before, |sum, pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        sum + u32::from(u16::from_be_bytes([pair[0], low]))
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SERVER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);

    /// A packet as a server sends it.
    pub(crate) fn from_server(message: &[u8]) -> Vec<u8> {
        let mut packet = encode(SERVER, Ipv4Addr::BROADCAST, message);
        packet[20..24].copy_from_slice(&[0, 67, 0, 68]);
        packet
    }

    #[test]
    fn what_is_sent_has_right_checksums() {
        for message in [&b"even"[..], b"odd", b""] {
            let packet = encode(Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST, message);
            assert_eq!(checksum(0, &packet[..IP_HEAD]), 0);
            let udp_len = u16::try_from(packet.len() - IP_HEAD).unwrap();
            let pseudo = [&packet[12..20], &[0, UDP], &udp_len.to_be_bytes()].concat();
            assert_eq!(checksum(sum_of(0, &pseudo), &packet[IP_HEAD..]), 0);
        }
    }

    #[test]
    fn only_whole_packets_of_a_server_are_taken() {
        let good = from_server(b"hello");
        assert_eq!(decode(&good), Some(&b"hello"[..]));
        // Ethernet pads short frames.
        assert_eq!(decode(&[&good[..], &[0; 13]].concat()), Some(&b"hello"[..]));
        assert_eq!(decode(&encode(SERVER, Ipv4Addr::BROADCAST, b"hello")), None, "that is what a client sends");
        for length in 0..good.len() {
            assert_eq!(decode(&good[..length]), None, "{length}");
        }
        // Version, length of the header, a fragment, the protocol, the checksum, a UDP length beyond the packet.
        for (at, value) in [(0, 0x65), (0, 0x44), (6, 0x20), (9, 6), (15, 9), (24, 1)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(decode(&bad), None, "byte {at}");
        }
        let mut bad = good;
        bad[25] = 7;
        assert_eq!(decode(&bad), None, "a UDP length shorter than its head");
    }
}
