//! Opaque parameters of claims and classes that are wrong.

use dranic_testbed::apiserver::ClaimConfig;
use dranic_testbed::cluster::Cluster;

use crate::node::{self, Before, DRIVER, assert_says, names, refusal};

/// Each of `cases` (parameters, words of the refusal) is refused in prepare, with the claim and the path of its fault.
async fn refused(cases: &[(&str, &[&str])]) {
    let Some((cluster, before)) = node::start(1).await else { return };
    for (number, (text, words)) in cases.iter().enumerate() {
        let config = ClaimConfig::from_claim(DRIVER, text);
        let error = refuse(&cluster, &format!("c{number}"), &[config]).await;
        assert_says(&error, &["request r0", "status.allocation.devices.config[0].opaque.parameters", "from the claim"]);
        assert_says(&error, words);
        assert!(error.len() < 4096, "{} bytes of error", error.len());
    }
    untouched(&cluster, &before).await;
}

async fn refuse(cluster: &Cluster, name: &str, configs: &[ClaimConfig]) -> String {
    let pod = cluster.pod(name).unwrap();
    let claim = cluster.claim(name, &pod, &names(0..1), configs).unwrap();
    let error = refusal(cluster, &claim).await;
    assert_says(&error, &[&format!("claim default/{name}")]);
    error
}

