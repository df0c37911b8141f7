use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use super::*;

fn options() -> Options {
    Options {
        containerd_config: "/etc/containerd/config.toml".into(),
        crio_config: "/etc/crio/crio.conf".into(),
        driver_name: "dranic.dev".to_owned(),
        nri_index: "10".to_owned(),
        uses_nri: true,
        nri_socket: "/var/run/nri/nri.sock".into(),
        cdi_dir: "/var/run/cdi".into(),
        state_dir: "/var/lib/dranic".into(),
        guard_dir: Some("/var/lib/dranic/bin".into()),
    }
}

/// A host with these files.
fn host(files: &[(&str, &str)]) -> (TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let host = Host::new(root.path());
    (root, host)
}

/// What is said of a runtime's configuration that consists of these files.
fn said(files: &[(&str, &str)], runtime: Option<&str>, options: &Options) -> Vec<Finding> {
    let (_root, host) = host(files);
    let loaded = containerd::load(&host, &options.containerd_config, runtime)
        .or_else(|| crio::load(&host, &options.crio_config, runtime))
        .expect("a configuration");
    let (settings, mut findings) = loaded;
    findings.extend(runtime::judge(&settings, options, runtime.is_some()));
    findings
}

/// `level subject: found` of everything that is not ok.
fn open(findings: &[Finding]) -> Vec<String> {
    let open = findings.iter().filter(|f| f.level != Level::Ok);
    open.map(|f| format!("{:?} {}: {}", f.level, f.subject, f.found)).collect()
}

/// Every part of `expected` is in a line of its own, in this order, and there are no others.
fn check(findings: &[Finding], expected: &[&str], text: &str) {
    let open = open(findings);
    let same = open.len() == expected.len() && open.iter().zip(expected).all(|(line, part)| line.contains(part));
    assert!(same, "{text}\nsays    {open:#?}\nexpected {expected:#?}");
    assert!(findings.iter().all(|f| f.level == Level::Ok || f.todo.as_ref().is_some_and(|todo| !todo.is_empty())));
}

const NRI: &str = r#"[plugins."io.containerd.nri.v1.nri"]"#;
const OFF: &str = "Note containerd: default validator: off";

#[test]
fn containerd_says_what_is_on() {
    let nri = |lines: &str| format!("version = 3\n{NRI}\n{lines}\n");
    let validator =
        |lines: &str| nri(&format!("[plugins.\"io.containerd.nri.v1.nri\".default_validator]\nenable = true\n{lines}"));
    let cases: &[(String, Option<&str>, &[&str])] = &[
        ("version = 3".to_owned(), None, &[OFF]),
        ("version = 4".to_owned(), None, &[OFF]),
        (
            "version = 2".to_owned(),
            None,
            &["Warning containerd: NRI: not set: off in containerd 1.7", "Note containerd: CDI: not set", OFF],
        ),
        ("version = 2".to_owned(), Some("containerd v2.1.9"), &[OFF]),
        (
            "version = 2".to_owned(),
            Some("containerd 1.7.24"),
            &[
                "Error containerd: NRI: off, by default",
                "Warning containerd: CDI: off, by default: containers are then gated by NRI",
                OFF,
            ],
        ),
        (nri("disable = true"), None, &["Error containerd: NRI: off", OFF]),
        (nri("disable_connections = true"), None, &["Error containerd: NRI socket: connections", OFF]),
        (nri("socket_path = \"/run/nri/nri.sock\""), None, &[OFF]),
        (nri("socket_path = \"/run/other.sock\""), None, &["Error containerd: NRI socket: it is /run/other.sock", OFF]),
        (nri("plugin_request_timeout = \"1m5s\""), None, &[OFF]),
        (nri("plugin_request_timeout = \"0s\""), None, &[OFF]),
        (nri("plugin_request_timeout = \"500ms\""), None, &["Warning containerd: time for a request: 500 ms", OFF]),
        (nri("plugin_request_timeout = \"5\""), None, &["Error containerd: time for a request: \"5\" is no duration", OFF]),
        (nri("plugin_registration_timeout = \"10ms\""), None, &["Warning containerd: time to register", OFF]),
        (
            "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nplugin_request_timeout = \"9s\"".to_owned(),
            None,
            &["Warning containerd: keys without effect: [plugins.\"io.containerd.cri.v1.runtime\"] plugin_request_timeout", OFF],
        ),
        (
            "version = 3\n[plugins.\"io.containerd.grpc.v1.cri\"]\ncdi_spec_dirs = [\"/x\"]".to_owned(),
            None,
            &["Warning containerd: keys without effect: [plugins.\"io.containerd.grpc.v1.cri\"] cdi_spec_dirs", OFF],
        ),
        (
            "disabled_plugins = [\"cri\"]\nversion = 3".to_owned(),
            None,
            &["Error containerd's configuration: disabled_plugins has", OFF],
        ),
        (
            "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\ncdi_spec_dirs = [\"/etc/cdi\"]".to_owned(),
            None,
            &["Error containerd: CDI: /var/run/cdi is not among its folders (/etc/cdi)", OFF],
        ),
        (
            "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false".to_owned(),
            None,
            &["Warning containerd: CDI: off: containers are then gated by NRI alone", OFF],
        ),
        (
            format!(
                "version = 2\n{NRI}\ndisable = false\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n\
                     cdi_spec_dirs = [\"/run/cdi/\"]"
            ),
            None,
            &[OFF],
        ),
        (validator(""), None, &[]),
        (
            validator("reject_oci_hook_adjustment = true"),
            None,
            &["Warning containerd: default validator: it rejects OCI hooks of plugins"],
        ),
        (validator("required_plugins = [\"other\"]"), None, &[]),
        (
            validator("required_plugins = [\"10-dranic.dev\"]"),
            None,
            &[
                "Error containerd: default validator: this plugin is required for all containers of the node, and no pod can do without",
            ],
        ),
        (
            validator("required_plugins = [\"dranic.dev\"]\ntolerate_missing_plugins_annotation = \"a.b/c\""),
            None,
            &["Warning containerd: default validator: this plugin is required for all containers of the node"],
        ),
        (nri("default_validator = 7\nsocket_path = [1]\ndisable = \"yes\""), None, &[OFF]),
    ];
    for (text, runtime, expected) in cases {
        check(&said(&[("etc/containerd/config.toml", text)], *runtime, &options()), expected, text);
    }
}

