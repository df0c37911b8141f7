//! Several plugins: who is asked when, and what is left for us.

use anyhow::{Context as _, Result, ensure};
use dranic_testbed::runtime::scripted::{Behaviour, Script};
use dranic_testbed::runtime::{Caller, Kind};

use super::Case;
use crate::lab::{Lab, ms, named, ours};
use crate::room::NAME;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("chain-order", "plugins in the order of their index, not of their coming", |lab| Box::pin(order(lab))),
        Case::new("chain-refusal", "behind a plugin that refuses nobody is asked", |lab| Box::pin(refusal(lab))),
        Case::new("chain-own-timeout", "an earlier plugin's timeout takes nothing of ours", |lab| Box::pin(own_timeout(lab))),
        Case::new("chain-slow", "an earlier plugin eats of the runtime's time: we refuse in what is left", |lab| {
            Box::pin(slow(lab))
        }),
        Case::new("chain-eaten", "an earlier plugin eats all of the runtime's time", |lab| Box::pin(eaten(lab))),
        Case::new("chain-serial", "two requests at once are two requests one after the other", |lab| Box::pin(serial(lab))),
        Case::new("chain-two-of-us", "two connections of one name are both asked", |lab| Box::pin(two_of_us(lab))),
    ]
}

async fn order(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let late = lab.plugin(Script::new("90", "late", None, Behaviour::Answer)).await?;
    let early = lab.plugin(Script::new("05", "early", None, Behaviour::Answer)).await?;
    lab.has(&["05-early", NAME, "90-late"]).await?;
    lab.fine(Kind::Run, &named("a", "slow-30")).await?;
    let (first, last) = (early.asked(), late.asked());
    ensure!(first.len() == 1 && last.len() == 1 && last[0].at - first[0].at >= ms(29), "{first:?} {last:?}");
    Ok(String::new())
}

async fn refusal(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let _no = lab.plugin(Script::new("05", "no", None, Behaviour::Refuse(2, "no".to_owned()))).await?;
    lab.fails(Kind::Run, &ours("a")).await?;
    ensure!(lab.handler()?.begun().is_empty(), "{:?}", lab.handler()?.begun());
    Ok(String::new())
}

async fn own_timeout(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let _silent = lab.plugin(Script::new("05", "silent", None, Behaviour::Silence)).await?;
    lab.timeout(ms(300)).await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    let call = lab.calls(Kind::Run)?.pop().context("we were not asked")?;
    ensure!(call.timeout_nano > 250_000_000, "{call:?}");
    lab.has(&[NAME]).await?;
    Ok(format!("{} of 300 ms", call.timeout_nano / 1_000_000))
}

/// The runtime's deadline for a request, and how much of it the plugin before us takes.
const DEADLINE: u64 = 600;
const EATEN: u64 = 350;

async fn slow(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let _slow = lab.plugin(Script::new("05", "slow", None, Behaviour::AnswerAfter(ms(EATEN)))).await?;
    let caller = Caller { deadline: Some(ms(DEADLINE)), cancel: None };
    let done = lab.ask(Kind::Run, &named("a", "slow-3000"), caller).await?;
    let error = done.error.context("it went on")?;
    ensure!(error.starts_with("rpc error: code = Aborted ") && error.contains("still running"), "{error}");
    let call = lab.calls(Kind::Run)?.pop().context("we were not asked")?;
    ensure!(call.timeout_nano < ((DEADLINE - EATEN) * 1_000_000) as i64, "{call:?}");
    let margin = call.margin().context("answered too late")?;
    lab.has(&["05-slow", NAME]).await?;
    Ok(format!("{} ms were left, answered {} ms before their end", call.timeout_nano / 1_000_000, margin.as_millis()))
}

async fn eaten(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let silent = lab.plugin(Script::new("05", "silent", None, Behaviour::Silence)).await?;
    let caller = Caller { deadline: Some(ms(200)), cancel: None };
    let done = lab.ask(Kind::Run, &ours("a"), caller).await?;
    if lab.side.version.policies {
        ensure!(done.error.as_deref() == Some("context deadline exceeded"), "{done:?}");
        ensure!(lab.handler()?.begun().is_empty(), "{:?}", lab.handler()?.begun());
        lab.has(&["05-silent", NAME]).await?;
        return Ok("fails, and nobody is blamed".to_owned());
    }
    // The hole of older versions: a request in whose time no plugin can answer goes on without any. We come back, and the guard and
    // the next CreateContainer hold what was missed.
    ensure!(done.error.is_none() && silent.asked().len() == 1, "{done:?}");
    lab.has(&[NAME]).await?;
    ensure!(lab.tap()?.connections().len() == 2, "{} connections", lab.tap()?.connections().len());
    let told =
        lab.calls(Kind::Run)?.pop().map_or("not asked".to_owned(), |call| format!("asked with {} us", call.timeout_nano / 1000));
    Ok(format!("goes on without us ({told}); we are back"))
}

async fn serial(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let start = std::time::Instant::now();
    let (one, two) = (named("a", "slow-150"), named("b", "slow-151"));
    let (first, second) = tokio::join!(lab.fine(Kind::Run, &one), lab.fine(Kind::Run, &two));
    first?;
    second?;
    ensure!(start.elapsed() >= ms(300), "{:?}", start.elapsed());
    Ok(String::new())
}

async fn two_of_us(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let other = lab.plugin(Script::new("20", "twin", None, Behaviour::Answer)).await?;
    let twin = lab.stranger(Script::new("20", "twin", None, Behaviour::Answer)).await?;
    lab.has(&[NAME, "20-twin", "20-twin"]).await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    ensure!((other.asked().len(), twin.asked().len()) == (1, 1), "{:?} {:?}", other.asked(), twin.asked());
    Ok(String::new())
}
