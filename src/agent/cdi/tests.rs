//! What specs say, and when they come and go.

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::*;
use crate::names::DeviceName;

fn record(uid: &str) -> ClaimRecord {
    let device = |name: &str| {
        json!({
            "request": "nic", "pool": "node-a", "device": name, "hardware": {"pci": {"address": "0000:8a:00.0"}}, "attributes": {},
            "host": {
                "index": 7, "name": "eth1", "mtu": 9000, "flags": 4099,
                "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
            },
            "plan": {"podLink": "eth1", "steps": []}, "phase": "prepared", "sinceUnixMs": 1
        })
    };
    serde_json::from_value(json!({
        "claim": {"namespace": "shop", "name": "rail", "uid": uid}, "pod": {"name": "p", "uid": "pod-1"},
        "generation": 0, "bootId": "boot-1", "devices": [device("nic-a"), device("nic-b")]
    }))
    .unwrap()
}

fn ledger(folder: &Path) -> Ledger {
    Ledger::open(&folder.join("state")).unwrap().0
}

fn guard() -> GuardUse {
    GuardUse {
        program: "/opt/dranic-guard".into(),
        driver: "dra.net".to_owned(),
        state_dir: "/var/lib/dranic".into(),
        socket: "/run/dranic/gate.sock".into(),
        wait: Duration::from_secs(60),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn written(folder: &Path, uid: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(format!("dranic-dra.net-{uid}.json"))).unwrap()).unwrap()
}

#[test]
fn a_spec_names_its_claim_and_goes_again() {
    let folder = tempfile::tempdir().unwrap();
    let cdi = folder.path().join("cdi");
    let specs = Specs::new(&cdi, "dra.net", None);
    specs.write(&record("u-1")).unwrap();
    specs.write(&record("u-1")).unwrap();
    assert_eq!(names(&cdi), ["dranic-dra.net-u-1.json"]);
    let (spec, uid) = (written(&cdi, "u-1"), ClaimUid::new("u-1").unwrap());
    for (index, device) in ["nic-a", "nic-b"].into_iter().enumerate() {
        let entry = &spec["devices"][index];
        assert_eq!(entry["containerEdits"]["env"][0], "DRANIC_CLAIM_u-1=shop/rail");
        let name = format!("{}={}", spec["kind"].as_str().unwrap(), entry["name"].as_str().unwrap());
        let share = |id: Option<&str>| Share { device: DeviceName::new(device).unwrap(), id: id.map(str::to_owned) };
        assert_eq!(name, Specs::device(&uid, &share(None)));
        assert_eq!(format!("{name}-5a1f"), Specs::device(&uid, &share(Some("5a1f"))), "each share has its own");
    }
    assert!(spec.get("containerEdits").is_none(), "without a guard there is no hook");
    specs.remove(&uid).unwrap();
    specs.remove(&uid).unwrap();
    assert!(names(&cdi).is_empty());
}

#[test]
fn the_guard_stands_at_the_top_once() {
    let folder = tempfile::tempdir().unwrap();
    Specs::new(folder.path(), "dra.net", Some(guard())).write(&record("u-1")).unwrap();
    let spec = written(folder.path(), "u-1");
    let hooks = spec["containerEdits"]["hooks"].as_array().unwrap();
    assert_eq!(hooks.len(), 1);
    assert_eq!((&hooks[0]["hookName"], &hooks[0]["path"]), (&json!("createRuntime"), &json!("/opt/dranic-guard")));
    assert_eq!(hooks[0]["timeout"], 65);
    let arguments: Vec<_> = hooks[0]["args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap().into()).collect();
    assert_eq!(arguments[0], "dranic-guard");
    let read = crate::gate::args::parse(arguments.into_iter().skip(1)).unwrap();
    let crate::gate::args::Command::Guard(read) = read else { panic!("{read:?}") };
    assert_eq!(read.claims, [ClaimUid::new("u-1").unwrap()]);
    assert!(spec["devices"].as_array().unwrap().iter().all(|device| device["containerEdits"].get("hooks").is_none()));
}

#[test]
fn old_specs_go_missing_ones_come_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, cdi) = (ledger(folder.path()), folder.path().join("cdi"));
    let specs = Specs::new(&cdi, "dra.net", None);
    specs.write(&record("old")).unwrap();
    specs.write(&record("kept")).unwrap();
    std::fs::write(cdi.join("other.json"), "{}").unwrap();
    std::fs::write(cdi.join("dranic-dra.net-old.part"), "{").unwrap();
    Specs::new(&cdi, "dranic.dev", None).write(&record("theirs")).unwrap();
    for uid in ["kept", "missing"] {
        ledger.put(record(uid), crate::ledger::Durability::Process).unwrap();
    }
    let guarded = Specs::new(&cdi, "dra.net", Some(guard()));
    guarded.renew(&ledger, false);
    let all = ["dranic-dra.net-kept.json", "dranic-dra.net-missing.json", "dranic-dranic.dev-theirs.json", "other.json"];
    assert_eq!(names(&cdi), all);
    assert!(written(&cdi, "kept").get("containerEdits").is_none(), "what is there is left alone");
    guarded.renew(&ledger, true);
    assert_eq!(names(&cdi), all);
    assert!(written(&cdi, "kept").get("containerEdits").is_some(), "at start it is written anew");
}

