//! `dranic attach`, `release`, `validate` and `schema` as programs: without a cluster, and for the first two on a scratch node.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{World, claim, pod_ref};
use dranic_testbed::fabric::NodeCommand;
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_dranic");

const CONFIG: &str = "
interface:
  name: rail0
  mtu: 8000
  addresses: [10.9.0.5/24]
routes:
- {destination: 10.0.0.0/8, gateway: 10.9.0.1, table: 120}
rules:
- {priority: 1000, source: 10.9.0.5/32, table: 120}
";

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A scratch node, and a folder for the program's files.
struct Rig {
    world: World,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new(nics: u32) -> Option<Self> {
        let world = World::new(nics)?;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.yaml"), CONFIG).unwrap();
        Some(Self { world, dir })
    }

    fn at(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(PROGRAM);
        let (state, agents) = (self.at("by-hand"), self.at("agent"));
        command.args(arguments).args(["--state-dir", &state, "--agent-state-dir", &agents]).env_clear();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        NodeCommand::spawn(&self.world.node, &mut command).unwrap().wait_with_output().unwrap()
    }

    fn attach(&self, device: &str, netns: &Path, more: &[&str]) -> Output {
        let netns = netns.display().to_string();
        let mut arguments = vec!["attach", "--offer-veth", "--device", device, "--netns", &netns];
        arguments.extend(more);
        self.run(&arguments)
    }
}

