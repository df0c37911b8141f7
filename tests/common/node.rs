//! A scratch node with the real agent on it, and what tests ask of it.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use dranic::agent::status::{DeviceStatus, Status};
use dranic::ledger::Phase;
use dranic::netdev::{HostState, Route, link, route};
use dranic_testbed::cluster::{Cluster, Options, Pod};
use dranic_testbed::fabric::{self, NicSpec, NodeCommand, links};
use dranic_testbed::kubelet::Claim;

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_dranic");
/// The agent's name at the runtime.
pub(crate) const PLUGIN: &str = "10-dranic.dev";
/// Its driver name.
pub(crate) const DRIVER: &str = "dranic.dev";
/// Longer than anything here takes on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// NIC `n` is called `nic<n>`: MTU 9000, up, 10.0.n.1/24 and fd00:n::1/64. Each has a rail of its own, or, if there are many, they
/// share some.
pub(crate) fn nics(count: u32) -> Vec<NicSpec> {
    let nic = |n: u32| NicSpec {
        name: format!("nic{n}"),
        rail: n % 8,
        mtu: Some(9000),
        up: true,
        addresses: vec![format!("10.0.{n}.1/24").parse().unwrap(), format!("fd00:{n:x}::1/64").parse().unwrap()],
        ..NicSpec::default()
    };
    (0..count).map(nic).collect()
}

/// A cluster to be with `count` NICs. None (and a line that says so) without root.
pub(crate) fn options(count: u32) -> Option<Options> {
    if !fabric::root() {
        println!("skipped: needs root for network namespaces");
        return None;
    }
    Some(Options::new(PROGRAM, nics(count)))
}

/// A cluster with `count` NICs and an agent that is ready, and the host as it was before.
pub(crate) async fn start(count: u32) -> Option<(Cluster, Before)> {
    Some(start_with(options(count)?).await)
}

pub(crate) async fn start_with(options: Options) -> (Cluster, Before) {
    let mut cluster = Cluster::new(options).unwrap();
    let before = cluster.host_states().unwrap();
    cluster.start_agent().unwrap();
    cluster.wait_ready(LIMIT).await.unwrap();
    (cluster, before)
}

/// The host before anything happened.
pub(crate) type Before = BTreeMap<String, HostState>;

/// `nic<from>` to `nic<to - 1>`.
pub(crate) fn names(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|n| format!("nic{n}")).collect()
}

/// Nothing differs on the host, and nothing of any claim is left: no record, no CDI spec.
pub(crate) fn assert_as_before(cluster: &Cluster, before: &Before) {
    let differences = Cluster::differences(before, &cluster.host_states().unwrap());
    assert!(differences.is_empty(), "{differences:#?}\n{}", cluster.log());
    if let Ok(status) = cluster.status() {
        assert_eq!(status.claims, vec![], "{}", cluster.log());
    }
    let records: Vec<String> = files(&cluster.path("state")).into_iter().filter(|f| f != "lock" && f != "successor").collect();
    assert_eq!(records, Vec::<String>::new(), "files of the ledger are left");
    assert_eq!(files(&cluster.path("cdi")), Vec::<String>::new(), "CDI specs are left");
}

/// As [`assert_as_before`], and no device stays reserved: a claim for all NICs can be prepared, and is given back.
pub(crate) async fn assert_nothing_done(cluster: &Cluster, before: &Before) {
    assert_as_before(cluster, before);
    let pod = cluster.pod("fresh").unwrap();
    let all: Vec<String> = before.keys().cloned().collect();
    let claim = cluster.claim("fresh", &pod, &all, &[]).unwrap();
    cluster.prepare(std::slice::from_ref(&claim)).await.unwrap();
    cluster.unprepare(&[claim]).await.unwrap();
    assert_as_before(cluster, before);
}

/// Names in a folder; none when there is no folder.
pub(crate) fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Every socket that the agent makes.
pub(crate) fn sockets(cluster: &Cluster) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = vec![cluster.path("status.sock"), cluster.path("gate.sock")];
    for folder in ["kubelet/plugins/dranic.dev", "kubelet/plugins_registry"] {
        let folder = cluster.path(folder);
        found.extend(files(&folder).into_iter().map(|name| folder.join(name)));
    }
    found.retain(|path| path.exists());
    found
}

/// Stop, unprepare, remove, as the kubelet ends a pod.
pub(crate) async fn end(cluster: &Cluster, pod: &Pod, claims: &[Claim]) {
    cluster.runtime.stop_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
    cluster.unprepare(claims).await.unwrap();
    cluster.runtime.remove_pod_sandbox(&pod.sandbox.id).await.result().unwrap();
}

