//! Against a real containerd with runc and CNI plugins (from Debian's packages), in a scratch node.
//!
//! The agent in it: `tests/containerd_agent.rs`.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use dranic_testbed::containerd::{Containerd, Kit, NoContainerd, Options, PodSpec};

/// A containerd, or the reason (already printed) why there is none on this machine.
async fn start(options: &Options) -> anyhow::Result<Option<Containerd>> {
    let kit = match Kit::get() {
        Ok(kit) => kit,
        Err(NoContainerd::Skip(reason)) => {
            println!("skipped: {reason}");
            return Ok(None);
        }
        Err(NoContainerd::Failed(error)) => return Err(error),
    };
    let begin = Instant::now();
    let containerd = Containerd::start(&kit, options).await?;
    println!("containerd {} is ready after {:?}", containerd.version().await?.runtime_version, begin.elapsed());
    Ok(Some(containerd))
}

/// Starts a pod with one running container; returns the ids of both.
async fn run_pod(containerd: &Containerd, pod: &PodSpec) -> anyhow::Result<(String, String)> {
    let sandbox = containerd.run_pod_sandbox(pod).await.with_context(|| format!("RunPodSandbox {}", pod.name))?;
    let container = containerd.create_container(&sandbox, pod, "main", &[]).await.context("CreateContainer")?;
    containerd.start_container(&container).await.context("StartContainer")?;
    Ok((sandbox, container))
}

/// What a program in a container says; an exit code other than 0 is an error.
async fn exec(containerd: &Containerd, container: &str, command: &[&str]) -> anyhow::Result<String> {
    let done = containerd.exec_sync(container, command).await?;
    ensure!(done.code == 0, "{command:?}: {done:?}");
    Ok(done.stdout)
}

/// What a program in the node says.
fn in_node(containerd: &Containerd, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = containerd.command(program).args(arguments).output()?;
    ensure!(output.status.success(), "{program} {arguments:?}: {output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Ends the node and looks whether anything stays behind: processes, mounts, cgroups, files.
fn end_and_look(containerd: Containerd) -> anyhow::Result<()> {
    let processes = containerd.processes();
    ensure!(processes.len() >= 2, "the node should run at least its process 1 and containerd: {processes:?}");
    let (scratch, cgroup) = (containerd.scratch().to_owned(), containerd.cgroup());
    let groups = || find_cgroups(cgroup.trim_start_matches('/'));

    drop(containerd);

    for pid in processes {
        ensure!(!Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is still there");
    }
    ensure!(groups().is_empty(), "cgroups are still there: {:?}", groups());
    ensure!(!scratch.exists(), "{} is still there", scratch.display());
    let mark = scratch.to_str().context("not UTF-8")?;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        // Of other processes, some may end while we look.
        let mounts = std::fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        ensure!(!mounts.contains(mark) && !command.contains(mark), "{}: mounts or process left", entry.path().display());
    }
    Ok(())
}

/// Every folder `name` directly under a cgroup hierarchy.
fn find_cgroups(name: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    hierarchies.chain([root.to_owned()]).map(|hierarchy| hierarchy.join(name)).filter(|group| group.exists()).collect()
}

#[tokio::test]
async fn a_pod_comes_and_goes() -> anyhow::Result<()> {
    let begin = Instant::now();
    let Some(containerd) = start(&Options::default()).await? else { return Ok(()) };
    let pod = PodSpec::new("web", "0b7c2f5e-5a52-4f3a-9a44-6d5a4a3f9f01");
    let (sandbox, container) = run_pod(&containerd, &pod).await?;
    println!("first pod runs after {:?}", begin.elapsed());

    let ip = containerd.pod_status(&sandbox).await?.network.context("no network")?.ip;
    let addresses = exec(&containerd, &container, &["ip", "addr", "show", "dev", "eth0"]).await?;
    assert!(addresses.contains(&format!("inet {ip}/24")), "{ip} is not in {addresses}");
    assert_eq!(containerd.exec_sync(&container, &["sh", "-c", "echo no >&2; exit 3"]).await?.code, 3);
    assert!(!find_cgroups(containerd.cgroup().trim_start_matches('/')).is_empty(), "the pod is in our cgroup");

    // The node sees the pod's end of things, the host does not.
    let netns = containerd.pod_netns(&sandbox).await?;
    in_node(&containerd, "/bin/sh", &["-c", &format!("test -e {netns} && test -e /sys/class/net/pods0")])?;
    assert!(!Path::new(&netns).exists() && !Path::new("/sys/class/net/pods0").exists());
    assert!(in_node(&containerd, "/bin/ls", &["/sys/class/net"])?.lines().all(|link| !link.starts_with("en")));
    UnixStream::connect(containerd.nri_socket()).context("NRI socket")?;

    containerd.stop_container(&container).await?;
    containerd.remove_container(&container).await?;
    containerd.stop_pod_sandbox(&sandbox).await?;
    in_node(&containerd, "/bin/sh", &["-c", &format!("test ! -e {netns}")])?;
    containerd.remove_pod_sandbox(&sandbox).await?;
    assert!(containerd.list_pods().await?.is_empty() && containerd.list_containers().await?.is_empty());
    end_and_look(containerd)
}

#[tokio::test]
async fn pods_outlive_containerd_but_not_the_node() -> anyhow::Result<()> {
    let Some(mut containerd) = start(&Options::default()).await? else { return Ok(()) };
    let pod = PodSpec { host_network: true, ..PodSpec::new("host", "0b7c2f5e-5a52-4f3a-9a44-6d5a4a3f9f02") };
    let (_, container) = run_pod(&containerd, &pod).await?;
    let node_links = in_node(&containerd, "/bin/ls", &["/sys/class/net"])?;
    assert_eq!(exec(&containerd, &container, &["ls", "/sys/class/net"]).await?, node_links, "host network");

    containerd.kill()?;
    assert!(containerd.version().await.is_err());
    containerd.restart().await?;
    assert_eq!(exec(&containerd, &container, &["hostname"]).await?, in_node(&containerd, "/bin/hostname", &[])?);
    end_and_look(containerd)
}

#[tokio::test]
async fn a_program_in_the_node_can_be_ended() -> anyhow::Result<()> {
    let Some(containerd) = start(&Options::default()).await? else { return Ok(()) };
    let loops = "trap 'exit 7' TERM; echo up; while :; do sleep 0.05; done";
    let mut polite = containerd.command("/bin/sh").args(["-c", loops]).stdout(Stdio::piped()).spawn()?;
    polite.stdout.as_mut().context("stdout")?.read_exact(&mut [0; 3])?;
    assert_eq!(containerd.terminate(&mut polite)?.code(), Some(7));

    let said = "echo up; exec sleep 1000";
    let mut killed = containerd.command("/bin/sh").args(["-c", said]).stdout(Stdio::piped()).spawn()?;
    let mut stdout = killed.stdout.take().context("stdout")?;
    stdout.read_exact(&mut [0; 3])?;
    killed.kill()?;
    killed.wait()?;
    // The pipe ends when the last process that holds it does.
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(stdout.read_to_end(&mut Vec::new())));
    receiver.recv_timeout(Duration::from_secs(5)).context("the program survived its nsenter")??;
    end_and_look(containerd)
}
