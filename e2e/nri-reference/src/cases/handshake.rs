//! From the connection to the first request.

use anyhow::{Context as _, Result, ensure};
use dranic_testbed::runtime::Kind;
use dranic_testbed::runtime::scripted::{Behaviour, Script};

use super::{Case, Cost};
use crate::lab::{LIMIT, Lab, eventually, ms, ours};
use crate::room::{NAME, Seen};
use crate::tap::{Cut, PLUGIN};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("configure-bytes", "our answer to Configure, byte by byte, and who the runtime says it is", |lab| {
            Box::pin(configure_bytes(lab))
        }),
        Case::new("registers-again", "ten connections, whichever of Configure and registration is first", |lab| {
            Box::pin(registers_again(lab))
        }),
        Case::new("names", "plugin names and indices that are refused, on connections that stay open", |lab| {
            Box::pin(names(lab))
        }),
        Case::new("events", "events that no version or not every version knows", |lab| Box::pin(events(lab))),
        Case::new("register-behind-silent", "a plugin before us that never registers", |lab| Box::pin(behind_silent(lab)))
            .cost(Cost::Long),
        Case::new("cut-in-register", "lost before the answer to our registration", |lab| {
            Box::pin(cut(lab, Cut::AnswerTo("RegisterPlugin")))
        }),
        Case::new("cut-before-configure", "lost between registration and Configure", |lab| {
            Box::pin(cut(lab, Cut::Request("Configure")))
        }),
        Case::new("cut-before-synchronize", "lost between Configure and Synchronize", |lab| {
            Box::pin(cut(lab, Cut::Request("Synchronize")))
        }),
        Case::new("cut-in-synchronize", "lost before our answer to Synchronize", |lab| {
            Box::pin(cut(lab, Cut::AnswerTo("Synchronize")))
        }),
        Case::new("synchronize-30000", "30,000 pods and containers, in parts", |lab| Box::pin(synchronize(lab)))
            .cost(Cost::Heavy),
    ]
}

async fn configure_bytes(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let calls = lab.tap()?.calls();
    let call = |method: &str| calls.iter().find(|call| call.method == method).with_context(|| format!("no {method}"));
    let (register, configure, synchronize) = (call("RegisterPlugin")?, call("Configure")?, call("Synchronize")?);
    ensure!((register.service, configure.service, synchronize.service) == (2, PLUGIN, PLUGIN), "{calls:?}");
    let answer = configure.answer.as_ref().context("no answer")?;
    // Events 0x000f, and both parts of the failure policy.
    ensure!(answer.payload == [0x10, 0x0f, 0x1a, 4, 8, 1, 16, 1], "{:?}", answer.payload);
    let up = |seen: &[Seen]| seen.iter().any(|seen| matches!(seen, Seen::Connection(true, _)));
    let seen = lab.handler()?.wait("a connection", up).await?;
    let told = seen.iter().find_map(|seen| if let Seen::Connection(true, told) = seen { Some(told.clone()) } else { None });
    let told = told.unwrap_or_default();
    ensure!(told.starts_with("containerd v2.") && told.contains("(NRI ") == lab.side.version.dedicated, "{told}");
    Ok(told)
}

async fn registers_again(lab: &mut Lab) -> Result<String> {
    const TIMES: usize = 10;
    lab.connected().await?;
    for times in 1..TIMES {
        lab.tap()?.cut();
        lab.handler()?.wait("the next connection", |_| lab.handler().is_ok_and(|h| h.connections() == times + 1)).await?;
        lab.has(&[NAME]).await?;
    }
    ensure!(lab.tap()?.connections().len() == TIMES, "{} connections", lab.tap()?.connections().len());
    let calls = lab.tap()?.calls();
    let answered_later = |number: &usize| {
        let mine = |method: &str| calls.iter().find(|call| call.connection == *number && call.method == method);
        mine("RegisterPlugin")
            .zip(mine("Configure"))
            .is_some_and(|(register, configure)| configure.came_before_answer_to(register))
    };
    Ok(format!("{} of {TIMES} times Configure came first", (0..TIMES).filter(answered_later).count()))
}

