//! The file format: an envelope with version and checksum around the record. Pure.
//!
//! `{"version":1,"driverVersion":"0.1.0","bootId":"…","sha256":"<hex>","record":{…}}`. The checksum is of the record's text as
//! it stands in the file, so it holds whatever a later version adds to the record.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use sha2::{Digest, Sha256};

use super::ClaimRecord;
use crate::names::ClaimUid;

/// Version of the format that we write. We read this one; newer ones are refused and left alone.
pub(super) const VERSION: u64 = 1;
/// Largest file that is read or written, bytes. A record of 128 devices with 100 routes each has about 2 MiB.
pub(super) const MAX_BYTES: usize = 4 << 20;

/// Bytes around a record, about.
const ENVELOPE: usize = 256;

/// Why bytes are not a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// Written by a newer version of the driver.
    Newer(String),
    /// Damaged, or not a record at all.
    Bad(String),
}

#[derive(Deserialize)]
struct Version {
    version: u64,
    #[serde(default, rename = "driverVersion")]
    driver_version: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EnvelopeOut<'a> {
    version: u64,
    driver_version: &'a str,
    boot_id: &'a str,
    sha256: String,
    record: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EnvelopeIn<'a> {
    boot_id: String,
    sha256: String,
    #[serde(borrow)]
    record: &'a RawValue,
}

fn hex_sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a String can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The file's bytes.
pub(super) fn encode(record: &ClaimRecord) -> Result<Vec<u8>, String> {
    let text = to_raw_value(record).map_err(|e| e.to_string())?;
    sealed(&record.boot_id, &text)
}

/// The record's text in its envelope.
pub(super) fn sealed(boot_id: &str, record: &RawValue) -> Result<Vec<u8>, String> {
    let envelope = EnvelopeOut {
        version: VERSION,
        driver_version: env!("CARGO_PKG_VERSION"),
        boot_id,
        sha256: hex_sha256(record.get()),
        record,
    };
    let mut bytes = Vec::with_capacity(record.get().len() + ENVELOPE);
    serde_json::to_writer(&mut bytes, &envelope).map_err(|e| e.to_string())?;
    bytes.push(b'\n');
    if bytes.len() > MAX_BYTES {
        return Err(format!("it would have {} bytes, more than {MAX_BYTES}", bytes.len()));
    }
    Ok(bytes)
}

/// Refuses what could not be read again, while the old record is still in place.
pub(super) fn check(bytes: &[u8], record: &ClaimRecord) -> Result<(), String> {
    match decode(bytes, &record.claim.uid) {
        Ok(read) if read == *record => Ok(()),
        Ok(_) => Err("it would be read back as something else".to_owned()),
        Err(Fault::Bad(reason) | Fault::Newer(reason)) => Err(format!("it could not be read back: {reason}")),
    }
}

/// The record in the file named after `claim`.
pub(super) fn decode(bytes: &[u8], claim: &ClaimUid) -> Result<ClaimRecord, Fault> {
    let bad = |what: &str, e: &serde_json::Error| Fault::Bad(format!("{what}: {e}"));
    if bytes.len() > MAX_BYTES {
        return Err(Fault::Bad(format!("larger than {MAX_BYTES} bytes")));
    }
    let probe: Version = serde_json::from_slice(bytes).map_err(|e| bad("not a record", &e))?;
    match probe.version {
        VERSION => {}
        newer if newer > VERSION => {
            let by = probe.driver_version.map(|v| format!(" by dranic {}", v.chars().take(32).collect::<String>()));
            let by = by.unwrap_or_default();
            return Err(Fault::Newer(format!("written{by} in format {newer}, this version reads up to {VERSION}")));
        }
        older => return Err(Fault::Bad(format!("there is no format {older}"))),
    }
    let envelope: EnvelopeIn<'_> = serde_json::from_slice(bytes).map_err(|e| bad("not a record", &e))?;
    if hex_sha256(envelope.record.get()) != envelope.sha256 {
        return Err(Fault::Bad("checksum does not match".to_owned()));
    }
    let record: ClaimRecord = serde_json::from_str(envelope.record.get()).map_err(|e| bad("record", &e))?;
    if record.claim.uid != *claim {
        return Err(Fault::Bad(format!("is of claim {}, not of the one in its name", record.claim.uid)));
    }
    if record.boot_id != envelope.boot_id {
        return Err(Fault::Bad("boot ids of envelope and record differ".to_owned()));
    }
    Ok(record)
}
