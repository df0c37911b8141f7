//! The JSON schema of the parameters, made from the types: their form, and the ranges that a schema can say. What concerns several
//! fields only [`crate::config::NetworkConfig::validate`] knows.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::NetworkConfig;

/// Title of the schema.
const TITLE: &str = "Parameters of Dranic";
/// Largest numbers of the formats that say only how many bits there are.
const LARGEST: [(&str, u64); 3] = [("uint8", u8::MAX as u64), ("uint16", u16::MAX as u64), ("uint32", u32::MAX as u64)];

/// The schema (draft 2020-12), without references: each field's is where the field is.
#[must_use]
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|s| s.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<NetworkConfig>().to_value();
    tidy(&mut schema);
    // `null` is the same as `{}`.
    schema["type"] = json!(["object", "null"]);
    schema["title"] = json!(TITLE);
    schema
}

/// The schema as the text of the file `docs/network-config.schema.json`.
#[must_use]
pub fn text() -> String {
    format!("{:#}\n", schema())
}

/// Formats are no standard ones: ranges say the same. A field that may be absent may be null; only its default would be that.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            ranges(map);
            alternatives(map);
            map.values_mut().for_each(tidy);
        }
        Value::Array(list) => list.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn ranges(map: &mut Map<String, Value>) {
    if map.get("default").is_some_and(Value::is_null) {
        map.remove("default");
    }
    let format = map.get("format").and_then(Value::as_str);
    let largest = LARGEST.iter().find(|(name, _)| Some(*name) == format).map(|(_, largest)| *largest);
    if let Some(largest) = largest {
        map.remove("format");
        map.entry("maximum").or_insert_with(|| largest.into());
    }
}

/// `oneOf` of constants, which has a description of each, inside of an `anyOf` with null: one level instead of two.
fn alternatives(map: &mut Map<String, Value>) {
    let Some(Value::Array(any)) = map.get("anyOf") else { return };
    let Some(Value::Array(one)) = any.iter().find_map(|part| part.get("oneOf")) else { return };
    let mut all = one.clone();
    all.push(json!({"type": "null"}));
    map.remove("anyOf");
    map.insert("oneOf".to_owned(), Value::Array(all));
}

#[cfg(test)]
mod tests;
