//! The file format against damage, and who has the folder. The folder's files have their tests in `tests/ledger.rs`.

use std::time::Duration;

use proptest::prelude::*;

use super::file::{Fault, check, decode, encode};
use super::{ClaimRecord, ClaimRef, Durability, Ledger, LedgerError, PodRef};
use crate::names::{ClaimUid, PodUid};

fn record() -> ClaimRecord {
    ClaimRecord {
        claim: ClaimRef { namespace: "a".to_owned(), name: "b \"ü\n".to_owned(), uid: ClaimUid::new("c1").unwrap() },
        pod: PodRef { name: "p".to_owned(), uid: PodUid::new("p1").unwrap() },
        pod_claim_name: None,
        generation: 3,
        boot_id: "boot-1".to_owned(),
        missed: None,
        devices: Vec::new(),
    }
}

#[test]
fn a_later_version_may_add_fields() {
    let bytes = encode(&record()).unwrap();
    let text = String::from_utf8(bytes).unwrap().replacen('{', "{\"extra\":[1,2],", 1);
    assert_eq!(decode(text.as_bytes(), &record().claim.uid), Ok(record()));
}

#[test]
fn what_reads_back_as_something_else_is_refused() {
    let bytes = encode(&record()).unwrap();
    assert_eq!(check(&bytes, &record()), Ok(()));
    let other = ClaimRecord { generation: 4, ..record() };
    assert!(check(&bytes, &other).unwrap_err().contains("something else"));
    assert!(check(&bytes[1..], &record()).unwrap_err().contains("not be read back"));
}

#[test]
fn a_newer_format_is_told_from_damage() {
    let newer = br#"{"version":7,"record":{}}"#;
    assert!(matches!(decode(newer, &record().claim.uid), Err(Fault::Newer(_))));
    let none = br#"{"version":0,"record":{}}"#;
    assert!(matches!(decode(none, &record().claim.uid), Err(Fault::Bad(_))));
}

/// Opens on a thread; what it sees comes only when the folder is free.
fn waiting(folder: &std::path::Path) -> std::sync::mpsc::Receiver<Ledger> {
    let (sender, opened) = std::sync::mpsc::channel();
    let folder = folder.to_owned();
    std::thread::spawn(move || drop(sender.send(Ledger::open_when_free(&folder).unwrap().0)));
    opened
}

#[test]
fn whoever_waits_for_the_folder_gets_it_with_everything_that_was_written_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = Ledger::open(dir.path()).unwrap();
    let opened = waiting(dir.path());
    opened.recv_timeout(Duration::from_millis(50)).expect_err("the folder is taken");
    let mut changes = first.subscribe();
    first.put(record(), Durability::Process).unwrap();
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    drop(first);
    let second = opened.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(second.all().len(), 1);
    assert!(matches!(Ledger::open(dir.path()), Err(LedgerError::InUse(_))));
}

#[test]
fn a_folder_that_was_made_anew_meanwhile_is_the_one_that_counts() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("state");
    let (first, _) = Ledger::open(&folder).unwrap();
    let opened = waiting(&folder);
    opened.recv_timeout(Duration::from_millis(50)).expect_err("the folder is taken");
    std::fs::rename(&folder, dir.path().join("old")).unwrap();
    let (second, _) = Ledger::open(&folder).unwrap();
    drop(first);
    opened.recv_timeout(Duration::from_millis(50)).expect_err("the new folder is taken as well");
    drop(second);
    opened.recv_timeout(Duration::from_secs(10)).unwrap();
}

proptest! {
    #[test]
    fn garbage_is_no_record(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(decode(&bytes, &record().claim.uid).is_err());
    }

    #[test]
    fn a_cut_file_is_no_record(len in 0_usize..10_000) {
        let bytes = encode(&record()).unwrap();
        let len = len % (bytes.len() - 1); // the last byte is the final newline
        prop_assert!(decode(&bytes[..len], &record().claim.uid).is_err());
    }

    #[test]
    fn flipped_bits_never_make_another_record(flips in proptest::collection::vec((any::<proptest::sample::Index>(), 0_u8..8), 1..4)) {
        let mut bytes = encode(&record()).unwrap();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Ok(read) = decode(&bytes, &record().claim.uid) {
            prop_assert_eq!(read, record());
        }
    }
}
