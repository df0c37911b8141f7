//! The ledger on a real file system: killed writers, damaged files, full and read-only disks, two agents.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use dranic::ledger::{ClaimRecord, Durability, Ledger, LedgerError};
use dranic::names::{ClaimUid, PodUid};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const CHILD_FOLDER: &str = "DRANIC_TEST_LEDGER_FOLDER";

/// A record whose text shows which generation it was written for, and grows and shrinks with it.
fn record(claim: &str, pod: &str, generation: u64) -> ClaimRecord {
    let note = format!("generation {generation} ").repeat(1 + usize::try_from(generation % 700).unwrap());
    serde_json::from_value(serde_json::json!({
        "claim": {"namespace": "default", "name": "nic", "uid": claim},
        "pod": {"name": "job-0", "uid": pod},
        "generation": generation.saturating_sub(1),
        "bootId": "4c1b6f0e-0000-4000-8000-000000000001",
        "devices": [{
            "request": "nic", "pool": "node-a", "device": "pci-0000-8a-00-0",
            "hardware": {"pci": {"address": "0000:8a:00.0"}},
            "attributes": {"ifName": "eth1", "mtu": 9000, "rdma": true},
            "host": {
                "index": 7, "name": "eth1", "mtu": 9000, "address": "02:00:00:00:00:05", "flags": 4099,
                "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {"ipv4/conf/arp_ignore": "0"}
            },
            "plan": {"podLink": "eth1", "steps": [{"step": "move", "name": "eth1", "mtu": null, "address": null}, {"step": "up"}]},
            "phase": "prepared", "lastError": note, "sinceUnixMs": generation
        }]
    }))
    .unwrap()
}

fn uid(text: &str) -> ClaimUid {
    ClaimUid::new(text).unwrap()
}

fn open(folder: &Path) -> Ledger {
    let (ledger, quarantined) = Ledger::open(folder).unwrap();
    assert_eq!(quarantined, []);
    ledger
}

#[test]
fn what_was_put_is_there_after_a_restart_and_gone_after_remove() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("made/by/open");
    let ledger = open(&folder);
    ledger.put(record("c1", "p1", 1), Durability::Disk).unwrap();
    ledger.put(record("c2", "p1", 1), Durability::Process).unwrap();
    let again = ledger.put(record("c1", "p1", 1), Durability::Process).unwrap();
    assert_eq!(again.generation, 2);
    assert!(ledger.has_pod("p1") && !ledger.has_pod("p2"));
    drop(ledger);

    let ledger = open(&folder);
    assert_eq!(ledger.get(&uid("c1")).unwrap(), again);
    let of_pod = ledger.by_pod(&PodUid::new("p1").unwrap());
    assert_eq!(of_pod.iter().map(|r| r.claim.uid.as_str()).collect::<Vec<_>>(), ["c1", "c2"]);
    ledger.remove(&uid("c1")).unwrap();
    ledger.remove(&uid("c1")).unwrap();
    // The claim goes to another pod: the old one is forgotten.
    ledger.put(record("c2", "p2", 1), Durability::Disk).unwrap();
    assert!(!ledger.has_pod("p1") && ledger.has_pod("p2"));
    drop(ledger);
    assert_eq!(open(&folder).all().len(), 1);

    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&folder), mode(&folder.join("c2.json"))), (0o700, 0o600));
}

#[test]
fn updates_of_many_threads_are_all_counted() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(dir.path());
    for claim in ["a", "b"] {
        ledger.put(record(claim, "p", 0), Durability::Process).unwrap();
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for claim in [uid("a"), uid("b")].iter().cycle().take(50) {
                    let seen = ledger.update(claim, Durability::Process, |r| {
                        r.devices[0].since_unix_ms += 1;
                        r.devices[0].since_unix_ms
                    });
                    assert!(seen.unwrap().is_some());
                }
            });
        }
    });
    assert_eq!(ledger.update(&uid("none"), Durability::Disk, |_| ()).unwrap(), None);
    drop(ledger);
    for record in open(dir.path()).all() {
        assert_eq!((record.generation, record.devices[0].since_unix_ms), (101, 100));
    }
}