#[test]
fn a_folder_that_can_not_be_made_is_named() {
    let error = Specs::new(Path::new("/dev/null/cdi"), "dra.net", None).write(&record("u-1")).unwrap_err();
    assert!(error.contains("/dev/null/cdi/dranic-dra.net-u-1.json") && error.contains("--cdi-dir"), "{error}");
}

/// Trees with character devices of `mlx5_0`, and specs by them; none where no device can be made here.
fn with_rdma(folder: &Path) -> Option<Specs> {
    let (sysfs, dev) = (folder.join("sys"), folder.join("dev"));
    std::fs::create_dir_all(dev.join("infiniband")).unwrap();
    for (class, name, files) in [
        ("infiniband_verbs", "uverbs3", vec![("ibdev", "mlx5_0"), ("dev", "231:195")]),
        ("misc", "rdma_cm", vec![("dev", "10:120")]),
    ] {
        let entry = sysfs.join("class").join(class).join(name);
        std::fs::create_dir_all(&entry).unwrap();
        files.into_iter().for_each(|(file, text)| std::fs::write(entry.join(file), text).unwrap());
    }
    for (name, mode, number) in [("uverbs3", 0o660, makedev(231, 195)), ("rdma_cm", 0o666, makedev(10, 120))] {
        let path = dev.join("infiniband").join(name);
        if let Err(error) = mknod(&path, SFlag::S_IFCHR, Mode::empty(), number) {
            println!("skipped: no character device can be made here: {error}");
            return None;
        }
        // Whatever the umask is.
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }
    Some(Specs::new(&folder.join("cdi"), "dra.net", None).with_roots(&sysfs, &dev))
}

fn rdma(limits: bool) -> crate::ledger::RdmaRecord {
    let mut rdma = json!({
        "name": "mlx5_0", "index": 3, "port": 1, "protocol": "RoCE", "mode": "shared", "charDevices": ["uverbs", "rdmaCm"],
        "waitForPort": true
    });
    if limits {
        rdma["limits"] = json!({"hcaHandles": 2});
    }
    serde_json::from_value(rdma).unwrap()
}

/// Those specs, and a recorded claim that has `mlx5_0`.
fn with_claim(folder: &Path) -> Option<(Specs, Ledger, ClaimRecord)> {
    let specs = with_rdma(folder)?;
    let ledger = ledger(folder);
    let mut claim = record("u-1");
    claim.devices[0].rdma = Some(rdma(false));
    ledger.put(claim.clone(), crate::ledger::Durability::Process).unwrap();
    Some((specs, ledger, claim))
}