/// The sandbox and a container in it, as the runtime makes them.
pub(crate) async fn run(cluster: &Cluster, pod: &Pod) {
    let relay = cluster.runtime.run_pod_sandbox(&pod.sandbox).await;
    assert_eq!(relay.error, None, "{}", cluster.log());
    cluster.start_container(pod, "main", &[]).await.unwrap_or_else(|e| panic!("{e}\n{}", cluster.log()));
}

/// The links `wanted` are in the pod and up, with the addresses that NICs of [`nics`] have.
pub(crate) fn assert_inside(pod: &Pod, wanted: &[String]) {
    let seen = pod.look().unwrap();
    for name in wanted {
        let link = seen.links.iter().find(|l| l.name == *name).unwrap_or_else(|| panic!("{name} is not in {}", pod.name));
        assert!(link.is_up() && link.mtu == 9000, "{link:?}");
        let n = name.trim_start_matches("nic");
        let has = seen.addresses.iter().any(|(index, a)| *index == link.index && a.ip.to_string() == format!("10.0.{n}.1"));
        assert!(has, "{name} has no 10.0.{n}.1: {:?}", seen.addresses);
    }
}

/// No link but `lo` is in the pod.
pub(crate) fn assert_empty(pod: &Pod) {
    let links: Vec<String> = pod.look().unwrap().links.into_iter().filter(|l| !l.is_loopback()).map(|l| l.name).collect();
    assert_eq!(links, Vec::<String>::new(), "links in {}", pod.name);
}

/// All devices that the agent knows of.
pub(crate) fn devices(status: &Status) -> Vec<&DeviceStatus> {
    status.claims.iter().flat_map(|c| &c.devices).collect()
}

pub(crate) fn assert_phase(cluster: &Cluster, count: usize, phase: Phase) {
    let status = cluster.status().unwrap();
    let devices = devices(&status);
    assert_eq!(devices.len(), count, "{status:#?}");
    assert!(devices.iter().all(|d| d.phase == phase), "not all are {phase:?}: {devices:#?}");
}

/// The error of preparing one claim.
pub(crate) async fn refusal(cluster: &Cluster, claim: &Claim) -> String {
    let answer = cluster.kubelet.prepare(DRIVER, std::slice::from_ref(claim)).await.unwrap().remove(&claim.uid).unwrap();
    answer.expect_err("it was prepared")
}

/// `text` has each of `words`.
#[track_caller]
pub(crate) fn assert_says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

/// Tries until `done` holds.
#[track_caller]
pub(crate) fn until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> impl Future<Output = Duration> {
    let begin = Instant::now();
    let (what, place) = (what.to_owned(), std::panic::Location::caller());
    async move {
        while !done() {
            assert!(begin.elapsed() < limit, "{place}: not within {limit:?}: {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        begin.elapsed()
    }
}

/// The attributes of every published device, by name.
pub(crate) fn published(cluster: &Cluster) -> BTreeMap<String, serde_json::Value> {
    let slices = cluster.api.slices();
    let devices = slices.iter().filter_map(|s| s["spec"]["devices"].as_array()).flatten();
    devices.map(|d| (d["name"].as_str().unwrap().to_owned(), d["attributes"].clone())).collect()
}

/// Runs `dranic` with `arguments` on the node, with nothing in the environment that it reads.
pub(crate) fn dranic(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    NodeCommand::spawn(&cluster.node, &mut command).unwrap().wait_with_output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Status and body of a GET from the agent's HTTP server; an error when nobody listens.
pub(crate) fn get(cluster: &Cluster, path: &str) -> std::io::Result<(u16, String)> {
    let address = SocketAddr::from(([127, 0, 0, 1], 9177));
    let mut stream = cluster.node.netns().run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).unwrap()?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_default();
    Ok((status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default()))
}

/// Adds a default route by the link `name` of the node.
pub(crate) fn add_default_route(cluster: &Cluster, name: &str, gateway: &str) {
    let mut socket = cluster.node.socket().unwrap();
    let index = links::find(&mut socket, name).unwrap().index;
    let mut new = Route::to("0.0.0.0/0".parse().unwrap());
    new.gateway = Some(gateway.parse().unwrap());
    socket.request(route::add_request(index, &new, false), links::soon()).unwrap();
}

/// Pulls the NIC out of the node.
pub(crate) fn unplug(cluster: &Cluster, name: &str) {
    let mut socket = cluster.node.socket().unwrap();
    let index = link::by_name(&mut socket, name, links::soon()).unwrap().unwrap().index;
    links::delete(&mut socket, index).unwrap();
}
