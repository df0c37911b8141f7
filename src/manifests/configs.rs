//! One opaque configuration: its faults of form, all of them.

use serde_json::Value;

use super::objects::Object;
use super::yaml::{Node, Position};
use crate::config::{self, FieldError, NetworkConfig};

/// `OpaqueParametersMaxLength`, `k8s.io/api/resource/v1`: bytes of JSON that the API server takes.
const PARAMETERS_MAX: usize = 10 * 1024;
/// Most faults of form that are looked for in one configuration.
const FORM_FAULTS: usize = 32;
/// Path of the parameters as a whole, in faults.
const ROOT: &str = "(root)";

/// An entry of `config` of a driver of ours.
pub(super) struct Config<'a> {
    pub(super) file: &'a str,
    pub(super) object: Object<'a>,
    pub(super) driver: &'a str,
    /// The requests that it is for; all where empty.
    pub(super) requests: Vec<&'a str>,
    /// Path of the parameters from the document's root.
    path: String,
    /// The parameters; none where they are left out.
    parameters: Option<&'a Node>,
    /// Where the entry is.
    at: Position,
    /// What it says, or all that is wrong with its form.
    pub(super) parsed: Result<NetworkConfig, Vec<FieldError>>,
}

impl<'a> Config<'a> {
    /// Reads entry number `index` of the list at `path`. None if it is not opaque.
    pub(super) fn read(file: &'a str, object: Object<'a>, path: &str, index: usize, entry: &'a Node) -> Option<Self> {
        let opaque = entry.get("opaque")?;
        let driver = opaque.get("driver").and_then(Node::text).unwrap_or_default();
        let requests = entry.get("requests").map(Node::elements).unwrap_or_default().iter().filter_map(Node::text).collect();
        let parameters = opaque.get("parameters");
        let path = format!("{path}[{index}].opaque.parameters");
        let parsed = parameters.map_or_else(|| Ok(NetworkConfig::default()), parse);
        Some(Self { file, object, driver, requests, path, parameters, at: opaque.at, parsed })
    }

    /// Whether it is for `request`: the request itself, or the main request of one with a slash.
    pub(super) fn applies_to(&self, request: &str) -> bool {
        let main = request.split_once('/').map_or(request, |(main, _)| main);
        self.requests.is_empty() || self.requests.iter().any(|r| *r == request || *r == main)
    }

    /// Path of a field from the document's root.
    pub(super) fn path_of(&self, field: &str) -> String {
        match field {
            ROOT => self.path.clone(),
            field => format!("{}.{field}", self.path),
        }
    }

    /// Whether it names a field.
    pub(super) fn has(&self, field: &str) -> bool {
        self.parameters.is_some_and(|parameters| parameters.has(field))
    }

    /// Where a field is; where the nearest thing above it is, if it is not there.
    pub(super) fn place_of(&self, field: &str) -> Position {
        match (self.parameters, field) {
            (None, _) => self.at,
            (Some(parameters), ROOT) => parameters.at,
            (Some(parameters), field) => parameters.locate(field),
        }
    }
}

/// A document that is nothing but parameters: what they say, if nothing is wrong with them and all of it can be carried out.
///
/// # Errors
/// Everything that is wrong, with its place.
pub fn parameters(document: &Node) -> Result<NetworkConfig, Vec<(Position, FieldError)>> {
    let config = parse(document).and_then(|config| {
        let mut faults = config.validate();
        if faults.is_empty() {
            faults = config.not_supported_yet();
        }
        if faults.is_empty() { Ok(config) } else { Err(faults) }
    });
    config.map_err(|faults| faults.into_iter().map(|fault| (document.locate(&fault.path), fault)).collect())
}

fn parse(parameters: &Node) -> Result<NetworkConfig, Vec<FieldError>> {
    let twice = "stands twice in the same object; remove one";
    let repeated = parameters.repeated().into_iter();
    let mut faults: Vec<_> = repeated.take(FORM_FAULTS).map(|(path, _)| FieldError { path, message: twice.to_owned() }).collect();
    let mut value = parameters.to_json();
    let bytes = value.to_string().len();
    if bytes > PARAMETERS_MAX {
        let message = format!("has {bytes} bytes as JSON; the API server takes at most {PARAMETERS_MAX}");
        faults.push(FieldError { path: ROOT.to_owned(), message });
    }
    loop {
        match config::parse(&value.to_string()) {
            Ok(config) if faults.is_empty() => return Ok(config),
            Ok(_) => return Err(faults),
            Err(fault) => {
                // A fault of something whose part has been taken out (a field that is missing now) is none.
                let is_below = |path: &str| path.strip_prefix(&fault.path).is_some_and(|rest| rest.starts_with(['.', '[']));
                let of_a_part = faults.iter().any(|f| is_below(&f.path));
                let taken_out = remove(&mut value, &fault.path);
                if !of_a_part {
                    faults.push(fault);
                }
                if !taken_out || faults.len() >= FORM_FAULTS {
                    return Err(faults);
                }
            }
        }
    }
}

/// Takes the field at `path` out, to see what else is wrong. With an element of a list those behind it go, so that none has another number.
fn remove(value: &mut Value, path: &str) -> bool {
    let (above, last) = match (path.rfind('.'), path.rfind('[')) {
        (dot, Some(bracket)) if dot.is_none_or(|dot| dot < bracket) => (&path[..bracket], &path[bracket..]),
        (Some(dot), _) => (&path[..dot], &path[dot + 1..]),
        (None, _) => ("", path),
    };
    let pointer: String =
        above.replace(']', "").split(['.', '[']).filter(|p| !p.is_empty()).fold(String::new(), |p, k| p + "/" + k);
    let Some(parent) = value.pointer_mut(&pointer) else { return false };
    match parent {
        Value::Object(map) => map.remove(last).is_some(),
        Value::Array(list) => {
            let index = last.trim_matches(['[', ']']).parse::<usize>().ok().filter(|i| *i < list.len());
            index.map(|i| list.truncate(i)).is_some()
        }
        _ => false,
    }
}