async fn names(lab: &mut Lab) -> Result<String> {
    lab.start(|_| ()).await?;
    let wanted = [
        ("50", "dra.net", true),
        ("00", "A-z_0.9+", true),
        ("99", "x", true),
        ("50", "", false),
        // Up to 0.8 only an empty name is refused.
        ("50", "foo/bar", !lab.side.version.dedicated),
        ("50", "with space", !lab.side.version.dedicated),
        ("5", "x", false),
        ("500", "x", false),
        ("a1", "x", false),
        ("", "x", false),
    ];
    let mut refused = Vec::new();
    for (index, name, accepted) in wanted {
        let plugin = lab.stranger(Script::new(index, name, None, Behaviour::Answer)).await?;
        let answer = tokio::time::timeout(LIMIT, plugin.registered()).await?;
        ensure!(answer.as_ref().is_some_and(Result::is_ok) == accepted, "{index:?} {name:?}: {answer:?}");
        if !accepted {
            refused.push(plugin);
        }
    }
    // A refused plugin has to hang up by itself.
    tokio::time::sleep(ms(50)).await;
    ensure!(refused.iter().all(|plugin| !plugin.has_ended()), "refused, and closed by the runtime");
    Ok(String::new())
}

async fn events(lab: &mut Lab) -> Result<String> {
    lab.start(|_| ()).await?;
    let newer = lab.side.version.dedicated;
    for (events, accepted) in [(0x000f, true), (0x07ff, true), (0x0800, newer), (0x1fff, newer), (0x4000, false), (0x4001, false)]
    {
        let script = Script { events, ..Script::new("50", "odd", None, Behaviour::Answer) };
        let plugin = if accepted { lab.plugin(script).await? } else { lab.stranger(script).await? };
        if !accepted {
            eventually(&format!("{events:#x} is refused"), || plugin.has_ended()).await?;
        }
        drop(plugin);
        lab.has(&[]).await?;
    }
    Ok(String::new())
}

async fn behind_silent(lab: &mut Lab) -> Result<String> {
    // Longer than the five seconds for which plugins in Go wait.
    let patience = ms(5500);
    lab.start(|settings| settings.registration_timeout = patience).await?;
    let silent = lab.socket_only().await?;
    let start = std::time::Instant::now();
    lab.open()?;
    lab.has(&[NAME]).await?;
    let took = start.elapsed();
    ensure!(took >= patience - ms(100), "registered after {took:?}, beside a silent plugin");
    ensure!(lab.tap()?.connections().len() == 1, "{} connections", lab.tap()?.connections().len());
    drop(silent);
    Ok(format!("after {:.1} s, on the first connection", took.as_secs_f64()))
}

async fn cut(lab: &mut Lab, cut: Cut) -> Result<String> {
    lab.start(|_| ()).await?;
    lab.open_cut(vec![cut.clone(), cut])?;
    lab.has(&[NAME]).await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    let times = lab.tap()?.connections();
    ensure!(times.len() == 3, "{} connections", times.len());
    let pauses: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    ensure!(pauses.iter().all(|pause| *pause < ms(2000)), "{pauses:?}");
    Ok(format!("again after {} and {} ms", pauses[0].as_millis(), pauses[1].as_millis()))
}

async fn synchronize(lab: &mut Lab) -> Result<String> {
    const PODS: usize = 15_000;
    lab.start(|settings| {
        (settings.generate, settings.padding) = (PODS, 600);
        // A runtime has 2 s; this is a build without optimisation, and the machine may be busy.
        settings.request_timeout = ms(20_000);
    })
    .await?;
    lab.open()?;
    let both = |seen: &[Seen]| seen.iter().any(|seen| matches!(seen, Seen::Connection(true, _)));
    let seen = lab.handler()?.wait("Synchronize", both).await?;
    let lists = seen.iter().filter_map(|seen| if let Seen::Synchronize(pods, all) = seen { Some((pods, all)) } else { None });
    let lists: Vec<_> = lists.collect();
    let [(pods, containers)] = lists[..] else { anyhow::bail!("{} lists", lists.len()) };
    let (mut ids, mut of) =
        (pods.iter().map(|pod| &pod.id).collect::<Vec<_>>(), containers.iter().map(|c| &c.sandbox).collect::<Vec<_>>());
    ids.sort_unstable();
    of.sort_unstable();
    ids.dedup();
    ensure!(ids.len() == PODS && ids == of, "{} pods, {} containers", ids.len(), of.len());
    let parts = lab.tap()?.calls_of("Synchronize");
    // An answer is `more` and nothing else: no updates before the last.
    let answers: Vec<_> = parts.iter().map(|part| part.answer.as_ref().map(|answer| answer.payload.clone())).collect();
    let (last, before) = answers.split_last().context("no parts")?;
    ensure!(before.len() >= 2 && before.iter().all(|more| more.as_deref() == Some(&[0x10, 1])), "{answers:?}");
    ensure!(last.as_deref() == Some(&[]), "{answers:?}");
    let took: std::time::Duration = parts.iter().filter_map(crate::tap::Call::took).sum();
    Ok(format!("{} parts, {} ms of ours", parts.len(), took.as_millis()))
}
