//! Header blocks as Go's encoder writes them: Huffman strings, and every new field into the dynamic table.

use fluke_hpack::encoder::encode_integer_into;

/// Entries of the static table that gRPC requests use, RFC 7541 appendix A: index, name, value. Of several with one name Go takes the
/// last.
const STATIC: [(usize, &str, &str); 6] = [
    (1, ":authority", ""),
    (3, ":method", "POST"),
    (5, ":path", "/index.html"),
    (6, ":scheme", "http"),
    (31, "content-type", ""),
    (58, "user-agent", ""),
];
/// Index of the newest entry of the dynamic table.
const DYNAMIC: usize = 62;
/// Codes and their lengths in bits for the characters 0x20 to 0x7e, RFC 7541 appendix B.
#[rustfmt::skip]
const HUFFMAN: [(u32, u32); 95] = [
    (0x14, 6), (0x3f8, 10), (0x3f9, 10), (0xffa, 12), (0x1ff9, 13), (0x15, 6), (0xf8, 8), (0x7fa, 11), (0x3fa, 10), (0x3fb, 10),
    (0xf9, 8), (0x7fb, 11), (0xfa, 8), (0x16, 6), (0x17, 6), (0x18, 6), (0x0, 5), (0x1, 5), (0x2, 5), (0x19, 6),
    (0x1a, 6), (0x1b, 6), (0x1c, 6), (0x1d, 6), (0x1e, 6), (0x1f, 6), (0x5c, 7), (0xfb, 8), (0x7ffc, 15), (0x20, 6),
    (0xffb, 12), (0x3fc, 10), (0x1ffa, 13), (0x21, 6), (0x5d, 7), (0x5e, 7), (0x5f, 7), (0x60, 7), (0x61, 7), (0x62, 7),
    (0x63, 7), (0x64, 7), (0x65, 7), (0x66, 7), (0x67, 7), (0x68, 7), (0x69, 7), (0x6a, 7), (0x6b, 7), (0x6c, 7),
    (0x6d, 7), (0x6e, 7), (0x6f, 7), (0x70, 7), (0x71, 7), (0x72, 7), (0xfc, 8), (0x73, 7), (0xfd, 8), (0x1ffb, 13),
    (0x7fff0, 19), (0x1ffc, 13), (0x3ffc, 14), (0x22, 6), (0x7ffd, 15), (0x3, 5), (0x23, 6), (0x4, 5), (0x24, 6), (0x5, 5),
    (0x25, 6), (0x26, 6), (0x27, 6), (0x6, 5), (0x74, 7), (0x75, 7), (0x28, 6), (0x29, 6), (0x2a, 6), (0x7, 5),
    (0x2b, 6), (0x76, 7), (0x2c, 6), (0x8, 5), (0x9, 5), (0x2d, 6), (0x77, 7), (0x78, 7), (0x79, 7), (0x7a, 7),
    (0x7b, 7), (0x7ffe, 15), (0x7fc, 11), (0x3ffd, 14), (0x1ffd, 13),
];

/// Remembers what it sent. Evicts nothing, so it is for the few calls of one registration.
#[derive(Default)]
pub(super) struct Encoder {
    /// Oldest first.
    table: Vec<(String, String)>,
}

impl Encoder {
    pub(super) fn encode(&mut self, fields: &[(&str, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, value) in fields {
            self.field(name, value, &mut out);
        }
        let size: usize = self.table.iter().map(|(name, value)| name.len() + value.len() + 32).sum();
        assert!(size <= 4096, "this encoder does not evict");
        out
    }

    fn field(&mut self, name: &str, value: &str, out: &mut Vec<u8>) {
        let known = || {
            let dynamic = self.table.iter().rev().enumerate().map(|(i, (n, v))| (DYNAMIC + i, n.as_str(), v.as_str()));
            STATIC.into_iter().chain(dynamic)
        };
        if let Some((index, ..)) = known().find(|(_, n, v)| (*n, *v) == (name, value)) {
            return integer(index, 7, 0x80, out);
        }
        match known().find(|(_, n, _)| *n == name) {
            Some((index, ..)) => integer(index, 6, 0x40, out),
            None => {
                integer(0, 6, 0x40, out);
                string(name, out);
            }
        }
        string(value, out);
        self.table.push((name.to_owned(), value.to_owned()));
    }
}

fn integer(value: usize, prefix: u8, bits: u8, out: &mut Vec<u8>) {
    encode_integer_into(value, prefix, bits, out).expect("writing to memory does not fail");
}

/// Huffman where it is shorter, as Go does.
fn string(text: &str, out: &mut Vec<u8>) {
    let huffman = huffman(text);
    match huffman {
        Some(bytes) if bytes.len() < text.len() => {
            integer(bytes.len(), 7, 0x80, out);
            out.extend(bytes);
        }
        _ => {
            integer(text.len(), 7, 0, out);
            out.extend(text.as_bytes());
        }
    }
}

/// None when a character is outside our part of the table.
fn huffman(text: &str) -> Option<Vec<u8>> {
    let (mut bits, mut len, mut out) = (0_u64, 0, Vec::new());
    for byte in text.bytes() {
        let (code, code_len) = HUFFMAN.get(usize::from(byte.checked_sub(0x20)?))?;
        bits = bits << code_len | u64::from(*code);
        len += code_len;
        while len >= 8 {
            len -= 8;
            out.push((bits >> len) as u8);
        }
    }
    if len > 0 {
        out.push((bits << (8 - len)) as u8 | 0xff >> len);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_agrees_with_the_decoder_and_the_rfc() {
        let all: String = (0x20..0x7f_u8).map(char::from).collect();
        let decoded = fluke_hpack::huffman::HuffmanDecoder::new().decode(&huffman(&all).unwrap()).unwrap();
        assert_eq!(decoded, all.as_bytes());
        // RFC 7541 C.4.1.
        let example = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
        assert_eq!(huffman("www.example.com").unwrap(), example);
    }

    /// The bytes that Go's encoder (golang.org/x/net/http2/hpack) made of the same fields, twice in a row.
    #[test]
    fn two_requests_are_byte_for_byte_what_go_sends() {
        let golden = [
            "8386459c62ba2d98d558598c84d83498f52fb4b31909b06931ea63115392a94f41ae54587b8ec545868346a8b0f5b632d054aa2c35d16cc6a9\
             1158598c84d9e9516192c1d4622f217bad61665d07275f5f8b1d75d0620d263d4c4d65647a8a9acac8b4c7602bbc25c340027465864d833505\
             b11f40899acac8b24d494f6a7f867df7df79eb7f",
            "8386c3c2c1c0bf7e8669f7df7db6ad",
        ];
        let mut encoder = Encoder::default();
        for (golden, timeout) in golden.into_iter().zip(["999988u", "4999954u"]) {
            let block = encoder.encode(&[
                (":method", "POST"),
                (":scheme", "http"),
                (":path", "/pluginregistration.Registration/GetInfo"),
                (":authority", "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fdranic.dev-reg.sock"),
                ("content-type", "application/grpc"),
                ("user-agent", "grpc-go/1.82.1"),
                ("te", "trailers"),
                ("grpc-timeout", timeout),
            ]);
            let hex: String = block.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, golden);
        }
    }
}
