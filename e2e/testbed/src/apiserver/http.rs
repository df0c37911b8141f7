//! Requests and answers.

use std::net::TcpListener;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::claims::to_text;
use super::store::{Key, RESOURCES, Store, fits, kind_of, now};
use super::{Logged, Shared, apply, patch, slices, watch};

/// Largest body taken, in bytes.
const BODY_MAX: usize = 3 << 20;

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let app = Router::new().fallback(handle).with_state(shared);
    match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => drop(axum::serve(listener, app).await),
        Err(error) => tracing::error!(%error, "the API server double can't listen"),
    }
}

/// A refusal: status, reason, message, faults of fields.
struct Refusal(u16, &'static str, String, Vec<slices::Fault>);

impl Refusal {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self(code, reason, message.into(), Vec::new())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let causes: Vec<Value> =
            self.3.iter().map(|(field, text)| json!({"reason": "FieldValueInvalid", "message": text, "field": field})).collect();
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.2, "reason": self.1, "details": {"causes": causes}, "code": self.0});
        answer(StatusCode::from_u16(self.0).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), status.to_string())
    }
}

type Answer = Result<Response, Refusal>;

fn answer(status: StatusCode, text: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// What a path names.
struct Named {
    resource: &'static str,
    namespace: Option<String>,
    name: Option<String>,
    status: bool,
    eviction: bool,
}

impl Named {
    fn parse(path: &str) -> Option<Self> {
        let mut parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        let group = match parts.first() {
            Some(&"api") => parts.drain(..2.min(parts.len())).skip(1).collect::<Vec<_>>().join("/"),
            Some(&"apis") => parts.drain(..3.min(parts.len())).skip(1).collect::<Vec<_>>().join("/"),
            _ => return None,
        };
        let namespace =
            (parts.len() > 2 && parts[0] == "namespaces").then(|| parts.drain(..2).nth(1).unwrap_or_default().to_owned());
        let (resource, version, _, namespaced, _) = RESOURCES.iter().find(|r| Some(&r.0) == parts.first())?;
        let served = *version == group || (*resource == "events" && group == "events.k8s.io/v1");
        let eviction = *resource == "pods" && parts.get(2) == Some(&"eviction");
        let status = parts.get(2) == Some(&"status");
        let part = eviction || status || parts.len() < 3;
        let fits = served && parts.len() <= 3 && (*namespaced || namespace.is_none()) && part;
        let name = parts.get(1).map(|n| (*n).to_owned());
        fits.then_some(Self { resource, namespace, name, status, eviction })
    }

    fn key(&self, name: &str) -> Key {
        Key::new(self.resource, self.namespace.as_deref().unwrap_or_default(), name)
    }
}

async fn handle(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let agent = parts.headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    let logged = Logged { method: parts.method.to_string(), path: path.clone(), query: query.clone(), at: Instant::now(), agent };
    shared.requests.lock().unwrap_or_else(PoisonError::into_inner).push(logged);

    let latency = shared.faults.latency();
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    let method = parts.method.as_str();
    if let Some((status, retry_after)) = shared.faults.take(method) {
        // As a real server under load answers: plain text.
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, "a planned fault").into_response();
        if let Some(seconds) = retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        return response;
    }
    if shared.faults.is_forbidden(method, &path) {
        return Refusal::new(403, "Forbidden", format!("{method} {path}: User \"dranic\" cannot do this")).into_response();
    }
    let Some(named) = Named::parse(&path) else {
        if matches!(path.as_str(), "/readyz" | "/livez" | "/healthz") {
            return "ok".into_response();
        }
        return (StatusCode::NOT_FOUND, "404 page not found").into_response();
    };
    let Ok(body) = to_bytes(body, BODY_MAX).await else {
        return Refusal::new(413, "RequestEntityTooLarge", "the body is too large").into_response();
    };
    let outcome = route(&shared, &parts.method, &named, &query, &parts.headers, &body);
    outcome.unwrap_or_else(IntoResponse::into_response)
}

