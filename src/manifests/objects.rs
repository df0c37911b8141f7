//! The objects of a document, and the configuration in them.

use super::yaml::Node;

/// API group whose objects are looked at.
const GROUP: &str = "resource.k8s.io/";
/// Its versions that we know.
const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1beta2"];
/// Most of a name that is repeated, in characters.
const NAME_SHOWN: usize = 253;

/// An object, and where it is in its document.
#[derive(Debug, Clone, Copy)]
pub struct Object<'a> {
    /// The object.
    pub node: &'a Node,
    /// Its place in a `List`.
    pub item: Option<usize>,
}

/// Kinds that hold configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `DeviceClass`.
    Class,
    /// `ResourceClaim`.
    Claim,
    /// `ResourceClaimTemplate`.
    Template,
}

/// A request of a claim, or one of the alternatives of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    /// `request` or `request/subrequest`.
    pub(super) name: String,
    /// Its DeviceClass.
    pub(super) class: String,
}

/// The objects of a document: itself, or the items of a `List`.
#[must_use]
pub fn objects(document: &Node) -> Vec<Object<'_>> {
    let is_list = document.get("kind").and_then(Node::text).is_some_and(|kind| kind.ends_with("List"));
    match document.get("items") {
        Some(items) if is_list => items.elements().iter().enumerate().map(|(i, node)| Object { node, item: Some(i) }).collect(),
        _ => vec![Object { node: document, item: None }],
    }
}

impl<'a> Object<'a> {
    /// What it is; none for kinds without configuration.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        let version = self.string("apiVersion").strip_prefix(GROUP)?;
        if !VERSIONS.contains(&version) {
            return None;
        }
        match self.string("kind") {
            "DeviceClass" => Some(Kind::Class),
            "ResourceClaim" => Some(Kind::Claim),
            "ResourceClaimTemplate" => Some(Kind::Template),
            _ => None,
        }
    }

    /// Kind, namespace and name, for people.
    #[must_use]
    pub fn title(&self) -> String {
        let kind = match self.string("kind") {
            "" => "something without a kind",
            kind => kind,
        };
        let version = if self.kind().is_some() { String::new() } else { format!(" ({})", self.string("apiVersion")) };
        let namespace = self.metadata("namespace").map(|n| format!("{n}/")).unwrap_or_default();
        let name = self.metadata("name").or_else(|| self.metadata("generateName")).unwrap_or("without a name");
        let title = format!("{kind}{} {namespace}{name}", if version == " ()" { "" } else { &version });
        title.chars().take(NAME_SHOWN).collect()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata("name").unwrap_or_default()
    }

    fn metadata(&self, key: &str) -> Option<&str> {
        self.node.get("metadata").and_then(|m| m.get(key)).and_then(Node::text).filter(|text| !text.is_empty())
    }

    fn string(&self, key: &str) -> &str {
        self.node.get(key).and_then(Node::text).unwrap_or_default()
    }

    /// The list of configuration entries, and its path from the document's root.
    pub(super) fn config(&self) -> Option<(&'a [Node], String)> {
        let below: &[&str] = match self.kind()? {
            Kind::Class => &["spec", "config"],
            Kind::Claim => &["spec", "devices", "config"],
            Kind::Template => &["spec", "spec", "devices", "config"],
        };
        let list = below.iter().try_fold(self.node, |node, key| node.get(key))?;
        let item = self.item.map(|i| format!("items[{i}].")).unwrap_or_default();
        Some((list.elements(), format!("{item}{}", below.join("."))))
    }

    /// The requests of a claim or template; none of a class.
    pub(super) fn requests(&self) -> Vec<Request> {
        let spec = self.node.get("spec");
        let spec = if self.kind() == Some(Kind::Template) { spec.and_then(|s| s.get("spec")) } else { spec };
        let requests = spec.and_then(|s| s.get("devices")).and_then(|d| d.get("requests"));
        requests.map(Node::elements).unwrap_or_default().iter().flat_map(of_request).collect()
    }
}

fn of_request(request: &Node) -> Vec<Request> {
    let text = |node: &Node, key: &str| node.get(key).and_then(Node::text).unwrap_or_default().to_owned();
    let name = text(request, "name");
    let alternatives = request.get("firstAvailable").map(Node::elements).unwrap_or_default();
    if !alternatives.is_empty() {
        let sub = |node| Request { name: format!("{name}/{}", text(node, "name")), class: text(node, "deviceClassName") };
        return alternatives.iter().map(sub).collect();
    }
    // v1beta1 has the class in the request itself.
    let class =
        request.get("exactly").map_or_else(|| text(request, "deviceClassName"), |exactly| text(exactly, "deviceClassName"));
    vec![Request { name, class }]
}
