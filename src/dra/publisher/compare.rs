//! Whether two lists of devices mean the same, and what is missing in one. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::Device;
use serde_json::Value;

/// Most fields that are reported as dropped.
const DROPPED_MAX: usize = 32;

/// Whether the server's `stored` devices are what we `want`. Order counts, as it does for the allocator; what the server sets
/// (`timeAdded` of taints) or writes in another way (quantities; absent and empty) does not.
pub(super) fn same(want: &[Device], stored: &[Device]) -> bool {
    want.len() == stored.len() && want.iter().zip(stored).all(|(a, b)| a == b || normal(a) == normal(b))
}

/// Paths below `spec` that `want` has and `stored` has not, or has otherwise; sorted, without indices.
pub(super) fn dropped(want: &[Device], stored: &[Device]) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for device in want {
        match stored.iter().find(|d| d.name == device.name) {
            Some(found) => missing(&normal(device), &normal(found), "devices[]", &mut paths),
            None => drop(paths.insert("devices[]".to_owned())),
        }
    }
    paths
}

fn missing(want: &Value, found: &Value, path: &str, paths: &mut BTreeSet<String>) {
    if want == found || paths.len() >= DROPPED_MAX {
        return;
    }
    match (want, found) {
        (Value::Object(want), Value::Object(found)) => {
            for (key, value) in want {
                missing(value, found.get(key).unwrap_or(&Value::Null), &format!("{path}.{key}"), paths);
            }
        }
        (Value::Array(want), Value::Array(found)) => {
            for (index, value) in want.iter().enumerate() {
                missing(value, found.get(index).unwrap_or(&Value::Null), &format!("{path}[]"), paths);
            }
        }
        _ => drop(paths.insert(path.to_owned())),
    }
}

/// A device without what may differ and mean the same.
fn normal(device: &Device) -> Value {
    let mut plain = device.clone();
    for taint in plain.taints.iter_mut().flatten() {
        taint.time_added = None;
    }
    // Serializing the API's own types can't fail: maps have string keys.
    let mut value = serde_json::to_value(&plain).unwrap_or_default();
    tidy(&mut value, "");
    value
}

/// Removes what is empty or false, and writes quantities in one way.
fn tidy(value: &mut Value, key: &str) {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                tidy(value, key);
            }
            // A false attribute is not the same as none: only the device's own flags default to false.
            let flags = ["allNodes", "allowMultipleAllocations", "bindsToNode"];
            let off = |key: &str, value: &Value| flags.contains(&key) && *value == Value::Bool(false);
            map.retain(|key, value| !is_empty(value) && !off(key, value));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| tidy(item, key)),
        Value::String(text) if matches!(key, "value" | "default" | "min" | "max" | "step") => {
            if let Some(plain) = quantity(text) {
                *text = plain;
            }
        }
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Null => true,
        _ => false,
    }
}

/// A quantity (`4G`, `3906250Ki`, `1.5`, `2e3`) as a decimal without trailing zeros; none where it is not one we can compare.
fn quantity(text: &str) -> Option<String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-'))).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (factor, power) = scale(suffix)?;
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{part}").parse().ok()?;
    let mut digits = digits.checked_mul(factor)?;
    let mut power = power - i32::try_from(part.len()).ok()?;
    while digits != 0 && digits % 10 == 0 {
        digits /= 10;
        power += 1;
    }
    Some(if digits == 0 { "0e0".to_owned() } else { format!("{digits}e{power}") })
}

/// A suffix as a factor and a power of ten.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    let binary = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if let Some(at) = binary.iter().position(|s| *s == suffix) {
        return Some((1i128 << (10 * (at + 1)), 0));
    }
    let decimal = [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
    if let Some((_, power)) = decimal.iter().find(|(s, _)| *s == suffix) {
        return Some((1, *power));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    (-100..=100).contains(&exponent).then_some((1, exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_that_mean_the_same_are_the_same() {
        for (a, b) in [("4G", "3906250Ki"), ("1", "1000m"), ("1.50", "1500m"), ("2e3", "2k"), ("0", "0Mi"), ("1024Mi", "1Gi")] {
            assert_eq!(quantity(a), quantity(b), "{a} {b}");
            assert!(quantity(a).is_some());
        }
        assert_ne!(quantity("1G"), quantity("1Gi"));
        for odd in ["", "x", "1x", "1e999", "é", "99999999999999999999999999999999999999999999", "--1"] {
            assert_eq!(quantity(odd), None, "{odd:?}");
        }
    }
}
