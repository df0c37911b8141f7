//! YAML (and JSON, which is a part of it) as a tree whose every value knows its line. What is read is bounded, whatever the text.

use std::collections::{HashMap, HashSet};

use granit_parser::{Event, Parser, ScalarStyle, Tag};
use serde_json::Value;

use super::scalar;

/// Longest text that is read, in bytes. etcd takes objects of up to 1.5 MiB.
pub const TEXT_MAX: usize = 4 * 1024 * 1024;
/// Deepest nesting of lists and maps. The API's objects need about 20.
pub const DEPTH_MAX: usize = 64;
/// Most that a text may come to in memory, in bytes, when all its aliases are written out.
const WEIGHT_MAX: usize = 128 * 1024 * 1024;
/// Most keys of one map.
const KEYS_MAX: usize = 16 * 1024;
/// What a value weighs besides its text.
const NODE_WEIGHT: usize = 128;

/// A place in a text; both count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

/// A value and where it begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Where it begins.
    pub at: Position,
    /// What it is.
    pub tree: Tree,
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum Tree {
    /// `null`, a truth value, a number, or text.
    Scalar(Value),
    /// A list.
    List(Vec<Node>),
    /// A map, as it is written: a key may stand in it twice.
    Map(Vec<Entry>),
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key is.
    pub at: Position,
    /// The value.
    pub node: Node,
    /// It came by `<<` from another map; one of the map's own goes before it.
    merged: bool,
}

/// Why a text can't be read, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {}: {why}", at.line)]
pub struct SyntaxError {
    /// Where.
    pub at: Position,
    /// Why.
    pub why: String,
}

impl Node {
    /// The value of `key`; the last one where it stands twice, as for the API server.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().rev().find(|entry| entry.key == key).map(|entry| &entry.node)
    }

    /// The text, if it is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        if let Tree::Scalar(Value::String(text)) = &self.tree { Some(text) } else { None }
    }

    /// The elements; none if it is no list.
    #[must_use]
    pub fn elements(&self) -> &[Self] {
        if let Tree::List(list) = &self.tree { list } else { &[] }
    }

    /// Keys and values; none if it is no map.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        if let Tree::Map(map) = &self.tree { map } else { &[] }
    }

    /// Keys that stand twice in their map, with their paths from here.
    #[must_use]
    pub fn repeated(&self) -> Vec<(String, Position)> {
        let mut found = Vec::new();
        self.find_repeated("", &mut found);
        found
    }

    fn find_repeated(&self, path: &str, found: &mut Vec<(String, Position)>) {
        for (index, node) in self.elements().iter().enumerate() {
            node.find_repeated(&format!("{path}[{index}]"), found);
        }
        let mut seen = HashSet::new();
        for entry in self.entries() {
            let dot = if path.is_empty() { "" } else { "." };
            let path = format!("{path}{dot}{}", entry.key);
            if seen.insert(&entry.key) {
                entry.node.find_repeated(&path, found);
            } else {
                found.push((path, entry.at));
            }
        }
    }

    /// As JSON; of a key that stands twice the last.
    #[must_use]
    pub fn to_json(&self) -> Value {
        match &self.tree {
            Tree::Scalar(value) => value.clone(),
            Tree::List(list) => list.iter().map(Self::to_json).collect(),
            Tree::Map(map) => Value::Object(map.iter().map(|e| (e.key.clone(), e.node.to_json())).collect()),
        }
    }

    /// Where a JSON path leads (`interface.addresses[0]`), as far down as it leads anywhere: to the key, or to the element.
    #[must_use]
    pub fn locate(&self, path: &str) -> Position {
        self.locate_below(path, self.at)
    }

    fn locate_below(&self, path: &str, above: Position) -> Position {
        self.step(path).map_or(above, |(at, node, rest)| if rest.is_empty() { at } else { node.locate_below(rest, at) })
    }

    /// Whether there is something at a JSON path.
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        path.is_empty() || self.step(path).is_some_and(|(_, node, rest)| node.has(rest))
    }

    /// One step down a path; keys may have dots in them, so the longest that fits is taken.
    fn step<'a, 'p>(&'a self, path: &'p str) -> Option<(Position, &'a Self, &'p str)> {
        let path = path.strip_prefix('.').unwrap_or(path);
        if let Some((index, rest)) = path.strip_prefix('[').and_then(|p| p.split_once(']')) {
            let node = self.elements().get(index.parse::<usize>().ok()?)?;
            return Some((node.at, node, rest));
        }
        let fits = |key: &str| path.strip_prefix(key).filter(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
        // Of keys that are as long as each other (one that stands twice) the last.
        let found = self.entries().iter().filter_map(|e| Some((e, fits(&e.key)?)));
        found.max_by_key(|(e, _)| e.key.len()).map(|(e, rest)| (e.at, &e.node, rest))
    }
}

