//! Patches: merge, and as much of apply as clients here use.

use serde_json::Value;

/// Merges `patch` into `target`: null removes, objects merge, anything else replaces. `keyed` merges `devices` lists by driver,
/// pool, device and share id, as server-side apply does with the status of a claim.
pub(super) fn merge(target: &mut Value, patch: &Value, keyed: bool) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let Some(map) = target.as_object_mut() else { return };
    for (key, value) in fields {
        if value.is_null() {
            map.remove(key);
            continue;
        }
        let slot = map.entry(key.clone()).or_insert(Value::Null);
        match (&mut *slot, value) {
            (Value::Array(old), Value::Array(new)) if keyed && key == "devices" => merge_list(old, new),
            (slot, value) => merge(slot, value, keyed),
        }
    }
}

fn merge_list(old: &mut Vec<Value>, new: &[Value]) {
    let key = |v: &Value| ["driver", "pool", "device", "shareID"].map(|k| v[k].as_str().unwrap_or_default().to_owned());
    for entry in new {
        match old.iter_mut().find(|o| key(o) == key(entry)) {
            Some(slot) => merge(slot, entry, true),
            None => old.push(entry.clone()),
        }
    }
}