#[test]
fn crio_says_what_is_on() {
    let off = "Note CRI-O: default validator: off";
    let cases: &[(&str, Option<&str>, &[&str])] = &[
        ("", None, &["Warning CRI-O: NRI: not set: off up to CRI-O 1.29", off]),
        ("", Some("cri-o 1.34"), &[off]),
        ("[crio.nri]\nenable_nri = true", None, &[off]),
        ("[crio.nri]\nenable_nri = false", None, &["Error CRI-O: NRI: off", off]),
        ("[crio.nri]\nenable_nri = true\nnri_listen = \"/a\"", None, &["Error CRI-O: NRI socket: it is /a", off]),
        (
            "[crio.nri]\nenable_nri = true\nnri_plugin_request_timeout = \"1s\"",
            None,
            &["Warning CRI-O: time for a request: 1000 ms", off],
        ),
        (
            "[crio.nri]\nenable_nri = true\nplugin_request_timeout = \"5s\"",
            None,
            &[
                "Warning CRI-O: keys without effect: [crio.nri] plugin_request_timeout (its name here is nri_plugin_request_timeout)",
                off,
            ],
        ),
        (
            "[crio.nri]\nenable_nri = true\n[crio.runtime]\nnri_plugin_request_timeout = \"5s\"",
            None,
            &["Warning CRI-O: keys without effect: [crio.runtime] nri_plugin_request_timeout", off],
        ),
        (
            "[crio.nri]\nenable_nri = true\n[crio.runtime]\ncdi_spec_dirs = []",
            None,
            &["Error CRI-O: CDI: /var/run/cdi is not among", off],
        ),
        (
            "[crio.nri]\nenable_nri = true\n[crio.nri.default_validator]\nnri_enable_default_validator = true\n\
             nri_validator_required_plugins = [\"dranic.dev\"]\nnri_validator_reject_oci_hook_adjustment = true",
            None,
            &[
                "Error CRI-O: default validator: this plugin is required",
                "Warning CRI-O: default validator: it rejects OCI hooks",
            ],
        ),
    ];
    for (text, runtime, expected) in cases {
        check(&said(&[("etc/crio/crio.conf", text)], *runtime, &options()), expected, text);
    }
    // Later files win, whatever they are called.
    let files = [
        ("etc/crio/crio.conf", "[crio.nri]\nenable_nri = false"),
        ("etc/crio/crio.conf.d/10-a.conf", "[crio.nri]\nenable_nri = false\nnri_listen = \"/a\""),
        ("etc/crio/crio.conf.d/20-b", "[crio.nri]\nenable_nri = true\nnri_listen = \"/run/nri/nri.sock\""),
    ];
    check(&said(&files, None, &options()), &[off], "drop-ins");
}

