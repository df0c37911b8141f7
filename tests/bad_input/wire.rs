//! Malformed and huge requests to the running agent, from the kubelet's and from the runtime's side.

use std::io::Write;
use std::os::unix::net::UnixStream;

use dranic::nri::proto;
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::Failure;
use prost::Message;
use tonic::Code;

use crate::node::{self, DRIVER, PLUGIN, assert_says, names};

#[tokio::test(flavor = "multi_thread")]
async fn from_the_kubelet() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let claim =
        |namespace: &str, name: &str, uid: &str| Claim { namespace: namespace.into(), uid: uid.into(), name: name.into() };
    for (bad, words) in [
        (claim("default", "c", "../../../etc/cron.d/x"), "claim UID"),
        (claim("default", "../../../api/v1/secrets", "u1"), "name"),
        (claim("..", "c", "u2"), "namespace"),
        (claim("", "c", "u3"), "namespace"),
        (claim("default", "c?x=y", "u4"), "name"),
        (claim("default", "c", &"u".repeat(100_000)), "claim UID"),
    ] {
        let answer = cluster.kubelet.prepare(DRIVER, std::slice::from_ref(&bad)).await.unwrap();
        let error = answer[&bad.uid].as_ref().unwrap_err();
        assert_says(error, &["prepare of claim", words]);
        assert!(error.len() < 5000);
        let answer = cluster.kubelet.unprepare(DRIVER, std::slice::from_ref(&bad)).await.unwrap();
        assert_says(answer[&bad.uid].as_ref().unwrap_err(), &["unprepare of claim", words]);
    }
    let many: Vec<Claim> = (0..2000).map(|n| claim("default", "c", &format!("u{n}"))).collect();
    let status = cluster.kubelet.prepare(DRIVER, &many).await.unwrap_err();
    assert_eq!(status.downcast_ref::<tonic::Status>().unwrap().code(), Code::InvalidArgument);
    let huge = [claim(&"n".repeat(8 << 20), "c", "u")];
    let status = cluster.kubelet.prepare(DRIVER, &huge).await.unwrap_err();
    assert_eq!(status.downcast_ref::<tonic::Status>().unwrap().code(), Code::OutOfRange);
    for socket in ["plugins/dranic.dev/dra.sock", "plugins_registry/dranic.dev-reg.sock"] {
        let mut stream = UnixStream::connect(cluster.path("kubelet").join(socket)).unwrap();
        let _ = stream.write_all(&[0xff; 100_000]);
    }
    assert!(!cluster.api.requests().iter().any(|r| r.path.contains("secrets")), "a name became a path");
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn from_the_runtime() {
    let Some((cluster, before)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    // No tag, short and long; a length beyond the end; a field cut off.
    let payloads = [vec![0xff; 64], vec![0xff; 1 << 20], vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f], vec![0x0a, 0x02, 0x0a]];
    for payload in payloads {
        for method in ["RunPodSandbox", "CreateContainer", "StopPodSandbox", "StateChange", "Configure", "Synchronize"] {
            let refused = cluster.runtime.raw_call(PLUGIN, method, payload.clone()).await.unwrap_err();
            assert!(matches!(refused, Failure::Explicit(code, _) if code != 12), "{method}: {refused:?}");
        }
    }
    assert!(matches!(cluster.runtime.raw_call(PLUGIN, "NoSuchMethod", Vec::new()).await, Err(Failure::Explicit(12, _))));
    // Ids that would leave their place, or fill the disk, as a part of a file's name.
    let request = |id: &str, netns: &str| {
        let namespace = proto::LinuxNamespace { r#type: "network".into(), path: netns.into() };
        let linux = Some(proto::LinuxPodSandbox { namespaces: vec![namespace] });
        let sandbox = proto::PodSandbox { id: id.into(), uid: pod.uid.clone(), name: "a".into(), linux, ..Default::default() };
        proto::RunPodSandboxRequest { pod: Some(sandbox) }.encode_to_vec()
    };
    let netns = pod.sandbox.netns_path.clone().unwrap();
    for id in ["", "../../x", &"x".repeat(200_000)] {
        let Err(Failure::Explicit(_, text)) = cluster.runtime.raw_call(PLUGIN, "RunPodSandbox", request(id, &netns)).await else {
            panic!("sandbox id {id:?} was taken");
        };
        assert_says(&text, &["dranic.dev", "sandbox id"]);
        assert!(text.len() < 5000, "{} bytes", text.len());
    }
    node::assert_empty(&pod);
    assert_eq!(cluster.runtime.plugins(), [PLUGIN], "still connected");
    node::run(&cluster, &pod).await;
    node::assert_inside(&pod, &names(0..2));
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_with_3_mib_of_annotations_is_a_pod_like_others() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let mut pod = cluster.pod("a").unwrap();
    pod.sandbox.padding = 3 << 20;
    let claims = [cluster.claim("c", &pod, &names(0..1), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    node::assert_inside(&pod, &names(0..1));
    node::end(&cluster, &pod, &claims).await;
    node::assert_nothing_done(&cluster, &before).await;
}
