//! One request and its answer, bounded in time and size.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use axum::body::BodyDataStream;
use axum::http::{Request, StatusCode, header::RETRY_AFTER};
use futures_util::StreamExt;
use kube::Client;
use kube::client::Body;
use kube::core::Status;

use super::ApiError;
use super::error::chain;

/// How much of an error's answer is read, in bytes.
const REFUSAL_MAX: usize = 64 << 10;
/// Longest text of the server that is passed on, in characters.
const TEXT_MAX: usize = 1000;
/// Longest wait a server can ask of us.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);
/// First and longest wait after a failure without a wish of the server.
const BACKOFF_FIRST: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// What is asked of the API server: for error texts, and for the RBAC rule it needs.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    object: String,
}

impl Call {
    /// `object` is for people: a name, a namespace and name, a selector.
    pub(crate) fn new(verb: &'static str, group: &'static str, resource: &'static str, object: String) -> Self {
        Self { verb, group, resource, object }
    }

    fn what(&self) -> String {
        format!("{} {} {}", self.verb, self.resource, self.object)
    }

    fn rule(&self) -> String {
        format!("apiGroups [{:?}], resources [{:?}], verbs [{:?}]", self.group, self.resource, self.verb)
    }

    /// The server can't be reached because of `cause`.
    pub(crate) fn unreachable(&self, cause: String) -> ApiError {
        ApiError::Unreachable { what: self.what(), cause }
    }

    /// Anything else went wrong.
    pub(crate) fn other(&self, text: String) -> ApiError {
        ApiError::Other { what: self.what(), text }
    }

    /// The error for `status` with the server's `body`.
    pub(crate) fn refusal(&self, status: u16, retry_after: Option<Duration>, body: &str) -> ApiError {
        let parsed = serde_json::from_str::<Status>(body).unwrap_or_default();
        let text = if parsed.message.is_empty() { body } else { &parsed.message };
        let text: String = text.trim().chars().take(TEXT_MAX).collect();
        let what = self.what();
        match status {
            401 | 403 => ApiError::Forbidden { what, text, rule: self.rule() },
            404 => ApiError::NotFound { what, text },
            409 => ApiError::Conflict { what, text },
            410 => ApiError::Gone { what, text },
            400 | 422 => ApiError::Invalid { what, text, fields: fields_of(&parsed) },
            429 | 500..=599 => ApiError::Busy { what, text, status, retry_after: retry_after.or_else(|| wish_of(&parsed)) },
            _ => ApiError::Other { what, text: format!("unexpected status {status}: {text}") },
        }
    }
}

fn fields_of(status: &Status) -> Vec<String> {
    let causes = status.details.iter().flat_map(|d| &d.causes);
    causes.map(|c| c.field.clone()).filter(|f| !f.is_empty()).take(64).collect()
}

