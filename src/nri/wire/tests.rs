use proptest::prelude::*;
use prost::Message;

use super::*;

fn request(uid: &str) -> proto::CreateContainerRequest {
    let namespaces = vec![
        proto::LinuxNamespace { r#type: "pid".into(), path: String::new() },
        proto::LinuxNamespace { r#type: "network".into(), path: "/run/netns/a".into() },
    ];
    let linux = Some(proto::LinuxPodSandbox { namespaces });
    let ips = vec!["10.0.0.9".to_owned()];
    let pod =
        proto::PodSandbox { id: "s".into(), name: "n".into(), uid: uid.into(), namespace: "ns".into(), linux, pid: 300, ips };
    let cdi_devices = vec![proto::CdiDevice { name: "a/b=c".into() }];
    let create_runtime = vec![proto::Hook { path: "/opt/gate".into(), ..Default::default() }];
    let container = proto::Container {
        id: "c".into(),
        pod_sandbox_id: "s".into(),
        name: "x".into(),
        state: 3,
        hooks: Some(proto::Hooks { create_runtime, ..Default::default() }),
        cdi_devices,
        env: vec!["A=b".into()],
    };
    proto::CreateContainerRequest { pod: Some(pod), container: Some(container) }
}

#[test]
fn messages_become_the_types_of_the_hooks() {
    let request = request("u");
    let sandbox = Sandbox::from(request.pod.unwrap());
    let netns = Some("/run/netns/a".to_owned());
    let (id, name, namespace, uid) = ("s".to_owned(), "n".to_owned(), "ns".to_owned(), "u".to_owned());
    let expected = Sandbox { id, name, namespace, uid, netns, lost: false, ips: vec!["10.0.0.9".to_owned()], pid: 300 };
    assert_eq!(sandbox, expected);
    let container = Container::from(request.container.unwrap());
    let cdi_devices = vec!["a/b=c".to_owned()];
    let create_runtime = vec!["/opt/gate".to_owned()];
    let (id, sandbox, name) = ("c".into(), "s".into(), "x".into());
    let expected = Container { id, sandbox, name, env: vec!["A=b".into()], cdi_devices, create_runtime, state: 3 };
    assert_eq!(container, expected);
}

#[test]
fn nothing_to_change_is_the_empty_answer_and_a_hook_comes_whole() {
    assert_eq!(answer(Adjustment::default()), Vec::<u8>::new());
    let args = vec!["gate".to_owned(), "--pod".to_owned()];
    let hook = OciHook { path: "/opt/gate".into(), args: args.clone(), timeout: 65 };
    let bytes = answer(Adjustment { create_runtime: vec![hook], ..Adjustment::default() });
    let adjust = proto::CreateContainerResponse::decode(&bytes[..]).unwrap().adjust.unwrap();
    let hook = &adjust.hooks.unwrap().create_runtime[0];
    assert_eq!((hook.path.as_str(), &hook.args, hook.timeout.as_ref().unwrap().value), ("/opt/gate", &args, 65));
}

#[test]
fn a_pod_without_a_network_path_has_no_netns() {
    let mut pod = request("u").pod.unwrap();
    pod.linux.as_mut().unwrap().namespaces[1].path.clear();
    let on_host = Sandbox::from(pod);
    assert!(on_host.netns.is_none() && !on_host.lost);
    let lost = Sandbox::from(proto::PodSandbox::default());
    assert!(lost.netns.is_none() && lost.lost);
}

#[test]
fn the_last_uid_counts() {
    let bytes = [request("first").encode_to_vec(), request("last").encode_to_vec()].concat();
    assert_eq!(pod_uid(&bytes, POD_IN_REQUEST), Ok("last"));
    assert_eq!(pod_uid(&[], POD_IN_REQUEST), Ok(""));
}

#[test]
fn broken_bytes_are_refused() {
    for bytes in [
        &[0x0a, 5, 1][..],                                    // shorter than its length
        &[0x0a],                                              // no length
        &[0x0b],                                              // a group
        &[0x02, 0],                                           // field 0
        &[8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 2], // more than 64 bits
        &[0x0a, 3, 0x1a, 1, 0xff],                            // a UID that is no text
        &[9, 0, 0],                                           // a short fixed64
        &[13, 0],                                             // a short fixed32
    ] {
        assert_eq!(pod_uid(bytes, POD_IN_REQUEST), Err(Malformed), "{bytes:?}");
    }
}

proptest! {
    #[test]
    fn the_uid_is_what_a_decoder_finds(uid in ".*") {
        let request = request(&uid);
        let bytes = request.encode_to_vec();
        prop_assert_eq!(pod_uid(&bytes, POD_IN_REQUEST), Ok(&uid[..]));
        let change = proto::StateChangeEvent { event: -1, pod: request.pod, container: request.container }.encode_to_vec();
        prop_assert_eq!(pod_uid(&change, POD_IN_STATE_CHANGE), Ok(&uid[..]));
        prop_assert_eq!(event(&change), Ok(-1));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let decoded = proto::CreateContainerRequest::decode(&bytes[..]);
        let (uid, checked) = (pod_uid(&bytes, POD_IN_REQUEST), check(&bytes));
        // Ours looks at less, so it accepts at least what the decoder accepts; groups apart, which proto3 has not.
        if let Ok(decoded) = decoded && let Ok(uid) = uid {
            prop_assert_eq!(decoded.pod.unwrap_or_default().uid, uid);
            prop_assert!(checked.is_ok());
        }
    }
}

#[test]
fn the_variables_of_a_container_are_found_by_their_mark() {
    let env: Vec<String> = ["PATH=/bin", "MARK_a=1", "xMARK_b=2", "MARK_c"].map(str::to_owned).to_vec();
    let request =
        proto::CreateContainerRequest { container: Some(proto::Container { env, ..Default::default() }), ..Default::default() }
            .encode_to_vec();
    assert_eq!(variables(&request, "MARK_").unwrap(), ["MARK_a=1", "MARK_c"]);
    assert!(variables(&request[..request.len() - 3], "MARK_").is_err(), "cut off");
    assert_eq!(variables(&[], "MARK_").unwrap(), Vec::<&str>::new());
}

#[test]
fn limits_go_into_the_unified_map_beside_a_hook_or_alone() {
    let unified = std::collections::BTreeMap::from([("rdma.max".to_owned(), "mlx5_0 hca_handle=2".to_owned())]);
    let hook = OciHook { path: "/guard".to_owned(), args: vec!["guard".to_owned()], timeout: 5 };
    for create_runtime in [vec![], vec![hook]] {
        let bytes = answer(Adjustment { create_runtime: create_runtime.clone(), unified: unified.clone() });
        let adjust = proto::CreateContainerResponse::decode(&bytes[..]).unwrap().adjust.unwrap();
        let linux = adjust.linux.unwrap();
        assert_eq!(linux.resources.unwrap().unified.into_iter().collect::<Vec<_>>(), Vec::from_iter(unified.clone()));
        assert!(linux.devices.is_empty(), "CDI brings them");
        assert_eq!(adjust.hooks.map_or(0, |hooks| hooks.create_runtime.len()), create_runtime.len());
    }
    assert!(answer(Adjustment::default()).is_empty());
}
