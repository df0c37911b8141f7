//! NICs in a namespace that has no path any more and that the agent does not hold open: something in it keeps it alive.

#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/engine.rs"]
mod common;
#[allow(dead_code, reason = "each test file uses some of it")]
#[path = "common/pci.rs"]
mod pci;

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use common::{World, claim, pod_ref, sandbox};
use dranic::attach::Engine;
use dranic::attach::engine::{Observed, Observer, Released};
use dranic::ledger::Phase;
use dranic::netns::Netns;
use pci::{Guest, run, soon, wait_for};

/// A process in the namespace, until its input ends.
fn process_in(netns: &Netns) -> Child {
    let mut shell = Command::new("sh");
    shell.args(["-c", "read -r end"]).stdin(Stdio::piped());
    netns.run(|| shell.spawn()).unwrap().unwrap()
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}

type Told = Arc<Mutex<Vec<Observed>>>;

fn listening(engine: Engine) -> (Engine, Told) {
    let told = Told::default();
    let sink = told.clone();
    let observer: Observer = Arc::new(move |observation| sink.lock().unwrap().push(observation.what));
    (engine.with_observer(observer), told)
}

fn held(told: &Told) -> Vec<String> {
    let told = told.lock().unwrap();
    told.iter().filter_map(|what| if let Observed::Held(text) = what { Some(text.clone()) } else { None }).collect()
}

#[test]
fn it_is_found_by_a_process_in_it_which_is_named() {
    let Some(world) = World::new(1) else { return };
    let before = world.host_states();
    let engine = world.engine();
    let one = claim("a", &world.device_names(), r#"{"interface": {"name": "pod7"}}"#);
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    let process = process_in(&pod.netns().unwrap());
    // The agent ends, and then the runtime does away with the sandbox.
    drop((engine, pod));

    let (engine, told) = listening(world.engine());
    engine.recover();
    assert_eq!(engine.pinned(), 1, "found by the process");
    assert!(!engine.may_have_returned() && engine.lost().unwrap().is_empty());
    let released = engine.release(&pod_ref("a").uid, &sandbox("a"));
    assert!(matches!(released[..], [Released::Moved(_)]), "{released:?}");
    let texts = held(&told);
    let named = format!("process {} (sh) of ", process.id());
    assert!(matches!(&texts[..], [text] if text.starts_with(&named) && text.contains("sandbox")), "{texts:?}");
    engine.unprepare(&one.claim).unwrap();
    world.assert_unchanged(&before);
    end(process);
}

#[test]
fn a_usual_end_names_nobody() {
    let Some(world) = World::new(1) else { return };
    let (engine, told) = listening(world.engine());
    let one = claim("a", &world.device_names(), "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = world.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    let process = process_in(&pod.netns().unwrap());
    // Containers may still be about to end when the sandbox is stopped.
    assert_eq!(engine.release(&pod_ref("a").uid, &sandbox("a")).len(), 1);
    assert!(held(&told).is_empty());
    end(process);
    engine.unprepare(&one.claim).unwrap();
}

#[test]
fn hardware_out_of_sight_is_not_forgotten() {
    let Some(guest) = Guest::new() else { return };
    let nic = guest.fresh(0);
    run("ip link set nic0 up");
    let (before, name) = (guest.state(&nic), guest.name(&nic));
    let engine = guest.engine();
    let one = claim("a", std::slice::from_ref(&name), "");
    engine.prepare(&one, &pod_ref("a")).unwrap();
    let pod = guest.pod("a");
    engine.attach(&pod_ref("a").uid, &sandbox("a"), pod.path(), soon()).unwrap();
    // An open file keeps it, and that is nowhere to be found.
    let open = pod.netns().unwrap();
    drop((engine, pod));

    let engine = guest.engine();
    engine.recover();
    let lost = engine.lost().unwrap();
    assert_eq!(lost.iter().map(|l| l.device.device.clone()).collect::<Vec<_>>(), [name]);
    let error = engine.unprepare(&one.claim).unwrap_err();
    assert!(error.contains("neither on the host nor in a network namespace that can be found"), "{error}");
    assert_eq!(engine.records()[0].devices[0].phase, Phase::Releasing, "it is still known");
    drop(open);
    wait_for("the kernel returns it", || guest.find(&nic));
    assert!(engine.lost().unwrap().is_empty());
    engine.unprepare(&one.claim).unwrap();
    guest.assert_same(&before, &nic);
}
