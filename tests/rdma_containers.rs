//! RDMA devices in containers of a real containerd and runc, in the virtual machine (`e2e/vm`, cgroup v2): character devices, access to
//! them, limits, metadata. The RDMA devices are `rxe` over the node's veth links.

#[allow(dead_code, reason = "shared with another test")]
#[path = "containerd_agent/rig.rs"]
mod rig;

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dranic::netns::Netns;
use dranic::rdma::{NetnsMode, RdmaSocket};
use dranic_testbed::containerd::{Options, PodSpec};
use dranic_testbed::kubelet::Claim;
use rig::{Rig, config, nics, on_node};
use serde_json::Value;

/// How long devices may take to be found, and a claim to be prepared.
const SOON: Duration = Duration::from_secs(40);
/// A program of Debian's iproute2.
const RDMA: &str = "/usr/bin/rdma";

/// Whether this is the guest, with RDMA devices in this mode; else a line that says so.
fn is_guest(mode: NetnsMode) -> bool {
    let is_guest = std::fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains("vm.control="));
    let socket = is_guest.then(RdmaSocket::open).and_then(|socket| socket.ok().flatten());
    let is = socket.and_then(|mut socket| socket.netns_mode(Instant::now() + SOON).ok());
    if is != Some(mode) {
        println!("skipped: needs RDMA devices in {mode} mode that a test may use (make e2e-vm)");
    }
    is == Some(mode)
}

/// A slow machine.
fn patient() -> Options {
    Options { nri_request_timeout: Some(Duration::from_secs(30)), ..Options::default() }
}

/// An RDMA device over each NIC of the node; in exclusive mode it is moved there.
fn make_devices(rig: &Rig, count: u32, mode: NetnsMode) -> Result<()> {
    for n in 0..count {
        let device = format!("ctr{n}");
        let (end, link) = (Instant::now() + SOON, format!("nic{n}"));
        loop {
            let mut command = rig.cluster.containerd.command(RDMA);
            let out = command.args(["link", "add", &device, "type", "rxe", "netdev", &link]).output()?;
            if out.status.success() {
                break;
            }
            // The last test's may have to go first (`ENFILE`: the name is taken, in whichever namespace).
            ensure!(Instant::now() < end, "rdma link add: {}", String::from_utf8_lossy(&out.stderr));
            std::thread::sleep(Duration::from_millis(200));
        }
        if mode == NetnsMode::Exclusive {
            to_node(&rig.cluster.containerd.netns()?, &device)?;
        }
    }
    Ok(())
}

/// The kernel makes them in the first namespace, whoever asks.
fn to_node(node: &Netns, name: &str) -> Result<()> {
    let end = Instant::now() + SOON;
    let mut socket = RdmaSocket::open()?.context("no RDMA")?;
    if let Some(device) = socket.devices(end)?.into_iter().find(|device| device.name == name) {
        socket.move_to(&Netns::current()?, device.index, node.as_fd(), end)?;
    }
    Ok(())
}

/// A prepared claim for NICs of the pod, as soon as their RDMA devices are found.
async fn prepared(rig: &Rig, pod: &PodSpec, nics: &[String], parameters: &[&str]) -> Result<Claim> {
    let configs: Vec<_> = parameters.iter().zip(0..).map(|(text, n)| config(n, text)).collect();
    let claim = rig.cluster.claim_for(&pod.name, (&pod.name, &pod.uid), nics, &configs)?;
    let end = Instant::now() + SOON;
    loop {
        match rig.cluster.prepare(std::slice::from_ref(&claim)).await {
            Err(error) if Instant::now() >= end => return Err(error.context("prepare")),
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
            Ok(_) => return Ok(claim),
        }
    }
}

/// What a container sees, by one command: each takes seconds in the guest.
struct Seen {
    /// Of each file of `/dev/infiniband`: its name, then type, mode, uid, gid, numbers (hexadecimal). All of them could be opened.
    files: Vec<(String, String)>,
    /// `rdma.max` of its cgroup.
    limits: String,
    /// The metadata of the only device of each request.
    devices: Vec<Value>,
}

