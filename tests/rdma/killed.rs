//! The process is killed between any two steps of a pod's life with an RDMA device, and the next one gets to the same end. A life is
//! this test binary again, with an order in its environment.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;

use dranic::attach::Engine;
use dranic::ledger::Ledger;
use dranic::netns::Netns;
use dranic::rdma::NetnsMode;

use super::common::{claim, pod_ref, sandbox};
use super::pci::{Guest, run, soon};
use super::rig::{self, Host, Veth, names, published};

/// Where the child finds its ledger and the pod's namespace.
const STATE: &str = "DRANIC_TEST_RDMA_STATE";
const POD: &str = "DRANIC_TEST_RDMA_POD";

fn engine(state: &Path) -> Engine {
    let (ledger, bad) = Ledger::open(state).unwrap();
    assert!(bad.is_empty());
    Engine::new(Arc::new(ledger), Netns::current().unwrap(), "boot-1".to_owned(), Arc::new(Host))
}

/// Not a test: what the killed process does. Without its environment it does nothing.
#[test]
fn life() {
    let (Some(state), Some(pod)) = (std::env::var_os(STATE), std::env::var_os(POD)) else { return };
    let engine = engine(Path::new(&state));
    engine.recover();
    let one = claim("a", &[published("rv0")], r#"{"interface": {"name": "pod7"}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    engine.attach(&pod_ref("a").uid, &sandbox("a"), &PathBuf::from(pod), soon()).unwrap();
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&one.claim).unwrap();
}

fn live(guest: &Guest, pod: &Path, variable: &str, value: &str) -> ExitStatus {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["killed::life", "--exact"]).env(STATE, guest.state_dir()).env(POD, pod).env(variable, value);
    let out = child.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() || out.status.signal() == Some(9), "{value}: {text}");
    out.status
}

fn assert_as_before() {
    assert_eq!(names(&Netns::current().unwrap()), ["rv0"]);
    let out = Command::new("ip").args(["-br", "address", "show", "dev", "rail0"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("10.70.0.1/24") && text.contains("UP"), "{text}");
}

/// The next process: what was begun is made whole, and ended.
fn go_on(guest: &Guest, pod: &Path) {
    let engine = engine(guest.state_dir());
    engine.recover();
    let known = engine.records().first().cloned();
    let one = match known {
        Some(record) => record.claim.clone(),
        None => {
            let one = claim("a", &[published("rv0")], r#"{"interface": {"name": "pod7"}}"#);
            engine.prepare(&one, &pod_ref("a")).unwrap().claim.clone()
        }
    };
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod, soon()).unwrap();
    let netns = Netns::open(pod).unwrap();
    assert_eq!((names(&netns), names(&guest.host)), (vec!["rv0".to_owned()], vec![]));
    netns.run(|| run("ip link show pod7 up")).unwrap();
    let _ = engine.release(&pod_ref("a").uid, &sandbox("a"));
    engine.unprepare(&one).unwrap();
    assert!(engine.records().is_empty());
}

#[test]
fn killed_between_any_two_steps() {
    let Some(guest) = rig::guest(NetnsMode::Exclusive) else { return };
    if !cfg!(debug_assertions) {
        println!("skipped: a release build has no points to be killed at");
        return;
    }
    let _veth = Veth::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("points");
    let pod = guest.pod("first");
    assert!(live(&guest, pod.path(), "DRANIC_TEST_POINTS", file.to_str().unwrap()).success());
    assert_as_before();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for point in std::fs::read_to_string(&file).unwrap().lines() {
        *counts.entry(point.to_owned()).or_default() += 1;
    }
    for wanted in ["attach: rdma moved", "attach: rdma verified", "release: rdma moved", "release: rdma named"] {
        assert!(counts.contains_key(wanted), "no point {wanted:?} among {counts:?}");
    }
    let mut kills = 0;
    for (point, count) in &counts {
        for n in 1..=*count {
            let pod = guest.pod(&format!("p{kills}"));
            let ended = live(&guest, pod.path(), "DRANIC_TEST_KILL_AT", &format!("{point}:{n}"));
            assert_eq!(ended.signal(), Some(9), "not killed at {point}:{n}");
            println!("killed at {point}:{n}");
            go_on(&guest, pod.path());
            assert_as_before();
            kills += 1;
        }
    }
    println!("{kills} kills at {} points", counts.len());
}
