//! A machine that is not as it should be: read-only or broken folders, no API server, no runtime.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use dranic::ledger::Phase;
use dranic_testbed::apiserver::ApiServerDouble;
use dranic_testbed::cluster::{Cluster, NODE};
use dranic_testbed::fabric::NodeCommand;
use dranic_testbed::runtime::RuntimeOptions;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::node::{self, DRIVER, LIMIT, PROGRAM, assert_says, names, refusal, until};

/// Runs `work` in the mount namespace of the agent.
fn as_agent<T: Send>(cluster: &Cluster, work: impl FnOnce() -> T + Send) -> T {
    let pid = cluster.agent.as_ref().unwrap().pid();
    let mounts = std::fs::File::open(format!("/proc/{pid}/ns/mnt")).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS).unwrap();
            setns(mounts.as_fd(), CloneFlags::CLONE_NEWNS).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

fn set_read_only(cluster: &Cluster, folder: &Path, on: bool) {
    let none = None::<&str>;
    as_agent(cluster, || {
        if on {
            mount(Some(folder), folder, none, MsFlags::MS_BIND, none).unwrap();
            mount(none, folder, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none).unwrap();
        } else {
            umount2(folder, MntFlags::MNT_DETACH).unwrap();
        }
    });
}

/// Runs an agent on the node that must not start; gives its exit code and what it said. `prepare` runs in its mount namespace.
fn failed_start(cluster: &Cluster, change: &[(&str, String)], prepare: impl FnOnce() + Send) -> (Option<i32>, String) {
    let at = |name: &str| cluster.path(name).display().to_string();
    let mut flags = vec![
        ("--node-name", NODE.to_owned()),
        ("--kubeconfig", at("kubeconfig")),
        ("--kubelet-root", at("kubelet")),
        ("--nri-socket", at("nri.sock")),
        ("--state-dir", at("state")),
        ("--cdi-dir", at("cdi")),
        ("--status-socket", at("status.sock")),
        ("--http-address", "127.0.0.1:9177".to_owned()),
    ];
    flags.retain(|(flag, _)| !change.iter().any(|(other, _)| other == flag));
    let mut command = Command::new(PROGRAM);
    command.arg("agent").env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.args(flags.iter().chain(change).map(|(flag, value)| format!("{flag}={value}")));
    let child = NodeCommand::run(&cluster.node, || {
        prepare();
        command.spawn()
    });
    let output = child.unwrap().unwrap().wait_with_output().unwrap();
    (output.status.code(), node::stderr(&output))
}

