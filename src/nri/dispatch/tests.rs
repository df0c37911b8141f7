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
    async fn run_pod_sandbox(&self, _: Sandbox, _: Instant) -> Result<(), HookError> {
        panic!("not asked")
    }
    async fn create_container(&self, _: Sandbox, _: Container, _: Instant) -> Result<Adjustment, HookError> {
        panic!("not asked")
    }
    async fn stop_pod_sandbox(&self, _: Sandbox, _: Instant) {
        panic!("not asked")
    }
    async fn remove_pod_sandbox(&self, _: Sandbox, _: Instant) {
        panic!("not asked")
    }
    async fn synchronize(&self, _: Vec<Sandbox>, _: Vec<Container>) {}
    fn connection(&self, _: bool, _: &str) {}
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
