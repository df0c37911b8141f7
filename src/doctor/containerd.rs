//! containerd's configuration: `/etc/containerd/config.toml` and what it imports, in the formats 2 (containerd 1.7, and read by 2.x),
//! 3 (2.0) and 4 (2.4).
//!
//! How imports come together was read off `containerd config dump` of 2.1 and 2.4: in order, tables merged, everything else replaced.
//! Up to 2.0 an import replaces a whole plugin's table.

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::host::{Host, Unread};
use super::runtime::{Answer, Names, Settings, Validator};
use super::{Finding, Level, text};

const NRI: &str = "io.containerd.nri.v1.nri";
/// The CRI plugin, of which format 3 made several.
const CRI: &str = "io.containerd.grpc.v1.cri";
/// The one of them with CDI.
const CRI_RUNTIME: &str = "io.containerd.cri.v1.runtime";
/// Where containerd looks for CDI specs by default, if it does.
const CDI_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Most files that are read.
const FILES_MAX: usize = 64;
/// Name of what is looked at.
const SUBJECT: &str = "containerd's configuration";

/// Settings, and what is wrong with the files. None when there is no configuration of containerd. `runtime` is what the runtime calls
/// itself, where it is connected.
pub(super) fn load(host: &Host, path: &Path, runtime: Option<&str>) -> Option<(Settings, Vec<Finding>)> {
    let mut findings = Vec::new();
    let (files, merged) = read(host, path, &mut findings)?;
    let format = merged.get("version").and_then(Value::as_integer).unwrap_or(1);
    let shown: Vec<String> = files.iter().take(4).map(|file| file.display().to_string()).collect();
    let more = if files.len() > shown.len() { format!(" and {} more", files.len() - shown.len()) } else { String::new() };
    findings.push(Finding::ok(SUBJECT, format!("format {format}: {}{more}", shown.join(", "))));
    findings.extend(disabled(&merged));
    Some((settings(&merged, format, runtime), findings))
}

/// All files in the order in which containerd reads them, and their content put together.
fn read(host: &Host, path: &Path, findings: &mut Vec<Finding>) -> Option<(Vec<PathBuf>, Table)> {
    let (mut open, mut seen) = (VecDeque::from([path.to_owned()]), BTreeSet::new());
    let (mut files, mut merged, mut plugins) = (Vec::new(), Table::new(), BTreeSet::new());
    while let Some(file) = open.pop_front() {
        if !seen.insert(host.path(&file)) {
            continue;
        }
        if files.len() == FILES_MAX {
            let todo = "put them together into fewer files";
            findings.push(Finding::new(
                Level::Warning,
                SUBJECT,
                format!("more than {FILES_MAX} files; the others were not read"),
                todo,
            ));
            break;
        }
        let table = match host.text(&file).map(|text| text::parse(&text)) {
            Err(Unread::Missing) if file == path => return None,
            Ok(Ok(table)) => table,
            Ok(Err(why)) | Err(Unread::Bad(why)) => {
                let found = format!("{} can't be read: {why}", file.display());
                findings.push(Finding::new(Level::Error, SUBJECT, found, "containerd does not start with it: repair it"));
                continue;
            }
            Err(Unread::Missing) => {
                let found = format!("{} is imported and not there", file.display());
                findings.push(Finding::new(Level::Warning, SUBJECT, found, "remove the import, or make the file"));
                continue;
            }
        };
        let format = table.get("version").and_then(Value::as_integer).unwrap_or(1);
        for name in text::table(&table, &["plugins"]).into_iter().flat_map(|plugins| plugins.keys()) {
            if [NRI, CRI, CRI_RUNTIME].contains(&name.as_str()) && !plugins.insert(name.clone()) && format < 3 {
                let found = format!(
                    "{} has a part of {} that stands in another file as well",
                    file.display(),
                    text::header(&["plugins", name])
                );
                let todo = "containerd up to 2.0 takes only the last one; below they are read together";
                findings.push(Finding::new(Level::Warning, SUBJECT, found, todo));
            }
        }
        let imports = table.get("imports").and_then(text::strings).unwrap_or_default();
        open.extend(imports.iter().flat_map(|import| resolve(host, &file, import)).take(FILES_MAX));
        text::merge(&mut merged, table);
        files.push(file);
    }
    Some((files, merged))
}

