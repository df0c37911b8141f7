//! What the agent's socket takes, and from whom.

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use dranic::gate::pass;
use dranic::gate::protocol::{Answer, LINE_MAX, Request, VERSION, line};
use dranic::names::{ClaimUid, PodUid, SandboxId};
use dranic_testbed::cluster::{Cluster, Pod};
use dranic_testbed::kubelet::Claim;

use super::node::{self, LIMIT, names};

fn request(pod: &Pod, claims: &[Claim]) -> Request {
    Request {
        version: VERSION,
        pod: PodUid::new(pod.uid.as_str()).unwrap(),
        sandbox: SandboxId::new(pod.sandbox.id.as_str()).unwrap(),
        claims: claims.iter().map(|claim| ClaimUid::new(claim.uid.as_str()).unwrap()).collect(),
        container: Some("main".to_owned()),
        netns_path: pod.netns.path().to_owned(),
    }
}

fn connect(cluster: &Cluster) -> UnixStream {
    let stream = UnixStream::connect(cluster.path("gate.sock")).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// The answer, as far as it is one; none when the agent hangs up without one.
fn answer(stream: &UnixStream) -> Option<Answer> {
    loop {
        match next(stream) {
            Some(Answer::Working { why }) if why == "the agent is attaching them" => {}
            other => return other,
        }
    }
}

fn next(mut stream: &UnixStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while bytes.last() != Some(&b'\n') {
        match stream.read(&mut byte) {
            Ok(0) => return None,
            Ok(_) => bytes.push(byte[0]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(error) => panic!("no answer: {error}"),
        }
    }
    Some(serde_json::from_slice(&bytes).unwrap())
}

fn ask(cluster: &Cluster, request: &Request, fd: impl AsFd) -> Option<Answer> {
    let stream = connect(cluster);
    pass::send(&stream, &line(request), fd.as_fd()).unwrap();
    answer(&stream)
}

#[track_caller]
fn assert_refused(answer: Option<Answer>, words: &[&str]) {
    match answer {
        Some(Answer::Refused { why, is_final: true }) => node::assert_says(&why, words),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_refused_by_name_and_nothing_happens() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let (pod, other) = (cluster.pod("a").unwrap(), cluster.pod("b").unwrap());
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    let others = [cluster.claim("d", &other, &names(1..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    cluster.prepare(&others).await.unwrap();
    let (good, netns) = (request(&pod, &claims), pod.netns.netns().unwrap());

    assert_refused(ask(&cluster, &good, File::open("/dev/null").unwrap()), &["not a network namespace"]);
    assert_refused(ask(&cluster, &good, File::open("/proc/self/ns/uts").unwrap()), &["not a network namespace"]);
    assert_refused(ask(&cluster, &good, cluster.node.netns()), &["host's network"]);
    assert_refused(ask(&cluster, &request(&pod, &others), &netns), &["claim default/d", "in pod default/b"]);
    let stranger = Request { pod: PodUid::new("nobody").unwrap(), ..good.clone() };
    assert_refused(ask(&cluster, &stranger, &netns), &["nothing is prepared", "nobody"]);
    let unknown = Request { claims: vec![ClaimUid::new("gone").unwrap()], ..good.clone() };
    assert_refused(ask(&cluster, &unknown, &netns), &["UID gone", "not prepared"]);
    assert_refused(ask(&cluster, &Request { version: 9, ..good.clone() }, &netns), &["version 9"]);
    let relative = Request { netns_path: "x".into(), ..good.clone() };
    assert_refused(ask(&cluster, &relative, &netns), &["absolute path"]);

    let without = connect(&cluster);
    (&without).write_all(&line(&good)).unwrap();
    assert_refused(answer(&without), &["0 descriptors"]);
    let two = connect(&cluster);
    pass::send(&two, b"{", netns.as_fd()).unwrap();
    pass::send(&two, b"}\n", netns.as_fd()).unwrap();
    assert_refused(answer(&two), &[]);
    let nonsense = connect(&cluster);
    pass::send(&nonsense, b"hello\n", netns.as_fd()).unwrap();
    assert_refused(answer(&nonsense), &["can't be read"]);
    let long = connect(&cluster);
    pass::send(&long, &vec![b' '; LINE_MAX], netns.as_fd()).unwrap();
    (&long).write_all(b"  ").unwrap();
    assert_refused(answer(&long), &["bytes"]);
    // Who says nothing is told nothing.
    drop(connect(&cluster));
    let silent = connect(&cluster);
    let begin = Instant::now();
    assert_eq!(answer(&silent), None);
    assert!(begin.elapsed() > Duration::from_secs(3), "{:?}", begin.elapsed());

    node::assert_phase(&cluster, 2, dranic::ledger::Phase::Prepared);
    assert_eq!(ask(&cluster, &good, &netns), Some(Answer::Attached));
    node::assert_inside(&pod, &names(0..1));
    cluster.unprepare(&claims).await.unwrap();
    cluster.unprepare(&others).await.unwrap();
    node::assert_as_before(&cluster, &before);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_root_is_heard() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let socket = cluster.path("gate.sock");
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    // As if somebody had opened it for all.
    std::fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
    for folder in socket.ancestors().skip(1).filter(|folder| folder.starts_with(std::env::temp_dir())) {
        if folder != std::env::temp_dir() {
            std::fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        }
    }
    // Where the tests are built others may not look.
    let program = cluster.path("stranger");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(program)
        .args(["--exact", "asking::a_stranger_in_another_process", "--nocapture"])
        .env("DRANIC_TEST_GATE", &socket)
        .uid(65534)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("the agent hung up"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    node::assert_as_before(&cluster, &before);
}

/// Runs as nobody, started by the test above; else there is nothing to do.
#[test]
fn a_stranger_in_another_process() {
    let Some(socket) = std::env::var_os("DRANIC_TEST_GATE") else { return };
    let mut stream = UnixStream::connect(Path::new(&socket)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // It may hang up before it has read this.
    let _ = stream.write_all(b"{}\n");
    assert_eq!(answer(&stream), None);
    println!("the agent hung up");
}