fn wish_of(status: &Status) -> Option<Duration> {
    let seconds = u64::from(status.details.as_ref()?.retry_after_seconds);
    (seconds > 0).then(|| Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

/// Sends `request` and reads the whole answer, at most `limit` bytes.
///
/// # Errors
/// See [`ApiError`].
pub(crate) async fn call(client: &Client, what: &Call, request: Request<Vec<u8>>, limit: usize) -> Result<String, ApiError> {
    let body = open(client, what, request).await?;
    match tokio::time::timeout(super::ANSWER_TIMEOUT, read(what, body, limit)).await {
        Ok(text) => text,
        Err(_) => Err(what.unreachable("the answer broke off".to_owned())),
    }
}

/// Sends `request` and gives the answer's body as it comes.
///
/// # Errors
/// See [`ApiError`].
pub(crate) async fn open(client: &Client, what: &Call, request: Request<Vec<u8>>) -> Result<BodyDataStream, ApiError> {
    let response = client.send(request.map(Body::from)).await.map_err(|e| what.unreachable(chain(&e)))?;
    let status = response.status();
    let wish = response.headers().get(RETRY_AFTER).and_then(|v| v.to_str().ok()).and_then(|v| v.trim().parse().ok());
    let body = axum::body::Body::new(response.into_body()).into_data_stream();
    if status.is_success() {
        return Ok(body);
    }
    let wish = wish.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    let reading = tokio::time::timeout(super::ANSWER_TIMEOUT, read(what, body, REFUSAL_MAX));
    let text = reading.await.ok().and_then(Result::ok).unwrap_or_else(|| reason(status));
    Err(what.refusal(status.as_u16(), wish, &text))
}

fn reason(status: StatusCode) -> String {
    status.canonical_reason().unwrap_or("no text").to_owned()
}

async fn read(what: &Call, mut body: BodyDataStream, limit: usize) -> Result<String, ApiError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = body.next().await {
        let chunk = chunk.map_err(|e| what.unreachable(chain(&e)))?;
        if bytes.len() + chunk.len() > limit {
            return Err(what.other(format!("the answer has more than {limit} bytes; it is refused")));
        }
        bytes.extend_from_slice(&chunk);
    }
    String::from_utf8(bytes).map_err(|_| what.other("the answer is not UTF-8".to_owned()))
}

/// Waits that double from 250 ms to 30 s, each a quarter more or less, so that nodes do not come back all at once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Counts a failure and says how long to wait; not less than the server's wish.
    pub(crate) fn fail(&mut self, wish: Option<Duration>) -> Duration {
        let base = BACKOFF_FIRST.saturating_mul(1 << self.failures.min(10)).min(BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        base.mul_f64(jitter()).max(wish.unwrap_or_default())
    }

    /// How many failures there were in a row.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    /// It works again.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// 0.75 to 1.25. The standard library's hash keys are random enough for spreading load.
fn jitter() -> f64 {
    let random = RandomState::new().build_hasher().finish() % 1000;
    #[allow(clippy::cast_precision_loss, reason = "below 1000")]
    let part = random as f64 / 2000.0;
    0.75 + part
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str) -> ApiError {
        Call::new("update", "resource.k8s.io", "resourceslices", "a".to_owned()).refusal(status, None, body)
    }

    #[test]
    fn an_error_names_request_rule_and_fields() {
        let text = refusal(403, "no").to_string();
        assert!(text.contains("update resourceslices a"), "{text}");
        assert!(text.contains(r#"apiGroups ["resource.k8s.io"], resources ["resourceslices"], verbs ["update"]"#), "{text}");
        let body = r#"{"kind":"Status","status":"Failure","message":"m","code":422,
            "details":{"causes":[{"reason":"FieldValueInvalid","message":"x","field":"spec.devices[3].name"}]}}"#;
        let ApiError::Invalid { text, fields, .. } = refusal(422, body) else { panic!("not Invalid") };
        assert_eq!((text.as_str(), fields), ("m", vec!["spec.devices[3].name".to_owned()]));
    }

    #[test]
    fn a_huge_or_strange_text_is_bounded() {
        assert!(refusal(500, &"é".repeat(100_000)).to_string().len() < 2500);
        assert_eq!(refusal(503, r#"{"details":{"retryAfterSeconds":4000000000}}"#).retry_after(), Some(RETRY_AFTER_MAX));
    }

    #[test]
    fn waits_double_up_to_the_limit_and_keep_the_servers_wish() {
        let mut backoff = Backoff::default();
        let waits: Vec<Duration> = (0..100).map(|_| backoff.fail(None)).collect();
        assert!(waits[0] < Duration::from_millis(320) && waits[4] > Duration::from_secs(2));
        assert!(waits.iter().all(|w| *w <= BACKOFF_MAX.mul_f64(1.25)));
        assert!(waits[99] >= BACKOFF_MAX.mul_f64(0.75));
        backoff.reset();
        assert!(backoff.fail(None) < Duration::from_millis(320));
        assert_eq!(backoff.fail(Some(Duration::from_secs(60))), Duration::from_secs(60));
    }
}
