//! Flags, environment, help and completion of the program itself.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use dranic_testbed::cluster::Cluster;
use dranic_testbed::fabric::NodeCommand;

use crate::node::{self, LIMIT, PROGRAM, stderr, stdout, until};

fn dranic(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(arguments).env_clear().envs(environment.iter().copied()).stdin(Stdio::null()).output().unwrap()
}

/// Flags that would run an agent below `dir`, if the API server's address were right.
fn good(dir: &Path) -> Vec<(String, String)> {
    let at = |name: &str| dir.join(name).display().to_string();
    let kubeconfig = r#"{"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}"#;
    std::fs::write(dir.join("kubeconfig"), kubeconfig).unwrap();
    let flags = [
        ("--node-name", "node-1".to_owned()),
        ("--kubeconfig", at("kubeconfig")),
        ("--kubelet-root", at("kubelet")),
        ("--nri-socket", at("nri.sock")),
        ("--state-dir", at("state")),
        ("--cdi-dir", at("cdi")),
        ("--status-socket", at("status.sock")),
        // Nobody can bind this one: should a bad value slip through, the agent ends all the same.
        ("--http-address", "192.0.2.1:9".to_owned()),
    ];
    flags.into_iter().map(|(flag, value)| (flag.to_owned(), value)).collect()
}

