//! Target `record`: any bytes as a file of the ledger, and as the record in an envelope that is sound.

use serde_json::value::RawValue;

use super::file::{decode, encode, sealed};
use super::peek;
use crate::names::ClaimUid;

/// Claim and boot that the seeds name; others are refused behind the checksum.
const CLAIM: &str = "c1";
const BOOT: &str = "boot-1";

pub(crate) fn record(data: &[u8]) {
    let claim = ClaimUid::new(CLAIM).unwrap_or_else(|error| panic!("{error}"));
    let _ = decode(data, &claim);
    // The fuzzer can't guess a checksum.
    let Some(text) = std::str::from_utf8(data).ok().and_then(|text| RawValue::from_string(text.to_owned()).ok()) else { return };
    let Ok(file) = sealed(BOOT, &text) else { return };
    let Ok(record) = decode(&file, &claim) else { return };
    // What was read once can be written and is read as the same.
    let again = encode(&record).unwrap_or_else(|error| panic!("{error}"));
    let head = &again[..again.len().min(peek::HEAD as usize)];
    assert!(peek::may_be_of(head, &record.pod.uid), "the guard would pass over it");
    assert_eq!(decode(&again, &claim), Ok(record));
}
