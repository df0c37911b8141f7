//! Header blocks as Go's encoder writes them: Huffman strings, and every new field into the dynamic table.

use fluke_hpack::encoder::encode_integer_into;

/// Entries of the static table that gRPC requests use, RFC 7541 appendix A: index, name, value.
const STATIC: [(usize, &str, &str); 6] = [
    (1, ":authority", ""),
    (3, ":method", "POST"),
    (4, ":path", "/"),
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

    #[test]
    fn a_repeated_request_is_indices_only() {
        let fields = [(":method", "POST"), (":authority", "%2Fvar"), ("te", "trailers")];
        let (mut encoder, mut decoder) = (Encoder::default(), fluke_hpack::Decoder::new());
        let first = encoder.encode(&fields);
        let second = encoder.encode(&fields);
        assert_eq!(second, [0x83, 0xbf, 0xbe]);
        let want: Vec<_> = fields.iter().map(|(n, v)| (n.as_bytes().to_vec(), v.as_bytes().to_vec())).collect();
        assert_eq!(decoder.decode(&first).unwrap(), want);
        assert_eq!(decoder.decode(&second).unwrap(), want);
    }
}