/// Flag, bad value, variable that has it too.
fn bad_values(dir: &Path) -> Vec<(&'static str, String, &'static str)> {
    let long = |count: usize| format!("/{}", "x".repeat(count));
    std::fs::write(dir.join("garbage"), "{ this is: [no kubeconfig").unwrap();
    std::fs::write(dir.join("empty"), "").unwrap();
    let contextless =
        r#"{"apiVersion": "v1", "kind": "Config", "current-context": "missing", "clusters": [], "contexts": [], "users": []}"#;
    std::fs::write(dir.join("contextless"), contextless).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    let mut all = vec![
        ("--node-name", "Node_1".to_owned(), "NODE_NAME"),
        ("--node-name", "a".repeat(254), "NODE_NAME"),
        ("--driver-name", "a/b".to_owned(), "DRANIC_DRIVER_NAME"),
        ("--driver-name", String::new(), "DRANIC_DRIVER_NAME"),
        ("--driver-name", "d".repeat(64), "DRANIC_DRIVER_NAME"),
        ("--kubeconfig", at("not-there"), "KUBECONFIG"),
        ("--kubeconfig", at(""), "KUBECONFIG"),
        ("--kubeconfig", at("garbage"), "KUBECONFIG"),
        ("--kubeconfig", at("empty"), "KUBECONFIG"),
        ("--kubeconfig", at("contextless"), "KUBECONFIG"),
        ("--kubelet-root", "kubelet".to_owned(), "DRANIC_KUBELET_ROOT"),
        ("--kubelet-root", long(100), "DRANIC_KUBELET_ROOT"),
        ("--instance", "../x".to_owned(), "POD_UID"),
        ("--instance", String::new(), "POD_UID"),
        ("--nri-socket", "nri.sock".to_owned(), "DRANIC_NRI_SOCKET"),
        ("--nri-socket", long(107), "DRANIC_NRI_SOCKET"),
        ("--nri-index", "5".to_owned(), "DRANIC_NRI_INDEX"),
        ("--nri-index", "ab".to_owned(), "DRANIC_NRI_INDEX"),
        ("--nri", "perhaps".to_owned(), "DRANIC_NRI"),
        ("--gate-socket", "gate.sock".to_owned(), "DRANIC_GATE_SOCKET"),
        ("--gate-socket", long(107), "DRANIC_GATE_SOCKET"),
        ("--guard-dir", "bin".to_owned(), "DRANIC_GUARD_DIR"),
        ("--guard-wait", "0".to_owned(), "DRANIC_GUARD_WAIT"),
        ("--guard-wait", "111".to_owned(), "DRANIC_GUARD_WAIT"),
        ("--state-dir", "state".to_owned(), "DRANIC_STATE_DIR"),
        ("--state-dir", String::new(), "DRANIC_STATE_DIR"),
        ("--netns-dir", "netns".to_owned(), "DRANIC_NETNS_DIR"),
        ("--sysctl-dir", "net".to_owned(), "DRANIC_SYSCTL_DIR"),
        ("--cdi-dir", "./cdi".to_owned(), "DRANIC_CDI_DIR"),
        ("--status-socket", "s.sock".to_owned(), "DRANIC_STATUS_SOCKET"),
        ("--status-socket", long(107), "DRANIC_STATUS_SOCKET"),
        ("--http-address", "9177".to_owned(), "DRANIC_HTTP_ADDRESS"),
        ("--http-address", "127.0.0.1:99999".to_owned(), "DRANIC_HTTP_ADDRESS"),
        ("--on-overrun", "maybe".to_owned(), "DRANIC_ON_OVERRUN"),
        ("--hold", "-1".to_owned(), "DRANIC_HOLD"),
        ("--hold", "60001".to_owned(), "DRANIC_HOLD"),
        ("--hold", "a while".to_owned(), "DRANIC_HOLD"),
        ("--on-missed-sandbox", "ignore".to_owned(), "DRANIC_ON_MISSED_SANDBOX"),
        ("--nri-margin-percent", "51".to_owned(), "DRANIC_NRI_MARGIN_PERCENT"),
        ("--nri-margin", "0".to_owned(), "DRANIC_NRI_MARGIN"),
        ("--nri-margin", "-5".to_owned(), "DRANIC_NRI_MARGIN"),
        ("--nri-margin", "soon".to_owned(), "DRANIC_NRI_MARGIN"),
        ("--rescan", "0".to_owned(), "DRANIC_RESCAN"),
        ("--share-slots", "1025".to_owned(), "DRANIC_SHARE_SLOTS"),
        ("--share-slots", "many".to_owned(), "DRANIC_SHARE_SLOTS"),
        ("--share", "a*b*c*d*e*f".to_owned(), "DRANIC_SHARE"),
        ("--share", "x".repeat(65), "DRANIC_SHARE"),
        ("--wait-for-device", "41".to_owned(), "DRANIC_WAIT_FOR_DEVICE"),
        ("--wait-for-device", "a while".to_owned(), "DRANIC_WAIT_FOR_DEVICE"),
        ("--dhcp-timeout", "0".to_owned(), "DRANIC_DHCP_TIMEOUT"),
        ("--dhcp-timeout", "41".to_owned(), "DRANIC_DHCP_TIMEOUT"),
        ("--rescan", "99999999999999999999".to_owned(), "DRANIC_RESCAN"),
        ("--sysctl-dir", "sys".to_owned(), "DRANIC_SYSCTL_DIR"),
        ("--bpffs", "bpf".to_owned(), "DRANIC_BPFFS"),
        ("--dev", "dev".to_owned(), "DRANIC_DEV"),
        ("--ipoib", "perhaps".to_owned(), "DRANIC_IPOIB"),
        ("--verbs", "perhaps".to_owned(), "DRANIC_VERBS"),
        ("--rdma-timeout", "0".to_owned(), "DRANIC_RDMA_TIMEOUT"),
        ("--log-format", "xml".to_owned(), "DRANIC_LOG_FORMAT"),
        ("--log-level", "dranic=loud".to_owned(), "DRANIC_LOG"),
    ];
    all.sort_by_key(|(flag, ..)| *flag);
    all
}

fn assert_refused(output: &Output, dir: &Path, files: &[String], flag: &str, value: &str) {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(64), "{flag} {value:?}: {text}");
    assert!(text.contains(flag), "{flag} {value:?} is not named: {text}");
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!(node::files(dir), files, "{flag} {value:?} left something behind");
}

