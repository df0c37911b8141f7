//! The real agent on a scratch node with NICs: what the runtime's side sees of it, and where its NICs are then.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dranic::netdev::HostState;
use dranic_testbed::cluster::{Cluster, Pod};
use dranic_testbed::kubelet::Claim;
use dranic_testbed::runtime::{Caller, Kind};
use futures_util::future::BoxFuture;

use super::{Case, Cost};
use crate::lab::{AGENT, LIMIT, Lab, eventually, ms};

pub(super) fn cases() -> Vec<Case> {
    // Not on the double: tests/agent.rs and its like have it there.
    let case = |name: &str, shows: &str, body: fn(&mut Lab) -> BoxFuture<'_, Result<String>>| {
        Case::new(name, shows, body).cost(Cost::Node).only(|side| side.program.is_some())
    };
    vec![
        case("agent", "a pod gets its NICs and gives them back", |lab| Box::pin(job(lab))),
        case("agent-overrun", "32 NICs in 300 ms: refused in time, and all NICs are back; then a new sandbox", |lab| {
            Box::pin(overrun(lab))
        }),
        case("agent-killed-in-run", "killed while it attaches: whoever is made then has its NICs when it is back", |lab| {
            Box::pin(killed_in_run(lab))
        }),
        case("agent-missed", "a sandbox that was made without it, and a claim that no list shows", |lab| Box::pin(missed(lab))),
        Case::new("agent-load", "64 pods of 8 NICs, one after the other, in 2 s each", |lab| Box::pin(load(lab)))
            .cost(Cost::Node)
            .only(|side| side.version.policies && side.program.is_some()),
    ]
}

type Before = std::collections::BTreeMap<String, HostState>;

fn names(count: u32) -> Vec<String> {
    (0..count).map(|n| format!("nic{n}")).collect()
}

/// A pod and a claim of it for that many NICs, prepared.
async fn prepared(cluster: &Cluster, name: &str, nics: u32) -> Result<(Pod, Vec<Claim>)> {
    let pod = cluster.pod(name)?;
    let claims = vec![cluster.claim(&format!("c-{name}"), &pod, &names(nics), &[])?];
    cluster.prepare(&claims).await?;
    Ok((pod, claims))
}

fn inside(pod: &Pod, count: u32) -> Result<()> {
    let mut links = pod.links_up()?;
    links.sort_by_key(|name| name.trim_start_matches("nic").parse::<u32>().ok());
    ensure!(links == names(count), "in the pod are {links:?}");
    Ok(())
}

fn nothing_inside(pod: &Pod) -> Result<()> {
    let links: Vec<_> = pod.look()?.links.into_iter().filter(|link| !link.is_loopback()).map(|link| link.name).collect();
    ensure!(links.is_empty(), "in the pod are {links:?}");
    Ok(())
}

/// A container, tried again as by the kubelet until it is let through: then the NICs are there, or it has the hook that waits for them.
async fn gated(lab: &Lab, pod: &Pod, count: u32) -> Result<&'static str> {
    let begin = Instant::now();
    let done = loop {
        let done = lab.relay(Kind::Create, &pod.sandbox).await?;
        if done.error.is_none() {
            break done;
        }
        ensure!(begin.elapsed() < LIMIT, "never let through: {done:?}");
        tokio::time::sleep(ms(50)).await;
    };
    let there = inside(pod, count);
    if !done.hooks.iter().any(|hook| hook.contains("guard")) {
        return there.context("let through without a guard").map(|()| "with all its NICs");
    }
    eventually("the NICs are in the pod", || inside(pod, count).is_ok()).await?;
    Ok("behind the guard")
}

/// Stop, unprepare, remove, as the kubelet ends a pod.
async fn end(lab: &Lab, pod: &Pod, claims: &[Claim]) -> Result<()> {
    lab.fine(Kind::Stop, &pod.sandbox).await?;
    lab.cluster()?.unprepare(claims).await?;
    lab.fine(Kind::Remove, &pod.sandbox).await?;
    Ok(())
}

/// What is given back may still be on its way.
async fn all_back(lab: &Lab, pod: &Pod, before: &Before) -> Result<()> {
    let cluster = lab.cluster()?;
    let back = || nothing_inside(pod).and_then(|()| as_before(cluster, before));
    // What is not back says more than how long it was waited for.
    let _ = eventually("everything is back", || back().is_ok()).await;
    back()
}

fn as_before(cluster: &Cluster, before: &Before) -> Result<()> {
    let differences = Cluster::differences(before, &cluster.host_states()?);
    ensure!(differences.is_empty(), "{differences:?}");
    let status = cluster.status()?;
    ensure!(status.claims.is_empty(), "{:?}", status.claims);
    Ok(())
}

async fn job(lab: &mut Lab) -> Result<String> {
    lab.agent(8, &[]).await?;
    let before = lab.cluster()?.host_states()?;
    let (pod, claims) = prepared(lab.cluster()?, "a", 8).await?;
    let run = lab.fine(Kind::Run, &pod.sandbox).await?.elapsed;
    let through = gated(lab, &pod, 8).await?;
    end(lab, &pod, &claims).await?;
    all_back(lab, &pod, &before).await?;
    Ok(format!("Run answered after {} ms, the container let through {through}", run.as_millis()))
}

