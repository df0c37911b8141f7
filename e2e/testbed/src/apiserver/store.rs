//! The objects, their versions, and what happened to them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

/// The resources it has: plural name, `apiVersion`, kind, whether in namespaces, field selectors beside name and namespace.
pub(super) const RESOURCES: &[(&str, &str, &str, bool, &[&str])] = &[
    ("resourceslices", "resource.k8s.io/v1", "ResourceSlice", false, &["spec.driver", "spec.nodeName", "spec.pool.name"]),
    ("resourceclaims", "resource.k8s.io/v1", "ResourceClaim", true, &[]),
    ("deviceclasses", "resource.k8s.io/v1", "DeviceClass", false, &[]),
    ("nodes", "v1", "Node", false, &[]),
    ("pods", "v1", "Pod", true, &["spec.nodeName"]),
    ("events", "v1", "Event", true, &[]),
];

/// How many events are kept for watches that begin later.
const HISTORY: usize = 10_000;

/// Which object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Plural name.
    pub resource: &'static str,
    /// Empty where there is none.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl Key {
    /// The key of an object.
    #[must_use]
    pub fn new(resource: &'static str, namespace: &str, name: &str) -> Self {
        Self { resource, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

/// Something that happened.
#[derive(Debug, Clone)]
pub(super) struct Happened {
    pub(super) version: u64,
    pub(super) resource: &'static str,
    /// `ADDED`, `MODIFIED`, `DELETED`.
    pub(super) what: &'static str,
    pub(super) object: Value,
}

/// All objects.
pub(super) struct Store {
    objects: BTreeMap<Key, Value>,
    pub(super) history: Vec<Happened>,
    pub(super) version: u64,
    /// Versions up to this one are forgotten.
    pub(super) compacted: u64,
    /// Grows when all watches are to end.
    pub(super) dropped: u64,
    pub(super) drop_fields: Vec<String>,
    /// Changes of `status.devices` lack the permission that 1.36 asks for.
    pub(super) refuse_device_status: bool,
    /// Namespaces in which nothing can be made any more.
    pub(super) terminating: BTreeSet<String>,
    made: u64,
    /// Told about every change.
    pub(super) news: watch::Sender<()>,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            history: Vec::new(),
            version: 100,
            compacted: 0,
            dropped: 0,
            drop_fields: Vec::new(),
            refuse_device_status: false,
            terminating: BTreeSet::new(),
            made: 0,
            news: watch::Sender::new(()),
        }
    }
}

impl Store {
    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    pub(super) fn list(&self, resource: &str) -> Vec<Value> {
        self.objects.iter().filter(|(key, _)| key.resource == resource).map(|(_, object)| object.clone()).collect()
    }

    pub(super) fn keys(&self, resource: &str) -> Vec<Key> {
        self.objects.keys().filter(|key| key.resource == resource).cloned().collect()
    }

    /// Stores a new object with the metadata a server sets; gives it as stored.
    pub(super) fn create(&mut self, key: Key, mut object: Value) -> Value {
        self.made += 1;
        let uid = format!("{:08x}-{:04x}-4000-8000-{:012x}", std::process::id(), self.made >> 48, self.made);
        let meta = metadata(&mut object);
        meta.insert("name".to_owned(), json!(key.name));
        if !key.namespace.is_empty() {
            meta.insert("namespace".to_owned(), json!(key.namespace));
        }
        meta.insert("uid".to_owned(), json!(uid));
        meta.insert("creationTimestamp".to_owned(), json!(now()));
        meta.insert("generation".to_owned(), json!(1));
        self.store(key, object, "ADDED")
    }