#[test]
fn each_bad_value_exits_64_names_its_flag_and_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, good) = (dir.path(), good(dir.path()));
    let bad = bad_values(dir);
    let files = node::files(dir);
    let mut seen = std::collections::BTreeSet::new();
    for (flag, value, variable) in &bad {
        let rest = || good.iter().filter(|(f, _)| f != flag);
        let mut arguments = vec!["agent".to_owned()];
        arguments.extend(rest().map(|(flag, value)| format!("{flag}={value}")));
        let given: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let pair = format!("{flag}={value}");
        let flagged = [&given[..], &[&pair]].concat();
        assert_refused(&dranic(&flagged, &[]), dir, &files, flag, value);
        assert_refused(&dranic(&given, &[(variable, value)]), dir, &files, flag, value);
        seen.insert(*flag);
    }
    // Whoever adds a flag adds a bad value for it, or says here that it has none.
    let help = stdout(&dranic(&["agent", "--help"], &[]));
    let flags =
        help.split_whitespace().filter_map(|w| w.strip_prefix("--")).map(|w| w.trim_end_matches([',', '.', ':', ')', ';']));
    for flag in flags.filter(|f| !["help", "version", "offer-veth", "need-default-route"].contains(f)) {
        assert!(seen.contains(format!("--{flag}").as_str()), "no bad value for --{flag} is tested");
    }
}

#[test]
fn unknown_and_repeated_flags_are_refused() {
    for arguments in [
        &["agent", "--nod-name", "x"][..],
        &["agent", "--node-name", "a", "--node-name", "b"],
        &["agent", "extra"],
        &["status", "-o", "yaml"],
        &["devices", "--output"],
        &["nonsense"],
        &[],
        &["completion", "csh2"],
    ] {
        let output = dranic(arguments, &[]);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?}");
    }
    assert!(stderr(&dranic(&["agent", "--nod-name", "x"], &[])).contains("--node-name"), "it suggests the right one");
    for (variable, value) in [("DRANIC_OFFER_VETH", "maybe"), ("DRANIC_NEED_DEFAULT_ROUTE", "2")] {
        let output = dranic(&["devices"], &[(variable, value)]);
        assert_eq!(output.status.code(), Some(64), "{variable}");
        assert!(stderr(&output).contains(if variable.contains("VETH") { "--offer-veth" } else { "--need-default-route" }));
    }
}

#[test]
fn help_has_examples_every_variable_and_the_defaults() {
    let top = stdout(&dranic(&["--help"], &[]));
    node::assert_says(
        &top,
        &["Examples:", "dranic agent", "dranic devices", "dranic status", "dranic validate", "Exit codes:", "64", "66", "69"],
    );
    let output = dranic(&["agent", "--help"], &[]);
    assert!(output.status.success());
    let agent = stdout(&output);
    node::assert_says(
        &agent,
        &[
            "Examples:",
            "[default: 127.0.0.1:9177]",
            "[default: dranic.dev]",
            "[default: 200]",
            "[default: attach]",
            "[default: 10]",
        ],
    );
    for (_, _, variable) in bad_values(tempfile::tempdir().unwrap().path()) {
        assert!(agent.contains(&format!("[env: {variable}")), "{variable} is not in the help");
    }
    let commands = [
        ("status", "DRANIC_STATUS_SOCKET"),
        ("devices", "DRANIC_OFFER_VETH"),
        ("validate", "DRANIC_DRIVER_NAME"),
        ("attach", "DRANIC_ATTACH_STATE_DIR"),
        ("release", "DRANIC_STATE_DIR"),
    ];
    for (command, variable) in commands {
        node::assert_says(&stdout(&dranic(&[command, "--help"], &[])), &[variable, "--output", "Examples:"]);
    }
    assert!(stdout(&dranic(&["--version"], &[])).starts_with("dranic "));
}

