//! Connections that are lost, and runtimes that go away and come back.

use anyhow::{Result, ensure};
use dranic_testbed::runtime::Kind;

use super::Case;
use crate::lab::{Lab, ms, named, ours};
use crate::room::{NAME, Seen};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("lost-in-run", "lost while Run works: the hook ends, and we are back", |lab| Box::pin(lost_in_run(lab))),
        Case::new("runtime-killed", "the runtime is killed: its socket refuses, then is back", |lab| {
            Box::pin(restarted(lab, false))
        }),
        Case::new("runtime-stopped", "the runtime is told to stop: its socket goes, then is back", |lab| {
            Box::pin(restarted(lab, true))
        }),
        Case::new("told-to-stop-in-run", "we are told to stop while Run works: it is answered first", |lab| {
            Box::pin(stop_in_run(lab))
        }),
    ]
}

fn runs(seen: &[Seen]) -> bool {
    seen.iter().any(|seen| matches!(seen, Seen::Begin("run", _)))
}

async fn lost_in_run(lab: &mut Lab) -> Result<String> {
    lab.start(|settings| settings.pods = vec![ours("old")]).await?;
    lab.open()?;
    lab.has(&[NAME]).await?;
    let pod = named("a", "slow-300");
    let (done, cut) = tokio::join!(lab.relay(Kind::Run, &pod), async {
        lab.handler()?.wait("Run", runs).await?;
        lab.tap()?.cut();
        Ok::<_, anyhow::Error>(())
    });
    cut?;
    // Both flags are our policy, so it fails where policies are known.
    let done = done?;
    ensure!(done.error.is_some() == lab.side.version.policies, "{done:?}");
    lab.handler()?.wait("the end of Run", |seen| seen.contains(&Seen::End("run", "a".to_owned()))).await?;
    lab.has(&[NAME]).await?;
    let lists = |seen: &[Seen]| seen.iter().filter(|seen| matches!(seen, Seen::Synchronize(pods, _) if pods.len() == 1)).count();
    lab.handler()?.wait("the second Synchronize", |seen| lists(seen) == 2).await?;
    lab.fine(Kind::Run, &ours("b")).await?;
    Ok(if done.error.is_some() { "fails / back".to_owned() } else { "goes on without us / back".to_owned() })
}

async fn restarted(lab: &mut Lab, clean: bool) -> Result<String> {
    lab.start(|settings| settings.pods = vec![ours("old")]).await?;
    lab.open_untapped()?;
    lab.has(&[NAME]).await?;
    lab.runtime()?.down(clean).await?;
    let (lost, word) = ("the runtime closed the connection", if clean { "No such file" } else { "refused" });
    let told = |seen: &[Seen], wanted: &str| {
        seen.iter().any(|seen| matches!(seen, Seen::Connection(false, why) if why.contains(wanted)))
    };
    lab.handler()?.wait("the loss", |seen| told(seen, lost) && told(seen, word)).await?;
    lab.runtime()?.up().await?;
    let up = std::time::Instant::now();
    lab.has(&[NAME]).await?;
    let back = up.elapsed();
    ensure!(back < ms(1200), "registered {back:?} after the runtime was back");
    let lists =
        |seen: &[Seen]| seen.iter().filter(|seen| matches!(seen, Seen::Synchronize(pods, _) if pods[0].id == "old")).count();
    lab.handler()?.wait("the pod in both lists", |seen| lists(seen) == 2).await?;
    lab.fine(Kind::Stop, &ours("old")).await?;
    Ok(format!("registered after {} ms", back.as_millis()))
}

async fn stop_in_run(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let Some(mut room) = lab.room.take() else { anyhow::bail!("no room") };
    let handler = room.handler.clone();
    let pod = named("a", "slow-300");
    let (done, stopped) = tokio::join!(lab.relay(Kind::Run, &pod), async {
        handler.wait("Run", runs).await?;
        room.stopped().await
    });
    stopped?;
    let done = done?;
    ensure!(done.error.is_none() && done.elapsed >= ms(290), "{done:?}");
    lab.has(&[]).await?;
    Ok(String::new())
}