#[test]
fn a_device_goes_in_and_comes_back_as_it_was() {
    let Some(rig) = Rig::new(2) else { return };
    let before = rig.world.host_states();
    let pod = rig.world.pod("a");
    let attached = rig.attach("nic0", pod.path(), &["--config", &rig.at("config.yaml")]);
    assert!(attached.status.success(), "{}", err(&attached));
    assert!(out(&attached).starts_with("nic0 is rail0 in "), "{}", out(&attached));
    let inside = rig.world.pod_links(&pod).into_iter().find(|l| l.name == "rail0").unwrap();
    assert_eq!((inside.mtu, inside.is_up()), (8000, true));
    assert!(rig.world.pod_addresses(&pod).contains(&"10.9.0.5/24".to_owned()));
    assert!(rig.world.links().iter().all(|l| l.name != "nic0"));

    let again = rig.attach("nic1", pod.path(), &["--config", &rig.at("config.yaml")]);
    assert!(err(&again).contains("would both be called rail0"), "{}", err(&again));
    let unknown = rig.run(&["release", "--device", "nic7"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(err(&unknown).contains("did you mean nic0?"), "{}", err(&unknown));

    let released = rig.run(&["release", "--device", "rail0", "-o", "json"]);
    assert!(released.status.success(), "{}", err(&released));
    let json: Value = serde_json::from_str(&out(&released)).unwrap();
    assert_eq!((&json["returned"][0]["hostLink"], &json["failed"]), (&"nic0".into(), &Value::Array(vec![])));
    rig.world.assert_unchanged(&before);
    assert!(err(&rig.run(&["release", "--device", "nic0"])).contains("nothing is attached"));
    assert!(rig.run(&["release", "--all"]).status.success(), "nothing to do is no failure");
}

#[test]
fn all_come_back_at_once_and_an_attach_that_fails_leaves_nothing() {
    let Some(rig) = Rig::new(2) else { return };
    let before = rig.world.host_states();
    let pod = rig.world.pod("a");
    for nic in ["nic0", "nic1"] {
        let attached = rig.attach(nic, pod.path(), &[]);
        assert!(attached.status.success(), "{}", err(&attached));
    }
    let twice = rig.attach("nic0", pod.path(), &[]);
    assert_eq!(twice.status.code(), Some(1));
    assert!(rig.run(&["release", "--all"]).status.success());
    rig.world.assert_unchanged(&before);
    // The kernel refuses a link whose name is taken there.
    std::fs::write(rig.at("config.yaml"), "interface: {name: taken}").unwrap();
    rig.world.occupy("taken");
    let from = rig.world.node.netns();
    rig.world.carry(from, &pod.netns().unwrap(), "taken", "taken", 77);
    let failed = rig.attach("nic0", pod.path(), &["--config", &rig.at("config.yaml")]);
    assert_eq!(failed.status.code(), Some(1), "{}", out(&failed));
    assert!(err(&failed).contains("the host is as it was"), "{}", err(&failed));
    rig.world.assert_unchanged(&before);
}

#[test]
fn a_dry_run_says_what_would_be_done_and_touches_nothing() {
    let Some(rig) = Rig::new(1) else { return };
    let before = rig.world.host_states();
    let pod = rig.world.pod("a");
    let config = rig.at("config.yaml");
    let words = rig.attach("nic0", pod.path(), &["--config", &config, "--dry-run"]);
    assert!(words.status.success(), "{}", err(&words));
    let device = rig.world.device_names()[0].clone();
    let text: Vec<String> = out(&words).lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let expected = format!(
        "nic0 ({device}) would be rail0 in {}:

STEP UNDONE BY
1 setting nic0 down on the host setting it up again, once everything else is given back
2 moving it into the pod as rail0, with an MTU of 8000 bytes moving it back to the host, under its name there
3 adding address 10.9.0.5/24 nothing: it goes when the link is moved back
4 setting it up nothing: it goes when the link is moved back
5 adding route 10.0.0.0/8 via 10.9.0.1 in table 120 nothing: it goes when the link is moved back
6 adding rule from 10.9.0.5/32 lookup 120 deleting rule from 10.9.0.5/32 lookup 120 of the pod",
        pod.path().display()
    );
    assert_eq!(text[..9].join("\n"), expected);
    assert_eq!(text.last().map(String::as_str), Some("Nothing was changed."));
    let json = rig.attach("nic0", pod.path(), &["--config", &config, "--dry-run", "-o", "json"]);
    let json: Value = serde_json::from_str(&out(&json)).unwrap();
    let kinds: Vec<&str> = json["steps"].as_array().unwrap().iter().map(|s| s["step"].as_str().unwrap_or("down")).collect();
    assert_eq!(kinds, ["down", "move", "address", "up", "route", "rule"]);
    assert_eq!(json["steps"][5]["undo"]["undo"], "deleteRule");
    rig.world.assert_unchanged(&before);
    assert!(!Path::new(&rig.at("by-hand")).exists(), "a ledger was made");
    assert!(rig.world.pod_links(&pod).iter().all(|l| l.name != "rail0"));
}

#[test]
fn what_can_not_be_done_is_refused_with_what_to_do() {
    let Some(rig) = Rig::new(2) else { return };
    let pod = rig.world.pod("a");
    let refused = |output: Output, code: i32, words: &str| {
        assert_eq!(output.status.code(), Some(code), "{}", err(&output));
        assert!(err(&output).contains(words), "{words}: {}", err(&output));
    };
    refused(rig.attach("nicc0", pod.path(), &[]), 1, "did you mean nic0?");
    refused(rig.attach("lo", pod.path(), &[]), 1, "lo");
    refused(rig.attach("nic0", Path::new("/run/netns/not-there-at-all"), &[]), 1, "ip netns add");
    refused(rig.attach("nic0", Path::new("/etc/hosts"), &[]), 1, "is not a network namespace");
    refused(rig.attach("nic0", Path::new("/proc/thread-self/ns/net"), &[]), 1, "is in already");
    refused(rig.attach("nic0", pod.path(), &["--config", "/not/there"]), 66, "/not/there");
    let bad = rig.at("bad.yaml");
    std::fs::write(&bad, "interface:\n  mtu: 5\n").unwrap();
    refused(rig.attach("nic0", pod.path(), &["--config", &bad]), 1, "bad.yaml:2: interface.mtu: is 5; must be 68");
    refused(rig.run(&["release"]), 64, "--device");
    // A pod has it: the agent's ledger says so.
    let (ledger, _) = dranic::ledger::Ledger::open(Path::new(&rig.at("agent"))).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let engine = rig.world.engine_of(boot.trim());
    let record = engine.prepare(&claim("a", &rig.world.device_names()[..1], ""), &pod_ref("web-0")).unwrap();
    ledger.put((*record).clone(), dranic::ledger::Durability::Process).unwrap();
    refused(rig.attach(record.devices[0].host.name.as_str(), pod.path(), &[]), 1, "for claim default/a of pod web-0");
}

#[test]
fn validate_reads_files_folders_and_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let claim = |mtu: &str| {
        format!(
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: c}}\nspec:\n  devices:\n    config:\n    \
             - opaque: {{driver: dranic.dev, parameters: {{interface: {{mtu: {mtu}}}}}}}\n    requests:\n    \
             - {{name: a, exactly: {{deviceClassName: x}}}}\n---\nkind: Pod\napiVersion: v1\nmetadata: {{name: p}}\n"
        )
    };
    std::fs::write(at("good.yaml"), claim("1500")).unwrap();
    std::fs::write(at("bad.yml"), claim("5")).unwrap();
    std::fs::write(at("notes.txt"), "{").unwrap();
    let validate = |arguments: &[&str], input: &str| {
        let mut command = Command::new(PROGRAM);
        command.arg("validate").args(arguments).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let good = validate(&["-f", &at("good.yaml"), "-v"], "");
    assert!(good.status.success(), "{}", err(&good));
    assert!(out(&good).contains("ignored: Pod (v1) p\n") && out(&good).contains("1 configurations of dranic.dev checked"));
    let folder = validate(&["-f", dir.path().to_str().unwrap()], "");
    assert_eq!(folder.status.code(), Some(1));
    let line = format!("{}:7:61: ResourceClaim c: spec.devices.config[0].opaque.parameters.interface.mtu: is 5; ", at("bad.yml"));
    assert!(out(&folder).starts_with(&line), "{}", out(&folder));
    let json = validate(&["-f", "-", "-o", "json"], &claim("5"));
    let report: Value = serde_json::from_str(&out(&json)).unwrap();
    assert_eq!((&report["faults"][0]["file"], &report["faults"][0]["line"]), (&"<stdin>".into(), &7.into()));
    assert!(validate(&["-f", "-", "--driver-name", "dra.net"], &claim("5")).status.success());
    assert_eq!(validate(&["-f", &at("nothing.yaml")], "").status.code(), Some(66));
    assert_eq!(validate(&[], "").status.code(), Some(64));
    assert_eq!(validate(&["-f", "-", "--driver-name", "A/b"], "").status.code(), Some(64));
    assert_eq!(validate(&["-f", "-"], "a: [").status.code(), Some(1));
}
