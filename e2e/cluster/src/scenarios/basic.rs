//! The main path and what a claim can say.

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::json;

use crate::context::Context;
use crate::inspect;
use crate::objects::{CLASS, DRIVER, From, by_name, class, config, devices, pod, request, request_link};

pub(super) async fn one_nic(c: Context) -> Result<()> {
    c.template("one", &devices(vec![request("nic")], vec![])).await?;
    c.pod(&pod("one", Some(c.node(0)), &[From::Template("one")])).await?;
    let running = c.running("one").await?;
    let nic = running.nic().await?;
    let Some(rail) = nic.ifname.strip_prefix("nic") else { bail!("the pod's NIC is called {}", nic.ifname) };
    ensure!(nic.mtu == 9000 && nic.is_up() && nic.addresses() == [format!("10.20.{rail}.1/24")], "{nic:?}");
    let host = inspect::links(c.cluster.init_pid(c.node(0))?).await?;
    ensure!(host.iter().all(|link| link.ifname != nic.ifname), "{} is on the node as well", nic.ifname);
    // The other node's NIC on the same rail.
    running.ping(&nic.ifname, &format!("10.20.{rail}.2")).await?;
    c.delete_pod("one").await
}

pub(super) async fn eight_nics(c: Context) -> Result<()> {
    let all = json!({"name": "nics", "exactly": {"deviceClassName": CLASS, "count": 8}});
    c.template("eight", &devices(vec![all], vec![])).await?;
    c.pod(&pod("eight", None, &[From::Template("eight")])).await?;
    let running = c.running("eight").await?;
    let mut names: Vec<_> = running.nics().await?.into_iter().map(|nic| nic.ifname).collect();
    names.sort();
    ensure!(names == (0..8).map(|rail| format!("nic{rail}")).collect::<Vec<_>>(), "{names:?}");
    let other = if running.node() == c.node(0) { 2 } else { 1 };
    for rail in 0..8 {
        running.ping(&format!("nic{rail}"), &format!("10.20.{rail}.{other}")).await?;
    }
    Ok(())
}

pub(super) async fn two_claims(c: Context) -> Result<()> {
    for (name, address) in [("left", "10.70.1.5/24"), ("right", "10.70.2.5/24")] {
        let parameters = json!({"interface": {"name": name, "addresses": [address]}});
        c.template(name, &devices(vec![request("nic")], vec![config(&[], parameters)])).await?;
    }
    c.pod(&pod("two", None, &[From::Template("left"), From::Template("right")])).await?;
    let running = c.running("two").await?;
    let mut nics: Vec<_> = running.nics().await?.into_iter().map(|nic| (nic.addresses(), nic.ifname)).collect();
    nics.sort();
    let expected = [(vec!["10.70.1.5/24".to_owned()], "left".to_owned()), (vec!["10.70.2.5/24".to_owned()], "right".to_owned())];
    ensure!(nics == expected, "{nics:?}");
    Ok(())
}

pub(super) async fn class_and_claim(c: Context) -> Result<()> {
    let classes: Api<DeviceClass> = Api::all(c.cluster.client.clone());
    let name = "e2e-configured";
    let mut value = class();
    value["metadata"]["name"] = json!(name);
    let ours = json!({"interface": {"name": "class0", "mtu": 1500, "addresses": ["10.71.0.1/24"]},
                      "routes": [{"destination": "10.72.0.0/16", "gateway": "10.71.0.254"}]});
    value["spec"]["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": ours}}]);
    classes.delete(name, &DeleteParams::default()).await.ok();
    classes.create(&PostParams::default(), &serde_json::from_value(value)?).await?;

    let request = json!({"name": "nic", "exactly": {"deviceClassName": name}});
    let theirs = json!({"interface": {"mtu": 4000, "addresses": ["10.71.0.9/24"]}});
    c.template("mixed", &devices(vec![request], vec![config(&["nic"], theirs)])).await?;
    c.pod(&pod("mixed", None, &[From::Template("mixed")])).await?;
    let running = c.running("mixed").await?;
    let nic = running.nic().await?;
    ensure!(nic.ifname == "class0" && nic.mtu == 4000 && nic.addresses() == ["10.71.0.9/24"], "{nic:?}");
    let routes = running.run(&["ip", "route", "show", "dev", "class0"]).await?;
    ensure!(routes.contains("10.72.0.0/16 via 10.71.0.254"), "{routes}");
    classes.delete(name, &DeleteParams::default()).await?;
    Ok(())
}

pub(super) async fn both_nodes(c: Context) -> Result<()> {
    for index in [0, 1] {
        let name = format!("pod{index}");
        let requests = vec![request_link("a", "nic3"), request_link("b", "nic4")];
        let interface =
            |rail: &str, net: u8| json!({"interface": {"name": rail, "addresses": [format!("10.73.{net}.{}/24", index + 1)]}});
        let spec = devices(requests, vec![config(&["a"], interface("rail-a", 3)), config(&["b"], interface("rail-b", 4))]);
        c.template(&name, &spec).await?;
        c.pod(&pod(&name, Some(c.node(index)), &[From::Template(&name)])).await?;
    }
    let both = [c.running("pod0").await?, c.running("pod1").await?];
    for (running, other) in both.iter().zip([2, 1]) {
        running.ping("rail-a", &format!("10.73.3.{other}")).await?;
        running.ping("rail-b", &format!("10.73.4.{other}")).await?;
        // A whole jumbo frame: 9000 less the IPv4 (20) and ICMP (8) headers.
        running.run(&["busybox", "ping", "-c", "1", "-W", "2", "-s", "8972", &format!("10.73.3.{other}")]).await?;
    }
    Ok(())
}

pub(super) async fn first_available(c: Context) -> Result<()> {
    let list = json!({"name": "nic", "firstAvailable": [
        {"name": "none", "deviceClassName": CLASS, "selectors": [by_name("nic99")]},
        {"name": "some", "deviceClassName": CLASS},
    ]});
    let configs = vec![
        config(&["nic"], json!({"interface": {"name": "prio0", "mtu": 3000}})),
        config(&["nic/none"], json!({"interface": {"mtu": 2000}})),
    ];
    c.template("prio", &devices(vec![list], configs)).await?;
    c.pod(&pod("prio", None, &[From::Template("prio")])).await?;
    let nic = c.running("prio").await?.nic().await?;
    ensure!(nic.ifname == "prio0" && nic.mtu == 3000, "{nic:?}");
    Ok(())
}

/// Admin access allocates a device that somebody has already, to look at it: it stays where it is, and the pod starts without it.
pub(super) async fn admin_access(c: Context) -> Result<()> {
    c.claim("holder", &devices(vec![request_link("nic", "nic2")], vec![])).await?;
    c.pod(&pod("holder", Some(c.node(0)), &[From::Claim("holder")])).await?;
    let holder = c.running("holder").await?;
    let mut request = request_link("nic", "nic2");
    request["exactly"]["adminAccess"] = json!(true);
    c.claim("admin", &devices(vec![request], vec![])).await?;
    c.pod(&pod("admin", Some(c.node(0)), &[From::Claim("admin")])).await?;
    let admin = c.running("admin").await?;
    ensure!(admin.nics().await?.is_empty(), "the admin's pod has {:?}", admin.nics().await?);
    c.delete_pod("admin").await?;
    let nic = holder.nic().await.context("the holder's NIC")?;
    ensure!(nic.ifname == "nic2" && nic.is_up(), "{nic:?}");
    Ok(())
}