async fn overrun(lab: &mut Lab) -> Result<String> {
    const NICS: u32 = 32;
    lab.agent(NICS, &["--on-overrun=fail"]).await?;
    let before = lab.cluster()?.host_states()?;
    let (pod, claims) = prepared(lab.cluster()?, "a", NICS).await?;
    lab.timeout(ms(300)).await?;
    let done = lab.relay(Kind::Run, &pod.sandbox).await?;
    let error = done.error.context("32 NICs in 300 ms")?;
    ensure!(error.contains("rpc error: code = ") && error.contains("dranic.dev"), "{error}");
    // As the runtime does it: at once.
    for kind in [Kind::Stop, Kind::Remove] {
        lab.fine(kind, &pod.sandbox).await?;
    }
    let margins: Option<Vec<Duration>> = lab.calls(Kind::Run)?.iter().map(crate::tap::Call::margin).collect();
    let margin = margins.and_then(|margins| margins.into_iter().min()).context("an answer after its deadline")?;
    lab.has(&[AGENT]).await?;
    eventually("the pod has no NIC", || nothing_inside(&pod).is_ok()).await?;
    // The same pod again, in a new sandbox and with more time: its NICs go there, and nowhere else.
    lab.timeout(ms(20_000)).await?;
    let again = lab.cluster()?.sandbox("a", &pod.uid, 1)?;
    lab.fine(Kind::Run, &again.sandbox).await?;
    inside(&again, NICS)?;
    nothing_inside(&pod)?;
    end(lab, &again, &claims).await?;
    all_back(lab, &again, &before).await?;
    nothing_inside(&pod)?;
    Ok(format!("least margin {} ms", margin.as_millis()))
}

async fn killed_in_run(lab: &mut Lab) -> Result<String> {
    const NICS: u32 = 16;
    lab.agent(NICS, &[]).await?;
    let before = lab.cluster()?.host_states()?;
    let (pod, claims) = prepared(lab.cluster()?, "a", NICS).await?;
    let agent = lab.cluster_mut()?.agent.take().context("no agent")?;
    let (done, killed) = tokio::join!(lab.relay(Kind::Run, &pod.sandbox), async {
        tokio::time::sleep(ms(40)).await;
        agent.kill()
    });
    killed?;
    let done = done?;
    ensure!(done.error.is_some() == lab.side.version.policies, "{done:?}");
    // A pod that failed is made anew; one that went on is listed to who comes back.
    let made = if done.error.is_some() { lab.cluster()?.sandbox("a", &pod.uid, 1)? } else { pod };
    if done.error.is_none() {
        lab.runtime()?.list(std::slice::from_ref(&made.sandbox)).await?;
    }
    lab.cluster_mut()?.start_agent()?;
    lab.cluster_mut()?.wait_ready(ms(20_000)).await?;
    lab.has(&[AGENT]).await?;
    if done.error.is_some() {
        lab.fine(Kind::Run, &made.sandbox).await?;
    }
    let through = gated(lab, &made, NICS).await?;
    end(lab, &made, &claims).await?;
    all_back(lab, &made, &before).await?;
    let words = if done.error.is_some() { "fails / made anew" } else { "goes on / attached afterwards" };
    Ok(format!("{words}, the container let through {through}"))
}

async fn missed(lab: &mut Lab) -> Result<String> {
    const NICS: u32 = 4;
    lab.agent(NICS, &[]).await?;
    let before = lab.cluster()?.host_states()?;
    let (pod, claims) = prepared(lab.cluster()?, "a", NICS).await?;
    // Its sandbox does not exist yet, and the agent is told so by an empty list: the claim stays prepared.
    let connections = lab.tap()?.connections().len();
    lab.tap()?.cut();
    let tap = lab.tap()?;
    eventually("the agent connects again", || tap.connections().len() > connections).await?;
    lab.has(&[AGENT]).await?;
    let status = lab.cluster()?.status()?;
    ensure!(status.claims.len() == 1 && status.claims[0].devices.len() == NICS as usize, "{:?}", status.claims);
    // Now it is made while the agent is away.
    lab.cluster_mut()?.kill_agent()?;
    lab.has(&[]).await?;
    let done = lab.ask(Kind::Run, &pod.sandbox, Caller::default()).await?;
    ensure!(done.error.is_none(), "nobody is there to be asked: {done:?}");
    lab.runtime()?.list(std::slice::from_ref(&pod.sandbox)).await?;
    lab.cluster_mut()?.start_agent()?;
    lab.has(&[AGENT]).await?;
    eventually("the NICs are in the pod", || inside(&pod, NICS).is_ok()).await?;
    gated(lab, &pod, NICS).await?;
    end(lab, &pod, &claims).await?;
    all_back(lab, &pod, &before).await?;
    Ok(String::new())
}

async fn load(lab: &mut Lab) -> Result<String> {
    const PODS: usize = 64;
    const NICS: u32 = 8;
    lab.agent(NICS, &["--on-overrun=fail"]).await?;
    let before = lab.cluster()?.host_states()?;
    let mut times = Vec::new();
    for number in 0..PODS {
        let (pod, claims) = prepared(lab.cluster()?, &format!("p{number}"), NICS).await?;
        times.push(lab.fine(Kind::Run, &pod.sandbox).await?.elapsed);
        inside(&pod, NICS)?;
        end(lab, &pod, &claims).await?;
    }
    ensure!(lab.tap()?.connections().len() == 1, "dropped in between");
    as_before(lab.cluster()?, &before)?;
    times.sort_unstable();
    let at = |percent: usize| times[(PODS - 1) * percent / 100];
    ensure!(at(99) < ms(1000), "p99 of Run {:?}", at(99));
    Ok(format!("p50 of Run {} ms, p99 {} ms", at(50).as_millis(), at(99).as_millis()))
}
