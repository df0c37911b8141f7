//! What is wrong with the configuration in a set of documents: each entry, and classes with the claims that name them.

use std::collections::BTreeSet;

use serde::Serialize;

use super::configs::Config;
use super::objects::{Kind, Object, Request, objects};
use super::yaml::{Node, Position};
use crate::config::{FieldError, NetworkConfig};

/// Something wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Fault {
    /// The file, as it was named.
    pub file: String,
    /// Where.
    #[serde(flatten)]
    pub at: Position,
    /// Which object; empty for a file that can't be read as YAML.
    pub object: String,
    /// JSON path from the document's root; empty likewise.
    pub path: String,
    /// What is wrong, and what is allowed.
    pub message: String,
}

/// What was looked at, and what was found.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// How many objects may have configuration.
    pub objects: usize,
    /// How many entries of ours they have.
    pub configurations: usize,
    /// How many entries of other drivers.
    pub foreign: usize,
    /// Objects of other kinds.
    pub ignored: Vec<String>,
    /// By file and line.
    pub faults: Vec<Fault>,
}

/// Two checks, in this order: a field that is not carried out yet may be right or not.
const CHECKS: [fn(&NetworkConfig) -> Vec<FieldError>; 2] = [NetworkConfig::validate, NetworkConfig::not_supported_yet];

/// Checks all documents of all files together; `drivers` are names of ours.
#[must_use]
pub fn check(files: &[(String, Vec<Node>)], drivers: &[String]) -> Report {
    let mut report = Report::default();
    let mut holders = Vec::new();
    for (file, documents) in files {
        // An empty document (a `---` too many) is nothing.
        for object in documents.iter().filter(|d| !d.to_json().is_null()).flat_map(objects) {
            match object.kind() {
                Some(_) => holders.push(read(file, object)),
                None => report.ignored.push(object.title()),
            }
        }
    }
    report.objects = holders.len();
    let all = || holders.iter().flat_map(|holder| &holder.configs);
    report.configurations = all().filter(|c| drivers.iter().any(|d| d == c.driver)).count();
    report.foreign = all().count() - report.configurations;
    let faults: BTreeSet<Fault> = drivers.iter().flat_map(|driver| of_driver(&holders, driver)).collect();
    report.faults = faults.into_iter().collect();
    report
}

/// An object with its configuration.
struct Holder<'a> {
    object: Object<'a>,
    configs: Vec<Config<'a>>,
}

fn read<'a>(file: &'a str, object: Object<'a>) -> Holder<'a> {
    let (list, path) = object.config().unwrap_or_default();
    let configs = list.iter().enumerate().filter_map(|(i, entry)| Config::read(file, object, &path, i, entry)).collect();
    Holder { object, configs }
}

