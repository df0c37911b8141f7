//! The block `rdma`.

use super::*;

#[test]
fn rules_over_rdma() {
    let good = r#"{"rdma": {"enabled": true, "netnsMode": "exclusive", "charDevices": ["umad", "issm"],
        "limits": {"hcaHandles": 0, "hcaObjects": 2147483647}, "waitForPort": false}}"#;
    assert_eq!(faults(good), [""; 0]);
    assert!(parse(good).unwrap().not_supported_yet().is_empty());
    for fine in [r#"{"enabled": false}"#, "{}", r#"{"charDevices": []}"#] {
        assert_eq!(faults(&format!(r#"{{"rdma": {fine}}}"#)), [""; 0], "{fine}");
    }
    for (json, path) in [
        (r#"{"charDevices": ["umad", "umad"]}"#, "rdma.charDevices[1]"),
        (r#"{"limits": {}}"#, "rdma.limits:"),
        (r#"{"limits": {"hcaHandles": 2147483648}}"#, "rdma.limits.hcaHandles"),
        (r#"{"limits": {"hcaObjects": 4294967295}}"#, "rdma.limits.hcaObjects"),
        (r#"{"enabled": false, "netnsMode": "shared"}"#, "rdma.netnsMode"),
        (r#"{"enabled": false, "charDevices": []}"#, "rdma.charDevices"),
        (r#"{"enabled": false, "limits": {"hcaHandles": 1}}"#, "rdma.limits"),
        (r#"{"enabled": false, "waitForPort": true}"#, "rdma.waitForPort"),
    ] {
        let found = faults(&format!(r#"{{"rdma": {json}}}"#));
        assert!(found.len() == 1 && found[0].starts_with(path), "{json}: {found:?}");
    }
    for (json, path) in [
        (r#"{"charDevices": ["uverbs"]}"#, "rdma.charDevices[0]"),
        (r#"{"netnsMode": "Shared"}"#, "rdma.netnsMode"),
        (r#"{"limits": [1, 2]}"#, "rdma.limits"),
        (r#"{"limits": {"hcaHandle": 1}}"#, "rdma.limits.hcaHandle"),
        ("[true]", "rdma"),
    ] {
        let fault = parse(&format!(r#"{{"rdma": {json}}}"#)).expect_err(json);
        assert_eq!(fault.path, path, "{json}: {fault}");
    }
}

#[test]
fn of_rdma_the_claim_says_what_it_says_and_the_class_the_rest() {
    let class =
        parse(r#"{"rdma": {"waitForPort": false, "charDevices": ["umad"], "limits": {"hcaHandles": 2, "hcaObjects": 9}}}"#);
    let claim = parse(r#"{"rdma": {"charDevices": [], "limits": {"hcaObjects": 7}}}"#).unwrap();
    let wanted = r#"{"rdma": {"waitForPort": false, "charDevices": [], "limits": {"hcaHandles": 2, "hcaObjects": 7}}}"#;
    assert_eq!(class.unwrap().merged_with(claim), parse(wanted).unwrap());
}
