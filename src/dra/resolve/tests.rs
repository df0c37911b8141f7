use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::names::ClaimUid;

const DRIVER: &str = "net.example.com";

fn asked() -> ClaimRef {
    ClaimRef { namespace: "ns".into(), name: "nic".into(), uid: ClaimUid::new("uid-1").unwrap() }
}

/// A claim with these allocation results and configuration entries, reserved for one pod.
fn claim(results: Value, config: Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "nic", "uid": "uid-1"},
        "spec": {"devices": {}},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": "pod-a", "uid": "pod-uid-a"}]
        }
    })
}

fn result(request: &str, device: &str) -> Value {
    json!({"driver": DRIVER, "pool": "node-a", "device": device, "request": request})
}

fn entry(source: &str, requests: &[&str], parameters: Value) -> Value {
    json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
}

fn run(claim: &Value) -> Result<ResolvedClaim, ResolveError> {
    run_text(&claim.to_string())
}

fn run_text(raw: &str) -> Result<ResolvedClaim, ResolveError> {
    resolve(&asked(), &serde_json::from_str(raw).unwrap(), raw, DRIVER)
}

/// MTU of each device.
fn mtus(claim: &Value) -> Vec<Option<u32>> {
    run(claim).unwrap().devices.into_iter().map(|d| d.config.interface.and_then(|i| i.mtu)).collect()
}

fn mtu(bytes: u32) -> Value {
    json!({"interface": {"mtu": bytes}})
}

#[test]
fn what_the_pod_calls_a_claim_of_a_template_is_known_where_it_is_a_name() {
    let named = |name: &str| {
        let mut claim = claim(json!([result("a", "nic-0")]), json!(null));
        claim["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": name});
        run(&claim).unwrap().pod_claim_name
    };
    assert_eq!(named("rails").as_deref(), Some("rails"));
    assert_eq!(named("../rails"), None);
    assert_eq!(run(&claim(json!([result("a", "nic-0")]), json!(null))).unwrap().pod_claim_name, None);
}

#[test]
fn the_devices_of_this_driver_come_in_order() {
    let other = json!({"driver": "gpu.example.com", "pool": "p", "device": "gpu-0", "request": "gpu"});
    let mut shared = result("b/fast", "nic-1");
    shared["shareID"] = "share-1".into();
    let mut admin = result("c", "nic-1");
    admin["adminAccess"] = true.into();
    let resolved = run(&claim(json!([result("a", "nic-0"), other, shared, admin]), json!(null))).unwrap();
    let seen: Vec<_> =
        resolved.devices.iter().map(|d| (d.request.as_str(), d.device.as_str(), d.share_id.as_deref(), d.admin_access)).collect();
    assert_eq!(seen, [("a", "nic-0", None, false), ("b/fast", "nic-1", Some("share-1"), false), ("c", "nic-1", None, true)]);
    assert!(resolved.devices.iter().all(|d| d.pool == "node-a" && d.config == NetworkConfig::default()));
    assert_eq!(resolved.pod, Some(PodRef { name: "pod-a".into(), uid: PodUid::new("pod-uid-a").unwrap() }));
    assert_eq!(resolved.claim, asked());
}

#[test]
fn the_claims_fields_win_over_the_classes_whatever_the_order() {
    let class = entry("FromClass", &["a"], json!({"interface": {"mtu": 9000, "name": "rail0"}, "routes": [{"scope": 7}]}));
    let own = entry("FromClaim", &[], json!({"interface": {"mtu": 1500}, "routes": []}));
    for config in [json!([class, own]), json!([own, class])] {
        let resolved = run(&claim(json!([result("a", "nic-0")]), config)).unwrap();
        let want = json!({"interface": {"mtu": 1500, "name": "rail0"}, "routes": []});
        assert_eq!(serde_json::to_value(&resolved.devices[0].config).unwrap(), want);
    }
    let later = json!([entry("FromClaim", &[], mtu(1500)), entry("FromClaim", &["a"], mtu(1400))]);
    assert_eq!(mtus(&claim(json!([result("a", "nic-0")]), later)), [Some(1400)]);
}

#[test]
fn entries_apply_to_their_requests_only() {
    let results = json!([result("a", "n0"), result("b", "n1"), result("b/x", "n2"), result("b/y", "n3"), result("bb", "n4")]);
    let cases: [(&[&str], [bool; 5]); 7] = [
        (&[], [true; 5]),
        (&["a"], [true, false, false, false, false]),
        (&["b"], [false, true, true, true, false]),
        (&["b/x"], [false, false, true, false, false]),
        (&["x"], [false; 5]),
        (&["b/x", "a"], [true, false, true, false, false]),
        (&["b/"], [false; 5]),
    ];
    for (requests, applies) in cases {
        let got = mtus(&claim(results.clone(), json!([entry("FromClaim", requests, mtu(1400))])));
        assert_eq!(got, applies.map(|yes| yes.then_some(1400)), "{requests:?}");
    }
}

