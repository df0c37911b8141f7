//! Server-side apply of `status.devices` of a claim: who owns what, and what a real server checks.
//!
//! Ownership is kept for each entry and its top-level fields (`conditions`, `data`, `networkData`); a real server goes deeper.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::slices::Fault;

const KEYS: [&str; 4] = ["driver", "pool", "device", "shareID"];

/// Key of an entry: driver, pool, device, share id.
type Key = [String; 4];

/// Fields that a manager owns, by entry. An entry without fields is owned all the same.
type Owned = BTreeMap<Key, BTreeSet<String>>;

/// Another manager owns a field and has another value: manager and field.
#[derive(Debug)]
pub(super) struct Conflict(pub(super) String, pub(super) String);

fn key(entry: &Value) -> Key {
    KEYS.map(|k| entry[k].as_str().unwrap_or_default().to_owned())
}

fn fields(entry: &Value) -> BTreeSet<String> {
    let all = entry.as_object().into_iter().flatten().map(|(field, _)| field.clone());
    all.filter(|field| !KEYS.contains(&field.as_str())).collect()
}

fn devices(object: &Value) -> Vec<Value> {
    object["status"]["devices"].as_array().cloned().unwrap_or_default()
}

/// Applies `wanted` to `object` for `manager`.
pub(super) fn apply(object: &mut Value, wanted: &Value, manager: &str, force: bool, now: &str) -> Result<(), Conflict> {
    let mut managers = managers(object);
    let before = managers.remove(manager).unwrap_or_default();
    let entries = devices(wanted);
    let owned: Owned = entries.iter().map(|entry| (key(entry), fields(entry))).collect();
    let mut list = devices(object);
    for entry in &entries {
        let at = list.iter().position(|old| key(old) == key(entry));
        let Some(at) = at else {
            list.push(entry.clone());
            continue;
        };
        for field in fields(entry).iter().filter(|field| list[at][field.as_str()] != entry[field.as_str()]) {
            let others = managers.iter_mut().filter_map(|(other, owned)| Some((other, owned.get_mut(&key(entry))?)));
            for (other, owned) in others {
                if owned.contains(field) && !force {
                    return Err(Conflict(other.clone(), format!(".status.devices[{}].{field}", key(entry).join("/"))));
                }
                owned.remove(field);
            }
        }
        for field in fields(entry) {
            list[at][field.as_str()] = entry[field.as_str()].clone();
        }
    }
    remove(&mut list, &before, &owned, &managers);
    set_devices(object, list);
    if !owned.is_empty() {
        managers.insert(manager.to_owned(), owned);
    }
    write_managers(object, &managers, now);
    Ok(())
}

/// What this manager owned, does not apply any more, and nobody else owns.
fn remove(list: &mut Vec<Value>, before: &Owned, now: &Owned, managers: &BTreeMap<String, Owned>) {
    let elsewhere = |key: &Key, field: &str| managers.values().any(|o| o.get(key).is_some_and(|fields| fields.contains(field)));
    list.retain_mut(|entry| {
        let key = key(entry);
        let Some(old) = before.get(&key) else { return true };
        let kept = now.get(&key);
        for field in old.iter().filter(|f| !kept.is_some_and(|k| k.contains(*f)) && !elsewhere(&key, f)) {
            if let Some(map) = entry.as_object_mut() {
                map.remove(field);
            }
        }
        kept.is_some() || managers.values().any(|owned| owned.contains_key(&key))
    });
}

fn set_devices(object: &mut Value, list: Vec<Value>) {
    if !list.is_empty() {
        object["status"]["devices"] = Value::Array(list);
    } else if let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) {
        status.remove("devices");
    }
}

fn managers(object: &Value) -> BTreeMap<String, Owned> {
    let mut managers = BTreeMap::new();
    for entry in object["metadata"]["managedFields"].as_array().into_iter().flatten() {
        let owned = entry["fieldsV1"]["f:status"]["f:devices"].as_object().into_iter().flatten();
        let owned = owned.filter_map(|(key, fields)| {
            let key: Value = serde_json::from_str(key.strip_prefix("k:")?).ok()?;
            let names = fields.as_object().into_iter().flatten().filter_map(|(f, _)| f.strip_prefix("f:").map(str::to_owned));
            Some((self::key(&key), names.filter(|f| !KEYS.contains(&f.as_str())).collect()))
        });
        managers.insert(entry["manager"].as_str().unwrap_or_default().to_owned(), owned.collect());
    }
    managers
}

fn write_managers(object: &mut Value, managers: &BTreeMap<String, Owned>, now: &str) {
    let old = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let entry = |(manager, owned): (&String, &Owned)| {
        let fields = json!({"f:status": {"f:devices": owned.iter().map(owned_json).collect::<Map<String, Value>>()}});
        let same = old.iter().find(|o| o["manager"] == **manager && o["fieldsV1"] == fields);
        same.cloned().unwrap_or_else(|| {
            json!({"manager": manager, "operation": "Apply", "apiVersion": "resource.k8s.io/v1", "time": now,
                "fieldsType": "FieldsV1", "fieldsV1": fields, "subresource": "status"})
        })
    };
    let list: Vec<Value> = managers.iter().filter(|(_, owned)| !owned.is_empty()).map(entry).collect();
    object["metadata"]["managedFields"] = Value::Array(list);
}

fn owned_json((key, fields): (&Key, &BTreeSet<String>)) -> (String, Value) {
    let named = KEYS.iter().zip(key).filter(|(_, value)| !value.is_empty());
    let key: Map<String, Value> = named.map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    let mut inner: Map<String, Value> = fields.iter().map(|field| (format!("f:{field}"), json!({}))).collect();
    inner.insert(".".to_owned(), json!({}));
    inner.extend(key.keys().map(|name| (format!("f:{name}"), json!({}))));
    (format!("k:{}", Value::Object(key)), Value::Object(inner))
}

