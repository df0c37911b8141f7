use proptest::prelude::*;

use super::*;
use crate::nri::{Adjustment, HookError};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

#[test]
fn the_margin_is_a_tenth_but_at_least_150_ms_and_at_most_half() {
    let margin = Margin::default();
    assert_eq!(margin.of(ms(60_000)), ms(6000));
    assert_eq!(margin.of(ms(2000)), ms(200));
    assert_eq!(margin.of(ms(1000)), ms(150));
    assert_eq!(margin.of(ms(100)), ms(50));
    assert_eq!(margin.of(Duration::ZERO), Duration::ZERO);
}

proptest! {
    #[test]
    fn the_hook_ends_before_the_answer_and_the_answer_before_the_deadline(nanoseconds in 1..=i64::MAX as u64, percent in 0u32..1000) {
        let (arrival, total) = (Instant::now(), Duration::from_nanos(nanoseconds));
        let budget = Budget::new(arrival, total, Margin { least: ms(150), percent });
        prop_assert!(arrival <= budget.hook && budget.hook <= budget.answer && budget.answer <= arrival + total);
        prop_assert!(budget.answer - arrival >= total / 2);
    }
}

struct Nobody;

impl SandboxHandler for Nobody {
    fn is_ours(&self, _: &str) -> bool {
        false
    }
    async fn run_pod_sandbox(&self, _: Sandbox, _: RequestTime) -> Result<(), HookError> {
        panic!("not asked")
    }
    async fn create_container(&self, _: Sandbox, _: Container, _: RequestTime) -> Result<Adjustment, HookError> {
        panic!("not asked")
    }
    async fn stop_pod_sandbox(&self, _: Sandbox, _: RequestTime) {
        panic!("not asked")
    }
    async fn remove_pod_sandbox(&self, _: Sandbox, _: RequestTime) {
        panic!("not asked")
    }
    async fn synchronize(&self, _: Vec<Sandbox>, _: Vec<Container>) {}
    fn connection(&self, _: bool, _: &str) {}
}

/// Everything is ours, and every hook ends as this says.
#[derive(Debug, Clone, Copy)]
enum Odd {
    Fine,
    Refuses,
    Panics,
    Hangs,
}

impl Odd {
    async fn end(&self) -> Result<(), HookError> {
        match self {
            Self::Fine => Ok(()),
            Self::Refuses => Err(HookError("no".to_owned())),
            Self::Panics => panic!("as the test wants"),
            Self::Hangs => std::future::pending().await,
        }
    }
}

impl SandboxHandler for Odd {
    fn is_ours(&self, _: &str) -> bool {
        true
    }
    fn marks(&self) -> &str {
        "MARK"
    }
    fn admit(&self, _: &str, marked: &[&str]) -> Result<(), HookError> {
        if marked.is_empty() { Ok(()) } else { Err(HookError("not admitted".to_owned())) }
    }
    async fn run_pod_sandbox(&self, _: Sandbox, _: RequestTime) -> Result<(), HookError> {
        self.end().await
    }
    async fn create_container(&self, _: Sandbox, _: Container, _: RequestTime) -> Result<Adjustment, HookError> {
        self.end().await.map(|()| Adjustment::default())
    }
    async fn stop_pod_sandbox(&self, _: Sandbox, _: RequestTime) {
        let _ = self.end().await;
    }
    async fn remove_pod_sandbox(&self, _: Sandbox, _: RequestTime) {
        let _ = self.end().await;
    }
    async fn synchronize(&self, _: Vec<Sandbox>, _: Vec<Container>) {
        let _ = self.end().await;
    }
    fn connection(&self, _: bool, _: &str) {}
}

