//! Start, stop, restart, update, and sockets that vanish.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dranic::dra::grpc::{DRAIN_MAX, ServeError, SocketConfig, serve};
use dranic_testbed::kubelet::{Event, KubeletDouble};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::rig::{self, DRIVER, LIMIT, Node, Script, claim, config};

async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let reached = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, reached).await.unwrap_or_else(|_| panic!("never: {what}"));
}

fn count(events: &[Event], wanted: fn(&Event) -> bool) -> usize {
    events.iter().filter(|event| wanted(event)).count()
}

fn is_registered(event: &Event) -> bool {
    matches!(event, Event::Registered { .. })
}

fn is_unregistered(event: &Event) -> bool {
    matches!(event, Event::Unregistered { .. })
}

#[tokio::test]
async fn stop_goes_in_order() {
    let (node, kubelet) = rig::registered().await;
    let (registration, endpoint) = (node.serving.registration_socket.clone(), node.serving.endpoint.clone());
    let kubelet = Arc::new(kubelet);
    let caller = kubelet.clone();
    let running = tokio::spawn(async move { caller.prepare(DRIVER, &[claim("held")]).await });
    node.handler.wait_log(1).await;

    // Another client that the registry's emptiness does not stop: the kubelet may have a call on its way.
    let mut late =
        dranic::dra::proto::v1::dra_plugin_client::DraPluginClient::new(dranic_testbed::kubelet::channel(endpoint.clone()));
    let ask = || dranic::dra::proto::v1::NodePrepareResourcesRequest { claims: vec![claim("late")] };
    let give = || dranic::dra::proto::v1::NodeUnprepareResourcesRequest { claims: vec![claim("old")] };
    node.stop.cancel();
    wait_until("the registration socket goes first", || !registration.exists()).await;
    assert!(endpoint.exists(), "the DRA socket stays while a call runs");
    tokio::time::sleep(Duration::from_millis(50)).await;
    let refused: Status = late.node_prepare_resources(ask()).await.unwrap_err();
    assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "this agent is stopping; the kubelet will retry"));
    assert_eq!(late.node_unprepare_resources(give()).await.unwrap().into_inner().claims["uid-old"].error, "");

    node.handler.release.add_permits(1);
    assert!(running.await.unwrap().unwrap()["uid-held"].is_ok(), "the running call gets its answer");
    tokio::time::timeout(LIMIT, node.serving.stopped()).await.unwrap();
    assert!(!endpoint.exists());
    assert_eq!(node.handler.log(), ["prepare ns/held (uid-held)", "unprepare ns/old (uid-old)"]);
}

#[tokio::test]
async fn a_call_that_never_ends_does_not_keep_us() {
    let (node, kubelet) = rig::registered().await;
    let caller = tokio::spawn(async move { kubelet.prepare(DRIVER, &[claim("held")]).await });
    node.handler.wait_log(1).await;
    let start = Instant::now();
    node.stop.cancel();
    tokio::time::timeout(DRAIN_MAX + Duration::from_secs(4), node.serving.stopped()).await.unwrap();
    assert!(start.elapsed() >= DRAIN_MAX, "it was given its time");
    caller.abort();
}

#[tokio::test]
async fn stale_sockets_are_replaced() {
    let root = tempfile::tempdir().unwrap();
    let paths = [root.path().join("plugins_registry/dranic.test-reg.sock"), root.path().join("plugins/dranic.test/dra.sock")];
    for path in &paths {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        drop(UnixListener::bind(path).unwrap());
        assert!(path.exists(), "the file outlives its listener");
    }
    let stop = CancellationToken::new();
    let serving = serve(config(root.path()), Arc::<Script>::default(), rig::no_health(), stop.clone()).await.unwrap();
    let kubelet = KubeletDouble::start(root.path()).unwrap();
    kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
    stop.cancel();
    serving.stopped().await;
    assert!(paths.iter().all(|path| !path.exists()));
}

async fn refused(root: &Path) -> String {
    match serve(config(root), Arc::<Script>::default(), rig::no_health(), CancellationToken::new()).await {
        Err(err @ ServeError::InTheWay { .. }) => err.to_string(),
        Err(err) => panic!("{err}"),
        Ok(_) => panic!("not refused"),
    }
}

#[tokio::test]
async fn what_is_not_ours_stays_and_is_named() {
    let root = tempfile::tempdir().unwrap();
    let registry = root.path().join("plugins_registry");
    let (path, endpoint) = (registry.join("dranic.test-reg.sock"), root.path().join("plugins/dranic.test/dra.sock"));
    std::fs::create_dir_all(&registry).unwrap();

    std::fs::write(&path, "not a socket").unwrap();
    let text = refused(root.path()).await;
    assert!(text.contains(path.to_str().unwrap()) && text.contains("not a socket"), "{text}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a socket");
    assert!(!endpoint.exists(), "nothing is left behind");

    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    assert!(refused(root.path()).await.contains("not a socket"));

    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let text = refused(root.path()).await;
    assert!(text.contains(&format!("process {}", std::process::id())), "{text}");
    assert!(path.exists());

    drop(listener);
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: the check of the owner needs root");
        return;
    }
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    assert!(refused(root.path()).await.contains("uid 65534"));
    assert!(path.exists());
}

