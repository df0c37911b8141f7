//! Finds keys that stand twice in one JSON object. `serde_json` keeps the last one silently.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Longest path that is made, in bytes, and longest key in it, in characters: keys are as long as their writer likes.
const PATH_MAX: usize = 256;
const KEY_MAX: usize = 64;

/// JSON paths of all keys that repeat within their object, in order of appearance. Text that is not JSON gives none.
#[must_use]
pub fn duplicate_keys(json: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut decoder = serde_json::Deserializer::from_str(json);
    let mut path = PathText::default();
    let walked = Walk { path: &mut path, found: &mut found }.deserialize(&mut decoder);
    if walked.and_then(|()| decoder.end()).is_err() {
        found.clear();
    }
    found
}

/// A JSON path (`interface.addresses[0]`) that stays short whatever the keys are.
#[derive(Debug, Default)]
pub(super) struct PathText(String);

impl PathText {
    /// Goes down to a key of an object.
    pub(super) fn push_key(&mut self, key: &str) {
        let dot = if self.0.is_empty() { "" } else { "." };
        let short: String = key.chars().take(KEY_MAX).collect();
        let cut = if short.len() < key.len() { "…" } else { "" };
        self.push(&format!("{dot}{short}{cut}"));
    }

    /// Goes down to an element of a list.
    pub(super) fn push_index(&mut self, index: usize) {
        self.push(&format!("[{index}]"));
    }

    fn push(&mut self, part: &str) {
        if self.0.len() < PATH_MAX {
            self.0.push_str(part);
        }
    }

    /// The path.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether this is the root.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Walks one JSON value; `path` is where it stands.
struct Walk<'a> {
    path: &'a mut PathText,
    found: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, decoder: D) -> Result<(), D::Error> {
        decoder.deserialize_any(self)
    }
}

macro_rules! scalar {
    ($($name:ident: $kind:ty),*) => {
        $(fn $name<E>(self, _: $kind) -> Result<(), E> {
            Ok(())
        })*
    };
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    scalar!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let here = self.path.0.len();
        for index in 0.. {
            self.path.push_index(index);
            let more = list.next_element_seed(Walk { path: self.path, found: self.found })?.is_some();
            self.path.0.truncate(here);
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let here = self.path.0.len();
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            self.path.push_key(&key);
            if seen.insert(key) {
                map.next_value_seed(Walk { path: self.path, found: self.found })?;
            } else {
                self.found.push(self.path.0.clone());
                map.next_value::<IgnoredAny>()?;
            }
            self.path.0.truncate(here);
        }
        Ok(())
    }
}
