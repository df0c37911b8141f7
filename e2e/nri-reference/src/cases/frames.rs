//! The shape of frames: what a Go reader takes, and what our mux sends.

use anyhow::{Context as _, Result, ensure};
use dranic_testbed::runtime::Kind;
use dranic_testbed::runtime::scripted::{Behaviour, Script, Shape};
use dranic_testbed::runtime::wire::{HEADER, MAX_DATA, Response, Status};
use prost::Message as _;

use super::Case;
use crate::lab::{Lab, named, ours};
use crate::room::NAME;

/// Sizes of a message's data at which something changes.
const SIZES: [usize; 9] = [0, 1, 4085, 4086, 4087, 4096, 8192, 1 << 20, MAX_DATA];
/// Buffer of a Go reader; the first frame of a message must fit.
const FIRST: usize = 4096;

pub(super) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = SIZES
        .into_iter()
        .map(|size| {
            let (name, shows) = (format!("frames-{size}"), format!("an answer of {size} bytes, framed as Go does"));
            Case::new(&name, &shows, move |lab| Box::pin(framed(lab, size)))
        })
        .collect();
    cases.push(Case::new("frames-of-ours", "how our mux frames answers of all these sizes", |lab| Box::pin(of_ours(lab))));
    cases.push(Case::new("frames-over-the-limit", "a refusal of ours that is longer than a message may be", |lab| {
        Box::pin(over_the_limit(lab))
    }));
    cases.push(Case::new("frames-too-long", "an answer in one frame longer than the reader's buffer", |lab| {
        Box::pin(too_long(lab))
    }));
    cases.push(Case::new("frames-in-bytes", "an answer in frames of one byte", |lab| Box::pin(in_bytes(lab))));
    cases
}

/// OK, with so many bytes in all: a text nobody reads fills them.
fn response(code: i32, size: usize) -> Result<Vec<u8>> {
    if size == 0 {
        return Ok(Vec::new());
    }
    let of = |length| Response { status: Some(Status { code, message: "x".repeat(length) }), payload: Vec::new() };
    // Twice, since the length of the length may change.
    let rest = |text: usize| text.saturating_add(size).checked_sub(of(text).encoded_len()).context("too small");
    let data = of(rest(rest(size.saturating_sub(16))?)?).encode_to_vec();
    ensure!(data.len() == size, "no message has {size} bytes");
    Ok(data)
}

async fn framed(lab: &mut Lab, size: usize) -> Result<String> {
    lab.start(|_| ()).await?;
    // No message of one byte can be read; that is no worse than an error of the plugin's own.
    let (data, unreadable) = if size == 1 { (vec![0x0a], true) } else { (response(0, size)?, false) };
    let _plugin = lab.plugin(Script::new("50", "odd", None, Behaviour::Data(data, Shape::Go))).await?;
    for _ in 0..3 {
        let done = lab.relay(Kind::Run, &ours("a")).await?;
        ensure!(done.error.is_some() == unreadable, "{done:?}");
        lab.has(&["50-odd"]).await?;
    }
    Ok(if unreadable { "unreadable: fails / kept".to_owned() } else { String::new() })
}

async fn of_ours(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    let smallest = lab.calls(Kind::Run)?.pop().and_then(|call| call.answer).context("no answer")?;
    ensure!(smallest.frames == [HEADER + smallest.size], "{:?}", smallest.frames);
    for size in SIZES.into_iter().skip(2) {
        let text = Response::decode(&response(9, size)?[..])?.status.unwrap_or_default().message;
        let error = lab.fails(Kind::Run, &named(&format!("s{size}"), &format!("fails-{}", text.len()))).await?;
        ensure!(error.ends_with(&text), "{size}: a text of {} bytes where {} were sent", error.len(), text.len());
        let answer = lab.calls(Kind::Run)?.pop().and_then(|call| call.answer).context("no answer")?;
        ensure!(answer.size == size, "{} bytes where {size} were wanted", answer.size);
        let total = HEADER + size;
        let wanted = if total <= FIRST { vec![total] } else { vec![FIRST, total - FIRST] };
        ensure!(answer.frames == wanted, "{size}: frames of {:?} bytes, wanted {wanted:?}", answer.frames);
    }
    lab.has(&[NAME]).await?;
    Ok(format!("the smallest answer has {} bytes", smallest.size))
}

async fn over_the_limit(lab: &mut Lab) -> Result<String> {
    lab.connected().await?;
    let error = lab.fails(Kind::Run, &named("a", &format!("fails-{}", MAX_DATA + 1))).await?;
    lab.has(&[NAME]).await?;
    lab.fine(Kind::Run, &ours("b")).await?;
    Ok(error.chars().take(60).collect())
}

async fn too_long(lab: &mut Lab) -> Result<String> {
    lab.start(|_| ()).await?;
    let behaviour = Behaviour::Data(response(0, 6057)?, Shape::Whole);
    let _plugin = lab.plugin(Script::new("50", "odd", None, behaviour)).await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    lab.has(&[]).await?;
    Ok("goes on / dropped".to_owned())
}

async fn in_bytes(lab: &mut Lab) -> Result<String> {
    lab.start(|_| ()).await?;
    let behaviour = Behaviour::Data(response(0, 100)?, Shape::Pieces(1));
    let _plugin = lab.plugin(Script::new("50", "odd", None, behaviour)).await?;
    lab.fine(Kind::Run, &ours("a")).await?;
    lab.has(&["50-odd"]).await?;
    Ok(String::new())
}