/// What the process does that [`a_writer_killed_at_any_moment_leaves_whole_records`] starts (itself, with a folder) and kills.
fn write_for_ever(folder: &Path) -> ! {
    let ledger = Ledger::open(folder).unwrap().0;
    let mut out = std::io::stdout();
    loop {
        for claim in ["a", "b", "c"] {
            let generation = ledger.get(&uid(claim)).map_or(0, |r| r.generation) + 1;
            let durability = if generation.is_multiple_of(2) { Durability::Disk } else { Durability::Process };
            let written = ledger.put(record(claim, "p", generation), durability).unwrap();
            assert_eq!(written.generation, generation);
            writeln!(out, "wrote {claim} {generation}").unwrap();
            out.flush().unwrap();
        }
    }
}

/// Starts a writer on `folder`, kills it after `time`, and returns the writes that it told of.
fn write_and_be_killed(folder: &Path, time: Duration) -> BTreeMap<String, u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_writer_killed_at_any_moment_leaves_whole_records", "--nocapture"])
        .env(CHILD_FOLDER, folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    std::thread::sleep(time);
    child.kill().unwrap();
    child.wait().unwrap();
    let text = reader.join().unwrap().unwrap();
    let told = text.lines().filter_map(|line| line.strip_prefix("wrote ")?.split_once(' '));
    told.map(|(claim, generation)| (claim.to_owned(), generation.parse().unwrap())).collect()
}

#[test]
fn a_writer_killed_at_any_moment_leaves_whole_records() {
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        write_for_ever(Path::new(&folder));
    }
    let dir = tempfile::tempdir().unwrap();
    let mut known = BTreeMap::<String, u64>::new();
    for round in 0..30_u64 {
        // Spread over start, reading and writing.
        known.extend(write_and_be_killed(dir.path(), Duration::from_micros(5_000 + round * 7919 % 100 * 1_000)));
        let ledger = open(dir.path());
        for (claim, &told) in &known {
            let read = ledger.get(&uid(claim)).unwrap();
            assert!(read.generation == told || read.generation == told + 1, "{claim}: {told}, {}", read.generation);
            let mut whole = record(claim, "p", read.generation);
            whole.generation = read.generation;
            assert_eq!(*read, whole);
        }
        let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
        assert_eq!(names.filter(|n| n.to_string_lossy().starts_with(".tmp-")).count(), 0);
        // What was written and not told of is known now.
        known.extend(ledger.all().iter().map(|r| (r.claim.uid.to_string(), r.generation)));
    }
    assert!(known.values().sum::<u64>() > 100, "the writers hardly wrote: {known:?}");
}

#[test]
fn a_second_agent_is_refused_while_the_first_lives() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let error = Ledger::open(dir.path()).unwrap_err();
    assert!(matches!(error, LedgerError::InUse(_)), "{error}");
    assert!(error.to_string().contains("--state-dir"));
    drop(first);
    open(dir.path());
}

