//! What stands in the files.

use super::*;
use crate::ledger::Durability;

fn device(request: &str, name: &str) -> Value {
    json!({
        "request": request, "pool": "node-a", "device": name, "hardware": {"pci": {"address": "0000:8a:00.0"}},
        "attributes": {"numaNode": 1, "rdmaDevice": "mlx5_9", "vendor": "Mellanox", "virtual": false},
        "host": {
            "index": 7, "name": "eth1", "mtu": 9000, "flags": 4099, "address": "02:00:00:00:00:01",
            "addresses": [], "routes": [], "rules": [], "neighbours": [], "sysctls": {}
        },
        "plan": {"podLink": "rail0", "steps": [
            {"step": "move", "name": "rail0", "mtu": null, "address": null},
            {"step": "address", "address": crate::netdev::Address::permanent("10.0.0.5".parse().unwrap(), 24)}
        ]},
        "phase": "attached", "sinceUnixMs": 1
    })
}

fn with_rdma(mut device: Value, usable: bool) -> Value {
    device["rdma"] = json!({
        "name": "mlx5_0", "index": 3, "port": 1, "protocol": "RoCE", "mode": "shared", "charDevices": ["uverbs", "rdmaCm"],
        "waitForPort": true
    });
    if usable {
        device["rdma"]["usable"] = json!({"opened": false, "atUnixMs": 1, "gids": [
            {"index": 3, "gid": "::ffff:10.0.0.5", "type": "RoCE v2", "link": "rail0"},
            {"index": 1, "gid": "fe80::1", "type": "RoCE v2"},
            {"index": 2, "gid": "::ffff:10.0.0.5", "type": "IB/RoCE v1"}
        ]});
    }
    device
}

fn record(devices: &[Value]) -> ClaimRecord {
    serde_json::from_value(json!({
        "claim": {"namespace": "ml", "name": "trainer-nic-x7", "uid": "u-1"}, "pod": {"name": "trainer", "uid": "pod-1"},
        "generation": 4, "bootId": "boot-1", "devices": devices
    }))
    .unwrap()
}

fn objects(text: &str) -> Vec<Value> {
    serde_json::Deserializer::from_str(text).into_iter().collect::<Result<_, _>>().unwrap()
}

fn read(folder: &Path, request: &str) -> Vec<Value> {
    let file = folder.join(format!("metadata/u-1/{request}/dra.net-metadata.json"));
    objects(&std::fs::read_to_string(file).unwrap())
}

#[test]
fn a_file_has_the_form_of_kubernetes() {
    let folder = tempfile::tempdir().unwrap();
    Metadata::new(folder.path(), "dra.net").write(&record(&[with_rdma(device("nic", "pci-a"), true)])).unwrap();
    let all = read(folder.path(), "nic");
    let versions: Vec<_> = all.iter().map(|object| object["apiVersion"].as_str().unwrap()).collect();
    assert_eq!(versions, ["metadata.resource.k8s.io/v1beta1", "metadata.resource.k8s.io/v1alpha1"]);
    let mut first = all[0].clone();
    first.as_object_mut().unwrap().remove("apiVersion");
    let wanted = json!({
        "kind": "DeviceMetadata",
        "metadata": {"name": "trainer-nic-x7", "namespace": "ml", "uid": "u-1", "generation": 4},
        "requests": [{"name": "nic", "devices": [{
            "driver": "dra.net", "pool": "node-a", "name": "pci-a",
            "attributes": {
                "rdma": {"bool": true}, "rdmaDevice": {"string": "mlx5_0"}, "rdmaPort": {"int": 1}, "rdmaProtocol": {"string": "RoCE"},
                "rdmaUsable": {"bool": true}, "rdmaGidIndex": {"int": 3}, "rdmaGid3": {"string": "10.0.0.5"},
                "rdmaGid1": {"string": "fe80::1"}, "numaNode": {"int": 1}, "vendor": {"string": "Mellanox"}, "virtual": {"bool": false}
            },
            "networkData": {"interfaceName": "rail0", "ips": ["10.0.0.5/24"], "hardwareAddress": "02:00:00:00:00:01"}
        }]}]
    });
    assert_eq!(first, wanted);
}

