//! The kubelet's sockets against the double of the kubelet, which sends what the real one sends.

#[path = "kubelet/hostile.rs"]
mod hostile;
#[path = "kubelet/lifecycle.rs"]
mod lifecycle;
#[path = "kubelet/rig.rs"]
mod rig;

use std::time::{Duration, Instant};

use dranic::dra::grpc::Registration;
use dranic::dra::proto::registration::registration_client::RegistrationClient;
use dranic::dra::proto::registration::registration_server::{self, RegistrationServer};
use dranic::dra::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use dranic_testbed::kubelet::{Event, KubeletDouble, channel, h2};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use rig::{DRIVER, LIMIT, Node, claim};

const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";

#[tokio::test]
async fn the_kubelet_registers_us() {
    let node = Node::start().await;
    assert_eq!(*node.serving.registered.borrow(), Registration::Waiting);
    let kubelet = KubeletDouble::start(node.root()).unwrap();
    assert_eq!(kubelet.wait_driver(DRIVER, LIMIT).await.unwrap(), "v1.DRAPlugin");
    node.wait_registered().await;
    let endpoint = node.root().join("plugins").join(DRIVER).join("dra.sock");
    let event = Event::Registered { driver: DRIVER.into(), endpoint, version: "v1.DRAPlugin".into() };
    assert_eq!(kubelet.events(), [event]);
}