fn of_driver(holders: &[Holder<'_>], driver: &str) -> Vec<Fault> {
    let mut faults = Vec::new();
    for config in holders.iter().flat_map(|h| &h.configs).filter(|c| c.driver == driver) {
        for error in config.parsed.as_ref().err().into_iter().flatten() {
            faults.push(fault(config, error, ""));
        }
    }
    let mut used: Vec<(&str, Vec<FieldError>)> = Vec::new();
    for claim in holders.iter().filter(|h| h.object.kind() != Some(Kind::Class)) {
        let requests = claim.object.requests();
        faults.extend(of_loose(claim, &requests, driver));
        for request in requests {
            let class = holders.iter().find(|h| h.object.kind() == Some(Kind::Class) && h.object.name() == request.class);
            let (found, errors) = of_request(class, claim, &request, driver);
            faults.extend(found);
            used.extend(class.zip(errors).map(|(class, errors)| (class.object.name(), errors)));
        }
    }
    for class in holders.iter().filter(|h| h.object.kind() == Some(Kind::Class)) {
        faults.extend(of_class(class, driver, &used));
    }
    faults
}

/// Faults of entries that are for no request of the claim, which nothing would read.
fn of_loose(claim: &Holder<'_>, requests: &[Request], driver: &str) -> Vec<Fault> {
    let is_loose = |c: &&Config<'_>| c.driver == driver && !requests.iter().any(|request| c.applies_to(&request.name));
    let errors = |config| {
        let (_, errors) = combined(&[config]).unwrap_or_default();
        errors.into_iter().map(move |(error, _)| fault(config, &error, ""))
    };
    claim.configs.iter().filter(is_loose).flat_map(errors).collect()
}

/// Faults of what comes to apply to one request; none are looked for while an entry has a bad form. Also as they are, without a place.
fn of_request(
    class: Option<&Holder<'_>>,
    claim: &Holder<'_>,
    request: &Request,
    driver: &str,
) -> (Vec<Fault>, Option<Vec<FieldError>>) {
    let of_class = class.iter().flat_map(|class| &class.configs);
    let entries: Vec<&Config<'_>> =
        of_class.chain(&claim.configs).filter(|c| c.driver == driver).filter(|c| belongs(c, request)).collect();
    let note = match (class, request.class.as_str()) {
        (None, name) if !name.is_empty() => format!(" (without DeviceClass {name}, which is not in the files)"),
        _ => String::new(),
    };
    match combined(&entries) {
        None => (Vec::new(), None),
        Some((merged, _)) if entries.is_empty() || merged == NetworkConfig::default() => (Vec::new(), Some(Vec::new())),
        Some((_, errors)) => {
            let blamed = errors.iter().filter_map(|(error, check)| blame(&entries, error, *check, &note)).collect();
            (blamed, Some(errors.into_iter().map(|(error, _)| error).collect()))
        }
    }
}

/// The class's apply to every request that names it.
fn belongs(config: &Config<'_>, request: &Request) -> bool {
    config.object.kind() == Some(Kind::Class) || config.applies_to(&request.name)
}

type Found = (FieldError, fn(&NetworkConfig) -> Vec<FieldError>);

/// All entries on top of each other, and what is wrong with that; none while one of them has a bad form.
fn combined(entries: &[&Config<'_>]) -> Option<(NetworkConfig, Vec<Found>)> {
    let mut merged = NetworkConfig::default();
    for entry in entries {
        merged = merged.merged_with(entry.parsed.as_ref().ok()?.clone());
    }
    let found = CHECKS.into_iter().map(|check| check(&merged).into_iter().map(|error| (error, check)).collect::<Vec<_>>());
    let errors = found.into_iter().find(|errors| !errors.is_empty()).unwrap_or_default();
    Some((merged, errors))
}

/// The fault with the last entry that has it by itself, or else with the last one that has the field.
fn blame(entries: &[&Config<'_>], error: &FieldError, check: fn(&NetworkConfig) -> Vec<FieldError>, note: &str) -> Option<Fault> {
    let has = |entry: &&&Config<'_>| entry.parsed.as_ref().is_ok_and(|config| check(config).contains(error));
    if let Some(entry) = entries.iter().rev().find(has) {
        return Some(fault(entry, error, note));
    }
    let names_it = entries.iter().rev().find(|entry| entry.has(&error.path)).or(entries.last());
    names_it.map(|entry| fault(entry, error, " (class and claim combined)"))
}

/// Faults of a class by itself, but those that every claim among the files which names it mends.
fn of_class(class: &Holder<'_>, driver: &str, used: &[(&str, Vec<FieldError>)]) -> Vec<Fault> {
    let entries: Vec<&Config<'_>> = class.configs.iter().filter(|c| c.driver == driver).collect();
    let claims: Vec<&Vec<FieldError>> = used.iter().filter(|(name, _)| *name == class.object.name()).map(|(_, e)| e).collect();
    let mended = |error: &FieldError| !claims.is_empty() && claims.iter().all(|errors| !errors.contains(error));
    let errors = combined(&entries).map(|(_, errors)| errors).unwrap_or_default();
    errors.iter().filter(|(e, _)| !mended(e)).filter_map(|(error, check)| blame(&entries, error, *check, "")).collect()
}

fn fault(config: &Config<'_>, error: &FieldError, note: &str) -> Fault {
    Fault {
        file: config.file.to_owned(),
        at: config.place_of(&error.path),
        object: config.object.title(),
        path: config.path_of(&error.path),
        message: format!("{}{note}", error.message),
    }
}