#[test]
fn a_field_that_is_not_supported_yet_is_refused_with_its_path_and_source() {
    let config = |interface: Value| json!([entry("FromClass", &[], interface), entry("FromClaim", &["a"], json!({}))]);
    let error = run(&claim(json!([result("a", "nic-0")]), config(json!({"profile": "p"}))));
    let error = error.unwrap_err().to_string();
    for part in ["config[0].opaque.parameters.profile", "not supported yet", "from the class"] {
        assert!(error.contains(part), "{error}");
    }
    // Off asks for nothing.
    run(&claim(json!([result("a", "nic-0")]), config(json!({"interface": {"dhcp": false}, "ethtool": {}})))).unwrap();
}

#[test]
fn entries_of_others_and_without_parameters_are_nothing() {
    let other = json!({"source": "FromClaim", "opaque": {"driver": "gpu.example.com", "parameters": {"nonsense": [1]}}});
    let config =
        json!([other, {"source": "FromClaim"}, entry("FromClass", &[], json!(null)), entry("FromClaim", &[], json!({}))]);
    assert_eq!(mtus(&claim(json!([result("a", "nic-0")]), config)), [None]);
}

#[test]
fn a_claim_that_cannot_be_served_is_refused_with_its_name() {
    let good = claim(json!([result("a", "nic-0")]), json!([]));
    let change = |path: &str, value: Value| {
        let mut claim = good.clone();
        *claim.pointer_mut(path).unwrap() = value;
        claim
    };
    let pod = |name: &str| json!({"resource": "pods", "name": name, "uid": format!("uid-{name}")});
    let shares = |first: Value, second: Value| {
        let (mut a, mut b) = (result("a", "nic-0"), result("b", "nic-0"));
        (a["shareID"], b["shareID"]) = (first, second);
        json!([a, b])
    };
    let results = "/status/allocation/devices/results";
    let cases = [
        (change("/metadata/uid", "uid-2".into()), "was replaced: the API server has UID uid-2"),
        (change("/metadata/uid", Value::Null), "was replaced"),
        (change("/status/allocation", Value::Null), "is not allocated yet"),
        (change("/status", Value::Null), "is not allocated yet"),
        (change("/status/reservedFor", json!([pod("a"), pod("b")])), "is reserved for pods/a, pods/b; a NIC"),
        (change("/status/reservedFor", (0..256).map(|i| pod(&format!("p{i}"))).collect()), "pods/p3, 252 more; a NIC"),
        (change("/status/reservedFor/0/resource", "jobs".into()), "is reserved for jobs/pod-a"),
        (
            change("/status/reservedFor", json!([{"apiGroup": "x.y", "resource": "pods", "name": "z", "uid": "u"}])),
            "reserved for pods/z",
        ),
        (change("/status/reservedFor/0/uid", "../x".into()), "pod UID \"../x\""),
        (change("/status/reservedFor/0/name", "".into()), "pod name \"\""),
        (change(results, json!([result("a", "NIC_0")])), "device name \"NIC_0\""),
        (change(results, json!([result("", "nic-0")])), "request \"\""),
        (change(results, (0..33).map(|i| result("a", &format!("nic-{i}"))).collect()), "has 33 allocation results"),
        (change(results, json!([result("a", "nic-0"), result("b", "nic-0")])), "has device nic-0 allocated twice"),
        (change(results, shares("s".into(), "s".into())), "has device nic-0 allocated twice"),
        (change(results, shares("s".into(), Value::Null)), "has device nic-0 allocated twice"),
        (change(results, shares(Value::Null, "s".into())), "has device nic-0 allocated twice"),
    ];
    for (claim, words) in cases {
        let error = run(&claim).expect_err(words).to_string();
        assert!(error.contains(words) && error.contains("ns/nic (uid-1)"), "{words}: {error}");
    }
    assert!(run(&change(results, shares("s".into(), "t".into()))).is_ok(), "two shares");
    assert_eq!(run(&change("/status/reservedFor", json!([]))).unwrap().pod, None);
    assert_eq!(run(&change("/status/allocation/devices", Value::Null)).unwrap().devices, []);
}

#[test]
fn one_name_for_two_devices_is_refused() {
    let name = |source: &str, requests: &[&str]| entry(source, requests, json!({"interface": {"name": "rail0"}}));
    let two = json!([result("a", "nic-0"), result("b", "nic-1")]);
    let error = run(&claim(two.clone(), json!([name("FromClaim", &[])]))).unwrap_err().to_string();
    assert!(error.contains("interface.name \"rail0\" is configured for several devices (requests a, b)"), "{error}");
    assert!(run(&claim(two, json!([name("FromClaim", &["b"])]))).is_ok());
    let mut admin = result("b", "nic-1");
    admin["adminAccess"] = true.into();
    assert!(run(&claim(json!([result("a", "nic-0"), admin]), json!([name("FromClass", &[])]))).is_ok());
}

