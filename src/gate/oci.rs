//! What the OCI runtime tells a hook: its state on stdin, and the container's `config.json` in the bundle.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::names::{PodUid, SandboxId};

/// Largest state that is read, bytes. Real ones have some KiB: annotations of the pod are a part.
pub const STATE_MAX: usize = 1 << 20;
/// Largest `config.json` that is read, bytes.
pub const CONFIG_MAX: usize = 16 << 20;

/// Where runtimes say the pod's UID: containerd, CRI-O.
const POD_UID: [&str; 2] = ["io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"];
/// Where runtimes say the id of the sandbox.
const SANDBOX_ID: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];
/// Where runtimes say the pod's name.
const POD_NAME: [&str; 2] = ["io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"];
/// Where runtimes say the pod's namespace.
const POD_NAMESPACE: [&str; 2] = ["io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"];
/// Where runtimes say the container's name.
const CONTAINER_NAME: [&str; 2] = ["io.kubernetes.cri.container-name", "io.kubernetes.container.name"];
/// CRI-O: all labels of the kubelet, as JSON.
const CRIO_LABELS: &str = "io.kubernetes.cri-o.Labels";

/// Longest name that is shown, characters.
const NAME_MAX: usize = 253;

/// The parts of the OCI state that a guard needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The container's first process, as this process sees it.
    pub pid: u32,
    /// Folder of `config.json`.
    pub bundle: Option<PathBuf>,
    /// UID of the pod.
    pub pod: Option<PodUid>,
    /// Id of the sandbox.
    pub sandbox: Option<SandboxId>,
    /// Name of the pod, as `namespace/name`.
    pub pod_name: Option<String>,
    /// Name of the container.
    pub container: Option<String>,
}

#[derive(Deserialize)]
struct Raw {
    pid: u32,
    #[serde(default)]
    bundle: Option<PathBuf>,
    #[serde(default)]
    annotations: Option<HashMap<String, String>>,
}

/// Reads the OCI state.
///
/// # Errors
/// What is wrong with it, for people.
pub fn parse(bytes: &[u8]) -> Result<State, String> {
    if bytes.len() > STATE_MAX {
        return Err(format!("it has more than {STATE_MAX} bytes"));
    }
    let raw: Raw = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if raw.pid == 0 || raw.pid > i32::MAX.cast_unsigned() {
        return Err(format!("its pid is {}, so there is no container to look into", raw.pid));
    }
    let mut said = raw.annotations.unwrap_or_default();
    // What the runtime says itself counts more.
    let labels = said.get(CRIO_LABELS).and_then(|labels| serde_json::from_str::<HashMap<String, String>>(labels).ok());
    for (key, value) in labels.unwrap_or_default() {
        said.entry(key).or_insert(value);
    }
    let find = |keys: [&str; 2]| keys.iter().find_map(|key| said.get(*key)).map(String::as_str);
    let shown = |text: &str| text.chars().filter(|c| !c.is_control()).take(NAME_MAX).collect::<String>();
    let pod_name =
        find(POD_NAMESPACE).zip(find(POD_NAME)).map(|(namespace, name)| format!("{}/{}", shown(namespace), shown(name)));
    Ok(State {
        pid: raw.pid,
        bundle: raw.bundle.filter(|bundle| bundle.is_absolute()),
        pod: find(POD_UID).and_then(|uid| PodUid::new(uid).ok()),
        sandbox: find(SANDBOX_ID).and_then(|id| SandboxId::new(id).ok()),
        pod_name,
        container: find(CONTAINER_NAME).map(shown),
    })
}

#[derive(Deserialize)]
struct Config {
    linux: Option<Linux>,
}

#[derive(Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
}

#[derive(Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    path: Option<PathBuf>,
}

/// Path of the network namespace that a `config.json` names; none when it can't be read or names none.
#[must_use]
pub fn netns_path(config: &[u8]) -> Option<PathBuf> {
    let config: Config = serde_json::from_slice(config).ok()?;
    let network = config.linux?.namespaces.into_iter().find(|namespace| namespace.kind == "network")?;
    network.path.filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn containerd_says_who_it_is() {
        let state = parse(
            br#"{"ociVersion":"1.1.0","id":"c","status":"creating","pid":4711,"bundle":"/run/b","annotations":{
                "io.kubernetes.cri.sandbox-id":"sand","io.kubernetes.cri.sandbox-uid":"u-1","io.kubernetes.cri.sandbox-name":"trainer",
                "io.kubernetes.cri.sandbox-namespace":"ml","io.kubernetes.cri.container-name":"main"}}"#,
        );
        let state = state.unwrap();
        assert_eq!((state.pid, state.bundle), (4711, Some("/run/b".into())));
        assert_eq!((state.pod.unwrap().as_str(), state.sandbox.unwrap().as_str()), ("u-1", "sand"));
        assert_eq!((state.pod_name.as_deref(), state.container.as_deref()), (Some("ml/trainer"), Some("main")));
    }

    #[test]
    fn cri_o_says_it_in_annotations_or_in_labels() {
        let text = r#"{"pid":1,"annotations":{"io.kubernetes.cri-o.SandboxID":"sand","io.kubernetes.pod.name":"trainer",
            "io.kubernetes.cri-o.Labels":"{\"io.kubernetes.pod.uid\":\"u-1\",\"io.kubernetes.pod.namespace\":\"ml\",
            \"io.kubernetes.pod.name\":\"other\",\"io.kubernetes.container.name\":\"main\"}"}}"#;
        let state = parse(text.replace('\n', "").as_bytes()).unwrap();
        assert_eq!((state.pod.unwrap().as_str(), state.sandbox.unwrap().as_str()), ("u-1", "sand"));
        assert_eq!((state.pod_name.as_deref(), state.container.as_deref()), (Some("ml/trainer"), Some("main")));
    }

    #[test]
    fn what_is_missing_or_odd_is_left_out_and_without_a_pid_there_is_nothing() {
        let state = parse(br#"{"pid":5,"bundle":"relative","annotations":{"io.kubernetes.cri.sandbox-uid":"../x"}}"#).unwrap();
        assert_eq!(state, State { pid: 5, ..State::default() });
        assert_eq!(parse(br#"{"pid":5,"annotations":null}"#).unwrap().pid, 5);
        for bad in [&b"{}"[..], b"", br#"{"pid":0}"#, br#"{"pid":-1}"#, br#"{"pid":3000000000}"#] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse(&vec![b' '; STATE_MAX + 1]).unwrap_err().contains("bytes"));
        let control = parse(br#"{"pid":5,"annotations":{"io.kubernetes.container.name":"a\nb"}}"#).unwrap();
        assert_eq!(control.container.as_deref(), Some("ab"));
    }

    #[test]
    fn the_network_namespace_of_a_bundle_is_found() {
        let config = br#"{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":"/var/run/netns/x"}]},"mounts":[]}"#;
        assert_eq!(netns_path(config), Some("/var/run/netns/x".into()));
        for without in [&br#"{"linux":{"namespaces":[{"type":"network"}]}}"#[..], b"{}", b"x", br#"{"linux":{}}"#] {
            assert_eq!(netns_path(without), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes);
            let _ = netns_path(&bytes);
        }
    }
}