fn route(shared: &Arc<Shared>, method: &Method, named: &Named, query: &str, headers: &HeaderMap, body: &[u8]) -> Answer {
    let query = parse_query(query);
    let json = || serde_json::from_slice::<Value>(body).map_err(|e| Refusal::new(400, "BadRequest", format!("the body: {e}")));
    match (method, &named.name) {
        (&Method::GET, None) => list_or_watch(shared, named, &query),
        (&Method::GET, Some(name)) => get(&shared.store(), named, name),
        (&Method::POST, None) => create(&mut shared.store(), named, json()?),
        (&Method::POST, Some(name)) if named.eviction => evict(&mut shared.store(), named, name, &json()?),
        (&Method::PUT, Some(name)) => update(&mut shared.store(), named, name, json()?),
        (&Method::PATCH, Some(name)) => {
            let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
            let how = kind.starts_with("application/apply-patch").then(|| Apply::parse(&query));
            change(&mut shared.store(), named, name, &json()?, how.as_ref())
        }
        (&Method::DELETE, Some(name)) => {
            let options = if body.is_empty() { Value::Null } else { json()? };
            delete(&mut shared.store(), named, name, &options)
        }
        (&Method::DELETE, None) => {
            let selector = selector(named, &query)?;
            let mut store = shared.store();
            for key in store.keys(named.resource) {
                let inside = named.namespace.as_ref().is_none_or(|n| *n == key.namespace);
                if inside && store.get(&key).is_some_and(|object| fits(object, &selector)) {
                    store.delete(&key);
                }
            }
            Ok(success())
        }
        _ => Err(Refusal::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")),
    }
}

fn list_or_watch(shared: &Arc<Shared>, named: &Named, query: &[(String, String)]) -> Answer {
    let selector = selector(named, query)?;
    let value = |key: &str| query.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str());
    let yes = |key: &str| matches!(value(key), Some("true" | "1"));
    let store = shared.store();
    if yes("watch") {
        let from = value("resourceVersion").and_then(|v| v.parse().ok()).filter(|v| *v > 0).unwrap_or(store.version);
        drop(store);
        let lasts = Duration::from_secs(value("timeoutSeconds").and_then(|v| v.parse().ok()).unwrap_or(1800));
        let bookmarks = yes("allowWatchBookmarks");
        let wish = watch::Wish { resource: named.resource, namespace: named.namespace.clone(), selector, from, bookmarks, lasts };
        let body = watch::body(Arc::clone(shared), wish);
        return Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response());
    }
    let inside = |object: &Value| named.namespace.as_ref().is_none_or(|n| object["metadata"]["namespace"] == *n);
    let items: Vec<Value> = store.list(named.resource).into_iter().filter(|o| inside(o) && fits(o, &selector)).collect();
    let (version, kind) = kind_of(named.resource);
    let list = json!({"apiVersion": version, "kind": format!("{kind}List"),
        "metadata": {"resourceVersion": store.version.to_string()}, "items": items});
    Ok(answer(StatusCode::OK, to_text(&list)))
}

fn selector(named: &Named, query: &[(String, String)]) -> Result<Vec<(String, String)>, Refusal> {
    let text = query.iter().find(|(k, _)| k == "fieldSelector").map_or("", |(_, v)| v.as_str());
    let own = RESOURCES.iter().find(|r| r.0 == named.resource).map_or(&[][..], |r| r.4);
    let parse = |term: &str| {
        let (path, want) = term.split_once('=')?;
        let known = ["metadata.name", "metadata.namespace"].contains(&path) || own.contains(&path);
        known.then(|| (path.to_owned(), want.trim_start_matches('=').to_owned()))
    };
    let terms = text.split(',').filter(|t| !t.is_empty());
    terms.map(|t| parse(t).ok_or_else(|| Refusal::new(400, "BadRequest", format!("field label not supported: {t}")))).collect()
}

fn get(store: &Store, named: &Named, name: &str) -> Answer {
    let object = store.get(&named.key(name)).ok_or_else(|| missing(named, name))?;
    Ok(answer(StatusCode::OK, to_text(object)))
}

