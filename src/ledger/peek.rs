//! Reading records of a folder that an agent has, or that no agent has just now. Nothing is locked, written or set aside: this is for the
//! guard of containers, which must know what was meant while no agent runs.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::file::{self, Fault};
use super::{ClaimRecord, folder};
use crate::names::{ClaimUid, PodUid};

/// Bytes at the begin of a file that tell whose pod it is: claim and pod come first in a record, and each name in them has at most
/// 253 bytes.
pub(super) const HEAD: u64 = 4096;

/// The record of a claim; none when there is none.
///
/// # Errors
/// When it can't be read; with its path.
pub fn of_claim(folder: &Path, claim: &ClaimUid) -> Result<Option<ClaimRecord>, String> {
    let path = folder::path(folder, claim);
    let bytes = match folder::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|e| format!("the record {} can't be read: {e}", path.display()))?,
    };
    match file::decode(&bytes, claim) {
        Ok(record) => Ok(Some(record)),
        Err(Fault::Bad(why) | Fault::Newer(why)) => Err(format!("the record {} can't be used: {why}", path.display())),
    }
}

/// All records, in the order of their claims' UIDs; none when there is no folder.
///
/// # Errors
/// When the folder can't be listed, or a record can't be read.
pub fn all(folder: &Path) -> Result<Vec<ClaimRecord>, String> {
    let mut records = Vec::new();
    for claim in claims(folder)? {
        records.extend(of_claim(folder, &claim)?);
    }
    Ok(records)
}

/// UIDs of all claims that there are files of, sorted; none when there is no folder.
fn claims(folder: &Path) -> Result<Vec<ClaimUid>, String> {
    let cant_list = |e: io::Error| format!("the ledger {} can't be listed: {e}", folder.display());
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(cant_list)?,
    };
    let mut claims = Vec::new();
    for entry in entries {
        let name = entry.map_err(cant_list)?.file_name();
        claims.extend(name.to_str().and_then(|name| name.strip_suffix(folder::SUFFIX)).and_then(|stem| ClaimUid::new(stem).ok()));
    }
    claims.sort();
    Ok(claims)
}

/// All records of a pod, in the order of their claims' UIDs.
///
/// # Errors
/// When the folder can't be listed, or a record that may be of this pod can't be read.
pub fn of_pod(folder: &Path, pod: &PodUid) -> Result<Vec<ClaimRecord>, String> {
    let cant_list = |e: io::Error| format!("the ledger {} can't be listed: {e}", folder.display());
    let mut records = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(cant_list)? {
        let name = entry.map_err(cant_list)?.file_name();
        let claim = name.to_str().and_then(|name| name.strip_suffix(folder::SUFFIX)).and_then(|stem| ClaimUid::new(stem).ok());
        let Some(claim) = claim else { continue };
        if may_be_of(&head(&folder::path(folder, &claim)), pod) {
            records.extend(of_claim(folder, &claim)?.filter(|record| record.pod.uid == *pod));
        }
    }
    records.sort_by(|a, b| a.claim.uid.cmp(&b.claim.uid));
    Ok(records)
}

/// Nothing where the file can't be read: then it is read as a whole, and that says why.
fn head(path: &Path) -> Vec<u8> {
    let mut head = Vec::new();
    match File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head)) {
        Ok(_) => head,
        Err(_) => Vec::new(),
    }
}

/// Whether a file that begins like this may be of the pod: only one that clearly names another one is not.
pub(super) fn may_be_of(head: &[u8], pod: &PodUid) -> bool {
    let Some(at) = find(head, b"\"pod\":{") else { return true };
    // In a text a quote has a backslash before it, so this is the key, whatever the pod's name is.
    let key = b"\"uid\":";
    let Some(uid) = find(&head[at..], key).map(|uid| &head[at + uid + key.len()..]) else { return true };
    let wanted = format!("\"{pod}\"");
    uid.len() < wanted.len() || uid.starts_with(wanted.as_bytes())
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(text: &str) -> bool {
        may_be_of(text.as_bytes(), &PodUid::new("u-1").unwrap())
    }

    #[test]
    fn only_files_that_clearly_name_another_pod_are_passed_over() {
        assert!(may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"a","uid":"u-1"},"generation":1"#));
        assert!(!may(r#"{"record":{"claim":{"uid":"u-1"},"pod":{"name":"a","uid":"u-2"},"generation":1"#));
        assert!(!may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"a","uid":"u-11"},"generation":1"#));
        assert!(may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"a"#), "cut off");
        assert!(may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"a","uid":"u-"#), "cut off");
        assert!(may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"}\"uid\":\"x","uid":"u-1"},"generation":1"#), "odd name");
        assert!(!may(r#"{"record":{"claim":{"uid":"c"},"pod":{"name":"u-1\"}","uid":"u-2"},"generation":1"#), "odd name");
        assert!(may("") && may("not a record"));
    }
}