/// `requests` of the claim have metadata: `r0` and so on.
async fn look(rig: &Rig, container: &str, claim: &Claim, requests: u32) -> Result<Seen> {
    let folder = format!("/var/run/kubernetes.io/dra-device-attributes/resourceclaims/{}", claim.name);
    let mut script = "cd /dev/infiniband; stat -c '%n %F %a %u %g %t:%T' *; for f in *; do exec 3<>$f; done; echo ==\n\
        cat /sys/fs/cgroup/rdma.max\n"
        .to_owned();
    for n in 0..requests {
        script += &format!("echo ==; cat {folder}/r{n}/{}-metadata.json\n", rig::DRIVER);
    }
    let text = rig.exec(container, &format!("set -e\n{script}")).await?;
    let mut parts = text.split("==\n");
    let mut part = || parts.next().with_context(|| format!("too little: {text}"));
    let files = part()?.lines().filter_map(|line| line.split_once(' '));
    let files = files.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect();
    let limits = part()?.to_owned();
    let device = |text: &str| -> Result<Value> {
        let object: Value = serde_json::Deserializer::from_str(text).into_iter().next().context("an empty file")??;
        Ok(object["requests"][0]["devices"][0].clone())
    };
    let devices = (0..requests).map(|_| device(part()?)).collect::<Result<_>>()?;
    Ok(Seen { files, limits, devices })
}

async fn end(rig: &Rig, sandbox: &str, claim: &Claim) -> Result<()> {
    rig.stop(sandbox).await?;
    rig.unprepare(claim).await
}

const FIRST: &str = r#"{"rdma": {"enabled": true, "limits": {"hcaHandles": 7, "hcaObjects": 900}, "waitForPort": false}}"#;
const SECOND: &str = r#"{"rdma": {"enabled": true, "limits": {"hcaHandles": 8}, "waitForPort": false}}"#;
const PLAIN: &str = r#"{"rdma": {"enabled": true, "waitForPort": false}}"#;

async fn one_pod_with_two(rig: &Rig) -> Result<()> {
    let pod = PodSpec::new("two", "uid-two");
    let claim = prepared(rig, &pod, &nics(0..2), &[FIRST, SECOND]).await?;
    let (sandbox, _) = rig.run(&pod).await?;
    let main = rig.start_with(&sandbox, &pod, "main", &claim)?.started().await?;
    let seen = look(rig, &main, &claim, 2).await?;
    let names: Vec<&str> = seen.files.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(names.len() == 3 && names[0] == "rdma_cm" && names[1..].iter().all(|f| f.starts_with("uverbs")), "{names:?}");
    for (name, there) in &seen.files {
        let host = std::fs::metadata(format!("/dev/infiniband/{name}"))?;
        let (major, minor) = (nix::sys::stat::major(host.rdev()), nix::sys::stat::minor(host.rdev()));
        let (mode, uid, gid) = (host.mode() & 0o777, host.uid(), host.gid());
        assert_eq!(there, &format!("character special file {mode:o} {uid} {gid} {major:x}:{minor:x}"), "{name}");
    }
    for line in ["ctr0 hca_handle=7 hca_object=900", "ctr1 hca_handle=8 hca_object=max"] {
        ensure!(seen.limits.lines().any(|l| l.trim() == line), "no {line:?} in {}", seen.limits);
    }
    for (n, device) in seen.devices.iter().enumerate() {
        assert_eq!(device["attributes"]["rdmaDevice"]["string"], format!("ctr{n}"), "{device:#}");
        assert_eq!(device["networkData"]["interfaceName"], format!("nic{n}"), "{device:#}");
    }
    // A container of the same pod that names no claim.
    let other = rig.start(&sandbox, &pod, "other").await?;
    let script = "test ! -e /dev/infiniband && test ! -e /var/run/kubernetes.io && cat /sys/fs/cgroup/rdma.max";
    ensure!(!rig.exec(&other, script).await?.contains("hca_handle=7"), "limits of another container");
    without_limits(Path::new("/sys/fs/cgroup"))?;
    end(rig, &sandbox, &claim).await
}

/// Takes all limits off. The kernel (6.12) keeps those of a cgroup that ends in a list of the RDMA device, and writes into what it has
/// freed when the device goes (`rdmacg_css_offline`, `rdmacg_unregister_device`): the guest would not outlive the test.
fn without_limits(folder: &Path) -> Result<()> {
    let file = folder.join("rdma.max");
    let limited = std::fs::read_to_string(&file).unwrap_or_default();
    for device in limited.lines().filter_map(|line| line.split_whitespace().next()) {
        std::fs::write(&file, format!("{device} hca_handle=max hca_object=max"))?;
    }
    let below = std::fs::read_dir(folder)?.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    below.map(|entry| entry.path()).try_for_each(|path| without_limits(&path))
}