#[test]
fn completion_scripts_are_accepted_by_their_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let output = dranic(&["completion", shell], &[]);
        assert!(output.status.success());
        node::assert_says(&stdout(&output), &["dranic", "on-overrun", "status-socket"]);
        let child = Command::new(shell).arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
        match child {
            Ok(mut child) => {
                child.stdin.take().unwrap().write_all(&output.stdout).unwrap();
                let checked = child.wait_with_output().unwrap();
                assert!(checked.status.success(), "{shell}: {}", stderr(&checked));
            }
            // bash is on every machine that runs our scripts.
            Err(error) => assert!(shell != "bash" && error.kind() == std::io::ErrorKind::NotFound, "{shell}: {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_can_be_set_by_the_environment() {
    let Some(options) = node::options(2) else { return };
    let cluster = Cluster::new(options).unwrap();
    let at = |name: &str| cluster.path(name).display().to_string();
    let environment = [
        ("NODE_NAME", "node-1".to_owned()),
        ("DRANIC_DRIVER_NAME", "env.example.com".to_owned()),
        ("KUBECONFIG", at("kubeconfig")),
        ("DRANIC_KUBELET_ROOT", at("kubelet")),
        ("POD_UID", "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0".to_owned()),
        ("DRANIC_NRI_SOCKET", at("nri.sock")),
        ("DRANIC_NRI_INDEX", "33".to_owned()),
        ("DRANIC_STATE_DIR", at("deep/state")),
        ("DRANIC_CDI_DIR", at("cdi")),
        ("DRANIC_STATUS_SOCKET", at("deep/run/dranic.sock")),
        ("DRANIC_ON_OVERRUN", "defer".to_owned()),
        ("DRANIC_NRI_MARGIN", "200".to_owned()),
        ("DRANIC_OFFER_VETH", "true".to_owned()),
        ("DRANIC_RESCAN", "5".to_owned()),
        ("DRANIC_WAIT_FOR_DEVICE", "0".to_owned()),
        ("DRANIC_DHCP_TIMEOUT", "3".to_owned()),
        ("DRANIC_LOG_FORMAT", "json".to_owned()),
        ("DRANIC_LOG", "debug".to_owned()),
    ];
    let log = std::fs::File::create(cluster.path("env.log")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("agent").env_clear().envs(environment).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut child = Killed(NodeCommand::spawn(&cluster.node, &mut command).unwrap());
    cluster.kubelet.wait_driver("env.example.com", LIMIT).await.unwrap();
    cluster.runtime.wait_plugin("33-env.example.com", LIMIT).await.unwrap();
    // The default address, on loopback only.
    until(LIMIT, "ready", || node::get(&cluster, "/readyz").is_ok_and(|(status, _)| status == 200)).await;
    let table = NodeCommand::run(&cluster.node, || std::fs::read_to_string("/proc/thread-self/net/tcp")).unwrap().unwrap();
    assert!(table.contains("0100007F:23D9 00000000:0000 0A"), "{table}");
    let any = NodeCommand::run(&cluster.node, || std::fs::read_to_string("/proc/thread-self/net/tcp6")).unwrap().unwrap();
    assert!(!any.contains(":23D9"), "{any}");
    assert!(cluster.path("kubelet/plugins/env.example.com/dra-0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0.sock").exists());
    assert!(cluster.path("deep/state/lock").exists() && cluster.path("deep/run/dranic.sock").exists());
    assert_eq!(cluster.api.slices()[0]["spec"]["driver"], "env.example.com");
    let log = std::fs::read_to_string(cluster.path("env.log")).unwrap();
    let levels: Vec<String> = log
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["level"].as_str().unwrap().to_owned())
        .collect();
    assert!(levels.contains(&"DEBUG".to_owned()), "{log}");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.0.id().cast_signed()), nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(child.0.wait().unwrap().success());
}

/// A child that goes with the test, also when it fails.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
