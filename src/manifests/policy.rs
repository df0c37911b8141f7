//! Variables and validations of a ValidatingAdmissionPolicy, in CEL, made from the schema: one validation for each field, and one for
//! the fields that an object does not know. The chart's template has the rest of the policy, and the variable `parameters`: a list of
//! the parameters of all entries of ours in an object.
//!
//! A field that is null is the same as an absent one. What holds a field may be of a wrong type, which its own validation says.

use serde_json::Value;

/// What is made: `variables` and `validations` of the policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Name and CEL; each a list of the objects that stand in one place.
    pub variables: Vec<(String, String)>,
    /// In the order of the schema.
    pub validations: Vec<Validation>,
}

/// One of `validations`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validation {
    /// CEL; true where nothing is wrong.
    pub expression: String,
    /// What is said otherwise, with the path of the field.
    pub message: String,
}

/// Makes it from a schema as [`crate::config::schema::schema`] makes it.
#[must_use]
pub fn policy(schema: &Value) -> Policy {
    let mut policy = Policy::default();
    let check = "o == null || type(o) == map".to_owned();
    policy.must_be("", format!("variables.parameters.all(o, {check})"), "an object");
    let root = Objects { path: String::new(), variable: "objects".to_owned(), in_lists: false };
    policy.variables.push((root.variable.clone(), "variables.parameters.filter(o, type(o) == map)".to_owned()));
    policy.objects(schema, &root);
    policy
}

/// All objects at one place.
struct Objects {
    /// Path from the parameters, for people.
    path: String,
    /// The variable that is a list of them.
    variable: String,
    /// It is a list of lists, of things that may be something else.
    in_lists: bool,
}

impl Objects {
    fn below(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// CEL: `check` holds for each of them, `o`.
    fn all(&self, check: &str) -> String {
        let Self { variable, in_lists, .. } = self;
        if *in_lists {
            return format!("variables.{variable}.all(l, l.all(o, type(o) != map || {check}))");
        }
        format!("variables.{variable}.all(o, {check})")
    }

    /// The objects in their field `key`.
    fn field(&self, key: &str) -> (Self, String) {
        let objects = format!("filter(o, type(o) == map && has(o.{key}) && type(o.{key}) == map).map(o, o.{key})");
        let list = if self.in_lists {
            format!("variables.{}.map(l, l.{objects})", self.variable)
        } else {
            format!("variables.{}.{objects}", self.variable)
        };
        (self.named(key, self.in_lists, &self.below(key)), list)
    }

    /// What is in the lists in their field `key`.
    fn elements(&self, key: &str) -> (Self, String) {
        let list = format!("variables.{}.filter(o, has(o.{key}) && type(o.{key}) == list).map(o, o.{key})", self.variable);
        (self.named(key, true, &format!("{}[]", self.below(key))), list)
    }

    fn named(&self, key: &str, in_lists: bool, path: &str) -> Self {
        let upper = key.chars().take(1).flat_map(char::to_uppercase).chain(key.chars().skip(1)).collect::<String>();
        let variable = if self.path.is_empty() { key.to_owned() } else { format!("{}{upper}", self.variable) };
        Self { path: path.to_owned(), variable, in_lists }
    }
}

impl Policy {
    /// As YAML.
    #[must_use]
    pub fn yaml(&self) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let mut text = "variables:\n".to_owned();
        for (name, expression) in &self.variables {
            text.push_str(&format!("- name: {name}\n  expression: {}\n", quoted(expression)));
        }
        text.push_str("validations:\n");
        for Validation { expression, message } in &self.validations {
            text.push_str(&format!("- expression: {}\n  message: {}\n", quoted(expression), quoted(message)));
        }
        text
    }

    fn must_be(&mut self, path: &str, expression: String, words: &str) {
        let message = format!("{} must be {words}", message_path(path));
        self.validations.push(Validation { expression, message });
    }