fn create(store: &mut Store, named: &Named, mut object: Value) -> Answer {
    let metadata = &object["metadata"];
    let name = match (metadata["name"].as_str(), metadata["generateName"].as_str()) {
        (Some(name), _) if !name.is_empty() => name.to_owned(),
        (_, Some(prefix)) if !prefix.is_empty() => store.generate(prefix),
        _ => return Err(Refusal::new(422, "Invalid", "metadata.name: Required value: name or generateName is required")),
    };
    let key = named.key(&name);
    if store.terminating.contains(&key.namespace) {
        let text = format!("unable to create new content in namespace {} because it is being terminated", key.namespace);
        return Err(Refusal::new(403, "Forbidden", format!("{} {name:?} is forbidden: {text}", named.resource)));
    }
    if store.get(&key).is_some() {
        return Err(Refusal::new(409, "AlreadyExists", format!("{} {name:?} already exists", named.resource)));
    }
    admit(store, named, &mut object, None)?;
    Ok(answer(StatusCode::CREATED, to_text(&store.create(key, object))))
}

/// No budget holds a pod here: it goes, if it is the one that is meant.
fn evict(store: &mut Store, named: &Named, name: &str, eviction: &Value) -> Answer {
    let key = named.key(name);
    let pod = store.get(&key).ok_or_else(|| missing(named, name))?;
    let wanted = &eviction["deleteOptions"]["preconditions"]["uid"];
    if wanted.is_string() && *wanted != pod["metadata"]["uid"] {
        return Err(Refusal::new(
            409,
            "Conflict",
            format!("the UID in the precondition ({wanted}) is not that of pods {name:?}"),
        ));
    }
    store.delete(&key);
    Ok(success())
}

fn update(store: &mut Store, named: &Named, name: &str, mut object: Value) -> Answer {
    let key = named.key(name);
    let old = store.get(&key).cloned().ok_or_else(|| missing(named, name))?;
    let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    if !version.is_empty() && old["metadata"]["resourceVersion"] != version {
        let text = "the object has been modified; please apply your changes to the latest version and try again";
        return Err(Refusal::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {} {name:?}: {text}", named.resource),
        ));
    }
    if named.status {
        let status = object.get("status").cloned();
        object = old.clone();
        set(&mut object, "status", status);
    } else if named.resource == "resourceclaims" {
        set(&mut object, "status", old.get("status").cloned());
    }
    admit(store, named, &mut object, Some(&old))?;
    let stored = store.replace(key, object).ok_or_else(|| missing(named, name))?;
    Ok(answer(StatusCode::OK, to_text(&stored)))
}

fn set(object: &mut Value, key: &str, value: Option<Value>) {
    let Some(map) = object.as_object_mut() else { return };
    match value {
        Some(value) => drop(map.insert(key.to_owned(), value)),
        None => drop(map.remove(key)),
    }
}

/// How an apply is meant.
struct Apply {
    manager: String,
    force: bool,
}

impl Apply {
    fn parse(query: &[(String, String)]) -> Self {
        let value = |key: &str| query.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone()).unwrap_or_default();
        Self { manager: value("fieldManager"), force: value("force") == "true" }
    }
}

fn change(store: &mut Store, named: &Named, name: &str, change: &Value, how: Option<&Apply>) -> Answer {
    let key = named.key(name);
    let uid = &change["metadata"]["uid"];
    if how.is_some_and(|how| how.manager.is_empty()) {
        return Err(Refusal::new(422, "Invalid", "fieldManager: Required value: is required for apply patch"));
    }
    let Some(mut object) = store.get(&key).cloned() else {
        if how.is_some() && !uid.is_null() && !named.status {
            let text = format!("uid mismatch: the provided object specified uid {uid}, and no existing object was found");
            return Err(Refusal::new(409, "Conflict", text));
        }
        if how.is_some() && !named.status {
            let mut object = change.clone();
            object["metadata"]["name"] = json!(name);
            return create(store, named, object);
        }
        return Err(missing(named, name));
    };
    if !uid.is_null() && *uid != object["metadata"]["uid"] {
        let fault = ("metadata.uid".to_owned(), format!("Invalid value: {uid}: field is immutable"));
        return Err(Refusal(
            422,
            "Invalid",
            format!("{} {name:?} is invalid: metadata.uid: {}", named.resource, fault.1),
            vec![fault],
        ));
    }
    if let (Some(how), true, "resourceclaims") = (how, named.status, named.resource) {
        apply::apply(&mut object, change, &how.manager, how.force, &now()).map_err(|conflict| {
            let text = format!("Apply failed with 1 conflict: conflict with {:?}: {}", conflict.0, conflict.1);
            Refusal::new(409, "Conflict", text)
        })?;
        return update_status(store, key, object);
    }
    let mut wanted = change.clone();
    if named.status {
        wanted = json!({"metadata": change["metadata"], "status": change["status"]});
    }
    let version = wanted["metadata"]["resourceVersion"].as_str().map(str::to_owned);
    patch::merge(&mut object, &wanted);
    if let Some(version) = version {
        object["metadata"]["resourceVersion"] = json!(version);
    }
    update(store, named, name, object)
}

