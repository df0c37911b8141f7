use super::*;
use crate::config::parse;
use crate::manifests::policy::policy;

/// Whether `value` has the form that `schema` asks for; for the words of JSON schema that ours has.
fn fits(schema: &Value, value: &Value) -> bool {
    let alternatives = |word: &str| schema[word].as_array().is_none_or(|all| all.iter().any(|s| fits(s, value)));
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        other => panic!("type {other}"),
    };
    let number = value.as_i64().map(i128::from).or(value.as_u64().map(i128::from));
    let bound = |word: &str, ok: fn(i128, i128) -> bool| match (number, schema[word].as_i64()) {
        (Some(number), Some(bound)) => ok(number, bound.into()),
        _ => true,
    };
    let size = |word: &str, size: Option<usize>, ok: fn(usize, usize) -> bool| match (size, schema[word].as_u64()) {
        (Some(size), Some(bound)) => ok(size, usize::try_from(bound).unwrap()),
        _ => true,
    };
    let characters = value.as_str().map(|text| text.chars().count());
    let elements = value.as_array().map(Vec::len);
    (types.is_empty() || types.iter().any(|name| is(name)))
        && schema.get("const").is_none_or(|only| only == value)
        && alternatives("oneOf")
        && alternatives("anyOf")
        && bound("minimum", |n, b| n >= b)
        && bound("maximum", |n, b| n <= b)
        && size("minLength", characters, |n, b| n >= b)
        && size("maxLength", characters, |n, b| n <= b)
        && size("maxItems", elements, |n, b| n <= b)
        && value.as_array().is_none_or(|list| list.iter().all(|e| schema.get("items").is_none_or(|s| fits(s, e))))
        && value.as_object().is_none_or(|map| object_fits(schema, map))
}

fn object_fits(schema: &Value, map: &Map<String, Value>) -> bool {
    let field = |key: &str, value: &Value| match (&schema["properties"][key], &schema["additionalProperties"]) {
        (Value::Null, Value::Bool(false)) => false,
        (Value::Null, other) => other.is_null() || fits(other, value),
        (known, _) => fits(known, value),
    };
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    map.iter().all(|(key, value)| field(key, value)) && required.into_iter().all(|key| map.contains_key(key))
}

fn file(path: &str) -> String {
    std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_default()
}

#[test]
fn the_files_are_what_the_types_give() {
    let path = "docs/network-config.schema.json";
    assert!(file(path) == text(), "{path} is stale; run: cargo run --bin dranic -- schema > {path}");
    let path = "charts/dranic/files/config-policy.yaml";
    assert!(
        file(path) == policy(&schema()).yaml(),
        "{path} is stale; run: cargo run --bin dranic -- schema --policy > {path} && hack/manifests.sh"
    );
}