/// What a real server checks of `status.devices`.
pub(super) fn validate(claim: &Value) -> Vec<Fault> {
    let mut faults = Vec::new();
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    let allocated: Vec<Key> = results.into_iter().flatten().map(key).collect();
    for (index, device) in devices(claim).iter().enumerate() {
        let path = format!("status.devices[{index}]");
        if !allocated.contains(&key(device)) {
            faults.push((path.clone(), "Invalid value: must be an allocated device in the claim".to_owned()));
        }
        conditions(device, &format!("{path}.conditions"), &mut faults);
        // It counts what it stores, with `<`, `>` and `&` as six bytes each.
        let data = device["data"].to_string();
        if data.len() + 5 * data.matches(['<', '>', '&']).count() > 10 << 10 {
            faults.push((format!("{path}.data"), "Too long: may not be more than 10240 bytes".to_owned()));
        }
        network(&device["networkData"], &format!("{path}.networkData"), &mut faults);
    }
    faults
}

fn conditions(device: &Value, path: &str, faults: &mut Vec<Fault>) {
    let conditions: &[Value] = device["conditions"].as_array().map_or(&[], Vec::as_slice);
    if conditions.len() > 8 {
        faults.push((path.to_owned(), "Too many: must have at most 8 items".to_owned()));
    }
    for (index, condition) in conditions.iter().enumerate() {
        let text = |field: &str| condition[field].as_str().unwrap_or_default();
        let mut fault = |field: &str, text: &str| faults.push((format!("{path}[{index}].{field}"), text.to_owned()));
        if !["True", "False", "Unknown"].contains(&text("status")) {
            fault("status", "Unsupported value");
        }
        let time = text("lastTransitionTime");
        if time.len() != 20 || time.starts_with("1970") || !time.ends_with('Z') {
            fault("lastTransitionTime", "Required value");
        }
        let inner = |b: u8| b.is_ascii_alphanumeric() || b"_,:".contains(&b);
        if text("reason").is_empty() || text("reason").len() > 1024 || !text("reason").bytes().all(inner) {
            fault("reason", "Invalid value");
        }
        if text("message").len() > 32768 {
            fault("message", "Too long: may not be more than 32768 bytes");
        }
    }
}

fn network(data: &Value, path: &str, faults: &mut Vec<Fault>) {
    for (field, limit) in [("interfaceName", 256), ("hardwareAddress", 128)] {
        if data[field].as_str().is_some_and(|text| text.len() > limit) {
            faults.push((format!("{path}.{field}"), format!("Too long: may not be more than {limit} bytes")));
        }
    }
    let ips: Vec<&str> = data["ips"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if ips.len() > 16 {
        faults.push((format!("{path}.ips"), "Too many: must have at most 16 items".to_owned()));
    }
    for (index, ip) in ips.iter().enumerate() {
        let canonical = ip.split_once('/').and_then(|(a, p)| {
            let address = a.parse::<std::net::IpAddr>().ok()?;
            Some(format!("{}/{}", address.to_canonical(), p.parse::<u8>().ok()?))
        });
        if canonical.as_deref() != Some(ip) {
            faults.push((format!("{path}.ips[{index}]"), format!("Invalid value: {ip:?}: must be in canonical form")));
        }
        if ips[..index].contains(ip) {
            faults.push((format!("{path}.ips[{index}]"), format!("Duplicate value: {ip:?}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(entries: &[(&str, &str)]) -> Value {
        let entry = |(device, data): &(&str, &str)| json!({"driver": "d", "pool": "p", "device": device, "data": {"x": data}});
        json!({"status": {"devices": entries.iter().map(entry).collect::<Vec<_>>()}})
    }

    fn said(object: &Value) -> Vec<(String, String)> {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        devices(object).iter().map(|d| (text(&d["device"]), text(&d["data"]["x"]))).collect()
    }

    #[test]
    fn an_apply_takes_away_what_its_manager_does_not_say_again_and_leaves_others_alone() {
        let mut claim = json!({"metadata": {}});
        apply(&mut claim, &wanted(&[("a", "1"), ("b", "1")]), "ours", false, "t").unwrap();
        apply(&mut claim, &wanted(&[("c", "1")]), "theirs", false, "t").unwrap();
        apply(&mut claim, &wanted(&[("b", "2")]), "ours", false, "t").unwrap();
        assert_eq!(said(&claim), [("b".to_owned(), "2".to_owned()), ("c".to_owned(), "1".to_owned())]);
        apply(&mut claim, &wanted(&[]), "ours", false, "t").unwrap();
        assert_eq!(said(&claim).len(), 1);
        assert_eq!(claim["metadata"]["managedFields"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn another_value_of_a_field_that_another_manager_owns_is_a_conflict_unless_forced() {
        let mut claim = json!({"metadata": {}});
        apply(&mut claim, &wanted(&[("a", "1")]), "theirs", false, "t").unwrap();
        apply(&mut claim, &wanted(&[("a", "1")]), "ours", false, "t").unwrap();
        let refused = apply(&mut claim, &wanted(&[("a", "2")]), "ours", false, "t").unwrap_err();
        assert_eq!(refused.0, "theirs");
        apply(&mut claim, &wanted(&[("a", "2")]), "ours", true, "t").unwrap();
        assert_eq!(said(&claim), [("a".to_owned(), "2".to_owned())]);
        // Both own the entry: it stays when one of them goes.
        apply(&mut claim, &wanted(&[]), "ours", false, "t").unwrap();
        assert_eq!(said(&claim), [("a".to_owned(), String::new())]);
    }
}
