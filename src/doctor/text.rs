//! TOML of container runtimes: parsing with a short reason, merging, looking for keys.

use toml::{Table, Value};

/// Longest reason, characters: it may quote the file.
const REASON_MAX: usize = 240;

/// Parses one file.
///
/// # Errors
/// The line and the reason.
pub(super) fn parse(text: &str) -> Result<Table, String> {
    text.parse::<Table>().map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let line = text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1;
        let reason: String = error.message().chars().filter(|c| !c.is_control()).take(REASON_MAX).collect();
        format!("line {line}: {reason}")
    })
}

/// Puts `from` over `to`: tables together, everything else replaced.
pub(super) fn merge(to: &mut Table, from: Table) {
    for (key, value) in from {
        match (to.get_mut(&key), value) {
            (Some(Value::Table(to)), Value::Table(from)) => merge(to, from),
            (_, value) => _ = to.insert(key, value),
        }
    }
}

/// The value below `path`.
pub(super) fn at<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Value> {
    let (last, tables) = path.split_last()?;
    let inner = tables.iter().try_fold(table, |table, key| table.get(*key)?.as_table());
    inner?.get(*last)
}

/// The table below `path`.
pub(super) fn table<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    at(table, path)?.as_table()
}

/// The strings of a list; none where it is no list.
pub(super) fn strings(value: &Value) -> Option<Vec<String>> {
    let list = value.as_array()?;
    Some(list.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect())
}

/// Paths of all keys called one of `names` that stand elsewhere than in the table at `home`, as `[a."b.c"] key`.
pub(super) fn elsewhere(table: &Table, home: &[&str], names: &[&str]) -> Vec<String> {
    let (mut found, mut path) = (Vec::new(), Vec::new());
    walk(table, home, names, &mut path, &mut found);
    found
}

/// As deep as the parser lets files nest.
fn walk<'a>(table: &'a Table, home: &[&str], names: &[&str], path: &mut Vec<&'a str>, found: &mut Vec<String>) {
    for (key, value) in table {
        if names.contains(&key.as_str()) && path != home {
            found.push(format!("{} {}", header(path), short(key)));
        }
        if let Value::Table(inner) = value {
            path.push(key);
            walk(inner, home, names, path, found);
            path.pop();
        }
    }
}

/// A table's header as it stands in a file.
pub(super) fn header(path: &[&str]) -> String {
    if path.is_empty() {
        return "at the top:".to_owned();
    }
    let quoted = |key: &&str| if key.contains('.') { format!("\"{}\"", short(key)) } else { short(key) };
    format!("[{}]", path.iter().map(quoted).collect::<Vec<_>>().join("."))
}

/// Text of the file for a finding.
pub(super) fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(REASON_MAX).collect()
}