#[tokio::test]
async fn folders_and_sockets_are_closed_to_others() {
    let node = Node::start().await;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for socket in [&node.serving.registration_socket, &node.serving.endpoint] {
        assert_eq!(mode(socket), 0o600);
        assert_eq!(mode(socket.parent().unwrap()) & 0o027, 0, "{}", socket.display());
    }
}

#[tokio::test]
async fn long_names_still_register() {
    let root = tempfile::tempdir().unwrap();
    let (driver, uid) = (format!("{}.dev", "d".repeat(59)), "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0");
    let long = SocketConfig { kubelet_root: root.path().to_owned(), driver: driver.clone(), instance: Some(uid.into()) };
    let stop = CancellationToken::new();
    let serving = serve(long, Arc::<Script>::default(), rig::no_health(), stop.clone()).await.unwrap();
    let name = serving.registration_socket.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("dra-") && name.ends_with("-reg.sock"), "{name}");
    let kubelet = KubeletDouble::start(root.path()).unwrap();
    kubelet.wait_driver(&driver, LIMIT).await.unwrap();
    assert!(kubelet.prepare(&driver, &[claim("a")]).await.unwrap()["uid-a"].is_ok());
    stop.cancel();
    serving.stopped().await;
}

#[tokio::test]
async fn a_socket_that_vanishes_comes_back_and_registers_again() {
    let (node, kubelet) = rig::registered().await;
    let registry = node.root().join("plugins_registry");
    for round in 1..=2 {
        match round {
            1 => std::fs::remove_file(&node.serving.registration_socket).unwrap(),
            _ => std::fs::remove_dir_all(&registry).unwrap(),
        }
        let again = |events: &[Event]| {
            (count(events, is_unregistered) == round && count(events, is_registered) == round + 1).then_some(())
        };
        kubelet.wait(LIMIT, again).await.unwrap();
        node.wait_registered().await;
    }
    std::fs::remove_file(&node.serving.endpoint).unwrap();
    wait_until("the DRA socket is back", || node.serving.endpoint.exists()).await;
    drop(kubelet);
    let fresh = KubeletDouble::start(node.root()).unwrap();
    fresh.wait_driver(DRIVER, LIMIT).await.unwrap();
    assert!(fresh.prepare(DRIVER, &[claim("a")]).await.unwrap()["uid-a"].is_ok(), "a new connection gets through");
    node.stop.cancel();
    let (registration, endpoint) = (node.serving.registration_socket.clone(), node.serving.endpoint.clone());
    node.serving.stopped().await;
    assert!(!registration.exists() && !endpoint.exists(), "the new files are removed too");
}

#[tokio::test]
async fn a_foreign_socket_in_our_place_is_left_alone() {
    let (node, kubelet) = rig::registered().await;
    let path = node.serving.registration_socket.clone();
    std::fs::remove_file(&path).unwrap();
    let foreign = UnixListener::bind(&path).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(kubelet.prepare(DRIVER, &[claim("a")]).await.is_err(), "the kubelet has un-registered us");
    node.stop.cancel();
    node.serving.stopped().await;
    assert!(path.exists(), "it is not ours to remove");
    drop(foreign);
}

#[tokio::test]
async fn a_restarted_kubelet_registers_us_again_and_we_notice() {
    let (node, kubelet) = rig::registered().await;
    node.wait_registered().await;
    let mut registered = node.serving.registered.clone();
    registered.mark_unchanged();
    drop(kubelet);
    let kubelet = KubeletDouble::start(node.root()).unwrap();
    tokio::time::timeout(LIMIT, registered.changed()).await.expect("the publisher must re-create its slices").unwrap();
    kubelet.wait_driver(DRIVER, LIMIT).await.unwrap();
    assert!(kubelet.prepare(DRIVER, &[claim("a")]).await.unwrap()["uid-a"].is_ok());
}

#[tokio::test]
async fn two_instances_hand_over() {
    let root = tempfile::tempdir().unwrap();
    let kubelet = KubeletDouble::start(root.path()).unwrap();
    let mut instances = Vec::new();
    for (i, uid) in ["uid-old", "uid-new"].into_iter().enumerate() {
        let config = SocketConfig { instance: Some(uid.into()), ..config(root.path()) };
        let (handler, stop) = (Arc::<Script>::default(), CancellationToken::new());
        let serving = serve(config, handler.clone(), rig::no_health(), stop.clone()).await.unwrap();
        kubelet.wait(LIMIT, |events| (count(events, is_registered) == i + 1).then_some(())).await.unwrap();
        instances.push((serving, handler, stop));
    }
    kubelet.prepare(DRIVER, &[claim("a")]).await.unwrap();
    let (new, new_handler, stop) = instances.pop().unwrap();
    assert_eq!(new_handler.log(), ["prepare ns/a (uid-a)"]);
    stop.cancel();
    new.stopped().await;
    kubelet.wait(LIMIT, |events| (count(events, is_unregistered) == 1).then_some(())).await.unwrap();
    kubelet.unprepare(DRIVER, &[claim("a")]).await.unwrap();
    let (old, old_handler, stop) = instances.pop().unwrap();
    assert_eq!(old_handler.log(), ["unprepare ns/a (uid-a)"]);
    stop.cancel();
    old.stopped().await;
}
