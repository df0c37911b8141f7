//! What a person who wrote an unknown field probably meant.

/// Names that others use for a field of ours: (in lower case, what we call it).
const ALIASES: [(&str, &str); 6] = [
    ("hardwareaddress", "hardwareAddr"),
    ("macaddress", "hardwareAddr"),
    ("mac", "hardwareAddr"),
    ("ipaddress", "destination"),
    ("via", "gateway"),
    ("ips", "addresses"),
];

/// Words for an unknown field at the end of `path`, when that is what the decoder's `message` is about.
pub(super) fn unknown_field(path: &serde_path_to_error::Path, message: &str) -> Option<String> {
    if !message.starts_with("unknown field ") {
        return None;
    }
    let key = match path.iter().next_back() {
        Some(serde_path_to_error::Segment::Map { key }) => key.as_str(),
        _ => return None,
    };
    if matches!(key, "apiVersion" | "kind") {
        return Some("parameters have no apiVersion and kind; remove it".into());
    }
    // The key itself may hold any text, so look from the end. What follows is ours: field names in backticks.
    let (_, expected) = message.rsplit_once(", expected ")?;
    let fields: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    Some(match closest(key, &fields) {
        Some(field) => format!("unknown field; did you mean {field}?"),
        None => format!("unknown field; the fields here are {}", fields.join(", ")),
    })
}

fn closest<'a>(key: &str, fields: &[&'a str]) -> Option<&'a str> {
    let plain = |s: &str| -> String { s.chars().filter(|c| !matches!(c, '_' | '-')).flat_map(char::to_lowercase).collect() };
    if key.len() > 64 {
        return None;
    }
    let key = plain(key);
    let alias = ALIASES.iter().find(|(other, _)| *other == key).map(|(_, ours)| *ours);
    if let Some(field) = fields.iter().find(|f| Some(**f) == alias) {
        return Some(field);
    }
    let near = fields.iter().map(|f| (distance(&key, &plain(f)), *f)).min_by_key(|(d, _)| *d);
    near.filter(|(d, f)| *d <= 2 && d * 3 <= f.len()).map(|(_, f)| f)
}

/// Levenshtein's distance.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
