//! What this version does not carry out yet. One place, so that it shrinks as the steps come.

use serde_json::Value;

use super::{FieldError, NetworkConfig};

/// Paths of the fields. `[]` stands for each element of a list.
const NOT_YET: &[&str] = &["profile"];

impl NetworkConfig {
    /// The fields that are set and valid, but that this version does not carry out yet, each with its path. An explicit `false`
    /// and an empty map ask for nothing and are not among them.
    #[must_use]
    pub fn not_supported_yet(&self) -> Vec<FieldError> {
        let json = serde_json::to_value(self).unwrap_or_default();
        let set = NOT_YET.iter().flat_map(|path| set_at(&json, path));
        let message = "is valid, but not supported yet by this version of the driver; remove it";
        set.map(|path| FieldError::new(path, message)).collect()
    }
}

/// Where `path` asks for something in `json`.
fn set_at(json: &Value, path: &str) -> Vec<String> {
    let at = |value: &Value, path: &str| value.pointer(&format!("/{}", path.replace('.', "/"))).is_some_and(asks);
    let Some((list, field)) = path.split_once("[].") else {
        return if at(json, path) { vec![path.to_owned()] } else { Vec::new() };
    };
    let elements = json.get(list).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    elements.iter().enumerate().filter(|(_, e)| at(e, field)).map(|(i, _)| format!("{list}[{i}].{field}")).collect()
}

fn asks(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}
