//! Six ways in which a plugin or its runtime fails, and five failure policies: what becomes of request and plugin.

use anyhow::{Context as _, Result, ensure};
use dranic::nri::proto::FailurePolicy;
use dranic_testbed::runtime::scripted::{Behaviour, Script};
use dranic_testbed::runtime::{Caller, Kind};

use super::Case;
use crate::lab::{Lab, eventually, ms, ours};
use crate::side::Version;

/// The request's own timeout, where it is what ends the request.
const SHORT: u64 = 150;
/// The runtime's own limits, where they are.
const GIVES_UP: u64 = 80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failure {
    Explicit,
    Timeout,
    Lost,
    Protocol,
    Deadline,
    Cancel,
}

const FAILURES: [(&str, Failure); 6] = [
    ("explicit", Failure::Explicit),
    ("timeout", Failure::Timeout),
    ("lost", Failure::Lost),
    ("protocol", Failure::Protocol),
    ("deadline", Failure::Deadline),
    ("cancel", Failure::Cancel),
];

const fn policy(fail_request: bool, keep_connected: bool) -> Option<FailurePolicy> {
    Some(FailurePolicy { fail_request, keep_connected })
}

const POLICIES: [(&str, Option<FailurePolicy>); 5] = [
    ("nil", None),
    ("empty", policy(false, false)),
    ("fail", policy(true, false)),
    ("keep", policy(false, true)),
    ("both", policy(true, true)),
];

/// Every policy that there is, for cases of other files.
pub(super) const BOTH: Option<FailurePolicy> = policy(true, true);

pub(super) fn cases() -> Vec<Case> {
    let cells = FAILURES.into_iter().flat_map(|failure| POLICIES.map(|policy| (failure, policy)));
    let case = |((failure_name, failure), (policy_name, policy)): ((&str, Failure), (&str, Option<FailurePolicy>))| {
        let name = format!("matrix-{failure_name}-{policy_name}");
        let shows = format!("{failure_name} under policy {policy_name}, in each of the four requests");
        Case::new(&name, &shows, move |lab| Box::pin(cell(lab, failure, policy)))
    };
    cells.map(case).collect()
}

/// Whether the request fails, and whether the plugin is kept.
fn expected(version: Version, failure: Failure, policy: Option<FailurePolicy>) -> (bool, bool) {
    let policy = policy.filter(|_| version.policies).unwrap_or_default();
    match failure {
        Failure::Explicit | Failure::Cancel => (true, true),
        Failure::Timeout => (policy.fail_request, policy.keep_connected),
        Failure::Lost | Failure::Protocol => (policy.fail_request, false),
        // Before the policies the plugin is blamed for the runtime's own deadline.
        Failure::Deadline => (version.policies, version.policies),
    }
}

async fn cell(lab: &mut Lab, failure: Failure, policy: Option<FailurePolicy>) -> Result<String> {
    lab.start(|_| ()).await?;
    let (fails, kept) = expected(lab.side.version, failure, policy);
    for kind in [Kind::Run, Kind::Create, Kind::Stop, Kind::Remove] {
        request(lab, kind, failure, policy, (fails, kept)).await?;
        lab.has(&[]).await?;
    }
    let words = (if fails { "fails" } else { "goes on" }, if kept { "kept" } else { "dropped" });
    Ok(format!("{} / {}", words.0, words.1))
}

async fn request(lab: &Lab, kind: Kind, failure: Failure, policy: Option<FailurePolicy>, expected: (bool, bool)) -> Result<()> {
    let behaviour = match failure {
        Failure::Explicit => Behaviour::Refuse(4, "no".to_owned()),
        Failure::Timeout | Failure::Deadline | Failure::Cancel => Behaviour::Silence,
        Failure::Lost => Behaviour::Close,
        Failure::Protocol => Behaviour::WrongType,
    };
    let odd = lab.plugin(Script::new("50", "odd", policy, behaviour)).await?;
    let witness = lab.plugin(Script::new("90", "witness", None, Behaviour::Answer)).await?;
    let limit = |wanted| (failure == wanted).then_some(ms(GIVES_UP));
    let caller = Caller { deadline: limit(Failure::Deadline), cancel: limit(Failure::Cancel) };
    lab.timeout(ms(if failure == Failure::Timeout { SHORT } else { 2000 })).await?;
    let done = lab.ask(kind, &ours("a"), caller).await?;
    lab.timeout(ms(2000)).await?;

    let method = kind.method();
    let plugins = lab.runtime()?.plugins().await?;
    let kept = plugins.iter().any(|name| name == "50-odd");
    ensure!((done.error.is_some(), kept) == expected, "{method}: {done:?}, plugins {plugins:?}, expected {expected:?}");
    if let Some(error) = &done.error {
        text(method, failure, error)?;
    }
    // What goes on asks the plugins behind, what fails does not.
    if done.error.is_none() {
        eventually("the next plugin is asked", || !witness.asked().is_empty())
            .await
            .with_context(|| format!("{method}: {done:?}"))?;
    }
    ensure!(
        witness.asked().is_empty() == done.error.is_some(),
        "{method}: {done:?}, and the next was asked {:?}",
        witness.asked()
    );
    // Once the runtime's own time is over, whoever comes next is blamed, too.
    let blamed = failure == Failure::Deadline && done.error.is_none();
    let witnessed = plugins.iter().any(|name| name == "90-witness");
    ensure!(witnessed != blamed, "{method}: plugins {plugins:?}");
    drop((odd, witness));
    Ok(())
}

fn text(method: &str, failure: Failure, error: &str) -> Result<()> {
    let blame = format!("plugin 50-odd failed to handle {method} request: ");
    let (begin, end) = match failure {
        Failure::Explicit => ("rpc error: code = DeadlineExceeded desc = no", ""),
        Failure::Timeout => (&*blame, "context deadline exceeded"),
        Failure::Lost => (&*blame, "ttrpc: closed"),
        Failure::Protocol => (&*blame, "protocol error"),
        Failure::Deadline => ("context deadline exceeded", ""),
        Failure::Cancel => ("context canceled", ""),
    };
    ensure!(error.starts_with(begin) && error.contains(end), "{method}: {error}");
    Ok(())
}