#[test]
fn without_nri_only_cdi_counts() {
    let options = Options { uses_nri: false, ..options() };
    let off = "version = 3\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false";
    check(
        &said(&[("etc/containerd/config.toml", off)], None, &options),
        &["Error containerd: CDI: off, and the agent works without NRI", OFF],
        off,
    );
}

#[test]
fn imports_come_in_order_and_round_in_circles() {
    let files = [
        (
            "etc/containerd/config.toml",
            "version = 3\nimports = [\"conf.d/*.toml\", \"/etc/containerd/none.toml\"]\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\nplugin_request_timeout = \"1s\"",
        ),
        (
            "etc/containerd/conf.d/a.toml",
            "version = 3\nimports = [\"/etc/containerd/config.toml\", \"a.toml\", \"../conf.d/a.toml\"]",
        ),
        ("etc/containerd/conf.d/b.toml", "version = 3\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = false"),
        ("etc/containerd/conf.d/c.conf", "no toml"),
    ];
    check(
        &said(&files, None, &options()),
        &[
            "Warning containerd's configuration: /etc/containerd/none.toml is imported and not there",
            "Warning containerd: time for a request: 1000 ms",
            OFF,
        ],
        "imports",
    );
    // Up to containerd 2.0 the second file's table replaces the first one's.
    let files = [
        (
            "etc/containerd/config.toml",
            "version = 2\nimports = [\"b.toml\"]\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = false",
        ),
        ("etc/containerd/b.toml", "version = 2\n[plugins.\"io.containerd.nri.v1.nri\"]\nplugin_request_timeout = \"5s\""),
    ];
    let findings = said(&files, Some("containerd v2.0.1"), &options());
    check(
        &findings,
        &["b.toml has a part of [plugins.\"io.containerd.nri.v1.nri\"] that stands in another file as well", OFF],
        "format 2",
    );
}

#[test]
fn hostile_files_are_findings() {
    let huge = "a".repeat(host::FILE_MAX + 1);
    let deep = format!("x = {}", "[".repeat(100_000));
    let dotted = format!("{} = 1", vec!["a"; 100_000].join("."));
    let tables = format!("[{}]", vec!["a"; 100_000].join("."));
    for (text, why) in [
        (huge.as_str(), "it has more than"),
        (deep.as_str(), "line 1: "),
        (dotted.as_str(), "line 1: "),
        (tables.as_str(), "line 1: "),
        ("version = 3\n[plugins", "line 2: "),
        ("\0\u{1}\u{7f}", "line 1: "),
        ("a = 1\na = 2", "line 2: "),
    ] {
        let findings = said(&[("etc/containerd/config.toml", text)], None, &options());
        let expected = format!("Error containerd's configuration: /etc/containerd/config.toml can't be read: {why}");
        assert!(open(&findings)[0].starts_with(&expected), "{:?}", open(&findings));
        assert!(findings.iter().all(|f| f.found.len() < 2000 && f.subject.len() < 400));
    }
    let (root, host) = host(&[]);
    fs::create_dir_all(root.path().join("etc/containerd/config.toml")).unwrap();
    let (_, findings) = containerd::load(&host, Path::new("/etc/containerd/config.toml"), None).unwrap();
    assert!(open(&findings)[0].contains("it is no file"), "{findings:?}");
    let binary = root.path().join("etc/crio.conf");
    fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    let (_, findings) = crio::load(&host, Path::new("/etc/crio.conf"), None).unwrap();
    assert!(open(&findings)[0].contains("it is no text"), "{findings:?}");
}

#[test]
fn a_thousand_imports_end() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("etc/containerd");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.toml"), "version = 3\nimports = [\"*.toml\"]").unwrap();
    for n in 0..1000 {
        fs::write(folder.join(format!("{n}.toml")), format!("version = 3\nimports = [\"*{n}.toml\", \"{}.toml\"]", n + 1))
            .unwrap();
    }
    let (_, findings) = containerd::load(&Host::new(root.path()), Path::new("/etc/containerd/config.toml"), None).unwrap();
    assert!(open(&findings).iter().any(|line| line.contains("more than 64 files")), "{:?}", open(&findings));
}