    fn objects(&mut self, schema: &Value, place: &Objects) {
        let Some(properties) = schema["properties"].as_object() else { return };
        let keys: Vec<&str> = properties.keys().map(String::as_str).collect();
        let list = keys.iter().map(|key| format!("'{key}'")).collect::<Vec<_>>().join(", ");
        let path = message_path(&place.path);
        let message = format!("{path} has an unknown field; the fields there are {}", keys.join(", "));
        self.validations.push(Validation { expression: place.all(&format!("o.all(k, k in [{list}])")), message });
        for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let message = format!("{} is required", message_path(&place.below(key)));
            self.validations.push(Validation { expression: place.all(&format!("has(o.{key})")), message });
        }
        for (key, schema) in properties {
            self.field(schema, place, key);
        }
    }

    fn field(&mut self, schema: &Value, place: &Objects, key: &str) {
        let (check, words) = simple(schema, &format!("o.{key}"), 0);
        self.must_be(&place.below(key), place.all(&format!("(!has(o.{key}) || o.{key} == null || {check})")), &words);
        let (below, schema) = if schema["properties"].is_object() {
            (place.field(key), schema)
        } else if schema["items"]["properties"].is_object() {
            (place.elements(key), &schema["items"])
        } else {
            return;
        };
        let (objects, list) = below;
        self.variables.push((objects.variable.clone(), list));
        self.objects(schema, &objects);
    }
}

fn message_path(path: &str) -> String {
    if path.is_empty() { "opaque.parameters".to_owned() } else { format!("opaque.parameters.{path}") }
}

fn at_most(most: Option<u64>, value: &str) -> String {
    most.map(|most| format!(" && {value}.size() <= {most}")).unwrap_or_default()
}

/// CEL that holds for good values, and words that say which those are. What is in objects with known fields is not looked at.
fn simple(schema: &Value, value: &str, depth: usize) -> (String, String) {
    let inner = format!("x{depth}");
    if let Some(choices) = choices(schema) {
        let list = choices.iter().map(|c| format!("'{c}'")).collect::<Vec<_>>().join(", ");
        return (format!("(type({value}) == string && {value} in [{list}])"), format!("one of {}", choices.join(", ")));
    }
    if let Some(any) = schema["anyOf"].as_array() {
        let parts: Vec<_> = any.iter().filter(|s| s["type"] != "null").map(|s| simple(s, value, depth)).collect();
        let (checks, words): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        return (format!("({})", checks.join(" || ")), words.join(" or "));
    }
    match type_of(schema) {
        "boolean" => (format!("type({value}) == bool"), "true or false".to_owned()),
        "integer" => number(schema, value),
        "string" => text(schema, value),
        "array" => {
            let (check, words) = simple(&schema["items"], &inner, depth + 1);
            let most = schema["maxItems"].as_u64();
            let check = format!("(type({value}) == list{} && {value}.all({inner}, {check}))", at_most(most, value));
            (check, format!("a list{}, each {words}", most.map(|most| format!(" of at most {most}")).unwrap_or_default()))
        }
        _ if schema["properties"].is_object() => (format!("type({value}) == map"), "an object".to_owned()),
        _ => {
            let (check, words) = simple(&schema["additionalProperties"], &format!("{value}[{inner}]"), depth + 1);
            (format!("(type({value}) == map && {value}.all({inner}, {check}))"), format!("an object whose values are {words}"))
        }
    }
}

/// The texts that a field may have, if it has a choice.
fn choices(schema: &Value) -> Option<Vec<&str>> {
    let one = schema["oneOf"].as_array()?;
    Some(one.iter().filter_map(|part| part["const"].as_str()).collect())
}

fn type_of(schema: &Value) -> &str {
    let listed = schema["type"].as_array().into_iter().flatten().filter_map(Value::as_str).find(|t| *t != "null");
    schema["type"].as_str().or(listed).unwrap_or("object")
}

fn number(schema: &Value, value: &str) -> (String, String) {
    let (min, max) = (schema["minimum"].as_i64(), schema["maximum"].as_i64());
    let least = min.map(|min| format!(" && {value} >= {min}")).unwrap_or_default();
    let most = max.map(|max| format!(" && {value} <= {max}")).unwrap_or_default();
    let words = match (min, max) {
        (Some(min), Some(max)) => format!("a whole number from {min} to {max}"),
        _ => "a whole number".to_owned(),
    };
    (format!("(type({value}) == int{least}{most})"), words)
}

fn text(schema: &Value, value: &str) -> (String, String) {
    let mut check = format!("type({value}) == string");
    let mut words = "text".to_owned();
    if let Some(pattern) = schema["pattern"].as_str() {
        check.push_str(&format!(" && {value}.matches('{pattern}')"));
        words.push_str(&format!(" that matches {pattern}"));
    }
    if let (Some(min), Some(max)) = (schema["minLength"].as_u64(), schema["maxLength"].as_u64()) {
        check.push_str(&format!(" && {value}.size() >= {min} && {value}.size() <= {max}"));
        words.push_str(&format!(" of {min} to {max} characters"));
    }
    (format!("({check})"), words)
}
