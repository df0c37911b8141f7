//! The guard under a real runc, which a real containerd runs: whatever befalls agent and runtime, a container starts with all its NICs, or
//! not at all; and it does start, by itself, once the agent is back.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use dranic::ledger::Phase;
use dranic_testbed::cluster::{Agent, Options};
use dranic_testbed::containerd::PodSpec;
use dranic_testbed::kubelet::Claim;
use nix::sys::signal::Signal;

use super::patient;
use super::rig::{PROGRAM, Rig, nics, on_node, on_node_with};

/// How long a container is looked at that must not start. containerd takes a tenth of it to start one.
const A_WHILE: Duration = Duration::from_millis(1500);

const ALL: [&str; 6] = ["eth0", "lo", "nic0", "nic1", "nic2", "nic3"];

/// The container has all NICs; then everything ends, and is as it was.
async fn complete(rig: &mut Rig, container: &str, sandbox: &str, claim: &Claim) -> Result<()> {
    assert_eq!(rig.links(container).await?, ALL);
    rig.cluster.wait_ready(Duration::from_secs(20)).await?;
    rig.wait_phase(claim, Phase::Attached).await?;
    rig.stop(sandbox).await?;
    rig.unprepare(claim).await?;
    rig.check_host()
}

#[tokio::test]
async fn the_agent_is_killed_between_prepare_and_sandbox() -> Result<()> {
    on_node(4, patient(), async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        rig.cluster.kill_agent()?;
        let (sandbox, _) = rig.run(&pod).await?;
        rig.cluster.start_agent()?;
        // Not waited for: whoever comes first attaches, and the container waits for it.
        let container = rig.start_with(&sandbox, &pod, "main", &claim)?.started().await?;
        complete(rig, &container, &sandbox, &claim).await
    })
    .await
}

#[tokio::test]
async fn the_agent_is_started_only_when_the_container_is_on_its_way() -> Result<()> {
    on_node(4, patient(), async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        rig.cluster.kill_agent()?;
        let (sandbox, _) = rig.run(&pod).await?;
        let starting = rig.start_with(&sandbox, &pod, "main", &claim)?;
        starting.still_waits(A_WHILE).await?;
        // Only this container waits.
        let other = PodSpec::new("other", "uid-other");
        let (others, took) = rig.run(&other).await?;
        rig.start(&others, &other, "main").await?;
        println!("RunPodSandbox of another pod meanwhile: {took:?}");
        rig.stop(&others).await?;
        rig.cluster.start_agent()?;
        let container = starting.started().await?;
        complete(rig, &container, &sandbox, &claim).await
    })
    .await
}

#[tokio::test]
async fn the_agent_is_killed_in_the_middle_of_the_attach() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("dranic");
    write_program(&program, "DRANIC_TEST_KILL_AT='attach: moved:2'")?;
    let killed = |options: &mut Options| options.program = program.clone();
    on_node_with(4, patient(), killed, async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        // containerd 2.1 goes on without a plugin that went away.
        let (sandbox, _) = rig.run(&pod).await?;
        let end = Instant::now() + A_WHILE;
        while !rig.cluster.agent.as_mut().is_some_and(Agent::has_ended) {
            ensure!(Instant::now() < end, "the agent was not killed");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(rig.cluster.host_states()?.len(), 2, "two of four are on the host");
        let starting = rig.start_with(&sandbox, &pod, "main", &claim)?;
        starting.still_waits(A_WHILE).await?;
        write_program(&program, "")?;
        rig.cluster.start_agent()?;
        let container = starting.started().await?;
        complete(rig, &container, &sandbox, &claim).await
    })
    .await
}

/// The agent, with a variable in its environment.
fn write_program(path: &Path, variable: &str) -> Result<()> {
    std::fs::write(path, format!("#!/bin/sh\nexec env {variable} {PROGRAM} \"$@\"\n"))?;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?)
}

#[tokio::test]
async fn the_runtime_is_restarted_between_prepare_and_sandbox() -> Result<()> {
    on_node(4, patient(), async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        // So that it does not connect again before the sandbox is made.
        let signal = |rig: &Rig, signal| rig.cluster.agent.as_ref().map_or(Ok(()), |agent| agent.signal(signal));
        signal(rig, Signal::SIGSTOP)?;
        rig.cluster.containerd.kill()?;
        rig.cluster.containerd.restart().await?;
        let (sandbox, _) = rig.run(&pod).await?;
        let starting = rig.start_with(&sandbox, &pod, "main", &claim)?;
        starting.still_waits(A_WHILE).await?;
        signal(rig, Signal::SIGCONT)?;
        let container = starting.started().await?;
        complete(rig, &container, &sandbox, &claim).await
    })
    .await
}

/// The kubelet shows what CRI says in an event of the pod, and tries again.
#[tokio::test]
async fn at_its_bound_the_container_fails_with_the_guards_line_and_the_next_one_starts() -> Result<()> {
    let short = |options: &mut Options| options.arguments.extend(["--guard-wait=1".to_owned()]);
    on_node_with(4, patient(), short, async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        rig.cluster.kill_agent()?;
        let (sandbox, _) = rig.run(&pod).await?;
        let error = format!("{:#}", rig.start_with(&sandbox, &pod, "first", &claim)?.started().await.unwrap_err());
        println!("CRI says: {error}");
        for word in
            ["dranic.dev: pod default/trainer, container first", "claim default/nics", "no agent answers at", "dranic status"]
        {
            ensure!(error.contains(word), "{word:?} is not in {error}");
        }
        rig.cluster.start_agent()?;
        rig.cluster.wait_ready(Duration::from_secs(20)).await?;
        // As the kubelet, which tries again: others may have the kernel's lock of all links for longer than the guard waits here.
        let mut attempt = 0;
        let container = loop {
            match rig.start_with(&sandbox, &pod, &format!("again-{attempt}"), &claim)?.started().await {
                Ok(container) => break container,
                Err(error) if attempt < 10 => println!("{error:#}"),
                Err(error) => return Err(error),
            }
            attempt += 1;
        };
        complete(rig, &container, &sandbox, &claim).await
    })
    .await
}

/// No NRI: what brings the NICs is the guard of the first container, what takes them back is unprepare.
#[tokio::test]
async fn without_nri_the_guard_brings_the_nics() -> Result<()> {
    let off = |options: &mut Options| options.arguments.extend(["--nri=off".to_owned()]);
    on_node_with(4, patient(), off, async |rig| {
        let pod = PodSpec::new("trainer", "uid-trainer");
        let claim = rig.prepared("nics", &pod, &nics(0..4), &[]).await?;
        let (sandbox, _) = rig.run(&pod).await?;
        let container = rig.start_with(&sandbox, &pod, "main", &claim)?.started().await?;
        assert_eq!(rig.links(&container).await?, ALL);
        // A path that an agent in a container finds, too.
        let paths: Vec<_> = rig.devices(&claim)?.into_iter().filter_map(|device| device.netns).collect();
        let wanted = rig.cluster.path("netns");
        ensure!(paths.len() == 4 && paths.iter().all(|path| Path::new(path).starts_with(&wanted)), "{paths:?}");
        rig.cluster.kill_agent()?;
        rig.cluster.start_agent()?;
        rig.cluster.wait_ready(Duration::from_secs(20)).await?;
        assert_eq!(rig.links(&container).await?, ALL, "running pods don't notice");
        // The kubelet stops the containers, then the sandbox, then unprepares; nobody tells us of the first two.
        let unprepared = async {
            rig.unprepare(&claim).await?;
            rig.stop(&sandbox).await
        };
        unprepared.await?;
        rig.check_host()
    })
    .await
}
