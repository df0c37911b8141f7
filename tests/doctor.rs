//! `dranic doctor` as a program, on a root of a host that the test makes.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

fn doctor(root: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dranic"));
    command.env_clear().arg("doctor").arg("--root").arg(root).args(more).output().unwrap()
}

/// A host's root with a containerd that has NRI `on` or off, an agent, a ledger and no guard.
fn host(nri: &str) -> (tempfile::TempDir, std::thread::JoinHandle<()>) {
    let root = tempfile::tempdir().unwrap();
    let path = |path: &str| root.path().join(path);
    for folder in ["etc/containerd", "run/nri", "run/dranic", "var/lib/dranic", "var"] {
        std::fs::create_dir_all(path(folder)).unwrap();
    }
    std::os::unix::fs::symlink("/run", path("var/run")).unwrap();
    let config = format!("version = 3\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = {}\n", nri == "off");
    std::fs::write(path("etc/containerd/config.toml"), config).unwrap();
    let runtime = UnixListener::bind(path("run/nri/nri.sock")).unwrap();
    let agent = UnixListener::bind(path("run/dranic/dranic.sock")).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = agent.accept().unwrap();
        stream.write_all(br#"{"version":"9.9.9","nriConnected":true,"nri":"containerd v2.4.2","kubelet":"registered"}"#).unwrap();
        drop(runtime);
    });
    (root, answering)
}

#[test]
fn a_node_without_errors_exits_0_and_one_with_them_1() {
    let (root, agent) = host("on");
    let output = doctor(root.path(), &["--guard-dir", ""]);
    agent.join().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    for part in ["version 9.9.9 answers", "format 3: /etc/containerd/config.toml", "note", "containerd: default validator"] {
        assert!(text.contains(part), "{part}: {text}");
    }

    let (root, agent) = host("off");
    let output = doctor(root.path(), &["-o", "json"]);
    agent.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let errors: Vec<_> = answer["findings"].as_array().unwrap().iter().filter(|f| f["level"] == "error").collect();
    assert_eq!(answer["errors"], errors.len());
    let subjects: Vec<_> = errors.iter().map(|f| f["subject"].as_str().unwrap()).collect();
    assert_eq!(subjects, ["containerd: NRI", "guard /var/lib/dranic/bin/dranic-guard"]);
    assert!(errors.iter().all(|f| f["todo"].is_string()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("2 of"));
}

#[test]
fn bad_flags_exit_64() {
    let root = tempfile::tempdir().unwrap();
    for (flags, word) in
        [(["--state-dir", "relative"], "--state-dir"), (["--nri", "perhaps"], "--nri"), (["--root", "/does/not/exist"], "--root")]
    {
        let flags =
            if flags[0] == "--root" { flags.to_vec() } else { [&flags[..], &["--root", root.path().to_str().unwrap()]].concat() };
        let output = Command::new(env!("CARGO_BIN_EXE_dranic")).env_clear().arg("doctor").args(&flags).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{flags:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(word) && error.contains("doctor --help") || word == "--nri", "{error}");
    }
}