    /// Replaces an object. `uid`, `creationTimestamp` and `generation` are the server's; nothing happens when nothing changes.
    pub(super) fn replace(&mut self, key: Key, mut object: Value) -> Option<Value> {
        let old = self.objects.get(&key)?.clone();
        let generation = old["metadata"]["generation"].as_u64().unwrap_or(1) + u64::from(old["spec"] != object["spec"]);
        let meta = metadata(&mut object);
        for kept in ["uid", "creationTimestamp", "resourceVersion", "name", "namespace"] {
            match old["metadata"].get(kept) {
                Some(value) => drop(meta.insert(kept.to_owned(), value.clone())),
                None => drop(meta.remove(kept)),
            }
        }
        meta.insert("generation".to_owned(), json!(generation));
        set_type(&key, &mut object);
        if object == old {
            return Some(old);
        }
        Some(self.store(key, object, "MODIFIED"))
    }

    pub(super) fn delete(&mut self, key: &Key) -> Option<Value> {
        let mut object = self.objects.remove(key)?;
        self.version += 1;
        metadata(&mut object).insert("resourceVersion".to_owned(), json!(self.version.to_string()));
        self.happened(key.resource, "DELETED", object.clone());
        Some(object)
    }

    /// Creates or replaces; gives the UID.
    pub(super) fn put(&mut self, resource: &'static str, object: Value) -> String {
        let name = object["metadata"]["name"].as_str().expect("an object has a name").to_owned();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
        let key = Key { resource, namespace, name };
        let stored = match self.replace(key.clone(), object.clone()) {
            Some(stored) => stored,
            None => self.create(key, object),
        };
        stored["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
    }

    /// Ends the watches; with `expire` their versions are gone too.
    pub(super) fn end_watches(&mut self, expire: bool) {
        if expire {
            self.version += 1;
            self.compacted = self.version;
            self.history.clear();
        } else {
            self.dropped += 1;
        }
        self.news.send_replace(());
    }

    /// A name from a prefix, as a server makes it: cut to 58 bytes, and five more.
    pub(super) fn generate(&mut self, prefix: &str) -> String {
        self.made += 1;
        let letters = b"bcdfghjklmnpqrstvwxz2456789";
        let mut rest = self.made.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut name: String = prefix.chars().take(58).collect();
        for _ in 0..5 {
            let at = usize::try_from(rest % 27).unwrap_or(0);
            name.push(char::from(letters[at]));
            rest /= 27;
        }
        name
    }

    fn store(&mut self, key: Key, mut object: Value, what: &'static str) -> Value {
        self.version += 1;
        set_type(&key, &mut object);
        metadata(&mut object).insert("resourceVersion".to_owned(), json!(self.version.to_string()));
        self.happened(key.resource, what, object.clone());
        self.objects.insert(key, object.clone());
        object
    }

    fn happened(&mut self, resource: &'static str, what: &'static str, object: Value) {
        if self.history.len() >= HISTORY {
            let old = self.history.drain(..HISTORY / 2).next_back();
            self.compacted = old.map_or(self.compacted, |h| h.version);
        }
        self.history.push(Happened { version: self.version, resource, what, object });
        self.news.send_replace(());
    }
}

/// The kind of a resource: `apiVersion` and kind.
pub(super) fn kind_of(resource: &str) -> (&'static str, &'static str) {
    RESOURCES.iter().find(|r| r.0 == resource).map_or(("v1", "Unknown"), |r| (r.1, r.2))
}

fn set_type(key: &Key, object: &mut Value) {
    let (version, kind) = kind_of(key.resource);
    object["apiVersion"] = json!(version);
    object["kind"] = json!(kind);
}

/// The metadata of an object, made where there is none.
fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    object["metadata"].as_object_mut().expect("it was just made one")
}

pub(super) fn now() -> String {
    let seconds = Timestamp::now().as_second();
    Timestamp::from_second(seconds).map(|t| t.to_string()).unwrap_or_default()
}

/// Whether `object` fits a field selector (`a=b,c=d`).
pub(super) fn fits(object: &Value, selector: &[(String, String)]) -> bool {
    selector.iter().all(|(path, want)| {
        let mut value = object;
        for part in path.split('.') {
            value = &value[part];
        }
        value.as_str().unwrap_or_default() == want
    })
}
