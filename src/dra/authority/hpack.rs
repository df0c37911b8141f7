//! One header block in, the same block with another `:authority` out.

use fluke_hpack::{Decoder, Encoder};

use super::{BLOCK_MAX, FilterError};

/// Size of the client's dynamic table in bytes: the default of `SETTINGS_HEADER_TABLE_SIZE`. A client may only go beyond it when the
/// server advertises more, and ours advertises nothing (`tests/kubelet.rs` checks that); it may always go below.
const TABLE_MAX: usize = 4096;
/// Most fields of one block. The kubelet sends eight. Bounds what indices into the table can blow a block up to.
const FIELDS_MAX: usize = 256;
/// Longest HPACK integer we follow, in bytes after the prefix; its value then fits 32 bits.
const INTEGER_MAX: usize = 4;

/// Keeps the client's dynamic table.
pub(super) struct Rewriter {
    decoder: Decoder<'static>,
}

impl Default for Rewriter {
    fn default() -> Self {
        let mut decoder = Decoder::new();
        decoder.set_max_allowed_table_size(TABLE_MAX);
        Self { decoder }
    }
}

impl Rewriter {
    /// Decodes `block`, puts `localhost` into `:authority`, encodes it again.
    pub(super) fn rewrite(&mut self, block: &[u8]) -> Result<Vec<u8>, FilterError> {
        check(block)?;
        let mut fields = self.decoder.decode(block).map_err(|_| FilterError::Malformed("a header block that HPACK refuses"))?;
        for (name, value) in &mut fields {
            if name == b":authority" {
                *value = b"localhost".to_vec();
            }
        }
        // With a table of size 0 the encoder never refers to an earlier field, so the server's table size does not matter to it.
        let mut encoder = Encoder::new();
        encoder.set_max_table_size(0);
        let encoded = encoder.encode(fields.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        if encoded.len() > BLOCK_MAX {
            return Err(FilterError::Malformed("a header block is larger than 64 KiB when decoded"));
        }
        Ok(encoded)
    }
}

/// Walks over the representations of a block (RFC 7541 6) before the decoder sees it: fluke-hpack 0.3.1 panics on a size update that
/// ends early, takes any number of fields, and takes size updates anywhere.
fn check(block: &[u8]) -> Result<(), FilterError> {
    let mut rest = block;
    let mut fields = 0;
    while let Some(&first) = rest.first() {
        if first & 0xe0 == 0x20 {
            if fields > 0 {
                return Err(FilterError::Malformed("a table size update behind a header field"));
            }
            integer(&mut rest, 5)?;
            continue;
        }
        fields += 1;
        if fields > FIELDS_MAX {
            return Err(FilterError::Malformed("a header block has more than 256 fields"));
        }
        match first {
            0x80.. => _ = integer(&mut rest, 7)?,
            0x40.. => literal(&mut rest, 6)?,
            _ => literal(&mut rest, 4)?,
        }
    }
    Ok(())
}

/// Steps over a literal whose name index has `prefix` bits.
fn literal(rest: &mut &[u8], prefix: u32) -> Result<(), FilterError> {
    if integer(rest, prefix)? == 0 {
        string(rest)?;
    }
    string(rest)
}

fn string(rest: &mut &[u8]) -> Result<(), FilterError> {
    let len = integer(rest, 7)?;
    *rest = rest.get(len..).ok_or(FilterError::Malformed("a header string ends early"))?;
    Ok(())
}

/// Steps over an integer (RFC 7541 5.1) and returns it.
fn integer(rest: &mut &[u8], prefix: u32) -> Result<usize, FilterError> {
    const SHORT: FilterError = FilterError::Malformed("a header integer ends early");
    let (&first, mut after) = rest.split_first().ok_or(SHORT)?;
    let mask = (1_usize << prefix) - 1;
    let mut value = usize::from(first) & mask;
    if value == mask {
        for shift in 0..=INTEGER_MAX {
            if shift == INTEGER_MAX {
                return Err(FilterError::Malformed("a header integer is too long"));
            }
            let (&byte, tail) = after.split_first().ok_or(SHORT)?;
            after = tail;
            value += usize::from(byte & 0x7f) << (7 * shift);
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *rest = after;
    Ok(value)
}
