//! What a plain scalar stands for, as `kubectl` takes it (YAML 1.1: `yes` is a truth value, `010` is eight).

use serde_json::{Number, Value};

/// The value of a scalar without quotes.
pub(super) fn resolve(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Value::Bool(false),
        _ => whole(text).or_else(|| fraction(text)).unwrap_or_else(|| Value::from(text)),
    }
}

fn whole(text: &str) -> Option<Value> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let digits: String = digits.chars().filter(|c| *c != '_').collect();
    let is_digit = |c: char| c.is_ascii_alphanumeric();
    if !digits.starts_with(|c: char| c.is_ascii_digit()) || !digits.chars().all(is_digit) {
        return None;
    }
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some(two) if two.starts_with('0') && digits.bytes().all(|b| (b'0'..b'8').contains(&b)) => (8, &digits[1..]),
        _ => (10, digits.as_str()),
    };
    if negative {
        i64::from_str_radix(&format!("-{digits}"), radix).ok().map(Value::from)
    } else {
        u64::from_str_radix(digits, radix).ok().map(Value::from)
    }
}

fn fraction(text: &str) -> Option<Value> {
    let is_number = text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b)) && text.bytes().any(|b| b.is_ascii_digit());
    let number = if is_number { text.parse::<f64>().ok() } else { None };
    number.and_then(Number::from_f64).map(Value::Number)
}