#[test]
fn damaged_files_are_set_aside_and_the_rest_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(dir.path());
    for claim in ["good", "cut", "flipped", "moved"] {
        ledger.put(record(claim, "p", 1), Durability::Process).unwrap();
    }
    drop(ledger);
    let file = |name: &str| dir.path().join(name);
    let cut = std::fs::read(file("cut.json")).unwrap();
    std::fs::write(file("cut.json"), &cut[..cut.len() / 2]).unwrap();
    let flipped = std::fs::read_to_string(file("flipped.json")).unwrap().replace("\"mtu\":9000", "\"mtu\":9001");
    std::fs::write(file("flipped.json"), flipped).unwrap();
    std::fs::rename(file("moved.json"), file("elsewhere.json")).unwrap();
    std::fs::write(file("empty.json"), "").unwrap();
    std::fs::write(file("bad name.json"), "{}").unwrap();
    std::fs::write(file("huge.json"), vec![b' '; (4 << 20) + 1]).unwrap();
    std::fs::write(file("deep.json"), "[".repeat(100_000)).unwrap();
    std::fs::create_dir(file("folder.json")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", file("link.json")).unwrap();
    nix::unistd::mkfifo(&file("fifo.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::write(file("other.txt"), "not ours").unwrap();

    let (ledger, quarantined) = Ledger::open(dir.path()).unwrap();
    assert_eq!(ledger.all().iter().map(|r| r.claim.uid.as_str()).collect::<Vec<_>>(), ["good"]);
    let names: Vec<_> = quarantined.iter().map(|q| q.path.file_stem().unwrap().to_str().unwrap()).collect();
    let set_aside = ["bad name", "cut", "deep", "elsewhere", "empty", "fifo", "flipped", "folder", "huge", "link"];
    assert_eq!(names, set_aside.map(|name| format!("{name}.json")));
    assert!(quarantined.iter().any(|q| q.reason.contains("checksum")));
    assert!(quarantined.iter().all(|q| !q.reason.is_empty() && q.path.symlink_metadata().is_ok()));
    // Set aside for good: the next start is quiet, and the claim can be prepared again.
    ledger.put(record("cut", "p", 1), Durability::Disk).unwrap();
    drop(ledger);
    assert_eq!(open(dir.path()).all().len(), 2);
}

#[test]
fn a_record_of_a_newer_version_is_neither_read_nor_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c1.json");
    let text = r#"{"version":2,"driverVersion":"9.0.0","whatever":[]}"#;
    std::fs::write(&path, text).unwrap();
    let (ledger, quarantined) = Ledger::open(dir.path()).unwrap();
    assert_eq!(quarantined[0].path, path);
    assert!(quarantined[0].reason.contains("9.0.0"), "{}", quarantined[0].reason);
    assert!(matches!(ledger.put(record("c1", "p", 1), Durability::Disk), Err(LedgerError::Refused { .. })));
    assert!(matches!(ledger.remove(&uid("c1")), Err(LedgerError::Refused { .. })));
    ledger.put(record("c2", "p", 1), Durability::Disk).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
}

#[test]
fn a_record_that_could_not_be_read_again_is_refused_and_the_old_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(dir.path());
    let old = ledger.put(record("c1", "p", 1), Durability::Disk).unwrap();
    let mut huge = record("c1", "p", 1);
    huge.devices[0].last_error = Some("x".repeat(5 << 20));
    let error = ledger.put(huge, Durability::Disk).unwrap_err();
    assert!(matches!(error, LedgerError::Record { .. }), "{error}");
    assert_eq!(ledger.get(&uid("c1")), Some(Arc::clone(&old)));
    drop(ledger);
    assert_eq!(open(dir.path()).get(&uid("c1")), Some(old));
}

/// Runs `test` on a thread with mounts of its own, with a tmpfs of 64 KiB on `folder`. Needs root.
fn with_small_disk(folder: &Path, test: impl FnOnce() + Send) {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: mounts need root");
        return;
    }
    let work = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("size=64k")).unwrap();
        test();
    };
    std::thread::scope(|scope| {
        if let Err(panic) = scope.spawn(work).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_full_disk_leaves_the_old_record() {
    let dir = tempfile::tempdir().unwrap();
    with_small_disk(dir.path(), || {
        let ledger = open(dir.path());
        let old = ledger.put(record("c1", "p", 1), Durability::Disk).unwrap();
        let filler = dir.path().join("filler");
        let full = std::fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(nix::libc::ENOSPC));
        for durability in [Durability::Disk, Durability::Process] {
            let error = ledger.put(record("c1", "p", 1), durability).unwrap_err();
            let LedgerError::Io { source, .. } = &error else { panic!("{error}") };
            assert_eq!(source.raw_os_error(), Some(nix::libc::ENOSPC));
            assert_eq!(ledger.get(&uid("c1")), Some(Arc::clone(&old)));
        }
        drop(ledger);
        std::fs::remove_file(&filler).unwrap();
        let ledger = open(dir.path());
        assert_eq!(ledger.get(&uid("c1")), Some(old));
        ledger.put(record("c1", "p", 1), Durability::Disk).unwrap();
    });
}

#[test]
fn a_folder_that_cannot_be_written_is_found_at_start() {
    // `/proc` takes no folders, whoever asks.
    let error = Ledger::open(Path::new("/proc/dranic-state")).unwrap_err();
    assert!(matches!(error, LedgerError::Unusable { .. }), "{error}");
    assert!(error.to_string().contains("--state-dir") && error.to_string().contains("/proc/dranic-state"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    with_small_disk(dir.path(), || {
        drop(open(dir.path()));
        mount(None::<&str>, dir.path(), None::<&str>, MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, None::<&str>).unwrap();
        let error = Ledger::open(dir.path()).unwrap_err();
        assert!(matches!(error, LedgerError::Unusable { .. }), "{error}");
    });
}