/// Bytes of all kinds: requests about pods, with an event number and a marked variable or without, and anything else.
fn payloads() -> impl Strategy<Value = Vec<u8>> {
    let pod = |uid| proto::PodSandbox { id: "a".to_owned(), uid, ..proto::PodSandbox::default() };
    let container = |env| proto::Container { env, ..proto::Container::default() };
    let request = ("[a-z]{0,9}", prop::collection::vec("(MARK)?[A-Z]{1,3}=x", 0..3)).prop_map(move |(uid, env)| {
        proto::CreateContainerRequest { pod: Some(pod(uid)), container: Some(container(env)) }.encode_to_vec()
    });
    let event = ("[a-z]{0,9}", -1i32..20)
        .prop_map(move |(uid, event)| proto::StateChangeEvent { event, pod: Some(pod(uid)), container: None }.encode_to_vec());
    prop_oneof![request, event, prop::collection::vec(any::<u8>(), 0..64)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    /// The runtime would take it for a method that we do not have, and send events from then on.
    #[test]
    fn no_method_is_ever_answered_with_unimplemented(
        odd in prop::sample::select(vec![Odd::Fine, Odd::Refuses, Odd::Panics, Odd::Hangs]),
        payload in payloads(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let codes: Vec<_> = runtime.block_on(async {
            let dispatcher = Dispatcher::new(Arc::new(odd), Handle::current(), Margin::default(), "dranic".to_owned());
            let mut codes = Vec::new();
            for (name, method) in METHODS {
                let request = Request { timeout_nano: 2_000_000, ..request(payload.clone()) };
                let answer = dispatcher.answer(method, Instant::now(), &request).await;
                codes.extend(answer.err().map(|status| (name, status.code.enum_value())));
            }
            codes
        });
        prop_assert!(codes.iter().all(|(_, code)| *code != Ok(Code::UNIMPLEMENTED)), "{:?}", codes);
    }
}

fn dispatcher() -> Dispatcher<Nobody> {
    Dispatcher::new(Arc::new(Nobody), Handle::current(), Margin::default(), "dranic".to_owned())
}

fn request(payload: Vec<u8>) -> Request {
    Request { payload, ..Request::new() }
}

#[tokio::test]
async fn a_request_without_a_timeout_has_the_one_of_configure() {
    let dispatcher = dispatcher();
    let mut call = request(Vec::new());
    let total = |call: &Request| dispatcher.budget(Instant::now(), call).total;
    assert_eq!(total(&call), ms(2000));
    for (told, expected) in [(0, 2000), (-5, 2000), (i64::MAX, 2000), (60_000, 60_000)] {
        let configure = proto::ConfigureRequest { request_timeout: told, ..Default::default() };
        dispatcher.configure(&configure.encode_to_vec()).unwrap();
        assert_eq!(total(&call), ms(expected), "{told} in Configure");
    }
    call.timeout_nano = 700_000_000;
    assert_eq!(total(&call), ms(700));
    call.timeout_nano = -1;
    assert_eq!(total(&call), ms(60_000));
}

#[tokio::test]
async fn the_answer_to_configure_is_exact() {
    let answer = dispatcher().configure(&[]).unwrap();
    assert_eq!(answer, [0x10, 0x0f, 0x1a, 4, 8, 1, 16, 1]);
}

#[tokio::test]
async fn every_method_answers_valid_bytes_and_refuses_garbage() {
    let dispatcher = dispatcher();
    for (name, method) in METHODS {
        let answer = |payload| {
            let request = request(payload);
            let dispatcher = &dispatcher;
            async move { dispatcher.answer(method, Instant::now(), &request).await }
        };
        assert!(answer(Vec::new()).await.is_ok(), "{name}");
        // A field of a later version.
        assert!(answer(vec![0xfa, 0x3e, 1, 7]).await.is_ok(), "{name}");
        let status = answer(vec![0x0a, 200, 1, 2]).await.unwrap_err();
        assert_eq!(status.code.enum_value(), Ok(Code::INVALID_ARGUMENT), "{name}");
    }
}

#[tokio::test]
async fn synchronize_is_bounded() {
    let dispatcher = dispatcher();
    let pods = vec![proto::PodSandbox::default(); MAX_OBJECTS / 2 + 1];
    let part = proto::SynchronizeRequest { pods, containers: Vec::new(), more: true };
    assert_eq!(dispatcher.collect(part.clone()), Ok(None));
    assert_eq!(dispatcher.collect(part).unwrap_err().code.enum_value(), Ok(Code::RESOURCE_EXHAUSTED));
    let last = proto::SynchronizeRequest::default();
    assert_eq!(dispatcher.collect(last), Ok(Some(Parts::default())));
}

#[test]
fn the_runtime_says_who_it_is() {
    let mut request = proto::ConfigureRequest {
        runtime_name: "containerd".into(),
        runtime_version: "v2.4.2".into(),
        nri_version: "v0.12.5".into(),
        ..Default::default()
    };
    assert_eq!(identity(&request), "containerd v2.4.2 (NRI v0.12.5)");
    request.nri_version.clear();
    request.runtime_version = "v2.1.9\n".into();
    assert_eq!(identity(&request), "containerd v2.1.9");
    request.runtime_name = "x".repeat(1000);
    assert!(identity(&request).len() < 100);
}