/// Files that an import names: relative to the importing file, with `*` for parts of names.
fn resolve(host: &Host, file: &Path, import: &str) -> Vec<PathBuf> {
    let path = file.parent().unwrap_or(Path::new("/")).join(import);
    if import.contains('*') { host.matching(&path, FILES_MAX) } else { vec![path] }
}

/// Docker's packages bring a configuration that turns the whole CRI plugin off.
fn disabled(merged: &Table) -> Vec<Finding> {
    let disabled = merged.get("disabled_plugins").and_then(text::strings).unwrap_or_default();
    let known =
        [("cri", "the kubelet can't use this containerd"), (CRI, "the kubelet can't use this containerd"), (NRI, "NRI is off")];
    let hits = disabled.iter().filter_map(|name| known.iter().find(|(known, _)| known == name));
    let found = hits.map(|(name, means)| (format!("disabled_plugins has {name:?}: {means}"), "take it out, restart containerd"));
    found.map(|(found, todo)| Finding::new(Level::Error, SUBJECT, found, todo)).collect()
}

/// What is set, and what holds where nothing is.
pub(super) fn settings(merged: &Table, format: i64, runtime: Option<&str>) -> Settings {
    let nri = text::table(merged, &["plugins", NRI]);
    let nri_at = |key: &str| nri.and_then(|nri| nri.get(key));
    let new = text::table(merged, &["plugins", CRI_RUNTIME]);
    let old = text::table(merged, &["plugins", CRI]).filter(|_| format < 3);
    let cri_at = |key: &str| new.and_then(|cri| cri.get(key)).or_else(|| old.and_then(|cri| cri.get(key)));
    let by_default = on_by_default(format, runtime);
    let cri = if format < 3 { CRI } else { CRI_RUNTIME };
    let is_off = nri_at("disable").and_then(Value::as_bool);
    let mut misplaced = text::elsewhere(
        merged,
        &["plugins", NRI],
        &["plugin_request_timeout", "plugin_registration_timeout", "disable_connections", "default_validator"],
    );
    if format >= 3 {
        let old = ["enable_cdi", "cdi_spec_dirs"];
        misplaced.extend(text::elsewhere(merged, &["plugins", CRI_RUNTIME], &old));
    }
    Settings {
        names: Names {
            runtime: "containerd",
            nri: text::header(&["plugins", NRI]),
            turn_on: "disable = false",
            request_timeout: "plugin_request_timeout",
            cdi: text::header(&["plugins", cri]),
            validator: text::header(&["plugins", NRI, "default_validator"]),
        },
        nri: is_off.map_or(by_default, |off| Answer::Set(!off)),
        takes_connections: nri_at("disable_connections").and_then(Value::as_bool) != Some(true),
        socket: nri_at("socket_path").and_then(Value::as_str).map(str::to_owned),
        request_timeout: nri_at("plugin_request_timeout").and_then(Value::as_str).map(str::to_owned),
        registration_timeout: nri_at("plugin_registration_timeout").and_then(Value::as_str).map(str::to_owned),
        misplaced,
        cdi: cri_at("enable_cdi").and_then(Value::as_bool).map_or(by_default, Answer::Set),
        cdi_dirs: cri_at("cdi_spec_dirs").and_then(text::strings).unwrap_or_else(|| CDI_DIRS.map(str::to_owned).to_vec()),
        validator: nri_at("default_validator").and_then(Value::as_table).map(validator).unwrap_or_default(),
    }
}

/// NRI and CDI are on by default since containerd 2.0, which has format 3 and still reads format 2.
fn on_by_default(format: i64, runtime: Option<&str>) -> Answer {
    match runtime.and_then(|name| name.strip_prefix("containerd ")).map(|version| version.trim_start_matches('v')) {
        _ if format >= 3 => Answer::Default(true),
        Some(version) => Answer::Default(!version.starts_with("1.")),
        None => Answer::Either("off in containerd 1.7, on in 2.x"),
    }
}

fn validator(table: &Table) -> Validator {
    let is = |key: &str| table.get(key).and_then(Value::as_bool).unwrap_or_default();
    Validator {
        is_on: is("enable"),
        rejects_hooks: is("reject_oci_hook_adjustment"),
        required: table.get("required_plugins").and_then(text::strings).unwrap_or_default(),
        toleration: table.get("tolerate_missing_plugins_annotation").and_then(Value::as_str).unwrap_or_default().to_owned(),
    }
}