async fn untouched(cluster: &Cluster, before: &Before) {
    node::assert_nothing_done(cluster, before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_keys() {
    refused(&[
        (r#"{"interfaces": {}}"#, &["parameters.interfaces: unknown field", "interface"]),
        (r#"{"interface": {"mtuu": 1500}}"#, &["parameters.interface.mtuu: unknown field", "did you mean mtu?"]),
        (
            r#"{"routes": [{"destination": "10.0.0.0/8", "via": "10.0.0.1"}]}"#,
            &["parameters.routes[0].via", "did you mean gateway?"],
        ),
        (r#"{"apiVersion": "v1", "kind": "NetworkConfig"}"#, &["parameters.apiVersion", "no apiVersion"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_in_the_wrong_case() {
    refused(&[
        (r#"{"Interface": {"mtu": 1500}}"#, &["parameters.Interface: unknown field", "did you mean interface?"]),
        (r#"{"interface": {"MTU": 1500}}"#, &["parameters.interface.MTU: unknown field", "did you mean mtu?"]),
        (
            r#"{"interface": {"hardwareaddr": "02:00:00:00:00:01"}}"#,
            &["parameters.interface.hardwareaddr", "did you mean hardwareAddr?"],
        ),
        (r#"{"rules": [{"Table": 5}]}"#, &["parameters.rules[0].Table", "did you mean table?"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_stand_twice() {
    refused(&[
        (r#"{"interface": {"mtu": 1500, "mtu": 9000}}"#, &["parameters.interface.mtu: stands twice", "remove one"]),
        (r#"{"interface": {"name": "a"}, "interface": {"name": "b"}}"#, &["parameters.interface: stands twice"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_are_wrong_or_contradict_each_other() {
    refused(&[
        (r#"{"interface": {"name": "a/b"}}"#, &["parameters.interface.name", "a/b"]),
        (r#"{"interface": {"name": "abcdefghijklmnop"}}"#, &["parameters.interface.name", "15"]),
        (r#"{"interface": {"mtu": "9000"}}"#, &["parameters.interface.mtu", "string"]),
        (r#"{"interface": {"mtu": -1}}"#, &["parameters.interface.mtu"]),
        (r#"{"interface": {"addresses": ["10.0.0.5"]}}"#, &["parameters.interface.addresses[0]", "10.0.0.5"]),
        (r#"{"interface": {"addresses": ["10.0.0.5/24"], "dhcp": true}}"#, &["interface", "dhcp", "addresses"]),
        (r#"{"routes": [{"gateway": "10.0.0.1"}]}"#, &["parameters.routes[0].destination"]),
        (r#"{"neighbors": [{"destination": "10.0.0.1"}]}"#, &["parameters.neighbors[0].hardwareAddr"]),
        (r#"[]"#, &["parameters", "object"]),
        (r#""text""#, &["parameters"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_that_are_huge_or_deep() {
    let huge = format!(r#"{{"interface": {{"name": "{}"}}}}"#, "x".repeat(200_000));
    let deep = format!(r#"{{"interface": {}1{}}}"#, r#"{"a":"#.repeat(60), "}".repeat(60));
    refused(&[(&huge, &["parameters", "at most 65536"]), (&deep, &["parameters", "nested"])]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_that_are_not_supported_yet() {
    let Some((cluster, before)) = node::start(1).await else { return };
    for (number, (text, field)) in [(r#"{"profile": "rail-a"}"#, "profile")].into_iter().enumerate() {
        let error = refuse(&cluster, &format!("c{number}"), &[ClaimConfig::from_claim(DRIVER, text)]).await;
        assert_says(&error, &["request r0", field, "not supported yet"]);
    }
    untouched(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_the_class_or_of_the_combination_says_so() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let class = |text: &str| ClaimConfig::from_class(DRIVER, text);
    let own = |text: &str| ClaimConfig::from_claim(DRIVER, text);
    let error = refuse(&cluster, "c1", &[class(r#"{"interface": {"mtu": 1}}"#)]).await;
    assert_says(&error, &["config[0].opaque.parameters.interface.mtu", "from the class"]);
    let both = [class(r#"{"interface": {"dhcp": true}}"#), own(r#"{"interface": {"addresses": ["10.0.0.5/24"]}}"#)];
    assert_says(&refuse(&cluster, "c2", &both).await, &["dhcp", "class and claim combined"]);
    // Two faults are told at once.
    let error = refuse(&cluster, "c3", &[own(r#"{"interface": {"name": "a/b"}}"#), own(r#"{"nonsense": 1}"#)]).await;
    assert_says(&error, &["config[0].opaque.parameters.interface.name", "config[1].opaque.parameters.nonsense"]);
    untouched(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_mtu_that_the_device_refuses() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let device = cluster.device("nic0").unwrap();
    let error = refuse(&cluster, "c", &[ClaimConfig::from_claim(DRIVER, r#"{"interface": {"mtu": 70000}}"#)]).await;
    assert_says(&error, &["request r0", &device, "interface.mtu 70000 is outside", "65535"]);
    untouched(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_name_for_two_devices() {
    let Some((cluster, before)) = node::start(3).await else { return };
    let pod = cluster.pod("a").unwrap();
    let config = ClaimConfig::from_claim(DRIVER, r#"{"interface": {"name": "net1"}}"#);
    let two = cluster.claim("two", &pod, &names(0..2), std::slice::from_ref(&config)).unwrap();
    let error = refusal(&cluster, &two).await;
    assert_says(&error, &["claim default/two", "interface.name", "net1", "r0, r1", "name a request in each config entry"]);
    // In two claims of one pod.
    let first = [cluster.claim("first", &pod, &names(0..1), std::slice::from_ref(&config)).unwrap()];
    cluster.prepare(&first).await.unwrap();
    let second = cluster.claim("second", &pod, &names(1..2), &[config]).unwrap();
    let error = refusal(&cluster, &second).await;
    assert_says(&error, &["claim default/second", "net1 in the pod", "set interface.name for one of them"]);
    cluster.unprepare(&first).await.unwrap();
    untouched(&cluster, &before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_whose_gateway_can_not_be_reached() {
    let Some((cluster, before)) = node::start(1).await else { return };
    let text =
        r#"{"interface": {"addresses": ["10.9.0.5/24"]}, "routes": [{"destination": "10.0.0.0/8", "gateway": "192.0.2.1"}]}"#;
    let error = refuse(&cluster, "c", &[ClaimConfig::from_claim(DRIVER, text)]).await;
    assert_says(&error, &["routes[0]", "192.0.2.1"]);
    untouched(&cluster, &before).await;
}
