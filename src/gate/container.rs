//! What a container gets of its RDMA devices, by its `config.json`: the nodes and the access to them. Pure.

use serde::Deserialize;

use crate::rdma::char_devices::CharDevice;

/// The parts of a container's `config.json` that say what it may open, and what it uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Given {
    /// Its environment.
    pub env: Vec<String>,
    /// Nodes that are made in it.
    devices: Vec<Made>,
    /// Rules of the device cgroup, in order: the last one that fits counts.
    rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Made {
    path: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    major: i64,
    #[serde(default)]
    minor: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Rule {
    allow: bool,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    major: Option<i64>,
    #[serde(default)]
    minor: Option<i64>,
    #[serde(default)]
    access: Option<String>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    process: Option<Process>,
    #[serde(default)]
    linux: Option<Linux>,
}

#[derive(Deserialize)]
struct Process {
    #[serde(default)]
    env: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Linux {
    #[serde(default)]
    devices: Option<Vec<Made>>,
    #[serde(default)]
    resources: Option<Resources>,
}

#[derive(Deserialize)]
struct Resources {
    #[serde(default)]
    devices: Option<Vec<Rule>>,
}

/// Reads a `config.json`.
///
/// # Errors
/// What is wrong with it.
pub fn parse(config: &[u8]) -> Result<Given, String> {
    let config: Config = serde_json::from_slice(config).map_err(|e| e.to_string())?;
    let (devices, resources) = config.linux.map(|linux| (linux.devices, linux.resources)).unwrap_or_default();
    Ok(Given {
        env: config.process.and_then(|process| process.env).unwrap_or_default(),
        devices: devices.unwrap_or_default(),
        rules: resources.and_then(|resources| resources.devices).unwrap_or_default(),
    })
}

impl Given {
    /// Why the container could not use `device`, which has these numbers now; none when it can.
    #[must_use]
    pub fn lacks(&self, device: &CharDevice) -> Option<String> {
        let (major, minor) = (i64::from(device.numbers.0), i64::from(device.numbers.1));
        let path = device.path();
        // Of several for one path runtimes make the last.
        let Some(made) = self.devices.iter().rev().find(|made| made.path == path) else {
            return Some(format!(
                "it is not given {path}, which it needs for its RDMA device: does the runtime use the CDI specs of the claim, and has \
                 no other plugin taken the device away?"
            ));
        };
        if !matches!(made.kind.as_str(), "c" | "u") || (made.major, made.minor) != (major, minor) {
            return Some(format!(
                "it is given {path} with the numbers {}:{}, and that of its RDMA device has {major}:{minor} now: the kernel \
                 registered it anew. The kubelet will try again",
                made.major, made.minor
            ));
        }
        let refused: String = ['r', 'w'].into_iter().filter(|access| !self.allows(major, minor, *access)).collect();
        (!refused.is_empty()).then(|| format!("its cgroup does not allow \"{refused}\" of {path} ({major}:{minor})"))
    }

    fn allows(&self, major: i64, minor: i64, access: char) -> bool {
        let all = |number: Option<i64>, ours: i64| number.is_none_or(|number| number < 0 || number == ours);
        let fits = |rule: &&Rule| {
            rule.kind.as_deref().is_none_or(|kind| matches!(kind, "" | "a" | "c"))
                && all(rule.major, major)
                && all(rule.minor, minor)
                && rule.access.as_deref().is_none_or(|of| of.is_empty() || of.contains(access))
        };
        self.rules.iter().rev().find(fits).is_some_and(|rule| rule.allow)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn uverbs() -> CharDevice {
        CharDevice { name: "uverbs0".to_owned(), device: Some("mlx5_0".to_owned()), numbers: (231, 192) }
    }

    fn given(devices: &Value, rules: &Value) -> Given {
        let config = json!({"process": {"env": ["A=b"]}, "linux": {"devices": devices, "resources": {"devices": rules}}});
        parse(config.to_string().as_bytes()).unwrap()
    }

    fn node(minor: u32) -> Value {
        json!({"path": "/dev/infiniband/uverbs0", "type": "c", "major": 231, "minor": minor, "fileMode": 438, "uid": 0, "gid": 0})
    }

    fn allow(minor: u32, access: &str) -> Value {
        json!({"allow": true, "type": "c", "major": 231, "minor": minor, "access": access})
    }

    #[test]
    fn a_node_with_its_numbers_and_access_is_enough() {
        let all_denied = json!({"allow": false, "access": "rwm"});
        let good = given(&json!([node(192)]), &json!([all_denied, allow(192, "rw")]));
        assert_eq!((good.lacks(&uverbs()), good.env.as_slice()), (None, ["A=b".to_owned()].as_slice()));
        let privileged = given(&json!([node(192)]), &json!([{"allow": true, "access": "rwm"}]));
        assert_eq!(privileged.lacks(&uverbs()), None);
        let by_parts = given(&json!([node(1), node(192)]), &json!([allow(192, "r"), allow(192, "w")]));
        assert_eq!(by_parts.lacks(&uverbs()), None, "the last of one path counts");
    }

    #[test]
    fn what_is_missing_is_named() {
        let denied = json!({"allow": false, "type": "c", "major": 231, "access": "w"});
        for (devices, rules, words) in [
            (json!([]), json!([allow(192, "rw")]), "is not given /dev/infiniband/uverbs0"),
            (json!([node(193)]), json!([allow(193, "rw")]), "the numbers 231:193, and that of its RDMA device has 231:192"),
            (json!([node(192)]), json!([]), "does not allow \"rw\""),
            (json!([node(192)]), json!([allow(192, "r")]), "does not allow \"w\""),
            (json!([node(192)]), json!([allow(193, "rw")]), "does not allow \"rw\""),
            (json!([node(192)]), json!([allow(192, "rw"), denied]), "does not allow \"w\""),
            (json!([{"path": "/dev/infiniband/uverbs0", "type": "b", "major": 231, "minor": 192}]), json!([]), "numbers"),
        ] {
            let lack = given(&devices, &rules).lacks(&uverbs()).unwrap_or_else(|| panic!("{devices} {rules}"));
            assert!(lack.contains(words), "{lack}");
        }
        assert!(parse(b"{}").unwrap().lacks(&uverbs()).is_some());
        assert!(parse(br#"{"process": {"env": null}, "linux": {"devices": null, "resources": null}}"#).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            let _ = parse(&bytes).map(|given| given.lacks(&uverbs()));
        }
    }
}