#[test]
fn a_device_with_rdma_brings_its_files_and_one_without_brings_none() {
    let folder = tempfile::tempdir().unwrap();
    let Some(specs) = with_rdma(folder.path()) else { return };
    let specs = specs.with_metadata(Arc::new(Metadata::new(Path::new("/var/lib/dranic"), "dra.net")));
    let mut claim = record("u-1");
    claim.devices[0].rdma = Some(rdma(false));
    specs.check(&claim).unwrap();
    specs.write(&claim).unwrap();
    let (uid, gid) = (nix::unistd::getuid().as_raw(), nix::unistd::getgid().as_raw());
    let node = |name: &str, mode: u32, (major, minor): (u32, u32)| {
        let path = format!("/dev/infiniband/{name}");
        json!({"path": path, "hostPath": path, "type": "c", "major": major, "minor": minor, "permissions": "rw", "fileMode": mode,
            "uid": uid, "gid": gid})
    };
    let mount = json!([{
        "hostPath": "/var/lib/dranic/metadata/u-1/nic",
        "containerPath": "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/rail/nic",
        "options": ["ro", "nosuid", "nodev", "noexec", "bind"],
    }]);
    let wanted = json!([
        {"name": "u-1-nic-a", "containerEdits": {
            "env": ["DRANIC_CLAIM_u-1=shop/rail", "DRANIC_RDMA_u-1-nic-a=mlx5_0:1"],
            "deviceNodes": [node("rdma_cm", 0o666, (10, 120)), node("uverbs3", 0o660, (231, 195))], "mounts": mount,
        }},
        {"name": "u-1-nic-b", "containerEdits": {"env": ["DRANIC_CLAIM_u-1=shop/rail"], "mounts": mount}},
    ]);
    assert_eq!(written(&folder.path().join("cdi"), "u-1")["devices"], wanted);
}

#[test]
fn a_spec_follows_its_character_devices_and_is_kept_while_one_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let Some((specs, ledger, claim)) = with_claim(folder.path()) else { return };
    specs.renew(&ledger, false);
    let cdi = folder.path().join("cdi");
    let mode = || written(&cdi, "u-1")["devices"][0]["containerEdits"]["deviceNodes"][1]["fileMode"].clone();
    assert_eq!(mode(), json!(0o660));
    let node = folder.path().join("dev/infiniband/uverbs3");
    std::fs::set_permissions(&node, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    specs.renew(&ledger, false);
    assert_eq!(mode(), json!(0o666));
    std::fs::remove_file(&node).unwrap();
    let error = specs.check(&claim).unwrap_err();
    assert!(error.contains("device nic-a") && error.contains("uverbs3"), "{error}");
    specs.renew(&ledger, false);
    assert_eq!(mode(), json!(0o666), "the guard looks at what containers get");
}

#[test]
fn a_spec_follows_a_device_that_the_kernel_registered_anew() {
    let folder = tempfile::tempdir().unwrap();
    let Some((specs, ledger, claim)) = with_claim(folder.path()) else { return };
    specs.follow(&ledger);
    let cdi = folder.path().join("cdi");
    assert!(!cdi.exists(), "a claim that is not prepared yet has no spec");
    specs.write(&claim).unwrap();
    let verbs = || written(&cdi, "u-1")["devices"][0]["containerEdits"]["deviceNodes"][1].clone();
    assert_eq!(verbs()["minor"], 195);
    // On its way: nothing of it is there, and the spec says what it said.
    let (class, nodes) = (folder.path().join("sys/class/infiniband_verbs"), folder.path().join("dev/infiniband"));
    std::fs::rename(class.join("uverbs3"), folder.path().join("aside")).unwrap();
    std::fs::remove_file(nodes.join("uverbs3")).unwrap();
    specs.follow(&ledger);
    assert_eq!(verbs()["minor"], 195);
    std::fs::write(folder.path().join("aside/dev"), "231:192").unwrap();
    std::fs::rename(folder.path().join("aside"), class.join("uverbs0")).unwrap();
    mknod(&nodes.join("uverbs0"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(231, 192)).unwrap();
    specs.follow(&ledger);
    assert_eq!((&verbs()["path"], &verbs()["minor"]), (&json!("/dev/infiniband/uverbs0"), &json!(192)));
}

#[test]
fn limits_need_the_controller() {
    let folder = tempfile::tempdir().unwrap();
    let Some(specs) = with_rdma(folder.path()) else { return };
    let mut claim = record("u-1");
    claim.devices[0].rdma = Some(rdma(true));
    let error = specs.check(&claim).unwrap_err();
    assert!(error.contains("device nic-a: rdma.limits") && error.contains("version 2"), "{error}");
    let cgroup = folder.path().join("sys/fs/cgroup");
    std::fs::create_dir_all(&cgroup).unwrap();
    std::fs::write(cgroup.join("cgroup.controllers"), "cpu io memory\n").unwrap();
    assert!(specs.check(&claim).unwrap_err().contains("CONFIG_CGROUP_RDMA"));
    std::fs::write(cgroup.join("cgroup.controllers"), "cpu rdma\n").unwrap();
    specs.check(&claim).unwrap();
}
