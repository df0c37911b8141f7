//! CRI-O's configuration: `/etc/crio/crio.conf`, then every file below `/etc/crio/crio.conf.d` in the order of names; what comes later
//! wins (`crio.conf.d(5)`).

use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::host::{Host, Unread};
use super::runtime::{Answer, Names, Settings, Validator};
use super::{Finding, Level, text};

/// Where CRI-O looks for CDI specs by default.
const CDI_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Most files that are read.
const FILES_MAX: usize = 64;
/// Name of what is looked at.
const SUBJECT: &str = "CRI-O's configuration";

/// As [`super::containerd::load`].
pub(super) fn load(host: &Host, path: &Path, runtime: Option<&str>) -> Option<(Settings, Vec<Finding>)> {
    let (mut findings, mut merged, mut shown) = (Vec::new(), Table::new(), Vec::new());
    let mut folder = path.as_os_str().to_owned();
    folder.push(".d");
    let folder = PathBuf::from(folder);
    let drop_ins = host.names(&folder).into_iter().map(|name| folder.join(name));
    let drop_ins = drop_ins.filter(|file| host.path(file).is_file()).take(FILES_MAX);
    for file in std::iter::once(path.to_owned()).chain(drop_ins) {
        match host.text(&file).map(|text| text::parse(&text)) {
            Ok(Ok(table)) => {
                text::merge(&mut merged, table);
                shown.push(file.display().to_string());
            }
            Err(Unread::Missing) => {}
            Ok(Err(why)) | Err(Unread::Bad(why)) => {
                let found = format!("{} can't be read: {why}", file.display());
                findings.push(Finding::new(Level::Error, SUBJECT, found, "CRI-O does not start with it: repair it"));
            }
        }
    }
    if shown.is_empty() && findings.is_empty() {
        return None;
    }
    findings.push(Finding::ok(SUBJECT, shown.join(", ")));
    Some((settings(&merged, runtime), findings))
}

pub(super) fn settings(merged: &Table, runtime: Option<&str>) -> Settings {
    let nri = text::table(merged, &["crio", "nri"]);
    let nri_at = |key: &str| nri.and_then(|nri| nri.get(key));
    let names = [
        "enable_nri",
        "nri_disable_connections",
        "nri_listen",
        "nri_plugin_registration_timeout",
        "nri_plugin_request_timeout",
        "plugin_registration_timeout",
        "plugin_request_timeout",
    ];
    let mut misplaced = text::elsewhere(merged, &["crio", "nri"], &names);
    // containerd's names have no effect here.
    let foreign = ["plugin_registration_timeout", "plugin_request_timeout"].into_iter().filter(|key| nri_at(key).is_some());
    misplaced.extend(foreign.map(|key| format!("{} {key} (its name here is nri_{key})", text::header(&["crio", "nri"]))));
    Settings {
        names: Names {
            runtime: "CRI-O",
            nri: text::header(&["crio", "nri"]),
            turn_on: "enable_nri = true",
            request_timeout: "nri_plugin_request_timeout",
            cdi: text::header(&["crio", "runtime"]),
            validator: text::header(&["crio", "nri", "default_validator"]),
        },
        nri: nri_at("enable_nri").and_then(Value::as_bool).map_or(on_by_default(runtime), Answer::Set),
        takes_connections: nri_at("nri_disable_connections").and_then(Value::as_bool) != Some(true),
        socket: nri_at("nri_listen").and_then(Value::as_str).map(str::to_owned),
        request_timeout: nri_at("nri_plugin_request_timeout").and_then(Value::as_str).map(str::to_owned),
        registration_timeout: nri_at("nri_plugin_registration_timeout").and_then(Value::as_str).map(str::to_owned),
        misplaced,
        // There is no switch.
        cdi: Answer::Default(true),
        cdi_dirs: text::at(merged, &["crio", "runtime", "cdi_spec_dirs"])
            .and_then(text::strings)
            .unwrap_or_else(|| CDI_DIRS.map(str::to_owned).to_vec()),
        validator: nri_at("default_validator").and_then(Value::as_table).map(validator).unwrap_or_default(),
    }
}

/// NRI is on by default since CRI-O 1.30. A runtime that is connected has it.
fn on_by_default(runtime: Option<&str>) -> Answer {
    if runtime.is_some() { Answer::Default(true) } else { Answer::Either("off up to CRI-O 1.29, on since 1.30") }
}

fn validator(table: &Table) -> Validator {
    let is = |key: &str| table.get(key).and_then(Value::as_bool).unwrap_or_default();
    let toleration = table.get("nri_validator_tolerate_missing_plugins_annotation").and_then(Value::as_str);
    Validator {
        is_on: is("nri_enable_default_validator"),
        rejects_hooks: is("nri_validator_reject_oci_hook_adjustment"),
        required: table.get("nri_validator_required_plugins").and_then(text::strings).unwrap_or_default(),
        toleration: toleration.unwrap_or_default().to_owned(),
    }
}