#[test]
fn before_it_is_in_the_pod_nothing_is_said_of_the_link_and_no_gid() {
    let mut prepared = with_rdma(device("nic", "pci-a"), false);
    prepared["phase"] = json!("prepared");
    let text = stream(&record(&[]), "dra.net", &[&record(&[prepared]).devices[0]]);
    let entry = objects(&text)[0]["requests"][0]["devices"][0].clone();
    assert!(entry.get("networkData").is_none(), "{entry}");
    assert_eq!(entry["attributes"]["rdmaUsable"], json!({"bool": false}));
    assert!(entry["attributes"].get("rdmaGidIndex").is_none());
}

#[test]
fn requests_have_folders_of_their_own_and_subrequests_share_one() {
    let folder = tempfile::tempdir().unwrap();
    let metadata = Metadata::new(folder.path(), "dra.net");
    let mut claim = record(&[device("nic/fast", "a"), device("nic/fast", "b"), device("other", "c"), device("../x", "d")]);
    metadata.write(&claim).unwrap();
    let names = |request: &str| {
        let request = &read(folder.path(), request)[0]["requests"][0];
        let devices: Vec<_> =
            request["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect();
        (request["name"].as_str().unwrap().to_owned(), devices)
    };
    assert_eq!(names("nic"), ("nic/fast".to_owned(), vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!(names("other").1, ["c"]);
    let at = |claim: &ClaimRecord, n: usize| {
        let mount = metadata.mount(claim, &claim.devices[n])?;
        Some(mount["containerPath"].as_str().unwrap().to_owned())
    };
    let root = "/var/run/kubernetes.io/dra-device-attributes";
    assert_eq!(at(&claim, 0), Some(format!("{root}/resourceclaims/trainer-nic-x7/nic")));
    assert_eq!(at(&claim, 3), None, "no name of a folder");
    claim.pod_claim_name = Some("nics".to_owned());
    assert_eq!(at(&claim, 2), Some(format!("{root}/resourceclaimtemplates/nics/other")));
    claim.pod_claim_name = None;
    "../x".clone_into(&mut claim.claim.name);
    assert_eq!(at(&claim, 0), None);
}

#[test]
fn files_follow_the_records_and_go_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, _) = Ledger::open(&folder.path().join("state")).unwrap();
    let metadata = Metadata::new(folder.path(), "dra.net");
    let claim = record(&[with_rdma(device("nic", "pci-a"), false)]);
    metadata.write(&claim).unwrap();
    std::fs::create_dir_all(folder.path().join("metadata/old/nic")).unwrap();
    let mut later = record(&[with_rdma(device("nic", "pci-a"), true)]);
    later.generation = 5;
    ledger.put(later, Durability::Process).unwrap();
    metadata.tidy(&ledger);
    metadata.renew(&ledger);
    let seen = read(folder.path(), "nic")[0].clone();
    assert_eq!(seen["requests"][0]["devices"][0]["attributes"]["rdmaGidIndex"], json!({"int": 3}));
    assert!(!folder.path().join("metadata/old").exists());
    let uid = &claim.claim.uid;
    metadata.remove(uid).unwrap();
    metadata.remove(uid).unwrap();
    assert!(!folder.path().join("metadata").exists(), "nothing is left");
}

#[test]
fn attributes_are_at_most_as_many_as_the_api_takes() {
    let mut many = with_rdma(device("nic", "pci-a"), true);
    for n in 0..40 {
        many["attributes"][format!("a{n}")] = json!(n);
    }
    let all = attributes(&record(&[many]).devices[0]);
    assert_eq!(all.len(), ATTRIBUTES_MAX);
    assert!(all.contains_key("rdmaGidIndex"));
}