#[test]
fn schema_and_parser_agree_on_form() {
    let cases = [
        ("{}", true),
        ("null", true),
        ("7", false),
        ("[]", false),
        (r#"{"interface": null, "routes": null, "ethtool": {"features": null}}"#, true),
        (r#"{"interface": {"name": "rail0", "mtu": 9000, "dhcp": false, "addresses": ["10.0.0.5/24"]}}"#, true),
        (r#"{"interface": {"mtus": 9000}}"#, false),
        (r#"{"interface": {"mtu": "9000"}}"#, false),
        (r#"{"interface": {"mtu": 9000.5}}"#, false),
        (r#"{"interface": {"mtu": -1}}"#, false),
        (r#"{"interface": {"mtu": 4294967296}}"#, false),
        (r#"{"interface": {"dhcp": "yes"}}"#, false),
        (r#"{"interface": ["rail0"]}"#, false),
        (r#"{"interface": {"name": ""}}"#, false),
        (r#"{"interface": {"name": "sixteen-bytes-xx"}}"#, false),
        (r#"{"interface": {"addresses": "10.0.0.5/24"}}"#, false),
        (r#"{"interface": {"addresses": [7]}}"#, false),
        (r#"{"interface": {"type": "macvlan", "macvlan": {"mode": "vepa"}}}"#, true),
        (r#"{"interface": {"type": "Macvlan"}}"#, false),
        (
            r#"{"interface": {"vlan": {"id": 7, "protocol": "802.1ad"}, "ipv6": {"acceptRA": 0, "addrGenMode": "stable-privacy"}}}"#,
            true,
        ),
        (r#"{"interface": {"ipv6": {"acceptRa": 0}}}"#, false),
        (r#"{"interface": {"vrf": {"name": "blue", "table": null}}}"#, true),
        (r#"{"interface": {"vrf": {"table": 7}}}"#, false),
        (r#"{"interface": {"sysctls": {"a": "1", "b": 2}}}"#, true),
        (r#"{"interface": {"sysctls": {"a": true}}}"#, false),
        (r#"{"interface": {"sysctls": {"a": null}}}"#, false),
        (r#"{"routes": [{"destination": "10.0.0.0/8", "scope": 253}, {}]}"#, true),
        (r#"{"routes": [{"scope": 256}]}"#, false),
        (r#"{"routes": [null]}"#, false),
        (r#"{"routes": {}}"#, false),
        (r#"{"rules": [{"fwmark": 1, "invert": true, "iif": "lo"}], "neighbors": []}"#, true),
        (r#"{"neighbors": [{"ipAddress": "10.0.0.1"}]}"#, false),
        (r#"{"ethtool": {"features": {"tso": true}, "pause": {"rx": false}}}"#, true),
        (r#"{"ethtool": {"features": {"tso": null}}}"#, false),
        (r#"{"ethtool": {"features": {"tso": 1}}}"#, false),
        (r#"{"rdma": {"enabled": true, "charDevices": ["issm"], "limits": {"hcaHandles": 4}, "waitForPort": false}}"#, true),
        (r#"{"rdma": {"charDevices": ["uverbs"]}}"#, false),
        (r#"{"rdma": {"limits": {"hca": 1}}}"#, false),
        (
            r#"{"vf": {"vlan": 0, "linkState": "auto", "spoofCheck": true}, "hostState": {"rules": "ignore"}, "restore": "minimal"}"#,
            true,
        ),
        (r#"{"hostState": "ignore"}"#, false),
        (r#"{"restore": "none"}"#, false),
    ];
    let schema = schema();
    for (json, good) in cases {
        let value: Value = serde_json::from_str(json).unwrap();
        assert_eq!(fits(&schema, &value), good, "schema: {json}");
        assert_eq!(parse(json).is_ok(), good, "parser: {json}: {:?}", parse(json));
    }
}

/// Every whole number of the schema: its path in a document that has nothing but it, the document, and the number's schema.
fn numbers(schema: &Value, path: &str, wrap: &dyn Fn(Value) -> Value, found: &mut Vec<(String, Value, Value)>) {
    for (key, field) in schema["properties"].as_object().into_iter().flatten() {
        let below = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if field["maximum"].is_u64() {
            found.push((below, wrap(json!({key: "HERE"})), field.clone()));
        } else if field["properties"].is_object() {
            numbers(field, &below, &|value| wrap(json!({key: value})), found);
        } else if field["items"]["properties"].is_object() {
            numbers(&field["items"], &format!("{below}[0]"), &|value| wrap(json!({key: [value]})), found);
        }
    }
}

#[test]
fn ranges_of_the_schema_are_those_of_the_checks() {
    let mut all = Vec::new();
    numbers(&schema(), "", &|value| value, &mut all);
    assert!(all.len() > 30, "{}", all.len());
    let refused_at = |document: &Value, number: i128, path: &str| {
        let text = document.to_string().replace("\"HERE\"", &number.to_string());
        match parse(&text) {
            Err(fault) => fault.path == path,
            Ok(config) => config.validate().iter().any(|fault| fault.path == path),
        }
    };
    for (path, document, schema) in all {
        // What is needed beside it.
        let document = match path.as_str() {
            "interface.vrf.table" => json!({"interface": {"vrf": {"name": "a", "table": "HERE"}}}),
            "interface.vlan.id" => json!({"interface": {"type": "vlan", "vlan": {"id": "HERE"}}}),
            "interface.ipoib.pkey" => json!({"interface": {"type": "ipoib", "ipoib": {"pkey": "HERE"}}}),
            _ => document,
        };
        let (min, max) = (i128::from(schema["minimum"].as_i64().unwrap()), i128::from(schema["maximum"].as_i64().unwrap()));
        let not_yet = {
            let text = document.to_string().replace("\"HERE\"", &max.to_string());
            parse(&text).is_ok_and(|config| !config.not_supported_yet().is_empty())
        };
        for outside in [min - 1, max + 1] {
            // What is not carried out yet is refused whatever it is, and may have no check yet.
            assert!(not_yet || refused_at(&document, outside, &path), "{path}: {outside} is taken");
        }
        let own_max = [u8::MAX.into(), u16::MAX.into(), u32::MAX.into()].contains(&max);
        if !own_max {
            assert!(!refused_at(&document, max, &path), "{path}: {max} is refused");
        }
        if min > 0 {
            assert!(!refused_at(&document, min, &path), "{path}: {min} is refused");
        }
    }
}

#[test]
fn every_field_has_a_description_and_a_validation_of_the_policy() {
    let schema = schema();
    let policy = policy(&schema);
    let mut open = vec![(String::new(), schema.clone())];
    let mut fields = 0;
    while let Some((path, schema)) = open.pop() {
        for (key, field) in schema["properties"].as_object().into_iter().flatten() {
            let below = format!("{path}.{key}");
            fields += 1;
            assert!(field["description"].is_string(), "{below} has no description");
            let message = format!("opaque.parameters{below} must be ");
            assert!(policy.validations.iter().any(|v| v.message.starts_with(&message)), "{below} has no validation");
            open.push((below.clone(), field.clone()));
            open.push((format!("{below}[]"), field["items"].clone()));
        }
    }
    assert!(fields > 90, "{fields}");
    // All that CEL's parser takes: 100,000 code points; and the API, of a message: 5 KiB.
    assert!(policy.validations.iter().all(|v| v.expression.len() < 2000 && v.message.len() < 1000));
}
