//! Callers that are too much, malformed, or not root.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::time::Duration;

use dranic::dra::proto::registration::RegistrationStatus;
use dranic::dra::proto::v1::NodePrepareResourcesResponse;
use dranic_testbed::kubelet::{KubeletDouble, channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Request, Status};

use crate::rig::{self, DRIVER, LIMIT, Node, claim};

const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
/// Set for the child process that is another user.
const CONNECT_TO: &str = "DRANIC_TEST_CONNECT_TO";

async fn still_works(kubelet: &KubeletDouble) {
    assert!(kubelet.prepare(DRIVER, &[claim("fine")]).await.unwrap()["uid-fine"].is_ok());
}

fn status(result: Result<impl Sized, anyhow::Error>) -> Status {
    let Err(err) = result else { panic!("not refused") };
    err.downcast_ref::<Status>().unwrap_or_else(|| panic!("{err:#}")).clone()
}

#[tokio::test]
async fn more_claims_than_allowed_are_refused_by_name() {
    let (node, kubelet) = rig::registered().await;
    let claims = |count: usize| (0..count).map(|i| claim(&format!("c{i}"))).collect::<Vec<_>>();
    let prepared = kubelet.prepare(DRIVER, &claims(70)).await.unwrap();
    let refused: Vec<_> = prepared.values().filter_map(|result| result.as_ref().err()).collect();
    assert_eq!((prepared.len(), refused.len()), (70, 6));
    assert!(refused.iter().all(|text| text.contains("claim ns/c6") && text.contains("70 claims")), "{refused:?}");
    assert_eq!(node.handler.log().len(), 64);
    assert_eq!(status(kubelet.prepare(DRIVER, &claims(2000)).await).code(), Code::InvalidArgument);
    still_works(&kubelet).await;
}

#[tokio::test]
async fn a_message_over_4_mib_is_refused() {
    let (node, kubelet) = rig::registered().await;
    let mut huge = claim("huge");
    huge.namespace = "n".repeat(5 << 20);
    assert_eq!(status(kubelet.prepare(DRIVER, &[huge]).await).code(), Code::OutOfRange);
    assert!(node.handler.log().is_empty());
    still_works(&kubelet).await;
}

/// Calls `path` on the DRA socket with a message of another type: field 1 is a number instead of a claim.
async fn call_wrongly(node: &Node, path: &'static str) -> Status {
    let mut client = tonic::client::Grpc::new(channel(node.serving.endpoint.clone()));
    client.ready().await.unwrap();
    let message = Request::new(RegistrationStatus { plugin_registered: true, error: String::new() });
    let codec = tonic_prost::ProstCodec::<_, NodePrepareResourcesResponse>::default();
    client.unary(message, PathAndQuery::from_static(path), codec).await.unwrap_err()
}

#[tokio::test]
async fn a_malformed_message_and_an_unknown_service_get_a_status() {
    let (node, kubelet) = rig::registered().await;
    let refused = call_wrongly(&node, PREPARE).await;
    assert!(refused.message().contains("decode"), "{refused:?}");
    // Kubernetes 1.36 asks every plugin for its health, listed or not; later ones may ask for more.
    assert_eq!(call_wrongly(&node, "/v2.DRAResourceHealth/NodeWatchResources").await.code(), Code::Unimplemented);
    still_works(&kubelet).await;
}

#[tokio::test]
async fn malformed_bytes_close_that_connection_only() {
    let (node, kubelet) = rig::registered().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0].as_slice();
    let unfinished_size_update = [0, 0, 1, 1, 4, 0, 0, 0, 1, 0x3f].as_slice();
    let huge_frame = [0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1].as_slice();
    let attacks = [
        b"GET / HTTP/1.1\r\n\r\n".repeat(100),
        [preface, settings, unfinished_size_update].concat(),
        [preface, settings, huge_frame].concat(),
        [preface, settings, &[0, 0, 1, 9, 4, 0, 0, 0, 1, 0x82]].concat(),
        vec![0xff; 100_000],
    ];
    for socket in [&node.serving.registration_socket, &node.serving.endpoint] {
        for bytes in &attacks {
            let mut stream = UnixStream::connect(socket).await.unwrap();
            // The other side may close before all is written.
            let _ = stream.write_all(bytes).await;
            let closed = tokio::time::timeout(LIMIT, stream.read_to_end(&mut Vec::new())).await;
            assert!(closed.is_ok(), "{} keeps a malformed connection", socket.display());
        }
    }
    still_works(&kubelet).await;
    drop(kubelet);
    let again = KubeletDouble::start(node.root()).unwrap();
    again.wait_driver(DRIVER, LIMIT).await.unwrap();
}

#[tokio::test]
async fn only_root_may_call() {
    if let Some(path) = std::env::var_os(CONNECT_TO) {
        return connect_as_a_stranger(path.as_ref());
    }
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root to become another user");
        return;
    }
    let (node, kubelet) = rig::registered().await;
    for socket in [node.serving.registration_socket.clone(), node.serving.endpoint.clone()] {
        assert_eq!(mode(&socket), 0o600);
        // Open the way, so that only the check of the peer is left.
        for dir in socket.ancestors().skip(1).take_while(|dir| dir.starts_with(node.root())) {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
        let mut child = std::process::Command::new("/proc/self/exe");
        child.args(["--exact", "hostile::only_root_may_call", "--nocapture"]).env(CONNECT_TO, &socket).uid(65534).gid(65534);
        let output = tokio::task::spawn_blocking(move || child.output()).await.unwrap().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("closed without a byte"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    still_works(&kubelet).await;
}

fn mode(path: &std::path::Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The child: a server that listened to us would answer the preface with its settings.
fn connect_as_a_stranger(path: &std::path::Path) {
    let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(err) if err.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(err) => panic!("not closed: {err}"),
    }
    assert!(answer.is_empty(), "{answer:?}");
    println!("closed without a byte");
}