#[tokio::test(flavor = "multi_thread")]
async fn folders_and_addresses_that_can_not_be_used_at_start() {
    let Some(options) = node::options(1) else { return };
    let cluster = Cluster::new(options).unwrap();
    let file = cluster.path("kubeconfig").display().to_string();
    let read_only = cluster.path("read-only");
    std::fs::create_dir(&read_only).unwrap();
    let listener = cluster.node.netns().run(|| TcpListener::bind("127.0.0.1:9178")).unwrap().unwrap();
    let in_read_only = |name: &str| read_only.join(name).display().to_string();
    let cases: [(&str, String, Vec<&str>); 9] = [
        ("--state-dir", read_only.display().to_string(), vec!["state directory", "Read-only file system", "--state-dir"]),
        ("--state-dir", in_read_only("new"), vec!["state directory", "Read-only file system", "--state-dir"]),
        ("--state-dir", file.clone(), vec!["state directory", &file, "--state-dir"]),
        ("--status-socket", in_read_only("x.sock"), vec!["--status-socket", "Read-only file system"]),
        ("--status-socket", file.clone(), vec!["--status-socket", &file, "not a socket"]),
        ("--http-address", "127.0.0.1:9178".to_owned(), vec!["--http-address 127.0.0.1:9178", "in use"]),
        ("--http-address", "192.0.2.1:80".to_owned(), vec!["--http-address 192.0.2.1:80"]),
        ("--kubelet-root", read_only.display().to_string(), vec!["kubelet", "Read-only file system"]),
        ("--kubelet-root", file.clone(), vec!["kubelet", &file]),
    ];
    for (flag, value, words) in cases {
        let (code, text) = failed_start(&cluster, &[(flag, value.clone())], || {
            mount(Some("none"), &read_only, Some("tmpfs"), MsFlags::MS_RDONLY, None::<&str>).unwrap();
        });
        assert!(matches!(code, Some(1 | 64)), "{flag} {value}: {code:?} {text}");
        assert_says(&text, &words);
        assert!(text.matches("os error").count() <= 1, "said twice: {text}");
        assert_eq!(node::sockets(&cluster), Vec::<std::path::PathBuf>::new(), "{flag} {value} left sockets behind");
        assert!(!text.contains("panicked"), "{text}");
    }
    drop(listener);
    assert!(cluster.path("kubeconfig").is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_directory_that_becomes_read_only() {
    let Some((cluster, before)) = node::start(3).await else { return };
    let state = cluster.path("state");
    let (pod, other) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    let second = cluster.claim("second", &other, &names(2..3), &[]).unwrap();
    cluster.prepare(&claims).await.unwrap();

    set_read_only(&cluster, &state, true);
    let words = [state.to_str().unwrap(), "Read-only file system"];
    let error = refusal(&cluster, &second).await;
    assert_says(&error, &["claim default/second", "writing the ledger", "nothing was changed", words[0], words[1]]);
    assert!(cluster.host_states().unwrap()["nic2"].flags & 1 != 0, "nic2 is up");
    let error = cluster.runtime.run_pod_sandbox(&pod.sandbox).await.error.expect("nothing may move that is not written down");
    assert_says(&error, &["pod default/a", "writing the ledger", words[0], words[1]]);
    node::assert_empty(&pod);
    let error = cluster.unprepare(&claims).await.unwrap_err().to_string();
    assert_says(&error, &["claim default/c", words[0], words[1]]);
    set_read_only(&cluster, &state, false);

    // Everything goes on; the claim is as the kubelet left it: asked to be unprepared.
    cluster.unprepare(&claims).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
    cluster.prepare(&claims).await.unwrap();
    let again = cluster.sandbox("a", &pod.uid, 1).unwrap();
    node::run(&cluster, &again).await;

    // A pod can go while nothing can be written.
    set_read_only(&cluster, &state, true);
    cluster.runtime.stop_pod_sandbox(&again.sandbox.id).await.result().unwrap();
    until(LIMIT, "the NICs are on the host", || again.look().unwrap().links.len() == 1).await;
    set_read_only(&cluster, &state, false);
    node::end(&cluster, &again, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_directory_that_becomes_read_only_during_an_attach() {
    let Some(mut options) = node::options(16) else { return };
    // It is not about time, on however busy a machine.
    options.runtime = |socket| RuntimeOptions { request_timeout: LIMIT, ..RuntimeOptions::new(socket) };
    let (cluster, before) = node::start_with(options).await;
    let (state, pod) = (cluster.path("state"), cluster.pod("a").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..16), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    // By a container of a missed sandbox: no Stop follows its failure, so what comes back came back by the roll-back.
    cluster.runtime.add_pod(pod.sandbox.clone(), Vec::new());
    let mut starting = cluster.begin_container(&pod, "main", &[]).await.unwrap();
    until(LIMIT, "the attach has begun", || pod.look().unwrap().links.len() > 2).await;
    set_read_only(&cluster, &state, true);
    until(LIMIT, "it can't be written down", || cluster.log().contains("writing the ledger")).await;
    node::assert_empty(&pod);
    let tried = tokio::time::timeout(Duration::from_millis(500), starting.started()).await;
    assert!(tried.is_err(), "the container waits: {tried:?}");
    assert_says(&cluster.log(), &["Read-only file system"]);
    // What failed is tried again, until the guard's time is over.
    set_read_only(&cluster, &state, false);
    starting.started().await.unwrap();
    node::assert_inside(&pod, &names(0..16));
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_is_not_there() {
    let Some((mut cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    let address = cluster.api.address();
    let listen =
        |cluster: &Cluster, port: u16| cluster.node.netns().run(|| TcpListener::bind(("127.0.0.1", port))).unwrap().unwrap();
    let elsewhere = listen(&cluster, 0);
    cluster.api = ApiServerDouble::start(elsewhere).unwrap();
    let begin = std::time::Instant::now();
    let error = refusal(&cluster, &claims[0]).await;
    assert_says(&error, &["claim default/c", "API server can't be reached", "tried again", "--kubeconfig"]);
    assert!(begin.elapsed() < Duration::from_secs(40), "the kubelet waits for 45 s");
    // Slices: once there is something to write. The kubelet's and the runtime's sides go on.
    let (_, metrics) = node::get(&cluster, "/healthz").unwrap();
    assert_eq!(metrics, "ok\n");
    node::assert_as_before(&cluster, &before);

    // It comes back, and knows nothing of us.
    let listener = listen(&cluster, address.port());
    cluster.api = ApiServerDouble::start(listener).unwrap();
    cluster.api.add_node(NODE);
    cluster.api.wait_slices(Duration::from_secs(60), |slices| !slices.is_empty()).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_that_forbids_or_is_busy() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claim = cluster.claim("c", &pod, &names(0..1), &[]).unwrap();
    cluster.api.faults().forbid("GET /resourceclaims");
    let error = refusal(&cluster, &claim).await;
    assert_says(&error, &["claim default/c", "forbidden", "ClusterRole", "resourceclaims"]);
    cluster.api.faults().allow("GET /resourceclaims");
    node::assert_as_before(&cluster, &before);
    // A short trouble is not the user's.
    cluster.api.faults().next_of("GET", 2, 503, None);
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    cluster.unprepare(&[claim]).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_nri_socket() {
    let Some((mut cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.runtime.stop(true).await;
    until(LIMIT, "the agent has noticed", || !cluster.status().unwrap().nri_connected).await;
    let socket = cluster.path("nri.sock").display().to_string();
    let error = refusal(&cluster, &claims[0]).await;
    assert_says(&error, &["claim default/c", "NRI is not connected", &socket, "is NRI on", "kubelet will try again"]);
    let (code, text) = node::get(&cluster, "/readyz").unwrap();
    assert_eq!(code, 503);
    assert_says(&text, &["NRI is not connected"]);
    node::assert_as_before(&cluster, &before);
    cluster.runtime.up().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    node::assert_nothing_done(&cluster, &before).await;
    // Something else in its place.
    cluster.runtime.stop(true).await;
    std::fs::write(&socket, "no socket").unwrap();
    until(LIMIT, "the agent has noticed", || !cluster.status().unwrap().nri_connected).await;
    assert_says(&refusal(&cluster, &claims[0]).await, &["NRI is not connected", &socket]);
    std::fs::remove_file(&socket).unwrap();
    cluster.runtime.up().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_is_set_aside_and_named() {
    let Some((mut cluster, _)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    cluster.kill_agent().unwrap();
    let record = cluster.path("state").join(format!("{}.json", claims[0].uid));
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, &text[..text.len() / 2]).unwrap();
    std::fs::write(cluster.path("state/other.json"), vec![b'{'; 20 << 20]).unwrap();
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    assert!(cluster.path("state").join(format!("{}.json.bad", claims[0].uid)).exists());
    assert_says(&cluster.log(), &["a record can't be read and does not count", &claims[0].uid, "other.json"]);
    assert_eq!(cluster.status().unwrap().claims, vec![]);
    // The kubelet asks again, since it knows the claim as prepared only in its own checkpoint; the device is free.
    cluster.prepare(&claims).await.unwrap();
    node::assert_phase(&cluster, 1, Phase::Prepared);
    node::run(&cluster, &pod).await;
    node::end(&cluster, &pod, &claims).await;
    assert!(cluster.kubelet.unprepare(DRIVER, &claims).await.unwrap()[&claims[0].uid].is_ok());
}