/// All documents of a text.
///
/// # Errors
/// When it is not YAML, or more than is read.
pub fn documents(text: &str) -> Result<Vec<Node>, SyntaxError> {
    if text.len() > TEXT_MAX {
        let why = format!("has {} bytes; at most {TEXT_MAX} are read", text.len());
        return Err(SyntaxError { at: Position { line: 1, column: 1 }, why });
    }
    let options = granit_parser::options! { emit_comments: false, simple_key_max_lookahead: 64 * 1024 };
    let mut builder = Builder::default();
    for next in Parser::new_from_str_with_options(text, options) {
        let (event, span) = next.map_err(|error| SyntaxError { at: place(error.marker()), why: error.info() })?;
        let at = place(&span.start);
        builder.take(event, at).map_err(|why| SyntaxError { at, why })?;
    }
    Ok(builder.documents)
}

fn place(marker: &granit_parser::Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

/// A list or map that is not at its end yet.
struct Open {
    node: Node,
    anchor: usize,
    /// Of a map: the key whose value comes next.
    key: Option<(String, Position)>,
}

#[derive(Default)]
struct Builder {
    documents: Vec<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    weight: usize,
}

impl Builder {
    fn take(&mut self, event: Event<'_>, at: Position) -> Result<(), String> {
        match event {
            Event::DocumentStart(..) => self.anchors.clear(),
            Event::Scalar(text, style, anchor, tag) => {
                let value = value(&text, style, tag.as_deref());
                self.weigh(NODE_WEIGHT + text.len())?;
                self.put(Node { at, tree: Tree::Scalar(value) }, anchor)?;
            }
            Event::SequenceStart(_, anchor, _) => self.begin(Tree::List(Vec::new()), at, anchor)?,
            Event::MappingStart(_, anchor, _) => self.begin(Tree::Map(Vec::new()), at, anchor)?,
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    self.put(open.node, open.anchor)?;
                }
            }
            Event::Alias(id) => {
                let node = self.anchors.get(&id).ok_or("an alias stands inside of what it names")?.clone();
                let (weight, depth) = measure(&node);
                self.weigh(weight)?;
                self.deep(depth)?;
                self.put(Node { at, ..node }, 0)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, tree: Tree, at: Position, anchor: usize) -> Result<(), String> {
        self.weigh(NODE_WEIGHT)?;
        self.deep(1)?;
        self.open.push(Open { node: Node { at, tree }, anchor, key: None });
        Ok(())
    }

    fn deep(&self, more: usize) -> Result<(), String> {
        if self.open.len() + more > DEPTH_MAX {
            return Err(format!("is nested more than {DEPTH_MAX} levels deep"));
        }
        Ok(())
    }

    fn weigh(&mut self, more: usize) -> Result<(), String> {
        self.weight += more;
        if self.weight > WEIGHT_MAX {
            return Err("is too much, with its aliases written out".to_owned());
        }
        Ok(())
    }

    /// Puts a whole value where it belongs.
    fn put(&mut self, node: Node, anchor: usize) -> Result<(), String> {
        if anchor != 0 {
            self.weigh(measure(&node).0)?;
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            self.documents.push(node);
            return Ok(());
        };
        match &mut open.node.tree {
            Tree::List(list) => list.push(node),
            Tree::Map(map) if map.len() >= KEYS_MAX => return Err(format!("has more than {KEYS_MAX} keys")),
            Tree::Map(map) => match open.key.take() {
                None => open.key = Some((key(&node)?, node.at)),
                Some((key, _)) if key == "<<" => merge(map, &node),
                Some((key, at)) => {
                    if map.first().is_some_and(|first| first.merged) {
                        map.retain(|entry| !entry.merged || entry.key != key);
                    }
                    map.push(Entry { key, at, node, merged: false });
                }
            },
            Tree::Scalar(_) => {}
        }
        Ok(())
    }
}

/// What a value weighs, and how many levels it has.
fn measure(node: &Node) -> (usize, usize) {
    let sum =
        |parts: &mut dyn Iterator<Item = (usize, usize)>| parts.fold((0, 0), |(w, d), (more, deep)| (w + more, d.max(deep)));
    match &node.tree {
        Tree::Scalar(value) => (NODE_WEIGHT + value.as_str().map_or(0, str::len), 0),
        Tree::List(list) => {
            let (weight, depth) = sum(&mut list.iter().map(measure));
            (NODE_WEIGHT + weight, depth + 1)
        }
        Tree::Map(map) => {
            let (weight, depth) = sum(&mut map.iter().map(|e| {
                let (weight, depth) = measure(&e.node);
                (weight + e.key.len(), depth)
            }));
            (NODE_WEIGHT + weight, depth + 1)
        }
    }
}

fn key(node: &Node) -> Result<String, String> {
    match &node.tree {
        Tree::Scalar(Value::String(text)) => Ok(text.clone()),
        Tree::Scalar(other) => Ok(other.to_string()),
        _ => Err("a list or map can't be a key".to_owned()),
    }
}

/// `<<: *base`: what is not in the map itself comes from the other one, or from a list of them.
fn merge(map: &mut Vec<Entry>, from: &Node) {
    for source in std::iter::once(from).chain(from.elements()) {
        for entry in source.entries() {
            if !map.iter().any(|e| e.key == entry.key) {
                map.insert(0, Entry { merged: true, ..entry.clone() });
            }
        }
    }
}

fn value(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Value {
    let is_text = tag.is_some_and(|tag| !matches!(tag.suffix(), "null" | "bool" | "int" | "float"));
    if style == ScalarStyle::Plain && !is_text { scalar::resolve(text) } else { Value::from(text) }
}
