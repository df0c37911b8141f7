//! What the agent shows: health, metrics, status, devices.

use std::os::unix::fs::PermissionsExt;

use dranic::agent::status::Status;
use dranic_testbed::cluster::Cluster;
use dranic_testbed::fabric::links;
use dranic_testbed::kubelet::KubeletDouble;
use serde_json::Value;

use crate::node::{self, LIMIT, names, until};

#[tokio::test(flavor = "multi_thread")]
async fn readyz_says_what_is_missing_until_everything_is_there() {
    let Some(options) = node::options(2) else { return };
    let mut cluster = Cluster::new(options).unwrap();
    cluster.runtime.stop(true).await;
    // No kubelet in our folder, and no slices may be written.
    cluster.kubelet = KubeletDouble::start(&cluster.path("elsewhere")).unwrap();
    cluster.api.faults().forbid("POST /resourceslices");
    cluster.start_agent().unwrap();
    until(LIMIT, "the agent says why", || {
        node::get(&cluster, "/readyz").is_ok_and(|(_, text)| text.contains("forbidden") && text.contains("connect to"))
    })
    .await;
    let (status, text) = node::get(&cluster, "/readyz").unwrap();
    assert_eq!(status, 503, "{text}");
    let socket = cluster.path("nri.sock").display().to_string();
    node::assert_says(
        &text,
        &["kubelet has not registered", "NRI is not connected", &socket, "ResourceSlices are not published"],
    );
    assert_eq!(text.lines().count(), 3, "{text}");
    assert_eq!(node::get(&cluster, "/healthz").unwrap(), (200, "ok\n".to_owned()), "alive, though not ready");

    cluster.runtime.up().unwrap();
    cluster.kubelet = KubeletDouble::start(&cluster.path("kubelet")).unwrap();
    cluster.api.faults().allow("POST /resourceslices");
    cluster.wait_ready(std::time::Duration::from_secs(40)).await.unwrap();
    until(LIMIT, "ready", || node::get(&cluster, "/readyz").unwrap() == (200, "ok\n".to_owned())).await;
    assert_eq!(node::get(&cluster, "/nothing").unwrap().0, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_every_documented_name() {
    let Some((cluster, _)) = node::start(2).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    node::end(&cluster, &pod, &claims).await;
    let documented: Vec<&str> = include_str!("../../docs/operations.md")
        .lines()
        .filter(|line| line.starts_with("| `dranic_"))
        .flat_map(|line| line.split('|').nth(1).unwrap().split('`').skip(1).step_by(2))
        .collect();
    assert!(documented.len() >= 7, "{documented:?}");
    until(LIMIT, "the release is counted", || {
        node::get(&cluster, "/metrics")
            .unwrap()
            .1
            .lines()
            .any(|l| l.starts_with("dranic_release_seconds_count ") && !l.ends_with(" 0"))
    })
    .await;
    let (status, text) = node::get(&cluster, "/metrics").unwrap();
    assert_eq!(status, 200);
    for name in documented {
        let sample = |line: &str| line.starts_with(name) && !line[name.len()..].starts_with(|c: char| c.is_alphanumeric());
        assert!(text.lines().any(sample), "{name} is documented and not in:\n{text}");
    }
    let value = |start: &str| text.lines().find_map(|l| l.strip_prefix(start)).map(str::to_owned);
    assert_eq!(value("dranic_devices "), Some("2".to_owned()));
    assert_eq!(value("dranic_nri_connected "), Some("1".to_owned()));
    assert_eq!(value("dranic_prepare_seconds_count{outcome=\"ok\"} "), Some("1".to_owned()));
    assert_eq!(value("dranic_attach_seconds_count{outcome=\"ok\"} "), Some("1".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn status_has_a_table_and_stable_json() {
    let Some((mut cluster, _)) = node::start(2).await else { return };
    let socket = cluster.path("status.sock").display().to_string();
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    let ask = |cluster: &Cluster, more: &[&str]| node::dranic(cluster, &[&["status", "--status-socket", &socket], more].concat());
    node::assert_says(&node::stdout(&ask(&cluster, &[])), &["No claim is prepared", "registered", "containerd v2.4.2"]);

    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(0..2), &[]).unwrap()];
    cluster.prepare(&claims).await.unwrap();
    node::run(&cluster, &pod).await;
    let table = ask(&cluster, &[]);
    assert!(table.status.success());
    node::assert_says(&node::stdout(&table), &["CLAIM", "PHASE", "default/c", "nic0", "nic1", "attached", "move ", "configure "]);
    let json = node::stdout(&ask(&cluster, &["-o", "json"]));
    assert_eq!(serde_json::from_str::<Status>(&json).unwrap(), cluster.status().unwrap());
    let value: Value = serde_json::from_str(&json).unwrap();
    // Programs read these: a new name for one of them breaks them.
    for field in ["version", "node", "driver", "nriConnected", "nri", "kubelet", "publishedDevices", "publishError", "withheld"] {
        assert!(value.get(field).is_some(), "{field}: {json}");
    }
    let device = &value["claims"][0]["devices"][0];
    for field in ["device", "request", "hostLink", "podLink", "phase", "sinceUnixMs", "sandbox", "netns", "times", "lastError"] {
        assert!(device.get(field).is_some(), "{field}: {json}");
    }
    assert_eq!(device["phase"], "attached");

    cluster.kill_agent().unwrap();
    let nobody = ask(&cluster, &[]);
    assert_eq!(nobody.status.code(), Some(69), "{nobody:?}");
    node::assert_says(&node::stderr(&nobody), &["no agent answers", &socket, "--status-socket"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_reader_that_hangs_disturbs_nobody() {
    let Some((cluster, _)) = node::start(1).await else { return };
    let hanging: Vec<_> =
        (0..20).map(|_| std::os::unix::net::UnixStream::connect(cluster.path("status.sock")).unwrap()).collect();
    assert!(cluster.status().is_ok());
    drop(hanging);
    assert!(cluster.status().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_host_needs_is_listed_not_published_and_not_lent() {
    let Some((cluster, _)) = node::start(4).await else { return };
    let pod = cluster.pod("a").unwrap();
    let claims = [cluster.claim("c", &pod, &names(1..2), &[]).unwrap(), cluster.claim("d", &pod, &names(2..3), &[]).unwrap()];
    let published = node::published(&cluster);
    // nic2 is a port of the bridge that a default route leaves by, nic1 has one itself.
    let mut socket = cluster.node.socket().unwrap();
    links::create(&mut socket, "bridge", "br0").unwrap();
    let (bridge, port) = (links::find(&mut socket, "br0").unwrap().index, links::find(&mut socket, "nic2").unwrap().index);
    links::set_master(&mut socket, port, bridge).unwrap();
    links::add_address(&mut socket, bridge, "192.0.2.2/24".parse().unwrap()).unwrap();
    links::up(&mut socket, "br0").unwrap();
    let before = cluster.host_states().unwrap();
    node::add_default_route(&cluster, "br0", "192.0.2.1");
    // At once, before the inventory has seen it.
    let error = node::refusal(&cluster, &claims[1]).await;
    node::assert_says(&error, &["claim default/d", "nic2"]);
    let mut socket = cluster.node.socket().unwrap();
    let index = links::find(&mut socket, "nic1").unwrap().index;
    let mut second = dranic::netdev::Route::to("0.0.0.0/0".parse().unwrap());
    (second.gateway, second.table) = (Some("10.0.1.254".parse().unwrap()), 77);
    socket.request(dranic::netdev::route::add_request(index, &second, false), links::soon()).unwrap();

    until(LIMIT, "only two are published", || node::published(&cluster).len() == 2).await;
    for (name, attributes) in node::published(&cluster) {
        assert_eq!(attributes, published[&name]);
    }
    assert!(cluster.device("nic1").is_err() && cluster.device("nic2").is_err());
    for claim in &claims {
        let error = node::refusal(&cluster, claim).await;
        node::assert_says(&error, &[&format!("claim default/{}", claim.name), "device ", "dranic devices"]);
    }
    let differences = Cluster::differences(&before, &cluster.host_states().unwrap());
    assert!(differences.iter().all(|(nic, d)| nic == "nic1" && d.what.contains("route")), "{differences:#?}");

    let table = node::stdout(&node::dranic(&cluster, &["devices", "--offer-veth"]));
    node::assert_says(
        &table,
        &["DEVICE", "nic0", "nic3", "9000", "NOT OFFERED", "nic1", "table 77", "br0", "port of br0", "loopback"],
    );
    let json: Value =
        serde_json::from_str(&node::stdout(&node::dranic(&cluster, &["devices", "--offer-veth", "-o", "json"]))).unwrap();
    let offered: Vec<&str> = json["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!(offered, node::published(&cluster).keys().map(String::as_str).collect::<Vec<_>>(), "the same as published");
    assert_eq!(json["devices"][0]["attributes"]["mtu"], 9000);
    let withheld: Vec<&str> = json["withheld"].as_array().unwrap().iter().map(|w| w["link"].as_str().unwrap()).collect();
    assert_eq!(withheld, ["br0", "lo", "nic1", "nic2"]);
    assert_eq!(cluster.status().unwrap().withheld.iter().map(|w| w.link.as_str()).collect::<Vec<_>>(), withheld);
    // Without veth there is nothing.
    let plain = node::dranic(&cluster, &["devices"]);
    assert!(plain.status.success());
    node::assert_says(&node::stdout(&plain), &["would publish no device", "nic0"]);
}