#[test]
fn faults_name_request_entry_field_and_source() {
    let config = json!([
        entry("FromClass", &[], json!({"interface": {"Mtu": 9000}})),
        entry("FromClaim", &["a"], json!({"routes": [{"destination": "10.0.0.0"}]})),
        entry("FromClaim", &["b"], json!("text")),
    ]);
    let error = run(&claim(json!([result("a", "nic-0")]), config)).unwrap_err().to_string();
    assert_eq!(
        error,
        "claim ns/nic (uid-1), request a: \
         status.allocation.devices.config[0].opaque.parameters.interface.Mtu: unknown field; did you mean mtu? (from the class); \
         status.allocation.devices.config[1].opaque.parameters.routes[0].destination: \"10.0.0.0\" is not a prefix (write 10.0.0.0/8, \
         fd00::/64, or 0.0.0.0/0 for a default route) (from the claim)"
    );
    let config = json!([entry("FromClaim", &[], json!("text"))]);
    let error = run(&claim(json!([result("a", "nic-0")]), config)).unwrap_err().to_string();
    assert!(error.contains("config[0].opaque.parameters: invalid type: string"), "{error}");
}

#[test]
fn what_is_wrong_only_together_is_said_so() {
    let config = json!([
        entry("FromClass", &[], json!({"interface": {"dhcp": true, "mtu": 5}})),
        entry("FromClaim", &[], json!({"interface": {"addresses": ["10.0.0.5/24"]}})),
    ]);
    let error = run(&claim(json!([result("a", "nic-0")]), config)).unwrap_err().to_string();
    assert!(
        error.contains("interface.dhcp: can't be true when interface.addresses names addresses; choose one (class and"),
        "{error}"
    );
    assert!(
        error.contains("config[0].opaque.parameters.interface.mtu: is 5; must be 68 to 2147483647 bytes (from the cl"),
        "{error}"
    );
}

#[test]
fn keys_that_stand_twice_are_found_in_the_text() {
    let twice = r#"{"interface": {"mtu": 1400, "mtu": 9000}, "ethtool": {"features": {"a": true, "a": true}}}"#;
    let text = |config: Value, spec: Value| {
        let mut claim = claim(json!([result("a", "nic-0"), result("b", "nic-1")]), config);
        claim["spec"]["devices"]["config"] = spec;
        claim.to_string().replace("\"TWICE\"", twice)
    };
    let bad = |requests: &[&str]| entry("FromClaim", requests, "TWICE".into());
    let own = run_text(&text(json!([bad(&["b"])]), json!([bad(&["b"])]))).unwrap_err().to_string();
    assert!(own.contains("request b"), "{own}");
    assert!(own.contains("status.allocation.devices.config[0].opaque.parameters.interface.mtu: stands twice"), "{own}");
    assert!(own.contains("opaque.parameters.ethtool.features.a: stands twice"), "{own}");
    assert!(!own.contains("spec.devices"), "{own}");

    let good = entry("FromClaim", &[], mtu(1400));
    let written = run_text(&text(json!([good]), json!([bad(&[])]))).unwrap_err().to_string();
    assert!(written.contains("spec.devices.config[0].opaque.parameters.interface.mtu: stands twice"), "{written}");

    let mut other = bad(&[]);
    other["opaque"]["driver"] = "gpu.example.com".into();
    assert!(run_text(&text(json!([other]), json!([other]))).is_ok(), "of another driver");
    assert!(run_text(&text(json!([bad(&["c"])]), json!([]))).is_ok(), "for no request of ours");
}

#[test]
fn an_error_stays_readable_whatever_is_wrong() {
    let many: serde_json::Map<String, Value> = (0..200).map(|i| (format!("{}{i}", "n".repeat(60)), true.into())).collect();
    let config = json!([entry("FromClaim", &[], json!({"ethtool": {"features": many}}))]);
    let error = run(&claim(json!([result("a", "nic-0")]), config)).unwrap_err().to_string();
    assert!(error.contains("and 184 more") && error.len() < 5000, "{} {error}", error.len());
}

proptest! {
    #[test]
    fn no_claim_makes_it_panic(
        requests in proptest::collection::vec("[ab/]{0,3}", 0..4),
        devices in proptest::collection::vec("[nic0-]{0,4}", 0..4),
        parameters in "(null|[0-9]|\\{\\}|\\[\\]|\\{\"routes\": \\[\\{\\}, null\\]\\}|\\{\"a\": 1, \"a\": 2\\})",
        share in proptest::option::of("[st]"),
    ) {
        let results: Vec<Value> = devices.iter().zip(requests.iter().cycle()).map(|(device, request)| {
            let mut one = result(request, device);
            one["shareID"] = share.clone().into();
            one
        }).collect();
        let names: Vec<&str> = requests.iter().map(String::as_str).collect();
        let raw = claim(json!(results), json!([entry("FromClass", &names, "P".into())])).to_string().replace("\"P\"", &parameters);
        let _ = run_text(&raw);
    }
}
