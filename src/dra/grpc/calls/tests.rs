use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::sync::Barrier;
use tokio::time::sleep;

use super::*;

fn wire(name: &str, uid: &str) -> WireClaim {
    WireClaim { namespace: "ns".into(), uid: uid.into(), name: name.into() }
}

#[test]
fn every_claim_has_one_place() {
    let claims = vec![
        wire("a", "u-1"),
        wire("a", "u-1"),
        wire("", "u-2"),
        wire("c", "../etc"),
        wire("d", "u-4"),
        wire("other", "u-4"),
        wire("d", "u-4"),
        wire("../x", "u-5"),
        wire("Big", "u-6"),
    ];
    let (work, refused) = sort("prepare", claims).unwrap();
    assert_eq!(work.keys().map(ClaimUid::as_str).collect::<Vec<_>>(), ["u-1"]);
    assert_eq!(refused.keys().map(String::as_str).collect::<Vec<_>>(), ["../etc", "u-2", "u-4", "u-5", "u-6"]);
    assert!(refused["../etc"].contains("claim UID"), "{}", refused["../etc"]);
    assert!(refused["u-2"].contains("name \"\""), "{}", refused["u-2"]);
    assert!(refused["u-4"].contains("names claim ns/d (u-4) with this UID"), "{}", refused["u-4"]);
}

#[test]
fn too_many_claims_are_refused_by_name() {
    let claims = |count: usize| (0..count).map(|i| wire(&format!("claim-{i}"), &format!("u-{i}"))).collect::<Vec<_>>();
    let (work, refused) = sort("prepare", claims(66)).unwrap();
    assert_eq!((work.len(), refused.len()), (64, 2));
    assert!(refused["u-65"].contains("ns/claim-65") && refused["u-65"].contains("66 claims"), "{}", refused["u-65"]);
    let status = sort("prepare", claims(1025)).unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[test]
fn a_text_is_small_whatever_was_sent() {
    let (_, refused) = sort("prepare", vec![wire(&"n\n".repeat(1_000_000), &"u".repeat(1_000_000))]).unwrap();
    let text = refused.values().next().unwrap();
    assert!(text.len() < 1000 && !text.contains('\n'), "{}", text.len());
}

/// Takes 50 ms for each call and remembers how many ran at once.
#[derive(Default)]
struct Slow {
    inside: AtomicUsize,
    most: AtomicUsize,
    finished: AtomicUsize,
}

impl ClaimHandler for Slow {
    async fn prepare(&self, _: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(inside, Ordering::SeqCst);
        sleep(Duration::from_millis(50)).await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.finished.fetch_add(1, Ordering::SeqCst);
        Ok(Vec::new())
    }
    async fn unprepare(&self, claim: ClaimRef) -> Result<(), ClaimError> {
        self.prepare(claim).await.map(drop)
    }
}

#[tokio::test]
async fn calls_for_one_claim_take_turns() {
    let handler = Arc::new(Slow::default());
    let calls = Calls::new(handler.clone());
    let same = || vec![wire("a", "u-1")];
    let (one, two, three) = tokio::join!(calls.prepare(same()), calls.prepare(same()), calls.unprepare(same()));
    assert!(one.unwrap()["u-1"].is_ok() && two.unwrap()["u-1"].is_ok() && three.unwrap()["u-1"].is_ok());
    assert_eq!(handler.most.load(Ordering::SeqCst), 1);
    let others = (0..8).map(|i| wire("a", &format!("u-{i}"))).collect();
    calls.prepare(others).await.unwrap();
    assert_eq!(handler.most.load(Ordering::SeqCst), 8);
    assert!(calls.locks.0.lock().unwrap().len() <= 8, "locks of finished claims do not pile up");
}

#[tokio::test]
async fn work_goes_on_when_the_caller_gives_up_and_drain_waits_for_it() {
    let handler = Arc::new(Slow::default());
    let calls = Calls::new(handler.clone());
    let cut_off = tokio::time::timeout(Duration::from_millis(10), calls.prepare(vec![wire("a", "u-1")])).await;
    assert!(cut_off.is_err());
    calls.drain().await;
    assert_eq!(handler.finished.load(Ordering::SeqCst), 1);
    let status = calls.prepare(vec![wire("a", "u-1")]).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(calls.unprepare(vec![wire("a", "u-1")]).await.unwrap()["u-1"].is_ok(), "giving back is still possible");
}

/// Answers by the claim's name.
struct Scripted(Barrier);

impl ClaimHandler for Scripted {
    async fn prepare(&self, claim: ClaimRef) -> Result<Vec<PreparedDevice>, ClaimError> {
        self.0.wait().await;
        match claim.name.as_str() {
            "silent" => Err(ClaimError(String::new())),
            "long" => Err(ClaimError("é".repeat(10_000))),
            "text" => panic!("a plain text"),
            "format" => panic!("claim {claim}"),
            _ => Ok(Vec::new()),
        }
    }
    async fn unprepare(&self, _: ClaimRef) -> Result<(), ClaimError> {
        Ok(())
    }
}

#[tokio::test]
async fn failures_stay_with_their_claim_and_always_have_a_text() {
    let names = ["silent", "long", "text", "format", "fine"];
    let calls = Calls::new(Arc::new(Scripted(Barrier::new(names.len()))));
    let answers = calls.prepare(names.iter().map(|name| wire(name, name)).collect()).await.unwrap();
    let error = |uid: &str| answers[uid].clone().unwrap_err();
    assert!(error("silent").contains("without a reason"));
    assert_eq!(error("long").chars().count(), ERROR_MAX);
    assert!(error("text").contains("panicked: a plain text"));
    assert!(error("format").contains("panicked: claim ns/format (format)"));
    assert_eq!(answers["fine"], Ok(Vec::new()));
}