#[tokio::test]
async fn get_info_says_what_the_kubelet_wants_and_the_server_leaves_hpack_alone() {
    let node = Node::start().await;
    let mut connection = h2::Connection::open(&node.serving.registration_socket).await.unwrap();
    for _ in 0..3 {
        let info: PluginInfo = connection.unary(GET_INFO, &InfoRequest {}, LIMIT).await.unwrap();
        let versions = ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
        let versions = versions.map(str::to_owned).to_vec();
        let endpoint = node.serving.endpoint.to_str().unwrap().to_owned();
        let want = PluginInfo { r#type: "DRAPlugin".into(), name: DRIVER.into(), endpoint, supported_versions: versions };
        assert_eq!(info, want);
    }
    // The authority filter relies on these: SETTINGS_HEADER_TABLE_SIZE (1) is not advertised, SETTINGS_MAX_FRAME_SIZE (5) is the default.
    assert!(!connection.settings.is_empty());
    assert!(connection.settings.iter().all(|&(id, _)| id != 1), "{:?}", connection.settings);
    assert!(connection.settings.iter().all(|&(id, value)| id != 5 || value == 16_384), "{:?}", connection.settings);
}

/// What our server would be without the filter.
struct Plain;

#[tonic::async_trait]
impl registration_server::Registration for Plain {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo::default()))
    }
    async fn notify_registration_status(
        &self,
        _: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// The control: the double really sends what a plain tonic server refuses, as the real kubelet does.
#[tokio::test]
async fn a_server_without_the_filter_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let kubelet = KubeletDouble::start(root.path()).unwrap();
    let path = root.path().join("plugins_registry/plain-reg.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&path).unwrap());
    let server = tonic::transport::Server::builder().add_service(RegistrationServer::new(Plain));
    let server = tokio::spawn(server.serve_with_incoming(incoming));
    let error = |events: &[Event]| {
        events.iter().find_map(|event| match event {
            Event::Failed { error, .. } => Some(error.clone()),
            _ => None,
        })
    };
    let error = kubelet.wait(LIMIT, error).await.unwrap();
    assert!(error.contains("GetInfo") && error.contains("reset with HTTP/2 error 1"), "{error}");
    // The same server answers a client whose authority is a host name.
    RegistrationClient::new(channel(path)).get_info(InfoRequest {}).await.unwrap();
    server.abort();
}

/// hyper's encoder uses Huffman strings and the dynamic table in its own way; the filter must follow it over many calls.
#[tokio::test]
async fn the_filter_serves_an_ordinary_client_too() {
    let node = Node::start().await;
    let mut client = RegistrationClient::new(channel(node.serving.registration_socket.clone()));
    for i in 0..200_usize {
        let mut request = Request::new(InfoRequest {});
        let value = format!("{}{i}", "v".repeat(i * 7 % 300));
        request.metadata_mut().insert("x-varying", value.parse().unwrap());
        assert_eq!(client.get_info(request).await.unwrap().into_inner().name, DRIVER);
    }
}

#[tokio::test]
async fn both_versions_prepare_and_unprepare() {
    for version in ["v1.DRAPlugin", "v1beta1.DRAPlugin"] {
        let node = Node::start().await;
        let kubelet = KubeletDouble::start_with(node.root(), &[version]).unwrap();
        assert_eq!(kubelet.wait_driver(DRIVER, LIMIT).await.unwrap(), version);
        let claims = [claim("one"), claim("two")];
        let prepared = kubelet.prepare(DRIVER, &claims).await.unwrap();
        assert_eq!(prepared.len(), 2);
        for claim in &claims {
            let devices = prepared[&claim.uid].as_ref().unwrap();
            assert_eq!(devices.len(), 1);
            assert_eq!(devices[0].request_names, ["nic/fast"]);
            assert_eq!(devices[0].pool_name, "node-1");
            assert_eq!(devices[0].device_name, format!("dev-{}", claim.name));
            assert_eq!(devices[0].cdi_device_ids, [format!("dranic.dev/claim={}", claim.uid)]);
            let share = (version == "v1.DRAPlugin").then(|| "share-1".to_owned());
            assert_eq!(devices[0].share_id, share);
        }
        let given_back = kubelet.unprepare(DRIVER, &claims).await.unwrap();
        assert!(given_back.len() == 2 && given_back.values().all(Result::is_ok));
        let mut log = node.handler.log();
        log.sort();
        assert_eq!(
            log,
            ["prepare ns/one (uid-one)", "prepare ns/two (uid-two)", "unprepare ns/one (uid-one)", "unprepare ns/two (uid-two)"]
        );
    }
}

#[tokio::test]
async fn a_kubelet_that_knows_no_version_refuses_us_and_we_say_so() {
    let node = Node::start().await;
    let _kubelet = KubeletDouble::start_with(node.root(), &["v9.DRAPlugin"]).unwrap();
    let mut registered = node.serving.registered.clone();
    let refused =
        |state: &Registration| matches!(state, Registration::Refused(text) if text.contains("none of services supported"));
    tokio::time::timeout(LIMIT, registered.wait_for(refused)).await.unwrap().unwrap();
}

#[tokio::test]
async fn claims_of_one_batch_run_at_the_same_time() {
    let (node, kubelet) = rig::registered().await;
    // Each of these waits in the handler until all 16 are there; one after the other would never end.
    let claims: Vec<_> = (0..rig::BARRIER).map(|i| claim(&format!("barrier-{i}"))).collect();
    let prepared = tokio::time::timeout(LIMIT, kubelet.prepare(DRIVER, &claims)).await.unwrap().unwrap();
    assert!(prepared.len() == rig::BARRIER && prepared.values().all(Result::is_ok));
    assert_eq!(node.handler.log().len(), rig::BARRIER);
}

#[tokio::test]
async fn repeats_get_the_same_answer() {
    let (node, kubelet) = rig::registered().await;
    let batch = [claim("a"), claim("a"), claim("a")];
    let first = kubelet.prepare(DRIVER, &batch).await.unwrap();
    assert_eq!(node.handler.log(), ["prepare ns/a (uid-a)"], "repeats within one call are done once");
    assert_eq!(kubelet.prepare(DRIVER, &batch).await.unwrap(), first);
    for _ in 0..2 {
        assert!(kubelet.unprepare(DRIVER, &batch).await.unwrap()["uid-a"].is_ok());
    }
    assert!(kubelet.unprepare(DRIVER, &[claim("never-seen")]).await.unwrap()["uid-never-seen"].is_ok());
}

#[tokio::test]
async fn errors_and_panics_stay_with_their_claim() {
    let (_node, kubelet) = rig::registered().await;
    let mut bad_uid = claim("c");
    bad_uid.uid = "../../etc".into();
    let mut no_name = claim("d");
    no_name.name = String::new();
    let claims = [claim("fine"), claim("fails"), claim("panics"), bad_uid, no_name];
    let prepared = kubelet.prepare(DRIVER, &claims).await.unwrap();
    assert_eq!(prepared.len(), 5);
    assert!(prepared["uid-fine"].is_ok());
    let error = |uid: &str| prepared[uid].clone().unwrap_err();
    assert_eq!(error("uid-fails"), "claim ns/fails: as scripted");
    assert!(error("uid-panics").contains("panicked: scripted panic"), "{}", error("uid-panics"));
    assert!(error("../../etc").contains("claim UID"), "{}", error("../../etc"));
    assert!(error("uid-d").contains("name \"\""), "{}", error("uid-d"));
    let unprepared = kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(unprepared["uid-fine"].is_ok() && unprepared["uid-fails"].is_err() && unprepared["uid-panics"].is_err());
    assert!(kubelet.prepare(DRIVER, &[claim("fine")]).await.unwrap()["uid-fine"].is_ok(), "the connection survives");
}

/// Prints what the call itself costs; the handler does nothing. The bound is generous: it is there to notice a stall, not a slow machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_round_trip_is_short() {
    let start = Instant::now();
    let (_node, kubelet) = rig::registered().await;
    println!("bind to registered (double polls every 50 ms): {:?}", start.elapsed());
    for size in [1_usize, 8, 32] {
        let claims: Vec<_> = (0..size).map(|i| claim(&format!("c{i}"))).collect();
        kubelet.prepare(DRIVER, &claims).await.unwrap();
        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            kubelet.prepare(DRIVER, &claims).await.unwrap();
            times.push(start.elapsed());
        }
        times.sort();
        println!("prepare of {size} claims: median {:?}, p99 {:?}", times[100], times[198]);
        assert!(times[100] < Duration::from_millis(100), "median {:?}", times[100]);
    }
}