/// Stores a claim whose `status.devices` were changed.
fn update_status(store: &mut Store, key: Key, object: Value) -> Answer {
    let changed = store.get(&key).is_none_or(|old| old["status"]["devices"] != object["status"]["devices"]);
    if changed && store.refuse_device_status {
        let text = "status.devices: Forbidden: changing status.devices requires resource=\"resourceclaims/driver\", \
                    verb=\"[associated-node:patch arbitrary-node:patch]\" permission: denied";
        let fault = vec![("status.devices".to_owned(), text.to_owned())];
        return Err(Refusal(422, "Invalid", format!("ResourceClaim {:?} is invalid: {text}", key.name), fault));
    }
    let faults = apply::validate(&object);
    if !faults.is_empty() {
        let texts: Vec<String> = faults.iter().map(|(field, text)| format!("{field}: {text}")).collect();
        return Err(Refusal(422, "Invalid", format!("ResourceClaim {:?} is invalid: {}", key.name, texts.join(", ")), faults));
    }
    let gone = Refusal::new(404, "NotFound", format!("resourceclaims {:?} not found", key.name));
    Ok(answer(StatusCode::OK, to_text(&store.replace(key, object).ok_or(gone)?)))
}

fn delete(store: &mut Store, named: &Named, name: &str, options: &Value) -> Answer {
    let key = named.key(name);
    let old = store.get(&key).ok_or_else(|| missing(named, name))?;
    for field in ["uid", "resourceVersion"] {
        let wanted = &options["preconditions"][field];
        if !wanted.is_null() && *wanted != old["metadata"][field] {
            let text = format!("Precondition failed: {field} in precondition: {wanted}, in object: {}", old["metadata"][field]);
            return Err(Refusal::new(409, "Conflict", text));
        }
    }
    store.delete(&key);
    Ok(success())
}

/// What a server does with an object before it stores it.
fn admit(store: &Store, named: &Named, object: &mut Value, old: Option<&Value>) -> Result<(), Refusal> {
    if named.resource != "resourceslices" {
        return Ok(());
    }
    if let Some(spec) = object.get_mut("spec") {
        store.drop_fields.iter().for_each(|path| slices::drop_field(spec, path));
    }
    slices::defaults(object, &now());
    let faults = slices::validate(object, old);
    if faults.is_empty() {
        return Ok(());
    }
    let texts: Vec<String> = faults.iter().map(|(field, text)| format!("{field}: {text}")).collect();
    let message = format!("ResourceSlice.resource.k8s.io is invalid: [{}]", texts.join(", "));
    Err(Refusal(422, "Invalid", message, faults))
}

fn missing(named: &Named, name: &str) -> Refusal {
    Refusal::new(404, "NotFound", format!("{} {name:?} not found", named.resource))
}

fn success() -> Response {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
    Body::from(status.to_string()).into_response()
}

fn parse_query(query: &str) -> Vec<(String, String)> {
    let pair = |part: &str| {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        (decode(key), decode(value))
    };
    query.split('&').filter(|part| !part.is_empty()).map(pair).collect()
}

/// Undoes percent encoding and `+`.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex =
            bytes.get(at + 1..at + 3).and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
        match (bytes[at], hex) {
            (b'%', Some(byte)) => {
                plain.push(byte);
                at += 2;
            }
            (b'+', _) => plain.push(b' '),
            (byte, _) => plain.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&plain).into_owned()
}