/// Each pod has its own device; the other's can't be opened, however it is called.
async fn two_pods_apart(rig: &Rig) -> Result<()> {
    let pods = [PodSpec::new("a", "uid-a"), PodSpec::new("b", "uid-b")];
    let mut all = Vec::new();
    for (n, pod) in (0..).zip(&pods) {
        let claim = prepared(rig, pod, &nics(n..n + 1), &[PLAIN]).await?;
        let (sandbox, _) = rig.run(pod).await?;
        let container = rig.start_with(&sandbox, pod, "main", &claim)?.started().await?;
        let verbs = rig.exec(&container, "cd /dev/infiniband; stat -c '%n %t %T' uverbs*").await?;
        let verbs: Vec<&str> = verbs.split_whitespace().collect();
        ensure!(verbs.len() == 3, "it has more than its own: {verbs:?}");
        let numbers: Vec<u32> = verbs[1..].iter().map(|n| u32::from_str_radix(n, 16)).collect::<Result<_, _>>()?;
        all.push((claim, sandbox, container, verbs[0].to_owned(), numbers));
    }
    assert_ne!(all[0].3, all[1].3, "each its own");
    for (own, other) in [(0, 1), (1, 0)] {
        let (container, numbers) = (&all[own].2, &all[other].4);
        let script = format!("mknod /tmp/theirs c {} {} && echo made && exec 3<>/tmp/theirs", numbers[0], numbers[1]);
        let refused = rig.exec(container, &script).await.err().context("it could be opened")?.to_string();
        ensure!(refused.contains("made") && refused.contains("not permitted"), "{refused}");
    }
    for (claim, sandbox, ..) in &all {
        end(rig, sandbox, claim).await?;
    }
    Ok(())
}

/// A container that waits for the port knows its GID index from its first moment on.
async fn the_gid_index_is_told(rig: &Rig) -> Result<()> {
    let pod = PodSpec::new("d", "uid-d");
    let claim = prepared(rig, &pod, &nics(0..1), &[r#"{"rdma": {"enabled": true}}"#]).await?;
    let (sandbox, _) = rig.run(&pod).await?;
    let container = rig.start_with(&sandbox, &pod, "main", &claim)?.started().await?;
    let device = &look(rig, &container, &claim, 1).await?.devices[0];
    let attributes = &device["attributes"];
    let index = attributes["rdmaGidIndex"]["int"].as_u64().with_context(|| format!("no index: {device:#}"))?;
    let address = device["networkData"]["ips"][0].as_str().context("no address")?;
    assert_eq!(attributes[format!("rdmaGid{index}")]["string"].as_str(), address.split('/').next(), "{device:#}");
    end(rig, &sandbox, &claim).await
}

/// Prepare refuses what containers could not be given, and leaves nothing prepared.
async fn a_missing_file(rig: &Rig) -> Result<()> {
    let pod = PodSpec::new("c", "uid-c");
    let claim = rig.cluster.claim_for("c", (&pod.name, &pod.uid), &nics(0..1), &[config(0, PLAIN)])?;
    let (file, aside) = ("/dev/infiniband/rdma_cm", "/dev/infiniband/aside");
    std::fs::rename(file, aside)?;
    let refused = rig.cluster.prepare(std::slice::from_ref(&claim)).await;
    std::fs::rename(aside, file)?;
    let refused = format!("{:#}", refused.err().context("it was prepared")?);
    ensure!(refused.contains("/dev/infiniband/rdma_cm can't be looked at"), "{refused}");
    ensure!(rig.cluster.status()?.claims.is_empty(), "it is not prepared");
    rig.check_host()
}

/// One node for all: its containerd takes half a minute to start in the guest.
async fn on_guest(mode: NetnsMode) -> Result<()> {
    if !is_guest(mode) {
        return Ok(());
    }
    on_node(2, patient(), async |rig| {
        make_devices(rig, 2, mode)?;
        one_pod_with_two(rig).await?;
        two_pods_apart(rig).await?;
        the_gid_index_is_told(rig).await?;
        a_missing_file(rig).await
    })
    .await
}

#[tokio::test]
async fn containers_get_exactly_what_is_of_their_devices_in_shared_mode() -> Result<()> {
    on_guest(NetnsMode::Shared).await
}

#[tokio::test]
async fn containers_get_exactly_what_is_of_their_devices_in_exclusive_mode() -> Result<()> {
    on_guest(NetnsMode::Exclusive).await
}