#[test]
fn links_of_the_host_stay_on_the_host() {
    let (root, host) = host(&[("run/a", "inside"), ("run/b/x.toml", ""), ("run/c/x.toml", "")]);
    symlink("/run", root.path().join("run/loop")).unwrap();
    fs::create_dir(root.path().join("var")).unwrap();
    symlink("/run", root.path().join("var/run")).unwrap();
    symlink("../../../../../../run/a", root.path().join("up")).unwrap();
    fs::create_dir_all(root.path().join("a/b/c")).unwrap();
    symlink("/run", root.path().join("a/b/c/run")).unwrap();
    assert_eq!(host.text(Path::new("/a/b/c/run/a")).as_deref(), Ok("inside"));
    symlink("round", root.path().join("round")).unwrap();
    assert_eq!(host.text(Path::new("/var/run/a")).as_deref(), Ok("inside"));
    assert_eq!(host.text(Path::new("/up")).as_deref(), Ok("inside"));
    assert_eq!(host.text(Path::new("/run/loop/loop/a")).as_deref(), Ok("inside"));
    assert_eq!(host.path(Path::new("/../../etc/passwd")), root.path().join("etc/passwd"));
    assert!(host.text(Path::new("/round")).is_err());
    let matching = host.matching(Path::new("/var/run/?/*.toml"), 64);
    assert_eq!(matching, [PathBuf::from("/var/run/b/x.toml"), PathBuf::from("/var/run/c/x.toml")]);
    assert_eq!(host.matching(Path::new("/var/run/?/*.toml"), 1).len(), 1);
}

#[test]
fn durations_are_go_s() {
    for (text, expected) in [
        ("2s", Some(2000)),
        ("1m30s", Some(90_000)),
        ("1.5s", Some(1500)),
        ("500ms", Some(500)),
        ("0", Some(0)),
        ("1h", Some(3_600_000)),
        ("3000us", Some(3)),
        ("", None),
        ("2", None),
        ("s", None),
        ("-2s", None),
        ("2 s", None),
        ("1..5s", None),
        ("99999999999999999999999h", None),
    ] {
        assert_eq!(duration::parse(text), expected.map(Duration::from_millis), "{text}");
    }
}

#[test]
fn the_agent_says_what_it_has_and_fields_may_be_missing() {
    let all = r#"{"version":"0.1.0","nriConnected":true,"nri":"containerd v2.4.2 (NRI v0.12.3)","kubelet":"registered","publishedDevices":8,
        "publishError":null,"guardUsable":true,"guard":"/var/lib/dranic/bin/dranic-guard"}"#;
    let cases: &[(Result<&str, &str>, bool, &[&str])] = &[
        (Ok(all), true, &[]),
        (Ok("{}"), false, &[]),
        (Ok("[1]"), false, &[]),
        (Ok("nonsense"), false, &["Error agent: its answer is no JSON"]),
        (Err("no agent answers"), false, &["Error agent: no answer: no agent"]),
        (
            Ok(r#"{"nriConnected":false,"nri":"connection refused"}"#),
            false,
            &["Error agent: NRI: not connected: connection refused"],
        ),
        (Ok(r#"{"kubelet":"waiting for the kubelet"}"#), false, &["Error agent: kubelet: not registered: waiting"]),
        (Ok(r#"{"publishedDevices":0}"#), false, &["Warning agent: ResourceSlices: no device"]),
        (Ok(r#"{"publishedDevices":3,"publishError":"403"}"#), false, &["Error agent: ResourceSlices: not published: 403"]),
        (Ok(r#"{"guardUsable":false,"guard":"noexec"}"#), false, &["Warning agent: guard: not used: noexec"]),
    ];
    for (answer, connected, expected) in cases {
        let answer = answer.map(str::to_owned).map_err(str::to_owned);
        let (seen, findings) = agent::look(&answer, &options());
        check(&findings, expected, &format!("{answer:?}"));
        assert_eq!(seen.connected, *connected, "{answer:?}");
        assert_eq!(seen.runtime.is_some(), *connected, "{answer:?}");
    }
}

#[test]
fn the_guard_and_the_ledger_are_looked_at() {
    let (root, host) = host(&[("var/lib/dranic/bin/dranic-guard", "#!/bin/true"), ("var/run/nri/nri.sock", "")]);
    let dir = root.path().join("var/lib/dranic");
    let mode = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let guard = dir.join("bin/dranic-guard");
    mode(&dir, 0o755);
    mode(&guard, 0o644);
    let about = |part: &str| {
        let findings = node::look(&host, &options());
        // The folder of tests may be in memory.
        open(&findings).into_iter().filter(|line| line.contains(part) && !line.contains("in memory")).collect::<Vec<_>>()
    };
    assert!(about("NRI socket")[0].contains("it is no socket"), "{:?}", about("NRI socket"));
    assert!(about("dranic-guard")[0].contains("not executable (mode 0644)"), "{:?}", about("guard"));
    assert!(about("ledger")[0].starts_with("Note ") && about("ledger")[0].contains("mode 0755"), "{:?}", about("ledger"));
    mode(&dir, 0o770);
    assert!(
        about("ledger")[0].starts_with("Warning ") && about("ledger")[0].contains("written by others"),
        "{:?}",
        about("ledger")
    );
    mode(&guard, 0o775);
    assert!(about("dranic-guard")[0].contains("can be written by others"), "{:?}", about("guard"));
    mode(&guard, 0o755);
    mode(&dir, 0o700);
    assert_eq!(about("dranic-guard"), Vec::<String>::new());
    assert_eq!(about("ledger"), Vec::<String>::new());
    fs::remove_file(&guard).unwrap();
    assert!(about("dranic-guard")[0].starts_with("Error "), "{:?}", about("guard"));
}

#[test]
fn the_kernel_is_looked_at() {
    let (root, host) = host(&[("sys/module/rcutree/parameters/jiffies_till_first_fqs", "3\n"), ("sys/class/net/lo/x", "")]);
    check(&kernel::look(&host), &["Note RCU grace periods: jiffies_till_first_fqs is 3"], "");
    fs::write(root.path().join("sys/module/rcutree/parameters/jiffies_till_first_fqs"), "0\n").unwrap();
    check(&kernel::look(&host), &[], "");
}

#[test]
fn what_rdma_devices_need_is_looked_at() {
    let (_root, none) = host(&[]);
    check(&rdma::look(&none), &[], "without RDMA there is nothing to say");
    let base = [
        ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n"),
        ("sys/class/infiniband_mad/umad0/ibdev", "mlx5_0\n"),
        ("sys/class/misc/rdma_cm/dev", "10:60\n"),
        ("dev/infiniband/uverbs0", ""),
        ("dev/infiniband/umad0", ""),
        ("dev/infiniband/rdma_cm", ""),
        ("sys/fs/cgroup/cgroup.controllers", "cpu memory rdma\n"),
        ("sys/module/ib_core/parameters/netns_mode", "N\n"),
        ("proc/17/comm", "containerd\n"),
        ("proc/17/limits", "Max locked memory         unlimited            unlimited            bytes\n"),
    ];
    let said = |changed: &[(&'static str, &'static str)], without: &str, expected: &[&str]| {
        let files: Vec<_> = base.iter().chain(changed).copied().filter(|(path, _)| !path.starts_with(without)).collect();
        let (_root, host) = host(&files);
        check(&rdma::look(&host), expected, without);
    };
    said(&[], "-", &[]);
    said(&[("sys/module/ib_core/parameters/netns_mode", "Y\n")], "-", &["Note RDMA: 1 devices: shared"]);
    said(&[], "dev/infiniband/u", &["Error RDMA: /dev/infiniband: lacks uverbs0, umad0: "]);
    said(&[], "dev/infiniband/rdma", &["Error RDMA: /dev/infiniband: lacks rdma_cm: "]);
    said(&[], "sys/class/infiniband_verbs", &["Error RDMA: module ib_uverbs"]);
    said(&[], "sys/class/misc", &["Warning RDMA: module rdma_ucm"]);
    said(&[], "sys/class/infiniband_mad", &["Note RDMA: module ib_umad"]);
    said(&[], "sys/fs", &["Note RDMA: cgroup controller: no cgroup v2"]);
    said(&[("sys/fs/cgroup/cgroup.controllers", "cpu\n")], "-", &["Note RDMA: cgroup controller: the kernel has none"]);
    let limits = "Max locked memory         8388608              8388608              bytes\n";
    said(&[("proc/17/limits", limits)], "-", &["Warning RDMA: locked memory of containerd: 8388608 bytes"]);
    said(&[("proc/17/comm", "bash\n"), ("proc/17/limits", limits)], "-", &[]);
    said(&[("sys/class/infiniband/smi1/x", "")], "-", &["Note RDMA: devices without verbs: smi1"]);
    let second = ("sys/class/infiniband/mlx5_0/ports/2/state", "4: ACTIVE\n");
    said(&[second], "-", &["Note RDMA: devices with several ports: mlx5_0"]);
    said(&[("sys/class/net/ib0/type", "32\n"), ("sys/class/net/eth0/type", "1\n")], "-", &["Note RDMA: IPoIB links: ib0"]);
    // These are nothing to know of where nothing moves.
    let shared = ("sys/module/ib_core/parameters/netns_mode", "Y\n");
    said(&[second, ("sys/class/net/ib0/type", "32\n"), shared], "-", &["Note RDMA: 1 devices: shared"]);
}
